"""The segment table: which lane each segment belongs to, and how many rows it uses."""

from __future__ import annotations

from typing import Any

import google_crc32c
import numpy as np

from zbuffer.errors import DamagedError
from zbuffer.format.layout import SEGMENT_CHUNK


def encode_segments(rows: np.ndarray[Any, Any]) -> bytes:
    """Return one chunk of the table: up to 256 rows of (lane, first step, rows used)."""
    full = np.zeros((SEGMENT_CHUNK, 3), "<i8")
    full[: len(rows)] = rows
    data = full.tobytes()
    checksum: bytes = google_crc32c.value(data).to_bytes(4, "little")
    return data + checksum


def decode_segments(data: bytes, where: str) -> np.ndarray[Any, Any]:
    """Return one chunk of the table as int64 (256, 3)."""
    body, checksum = data[:-4], data[-4:]
    if len(body) != SEGMENT_CHUNK * 24:
        raise DamagedError(f"{where} has {len(data)} bytes, wanted {SEGMENT_CHUNK * 24 + 4}")
    if google_crc32c.value(body).to_bytes(4, "little") != checksum:
        raise DamagedError(f"{where} does not match its checksum")
    return np.frombuffer(body, "<i8").reshape(SEGMENT_CHUNK, 3)
