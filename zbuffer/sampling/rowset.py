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
        if self.segments is None:
            return self.stop - self.first
        return int(self.segments.bounds[-1])

    def ids(self, positions: Array) -> Array:
        """Return the ids of the rows at some positions, int64."""
        table = self.segments
        if table is None:
            return self.first + positions
        segment = np.searchsorted(table.bounds, positions, "right") - 1
        ids: Array = (
            (table.first + segment) * table.segment_rows + positions - table.bounds[segment]
        )
        return ids

    def count_below(self, ids: Array) -> Array:
        """Return how many rows have a lower id than each of `ids`, which may be any.

        Of the id of a row, that is its position.
        """
        table = self.segments
        if table is None:
            below: Array = np.clip(ids, self.first, self.stop) - self.first
            return below
        n = len(table.used)
        if n == 0:
            return np.zeros(np.shape(ids), np.int64)
        segment, offset = np.divmod(np.asarray(ids), table.segment_rows)
        segment = segment - table.first
        inside = np.clip(segment, 0, n - 1)
        count = table.bounds[inside] + np.minimum(offset, table.used[inside])
        return np.where(segment < 0, 0, np.where(segment >= n, table.bounds[-1], count))

    def contains(self, ids: Array) -> Array:
        """Return which of `ids`, which may be any, are rows."""
        inside = (ids >= self.first) & (ids < self.stop)
        table = self.segments
        if table is None or len(table.used) == 0:
            return inside
        segment, offset = np.divmod(ids, table.segment_rows)
        segment = np.clip(segment - table.first, 0, len(table.used) - 1)
        return inside & (offset < table.used[segment])

    def lanes(self, ids: Array) -> Array:
        """Return the lane of each row, int64."""
        table = self.segments
        if table is None:
            return np.zeros(np.shape(ids), np.int64)
        lanes: Array = table.lane[ids // table.segment_rows - table.first]
        return lanes

    def path(self, ids: Array, behind: int, ahead: int) -> Array:
        """Return the ids around each row in its lane, int64 (B, behind + 1 + ahead).

        Oldest first, the row itself at ``behind``. Where the lane has no such row
        there is an id that is no row; behind the newest row it is the id that
        the next row will have, if that is known.
        """
        if self.segments is None:
            return ids[:, None] + np.arange(-behind, ahead + 1)
        path = np.empty((len(ids), behind + 1 + ahead), np.int64)
        path[:, behind] = ids
        for place in range(behind, 0, -1):
            path[:, place - 1] = self._before(path[:, place], self.segments)
        for place in range(behind, behind + ahead):
            path[:, place + 1] = self._after(path[:, place], self.segments)
        return path

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
