"""The stream of batches that a training loop takes."""

from __future__ import annotations

import contextlib
import os
import threading
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from types import TracebackType
from typing import Any, Self

import numpy as np

from zbuffer.errors import ClosedError, ZBufferError
from zbuffer.loading.maker import Made, Maker
from zbuffer.loading.pace import PaceKeeper
from zbuffer.loading.prefetch import Prefetcher
from zbuffer.sampling.blocks import effective_sample_size
from zbuffer.sampling.rowset import RowSet
from zbuffer.sampling.samplers import RandomStream

Array = np.ndarray[Any, Any]


@dataclass(frozen=True, slots=True)
class LoaderOptions:
    """How batches are made and handed out; see :meth:`zbuffer.Buffer.loader`."""

    batch_size: int = 256
    prefetch: int = 2
    seed: int = 0
    rank: int = 0
    world_size: int = 1

    def __post_init__(self) -> None:
        least = {"batch_size": 1, "prefetch": 0, "seed": 0, "rank": 0, "world_size": 1}
        for name, at_least in least.items():
            check_count(name, getattr(self, name), at_least)
        if self.rank >= self.world_size:
            raise ValueError(f"rank must be below world_size={self.world_size}, got {self.rank}")


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
    blocks_per_batch
        Mean number of Blosc2 blocks decoded for a batch.
    distinct_chunks
        Chunks that the rows of the last batch came from.
    effective_sample_size
        Of the last batch, if the rows of a block count as one where there are many of
        them: Kish's, the square of the sum over the sum of the squares of the rows per
        block.
    uniform_sample_size
        What that is on average if as many rows are drawn uniformly.
    paced_s
        Seconds that the loader waited for rows to be collected; part of ``make_s``.
    """

    batches: int
    wait_s: float
    make_s: float
    blocks_per_batch: float = 0.0
    distinct_chunks: int = 0
    effective_sample_size: float = 0.0
    uniform_sample_size: float = 0.0
    paced_s: float = 0.0


@dataclass(frozen=True, slots=True)
class _Step:
    """What a batch leaves behind: where the loader stands after it.

    Attributes
    ----------
    made
        None at the end of an epoch.
    """

    made: Made | None
    state: dict[str, Any]


class Loader:
    """An iterator of batches; make it with :meth:`zbuffer.Buffer.loader`.

    Batch ``i`` depends on the seed, on ``i``, on the rows there are when it is
    drawn, on the priorities if they are used, and on nothing else. It is endless, but
    with ``order="epoch"``: there, iterating over it is an epoch, and iterating again the
    next one.

    Notes
    -----
    One thread takes batches. :meth:`close`, or leaving the ``with`` block, ends
    the prefetch thread.
    """

    def __init__(
        self,
        maker: Maker,
        options: LoaderOptions,
        rows: Callable[[], list[RowSet]],
        keeper: PaceKeeper | None = None,
    ) -> None:
        self._maker = maker
        self._options = options
        self._rows = rows
        self._keeper = keeper
        self._random = RandomStream(int(options.seed), options.rank)
        self._pid = os.getpid()
        self._closed = self._stopping = False
        self._lock = threading.Lock()
        self._batches, self._n_blocks, self._wait_s, self._make_s = 0, 0, 0.0, 0.0
        # Rows of the last batch, and which buffers they are of.
        self._last: tuple[Array, Array | None] | None = None
        self._step, self._at_end = 0, False
        self._state = self._state_now()
        self._begin_at(self._state)

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
            step = self._make()
            waited = time.perf_counter() - start
        else:
            step, waited = self._prefetcher.take()
        self._state = step.state
        with self._lock:
            self._wait_s += waited
        if step.made is None:
            raise StopIteration
        step.made.ready.receive()
        with self._lock:
            self._batches += 1
            self._n_blocks += step.made.n_blocks
            self._last = (step.made.ids, step.made.source)
        return step.made.ready.batch

    def state_dict(self) -> dict[str, Any]:
        """Return where the loader stands: plain values that JSON can hold.

        It speaks of the batches that were handed out; those made ahead do not count.
        """
        return dict(self._state)

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Go on where another loader stood: the batches that would have followed, follow.

        The loader must have been made with the same arguments, over the same rows. What
        it has made ahead is dropped.

        Raises
        ------
        ValueError
            The state is of a loader with another order or seed.
        """
        self._check_state(state)
        self._stopping = True
        if self._keeper is not None:
            self._keeper.notify()
        if self._prefetcher is not None:
            self._prefetcher.close()
        self._stopping = False
        self._state = dict(state)
        self._begin_at(self._state)

    def statistics(self) -> LoaderStatistics:
        """Return counts and times so far."""
        with self._lock:
            n, last = self._batches, self._last
            times = (self._wait_s, self._make_s)
            blocks = self._n_blocks / n if n else 0.0
        spread = (0, 0.0, 0.0) if last is None else _spread(*last, self._rows())
        paced = self._keeper.statistics().waited_s if self._keeper else 0.0
        chunks, effective, uniform = spread
        return LoaderStatistics(n, *times, blocks, chunks, effective, uniform, paced)

    def may_append(self, n: int = 1) -> bool:
        """Whether `n` rows may be appended without collecting running ahead of learning.

        Always True without ``samples_per_insert``.
        """
        return self._keeper is None or self._keeper.may_append(n)

    def wait_to_append(self, n: int = 1, *, timeout_s: float | None = None) -> bool:
        """Wait until `n` rows may be appended; False where the time is up before.

        For the thread or the process that collects, while another one takes batches.

        Raises
        ------
        ClosedError
            The loader was closed.
        """
        return self._keeper is None or self._keeper.wait_to_append(n, timeout_s=timeout_s)

    @property
    def closed(self) -> bool:
        """Whether the loader is closed."""
        return self._closed

    def close(self) -> None:
        """End the prefetch thread; calling it again does nothing."""
        self._closed = True
        if self._keeper is not None:
            self._keeper.close()
        if self._prefetcher is not None and os.getpid() == self._pid:
            self._prefetcher.close()
        with contextlib.suppress(ClosedError):
            self._maker.let_go()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self.close()

    def _begin_at(self, state: Mapping[str, Any]) -> None:
        self._step = int(state["step"])
        self._at_end = bool(state["at_end"])
        sampler: Any = self._maker.sampler
        if state.get("sampler") is not None:
            sampler.load_state_dict(state["sampler"])
        if self._keeper is not None and state.get("pace") is not None:
            self._keeper.load_state_dict(state["pace"])
        depth = self._options.prefetch
        self._prefetcher = Prefetcher(self._make, depth) if depth else None

    def _make(self) -> _Step:
        start = time.perf_counter()
        made = None if self._at_end else self._make_batch()
        self._at_end = made is not None and len(made.ids) < self._options.batch_size
        if self._at_end and getattr(self._maker.sampler, "drop_last", False):
            made, self._at_end = None, False
        if made is not None:
            self._step += 1
        with self._lock:
            self._make_s += time.perf_counter() - start
        return _Step(made, self._state_now())

    def _make_batch(self) -> Made | None:
        n = int(self._options.batch_size)
        if self._keeper is not None:
            self._keeper.wait(n, lambda: self._closed or self._stopping)
        begin = getattr(self._maker.sampler, "begin", None)
        if begin is not None:
            begin(self._step)
        made = self._maker.make(n, self._random.at(self._step))
        if self._keeper is not None and made is not None:
            self._keeper.took(len(made.ids))
        return made

    def _state_now(self) -> dict[str, Any]:
        sampler: Any = self._maker.sampler
        state: dict[str, Any] = {
            "step": self._step,
            "at_end": self._at_end,
            "seed": int(self._options.seed),
            "rank": self._options.rank,
        }
        if hasattr(sampler, "state_dict"):
            state["sampler"] = sampler.state_dict()
        if self._keeper is not None:
            state["pace"] = self._keeper.state_dict()
        return state

    def _check_state(self, state: Mapping[str, Any]) -> None:
        for name in ("step", "at_end"):
            if name not in state:
                raise ValueError(f"this is no state of a loader: {name!r} is missing")
        for name in ("seed", "rank"):
            mine = int(getattr(self._options, name))
            if state.get(name, mine) != mine:
                raise ValueError(
                    f"the state is of a loader with {name}={state[name]}, this one has {mine}"
                )
        if hasattr(self._maker.sampler, "state_dict") != ("sampler" in state):
            raise ValueError("the state is of a loader with another order")


def _spread(drawn: Array, source: Array | None, rows: list[RowSet]) -> tuple[int, float, float]:
    """Return distinct chunks and effective sample size of a batch, and of a uniform one."""
    ids = drawn.reshape(-1)
    source = np.zeros(len(drawn), np.int64) if source is None else source
    source = np.repeat(source, len(ids) // max(len(source), 1))
    chunk_rows = np.array([r.chunk_rows for r in rows])[source]
    block_rows = np.array([r.block_rows for r in rows])[source]
    apart = source << 40
    n, n_rows = len(ids), max(sum(len(r) for r in rows), 1)
    share = min(max(r.block_rows for r in rows) / n_rows, 1.0)
    return (
        len(set((apart + ids // chunk_rows).tolist())),
        effective_sample_size(apart + ids // block_rows, 1),
        n / (1 + (n - 1) * share),
    )


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
