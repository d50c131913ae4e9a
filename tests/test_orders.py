"""Do the samplers draw each row as often as they say, and in the order they say?"""

from __future__ import annotations

import json
from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from zbuffer.format.segments import Segments
from zbuffer.sampling.blocks import BlockSampler, effective_sample_size
from zbuffer.sampling.epoch import EpochSampler
from zbuffer.sampling.rowset import RowSet
from zbuffer.sampling.samplers import UniformSampler

Array = np.ndarray[Any, Any]
#: What an epoch's order may not depend on.
RNG = np.random.default_rng(0)


def with_gaps(used: list[int], *, segment_rows: int = 6, first: int = 0, **rows: int) -> RowSet:
    """Make rows of two lanes in turn; of each segment, only so many ids are rows."""
    filled = np.array(used, np.int64)
    table = Segments.of(segment_rows, first, np.arange(len(used)) % 2, filled)
    ids = (first * segment_rows, (first + len(used)) * segment_rows)
    return RowSet(*ids, **({"chunk_rows": 12, "block_rows": 2} | rows), segments=table)


WHOLE = RowSet(21, 78, chunk_rows=12, block_rows=4)
GAPS = with_gaps([6, 1, 0, 5, 6, 6, 2, 0, 0, 6, 3], first=4, block_rows=3)
#: A span that begins in one segment and ends in the next, neither of them full.
ACROSS = with_gaps([6, 4, 6, 2, 5], block_rows=4)
ONE = RowSet(1000, 1001, chunk_rows=12, block_rows=4)
ROWS = [
    pytest.param(WHOLE, id="whole"),
    pytest.param(GAPS, id="gaps"),
    pytest.param(ACROSS, id="across"),
    pytest.param(ONE, id="one"),
]


def ids_of(rows: RowSet) -> list[int]:
    ids: list[int] = rows.ids(np.arange(len(rows))).tolist()
    return ids


# Uniform, and in blocks


@pytest.mark.parametrize("rows", ROWS)
@pytest.mark.parametrize(
    "sampler",
    [UniformSampler(), *(BlockSampler(n) for n in (1, 3, 8, 100))],
    ids=["uniform", "1", "3", "8", "100"],
)
def test_every_row_is_drawn_with_the_same_probability(rows: RowSet, sampler: Any) -> None:
    # Rows of a group are not independent, groups are: their variance is measured.
    # 2503 rows are no whole number of groups, so draws are cut.
    draws, n = 400, 2503
    rng = np.random.default_rng(7)

    counts = np.zeros((draws, len(rows)))
    for count in counts:
        ids = sampler.draw(n, rows, rng).ids
        assert (len(ids), ids.dtype) == (n, np.int64)
        assert rows.contains(ids).all()
        count += np.bincount(rows.count_below(ids), minlength=len(rows))

    error = counts.mean(axis=0) - n / len(rows)
    deviation = counts.std(axis=0) / draws**0.5
    assert (np.abs(error) <= 5 * deviation).all()
    assert deviation.max() < 0.1 * n / len(rows)


@pytest.mark.parametrize("rows", ROWS)
def test_independent_draws_pass_the_chi_square_test(rows: RowSet) -> None:
    # Groups of one row are draws with replacement; six standard deviations are allowed.
    expected, freedom = 1_000_000 / len(rows), len(rows) - 1

    for sampler in (UniformSampler(), BlockSampler(1)):
        ids = sampler.draw(1_000_000, rows, np.random.default_rng(3)).ids
        counts = np.bincount(rows.count_below(ids), minlength=len(rows))
        chi_square = ((counts - expected) ** 2 / expected).sum()

        assert chi_square <= freedom + 6 * (2 * freedom) ** 0.5


@pytest.mark.parametrize("n", [1, 2, 5])
@pytest.mark.parametrize("rows", ROWS)
def test_a_draw_cut_short_of_a_group_prefers_no_row(rows: RowSet, n: int) -> None:
    draws = 6000
    sampler, rng = BlockSampler(4), np.random.default_rng(1)

    ids = np.concatenate([sampler.draw(n, rows, rng).ids for _ in range(draws)])

    counts = np.bincount(rows.count_below(ids), minlength=len(rows))
    # At worst a draw is n times the same row.
    deviation = n * (draws / len(rows)) ** 0.5
    assert (np.abs(counts - n * draws / len(rows)) <= 5 * deviation).all()


@pytest.mark.parametrize("block_rows", [1, 3, 8, 512])
def test_a_draw_touches_no_more_spans_than_it_has_groups(block_rows: int) -> None:
    rows = RowSet(100_005, 1_100_000, chunk_rows=1024, block_rows=block_rows)
    span = block_rows * -(-8 // block_rows)

    for seed in range(20):
        ids = BlockSampler(8).draw(256, rows, np.random.default_rng(seed)).ids

        assert len(set((ids // span).tolist())) <= 32


@pytest.mark.parametrize(
    ("rows", "rows_per_group"),
    [(RowSet(0, 64, block_rows=8), 8), (RowSet(0, 64, block_rows=16), 5), (ACROSS, 4)],
)
def test_a_group_has_no_row_twice_where_its_span_has_enough(
    rows: RowSet, rows_per_group: int
) -> None:
    sampler, rng = BlockSampler(rows_per_group), np.random.default_rng(0)

    for _ in range(500):
        ids = sampler.draw(rows_per_group, rows, rng).ids

        start = ids[0] // rows.block_rows * rows.block_rows
        in_span = np.diff(rows.count_below(np.array([start, start + rows.block_rows])))[0]
        assert (ids // rows.block_rows == ids[0] // rows.block_rows).all()
        assert len(set(ids.tolist())) == rows_per_group or in_span < rows_per_group


def test_every_choice_of_a_group_is_as_likely_as_any_other() -> None:
    sampler, rng, n = BlockSampler(2), np.random.default_rng(5), 12_000

    found = [tuple(sampler.draw(2, RowSet(0, 4, block_rows=4), rng).ids) for _ in range(n)]

    counts = {pair: found.count(pair) for pair in set(found)}
    assert len(counts) == 12
    assert all(abs(count - n / 12) < 5 * (n / 12) ** 0.5 for count in counts.values())


def test_the_groups_of_a_draw_are_mixed() -> None:
    rows = RowSet(0, 1_000_000, block_rows=8)

    ids = BlockSampler(8).draw(256, rows, np.random.default_rng(0)).ids

    assert (ids[1:] // 8 == ids[:-1] // 8).mean() < 0.1
    assert len(set((ids[:32] // 8).tolist())) > 15


def test_a_draw_in_blocks_is_a_function_of_its_random_numbers() -> None:
    one, same, other = (
        BlockSampler(8).draw(100, WHOLE, np.random.default_rng(seed)).ids.tolist()
        for seed in (1, 1, 2)
    )

    assert one == same != other


def test_rows_of_one_block_count_as_one() -> None:
    spread = np.arange(0, 256 * 8, 8)

    assert effective_sample_size(spread, 8) == 256.0
    assert effective_sample_size(np.repeat(spread[:32], 8) + np.tile(np.arange(8), 32), 8) == 32.0
    assert effective_sample_size(np.array([[3, 2], [1, 0], [9, 12]]), 4) == 36 / 18
    assert effective_sample_size(np.zeros(5, np.int64), 1) == 1.0
    assert effective_sample_size(np.zeros(0, np.int64), 1) == 0.0
    with pytest.raises(ValueError, match="block_rows must be at least 1, got 0"):
        effective_sample_size(spread, 0)


@pytest.mark.parametrize("rows_per_group", [0, -1, 2.0, True, None])
def test_a_group_of_no_rows_is_refused(rows_per_group: Any) -> None:
    with pytest.raises(ValueError, match="rows_per_group must be a whole number from 1 on, got "):
        BlockSampler(rows_per_group)


# In epochs


def draws_of(sampler: EpochSampler, rows: RowSet, n: int) -> Iterator[Array]:
    """Draw to the end of the epoch."""
    while len(ids := sampler.draw(n, rows, RNG).ids):
        assert ids.dtype == np.int64
        yield ids


def epoch_of(sampler: EpochSampler, rows: RowSet, n: int = 7) -> list[int]:
    return [i for ids in draws_of(sampler, rows, n) for i in ids.tolist()]


@pytest.mark.parametrize("pool_rows", [1, 5, 12, 30, 1 << 16])
@pytest.mark.parametrize("n", [1, 7, 1000])
@pytest.mark.parametrize("rows", ROWS)
def test_an_epoch_has_every_row_once(rows: RowSet, n: int, pool_rows: int) -> None:
    sampler = EpochSampler(seed=3, pool_rows=pool_rows)

    epochs = [epoch_of(sampler, rows, n) for _ in range(4)]

    assert all(sorted(epoch) == ids_of(rows) for epoch in epochs)
    if len(rows) > 1:
        assert len({tuple(epoch) for epoch in epochs}) == 4


@pytest.mark.parametrize("rows", ROWS)
def test_draws_are_full_but_the_last_and_one_empty_draw_ends_the_epoch(rows: RowSet) -> None:
    sampler = EpochSampler(pool_rows=10)

    for _ in range(3):
        sizes = [len(sampler.draw(4, rows, RNG).ids) for _ in range(-(-len(rows) // 4) + 1)]

        whole, rest = divmod(len(rows), 4)
        assert sizes == [4] * whole + [rest] * (rest > 0) + [0]


def test_how_an_epoch_is_cut_into_draws_does_not_change_its_order() -> None:
    orders = [epoch_of(EpochSampler(seed=2, pool_rows=10), GAPS, n) for n in (1, 4, 11, 500)]

    assert all(order == orders[0] for order in orders)


def test_nothing_is_drawn_where_nothing_is_asked_for() -> None:
    sampler = EpochSampler()

    assert len(sampler.draw(0, WHOLE, RNG).ids) == 0

    assert sampler.rows_left() == len(WHOLE)
    assert sorted(epoch_of(sampler, WHOLE)) == ids_of(WHOLE)


def test_orders_of_other_seeds_differ_and_random_numbers_given_do_not_matter() -> None:
    orders = [epoch_of(EpochSampler(seed=seed), WHOLE) for seed in (0, 1, (1 << 64) - 1)]

    again = EpochSampler(seed=1).draw(100, WHOLE, np.random.default_rng(99)).ids.tolist()

    assert len({tuple(order) for order in orders}) == 3
    assert again == orders[1]


@pytest.mark.parametrize("rows", [WHOLE, GAPS, ACROSS])
def test_every_row_is_as_likely_at_every_place_of_an_epoch(rows: RowSet) -> None:
    # One pool: any order of rows is as likely as any other.
    n, sampler = 2000, EpochSampler(seed=8)
    counts = np.zeros((len(rows), len(rows)), np.int64)

    for _ in range(n):
        order = rows.count_below(sampler.draw(len(rows), rows, RNG).ids)
        sampler.draw(1, rows, RNG)
        counts[np.arange(len(rows)), order] += 1

    expected, freedom = n / len(rows), (len(rows) - 1) ** 2
    chi_square = ((counts - expected) ** 2 / expected).sum()
    assert abs(chi_square - freedom) < 6 * (2 * freedom) ** 0.5


def test_every_chunk_is_as_likely_to_come_first_and_chunks_are_not_torn() -> None:
    rows, sampler = RowSet(0, 60, chunk_rows=12), EpochSampler(seed=4, pool_rows=12)
    first = np.zeros(5, np.int64)

    for _ in range(2000):
        chunks = (np.array(epoch_of(sampler, rows, 60)) // 12).reshape(5, 12)
        assert (chunks == chunks[:, :1]).all()
        first[chunks[0, 0]] += 1

    assert (np.abs(first - 400) < 5 * 20).all()


@pytest.mark.parametrize("pool_rows", [12, 25, 40])
@pytest.mark.parametrize("rows", ROWS)
def test_rows_in_flight_come_from_the_chunks_of_one_pool(rows: RowSet, pool_rows: int) -> None:
    order = np.array(epoch_of(EpochSampler(seed=5, pool_rows=pool_rows), rows)) // 12

    # From its first row to its last a chunk is in flight.
    at = [np.flatnonzero(order == chunk) for chunk in set(order.tolist())]
    assert all(places[-1] - places[0] < pool_rows for places in at)


def test_a_pool_is_as_full_as_whole_chunks_can_make_it() -> None:
    rows = RowSet(0, 120, chunk_rows=12)

    order = np.array(epoch_of(EpochSampler(pool_rows=40), rows)) // 12

    pools = [set(order[start : start + 36].tolist()) for start in range(0, 120, 36)]
    assert [len(pool) for pool in pools] == [3, 3, 3, 1]
    assert set.union(*pools) == set(range(10))


def test_a_chunk_larger_than_a_pool_is_cut_into_pools_that_follow_each_other() -> None:
    rows = RowSet(0, 96, chunk_rows=32)

    order = np.array(epoch_of(EpochSampler(seed=1, pool_rows=10), rows))

    chunks = order.reshape(3, 32) // 32
    assert (chunks == chunks[:, :1]).all()
    for start in range(0, 32, 8):
        pieces = order.reshape(3, 32)[:, start : start + 8]
        assert (np.ptp(pieces, axis=1) == 7).all()
    assert (np.diff(order) == 1).mean() < 0.3


def test_rows_appended_in_mid_epoch_belong_to_the_next() -> None:
    sampler = EpochSampler(pool_rows=20)
    for small, grown in (
        (RowSet(21, 50, 12, 4), RowSet(21, 80, 12, 4)),
        (with_gaps([6, 3, 2]), with_gaps([6, 6, 2, 6, 1])),
    ):
        begin = sampler.draw(10, small, RNG).ids.tolist()

        assert sorted(begin + epoch_of(sampler, grown)) == ids_of(small)
        assert sorted(epoch_of(sampler, grown)) == ids_of(grown)


@pytest.mark.parametrize("n", [1, 7, 1000])
def test_rows_evicted_in_mid_epoch_are_left_out(n: int) -> None:
    for whole, rest in (
        (RowSet(0, 60, 12, 4), RowSet(36, 72, 12, 4)),
        (with_gaps([6, 1, 0, 5, 6, 6]), with_gaps([0, 5, 6, 6, 6], first=2)),
    ):
        sampler = EpochSampler(seed=6, pool_rows=24)
        begin = sampler.draw(9, whole, RNG).ids.tolist()

        later = list(draws_of(sampler, rest, n))

        gone = set(ids_of(whole)) - set(ids_of(rest))
        assert [len(ids) for ids in later[:-1]] == [n] * (len(later) - 1)
        assert sorted(i for ids in later for i in ids.tolist()) == sorted(
            set(ids_of(whole)) - gone - set(begin)
        )
        assert sorted(epoch_of(sampler, rest)) == ids_of(rest)


def test_where_all_of_an_epoch_was_evicted_it_ends_with_one_empty_draw() -> None:
    sampler = EpochSampler(pool_rows=1000)
    sampler.draw(5, RowSet(0, 5000, 100), RNG)
    rows = RowSet(6000, 6050, 100)

    sizes = [len(sampler.draw(40, rows, RNG).ids) for _ in range(4)]

    assert sizes == [0, 40, 10, 0]


@pytest.mark.parametrize("world_size", range(1, 6))
@pytest.mark.parametrize("rows", ROWS)
def test_ranks_share_an_epoch_out(rows: RowSet, world_size: int) -> None:
    ranks = [
        EpochSampler(seed=9, pool_rows=15, rank=rank, world_size=world_size)
        for rank in range(world_size)
    ]
    alone = EpochSampler(seed=9, pool_rows=15)

    for _ in range(3):
        shares = [epoch_of(rank, rows, 4) for rank in ranks]

        assert sorted(i for share in shares for i in share) == ids_of(rows)
        assert max(map(len, shares)) - min(map(len, shares)) <= 1
        order = epoch_of(alone, rows)
        assert shares == [order[rank::world_size] for rank in range(world_size)]


def test_a_rank_may_be_given_more_ranks_than_a_pool_has_rows() -> None:
    rows = RowSet(0, 50, chunk_rows=4)
    ranks = [EpochSampler(pool_rows=3, rank=rank, world_size=7) for rank in range(7)]

    shares = [epoch_of(rank, rows, 2) for rank in ranks]

    assert sorted(i for share in shares for i in share) == ids_of(rows)


@settings(max_examples=200, deadline=None)
@given(data=st.data())
def test_a_sampler_goes_on_where_another_stood(data: st.DataObject) -> None:
    used = data.draw(st.lists(st.integers(0, 6), min_size=1, max_size=12).filter(any))
    rows = data.draw(
        st.sampled_from([with_gaps(used, first=data.draw(st.integers(0, 5))), WHOLE, ONE])
    )
    world_size = data.draw(st.integers(1, 3))
    options: dict[str, int] = {
        "seed": data.draw(st.integers(0, 3)),
        "pool_rows": data.draw(st.integers(1, 30)),
        "rank": data.draw(st.integers(0, world_size - 1)),
        "world_size": world_size,
    }
    sampler, other = EpochSampler(**options), EpochSampler(**options)
    for n in data.draw(st.lists(st.integers(1, 20), max_size=12)):
        sampler.draw(n, rows, RNG)
    for n in data.draw(st.lists(st.integers(1, 20), max_size=3)):
        other.draw(n, WHOLE, RNG)

    other.load_state_dict(json.loads(json.dumps(sampler.state_dict())))

    assert other.state_dict() == sampler.state_dict()
    for n in data.draw(st.lists(st.integers(1, 20), min_size=1, max_size=12)):
        assert other.draw(n, rows, RNG).ids.tolist() == sampler.draw(n, rows, RNG).ids.tolist()


@pytest.mark.parametrize("rows", [WHOLE, GAPS])
def test_a_sampler_goes_on_from_every_place_though_rows_came_and_went(rows: RowSet) -> None:
    sampler = EpochSampler(seed=2, pool_rows=15)
    states, order = [], []
    for _ in range(2 * len(rows) + 3):
        states.append(json.dumps(sampler.state_dict()))
        order.append(sampler.draw(1, rows, RNG).ids.tolist())
    grown = RowSet(rows.first, rows.stop + 50) if rows.segments is None else rows

    for place in range(len(rows)):
        resumed = EpochSampler(seed=2, pool_rows=15)
        resumed.load_state_dict(json.loads(states[1 + place]))

        rest = [i for ids in draws_of(resumed, grown, 7) for i in ids.tolist()]

        assert rest == [i for ids in order[1 + place : len(rows)] for i in ids]


def test_a_state_is_small_and_knows_of_gaps_only_where_there_are_some() -> None:
    sampler = EpochSampler(seed=1, pool_rows=9)
    fresh = sampler.state_dict()
    sampler.draw(5, WHOLE, RNG)
    setting = {"seed": 1, "pool_rows": 9, "rank": 0, "world_size": 1}

    assert fresh == {**setting, "epoch": 0, "n_drawn": 0, "rows": None}
    assert sampler.state_dict() == {
        **setting,
        "epoch": 0,
        "n_drawn": 5,
        "rows": {"first": 21, "stop": 78, "chunk_rows": 12},
    }
    epoch_of(sampler, WHOLE)
    assert sampler.state_dict() == {**setting, "epoch": 1, "n_drawn": 0, "rows": None}
    sampler.draw(5, ACROSS, RNG)
    assert sampler.state_dict()["rows"]["segments"] == {
        "segment_rows": 6,
        "first": 0,
        "used": [6, 4, 6, 2, 5],
    }


def test_a_state_of_another_order_is_refused() -> None:
    sampler = EpochSampler(seed=1)
    sampler.draw(5, WHOLE, RNG)
    before = sampler.state_dict()

    with pytest.raises(ValueError, match="of an order with pool_rows=9, this one has 16384"):
        sampler.load_state_dict(EpochSampler(seed=1, pool_rows=9).state_dict())
    with pytest.raises(ValueError, match="no state of order='epoch': 'n_drawn' is missing"):
        sampler.load_state_dict({**EpochSampler()._setting, "epoch": 0})

    assert sampler.state_dict() == before


@pytest.mark.parametrize(
    ("bad", "message"),
    [
        ({"seed": -1}, "seed must be a whole number from 0 on, got -1"),
        ({"seed": 1 << 64}, r"seed must be below 2 \*\* 64, got 18446744073709551616"),
        ({"pool_rows": 0}, "pool_rows must be a whole number from 1 on, got 0"),
        ({"pool_rows": 2.5}, "pool_rows must be a whole number from 1 on, got 2.5"),
        ({"rank": -1}, "rank must be a whole number from 0 on, got -1"),
        ({"world_size": True}, "world_size must be a whole number from 1 on, got True"),
        ({"rank": 2, "world_size": 2}, "rank must be below world_size=2, got 2"),
    ],
    ids=str,
)
def test_an_order_that_cannot_be_is_refused(bad: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=f"^{message}$"):
        EpochSampler(**bad)


def test_what_a_loader_asks_of_an_epoch_is_there() -> None:
    assert (EpochSampler.replacement, EpochSampler().drop_last) == (False, False)
    assert EpochSampler(drop_last=True).drop_last is True
