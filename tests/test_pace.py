"""Does the side that is ahead wait, and only that one, and not for ever?"""

from __future__ import annotations

import json
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from fractions import Fraction
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from zbuffer.errors import ClosedError
from zbuffer.loading.pace import Clock, Pace, PaceKeeper

#: No test waits so long, unless it fails.
LONG_S = 60.0


class Rows:
    """A count that grows."""

    def __init__(self, n: int = 0) -> None:
        self.n = n

    def __call__(self) -> int:
        return self.n


class FakeClock(Clock):
    """Time passes only while somebody waits; `meanwhile` is told how much of it has."""

    def __init__(self, meanwhile: Callable[[float], None] = lambda now: None) -> None:
        self.time = 0.0
        self.pauses: list[float] = []
        self._meanwhile = meanwhile

    def now(self) -> float:
        return self.time

    def wait(self, changed: threading.Condition, seconds: float) -> None:
        self.pauses.append(seconds)
        self.time += seconds
        self._meanwhile(self.time)


class PatientClock(Clock):
    """Waits until it is woken, and says when it begins to."""

    def __init__(self) -> None:
        self.asleep = threading.Semaphore(0)

    def wait(self, changed: threading.Condition, seconds: float) -> None:
        self.asleep.release()
        assert changed.wait(LONG_S), "nobody gave notice"


def never() -> bool:
    return False


@contextmanager
def running(*calls: Callable[[], Any]) -> Iterator[list[Any]]:
    """Run each call on a thread; gives the list of what they answered or raised."""
    answers: list[Any] = [None] * len(calls)

    def run(i: int) -> None:
        try:
            answers[i] = calls[i]()
        except ClosedError as error:
            answers[i] = error

    threads = [threading.Thread(target=run, args=(i,), daemon=True) for i in range(len(calls))]
    for thread in threads:
        thread.start()
    yield answers
    for thread in threads:
        thread.join(LONG_S)
        assert not thread.is_alive(), "a thread still waits"


# The options


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"min_rows": -1}, "min_rows must be a whole number from 0 on, got -1"),
        ({"min_rows": 1.5}, "min_rows must be a whole number from 0 on, got 1.5"),
        ({"min_rows": True}, "min_rows must be a whole number from 0 on, got True"),
        ({"samples_per_insert": 0}, "samples_per_insert must be a number above 0, got 0"),
        ({"samples_per_insert": -2.0}, "samples_per_insert must be a number above 0, got -2.0"),
        ({"samples_per_insert": "8"}, "samples_per_insert must be a number above 0, got '8'"),
        (
            {"samples_per_insert": float("nan")},
            "samples_per_insert must be a number above 0, got nan",
        ),
        (
            {"samples_per_insert": float("inf")},
            "samples_per_insert must be a number above 0, got inf",
        ),
        (
            {"samples_per_insert": 1.0, "tolerance": -0.5},
            "tolerance must be a number from 0 on, got -0.5",
        ),
        (
            {"samples_per_insert": 1.0, "tolerance": float("nan")},
            "tolerance must be a number from 0 on, got nan",
        ),
        ({"tolerance": 4}, "tolerance=4 needs samples_per_insert, which is None"),
    ],
)
def test_a_pace_that_makes_no_sense_is_refused(options: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError) as caught:  # noqa: PT011
        Pace(**options)

    assert str(caught.value) == message


def test_numbers_of_numpy_are_numbers() -> None:
    pace = Pace(np.int64(3), np.float32(0.5), tolerance=np.int32(0))

    assert pace.may_take(1, rows=5, samples=0)
    assert not pace.may_take(2, rows=5, samples=0)


def test_without_options_nothing_ever_waits() -> None:
    assert Pace() == Pace(0, None, None)
    assert Pace().may_take(1000, rows=0, samples=10**9)
    assert Pace().may_append(1000, rows=10**9, samples=0)


# The rule


def test_sampling_waits_for_the_first_rows() -> None:
    assert not Pace(min_rows=10).may_take(1, rows=9, samples=0)
    assert Pace(min_rows=10).may_take(1, rows=10, samples=0)
    assert not Pace(10, 8.0, tolerance=1000).may_take(1, rows=9, samples=0)


@pytest.mark.parametrize(
    ("rows", "samples", "may_take"),
    [
        (10, 0, True),  # 0 + 4 - 0 <= 4
        (10, 1, False),
        (11, 2, True),  # 2 + 4 - 2 <= 4
        (11, 3, False),
        (20, 20, True),
        (20, 21, False),
    ],
)
def test_sampling_waits_where_learning_is_ahead_by_more_than_the_tolerance(
    rows: int, samples: int, may_take: bool
) -> None:
    pace = Pace(min_rows=10, samples_per_insert=2.0, tolerance=4)

    assert pace.may_take(4, rows=rows, samples=samples) is may_take


@pytest.mark.parametrize(
    ("rows", "samples", "may_append"),
    [
        (10, 0, True),  # 2 * 2 - 0 <= 4
        (11, 0, False),
        (11, 2, True),  # 2 * 3 - 2 <= 4
        (11, 1, False),
        (19, 18, True),
        (19, 17, False),
    ],
)
def test_appending_waits_where_collecting_is_ahead_by_more_than_the_tolerance(
    rows: int, samples: int, may_append: bool
) -> None:
    pace = Pace(min_rows=10, samples_per_insert=2.0, tolerance=4)

    assert pace.may_append(2, rows=rows, samples=samples) is may_append


def test_the_first_rows_are_appended_without_waiting_also_all_at_once() -> None:
    pace = Pace(min_rows=10, samples_per_insert=2.0, tolerance=0)

    assert pace.may_append(500, rows=9, samples=0)


def test_a_tolerance_is_two_batches_by_default() -> None:
    pace = Pace(samples_per_insert=1.0)

    assert pace.may_take(8, rows=100, samples=108)
    assert not pace.may_take(8, rows=100, samples=109)
    assert pace.may_append(1, rows=115, samples=100, batch_size=8)
    assert not pace.may_append(1, rows=116, samples=100, batch_size=8)


def test_a_default_tolerance_lets_any_number_of_rows_be_appended_at_once() -> None:
    pace = Pace(samples_per_insert=4.0)

    assert pace.may_append(1000, rows=50, samples=200, batch_size=8)
    assert not pace.may_append(1000, rows=51, samples=200, batch_size=8)


PACES = st.builds(
    Pace,
    st.integers(0, 20),
    st.fractions(Fraction(1, 8), 8, max_denominator=8),
    st.none() | st.integers(0, 40),
)


@given(PACES, st.integers(1, 16), st.integers(1, 16), st.integers(0, 100), st.integers(0, 500))
def test_never_do_both_sides_have_to_wait(
    pace: Pace, batch_size: int, n: int, rows: int, samples: int
) -> None:
    may_take = pace.may_take(batch_size, rows=rows, samples=samples)

    assert may_take or pace.may_append(n, rows=rows, samples=samples, batch_size=batch_size)


@given(PACES, st.integers(1, 16), st.integers(1, 16), st.lists(st.booleans(), max_size=60))
def test_whoever_is_first_both_sides_stay_within_the_tolerance(
    pace: Pace, batch_size: int, n: int, learning_first: list[bool]
) -> None:
    rows = Rows()
    keeper = PaceKeeper(pace, rows)
    ratio = Fraction(pace.samples_per_insert or 0)
    ahead = max(2 * batch_size, ratio * n) if pace.tolerance is None else Fraction(pace.tolerance)
    # With a tolerance too small for both, collecting goes on until a batch may be taken.
    behind = max(ahead, batch_size + ratio * n - ahead)
    first = pace.min_rows + n

    for learning in learning_first:
        may_take = keeper.may_take(batch_size)
        if may_take and (learning or not keeper.may_append(n)):
            keeper.took(batch_size)
        else:
            rows.n += n
        samples = keeper.statistics().samples
        difference = samples - ratio * max(rows.n - pace.min_rows, 0)
        assert difference <= ahead
        assert rows.n <= first or -difference <= behind


# Waiting


def test_what_is_allowed_does_not_wait() -> None:
    clock = FakeClock()
    keeper = PaceKeeper(Pace(min_rows=5), Rows(5), clock=clock)

    assert keeper.wait(8, never) == 0.0
    assert keeper.wait_to_append(3)
    assert clock.pauses == []


def test_rows_of_another_process_are_looked_at_in_growing_intervals() -> None:
    rows = Rows()

    def meanwhile(now: float) -> None:
        rows.n = 5 if now > 0.2 else 0

    clock = FakeClock(meanwhile)
    keeper = PaceKeeper(Pace(min_rows=5), rows, clock=clock)

    waited_s = keeper.wait(8, never)

    milliseconds = [round(1000 * s) for s in clock.pauses]
    assert milliseconds == [1, 2, 4, 8, 16, 32, 50, 50, 50]
    assert waited_s == pytest.approx(0.213)
    assert keeper.statistics().waited_s == waited_s


def test_a_wait_ends_where_stop_says_so_and_its_time_counts() -> None:
    clock = FakeClock()
    keeper = PaceKeeper(Pace(min_rows=5), Rows(), clock=clock)

    with pytest.raises(ClosedError, match="the loader is closed"):
        keeper.wait(8, lambda: clock.time > 1)

    assert 1 < keeper.statistics().waited_s < 1.06


def test_a_wait_to_append_ends_with_its_time() -> None:
    clock = FakeClock()
    keeper = PaceKeeper(Pace(samples_per_insert=1.0, tolerance=4), Rows(4), clock=clock)

    assert not keeper.wait_to_append(1, timeout_s=0.1)
    assert clock.time == pytest.approx(0.1)
    assert keeper.statistics().append_waited_s == pytest.approx(0.1)
    assert not keeper.wait_to_append(1, timeout_s=0)
    assert clock.time == pytest.approx(0.1)


def test_an_error_of_the_count_of_rows_comes_through() -> None:
    closed = False

    def rows() -> int:
        if closed:
            raise ClosedError("the buffer is closed")
        return 0

    keeper = PaceKeeper(Pace(min_rows=1), rows)
    closed = True

    with pytest.raises(ClosedError, match="the buffer is closed"):
        keeper.wait(8, never)


# Threads


def test_close_wakes_everybody_at_once() -> None:
    clock = PatientClock()
    rows = Rows(100)
    pace = Pace(samples_per_insert=1.0, tolerance=100)
    learning, collecting = (PaceKeeper(pace, rows, clock=clock) for _ in range(2))
    learning.took(150)

    takers = [lambda: learning.wait(64, never)] * 3
    appenders = [lambda: collecting.wait_to_append(1), lambda: collecting.wait_to_append(7)]
    with running(*takers, *appenders) as answers:
        for _ in answers:
            assert clock.asleep.acquire(timeout=LONG_S)
        learning.close()
        collecting.close()

    assert [str(answer) for answer in answers] == ["the loader is closed"] * 5


def test_after_close_nobody_waits_any_more() -> None:
    keeper = PaceKeeper(Pace(min_rows=1), Rows(5))
    keeper.close()
    keeper.close()

    with pytest.raises(ClosedError):
        keeper.wait(1, never)
    with pytest.raises(ClosedError):
        keeper.wait_to_append(1)
    assert keeper.statistics().rows == 5


def test_notice_of_rows_wakes_sampling() -> None:
    clock = PatientClock()
    rows = Rows()
    keeper = PaceKeeper(Pace(min_rows=2), rows, clock=clock)

    with running(lambda: keeper.wait(8, never)) as answers:
        for _ in range(2):
            assert clock.asleep.acquire(timeout=LONG_S)
            rows.n += 1
            keeper.notify()

    assert answers[0] > 0


def test_samples_wake_appending() -> None:
    clock = PatientClock()
    keeper = PaceKeeper(Pace(samples_per_insert=1.0, tolerance=4), Rows(8), clock=clock)

    with running(lambda: keeper.wait_to_append(1)) as answers:
        assert clock.asleep.acquire(timeout=LONG_S)
        keeper.took(4)
        assert clock.asleep.acquire(timeout=LONG_S)
        keeper.took(1)

    assert answers == [True]


def test_a_batch_that_has_to_wait_lets_appending_go_on() -> None:
    clock = PatientClock()
    rows = Rows(2)
    keeper = PaceKeeper(Pace(samples_per_insert=1.0, tolerance=2), rows, clock=clock)

    with running(lambda: keeper.wait_to_append(1)) as appended:
        assert clock.asleep.acquire(timeout=LONG_S)
        assert not keeper.may_take(5)

    assert appended == [True]


def test_a_change_between_the_look_and_the_pause_is_not_slept_through() -> None:
    rows = Rows()
    clock = PatientClock()

    def count() -> int:
        seen = rows.n
        if threading.current_thread() is not threading.main_thread():
            rows.n = 5
            keeper.notify()
        return seen

    keeper = PaceKeeper(Pace(min_rows=5), count, clock=clock)
    with running(lambda: keeper.wait(8, never)):
        pass

    assert not clock.asleep.acquire(blocking=False)


def test_a_close_between_the_look_and_the_pause_is_not_slept_through() -> None:
    clock = PatientClock()
    looks = 0

    def count() -> int:
        nonlocal looks
        looks += 1
        if looks == 2:
            keeper.close()
        return 0

    keeper = PaceKeeper(Pace(min_rows=5), count, clock=clock)
    with running(lambda: keeper.wait(8, never)) as answers:
        pass

    assert isinstance(answers[0], ClosedError)
    assert not clock.asleep.acquire(blocking=False)


def test_notice_may_be_given_under_the_lock_that_the_count_of_rows_takes() -> None:
    lock = threading.Lock()
    rows = Rows()
    counting = threading.Event()

    def count() -> int:
        if threading.current_thread() is not threading.main_thread():
            counting.set()
        with lock:
            return rows.n

    keeper = PaceKeeper(Pace(min_rows=1), count, clock=PatientClock())
    lock.acquire()
    with running(lambda: keeper.wait(8, never)) as answers:
        assert counting.wait(LONG_S)
        # Now the thread waits for the lock. It must not hold that of the keeper.
        with running(keeper.notify, lambda: keeper.took(1)):
            pass
        rows.n = 1
        lock.release()

    assert answers[0] >= 0


def test_close_does_not_wait_for_a_slow_count_of_rows() -> None:
    counting, go_on = threading.Event(), threading.Event()

    def count() -> int:
        if threading.current_thread() is not threading.main_thread():
            counting.set()
            assert go_on.wait(LONG_S)
        return 0

    keeper = PaceKeeper(Pace(min_rows=1), count)
    with running(lambda: keeper.wait(8, never)) as answers:
        assert counting.wait(LONG_S)
        keeper.close()
        go_on.set()

    assert isinstance(answers[0], ClosedError)


@pytest.mark.parametrize(
    "pace",
    [
        Pace(10, 2.0),
        Pace(10, 0.25),
        Pace(0, 8.0, tolerance=8),
        # Too small for both: without a way out neither side could move.
        Pace(10, 1.0, tolerance=0),
    ],
)
def test_two_threads_that_wait_for_each_other_both_get_on(pace: Pace) -> None:
    rows = Rows()
    keeper = PaceKeeper(pace, rows)
    done = threading.Event()

    def collect() -> int:
        while not done.is_set():
            if keeper.wait_to_append(3, timeout_s=0.01):
                rows.n += 3
                keeper.notify()
        return rows.n

    def learn() -> int:
        for _ in range(50):
            keeper.wait(8, never)
            keeper.took(8)
        done.set()
        return 50

    with running(collect, learn) as answers:
        assert done.wait(LONG_S)

    assert answers == [rows.n, 50]
    wanted = 400 / (pace.samples_per_insert or 1)
    slack = (16 + 3 * 8) / (pace.samples_per_insert or 1) + 3
    assert abs(rows.n - pace.min_rows - wanted) <= slack


# What is counted


def test_statistics_count_samples_and_rows_and_say_who_is_behind() -> None:
    rows = Rows(5)
    keeper = PaceKeeper(Pace(10, 2.0, tolerance=8), rows)

    early = keeper.statistics()
    rows.n = 10
    keeper.wait(4, never)
    even = keeper.statistics()
    keeper.took(8)
    fast = keeper.statistics()
    rows.n = 18
    slow = keeper.statistics()

    assert [early.behind, even.behind, fast.behind, slow.behind] == [
        "collecting",
        None,
        "collecting",
        "learning",
    ]
    assert (early.samples, early.rows, early.samples_per_insert) == (0, 5, 0.0)
    assert (slow.samples, slow.rows, slow.samples_per_insert) == (8, 18, 1.0)
    assert slow.rows_at_start == 5


def test_without_a_ratio_only_the_first_rows_can_be_missing() -> None:
    rows = Rows(5)
    keeper = PaceKeeper(Pace(10), rows)

    early = keeper.statistics()
    rows.n = 10**6

    assert (early.behind, keeper.statistics().behind) == ("collecting", None)


def test_a_keeper_goes_on_where_another_stood() -> None:
    pace = Pace(10, 2.0, tolerance=8)
    before = PaceKeeper(pace, Rows(5))
    before.took(100)
    state = json.loads(json.dumps(before.state_dict()))

    after = PaceKeeper(pace, Rows(60))
    after.load_state_dict(state)

    assert state == {"samples": 100, "rows_at_start": 5}
    assert after.state_dict() == state
    assert after.may_take(8)
    assert not after.may_take(9)
    assert after.statistics().samples_per_insert == 2.0


def test_loading_a_state_wakes_whoever_waits() -> None:
    clock = PatientClock()
    keeper = PaceKeeper(Pace(samples_per_insert=1.0, tolerance=4), Rows(8), clock=clock)

    with running(lambda: keeper.wait_to_append(1)) as answers:
        assert clock.asleep.acquire(timeout=LONG_S)
        keeper.load_state_dict({"samples": 5, "rows_at_start": 0})

    assert answers == [True]


@pytest.mark.parametrize(
    ("state", "message"),
    [
        ({"rows_at_start": 0}, "this is no state of a pace: 'samples' is missing"),
        ({"samples": 5}, "this is no state of a pace: 'rows_at_start' is missing"),
        (
            {"samples": 5, "rows_at_start": 9},
            "the state is of a buffer that had 9 rows, this one has 8",
        ),
    ],
)
def test_a_state_that_does_not_fit_is_refused_and_changes_nothing(
    state: dict[str, int], message: str
) -> None:
    keeper = PaceKeeper(Pace(4), Rows(8))
    keeper.took(3)

    with pytest.raises(ValueError) as caught:  # noqa: PT011
        keeper.load_state_dict(state)

    assert str(caught.value) == message
    assert keeper.state_dict() == {"samples": 3, "rows_at_start": 8}
