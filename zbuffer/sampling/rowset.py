"""Which rows there are to draw from, and how they follow each other."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np

from zbuffer.format.segments import Segments

Array = np.ndarray[Any, Any]
#: The id of no row.
NONE = -1


@dataclass(frozen=True, slots=True, eq=False)
class RowSet:
    """The readable rows of a buffer at one moment.

    Ids only grow, so an id names one row for ever: a stale id is found by comparison,
    never mistaken for the row that took its place. A *position* counts rows from the
    oldest, 0, to the newest, ``len(rows) - 1``, in the order of their ids.

    Parameters
    ----------
    first, stop
        Ids are in ``[first, stop)``.
    chunk_rows, block_rows
        Ids that share a chunk, and those that are decoded together, each counted
        from id 0: ids with the same ``id // block_rows`` share a block.
    segments
        Which of the ids are rows, and of which lane; None where all are, in one lane.
    """

    first: int
    stop: int
    chunk_rows: int = 1 << 16
    block_rows: int = 1
    segments: Segments | None = None

    def __len__(self) -> int:
        """Return the number of rows."""
        return self.stop - self.first if self.segments is None else len(self.segments)

    def ids(self, positions: Array) -> Array:
        """Return the ids of the rows at some positions, int64."""
        return self.first + positions if self.segments is None else self.segments.ids(positions)

    def count_below(self, ids: Array) -> Array:
        """Return how many rows have a lower id than each of `ids`, which may be any.

        Of the id of a row, that is its position.
        """
        if self.segments is not None:
            return self.segments.count_below(ids)
        below: Array = np.minimum(np.maximum(ids, self.first), self.stop) - self.first
        return below

    def contains(self, ids: Array) -> Array:
        """Return which of `ids`, which may be any, are rows."""
        if self.segments is not None:
            return self.segments.contains(ids)
        return (ids >= self.first) & (ids < self.stop)

    def lanes(self, ids: Array) -> Array:
        """Return the lane of each row, int64."""
        if self.segments is not None:
            return self.segments.lanes(ids)
        none: Array = np.zeros(np.shape(ids), np.int64)
        return none

    def path(self, ids: Array, behind: int, ahead: int) -> Array:
        """Return the ids around each row in its lane, int64 (B, behind + 1 + ahead).

        Oldest first, the row itself at ``behind``. Where the lane has no such row
        there is an id that is no row; behind the newest row it is the id that
        the next row will have, if that is known.
        """
        # Built with the places as rows: whoever walks along takes one place at a time.
        if self.segments is None:
            return (ids + np.arange(-behind, ahead + 1)[:, None]).T
        path = np.empty((behind + 1 + ahead, len(ids)), np.int64)
        path[behind] = ids
        for place in range(behind, 0, -1):
            path[place - 1] = self._before(path[place], self.segments)
        for place in range(behind, behind + ahead):
            path[place + 1] = self._after(path[place], self.segments)
        return path.T

    def _before(self, ids: Array, table: Segments) -> Array:
        segment, offset = np.divmod(ids, table.segment_rows)
        segment = np.clip(segment - table.first, 0, len(table.used) - 1)
        before = np.where(offset > 0, ids - 1, table.preceding[segment])
        return np.where(ids == NONE, NONE, before)

    def _after(self, ids: Array, table: Segments) -> Array:
        segment, offset = np.divmod(ids, table.segment_rows)
        segment = np.clip(segment - table.first, 0, len(table.used) - 1)
        used = table.used[segment]
        after = np.where(offset + 1 < used, ids + 1, table.following[segment])
        return np.where((ids == NONE) | (offset >= used), NONE, after)
