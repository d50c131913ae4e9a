"""The stream of batches that a training loop takes."""

from __future__ import annotations

import os
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass
from types import TracebackType
from typing import Any, Self

import numpy as np

from zbuffer.errors import ClosedError, RowNotFoundError, ZBufferError
from zbuffer.loading.batch import Assembler
from zbuffer.loading.memory import Recycler
from zbuffer.loading.prefetch import Prefetcher
from zbuffer.loading.upload import Ready, Transform, make_uploader
from zbuffer.reading.chunks import View
from zbuffer.sampling.samplers import Sampler, generator

#: Rows may be evicted between draw and gather; drawing again finds live ones. A writer
#: that turns a small buffer over faster than a batch is read can win that race often.
_PATIENCE_S = 30.0


@dataclass(frozen=True, slots=True)
class LoaderOptions:
    """How batches are made and handed out; see :meth:`zbuffer.Buffer.loader`."""

    batch_size: int = 256
    device: Any = None
    prefetch: int = 2
    seed: int = 0
    transform: Transform | None = None

    def __post_init__(self) -> None:
        for name, least in (("batch_size", 1), ("prefetch", 0), ("seed", 0)):
            value = getattr(self, name)
            whole = isinstance(value, int | np.integer) and not isinstance(value, bool)
            if not whole or value < least:
                raise ValueError(f"{name} must be a whole number from {least} on, got {value!r}")


@dataclass(frozen=True, slots=True)
class LoaderStatistics:
    """What a loader has done so far.

    Attributes
    ----------
    batches
        Batches handed out.
    wait_s
        Seconds that ``next()`` waited for a batch.
    make_s
        Seconds spent on making batches, on the prefetch thread if there is one.
    """

    batches: int
    wait_s: float
    make_s: float


class Loader:
    """An endless iterator of batches; make it with :meth:`zbuffer.Buffer.loader`.

    Batch ``i`` depends on the seed, on ``i`` and on the rows there are when it is
    drawn, and on nothing else.

    Notes
    -----
    One thread takes batches. :meth:`close`, or leaving the ``with`` block, ends
    the prefetch thread.
    """

    def __init__(
        self,
        view: Callable[[], View],
        assembler: Assembler,
        sampler: Sampler,
        options: LoaderOptions,
        memory: Recycler,
        *,
        rng: np.random.Generator | None = None,
    ) -> None:
        self._view = view
        self._assembler = assembler
        self._sampler = sampler
        # A slot for each batch made ahead, one for the batch being made, and one for
        # the batch whose copies may still run.
        self._uploader = make_uploader(options.device, options.prefetch + 2, memory)
        self._batch_size = int(options.batch_size)
        self._seed = int(options.seed)
        self._transform = options.transform
        self._rng = rng
        self._pid = os.getpid()
        self._step = 0
        self._closed = False
        self._lock = threading.Lock()
        self._batches, self._wait_s, self._make_s = 0, 0.0, 0.0
        self._prefetcher = Prefetcher(self._make, options.prefetch) if options.prefetch else None

    def __iter__(self) -> Self:
        return self

    def __next__(self) -> Any:
        """Return the next batch.

        Raises
        ------
        SampleError
            The buffer is empty, or no row has the window.
        ClosedError
            The loader, or its buffer, is closed.
        """
        if self._closed:
            raise ClosedError("the loader is closed")
        if os.getpid() != self._pid:
            raise ZBufferError("a loader stays behind in a fork: make one in the child")
        if self._prefetcher is None:
            start = time.perf_counter()
            ready = self._make()
            waited = time.perf_counter() - start
        else:
            ready, waited = self._prefetcher.take()
        ready.receive()
        with self._lock:
            self._batches += 1
            self._wait_s += waited
        return ready.batch

    def statistics(self) -> LoaderStatistics:
        """Return counts and times so far."""
        with self._lock:
            return LoaderStatistics(self._batches, self._wait_s, self._make_s)

    @property
    def closed(self) -> bool:
        """Whether the loader is closed."""
        return self._closed

    def close(self) -> None:
        """End the prefetch thread; calling it again does nothing."""
        self._closed = True
        if self._prefetcher is not None and os.getpid() == self._pid:
            self._prefetcher.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self.close()

    def _make(self) -> Ready:
        start = time.perf_counter()
        rng = self._rng or generator(self._seed, self._step)
        self._uploader.begin()
        while True:
            view = self._view()
            try:
                windows, weights = self._assembler.draw(self._batch_size, view, self._sampler, rng)
                assembled = self._assembler.assemble(
                    windows, view, self._uploader.allocate, weights
                )
                break
            except RowNotFoundError:
                late = time.perf_counter() - start > _PATIENCE_S
                if late or self._view().first == view.first:
                    raise
        ready = self._uploader.upload(assembled, self._transform)
        self._step += 1
        with self._lock:
            self._make_s += time.perf_counter() - start
        return ready
