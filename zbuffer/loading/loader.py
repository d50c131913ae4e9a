"""The stream of batches that a training loop takes."""

from __future__ import annotations

import os
import threading
import time
from dataclasses import dataclass
from types import TracebackType
from typing import Any, Self

import numpy as np

from zbuffer.errors import ClosedError, ZBufferError
from zbuffer.loading.maker import BatchMaker
from zbuffer.loading.prefetch import Prefetcher
from zbuffer.loading.upload import Ready
from zbuffer.sampling.samplers import RandomStream


@dataclass(frozen=True, slots=True)
class LoaderOptions:
    """How batches are made and handed out; see :meth:`zbuffer.Buffer.loader`."""

    batch_size: int = 256
    prefetch: int = 2
    seed: int = 0

    def __post_init__(self) -> None:
        for name, least in (("batch_size", 1), ("prefetch", 0), ("seed", 0)):
            check_count(name, getattr(self, name), least)


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

    def __init__(self, maker: BatchMaker, options: LoaderOptions) -> None:
        self._maker = maker
        self._batch_size = int(options.batch_size)
        self._random = RandomStream(int(options.seed))
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
        ready = self._maker.make(self._batch_size, self._random.at(self._step))
        self._step += 1
        with self._lock:
            self._make_s += time.perf_counter() - start
        return ready


def check_count(name: str, value: Any, least: int) -> int:
    """Return a whole number that is at least so large.

    Raises
    ------
    ValueError
        It is something else.
    """
    whole = isinstance(value, int | np.integer) and not isinstance(value, bool)
    if not whole or value < least:
        raise ValueError(f"{name} must be a whole number from {least} on, got {value!r}")
    return int(value)
