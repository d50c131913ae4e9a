"""The rows around a drawn row that make one sample: the stack behind, the steps ahead."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np

from zbuffer.errors import SampleError
from zbuffer.format.commit import FIRST, LAST, MID
from zbuffer.sampling.rowset import RowSet

Array = np.ndarray[Any, Any]
Lookup = Callable[[Array], Array]
Kept = Mapping[str, tuple[Array, int]]


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
        if not isinstance(self.gamma, int | float | np.number) or not 0.0 <= self.gamma <= 1.0:
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
    ids
        int64 (B,): the drawn rows.
    stacks
        int64 (B, places): the rows whose observations make the stack, oldest first; then
        those of the stack after the steps, less what both share if they are one step
        apart. Where the observation after the steps is not stored, the drawn row stands
        in; its place is blanked later.
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
    stacks: Array
    n_steps: Array
    reward: Array | None
    discount: Array
    terminated: Array
    truncated: Array
    mask: Array


@dataclass(frozen=True, slots=True)
class Lookups:
    """Small fields by row id.

    Ids given to `step_type` may be of no row; the others are asked for rows only.
    `running` says of lanes whether the episode of their newest row goes on. `kept` has
    the fields themselves, where all of them are in memory: name to an array, and the id
    of its item 0.
    """

    step_type: Lookup
    running: Lookup
    reward: Lookup | None = None
    terminated: Lookup | None = None
    truncated: Lookup | None = None
    kept: Kept | None = None


def resolve(ids: Array, window: Window, rows: RowSet, lookups: Lookups) -> tuple[Windows, Array]:
    """Find the window of each id.

    Returns
    -------
    Windows
        Of all ids, in their order.
    valid : ndarray of bool
        Which of them there are. A row has a window if it is a step, its stack was
        not evicted, and the observation after it is stored or its episode
        terminated there.
    """
    k, n = window.stack, window.n_step if window.next_obs else 0
    path = rows.path(ids, k - 1, n)
    types = lookups.step_type(path.T)
    begin, valid = _behind(types[:k])
    if not window.next_obs:
        none = np.zeros(len(ids), bool)
        stacks = _stack(path, k, begin, np.arange(1 - k, 1))
        zero = np.zeros(len(ids), np.int64)
        return Windows(ids, stacks, zero, None, none, none, none, none), valid
    windows = _ahead(path, begin, types[k - 1 :], window, lookups)
    return windows, valid & (windows.n_steps > 0)


def _stacks(path: Array, begin: Array, n_steps: Array, mask: Array, window: Window) -> Array:
    """Return the rows of both stacks."""
    k = window.stack
    offsets = np.arange(1 - k, 2 if window.n_step == 1 else 1)
    stacks = _stack(path, k, begin, offsets)
    if window.n_step > 1:
        following = _stack(path, k, begin, offsets + n_steps[:, None])
        stacks = np.concatenate((stacks, following), axis=1)
    if not mask.all():
        missing = np.flatnonzero(~mask)
        stacks[missing, -1] = path[missing, k - 1]
    return stacks


def _stack(path: Array, k: int, begin: Array, offsets: Array) -> Array:
    places = np.maximum(offsets, begin[:, None])
    places += k - 1
    stack: Array = path[np.arange(len(path))[:, None], places]
    return stack


def select(windows: Windows, keep: Array | slice) -> Windows:
    """Return some of the windows, by boolean mask, index or slice."""
    kept: Any = (value if value is None else value[keep] for value in _values(windows))
    return Windows(*kept)


def join(parts: list[Windows]) -> Windows:
    """Return several windows' rows as one."""
    if len(parts) == 1:
        return parts[0]
    columns = zip(*(_values(part) for part in parts), strict=True)
    joined: Any = (v[0] if v[0] is None else np.concatenate(v) for v in columns)
    return Windows(*joined)


def _values(windows: Windows) -> tuple[Any, ...]:
    return tuple(getattr(windows, name) for name in Windows.__dataclass_fields__)


def _behind(types: Array) -> tuple[Array, Array]:
    """Return the offset of the oldest row of each stack, and which stacks are whole.

    `types` are (stack, B), oldest first. Walks back from the drawn rows; a stack is
    closed by its episode's FIRST row.
    """
    k, n = types.shape
    back = np.zeros(n, np.int64)
    whole = np.ones(n, bool)
    closed = np.zeros(n, bool)
    for place in range(k - 1, -1, -1):
        whole &= (types[place] <= MID) | closed
        closed |= types[place] == FIRST
        if place:
            back += ~closed
    return -back, whole


#: Whether a row of this step type holds the observation after the step before it.
_FOLLOWS = np.isin(np.arange(256), (MID, LAST))


def _ahead(path: Array, begin: Array, types: Array, window: Window, lookups: Lookups) -> Windows:
    """Walk up to `n_step` steps; `types` are (n_step + 1, B), from the drawn rows on."""
    n = len(path)
    alive = types[0] <= MID
    n_steps = np.zeros(n, np.int64)
    terminated = np.zeros(n, bool)
    truncated = np.zeros(n, bool)
    mask = np.zeros(n, bool)
    reward: Array | None = None
    for j in range(window.n_step):
        rows = path[:, window.stack - 1 + j]
        if j:
            # Where the walk is over, any row will do: it is not counted.
            rows = np.where(alive, rows, path[:, window.stack - 1])
        stored = _FOLLOWS[types[j + 1]]
        taken = alive & stored
        if lookups.terminated is not None:
            ends = alive & lookups.terminated(rows)
            taken |= ends
            terminated |= ends
        if lookups.truncated is not None:
            truncated |= taken & lookups.truncated(rows)
        n_steps += taken
        # Where the walk stopped before, what it reached is stored: it walked there.
        mask = np.where(taken, stored, mask) if j else taken & stored
        if lookups.reward is not None:
            reward = _add_reward(reward, lookups.reward(rows), taken, j, window)
        if j + 1 < window.n_step:
            alive = taken & ~terminated & ~truncated & (types[j + 1] == MID)
    discount = (window.gamma ** np.arange(window.n_step + 1)).astype(np.float32)[n_steps]
    discount[terminated] = 0.0
    stacks = _stacks(path, begin, n_steps, mask, window)
    ids = np.ascontiguousarray(path[:, window.stack - 1])
    return Windows(ids, stacks, n_steps, reward, discount, terminated, truncated, mask)


def _add_reward(total: Array | None, here: Array, taken: Array, j: int, window: Window) -> Array:
    """Return the discounted sum with one reward more; a single step's is left as it is."""
    if window.n_step == 1:
        return here
    if total is None:
        total = np.zeros(len(here), here.dtype if here.dtype.kind == "f" else np.float32)
    total += np.where(taken, here, 0) * total.dtype.type(window.gamma**j)
    return total


def _is_count(value: Any) -> bool:
    return isinstance(value, int | np.integer) and bool(value > 0)
