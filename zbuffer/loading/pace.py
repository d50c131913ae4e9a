"""How fast learning may run against collecting."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from math import isfinite
from numbers import Integral, Real
from typing import Any, Literal

from zbuffer.errors import ClosedError

Side = Literal["collecting", "learning"]
#: Rows may be appended by another process, which cannot wake us: they are looked at in
#: intervals that double from the first to the longest.
_FIRST_LOOK_S, _LONGEST_LOOK_S = 0.001, 0.05
#: Batches by which either side may be ahead by default: one that is being made and one
#: made ahead, so that neither side waits for the other at every step.
_DEFAULT_TOLERANCE = 2


@dataclass(frozen=True, slots=True)
class Pace:
    """How many samples there may be for each row.

    A *sample* is one row of a batch; rows are counted from the first that was ever
    appended, evicted ones too. Learning is ahead by
    ``samples - samples_per_insert * (rows - min_rows)`` samples.

    Parameters
    ----------
    min_rows
        Rows that have to be there before the first batch.
    samples_per_insert
        Samples for each further row, on average; None for no limit.
    tolerance
        Samples by which either side may be ahead; two batches by default, and on the
        side of collecting never less than what is appended at once.

    Raises
    ------
    ValueError
        A number is out of its range, or there is a tolerance of nothing.
    """

    min_rows: int = 0
    samples_per_insert: float | None = None
    tolerance: float | None = None

    def __post_init__(self) -> None:
        whole = isinstance(self.min_rows, Integral) and not isinstance(self.min_rows, bool)
        if not whole or self.min_rows < 0:
            raise ValueError(f"min_rows must be a whole number from 0 on, got {self.min_rows!r}")
        ratio, tolerance = self.samples_per_insert, self.tolerance
        if ratio is not None and not (_is_number(ratio) and isfinite(ratio) and ratio > 0):
            raise ValueError(f"samples_per_insert must be a number above 0, got {ratio!r}")
        # NaN is not at least 0 either.
        if tolerance is not None and not (_is_number(tolerance) and tolerance >= 0):
            raise ValueError(f"tolerance must be a number from 0 on, got {tolerance!r}")
        if tolerance is not None and ratio is None:
            raise ValueError(f"tolerance={tolerance!r} needs samples_per_insert, which is None")

    def may_take(self, batch_size: int, *, rows: int, samples: int) -> bool:
        """Return whether a batch may be sampled after so many rows and samples."""
        if rows < self.min_rows:
            return False
        if self.samples_per_insert is None:
            return True
        tolerance = self._tolerance(batch_size, 0)
        return samples + batch_size - self.samples_per_insert * (rows - self.min_rows) <= tolerance

    def may_append(self, n: int, *, rows: int, samples: int, batch_size: int = 0) -> bool:
        """Return whether `n` rows may be appended without collecting being ahead.

        `batch_size` is that of the next batch, 0 where it is not known. As long as that
        batch has to wait for rows, the answer is yes, however small the tolerance: else
        both sides could wait for each other.
        """
        if self.samples_per_insert is None:
            return True
        if not self.may_take(batch_size, rows=rows, samples=samples):
            return True
        tolerance = self._tolerance(batch_size, n)
        return self.samples_per_insert * (rows + n - self.min_rows) - samples <= tolerance

    def _tolerance(self, batch_size: int, n: int) -> float:
        if self.tolerance is not None:
            return self.tolerance
        assert self.samples_per_insert is not None
        return max(_DEFAULT_TOLERANCE * batch_size, self.samples_per_insert * n)


@dataclass(frozen=True, slots=True)
class PaceStatistics:
    """How learning and collecting have kept pace so far.

    Attributes
    ----------
    samples, rows
        What was sampled, and what was appended: all of it, not only since a resume.
    samples_per_insert
        Samples for each row beyond `min_rows`; 0.0 where there is none.
    waited_s
        Seconds that sampling waited for rows.
    append_waited_s
        Seconds that appending waited for samples.
    behind
        ``"collecting"`` if the next batch has to wait, ``"learning"`` if the next row
        should, None where neither does.
    rows_at_start
        Rows there were when counting began, which may have been before a resume.
    """

    samples: int
    rows: int
    samples_per_insert: float
    waited_s: float
    append_waited_s: float
    behind: Side | None
    rows_at_start: int


class Clock:
    """The time, and the passing of it; tests bring their own."""

    def now(self) -> float:
        """Return seconds that only grow."""
        return time.monotonic()

    def wait(self, changed: threading.Condition, seconds: float) -> None:
        """Wait until `changed`, which is held, is notified, or so many seconds."""
        changed.wait(seconds)


class PaceKeeper:
    """Counts samples against rows, and lets the side that is ahead wait.

    Parameters
    ----------
    pace
        The rule.
    rows
        Returns how many rows were ever appended, by whichever process.
    clock
        What tells the time.

    Notes
    -----
    Any thread may call the methods; of those that sample, one at a time between
    :meth:`wait` and :meth:`took`. Neither `rows` nor `stop` is called with the lock held:
    they may take locks of their own, under which others call :meth:`notify`.
    """

    def __init__(self, pace: Pace, rows: Callable[[], int], *, clock: Clock | None = None) -> None:
        self._pace = pace
        self._rows = rows
        self._clock = clock or Clock()
        self._changed = threading.Condition()
        self._closed = False
        self._n_changes = 0
        self._samples = 0
        self._batch_size = 0
        self._waited_s = 0.0
        self._append_waited_s = 0.0
        self._rows_at_start = rows()

    def may_take(self, batch_size: int) -> bool:
        """Return whether a batch may be sampled now."""
        self._ask(batch_size)
        return self._can_take(batch_size)

    def may_append(self, n: int = 1) -> bool:
        """Return whether `n` rows may be appended now; False says that it should wait.

        Nothing keeps a collecting loop from appending all the same.
        """
        rows = self._rows()
        with self._changed:
            return self._may_append(n, rows)

    def wait(self, batch_size: int, stop: Callable[[], bool]) -> float:
        """Wait until a batch may be sampled; returns the seconds it took.

        `stop` is asked before each look at the rows, so within 50 ms of a change that
        nobody gives notice of, and at once after :meth:`notify`.

        Raises
        ------
        ClosedError
            `stop` has said True, or :meth:`close` was called.
        """
        self._ask(batch_size)
        start = self._clock.now()
        try:
            self._wait_until(self._can_take, batch_size, stop, None)
        finally:
            waited_s = self._clock.now() - start
            with self._changed:
                self._waited_s += waited_s
        return waited_s

    def wait_to_append(self, n: int = 1, *, timeout_s: float | None = None) -> bool:
        """Wait until `n` rows may be appended; False where the time is up before.

        Without `timeout_s` it waits as long as nobody samples: collect `min_rows` rows
        and start learning first, or sample in another thread.

        Raises
        ------
        ClosedError
            :meth:`close` was called.
        """
        start = self._clock.now()
        deadline = None if timeout_s is None else start + timeout_s
        try:
            return self._wait_until(self.may_append, n, lambda: False, deadline)
        finally:
            waited_s = self._clock.now() - start
            with self._changed:
                self._append_waited_s += waited_s

    def took(self, batch_size: int) -> None:
        """Count a batch that was sampled."""
        with self._changed:
            self._samples += batch_size
            self._wake()

    def notify(self) -> None:
        """Let whoever waits look at once: rows were appended, or `stop` would say True."""
        with self._changed:
            self._wake()

    def close(self) -> None:
        """End all waiting, now and from now on; calling it again does nothing."""
        with self._changed:
            self._closed = True
            self._wake()

    def statistics(self) -> PaceStatistics:
        """Return the counts so far."""
        rows = self._rows()
        with self._changed:
            beyond = rows - self._pace.min_rows
            return PaceStatistics(
                samples=self._samples,
                rows=rows,
                samples_per_insert=self._samples / beyond if beyond > 0 else 0.0,
                waited_s=self._waited_s,
                append_waited_s=self._append_waited_s,
                behind=self._behind(rows),
                rows_at_start=self._rows_at_start,
            )

    def state_dict(self) -> dict[str, Any]:
        """Return what has to be known to go on counting: plain values that JSON can hold."""
        with self._changed:
            return {"samples": self._samples, "rows_at_start": self._rows_at_start}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Go on with the counts of another keeper, over the same rows.

        Raises
        ------
        ValueError
            It is no state of a keeper, or there are fewer rows than that one began with.
        """
        for name in ("samples", "rows_at_start"):
            if name not in state:
                raise ValueError(f"this is no state of a pace: {name!r} is missing")
        samples, rows_at_start = int(state["samples"]), int(state["rows_at_start"])
        rows = self._rows()
        if rows < rows_at_start:
            raise ValueError(
                f"the state is of a buffer that had {rows_at_start} rows, this one has {rows}"
            )
        with self._changed:
            self._samples = samples
            self._rows_at_start = rows_at_start
            self._wake()

    def _wait_until(
        self,
        may: Callable[[int], bool],
        n: int,
        stop: Callable[[], bool],
        deadline: float | None,
    ) -> bool:
        """Return whether `n` was allowed in time."""
        look_s = _FIRST_LOOK_S
        while True:
            with self._changed:
                # Counted before the look: a change after it is not slept through.
                n_changes = self._n_changes
            if self._closed or stop():
                raise ClosedError("the loader is closed")
            if may(n):
                return True
            pause_s = look_s
            if deadline is not None:
                pause_s = min(look_s, deadline - self._clock.now())
                if pause_s <= 0:
                    return False
            with self._changed:
                if n_changes == self._n_changes:
                    self._clock.wait(self._changed, pause_s)
            look_s = min(2 * look_s, _LONGEST_LOOK_S)

    def _ask(self, batch_size: int) -> None:
        """Keep the size of the next batch: appending goes by it."""
        with self._changed:
            if batch_size != self._batch_size:
                self._batch_size = batch_size
                self._wake()

    def _can_take(self, batch_size: int) -> bool:
        rows = self._rows()
        with self._changed:
            return self._pace.may_take(batch_size, rows=rows, samples=self._samples)

    def _wake(self) -> None:
        self._n_changes += 1
        self._changed.notify_all()

    def _may_append(self, n: int, rows: int) -> bool:
        return self._pace.may_append(
            n, rows=rows, samples=self._samples, batch_size=self._batch_size
        )

    def _behind(self, rows: int) -> Side | None:
        if not self._pace.may_take(self._batch_size, rows=rows, samples=self._samples):
            return "collecting"
        return None if self._may_append(1, rows) else "learning"


def _is_number(value: Any) -> bool:
    return isinstance(value, Real) and not isinstance(value, bool)
