"""Rows drawn as often as they are worth learning from: prioritized experience replay.

Schaul, Quan, Antonoglou and Silver, *Prioritized Experience Replay*, ICLR 2016,
`arXiv:1511.05952 <https://arxiv.org/abs/1511.05952>`_, the proportional variant.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Self

import numpy as np

from zbuffer.errors import RowNotFoundError, SampleError
from zbuffer.format.segments import Segments
from zbuffer.sampling.rowset import RowSet
from zbuffer.sampling.samplers import Draw
from zbuffer.sampling.sumtree import SumTree, keep_last

Array = np.ndarray[Any, Any]
Beta = float | Callable[[int], float]
#: Powers of priorities are from 1e-150 to 1e150, priorities from 1e-300 to 1e300: the
#: quotient of two powers, and the sum of many, are far from where float64 ends.
_POWER_DIGITS, _PRIORITY_DIGITS = 150, 300
#: Draws before the rows that may be drawn are looked for one by one.
_MAX_DRAWS = 32


class PriorityTable:
    """The priority of each row, and draws in proportion to its power ``p**alpha``.

    Parameters
    ----------
    alpha
        0 or above. At 0 all rows are equal; at 1 a row is drawn in proportion to its
        priority.

    Attributes
    ----------
    ignored
        How many priorities were given so far for rows that were not there any more.

    Notes
    -----
    Not thread-safe: whoever shares a table between threads locks it.
    """

    def __init__(self, alpha: float = 0.6) -> None:
        if not _is_number(alpha) or not 0 <= alpha < np.inf:
            raise ValueError(f"alpha must be a finite number from 0 on, got {alpha!r}")
        self.alpha = float(alpha)
        digits: float = _PRIORITY_DIGITS
        if alpha * _PRIORITY_DIGITS > _POWER_DIGITS:
            digits = _POWER_DIGITS / self.alpha
        self._range = (10.0**-digits, 10.0**digits)
        self.ignored = 0
        self._max = 1.0
        self._tree = SumTree()
        self._seen = _Seen()
        #: Priorities of the ids from `_base` on, 0 where there is no row.
        self._raw = np.zeros(64)
        self._base = 0
        self._is_restored = False

    @classmethod
    def from_state(
        cls, alpha: float, first_id: int, priorities: Array, max_priority: float
    ) -> Self:
        """Return a table with the priorities that :meth:`state` gave.

        Raises
        ------
        SampleError
            They are no priorities, or they are too large or too small for `alpha`.
        """
        table = cls(alpha)
        priorities = np.asarray(priorities, np.float64)
        first_id = int(first_id)
        ids = first_id + np.flatnonzero(priorities)
        values = priorities[ids - first_id]
        table._check_priorities(np.append(ids, first_id), np.append(values, max_priority))
        table._max = max(float(max_priority), float(values.max(initial=0.0)))
        table._tree = SumTree(first_id)
        table._base = first_id
        table._put(ids, values)
        table._is_restored = True
        return table

    def state(self) -> tuple[int, Array, float]:
        """Return what to keep.

        Returns
        -------
        first_id : int
        priorities : ndarray
            float64 (n,), of the ids from `first_id` on; 0 where there is no row.
        max_priority : float
            The largest one that any row ever had.
        """
        first, stop = self._tree.first, self._tree.stop
        return first, self._raw[first - self._base : stop - self._base].copy(), self._max

    def sync(self, rows: RowSet) -> None:
        """Take new rows in, at the largest priority so far, and let evicted ones go.

        Rows are new to the table once: where `rows` is of an earlier moment than what
        the table has seen already, nothing changes. The cost depends on how many rows are
        new and on the number of segments, not on the number of rows.
        """
        segments = rows.segments
        self._tree.drop(rows.first if segments is None else segments.first * segments.segment_rows)
        if self._is_restored:
            self._is_restored = False
            self._forget_others(rows)
        ids = self._seen.new_ids(rows)
        if len(ids):
            # After rows of an earlier moment, what is new to them was known before.
            ids = ids[(ids >= self._tree.first) & ~self._has(ids)]
            self._put(ids, np.full(len(ids), self._max))

    def update(self, ids: Any, priorities: Any) -> int:
        """Set the priorities of rows; where a row is named twice, the last one counts.

        Parameters
        ----------
        ids
            Row ids, of any integer dtype and any shape.
        priorities
            As many numbers above 0.

        Returns
        -------
        int
            How many were ignored: their row was evicted, or is not known by the last
            :meth:`sync`.

        Raises
        ------
        SampleError
            A priority is NaN, infinite, zero or negative, or there is not one for each
            id. Nothing has changed.
        """
        ids, priorities = self.checked(ids, priorities)
        there = self._has(ids)
        n_ignored = len(ids) - int(np.count_nonzero(there))
        if n_ignored:
            ids, priorities = ids[there], priorities[there]
            self.ignored += n_ignored
        if len(ids):
            self._put(*keep_last(ids, priorities))
        return n_ignored

    def checked(self, ids: Any, priorities: Any) -> tuple[Array, Array]:
        """Return the arguments of :meth:`update` as arrays, or raise as it does."""
        ids, priorities = _as_arrays(ids, priorities)
        self._check_priorities(ids, priorities)
        return ids.astype(np.int64), priorities

    def priorities(self, ids: Any) -> Array:
        """Return the priorities of rows as they were set, float64; 0 where there is no row."""
        ids = np.asarray(ids, np.int64)
        return np.where(self._has(ids), self._raw.take(ids - self._base, mode="clip"), 0.0)

    def powers(self, ids: Array) -> Array:
        """Return ``p**alpha`` of rows that are there, float64."""
        return self._tree.get(ids)

    @property
    def least_power(self) -> float:
        """The least ``p**alpha`` of all rows."""
        return self._tree.least

    def draw(self, n: int, rng: np.random.Generator) -> Array:
        """Draw `n` ids, each with probability ``p**alpha / sum(p**alpha)``, independently.

        Raises
        ------
        RowNotFoundError
            There are no rows.
        """
        total = self._tree.total
        if total == 0:
            raise RowNotFoundError("no row has a priority: they were evicted meanwhile")
        values = rng.random(n)
        values *= total
        return self._tree.find(values)

    def _has(self, ids: Array) -> Array:
        """Return which ids, which may be any, are rows with a priority."""
        inside = (ids >= self._tree.first) & (ids < self._tree.stop)
        there: Array = inside & (self._raw.take(ids - self._base, mode="clip") > 0)
        return there

    def _put(self, ids: Array, priorities: Array) -> None:
        """Set the priorities of ids in ascending order, which are rows."""
        if len(ids) == 0:
            return
        self._reserve(int(ids[-1]) + 1)
        self._raw[ids - self._base] = priorities
        self._tree.set(ids, priorities**self.alpha)
        self._max = max(self._max, float(priorities.max()))

    def _reserve(self, stop: int) -> None:
        """Make room for the ids up to `stop`."""
        first, known = self._tree.first, self._tree.stop
        if stop - self._base > len(self._raw):
            raw = np.zeros(2 * (stop - first))
            raw[: known - first] = self._raw[first - self._base : known - self._base]
            self._raw, self._base = raw, first
        self._tree.grow(stop)

    def _forget_others(self, rows: RowSet) -> None:
        """Take out the ids that are no rows: what was kept may speak of rows that were lost."""
        ids = np.arange(self._tree.first, self._tree.stop)
        lost = ids[self._has(ids) & ~rows.contains(ids)]
        self._raw[lost - self._base] = 0.0
        self._tree.set(lost, np.zeros(len(lost)))

    def _check_priorities(self, ids: Array, priorities: Array) -> None:
        """Refuse what cannot be a priority."""
        low, high = self._range
        wrong = np.flatnonzero(~((priorities >= low) & (priorities <= high)))
        if len(wrong) == 0:
            return
        row, got = ids[wrong[0]], priorities[wrong[0]]
        wanted = "a finite number above 0"
        if 0 < got < np.inf:
            wanted = f"from {low:.3g} to {high:.3g} where alpha is {self.alpha:g}"
        raise SampleError(f"the priority of row {row} must be {wanted}, got {got}")


class PrioritizedSampler:
    """Draws rows in proportion to ``p**alpha``, with replacement, and with weights.

    The weights undo the bias of the draw, wholly where beta is 1 (importance sampling):
    ``(N * P(i))**-beta``, over the largest that any row of the buffer could have.

    Parameters
    ----------
    table
        The priorities; more than one sampler may use it.
    beta
        From 0 to 1, or a function that gives it for each step.

    Notes
    -----
    Not thread-safe, as the table is not.
    """

    independent = True

    def __init__(self, table: PriorityTable, beta: Beta = 0.4) -> None:
        self._table = table
        self._beta = beta if callable(beta) else _check_beta(beta)
        self._step = 0

    def begin(self, step: int) -> None:
        """Set the step of the batch that is drawn next, for which beta is asked."""
        self._step = step

    def draw(self, n: int, rows: RowSet, rng: np.random.Generator, /) -> Draw:
        """Choose `n` ids of `rows`, with weights in ``(0, 1]``.

        Raises
        ------
        RowNotFoundError
            All of `rows` were evicted, as the table has seen already.
        ValueError
            What the function for beta gave is not from 0 to 1.
        """
        beta = self._beta
        if callable(beta):
            beta = _check_beta(beta(self._step), f" at step {self._step}")
        self._table.sync(rows)
        ids = self._draw_inside(n, rows, rng)
        # N and the sum of all powers are the same in both weights of the quotient.
        return Draw(ids, (self._table.least_power / self._table.powers(ids)) ** beta)

    def _draw_inside(self, n: int, rows: RowSet, rng: np.random.Generator) -> Array:
        """Draw until all are in `rows`.

        The table may know rows that came later, or rows that a rollback took away.
        """
        ids = self._table.draw(n, rng)
        outside = np.flatnonzero(~rows.contains(ids))
        for _ in range(_MAX_DRAWS):
            if len(outside) == 0:
                return ids
            ids[outside] = self._table.draw(len(outside), rng)
            outside = outside[~rows.contains(ids[outside])]
        ids[outside] = self._draw_from_scan(len(outside), rows, rng)
        return ids

    def _draw_from_scan(self, n: int, rows: RowSet, rng: np.random.Generator) -> Array:
        ids = rows.ids(np.arange(len(rows)))
        ids = ids[self._table.priorities(ids) > 0]
        if len(ids) == 0:
            raise RowNotFoundError(f"all {len(rows)} rows were evicted before they were drawn")
        sums = np.cumsum(self._table.powers(ids))
        places = sums.searchsorted(rng.random(n) * sums[-1], "right")
        drawn: Array = ids[np.minimum(places, len(ids) - 1)]
        return drawn


class _Seen:
    """Which rows there were the last time."""

    def __init__(self) -> None:
        self._stop = 0
        self._segments: Segments | None = None
        self._first = 0
        self._used: Array = np.zeros(0, np.int64)

    def new_ids(self, rows: RowSet) -> Array:
        """Return the ids of the rows that were not there the last time, ascending."""
        if rows.segments is None:
            ids = np.arange(max(self._stop, rows.first), rows.stop)
            self._stop = rows.stop
            return ids
        if rows.segments is self._segments:
            return np.zeros(0, np.int64)
        self._segments = rows.segments
        return self._new_in_segments(rows.segments)

    def _new_in_segments(self, segments: Segments) -> Array:
        first = max(self._first, segments.first)
        known = self._used[first - self._first :]
        used = segments.used[first - segments.first :]
        before = np.zeros(len(used), np.int64)
        n = min(len(known), len(used))
        before[:n] = known[:n]
        self._first, self._used = first, used
        grown = np.flatnonzero(used > before)
        start = (first + grown) * segments.segment_rows + before[grown]
        return _ranges(start, used[grown] - before[grown])


def _ranges(start: Array, count: Array) -> Array:
    """Return all numbers of ranges one after the other, int64."""
    ends = np.cumsum(count)
    n = int(ends[-1]) if len(ends) else 0
    return np.repeat(start - (ends - count), count) + np.arange(n)


def _as_arrays(ids: Any, priorities: Any) -> tuple[Array, Array]:
    """Return ids, and priorities as float64, both (n,)."""
    ids, priorities = np.asarray(ids), np.asarray(priorities)
    if ids.shape != priorities.shape:
        raise SampleError(
            f"there must be one priority a row, got {priorities.shape} for ids {ids.shape}"
        )
    if ids.size and ids.dtype.kind not in "iu":
        raise SampleError(f"row ids are whole numbers, got {ids.dtype}")
    if priorities.dtype.kind not in "iuf":
        raise SampleError(f"priorities are real numbers, got {priorities.dtype}")
    with np.errstate(over="ignore"):
        return ids.reshape(-1), priorities.reshape(-1).astype(np.float64)


def _check_beta(beta: Any, when: str = "") -> float:
    if not _is_number(beta) or not 0 <= beta <= 1:
        raise ValueError(f"beta must be from 0 to 1, got {beta!r}{when}")
    return float(beta)


def _is_number(value: Any) -> bool:
    return isinstance(value, int | float | np.integer | np.floating) and not isinstance(value, bool)
