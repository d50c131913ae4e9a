"""What should a buffer hold, and draw? The answer in plain Python: a list of rows.

Nothing here is fast, compressed or on disk, and nothing is shared with the code
that is tested against it but the schema and the errors.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from itertools import pairwise
from typing import Any

import numpy as np

from zbuffer.errors import EpisodeError, SampleError
from zbuffer.schema import STEP_TYPE, Schema, flatten

FIRST, MID, LAST = 0, 1, 2

Row = dict[str, Any]
Observation = dict[str, Any]


@dataclass(frozen=True, slots=True)
class ModelEpisode:
    """One episode, as :class:`zbuffer.Episode` should describe it.

    Attributes
    ----------
    start, stop
        Its rows are ``[start, stop)``, the LAST row included.
    length
        Its number of steps.
    return_
        The sum of its rewards; nan without a reward field.
    ended
        ``"terminated"``, ``"truncated"``, ``"cut"`` or ``"running"``.
    """

    start: int
    stop: int
    length: int
    return_: float
    ended: str


@dataclass(frozen=True, slots=True)
class ModelWindow:
    """The sample that a drawn row makes.

    Attributes
    ----------
    stack, next_stack
        Observations, oldest first, each a dict of field name to item.
    reward
        Discounted sum of `n_steps` rewards; nan without a reward field.
    n_steps
        How many rewards were summed.
    discount
        ``gamma ** n_steps``, or 0 where the episode terminated.
    terminated, truncated
        Whether the last of the steps has the flag.
    mask
        Whether the newest observation of `next_stack` is stored; zeros if not.
    """

    stack: list[Observation]
    next_stack: list[Observation]
    reward: float
    n_steps: int
    discount: float
    terminated: bool
    truncated: bool
    mask: bool


class ModelBuffer:
    """A buffer as a list of rows; takes the calls of :class:`zbuffer.Buffer`.

    Parameters
    ----------
    schema
        What a row is.
    chunk_rows
        Rows per chunk: eviction drops this many at a time.
    capacity
        Newest rows to keep. No limit by default.

    Attributes
    ----------
    rows : list of dict
        All rows ever stored; a row's id is its index. Items are NumPy arrays.
    first : int
        Id of the oldest row that was not evicted.
    running : bool
        Whether an episode is running.
    pending : dict or None
        The observation after the newest row, given by ``next_obs=`` but not
        stored as a row yet.

    Notes
    -----
    When a buffer evicts depends on how fast it seals. So the model evicts only
    when it is told to, and checks that it was allowed: see :meth:`evict`.
    It does not check dtypes and shapes.

    Examples
    --------
    >>> schema = Schema({"obs": ((), "int64"), "terminated": ((), "bool")})
    >>> model = ModelBuffer(schema, chunk_rows=4)
    >>> model.append(obs=7, terminated=False, next_obs=8)
    >>> model.append(obs=8, terminated=True, next_obs=9)
    >>> [int(row["obs"]) for row in model.rows]
    [7, 8, 9]
    >>> [row["step_type"] for row in model.rows]
    [0, 1, 2]
    """

    def __init__(self, schema: Schema, *, chunk_rows: int, capacity: int | None = None) -> None:
        self.schema = schema
        self.chunk_rows = chunk_rows
        self.capacity = capacity
        self.rows: list[Row] = []
        self.first = 0
        self.running = False
        self.pending: Observation | None = None
        self._final_may_follow = False

    # Writing

    def append(self, **row: Any) -> None:
        """Add one step.

        Raises
        ------
        EpisodeError
            In mid-episode, the observation is not the pending one.
        """
        leaves = flatten(row)
        stored = {name: self._item(name, leaves[name]) for name in self.schema}
        following = None if self.schema.explicit else self._next_observation_in(leaves)
        if self.pending is not None and not _same(self.pending, stored):
            raise EpisodeError("the observation is not the next_obs of the row before")
        stored[STEP_TYPE] = MID if self.running else FIRST
        self.rows.append(stored)
        self.running = True
        self.pending = following
        if self._flag("terminated", stored) or self._flag("truncated", stored):
            self._stop()
            self._final_may_follow = following is None

    def extend(self, **rows: Any) -> int:
        """Add many steps, all or none; returns how many."""
        leaves = flatten(rows)
        n_steps = len(leaves[next(iter(self.schema))])
        with self._all_or_nothing():
            for i in range(n_steps):
                self.append(**{name: items[i] for name, items in leaves.items()})
        return n_steps

    def add_episode(self, **rows: Any) -> int:
        """Add one whole episode; returns its number of steps.

        Observations may have one item more than there are steps.
        ``terminated`` and ``truncated`` may be missing, or one bool.

        Raises
        ------
        EpisodeError
            An episode is running.
        """
        if self.running:
            raise EpisodeError("an episode is running")
        leaves = flatten(rows)
        observations = self.schema.observations
        n_steps = min(len(items) for items in leaves.values() if np.ndim(items) > 0)
        final = {
            name: leaves[name][n_steps] for name in observations if len(leaves[name]) > n_steps
        }
        for role in ("terminated", "truncated"):
            name = self.schema.named(role)
            if name is not None and np.ndim(leaves.get(name, False)) == 0:
                leaves[name] = [False] * (n_steps - 1) + [leaves.get(name, False)]
        with self._all_or_nothing():
            for i in range(n_steps):
                self.append(**{name: items[i] for name, items in leaves.items()})
            if final or self.running:
                self.end_episode(**final)
            self._final_may_follow = False
        return n_steps

    def end_episode(self, **final_observation: Any) -> None:
        """End the running episode, or give the final observation of the one just ended.

        Raises
        ------
        EpisodeError
            No episode is running and none has just ended without its final
            observation, or what is given is not the pending one.
        """
        if not self.running and not self._final_may_follow:
            raise EpisodeError("no episode is running")
        if not self.running and not final_observation:
            return
        leaves = flatten(final_observation)
        final = {name: self._item(name, item) for name, item in leaves.items()} or None
        if self.pending is not None and final is not None and not _same(self.pending, final):
            raise EpisodeError("the final observation is not the next_obs of the last step")
        self.pending = final if self.pending is None else self.pending
        self._stop()

    def close(self) -> None:
        """End the running episode, as closing, reopening and being killed do."""
        self._stop()

    # Evicting

    def evict(self, first: int) -> None:
        """Drop the rows before `first`, which must be a place that a buffer may choose."""
        assert first >= self.first, "an evicted row came back"
        assert first <= self.last_first(), "one of the newest `capacity` rows was evicted"
        assert first % self.chunk_rows == 0, "a part of a chunk was evicted"
        self.first = first

    def last_first(self) -> int:
        """Return the highest id that the oldest row may have now."""
        if self.capacity is None:
            return 0
        return max(0, len(self.rows) - self.capacity) // self.chunk_rows * self.chunk_rows

    # Reading

    def __len__(self) -> int:
        return sum(1 for row in self.rows[self.first :] if row[STEP_TYPE] != LAST)

    def episodes(self) -> list[ModelEpisode]:
        """Return the episodes that have a step left, oldest first."""
        starts = [
            i
            for i in range(self.first, len(self.rows))
            if i == self.first or self.rows[i][STEP_TYPE] == FIRST
        ]
        episodes = [self._episode(*ends) for ends in pairwise([*starts, len(self.rows)])]
        return [episode for episode in episodes if episode.length > 0]

    # Drawing

    def drawable(self, frame_stack: int = 1) -> list[int]:
        """Return the ids that a sampler draws, all with the same probability."""
        return [i for i in range(self.first, len(self.rows)) if self.is_drawable(i, frame_stack)]

    def is_drawable(self, row_id: int, frame_stack: int = 1) -> bool:
        """Whether the row is a step with all that its window needs."""
        if row_id < self.first or self.rows[row_id][STEP_TYPE] == LAST:
            return False
        return self._has_successor(row_id) and self._frames(row_id, frame_stack) is not None

    def window(
        self, row_id: int, *, frame_stack: int = 1, n_step: int = 1, gamma: float = 0.99
    ) -> ModelWindow:
        """Return the sample that a drawable row makes.

        Raises
        ------
        SampleError
            The row is not drawable.
        """
        stack = self._frames(row_id, frame_stack) if self.is_drawable(row_id, frame_stack) else None
        if stack is None:
            raise SampleError(f"row {row_id} has no such window")
        steps = self._steps(row_id, n_step)
        last = steps[-1]
        reward = sum(gamma**j * self._reward(self.rows[i]) for j, i in enumerate(steps))
        terminated = self._flag("terminated", self.rows[last])
        after = self._observation_after(last)
        older = self._frames(last, frame_stack - 1) if frame_stack > 1 else []
        assert older is not None, "the frames of the next stack are newer than those of the stack"
        return ModelWindow(
            stack=stack,
            next_stack=[*older, self._zeros() if after is None else after],
            reward=reward,
            n_steps=len(steps),
            discount=0.0 if terminated else gamma ** len(steps),
            terminated=terminated,
            truncated=self._flag("truncated", self.rows[last]),
            mask=after is not None,
        )

    # Pieces

    def _stop(self) -> None:
        if self.pending is not None:
            self.rows.append(self._zero_row() | self.pending | {STEP_TYPE: LAST})
        self.pending = None
        self.running = False
        self._final_may_follow = False

    @contextmanager
    def _all_or_nothing(self) -> Iterator[None]:
        before = (list(self.rows), self.running, self.pending, self._final_may_follow)
        try:
            yield
        except EpisodeError:
            self.rows, self.running, self.pending, self._final_may_follow = before
            raise

    def _episode(self, start: int, stop: int) -> ModelEpisode:
        steps = [row for row in self.rows[start:stop] if row[STEP_TYPE] != LAST]
        if any(self._flag("terminated", row) for row in steps):
            ended = "terminated"
        elif any(self._flag("truncated", row) for row in steps):
            ended = "truncated"
        elif self.running and stop == len(self.rows):
            ended = "running"
        else:
            ended = "cut"
        has_reward = self.schema.named("reward") is not None
        return_ = sum(self._reward(row) for row in steps) if has_reward else float("nan")
        return ModelEpisode(start, stop, len(steps), return_, ended)

    def _steps(self, row_id: int, n_step: int) -> list[int]:
        """Return the ids of the steps whose rewards are summed."""
        steps = [row_id]
        while len(steps) < n_step:
            newest = self.rows[steps[-1]]
            following = steps[-1] + 1
            if self._flag("terminated", newest) or self._flag("truncated", newest):
                break
            if following == len(self.rows) or self.rows[following][STEP_TYPE] != MID:
                break
            if not self._has_successor(following):
                break
            steps.append(following)
        return steps

    def _has_successor(self, row_id: int) -> bool:
        """Whether the step can be learned from: what comes after it is known, or nothing does."""
        terminated = self._flag("terminated", self.rows[row_id])
        return terminated or self._observation_after(row_id) is not None

    def _observation_after(self, row_id: int) -> Observation | None:
        names = self.schema.observations
        if self.schema.explicit:
            return {name: self.rows[row_id][f"next_{name}"] for name in names}
        if row_id + 1 == len(self.rows):
            return self.pending
        following = self.rows[row_id + 1]
        return None if following[STEP_TYPE] == FIRST else self._observation(following)

    def _frames(self, row_id: int, n_frames: int) -> list[Observation] | None:
        """Return the stack that ends at a row, or None where a part of it was evicted."""
        frames: list[Observation] = []
        i = row_id
        while len(frames) < n_frames:
            if i < self.first:
                return None
            frames.insert(0, self._observation(self.rows[i]))
            if self.rows[i][STEP_TYPE] != FIRST:
                i -= 1
        return frames

    def _observation(self, row: Row) -> Observation:
        return {name: row[name] for name in self.schema.observations}

    def _next_observation_in(self, leaves: Mapping[str, Any]) -> Observation | None:
        names = self.schema.observations
        given = {n: self._item(n, leaves[f"next_{n}"]) for n in names if f"next_{n}" in leaves}
        return given or None

    def _item(self, name: str, value: Any) -> Any:
        return np.array(value, self.schema[name].dtype).reshape(self.schema[name].shape)

    def _zeros(self) -> Observation:
        return self._observation(self._zero_row())

    def _zero_row(self) -> Row:
        return {name: np.zeros(field.shape, field.dtype) for name, field in self.schema.items()}

    def _flag(self, role: str, row: Row) -> bool:
        name = self.schema.named(role)
        return name is not None and bool(row[name])

    def _reward(self, row: Row) -> float:
        name = self.schema.named("reward")
        return float("nan") if name is None else float(row[name])


def _same(wanted: Observation, row: Mapping[str, Any]) -> bool:
    """Whether a row holds the observation, bit for bit: 0.0 is not -0.0, and nan is nan."""
    return all(item.tobytes() == row[name].tobytes() for name, item in wanted.items())
