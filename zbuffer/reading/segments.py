"""The segment table as it is committed."""

from __future__ import annotations

from typing import Any

import numpy as np

from zbuffer.format import layout
from zbuffer.format.commit import Commit
from zbuffer.format.segments import decode_segments
from zbuffer.storage import Store

Array = np.ndarray[Any, Any]


def read_segments(store: Store, commit: Commit) -> Array:
    """Return the segment table of the committed live rows, int64 (n, 3)."""
    first = commit.first_chunk * commit.segments_of_chunk
    stop = commit.stop_segment
    if stop <= first:
        return np.zeros((0, 3), np.int64)
    size = layout.SEGMENT_CHUNK
    parts = []
    for part in range(first // size, (stop - 1) // size + 1):
        key = layout.segments_path(part)
        parts.append(decode_segments(store.read(key), f"{store.path}/{key}"))
    skipped = first // size * size
    return np.concatenate(parts)[first - skipped : stop - skipped]
