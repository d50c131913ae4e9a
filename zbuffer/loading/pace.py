"""How fast learning may run against collecting."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

from zbuffer.errors import ClosedError

#: Rows may grow in another process, which cannot wake us: they are looked at in
#: intervals that grow from the first to the last.
_FIRST_LOOK_S, _LAST_LOOK_S = 0.001, 0.05


@dataclass(frozen=True, slots=True)
class Pace:
    """How often rows may be sampled.

    Parameters
    ----------
    min_rows
        Rows that have to be there before the first sample.
    samples_per_insert
        Samples per row, on average; None for no limit.
    tolerance
        Samples by which either side may be ahead of that. By default one batch, and
        what one batch's worth of rows allows.
    """

    min_rows: int = 0
    samples_per_insert: float | None = None
    tolerance: float | None = None

    def __post_init__(self) -> None:
        whole = isinstance(self.min_rows, int) and not isinstance(self.min_rows, bool)
        if not whole or self.min_rows < 0:
            raise ValueError(f"min_rows must be a whole number from 0 on, got {self.min_rows!r}")
        if self.samples_per_insert is None:
            if self.tolerance is not None:
                raise ValueError("tolerance needs samples_per_insert")
        elif not _is_number(self.samples_per_insert) or self.samples_per_insert <= 0:
            raise ValueError(f"samples_per_insert must be above 0, got {self.samples_per_insert!r}")
        if self.tolerance is not None and not (_is_number(self.tolerance) and self.tolerance >= 0):
            raise ValueError(f"tolerance must be 0 or more, got {self.tolerance!r}")


@dataclass(frozen=True, slots=True)
class PaceStatistics:
    """How learning and collecting have kept pace.

    Attributes
    ----------
    samples, rows
        So far; rows that were there at the start count.
    samples_per_insert
        The quotient of both, rows below `min_rows` left out; 0 without rows.
    waited_s
        Seconds that sampling waited for rows.
    """

    samples: int
    rows: int
    samples_per_insert: float
    waited_s: float


class PaceKeeper:
    """Counts samples against rows, and waits.

    Parameters
    ----------
    rows
        Returns how many rows were ever appended.

    Notes
    -----
    Any thread may call the methods. :meth:`close` wakes whoever waits.
    """

    def __init__(self, pace: Pace, rows: Callable[[], int]) -> None:
        self._pace = pace
        self._rows = rows
        self._changed = threading.Condition()
        self._samples = 0
        self._waited_s = 0.0
        self._closed = False

    def may_take(self, n: int) -> bool:
        """Whether `n` rows may be sampled now."""
        rows, pace = self._rows(), self._pace
        if rows < pace.min_rows:
            return False
        if pace.samples_per_insert is None:
            return True
        tolerance = n if pace.tolerance is None else pace.tolerance
        # Never less than one batch: it could not be taken however many rows come.
        ahead = self._samples + n - pace.samples_per_insert * (rows - pace.min_rows)
        return ahead <= max(tolerance, 0)

    def may_append(self, n: int = 1) -> bool:
        """Whether `n` rows may be appended now without collecting running ahead."""
        pace = self._pace
        if pace.samples_per_insert is None:
            return True
        rows = self._rows() + n - pace.min_rows
        if rows <= 0:
            return True
        tolerance = pace.samples_per_insert * n if pace.tolerance is None else pace.tolerance
        return pace.samples_per_insert * rows - self._samples <= tolerance

    def wait(self, n: int, stop: Callable[[], bool]) -> None:
        """Wait until `n` rows may be sampled.

        Raises
        ------
        ClosedError
            `stop` has said so, or the keeper was closed.
        """
        self._wait(lambda: self.may_take(n), stop, None)

    def wait_to_append(self, n: int = 1, timeout_s: float | None = None) -> bool:
        """Wait until `n` rows may be appended; False where the time is over before."""
        return self._wait(lambda: self.may_append(n), lambda: False, timeout_s)

    def took(self, n: int) -> None:
        """Count samples."""
        with self._changed:
            self._samples += n
            self._changed.notify_all()

    def notify(self) -> None:
        """Look at the rows now."""
        with self._changed:
            self._changed.notify_all()

    def close(self) -> None:
        """Wake whoever waits, with an error."""
        with self._changed:
            self._closed = True
            self._changed.notify_all()

    def statistics(self) -> PaceStatistics:
        """Return the counts so far."""
        rows = self._rows()
        counted = max(rows - self._pace.min_rows, 0)
        with self._changed:
            ratio = self._samples / counted if counted else 0.0
            return PaceStatistics(self._samples, rows, ratio, self._waited_s)

    def state_dict(self) -> dict[str, Any]:
        """Return what is counted, as plain values."""
        return {"samples": self._samples}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Go on with another keeper's counts."""
        with self._changed:
            self._samples = int(state["samples"])

    def _wait(
        self, may: Callable[[], bool], stop: Callable[[], bool], timeout_s: float | None
    ) -> bool:
        start = time.monotonic()
        look_s = _FIRST_LOOK_S
        with self._changed:
            while not self._closed and not stop():
                if may():
                    self._waited_s += time.monotonic() - start
                    return True
                if timeout_s is not None and time.monotonic() - start >= timeout_s:
                    return False
                self._changed.wait(look_s)
                look_s = min(2 * look_s, _LAST_LOOK_S)
        raise ClosedError("the loader is closed")


def _is_number(value: Any) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool) and value == value
