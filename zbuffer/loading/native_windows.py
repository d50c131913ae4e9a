"""The windows of drawn rows, found by the extension."""

from __future__ import annotations

from typing import Any

import numpy as np

from zbuffer.reading.chunks import View
from zbuffer.sampling.windows import Kept, Window, Windows
from zbuffer.schema import Schema

Array = np.ndarray[Any, Any]
_NO_SEGMENTS = (0, 0, None, None, None)
_NOTHING = (None, 0)
#: Longer windows are left to NumPy.
_MOST_PLACES = 4000


def can_be_native(window: Window, schema: Schema, reward: str | None) -> bool:
    """Whether the extension can do these windows as NumPy does."""
    if window.stack > _MOST_PLACES or window.n_step > _MOST_PLACES:
        return False
    dtype = np.dtype(np.float32) if reward is None else schema[reward].dtype
    plain = dtype.isnative and reward is not None and schema[reward].shape == ()
    return window.n_step == 1 or reward is None or (plain and dtype.char in "fd")


def native_windows(
    native: Any, ids: Array, most: int, window: Window, view: View, kept: Kept
) -> tuple[Windows, Array]:
    """Return the first `most` windows that there are, and of which ids they are.

    As :func:`zbuffer.sampling.windows.resolve` finds them.
    """
    k, n_step = window.stack, window.n_step if window.next_obs else 0
    size = min(most, len(ids))
    width = k if n_step == 0 else k + 1 if n_step == 1 else 2 * k
    rewards = kept["reward"][0] if "reward" in kept and n_step else None
    numbers = np.empty((3, size), np.int64)
    stacks = np.empty((size, width), np.int64)
    flags = np.empty((3, size), bool)
    discount = np.empty(size, np.float32)
    reward = None if rewards is None else np.empty((size, *rewards.shape[1:]), rewards.dtype)
    pending = view.pending_ids
    if view.pending is not None:
        pending = np.array([view.stop])
    table = view.segments
    segments = _NO_SEGMENTS
    if table is not None:
        segments = (  # type: ignore[assignment]  # arrays for None
            table.segment_rows,
            table.first,
            table.used,
            table.following,
            table.preceding,
        )
    found = native(
        np.ascontiguousarray(ids, np.int64),
        size,
        (
            k,
            n_step,
            window.gamma ** np.arange(n_step + 1, dtype=np.float64),
            "x" if rewards is None else rewards.dtype.char,
            0 if rewards is None else rewards.itemsize * int(np.prod(rewards.shape[1:], dtype=int)),
        ),
        (view.first, view.stop, pending),
        segments,
        _bytes(kept["step_type"]),
        _NOTHING if rewards is None else _bytes(kept["reward"]),
        _bytes(kept.get("terminated", _NOTHING)),
        _bytes(kept.get("truncated", _NOTHING)),
        (
            numbers[0],
            stacks,
            numbers[1],
            None if reward is None else reward.view(np.uint8) if reward.size else None,
            discount,
            *flags,
            numbers[2],
        ),
    )
    part = slice(0, found)
    return (
        Windows(
            numbers[0, part],
            stacks[part],
            numbers[1, part],
            None if reward is None else reward[part],
            discount[part],
            flags[0, part],
            flags[1, part],
            flags[2, part],
        ),
        numbers[2, part],
    )


def _bytes(column: Any) -> tuple[Any, int]:
    values, base = column
    return (None, 0) if values is None else (values.reshape(-1).view(np.uint8), base)
