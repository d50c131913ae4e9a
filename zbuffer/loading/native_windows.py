"""The windows of drawn rows, found by the extension."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np

from zbuffer.reading.chunks import View
from zbuffer.sampling.windows import Kept, Window, Windows, select
from zbuffer.schema import Schema

Array = np.ndarray[Any, Any]
_NO_SEGMENTS = (0, 0, None, None, None)
_NOTHING = (None, 0)
#: Longer windows are left to NumPy.
_MOST_PLACES = 4000


@dataclass(frozen=True, slots=True)
class NativeWindow:
    """A window in the terms of the extension.

    Attributes
    ----------
    arguments
        Stack, steps, powers of gamma, kind of reward, and its bytes.
    places
        Rows of a sample's stacks.
    """

    function: Any
    arguments: tuple[Any, ...]
    places: int
    reward: np.dtype[Any] | None
    reward_shape: tuple[int, ...]


def native_window(
    function: Any, window: Window, schema: Schema, reward: str | None
) -> NativeWindow | None:
    """Return the window for the extension; None where NumPy has to find it."""
    k, n_step = window.stack, window.n_step if window.next_obs else 0
    if function is None or k > _MOST_PLACES or n_step > _MOST_PLACES:
        return None
    field = None if reward is None or n_step == 0 else schema[reward]
    if field is not None and n_step > 1:
        plain = field.dtype.isnative and field.shape == ()
        if not plain or field.dtype.char not in "fd":
            return None
    powers = window.gamma ** np.arange(n_step + 1, dtype=np.float64)
    kind, nbytes = ("x", 0) if field is None else (field.dtype.char, field.nbytes)
    return NativeWindow(
        function,
        (k, n_step, powers, kind, nbytes),
        k if n_step == 0 else k + 1 if n_step == 1 else 2 * k,
        None if field is None else field.dtype,
        () if field is None else field.shape,
    )


def native_windows(
    window: NativeWindow, ids: Array, most: int, view: View, kept: Kept
) -> tuple[Windows, Array]:
    """Return the first `most` windows that there are, and of which ids they are.

    As :func:`zbuffer.sampling.windows.resolve` finds them.
    """
    size = min(most, len(ids))
    drawn, n_steps, which = (np.empty(size, np.int64) for _ in range(3))
    stacks = np.empty((size, window.places), np.int64)
    terminated, truncated, mask = (np.empty(size, bool) for _ in range(3))
    discount = np.empty(size, np.float32)
    reward = None
    if window.reward is not None:
        reward = np.empty((size, *window.reward_shape), window.reward)
    pending = view.pending_ids if view.pending is None else np.array([view.stop])
    table = view.segments
    segments: tuple[Any, ...] = _NO_SEGMENTS
    if table is not None:
        segments = (table.segment_rows, table.first)
        segments += (table.used, table.following, table.preceding)
    found = window.function(
        ids,
        size,
        window.arguments,
        (view.first, view.stop, pending),
        segments,
        kept["step_type"],
        _NOTHING if reward is None else kept["reward"],
        kept.get("terminated", _NOTHING),
        kept.get("truncated", _NOTHING),
        (drawn, stacks, n_steps, reward, discount, terminated, truncated, mask, which),
    )
    windows = Windows(drawn, stacks, n_steps, reward, discount, terminated, truncated, mask)
    if found == size:
        return windows, which
    return select(windows, slice(0, found)), which[:found]
