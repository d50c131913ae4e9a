"""The rows of a buffer with lanes: the committed segments, and what tail pages have beyond."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np

from zbuffer.format.commit import Commit
from zbuffer.format.segments import NOBODY, Segments
from zbuffer.reading.chunks import View
from zbuffer.storage.pages import Page

Array = np.ndarray[Any, Any]


def overlay(table: Array, commit: Commit, pages: Mapping[int, Page]) -> tuple[Array, Array]:
    """Return the segment table with what the pages say, and the state word by segment.

    `table` is int64 (n, 3) from the first live segment on. Words are 0 where no page has
    the segment.
    """
    per_chunk, first = commit.segments_of_chunk, commit.first_chunk
    n = len(table)
    if pages:
        n = max(n, (max(pages) + 1 - first) * per_chunk)
    grown = np.zeros((n, 3), np.int64)
    grown[:, 0] = NOBODY
    grown[: len(table)] = table
    words = np.zeros(n, np.int64)
    for chunk, page in pages.items():
        start = (chunk - first) * per_chunk
        states = page.states.copy()
        owned = states[:, 1] > 0
        part = grown[start : start + per_chunk]
        part[owned, 0] = states[owned, 1] - 1
        part[owned, 1] = states[owned, 2]
        # A page may be older than a chunk that was sealed after it.
        part[owned, 2] = np.maximum(part[owned, 2], states[owned, 0] >> 2)
        newer = owned & (states[:, 0] >> 2 >= part[:, 2])
        words[start : start + per_chunk][newer] = states[newer, 0]
    used = np.flatnonzero(grown[:, 0] != NOBODY)
    stop = int(used[-1]) + 1 if len(used) else 0
    return grown[:stop], words[:stop]


def lane_view(table: Array, commit: Commit, pages: dict[int, Page]) -> View:
    """Return the rows that a committed table and pages give together."""
    rows, words = overlay(table, commit, pages)
    size = commit.rows_of_segment
    first = commit.first_chunk * commit.segments_of_chunk
    segments = Segments.of(size, first, rows[:, 0].copy(), rows[:, 2].copy())
    running = np.zeros(commit.lanes, bool)
    told = np.flatnonzero(words)
    # In the order of the segments: the newest of a lane is the last to speak.
    running[rows[told, 0]] = (words[told] & 2) > 0
    pending = told[(words[told] & 1) > 0]
    ids = (first + pending) * size + rows[pending, 2]
    ids = ids[rows[pending, 2] < size]
    stop = (first + len(rows)) * size
    return View(commit.first_row, stop, pages, None, running, segments, ids)
