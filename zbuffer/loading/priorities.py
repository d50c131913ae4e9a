"""The priorities of a buffer's rows: shared by its loaders, kept with the buffer."""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import Any

import numpy as np

from zbuffer.sampling.prioritized import PrioritizedSampler, PriorityTable
from zbuffer.sampling.rowset import RowSet
from zbuffer.sampling.samplers import Draw

Array = np.ndarray[Any, Any]
Beta = float | Callable[[int], float]
DEFAULT_ALPHA = 0.6


class Priorities:
    """One table of priorities for each exponent that is asked for.

    Parameters
    ----------
    load
        Called once, before the first use, for what was kept: the id of the first row,
        float64 priorities from there on, and the largest ever seen; None for nothing.

    Notes
    -----
    Any thread may call the methods.
    """

    def __init__(self, load: Callable[[], tuple[int, Array, float] | None]) -> None:
        self._load = load
        self._lock = threading.RLock()
        self._tables: dict[float, PriorityTable] = {}
        self._changed = False

    @property
    def used(self) -> bool:
        """Whether there are priorities at all."""
        return bool(self._tables)

    def sampler(self, alpha: float = DEFAULT_ALPHA, beta: Beta = 0.4) -> LockedSampler:
        """Return a sampler over the table of an exponent."""
        return LockedSampler(PrioritizedSampler(self._table(alpha), beta), self._lock)

    def update(self, rows: RowSet, ids: Any, priorities: Any) -> int:
        """Set priorities; returns how many were of rows that are not there any more."""
        with self._lock:
            self.check(ids, priorities)
            ignored = 0
            for table in self._tables.values():
                table.sync(rows)
                ignored = table.update(ids, priorities)
            self._changed = True
            return ignored

    def check(self, ids: Any, priorities: Any) -> None:
        """Raise as :meth:`update` would; what one exponent cannot hold, none gets."""
        with self._lock:
            self._table()
            for table in self._tables.values():
                table.checked(ids, priorities)

    def get(self, rows: RowSet, ids: Any) -> Array:
        """Return priorities, float64."""
        with self._lock:
            table = self._table()
            table.sync(rows)
            return table.priorities(ids)

    def take_changed(self) -> tuple[int, Array, float] | None:
        """Return what is to be kept, if it has changed since the last call."""
        with self._lock:
            if not self._changed:
                return None
            self._changed = False
            return self._table().state()

    def _table(self, alpha: float | None = None) -> PriorityTable:
        """Return the table of an exponent, or any."""
        with self._lock:
            if alpha is None:
                alpha = next(iter(self._tables), DEFAULT_ALPHA)
            table = self._tables.get(alpha)
            if table is None:
                kept = next(iter(self._tables.values())).state() if self._tables else self._load()
                table = PriorityTable(alpha)
                if kept is not None:
                    table = PriorityTable.from_state(alpha, *kept)
                self._tables[alpha] = table
            return table


class LockedSampler:
    """A prioritized sampler whose table other threads update."""

    independent = True

    def __init__(self, sampler: PrioritizedSampler, lock: threading.RLock) -> None:
        self._sampler = sampler
        self._lock = lock

    def begin(self, step: int) -> None:
        """Set the step of a schedule."""
        self._sampler.begin(step)

    def draw(self, n: int, rows: RowSet, rng: np.random.Generator, /) -> Draw:
        """Choose `n` ids of `rows`, with weights."""
        with self._lock:
            return self._sampler.draw(n, rows, rng)
