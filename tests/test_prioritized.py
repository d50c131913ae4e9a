"""Are rows drawn with exactly the probability that their priority gives them?"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import (
    RuleBasedStateMachine,
    initialize,
    invariant,
    rule,
    run_state_machine_as_test,
)

from zbuffer.errors import RowNotFoundError, SampleError
from zbuffer.format.segments import Segments
from zbuffer.sampling import sumtree
from zbuffer.sampling.prioritized import PrioritizedSampler, PriorityTable
from zbuffer.sampling.rowset import RowSet
from zbuffer.sampling.sumtree import SumTree

Array = np.ndarray[Any, Any]


def make_deep(patch: pytest.MonkeyPatch) -> None:
    """Make small trees as deep as large ones, with every level computed node by node."""
    patch.setattr(sumtree, "_TOP_NODES", 2)
    patch.setattr(sumtree, "_LEAST_CAPACITY", 4)
    patch.setattr(sumtree, "_WHOLE_LEVEL", 1)
    patch.setattr(sumtree, "_WHOLE_PER_LEAF", 0)


@pytest.fixture(params=["flat", "deep"], autouse=True)
def _depth(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    if request.param == "deep":
        make_deep(monkeypatch)


def tree_of(values: Any, first: int = 0) -> SumTree:
    tree = SumTree(first)
    tree.grow(first + len(values))
    tree.set(first + np.arange(len(values)), np.asarray(values, float))
    return tree


def table_of(priorities: Any, alpha: float = 1.0) -> PriorityTable:
    """Return a table of rows from 0 on with these priorities."""
    table = PriorityTable(alpha)
    table.sync(RowSet(0, len(priorities)))
    table.update(np.arange(len(priorities)), priorities)
    return table


def lanes_of(used: list[int], first: int = 0, segment_rows: int = 4) -> RowSet:
    """Return rows in segments of two lanes by turns."""
    lane = np.arange(first, first + len(used)) % 2
    segments = Segments.of(segment_rows, first, lane, np.array(used, np.int64))
    stop = first + len(used)
    return RowSet(first * segment_rows, stop * segment_rows, segments=segments)


def assert_proportional(ids: Array, powers: dict[int, float]) -> None:
    """Pearson's chi-square test; the bound is six standard deviations away."""
    total = math.fsum(powers.values())
    counts = dict(zip(*np.unique(ids, return_counts=True), strict=True))
    freedom = len(powers) - 1
    expected = {i: len(ids) * power / total for i, power in powers.items()}
    chi_square = sum((counts.get(i, 0) - n) ** 2 / n for i, n in expected.items())

    assert set(counts) <= set(powers)
    assert chi_square < freedom + 6 * (2 * freedom) ** 0.5


# The tree


def test_the_sum_does_not_drift_and_equals_that_of_a_new_tree_to_the_bit() -> None:
    rng = np.random.default_rng(0)
    values = 10.0 ** rng.uniform(-6, 6, 3000)
    tree = tree_of(values)

    for _ in range(10_000):
        leaves = rng.integers(0, 3000, 8)
        # Each leaf once: what becomes of a leaf that is set twice has its own test.
        leaves = np.unique(leaves)
        new = 10.0 ** rng.uniform(-6, 6, len(leaves)) * (rng.random(len(leaves)) < 0.9)
        values[leaves] = new
        tree.set(leaves, new)

    assert tree.total == pytest.approx(math.fsum(values), rel=1e-12)
    assert tree.total == pytest.approx(values.sum(), rel=1e-12)
    new_tree = tree_of(values)
    assert tree.total == new_tree.total
    assert tree.least == new_tree.least == values[values > 0].min()
    assert tree._sums.tobytes() == new_tree._sums.tobytes()
    assert tree._least.tobytes() == new_tree._least.tobytes()


@pytest.mark.parametrize("n", [1, 2, 3, 5, 64, 65, 2500])
def test_each_value_finds_the_leaf_that_it_falls_on(n: int) -> None:
    values = np.random.default_rng(n).integers(0, 3, n)
    values[-1] = 2
    tree = tree_of(values)

    found = tree.find(np.arange(0, values.sum(), 0.5))

    assert tree.total == values.sum()
    assert found.tolist() == np.repeat(np.arange(n), 2 * values).tolist()


@pytest.mark.parametrize("seed", range(20))
def test_a_leaf_of_0_is_never_found(seed: int) -> None:
    rng = np.random.default_rng(seed)
    values = 10.0 ** rng.uniform(-3, 3, 3000) * (rng.random(3000) < 0.2)
    values[1500:] *= rng.random() < 0.5
    tree = tree_of(values)
    borders = np.cumsum(values)
    asked = np.concatenate(
        (borders, np.nextafter(borders, 0), np.nextafter(borders, 1e9), rng.random(3000) * 1e9)
    )
    asked = np.append(np.minimum(asked, tree.total), [0.0, tree.total])

    found = tree.find(asked)

    assert (values[found] > 0).all()
    assert found[-2] == np.flatnonzero(values)[0]
    assert found[-1] == np.flatnonzero(values)[-1]


def test_where_a_leaf_is_named_twice_the_last_value_counts() -> None:
    tree = tree_of([1.0] * 8)

    tree.set(np.array([3, 5, 3, 0, 3, 5]), np.array([9.0, 8.0, 7.0, 6.0, 5.0, 0.0]))

    assert tree.get(np.arange(8)).tolist() == [6, 1, 1, 5, 1, 0, 1, 1]
    assert tree.total == 16


def test_the_least_value_is_that_of_a_leaf_above_0() -> None:
    tree = tree_of([0.0, 4.0, 0.0, 3.0])

    assert tree.least == 3
    tree.set(np.array([3]), np.zeros(1))
    assert tree.least == 4
    tree.drop(2)
    assert (tree.least, tree.total) == (math.inf, 0)


def test_leaves_keep_their_values_while_both_ends_move() -> None:
    rng = np.random.default_rng(0)
    tree, model = SumTree(), {}
    first = stop = 0

    for _ in range(300):
        new = np.arange(stop, stop + rng.integers(0, 40))
        stop += len(new)
        tree.grow(stop)
        values = rng.integers(0, 9, len(new)).astype(float)
        tree.set(new, values)
        model |= dict(zip(new.tolist(), values.tolist(), strict=True))
        first = min(first + int(rng.integers(0, 40)), stop)
        tree.drop(first)
        model = {leaf: value for leaf, value in model.items() if leaf >= first}

        assert (tree.first, tree.stop) == (first, stop)
        assert tree.get(np.arange(first, stop)).tolist() == list(model.values())
        assert tree.total == sum(model.values())
        if tree.total:
            found = tree.find(np.arange(tree.total))
            assert sorted(found) == sorted(k for k, v in model.items() for _ in range(int(v)))


# What is drawn


@pytest.mark.parametrize("alpha", [0.0, 0.6, 1.0])
def test_a_row_is_drawn_with_the_exact_probability_of_its_priority(alpha: float) -> None:
    rng = np.random.default_rng(1)
    priorities = rng.uniform(0.01, 2, 300)
    sampler = PrioritizedSampler(table_of(priorities, alpha))

    ids = sampler.draw(1_000_000, RowSet(0, 300), rng).ids

    assert ids.dtype == np.int64
    assert_proportional(ids, {i: p**alpha for i, p in enumerate(priorities.tolist())})


def test_draws_of_a_batch_are_independent() -> None:
    sampler = PrioritizedSampler(table_of([1.0, 1.0]))

    draws = [sampler.draw(2, RowSet(0, 2), np.random.default_rng(i)).ids for i in range(4000)]

    # Stratified draws would never give the same row twice here.
    assert_proportional(np.array(draws) @ [1, 2], dict.fromkeys(range(4), 1.0))


@pytest.mark.parametrize("n", [1, 2, 3, 4, 5, 63, 64, 65, 129])
def test_the_oldest_and_the_newest_row_are_drawn(n: int) -> None:
    sampler = PrioritizedSampler(PriorityTable())

    ids = sampler.draw(200 * n, RowSet(7, 7 + n), np.random.default_rng(0)).ids

    assert set(ids.tolist()) == set(range(7, 7 + n))


def test_the_weights_are_those_of_the_formula() -> None:
    priorities = np.random.default_rng(2).uniform(0.01, 2, 50).tolist()
    sampler = PrioritizedSampler(table_of(priorities, alpha=0.6), beta=0.7)

    draw = sampler.draw(500, RowSet(0, 50), np.random.default_rng(0))

    total = math.fsum(p**0.6 for p in priorities)
    every = [(50 * p**0.6 / total) ** -0.7 for p in priorities]
    wanted = [every[i] / max(every) for i in draw.ids]
    assert draw.weights is not None
    assert draw.weights.dtype == np.float64
    assert draw.weights.tolist() == pytest.approx(wanted, rel=1e-12)


def test_the_weights_are_over_the_largest_of_the_buffer_not_of_the_batch() -> None:
    sampler = PrioritizedSampler(table_of([1.0] * 99 + [1e-9]), beta=1.0)

    draw = sampler.draw(20, RowSet(0, 100), np.random.default_rng(0))

    assert 99 not in draw.ids
    assert draw.weights is not None
    assert draw.weights.tolist() == pytest.approx([1e-9] * 20)


def test_a_schedule_of_beta_is_asked_for_the_step_that_began() -> None:
    sampler = PrioritizedSampler(table_of([1.0, 0.25]), beta=lambda step: min(step / 4, 1.0))

    weights = []
    for step in (0, 2, 8):
        sampler.begin(step)
        for _ in range(2):
            drawn = sampler.draw(50, RowSet(0, 2), np.random.default_rng(0)).weights
            weights.append(min(drawn))  # type: ignore[arg-type]  # there are weights

    assert weights == [1, 1, 0.5, 0.5, 0.25, 0.25]


def test_the_same_numbers_draw_the_same_rows() -> None:
    a, b = (PrioritizedSampler(table_of([0.5, 3.0, 1.0])) for _ in range(2))

    draws = [s.draw(64, RowSet(0, 3), np.random.default_rng(5)).ids.tolist() for s in (a, b, a)]

    assert draws[0] == draws[1] == draws[2]


# Priorities that come in


@pytest.mark.parametrize("bad", [math.nan, math.inf, -math.inf, -1.0, 0.0, -0.0])
def test_what_is_no_priority_is_refused_by_row_and_nothing_changes(bad: float) -> None:
    table = table_of([1.0, 2.0, 3.0])
    first, before, largest = table.state()

    with pytest.raises(SampleError) as refused:
        table.update([0, 2, 1], [5.0, bad, 7.0])

    assert str(refused.value) == (
        f"the priority of row 2 must be a finite number above 0, got {bad}"
    )
    assert isinstance(refused.value, ValueError)
    assert table.state()[1].tolist() == before.tolist() == [1, 2, 3]
    assert (table.state()[2], table.ignored, first, largest) == (3, 0, 0, 3)


def test_a_priority_whose_power_no_float_holds_is_refused() -> None:
    table = table_of([1.0, 2.0], alpha=3.0)

    with pytest.raises(SampleError) as refused:
        table.update([1, 0], [1.0, 1e-60])

    assert str(refused.value) == (
        "the priority of row 0 must be from 1e-50 to 1e+50 where alpha is 3, got 1e-60"
    )
    for alpha in (0.0, 0.1, 0.5, 0.6, 1.0, 3.0):
        table_of([1e-50, 1e50], alpha)
        with pytest.raises(SampleError):
            table_of([1e-310], alpha)


@pytest.mark.parametrize(
    ("ids", "priorities", "problem"),
    [
        ([0, 1], [1.0], r"there must be one priority a row, got \(1,\) for ids \(2,\)"),
        ([0, 1], 1.0, r"there must be one priority a row, got \(\) for ids \(2,\)"),
        ([0, 1], [[1.0], [2.0]], r"there must be one priority a row, got \(2, 1\) for ids \(2,\)"),
        ([0.0, 1.0], [1.0, 1.0], "row ids are whole numbers, got float64"),
        ([True, False], [1.0, 1.0], "row ids are whole numbers, got bool"),
        ([0, 1], [1j, 1.0], "priorities are real numbers, got complex128"),
        ([0, 1], ["1", "2"], "priorities are real numbers, got <U1"),
    ],
)
def test_arrays_that_do_not_fit_are_refused(ids: Any, priorities: Any, problem: str) -> None:
    table = table_of([3.0, 4.0])

    with pytest.raises(SampleError, match=f"^{problem}$"):
        table.update(ids, priorities)

    assert table.state()[1].tolist() == [3, 4]


def tensor(values: Any) -> Any:
    """Return a tensor of PyTorch, if that is installed."""
    return pytest.importorskip("torch").tensor(values)


@pytest.mark.parametrize("make", [list, np.float32, np.float16, np.int8, np.uint64, tensor])
@pytest.mark.parametrize("make_ids", [list, np.uint8, np.int32, np.uint64, tensor])
def test_lists_and_arrays_and_tensors_of_any_dtype_are_taken(
    make: Callable[..., Any], make_ids: Callable[..., Any]
) -> None:
    table = table_of([3.0, 4.0, 5.0])

    ignored = table.update(make_ids([2, 9, 0]), make([7, 7, 2]))

    assert ignored == 1
    assert table.priorities(make_ids([0, 1, 2, 9])).tolist() == [2, 4, 7, 0]


def test_nothing_to_update_is_no_error() -> None:
    table = table_of([3.0])

    assert table.update([], []) == 0
    assert table.update(np.zeros(0, np.int64), np.zeros(0, np.float32)) == 0


def test_priorities_keep_their_shape_and_their_exact_value() -> None:
    table = table_of([0.1, 0.2, 1e-9, 0.3], alpha=0.6)

    table.update([[0], [3]], [[0.7], [1 / 3]])

    assert table.priorities([[0, 1], [2, 3]]).tolist() == [[0.7, 0.2], [1e-9, 1 / 3]]


def test_where_a_row_is_updated_twice_the_last_priority_counts() -> None:
    table = table_of([1.0] * 4)

    table.update([2, 0, 2, 2], [9.0, 8.0, 7.0, 6.0])

    assert table.priorities(np.arange(4)).tolist() == [8, 1, 6, 1]
    assert table.powers(np.arange(4)).tolist() == [8, 1, 6, 1]


def test_the_update_of_a_row_that_is_not_there_is_ignored_and_counted() -> None:
    table = PriorityTable()
    table.sync(RowSet(0, 10))
    table.sync(RowSet(4, 12))

    ignored = table.update([3, 4, 12, -1, 2**40, 11], [9.0, 2.0, 9.0, 9.0, 9.0, 3.0])

    assert ignored == 4
    assert table.update([0, 0, 5], [9.0, 9.0, 5.0]) == 2
    assert table.ignored == 6
    assert table.state()[1].tolist() == [2, 5, 1, 1, 1, 1, 1, 3]
    # What was ignored is not the largest priority that any row had.
    assert table.state()[2] == 5


def test_new_rows_get_the_largest_priority_there_ever_was() -> None:
    table = PriorityTable()
    table.sync(RowSet(0, 2))
    assert table.priorities([0, 1]).tolist() == [1, 1]

    table.update([0, 1], [0.5, 0.25])
    table.sync(RowSet(0, 3))
    assert table.priorities([2]).tolist() == [1]

    table.update([0], [7.0])
    table.update([0], [0.5])
    table.sync(RowSet(1, 5))
    assert table.priorities([0, 1, 2, 3, 4]).tolist() == [0, 0.25, 1, 7, 7]


@pytest.mark.parametrize("alpha", [-0.1, math.nan, math.inf, "0.6", None, True])
def test_an_alpha_that_makes_no_sense_is_refused(alpha: Any) -> None:
    with pytest.raises(ValueError, match=r"^alpha must be a finite number from 0 on, got "):
        PriorityTable(alpha)


@pytest.mark.parametrize("beta", [-0.1, 1.1, math.nan, "0.4", None, True])
def test_a_beta_that_makes_no_sense_is_refused(beta: Any) -> None:
    with pytest.raises(ValueError, match=r"^beta must be from 0 to 1, got "):
        PrioritizedSampler(PriorityTable(), beta)

    late = PrioritizedSampler(PriorityTable(), lambda step: beta)
    late.begin(3)
    with pytest.raises(ValueError, match=r"^beta must be from 0 to 1, got .* at step 3$"):
        late.draw(1, RowSet(0, 1), np.random.default_rng(0))


# Rows that come and go


def test_ids_that_are_no_rows_are_never_drawn() -> None:
    rows = lanes_of([4, 1, 0, 3], first=5)
    sampler = PrioritizedSampler(PriorityTable())

    ids = sampler.draw(5000, rows, np.random.default_rng(0)).ids

    assert_proportional(ids, dict.fromkeys([20, 21, 22, 23, 24, 32, 33, 34], 1.0))


def test_rows_that_fill_a_segment_below_the_newest_row_are_found() -> None:
    table = PriorityTable()
    table.sync(lanes_of([1, 4]))
    table.update([0, 5], [2.0, 3.0])

    table.sync(lanes_of([3, 4, 1]))

    assert table.state()[1].tolist() == [2, 3, 3, 0, 1, 3, 1, 1, 3]
    table.sync(lanes_of([4, 4, 1, 0]))
    assert table.state()[1].tolist() == [2, 3, 3, 3, 1, 3, 1, 1, 3]


def test_rows_of_an_earlier_moment_take_nothing_back() -> None:
    table = PriorityTable()
    early, late = lanes_of([2, 4, 1]), lanes_of([4, 1, 2], first=1)
    table.sync(early)
    table.sync(late)
    table.update([4, 12], [5.0, 6.0])
    before = table.state()[1].tolist()

    table.sync(early)
    table.sync(late)

    assert table.state()[1].tolist() == before == [5, 1, 1, 1, 1, 0, 0, 0, 6, 1]


def test_rows_evicted_before_a_state_was_kept_stay_away() -> None:
    table = PriorityTable.from_state(1.0, 10, np.array([2.0, 3.0]), 4.0)

    table.sync(RowSet(8, 14))

    assert table.state()[:1] == (10,)
    assert table.state()[1].tolist() == [2, 3, 4, 4]
    assert table.priorities([8, 9]).tolist() == [0, 0]
    assert table._tree.total == 13


@pytest.mark.parametrize("newer", [0.5, 1e12])
def test_rows_that_came_later_than_those_to_draw_from_are_not_drawn(newer: float) -> None:
    table = table_of([1.0, 1.0, 2.0, 4.0])
    table.sync(RowSet(1, 8))
    table.update([4, 5, 6, 7], [newer] * 4)

    ids = PrioritizedSampler(table).draw(20_000, RowSet(0, 4), np.random.default_rng(0)).ids

    assert_proportional(ids, {1: 1.0, 2: 2.0, 3: 4.0})


def test_where_all_rows_to_draw_from_were_evicted_the_error_says_so() -> None:
    table = PriorityTable()
    table.sync(RowSet(5, 8))
    sampler = PrioritizedSampler(table)

    with pytest.raises(RowNotFoundError, match=r"^all 4 rows were evicted before they were drawn$"):
        sampler.draw(2, RowSet(0, 4), np.random.default_rng(0))
    table.sync(RowSet(8, 8))
    with pytest.raises(RowNotFoundError, match="evicted"):
        sampler.draw(2, RowSet(0, 4), np.random.default_rng(0))


# What is kept


def test_a_table_made_of_the_state_of_another_goes_on_as_that_would() -> None:
    rows = RowSet(3, 40)
    table = PriorityTable(0.7)
    table.sync(RowSet(0, 20))
    table.update(np.arange(20), np.linspace(0.1, 9, 20))
    table.update([19], [0.5])
    table.sync(rows)

    again = PriorityTable.from_state(0.7, *table.state())

    first, priorities, largest = table.state()
    assert (first, priorities.dtype, len(priorities), largest) == (3, np.float64, 37, 9)
    assert again.state()[1].tobytes() == priorities.tobytes()
    assert (again.state()[0], again.state()[2]) == (3, 9)
    draws = [
        PrioritizedSampler(t).draw(500, rows, np.random.default_rng(0)) for t in (table, again)
    ]
    assert draws[0].ids.tolist() == draws[1].ids.tolist()
    assert draws[0].weights.tolist() == draws[1].weights.tolist()  # type: ignore[union-attr]  # there are weights
    again.sync(RowSet(3, 41))
    assert again.priorities([40]).tolist() == [9]


def test_a_state_is_a_copy() -> None:
    table = table_of([1.0, 2.0])

    table.state()[1][:] = 5

    assert table.priorities([0, 1]).tolist() == [1, 2]


def test_kept_priorities_of_rows_that_were_lost_are_forgotten() -> None:
    table = PriorityTable.from_state(1.0, 0, np.array([2.0, 3.0, 0.0, 4.0, 5.0, 6.0]), 7.0)

    table.sync(lanes_of([3, 1]))

    assert table.priorities(np.arange(8)).tolist() == [2, 3, 7, 0, 5, 0, 0, 0]
    table.sync(lanes_of([4, 2]))
    assert table.priorities(np.arange(8)).tolist() == [2, 3, 7, 7, 5, 7, 0, 0]


@pytest.mark.parametrize(
    ("priorities", "largest"),
    [([1.0, math.nan], 1.0), ([1.0, -1.0], 1.0), ([1.0, math.inf], 1.0), ([1.0], 0.0)],
)
def test_a_state_with_what_is_no_priority_is_refused(priorities: Any, largest: float) -> None:
    with pytest.raises(SampleError, match="must be a finite number above 0"):
        PriorityTable.from_state(0.6, 10, np.array(priorities), largest)


def test_an_empty_state_is_that_of_a_new_table() -> None:
    table = PriorityTable.from_state(0.6, *PriorityTable().state())

    table.sync(RowSet(0, 2))

    assert table.state()[1].tolist() == [1, 1]


# Anything, in any order


class Prioritized(RuleBasedStateMachine):
    """A table against a dict of priorities by id."""

    def __init__(self) -> None:
        super().__init__()
        self.patch = pytest.MonkeyPatch()

    @initialize(
        lanes=st.booleans(), deep=st.booleans(), alpha=st.sampled_from([0.0, 0.6, 1.0, 2.0])
    )
    def begin(self, lanes: bool, deep: bool, alpha: float) -> None:
        if deep:
            make_deep(self.patch)
        self.lanes, self.alpha = lanes, alpha
        self.table = PriorityTable(alpha)
        self.model: dict[int, float] = {}
        self.largest = 1.0
        self.n_ignored = 0
        self.first, self.stop = 0, 0
        self.used: list[int] = []
        self.earlier: list[RowSet] = [self.rows()]

    def teardown(self) -> None:
        self.patch.undo()

    def rows(self) -> RowSet:
        if not self.lanes:
            return RowSet(self.first, self.stop)
        return lanes_of(self.used[self.first :], self.first)

    def sync(self) -> RowSet:
        """Let the table and the model see the rows there are."""
        rows = self.rows()
        self.earlier.append(rows)
        self.table.sync(rows)
        ids = rows.ids(np.arange(len(rows))).tolist()
        self.model = {i: self.model.get(i, self.largest) for i in ids}
        return rows

    @rule(n=st.integers(1, 30), seed=st.integers(0, 1000))
    def append(self, n: int, seed: int) -> None:
        if not self.lanes:
            self.stop += n
            return
        choose = np.random.default_rng(seed)
        self.used += [0] * (n // 4)
        for segment in choose.integers(self.first, len(self.used) + 1, n).tolist():
            if segment < len(self.used):
                self.used[segment] = min(self.used[segment] + int(choose.integers(3)), 4)

    @rule(n=st.integers(0, 20))
    def evict(self, n: int) -> None:
        stop = len(self.used) if self.lanes else self.stop
        self.first = min(self.first + n, stop)

    @rule()
    def synchronize(self) -> None:
        self.sync()

    @rule(which=st.integers(0, 100))
    def synchronize_with_rows_of_an_earlier_moment(self, which: int) -> None:
        self.table.sync(self.earlier[which % len(self.earlier)])

    @rule(n=st.integers(0, 40), seed=st.integers(0, 1000))
    def update(self, n: int, seed: int) -> None:
        choose = np.random.default_rng(seed)
        known = list(self.model) or [0]
        ids = choose.integers(min(known) - 3, max(known) + 4, n)
        priorities = choose.uniform(0.01, 1 + seed / 100, n)

        ignored = self.table.update(ids, priorities)

        wanted = dict(zip(ids.tolist(), priorities.tolist(), strict=True))
        there = {i: p for i, p in wanted.items() if i in self.model}
        self.model |= there
        self.largest = max([self.largest, *there.values()])
        self.n_ignored += ignored
        assert ignored == sum(i not in self.model for i in ids.tolist())

    @rule(seed=st.integers(0, 1000))
    def draw(self, seed: int) -> None:
        rows = self.sync()
        if len(rows) == 0:
            return
        sampler = PrioritizedSampler(self.table, beta=0.5)
        draw = sampler.draw(64, rows, np.random.default_rng(seed))

        total = math.fsum(p**self.alpha for p in self.model.values())
        weights = {i: (p**self.alpha / total) ** -0.5 for i, p in self.model.items()}
        largest = max(weights.values())
        assert draw.weights is not None
        assert draw.weights.tolist() == pytest.approx(
            [weights[i] / largest for i in draw.ids.tolist()], rel=1e-9
        )

    @rule()
    def keep_and_restore(self) -> None:
        self.sync()
        self.table = PriorityTable.from_state(self.alpha, *self.table.state())
        self.n_ignored = 0
        self.sync()

    @invariant()
    def the_table_is_as_the_dict(self) -> None:
        table = self.table
        first, priorities, largest = table.state()
        assert {first + i: p for i, p in enumerate(priorities.tolist()) if p} == self.model
        assert (largest, table.ignored) == (self.largest, self.n_ignored)
        around = np.arange(first - 3, first + len(priorities) + 3)
        assert table.priorities(around).tolist() == [
            self.model.get(i, 0.0) for i in around.tolist()
        ]
        powers = [p**self.alpha for p in self.model.values()]
        assert table._tree.total == pytest.approx(math.fsum(powers), rel=1e-12)
        assert table.least_power == pytest.approx(min(powers, default=math.inf))


def test_a_table_does_what_a_dict_would_do() -> None:
    run_state_machine_as_test(  # type: ignore[no-untyped-call]  # Hypothesis has no types here
        Prioritized, settings=settings(max_examples=80, stateful_step_count=30, deadline=None)
    )
