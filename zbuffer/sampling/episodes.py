"""Where episodes begin and end, computed from the small fields."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any, overload

import numpy as np

from zbuffer.format.commit import FIRST, MID

Array = np.ndarray[Any, Any]
ENDS = ("terminated", "truncated", "cut", "running")


@dataclass(frozen=True, slots=True)
class Episode:
    """One episode.

    Attributes
    ----------
    start, stop
        Its first row, and one past its last, the final observation's LAST row included.
        With one lane its rows are ``[start, stop)``.
    length
        Its number of steps.
    return_
        The sum of its rewards; nan without a reward field.
    ended
        ``"terminated"``, ``"truncated"``, ``"cut"`` (ended without either flag:
        by ``end_episode()``, or because its writer stopped) or ``"running"``.
    lane
        Its time line.
    """

    start: int
    stop: int
    length: int
    return_: float
    ended: str
    lane: int = 0


class Episodes(Sequence[Episode]):
    """The episodes of a buffer, lane by lane, oldest first, each also as columns.

    An episode whose first rows were evicted begins at the oldest row there is.

    Attributes
    ----------
    start, stop, length, lane
        int64 arrays.
    returns
        float64 array.
    ended
        Array of strings.
    """

    def __init__(
        self,
        ids: Array,
        lanes: Array,
        step_type: Array,
        reward: Array | None,
        terminated: Array | None,
        truncated: Array | None,
        *,
        running: Array,
    ) -> None:
        oldest = np.append(True, lanes[1:] != lanes[:-1])[: len(lanes)]
        # The final observation of an episode that was evicted belongs to none.
        keep = ~(oldest & (step_type > MID))
        columns = (ids, lanes, step_type, reward, terminated, truncated, running)
        ids, lanes, step_type, reward, terminated, truncated, running = (  # type: ignore[assignment]  # None stays None
            None if column is None else column[keep] for column in columns
        )
        n = len(step_type)
        is_step = step_type <= MID
        # The oldest step of a lane begins an episode, whatever was before it.
        is_start = (step_type == FIRST) | (oldest[keep] & is_step)
        starts = np.flatnonzero(is_start)
        bounds = np.append(starts, n)
        steps = np.concatenate(([0], np.cumsum(is_step)))
        self.lane = lanes[starts]
        self.start = ids[starts]
        self.stop = ids[bounds[1:] - 1] + 1 if len(starts) else ids[:0]
        self.length = steps[bounds[1:]] - steps[starts]
        if reward is None:
            self.returns = np.full(len(starts), np.nan)
        else:
            sums = np.where(is_step, reward, 0).astype(np.float64)
            self.returns = np.add.reduceat(sums, starts) if len(starts) else np.zeros(0)
        last_step = starts + self.length - 1
        ended = np.full(len(starts), "cut", dtype="U10")
        for name, flags in (("truncated", truncated), ("terminated", terminated)):
            if flags is not None:
                ended[flags[last_step]] = name
        newest = np.append(lanes[1:] != lanes[:-1], True)[bounds[1:] - 1] if n else starts > 0
        goes_on = newest & running[starts] & (ended == "cut")
        ended[goes_on] = "running"
        self.ended = ended

    def __len__(self) -> int:
        return len(self.start)

    @overload
    def __getitem__(self, index: int) -> Episode: ...
    @overload
    def __getitem__(self, index: slice) -> list[Episode]: ...
    def __getitem__(self, index: int | slice) -> Episode | list[Episode]:
        if isinstance(index, slice):
            return [self[i] for i in range(*index.indices(len(self)))]
        return Episode(
            int(self.start[index]),
            int(self.stop[index]),
            int(self.length[index]),
            float(self.returns[index]),
            str(self.ended[index]),
            int(self.lane[index]),
        )

    def __iter__(self) -> Iterator[Episode]:
        return (self[i] for i in range(len(self)))

    def __repr__(self) -> str:
        if not len(self):
            return "Episodes(none)"
        return (
            f"Episodes({len(self)}: {int(self.length.sum())} steps, "
            f"mean length {self.length.mean():.1f}, mean return {self.returns.mean():.2f})"
        )
