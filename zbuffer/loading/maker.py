"""One batch: drawn, decoded, and on its way to the device."""

from __future__ import annotations

import time
from collections.abc import Callable

import numpy as np

from zbuffer.errors import RowNotFoundError
from zbuffer.loading.batch import Assembler
from zbuffer.loading.upload import Ready, Transform, Uploader
from zbuffer.reading.chunks import View
from zbuffer.sampling.samplers import Sampler

#: Rows may be evicted between draw and gather; drawing again finds live ones. A writer
#: that turns a small buffer over faster than a batch is read can win that race often.
_PATIENCE_S = 30.0


class BatchMaker:
    """Makes batches of one kind of window.

    Notes
    -----
    As many threads may call :meth:`make` as the uploader allows.
    """

    def __init__(
        self,
        view: Callable[[], View],
        assembler: Assembler,
        sampler: Sampler,
        uploader: Uploader,
        transform: Transform | None = None,
    ) -> None:
        self._view = view
        self._assembler = assembler
        self._sampler = sampler
        self._uploader = uploader
        self._transform = transform

    def make(self, batch_size: int, rng: np.random.Generator) -> Ready:
        """Draw rows and gather them.

        Raises
        ------
        SampleError
            The buffer is empty, or no row has the window.
        ClosedError
            The buffer is closed.
        """
        start = time.monotonic()
        self._uploader.begin()
        while True:
            view = self._view()
            try:
                windows, weights = self._assembler.draw(batch_size, view, self._sampler, rng)
                assembled = self._assembler.assemble(
                    windows, view, self._uploader.allocate, weights
                )
                return self._uploader.upload(assembled, self._transform)
            except RowNotFoundError:
                late = time.monotonic() - start > _PATIENCE_S
                if late or self._view().first == view.first:
                    raise
