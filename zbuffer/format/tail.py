"""The bytes of a tail page: rows that are not in a sealed chunk yet.

A page is one file, ``tail/<chunk>``, for the rows of one chunk. It is private to
the host, but readers on the same host map it too.
"""

from __future__ import annotations

import struct
from dataclasses import dataclass

import numpy as np

from zbuffer.errors import DamagedError
from zbuffer.format.commit import Commit

HEADER_NBYTES = 4096
STATE_AT = 64
_STATE_NBYTES = 24
_MAGIC = b"zbuftail"
_HEADER = struct.Struct("<8sIIqqq")
_VERSION = 1


@dataclass(frozen=True, slots=True)
class PageLayout:
    """Where each field lies in a tail page.

    Attributes
    ----------
    offsets
        First byte of each field's rows. A page has room for one row more than a
        chunk: the observation after its last row.
    nbytes
        Size of the file.
    """

    chunk_rows: int
    offsets: dict[str, int]
    nbytes: int

    @classmethod
    def of(cls, commit: Commit) -> PageLayout:
        """Return the layout that follows from schema and geometry."""
        at = -(-(STATE_AT + _STATE_NBYTES * commit.segments_of_chunk) // HEADER_NBYTES)
        at *= HEADER_NBYTES
        offsets = {}
        for name, field in commit.fields.items():
            offsets[name] = at
            at += -(-field.nbytes * (commit.chunk_rows + 1) // 64) * 64
        return cls(commit.chunk_rows, offsets, at)

    def header(self, chunk: int, epoch: int) -> bytes:
        """Return the header of an empty page."""
        return _HEADER.pack(_MAGIC, _VERSION, 0, self.nbytes, chunk, epoch)

    def check(self, data: memoryview, chunk: int) -> int:
        """Return the epoch in a page's header; DamagedError where it is not this page's."""
        magic, version, _, nbytes, number, epoch = _HEADER.unpack_from(data)
        if (magic, version, nbytes, number) != (_MAGIC, _VERSION, self.nbytes, chunk):
            raise DamagedError(f"tail page {chunk} has a header that does not fit the schema")
        return int(epoch)


@dataclass(frozen=True, slots=True)
class PageState:
    """What a page holds; one aligned word, so that a kill leaves the old state or the new one.

    Attributes
    ----------
    count
        Rows of the page.
    pending
        Whether the observation after the newest row lies behind it.
    running
        Whether the newest row's episode goes on.
    """

    count: int = 0
    pending: bool = False
    running: bool = False

    def pack(self) -> int:
        """Return the state as a word."""
        return 4 * self.count + 2 * self.running + self.pending

    @classmethod
    def unpack(cls, word: int) -> PageState:
        """Read the state off its word."""
        return cls(word >> 2, bool(word & 1), bool(word & 2))


def segment_states(data: memoryview, n_segments: int) -> np.ndarray:
    """Return the states of a mapped page: int64 (n_segments, 3).

    The state's word; the lane plus one, 0 while the segment is nobody's; the number of
    rows of the lane before it. With one lane only the first is used.
    """
    return np.frombuffer(data, np.int64, 3 * n_segments, STATE_AT).reshape(n_segments, 3)
