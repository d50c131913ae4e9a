"""The segment table: which lane each segment belongs to, and how many rows it uses."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import google_crc32c
import numpy as np

from zbuffer.errors import DamagedError
from zbuffer.format.layout import SEGMENT_CHUNK

Array = np.ndarray[Any, Any]
#: The lane of a segment that was passed over.
NOBODY = -1


def encode_segments(rows: Array) -> bytes:
    """Return one chunk of the table: up to 256 rows of (lane, first step, rows used)."""
    full = np.zeros((SEGMENT_CHUNK, 3), "<i8")
    full[: len(rows)] = rows
    data = full.tobytes()
    checksum: bytes = google_crc32c.value(data).to_bytes(4, "little")
    return data + checksum


def decode_segments(data: bytes, where: str) -> Array:
    """Return one chunk of the table as int64 (256, 3)."""
    body, checksum = data[:-4], data[-4:]
    if len(body) != SEGMENT_CHUNK * 24:
        raise DamagedError(f"{where} has {len(data)} bytes, wanted {SEGMENT_CHUNK * 24 + 4}")
    if google_crc32c.value(body).to_bytes(4, "little") != checksum:
        raise DamagedError(f"{where} does not match its checksum")
    return np.frombuffer(body, "<i8").reshape(SEGMENT_CHUNK, 3)


@dataclass(frozen=True, slots=True, eq=False)
class Segments:
    """Which rows there are where ids have gaps: the segment table of one moment.

    Attributes
    ----------
    segment_rows
        Ids of a segment.
    first
        Index of the segment that item 0 of the arrays describes.
    lane, used
        int64 (n,): the lane of each segment, and how many of its ids are rows.
    bounds
        int64 (n + 1,): rows before each segment.
    following, preceding
        int64 (n,): the id that follows the segment's last row in its lane, and the
        id before its first row; -1 where there is none. Behind the newest row of a
        lane it is the id of the row that is to come, if the segment has room for it.
    """

    segment_rows: int
    first: int
    lane: Array
    used: Array
    bounds: Array
    following: Array
    preceding: Array

    @classmethod
    def of(cls, segment_rows: int, first: int, lane: Array, used: Array) -> Segments:
        """Link the segments of each lane."""
        n = len(lane)
        start = (first + np.arange(n)) * segment_rows
        following = np.where(used < segment_rows, start + used, -1)
        preceding = np.full(n, -1)
        order = np.argsort(lane, kind="stable")
        # An empty segment is passed over, unless it is its lane's newest: there the
        # next row will be.
        newest = np.ones(n, bool)
        newest[:-1] = lane[order][1:] != lane[order][:-1]
        order = order[(used[order] > 0) | newest]
        if len(order) > 1:
            same = lane[order][1:] == lane[order][:-1]
            before, after = order[:-1][same], order[1:][same]
            following[before] = start[after]
            preceding[after] = start[before] + used[before] - 1
        bounds = np.concatenate((np.zeros(1, np.int64), np.cumsum(used, dtype=np.int64)))
        return cls(segment_rows, first, lane, used, bounds, following, preceding)

    def __len__(self) -> int:
        """Return the number of rows."""
        return int(self.bounds[-1])

    def ids(self, positions: Array) -> Array:
        """Return the ids of the rows at some positions, counted from the oldest."""
        segment = np.searchsorted(self.bounds, positions, "right") - 1
        offset = positions - self.bounds[segment]
        ids: Array = (self.first + segment) * self.segment_rows + offset
        return ids

    def count_below(self, ids: Array) -> Array:
        """Return how many rows have a lower id than each of `ids`, which may be any."""
        n = len(self.used)
        if n == 0:
            none: Array = np.zeros(np.shape(ids), np.int64)
            return none
        segment, offset = np.divmod(np.asarray(ids), self.segment_rows)
        segment = segment - self.first
        inside = np.clip(segment, 0, n - 1)
        count = self.bounds[inside] + np.minimum(offset, self.used[inside])
        below: Array = np.where(segment < 0, 0, np.where(segment >= n, self.bounds[-1], count))
        return below

    def contains(self, ids: Array) -> Array:
        """Return which of `ids`, which may be any, are rows."""
        n = len(self.used)
        segment, offset = np.divmod(ids, self.segment_rows)
        segment = segment - self.first
        inside: Array = (segment >= 0) & (segment < n)
        if n:
            inside &= offset < self.used[np.clip(segment, 0, n - 1)]
        return inside

    def lanes(self, ids: Array) -> Array:
        """Return the lane of each row, int64."""
        lanes: Array = self.lane[ids // self.segment_rows - self.first]
        return lanes
