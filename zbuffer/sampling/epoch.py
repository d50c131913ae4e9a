"""Draws that come to every row once: an order that no one has to keep."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np

from zbuffer.format.segments import Segments
from zbuffer.sampling.rowset import RowSet
from zbuffer.sampling.samplers import Draw

Array = np.ndarray[Any, Any]
#: Set in the keys of these random numbers, and in no step of a batch.
_ORDER = 1 << 63
#: Rows looked at together for whether they are still there: many were evicted, perhaps.
_LOOK_ROWS = 1024


class EpochSampler:
    """Every row once an epoch, in an order that reads few chunks at a time.

    Chunks are shuffled; as many as fit go into a pool, the rows of a pool are shuffled
    together, and pools follow one another. An epoch's rows are those of its first draw:
    rows appended later belong to the next epoch, and rows evicted before their turn are
    left out.

    Parameters
    ----------
    seed
        Of the order, which depends on the epoch's number and its rows beside it.
    pool_rows
        Most rows of a pool. A larger chunk is cut into several pools.
    drop_last
        For whoever makes batches: whether an epoch ends with its last full batch.
    rank, world_size
        Which of so many equal shares of each epoch to draw, if all ranks see the same
        rows when it begins. Shares differ by one row at most.

    Attributes
    ----------
    chunks
        Chunks of the pools that the last draw was of: worth keeping decoded, as all their
        rows are about to be drawn.

    Notes
    -----
    For one thread at a time. It holds the ids of one pool, and a few numbers a chunk.
    """

    replacement = False
    chunks: tuple[int, ...] = ()

    def __init__(
        self,
        seed: int = 0,
        pool_rows: int = 1 << 14,
        drop_last: bool = False,
        rank: int = 0,
        world_size: int = 1,
    ) -> None:
        self.drop_last = bool(drop_last)
        self._setting = _checked(seed=seed, pool_rows=pool_rows, rank=rank, world_size=world_size)
        self._epoch = 0
        self._n_drawn = 0
        self._order: _Order | None = None

    def draw(self, n: int, rows: RowSet, rng: np.random.Generator, /) -> Draw:
        """Return the next `n` ids of the epoch, fewer where it has no more.

        Once at the end of each epoch there are none; the next draw begins another.
        `rng` is not used: the order may not depend on how an epoch is cut into draws.
        """
        if self._order is None:
            self._order = _Order(self._setting, self._epoch, _state_of(rows))
        found: list[Array] = []
        chunks: dict[int, None] = {}
        missing = n
        while missing and self._n_drawn < self._order.n_rows:
            ids = self._order.rest_of_pool(self._n_drawn)[: max(missing, _LOOK_ROWS)]
            chunks.update(dict.fromkeys(self._order.chunks))
            there = np.flatnonzero(rows.contains(ids))[:missing]
            found.append(ids[there])
            missing -= len(there)
            self._n_drawn += len(ids) if missing else int(there[-1]) + 1
        self.chunks = tuple(chunks)
        if missing == n > 0:
            self._epoch, self._n_drawn, self._order = self._epoch + 1, 0, None
        return Draw(np.concatenate(found) if found else np.zeros(0, np.int64))

    def rows_left(self) -> int | None:
        """Return how many rows of the epoch are to come; None before its first draw.

        Those that will be evicted before their turn are counted.
        """
        return None if self._order is None else self._order.n_rows - self._n_drawn

    def state_dict(self) -> dict[str, Any]:
        """Return where the order stands: plain values that JSON can hold.

        They hold the epoch's rows as a range, and where ids have gaps as the number of
        rows of each segment.
        """
        rows = None if self._order is None else self._order.rows_state
        return {**self._setting, "epoch": self._epoch, "n_drawn": self._n_drawn, "rows": rows}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Go on where another sampler stood: the ids that would have followed, follow.

        Raises
        ------
        ValueError
            It is not the state of an epoch, or it is of another order.
        """
        for name in (*self._setting, "epoch", "n_drawn", "rows"):
            if name not in state:
                raise ValueError(f"this is no state of order='epoch': {name!r} is missing")
        for name, mine in self._setting.items():
            if state[name] != mine:
                raise ValueError(
                    f"the state is of an order with {name}={state[name]}, this one has {mine}"
                )
        epoch, rows = int(state["epoch"]), state["rows"]
        if rows is None:
            self._order = None
        elif self._order is None or epoch != self._epoch or rows != self._order.rows_state:
            self._order = _Order(self._setting, epoch, rows)
        self._epoch, self._n_drawn = epoch, int(state["n_drawn"])


class _Order:
    """The order of one epoch, as one rank sees it.

    Attributes
    ----------
    n_rows
        Rows of this rank.
    rows_state
        The rows of the epoch, as plain values.
    chunks
        Those of the pool that was looked at last.
    """

    def __init__(self, setting: Mapping[str, int], epoch: int, rows_state: dict[str, Any]) -> None:
        self._seed, self._epoch = setting["seed"], epoch
        self._rank, self._world_size = setting["rank"], setting["world_size"]
        self.rows_state = rows_state
        self._rows = _rows_of(rows_state)
        self.n_rows = len(range(self._rank, len(self._rows), self._world_size))
        chunk, first, n_rows = _pieces(self._rows, setting["pool_rows"])
        random = self._random(0)
        turn = random.permutation(chunk[-1] + 1)[chunk]
        # Pieces of one chunk stay neighbours, so that it is read in one go.
        order = np.lexsort((random.permutation(len(chunk)), turn))
        self._first, self._n_rows = first[order], n_rows[order]
        self._edges = _pack(self._n_rows, setting["pool_rows"])
        self._starts = np.append(0, np.cumsum(self._n_rows))[self._edges]
        self._pool, self._ids = -1, np.zeros(0, np.int64)
        self.chunks: tuple[int, ...] = ()

    def rest_of_pool(self, n_drawn: int) -> Array:
        """Return the ids that follow after so many of this rank, to the end of their pool."""
        index = self._rank + n_drawn * self._world_size
        pool = int(np.searchsorted(self._starts, index, "right")) - 1
        if pool != self._pool:
            self._pool, self._ids = pool, self._shuffled(pool)
            self.chunks = tuple(sorted(set((self._ids // self._rows.chunk_rows).tolist())))
        rest: Array = self._ids[index - self._starts[pool] :: self._world_size]
        return rest

    def _shuffled(self, pool: int) -> Array:
        pieces = slice(self._edges[pool], self._edges[pool + 1])
        first, n_rows = self._first[pieces], self._n_rows[pieces]
        before = np.cumsum(n_rows) - n_rows
        positions = np.repeat(first - before, n_rows) + np.arange(n_rows.sum())
        return self._random(1 + pool).permutation(self._rows.ids(positions))

    def _random(self, purpose: int) -> np.random.Generator:
        """Return the random numbers of the chunks' order, 0, or of a pool, 1 + its number."""
        key = np.array([self._seed, _ORDER | self._epoch << 32 | purpose], np.uint64)
        return np.random.Generator(np.random.Philox(key=key))


def _checked(**setting: int) -> dict[str, int]:
    """Return the arguments of a sampler as ints that JSON can hold."""
    for name, value in setting.items():
        least = 1 if name in ("pool_rows", "world_size") else 0
        whole = isinstance(value, int | np.integer) and not isinstance(value, bool)
        if not whole or value < least:
            raise ValueError(f"{name} must be a whole number from {least} on, got {value!r}")
    if setting["seed"] >= 1 << 64:
        raise ValueError(f"seed must be below 2 ** 64, got {setting['seed']}")
    if setting["rank"] >= setting["world_size"]:
        raise ValueError(
            f"rank must be below world_size={setting['world_size']}, got {setting['rank']}"
        )
    return {name: int(value) for name, value in setting.items()}


def _pieces(rows: RowSet, most: int) -> tuple[Array, Array, Array]:
    """Cut the chunks into pieces of `most` rows at most, in the order of ids.

    Returns the number of each piece's chunk, its first position and its rows.
    """
    ends = rows.ids(np.array([0, len(rows) - 1]))
    low, high = (ends // rows.chunk_rows).tolist()
    bounds = rows.count_below(np.arange(low, high + 2) * rows.chunk_rows)
    n_rows = np.diff(bounds)
    filled = np.flatnonzero(n_rows)
    first, n_rows = bounds[filled], n_rows[filled]
    n_pieces = -(-n_rows // most)
    chunk = np.repeat(np.arange(len(filled)), n_pieces)
    piece = np.arange(len(chunk)) - (np.cumsum(n_pieces) - n_pieces)[chunk]
    begin = piece * n_rows[chunk] // n_pieces[chunk]
    end = (piece + 1) * n_rows[chunk] // n_pieces[chunk]
    return chunk, first[chunk] + begin, end - begin


def _pack(n_rows: Array, most: int) -> Array:
    """Return where pools begin among pieces in their order, and where the last ends."""
    ends = np.cumsum(n_rows)
    reach = np.searchsorted(ends, ends - n_rows + most, "right").tolist()
    edges = [0]
    while edges[-1] < len(n_rows):
        edges.append(reach[edges[-1]])
    return np.array(edges)


def _state_of(rows: RowSet) -> dict[str, Any]:
    """Return which rows there are as plain values; of lanes an order knows nothing."""
    state: dict[str, Any] = {
        "first": int(rows.first),
        "stop": int(rows.stop),
        "chunk_rows": int(rows.chunk_rows),
    }
    table = rows.segments
    if table is not None:
        state["segments"] = {
            "segment_rows": int(table.segment_rows),
            "first": int(table.first),
            "used": table.used.tolist(),
        }
    return state


def _rows_of(state: Mapping[str, Any]) -> RowSet:
    segments = None
    if "segments" in state:
        table = state["segments"]
        used = np.array(table["used"], np.int64)
        segments = Segments.of(table["segment_rows"], table["first"], np.zeros_like(used), used)
    return RowSet(state["first"], state["stop"], state["chunk_rows"], segments=segments)
