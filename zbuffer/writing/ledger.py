"""What the writer knows about each live chunk: its segments, its steps, its bytes."""

from __future__ import annotations

from itertools import pairwise
from typing import Any

import numpy as np

from zbuffer.format import layout
from zbuffer.format.commit import MID, Commit
from zbuffer.format.segments import encode_segments
from zbuffer.reading.segments import read_segments
from zbuffer.schema import STEP_TYPE
from zbuffer.storage import Store
from zbuffer.writing.stored import read_chunk

Array = np.ndarray[Any, Any]


class Ledger:
    """The segment table of the live chunks, and their steps and bytes.

    Notes
    -----
    Used by the sealing thread, and at open before that thread exists.
    """

    def __init__(self, store: Store, commit: Commit) -> None:
        self._commit = commit
        self._per_chunk = commit.segments_of_chunk
        self._first = commit.first_chunk
        #: From the first segment of the first live chunk on.
        self.table = read_segments(store, commit)
        n_chunks = commit.stop_chunk - self._first
        missing = n_chunks * self._per_chunk - len(self.table)
        self.table = np.concatenate((self.table, np.zeros((missing, 3), np.int64)))
        self._steps = self._count_steps(store)
        self._nbytes: list[int] = [0] * n_chunks

    @property
    def total_steps(self) -> int:
        """Steps of all live chunks."""
        return sum(self._steps)

    @property
    def total_rows(self) -> int:
        """Rows of all live chunks."""
        return int(self.table[:, 2].sum())

    @property
    def total_nbytes(self) -> int:
        """Bytes of all live chunks."""
        return sum(self._nbytes)

    def steps(self, chunk: int) -> int:
        """Return the steps of a chunk."""
        return self._steps[chunk - self._first]

    def rows(self, chunk: int) -> int:
        """Return the rows of a chunk."""
        start = (chunk - self._first) * self._per_chunk
        return int(self.table[start : start + self._per_chunk, 2].sum())

    def nbytes(self, chunk: int) -> int:
        """Return the bytes of a chunk."""
        return self._nbytes[chunk - self._first]

    def set_nbytes(self, chunk: int, nbytes: int) -> None:
        """Note the bytes of a chunk."""
        self._nbytes[chunk - self._first] = nbytes

    def record(self, chunk: int, used: int, steps: int, nbytes: int) -> dict[str, bytes]:
        """Note a chunk of the one lane, and return the part of the table that holds it."""
        at = chunk - self._first
        before = 0
        if at > 0:
            before = int(self.table[at - 1, 1]) + self._steps[at - 1]
        elif at < len(self._steps):
            before = int(self.table[at, 1])
        row = np.array([[0, before, used]], np.int64)
        return self.record_segments(chunk, row, steps, nbytes)

    def record_segments(
        self, chunk: int, segments: Array, steps: int, nbytes: int
    ) -> dict[str, bytes]:
        """Note a chunk, and return the parts of the table that hold its segments."""
        at = chunk - self._first
        while len(self._steps) <= at:
            self._steps.append(0)
            self._nbytes.append(0)
            self.table = np.concatenate((self.table, np.zeros((self._per_chunk, 3), np.int64)))
        start = at * self._per_chunk
        self.table[start : start + len(segments)] = segments
        self._steps[at], self._nbytes[at] = steps, nbytes
        first = chunk * self._per_chunk
        parts = range(
            first // layout.SEGMENT_CHUNK,
            (first + len(segments) - 1) // layout.SEGMENT_CHUNK + 1,
        )
        return {layout.segments_path(part): self._encode_part(part) for part in parts}

    def drop_first(self) -> None:
        """Forget the oldest chunk."""
        self.table = self.table[self._per_chunk :]
        self._steps.pop(0)
        self._nbytes.pop(0)
        self._first += 1

    def _encode_part(self, part: int) -> bytes:
        """Return a part of the table; before the first live segment it has zeros."""
        start = part * layout.SEGMENT_CHUNK
        low = self._first * self._per_chunk
        rows = np.zeros((layout.SEGMENT_CHUNK, 3), np.int64)
        stop = min(start + layout.SEGMENT_CHUNK, low + len(self.table))
        begin = max(start, low)
        rows[begin - start : stop - start] = self.table[begin - low : stop - low]
        return encode_segments(rows)

    def _count_steps(self, store: Store) -> list[int]:
        commit = self._commit
        n = commit.stop_chunk - self._first
        if commit.lanes > 1:
            chunks = range(commit.first_chunk, commit.stop_chunk)
            types = (read_chunk(store, commit, STEP_TYPE, chunk) for chunk in chunks)
            return [int(np.count_nonzero(column <= MID)) for column in types]
        if n == 0:
            return []
        # The last chunk's steps are those that the commit counts beyond the others.
        before = self.table[:, 1].tolist()
        steps = [after - here for here, after in pairwise(before)]
        return [*steps, commit.steps - sum(steps)]
