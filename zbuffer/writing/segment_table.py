"""Which segment belongs to which lane, and how far it is filled: the writer's own table."""

from __future__ import annotations

from typing import Any

import numpy as np

from zbuffer.format.segments import Segments

Array = np.ndarray[Any, Any]


class SegmentTable:
    """The segments of a buffer with lanes, as they are handed out and filled.

    Parameters
    ----------
    segment_rows
        Ids of a segment.
    first
        Index of the segment that the first row of `rows` describes.
    rows
        int64 (n, 3): lane, steps of the lane before the segment, rows used.

    Notes
    -----
    For one thread at a time; what :meth:`snapshot` returns is a value.
    """

    def __init__(self, segment_rows: int, first: int, rows: Array) -> None:
        self.segment_rows = segment_rows
        self._first = first
        n = len(rows)
        links = Segments.of(segment_rows, first, rows[:, 0].copy(), rows[:, 2].copy())
        self._n = n
        self._columns = np.zeros((5, n + 1024), np.int64)
        parts = (rows[:, 0], rows[:, 1], rows[:, 2], links.following, links.preceding)
        for column, part in zip(self._columns, parts, strict=True):
            column[:n] = part

    @property
    def stop(self) -> int:
        """One past the index of the last segment that was handed out."""
        return self._first + self._n

    def last_of_lane(self, lane: int) -> int | None:
        """Return the newest segment of a lane that has rows, None without one."""
        columns = self._columns[:, : self._n]
        found = np.flatnonzero((columns[0] == lane) & (columns[2] > 0))
        return self._first + int(found[-1]) if len(found) else None

    def hand_out(self, lane: int) -> int:
        """Give the next segment to a lane; returns its index. It is empty, and unlinked."""
        if self._n == self._columns.shape[1]:
            self._columns = np.concatenate((self._columns, np.zeros_like(self._columns)), axis=1)
        at = self._n
        self._n += 1
        self._columns[:, at] = (lane, 0, 0, (self._first + at) * self.segment_rows, -1)
        return self._first + at

    def fill(self, segments: Array, used: Array) -> None:
        """Note how many rows segments have now; the newest of their lanes."""
        at = segments - self._first
        self._columns[2, at] = used
        full = used == self.segment_rows
        self._columns[3, at] = np.where(full, -1, segments * self.segment_rows + used)

    def link(self, before: int | None, after: int, n_steps: int) -> None:
        """Say that the rows of a lane go on in another segment, after so many steps."""
        self._columns[1, after - self._first] = n_steps
        if before is None or before < self._first:
            return
        used = self._columns[2, before - self._first]
        self._columns[3, before - self._first] = after * self.segment_rows
        self._columns[4, after - self._first] = before * self.segment_rows + used - 1

    def drop_before(self, segment: int) -> None:
        """Forget evicted segments."""
        n = segment - self._first
        if n > 0:
            self._columns = np.ascontiguousarray(self._columns[:, n:])
            self._n -= n
            self._first = segment

    def rows(self, start: int, stop: int) -> Array:
        """Return the rows of some segments, int64 (n, 3): lane, steps before, used."""
        return self._columns[:3, start - self._first : stop - self._first].T.copy()

    def snapshot(self, first: int) -> Segments:
        """Return the segments from `first` on."""
        low = max(first - self._first, 0)
        lane, _, used, following, preceding = self._columns[:, low : self._n].copy()
        preceding[preceding < (self._first + low) * self.segment_rows] = -1
        bounds = np.concatenate((np.zeros(1, np.int64), np.cumsum(used)))
        return Segments(
            self.segment_rows, self._first + low, lane, used, bounds, following, preceding
        )
