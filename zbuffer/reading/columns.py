"""Small fields, decoded once and kept: what windows and n-step sums are computed from."""

from __future__ import annotations

import threading
from typing import Any, NamedTuple

import numpy as np

from zbuffer.format.commit import Commit
from zbuffer.format.geometry import SMALL_NBYTES
from zbuffer.reading.chunks import FieldChunks, View
from zbuffer.schema import STEP_TYPE

Array = np.ndarray[Any, Any]
#: Rows that are decoded at a time when a column is filled.
_SLAB_ROWS = 1 << 18


class _Kept(NamedTuple):
    """Rows ``[base, stop)``; one value, so that a reader without the lock sees one moment.

    With segments, rows from the oldest page on are still being filled in: ``of`` is the
    view that they are of.
    """

    values: Array
    base: int
    stop: int
    of: View | None = None


class Column:
    """The live rows of one field as a plain array that grows with them.

    Notes
    -----
    Any thread may call the methods. An array that was returned stays valid: rows
    never change, and a grown or trimmed column is a new array.
    """

    def __init__(
        self, name: str, chunks: FieldChunks, dtype: Any, shape: tuple[int, ...], chunk_rows: int
    ) -> None:
        self._name = name
        self._chunks = chunks
        self._chunk_rows = chunk_rows
        self._lock = threading.Lock()
        self._kept = _Kept(np.empty((0, *shape), dtype), 0, 0)

    def upto(self, view: View, n_threads: int) -> tuple[Array, int]:
        """Return an array and the id of its item 0; items of the view are filled."""
        kept = self._kept
        if view.segments is not None:
            if kept.of is not view:
                with self._lock:
                    kept = self._fill_with_gaps(view, n_threads)
        elif kept.stop < view.stop or kept.base > view.first:
            with self._lock:
                kept = self._fill(view, view.stop, n_threads)
        return kept.values, kept.base

    def renew_lock(self) -> None:
        """Replace the lock, in a forked child."""
        self._lock = threading.Lock()

    def _fill(self, view: View, stop: int, n_threads: int) -> _Kept:
        """Decode what is missing of the rows before `stop`; there is room for all rows."""
        values, base, have, _ = self._kept
        if base > view.first or have < view.first:
            # Begin anew, in a new array: another thread may be reading this one.
            base = have = view.first
            values = values[:0]
        if view.stop - base > len(values):
            live = view.stop - view.first
            grown = np.empty((live + live // 2 + 1024, *values.shape[1:]), values.dtype)
            start = max(view.first, base)
            grown[: have - start] = values[start - base : have - base]
            values, base = grown, start
        while have < stop:
            up_to = min(stop, have + _SLAB_ROWS)
            target = values[have - base : up_to - base]
            self._chunks.gather(view, np.arange(have, up_to), target, n_threads)
            have = up_to
        self._kept = _Kept(values, base, have)
        return self._kept

    def _fill_with_gaps(self, view: View, n_threads: int) -> _Kept:
        """Decode what is sealed, then copy the pages, whose rows come in any order.

        What is copied again is the same, bit by bit, for the rows that a reader of the
        array knows of; and a copy that began before a row was whole is never the last.
        """
        sealed = view.settled_stop(self._chunk_rows)
        values, base, have, _ = self._fill(view, sealed, n_threads)
        for chunk, page in view.pages.items():
            start = chunk * self._chunk_rows
            stop = min(start + self._chunk_rows, view.stop)
            if start >= sealed and stop > start:
                values[start - base : stop - base] = page.columns[self._name][: stop - start]
        self._kept = _Kept(values, base, have, view)
        return self._kept


class Columns:
    """Which small fields are kept, under a byte budget.

    The fields that windows need come first, then the smallest.
    """

    def __init__(self, commit: Commit, chunks: dict[str, FieldChunks], budget_nbytes: int) -> None:
        self._budget_nbytes = budget_nbytes
        self._columns: dict[str, Column] = {}
        self._width: dict[str, int] = {}
        needed = ("reward", "terminated", "truncated")
        fields = commit.fields
        names = [n for n, f in fields.items() if 0 < f.nbytes <= SMALL_NBYTES]
        names.sort(key=lambda n: (n != STEP_TYPE, fields[n].role not in needed, fields[n].nbytes))
        width = 0
        for name in names:
            width += fields[name].nbytes
            self._width[name] = width
            self._columns[name] = Column(
                name, chunks[name], fields[name].dtype, fields[name].shape, commit.chunk_rows
            )

    def get(self, name: str, view: View) -> Column | None:
        """Return a field's column, or None where it is not kept at this many rows."""
        width = self._width.get(name)
        if width is None or width * (view.stop - view.first) > self._budget_nbytes:
            return None
        return self._columns[name]

    def renew_locks(self) -> None:
        """Replace the locks, in a forked child."""
        for column in self._columns.values():
            column.renew_lock()
