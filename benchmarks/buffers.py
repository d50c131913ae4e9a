"""How do the benchmarks write recorded frames into a buffer?"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
from frames import SIZE, Frames

import zbuffer

ROW_NBYTES = SIZE * SIZE  # of one frame; what "times smaller" compares with
STACK = 4
BATCH = 256


def schema() -> zbuffer.Schema:
    """Return the schema of a recorded step."""
    return zbuffer.Schema(
        {
            "obs": zbuffer.Field((SIZE, SIZE), "uint8"),
            "action": zbuffer.Field((), "int64"),
            "reward": zbuffer.Field((), "float32"),
            "terminated": zbuffer.Field((), "bool"),
            "truncated": zbuffer.Field((), "bool"),
        }
    )


def write(path: Path, frames: Frames, **options: Any) -> None:
    """Create a closed buffer at `path` that holds `frames`."""
    with zbuffer.create(path, schema(), **options) as buffer:
        for slab in frames.slabs(1000):
            buffer.extend(**slab)


class Windows:
    """The rows of a closed buffer in RAM, uncompressed, and which of them a window needs."""

    def __init__(self, buffer: zbuffer.Buffer) -> None:
        step_type = np.asarray(buffer["step_type"][:])
        positions = np.arange(len(step_type))
        self.obs = np.asarray(buffer["obs"][:])
        self.steps = np.flatnonzero(step_type != 2)  # rows that are not LAST
        self._starts = np.maximum.accumulate(np.where(step_type == 0, positions, 0))

    def of(self, rows: np.ndarray) -> np.ndarray:
        """Return the rows of each window, int64 (n, 5): the stack and the next frame."""
        offsets = np.arange(1 - STACK, 2)
        windows: np.ndarray = np.maximum(rows[:, None] + offsets, self._starts[rows][:, None])
        return windows
