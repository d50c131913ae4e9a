"""One batch: drawn, decoded, and on its way to the device."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any, Protocol

import numpy as np

from zbuffer.errors import RowNotFoundError
from zbuffer.loading.batch import Allocate, Array, Assembled
from zbuffer.loading.drawing import Drawn
from zbuffer.loading.upload import Ready, Transform, Uploader
from zbuffer.reading.chunks import View
from zbuffer.sampling.samplers import Sampler

#: Rows may be evicted between draw and gather; drawing again finds live ones. A writer
#: that turns a small buffer over faster than a batch is read can win that race often.
_PATIENCE_S = 30.0


@dataclass(frozen=True, slots=True)
class Made:
    """A batch on its way, and what making it took.

    Attributes
    ----------
    ids
        int64: the drawn rows.
    n_blocks
        Blosc2 blocks that were decoded for it.
    source
        int64: which buffer each of them is of, where there are several.
    """

    ready: Ready
    ids: Array
    n_blocks: int
    source: Array | None = None


class Maker(Protocol):
    """Makes batches, one after the other."""

    sampler: Any

    def make(self, batch_size: int, rng: np.random.Generator) -> Made | None:
        """Return a batch; None at the end of an epoch."""
        ...

    def let_go(self) -> None:
        """Drop what is kept for further batches."""
        ...


class Assembling(Protocol):
    """Draws samples of one kind and fills batches with them."""

    def draw(
        self, n: int, view: View, sampler: Sampler, rng: np.random.Generator, /
    ) -> Drawn[Any] | None:
        """Draw `n` samples; None at the end of an epoch."""
        ...

    def assemble(self, drawn: Drawn[Any], view: View, allocate: Allocate, /) -> Assembled:
        """Decode them into arrays."""
        ...

    def hold(self, view: View, chunks: Sequence[int], /) -> int:
        """Keep chunks decoded that all samples are about to come from; returns blocks."""
        ...


class BatchMaker:
    """Makes batches of one kind of sample.

    Notes
    -----
    As many threads may call :meth:`make` as the sampler and the uploader allow.
    """

    def __init__(
        self,
        view: Callable[[], View],
        assembler: Assembling,
        sampler: Sampler,
        uploader: Uploader,
        transform: Transform | None = None,
    ) -> None:
        self._view = view
        self._assembler = assembler
        self.sampler: Any = sampler
        self._uploader = uploader
        self._transform = transform
        self._held: tuple[int, ...] = ()

    def make(self, batch_size: int, rng: np.random.Generator) -> Made | None:
        """Draw rows and gather them; None at the end of an epoch.

        Raises
        ------
        SampleError
            The buffer is empty, or no row makes a sample.
        ClosedError
            The buffer is closed.
        """
        self._uploader.begin()
        part = self.make_part(batch_size, rng, self._uploader.allocate)
        if part is None:
            return None
        ready = self._uploader.upload(part, self._transform)
        return Made(ready, part.arrays["indices"], part.n_blocks)

    def make_part(self, n: int, rng: np.random.Generator, allocate: Allocate) -> Assembled | None:
        """Return `n` samples as arrays from `allocate`; None at the end of an epoch."""
        start = time.monotonic()
        sampler = self.sampler
        state = None if getattr(sampler, "replacement", True) else sampler.state_dict()
        while True:
            view = self._view()
            try:
                drawn = self._assembler.draw(n, view, sampler, rng)
                n_blocks = self._hold(view)
                if drawn is None:
                    return None
                part = self._assembler.assemble(drawn, view, allocate)
                return replace(part, n_blocks=part.n_blocks + n_blocks)
            except RowNotFoundError:
                late = time.monotonic() - start > _PATIENCE_S
                if late or self._view().first == view.first:
                    raise
                if state is not None:
                    # The rows of this batch that are still there have not been drawn yet.
                    sampler.load_state_dict(state)

    def _hold(self, view: View) -> int:
        """Keep decoded what an order goes through row by row."""
        chunks = getattr(self.sampler, "chunks", ())
        if chunks == self._held:
            return 0
        self._held = chunks
        return self._assembler.hold(view, chunks)

    def let_go(self) -> None:
        """Drop what is kept decoded; no batch follows."""
        if self._held:
            self._held = ()
            self._assembler.hold(self._view(), ())
