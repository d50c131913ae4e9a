"""The rows around a drawn row that make one sample: the stack behind, the steps ahead."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np

from zbuffer.errors import SampleError
from zbuffer.format.commit import FIRST, LAST, MID

Array = np.ndarray[Any, Any]
Lookup = Callable[[Array], Array]


@dataclass(frozen=True, slots=True)
class Window:
    """What one sample spans.

    Parameters
    ----------
    frame_stack
        Observations behind and with the drawn row, oldest first; None for one
        observation without a stack axis. Before an episode's start its first
        observation is repeated.
    n_step
        Steps ahead whose rewards are summed.
    gamma
        Discount per step.
    next_obs
        Whether the observation after the steps is wanted.
    """

    frame_stack: int | None = None
    n_step: int = 1
    gamma: float = 0.99
    next_obs: bool = True

    def __post_init__(self) -> None:
        stack = self.frame_stack
        if stack is not None and (isinstance(stack, bool) or not _is_count(stack)):
            raise SampleError(f"frame_stack must be a whole number above 0, got {stack!r}")
        if isinstance(self.n_step, bool) or not _is_count(self.n_step):
            raise SampleError(f"n_step must be a whole number above 0, got {self.n_step!r}")
        if not 0.0 <= self.gamma <= 1.0:
            raise SampleError(f"gamma must be between 0 and 1, got {self.gamma!r}")

    @property
    def stack(self) -> int:
        """Observations in a stack, one without ``frame_stack``."""
        return self.frame_stack or 1


@dataclass(frozen=True, slots=True)
class Windows:
    """The windows of ``B`` drawn rows.

    Attributes
    ----------
    obs_ids, next_ids
        int64 (B, stack): rows of the observations, and of those after the steps.
    n_steps
        int64 (B,): steps summed, 1 to ``n_step``.
    reward
        (B,): the discounted sum, or None without a reward field.
    discount
        float32 (B,): ``gamma ** n_steps``, 0 where the episode terminated.
    terminated, truncated
        bool (B,): whether the last of the steps ended its episode so.
    mask
        bool (B,): whether the observation after the steps is stored.
    """

    ids: Array
    obs_ids: Array
    next_ids: Array
    n_steps: Array
    reward: Array | None
    discount: Array
    terminated: Array
    truncated: Array
    mask: Array


@dataclass(frozen=True, slots=True)
class Lookups:
    """Small fields by row id. Ids of `step_type` may lie outside the rows."""

    step_type: Lookup
    reward: Lookup | None = None
    terminated: Lookup | None = None
    truncated: Lookup | None = None


def resolve(ids: Array, window: Window, lookups: Lookups) -> tuple[Windows, Array]:
    """Find the window of each id.

    Returns
    -------
    Windows
        Of the ids that have one, in their order.
    valid : ndarray of bool
        Which of `ids` those are. A row has a window if it is a step, its stack
        was not evicted, and the observation after it is stored or its episode
        terminated there.
    """
    k, n = window.stack, window.n_step
    around = lookups.step_type(ids[:, None] + np.arange(1 - k, n + 1))
    valid, begin = _behind(around[:, :k], k)
    if not window.next_obs:
        ahead = _no_steps(ids, window)
    else:
        ahead = _ahead(ids, around[:, k - 1 :], window, lookups)
        valid &= ahead.n_steps > 0
    behind = np.arange(1 - k, 1)
    obs_ids = ids[:, None] + np.maximum(behind, begin[:, None])
    next_ids = ids[:, None] + np.maximum(behind + ahead.n_steps[:, None], begin[:, None])
    # What is not stored is not read: the newest place of such a stack is blanked later.
    next_ids[~ahead.mask] = obs_ids[~ahead.mask]
    windows = Windows(
        ids,
        obs_ids,
        next_ids,
        ahead.n_steps,
        ahead.reward,
        ahead.discount,
        ahead.terminated,
        ahead.truncated,
        ahead.mask,
    )
    return windows, valid


def select(windows: Windows, keep: Array) -> Windows:
    """Return some of the windows, by boolean mask or index."""
    kept: Any = (value if value is None else value[keep] for value in _values(windows))
    return Windows(*kept)


def _values(windows: Windows) -> tuple[Any, ...]:
    return tuple(getattr(windows, name) for name in Windows.__dataclass_fields__)


def join(parts: list[Windows]) -> Windows:
    """Return several windows' rows as one."""
    if len(parts) == 1:
        return parts[0]
    columns = zip(*(_values(part) for part in parts), strict=True)
    joined: Any = (v[0] if v[0] is None else np.concatenate(v) for v in columns)
    return Windows(*joined)


@dataclass(frozen=True, slots=True)
class _Ahead:
    n_steps: Array
    reward: Array | None
    discount: Array
    terminated: Array
    truncated: Array
    mask: Array


def _behind(types: Array, k: int) -> tuple[Array, Array]:
    """Return which rows have a whole stack, and the offset of its oldest observation."""
    is_step = types <= MID
    first = types == FIRST
    # How far back the nearest FIRST lies; k where there is none in the stack.
    nearest = np.where(first.any(axis=1), np.argmax(first[:, ::-1], axis=1), k)
    begin = 1 - np.minimum(nearest + 1, k)
    counted = np.arange(1 - k, 1) >= begin[:, None]
    return (is_step | ~counted).all(axis=1), begin


def _no_steps(ids: Array, window: Window) -> _Ahead:
    n = len(ids)
    none = np.zeros(n, bool)
    return _Ahead(np.zeros(n, np.int64), None, np.ones(n, np.float32), none, none, none)


def _ahead(ids: Array, types: Array, window: Window, lookups: Lookups) -> _Ahead:
    """Walk up to `n_step` steps; `types` are the step types from the drawn row on."""
    n = len(ids)
    alive = types[:, 0] <= MID
    n_steps = np.zeros(n, np.int64)
    terminated = np.zeros(n, bool)
    truncated = np.zeros(n, bool)
    reward: Array | None = None
    for j in range(window.n_step):
        # A row that is not there is looked up as the drawn one, and not counted.
        rows = ids + np.where(types[:, j] <= MID, j, 0)
        rows = np.where(types[:, 0] <= MID, rows, -1)
        stored = (types[:, j + 1] == MID) | (types[:, j + 1] == LAST)
        ends = _look(lookups.terminated, rows, n)
        taken = alive & (stored | ends)
        terminated |= taken & ends
        truncated |= taken & _look(lookups.truncated, rows, n)
        n_steps += taken
        if lookups.reward is not None:
            here = _look(lookups.reward, rows, n)
            if window.n_step == 1:
                reward = here
            else:
                if reward is None:
                    kind = here.dtype if here.dtype.kind == "f" else np.dtype("float32")
                    reward = np.zeros(n, kind)
                reward += np.where(taken, here, 0) * reward.dtype.type(window.gamma**j)
        alive = taken & ~terminated & ~truncated & (types[:, j + 1] == MID)
    reached = types[np.arange(n), n_steps]
    mask = (n_steps > 0) & ((reached == MID) | (reached == LAST))
    discount = np.where(terminated, 0.0, window.gamma**n_steps).astype(np.float32)
    return _Ahead(n_steps, reward, discount, terminated, truncated, mask)


def _look(lookup: Lookup | None, rows: Array, n: int) -> Array:
    """Look rows up; -1 stands for a row that is not there, and gives zero."""
    if lookup is None:
        return np.zeros(n, bool)
    there = rows >= 0
    if there.all():
        return lookup(rows)
    found = lookup(rows[there])
    values = np.zeros(n, found.dtype)
    values[there] = found
    return values


def _is_count(value: Any) -> bool:
    return isinstance(value, int | np.integer) and bool(value > 0)
