"""Which rows are drawn, and is what a batch says about each of them right?"""

from __future__ import annotations

import itertools
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import zbuffer
from zbuffer import Buffer, EpisodeError, RowNotFoundError, SampleError, Schema
from zbuffer.reading.gather import native_module

STEP = {
    "obs": ((), "int64"),
    "reward": ((), "float32"),
    "terminated": ((), "bool"),
    "truncated": ((), "bool"),
}
Create = Callable[..., Buffer]
Drawn = dict[int, dict[str, Any]]


@pytest.fixture(params=["native", "ctypes"])
def create(request: pytest.FixtureRequest, tmp_path: Path) -> Any:
    """Make buffers with tiny chunks; they are closed in the end."""
    if request.param == "native" and native_module() is None:
        pytest.skip("the extension is not built")
    made: list[Buffer] = []

    def create(schema: Any = STEP, **options: Any) -> Buffer:
        options = {"chunk_rows": 4, "block_rows": 2, "gather": request.param} | options
        made.append(zbuffer.create(tmp_path / f"{len(made)}.zarr", schema, **options))
        return made[-1]

    yield create

    for buffer in made:
        buffer.close()


def add_steps(buffer: Buffer, obs: range, *, reward: float = 1.0, ended: str = "") -> None:
    """Append steps in stream style, the last of which may have a flag."""
    for i in obs:
        last = i == obs[-1]
        buffer.append(
            obs=i,
            reward=reward,
            terminated=last and ended == "terminated",
            truncated=last and ended == "truncated",
        )


def add_rewards(buffer: Buffer, *, ended: str, final: int | None) -> None:
    """Append an episode of obs 10 to 13 with the rewards 1, 2, 4 and 8; then another one."""
    for i, reward in enumerate((1, 2, 4, 8)):
        flags = {flag: i == 3 and ended == flag for flag in ("terminated", "truncated")}
        buffer.append(obs=10 + i, reward=float(reward), **flags)
    if final is not None:
        buffer.end_episode(obs=final)
    elif ended == "cut":
        buffer.end_episode()
    if ended != "running":
        add_steps(buffer, range(90, 93), reward=100.0)


def drawn(buffer: Buffer, **window: Any) -> Drawn:
    """Draw many times; return what the batch says about each row that came."""
    batch = buffer.sample(2000, seed=0, **window)
    ids, places = np.unique(batch["indices"], return_index=True)
    return {
        int(i): {name: batch[name][place].tolist() for name in batch}
        for i, place in zip(ids, places, strict=True)
    }


def said(rows: Drawn, row_id: int, *names: str) -> list[Any]:
    return [rows[row_id][name] for name in names]


# The observation after the step


def test_a_truncated_step_is_paired_with_its_stored_final_observation(create: Create) -> None:
    final = np.array([0x7FC00001, 0x80000000, 0x00000001], np.uint32).view(np.float32)
    buffer = create({**STEP, "obs": ((3,), "float32")})
    start = np.zeros(3, np.float32)
    flags = {"reward": 0.0, "terminated": False, "truncated": True}
    buffer.append(obs=start, next_obs=final, **flags)
    buffer.append(obs=start + 5, next_obs=start + 6, **flags)

    batch = buffer.sample(100, seed=0)

    assert set(batch["indices"].tolist()) == {0, 2}
    assert {item.tobytes() for item in batch["next_obs"][batch["indices"] == 0]} == {
        final.tobytes()
    }
    assert batch["mask"].all()
    assert batch["truncated"].all()
    assert not batch["terminated"].any()


def test_a_final_observation_may_come_after_the_truncated_step(create: Create) -> None:
    buffer = create()
    add_steps(buffer, range(10, 12), ended="truncated")
    buffer.end_episode(obs=12)
    add_steps(buffer, range(90, 92))

    rows = drawn(buffer)

    assert said(rows, 1, "obs", "next_obs", "mask", "discount") == [
        11,
        12,
        True,
        pytest.approx(0.99),
    ]


def test_a_truncated_step_without_a_final_observation_is_not_drawn(create: Create) -> None:
    buffer = create()
    add_steps(buffer, range(10, 13), ended="truncated")
    add_steps(buffer, range(90, 93))

    rows = drawn(buffer)

    assert {i: row["next_obs"] for i, row in rows.items()} == {0: 11, 1: 12, 3: 91, 4: 92}


def test_a_terminated_step_without_a_final_observation_is_masked(create: Create) -> None:
    buffer = create()
    add_steps(buffer, range(10, 13), ended="terminated")
    add_steps(buffer, range(90, 93))

    rows = drawn(buffer)

    assert said(rows, 2, "next_obs", "mask", "discount", "terminated") == [0, False, 0.0, True]
    assert {i: row["mask"] for i, row in rows.items()} == {
        0: True,
        1: True,
        2: False,
        3: True,
        4: True,
    }


@pytest.mark.parametrize("n_step", [1, 2, 3])
def test_only_the_newest_frame_of_a_masked_next_stack_is_zero(create: Create, n_step: int) -> None:
    buffer = create()
    add_steps(buffer, range(10, 14), ended="terminated")

    rows = drawn(buffer, frame_stack=3, n_step=n_step)

    assert said(rows, 3, "obs", "next_obs", "mask") == [[11, 12, 13], [12, 13, 0], False]


def test_a_terminated_step_with_its_final_observation_is_not_masked(create: Create) -> None:
    buffer = create()
    add_steps(buffer, range(10, 12), ended="terminated")
    buffer.end_episode(obs=12)

    rows = drawn(buffer)

    assert said(rows, 1, "next_obs", "mask", "discount") == [12, True, 0.0]


def test_the_newest_row_is_drawn_as_soon_as_its_next_observation_is_known(
    create: Create,
) -> None:
    buffer = create()
    add_steps(buffer, range(10, 13))
    stream = set(drawn(buffer))
    buffer.append(obs=13, reward=1.0, terminated=False, truncated=False, next_obs=14)

    rows = drawn(buffer)

    assert stream == {0, 1}
    assert {i: row["next_obs"] for i, row in rows.items()} == {0: 11, 1: 12, 2: 13, 3: 14}


def test_in_a_full_buffer_the_newest_row_does_not_meet_the_oldest(create: Create) -> None:
    buffer = create(capacity=8)
    add_steps(buffer, range(100, 130))
    buffer.flush()

    rows = drawn(buffer)

    assert buffer.first_row == 20
    assert {i: (row["obs"], row["next_obs"]) for i, row in rows.items()} == {
        i: (100 + i, 101 + i) for i in range(20, 29)
    }


def test_in_mid_episode_an_observation_must_repeat_the_next_obs_bit_for_bit(
    create: Create,
) -> None:
    buffer = create({**STEP, "obs": ((), "float32")})
    flags = {"reward": 0.0, "terminated": False, "truncated": False}
    buffer.append(obs=np.float32(1), next_obs=np.float32(0.0), **flags)

    with pytest.raises(EpisodeError):
        buffer.append(obs=np.float32(-0.0), **flags)
    assert buffer.rows == 1
    buffer.append(obs=np.float32(0.0), **flags)
    assert buffer.rows == 2


# Capacity


@pytest.mark.parametrize(
    ("n_rows", "first"), [(7, 0), (8, 0), (9, 0), (11, 0), (12, 4), (13, 4), (16, 8), (17, 8)]
)
def test_capacity_is_held_to_within_one_chunk(create: Create, n_rows: int, first: int) -> None:
    buffer = create(capacity=8)
    add_steps(buffer, range(n_rows))
    buffer.flush()

    assert (buffer.first_row, buffer.rows, len(buffer)) == (first, n_rows, n_rows - first)
    assert buffer["obs"][:].tolist() == list(range(first, n_rows))
    assert [(e.start, e.stop) for e in buffer.episodes] == [(first, n_rows)]
    assert set(drawn(buffer)) == set(range(first, n_rows - 1))

    buffer.close()
    with zbuffer.open(buffer.path) as closed:
        assert (closed.first_row, closed.rows) == (first, n_rows)
        assert closed["obs"][:].tolist() == list(range(first, n_rows))


def test_an_evicted_row_is_not_found_and_its_id_does_not_come_back(create: Create) -> None:
    buffer = create(capacity=8)
    add_steps(buffer, range(100, 130))
    buffer.flush()

    assert buffer.take([20, 29])["obs"].tolist() == [120, 129]
    for bad in (19, 30, -1):
        with pytest.raises(RowNotFoundError):
            buffer.take([20, bad])


def test_the_newest_rows_can_be_read_while_the_oldest_are_evicted(create: Create) -> None:
    buffer = create(capacity=12)
    add_steps(buffer, range(16))
    buffer.flush()

    class EvictsWhenAsked:
        def __array__(self, dtype: Any = None, copy: Any = None) -> Any:
            add_steps(buffer, range(16, 24))
            buffer.flush()
            return np.array([-1, -3])

    # Rows 13 and 15 were asked for, and both are still there.
    assert buffer["obs"][EvictsWhenAsked()].tolist() in ([15, 13], [23, 21])
    assert buffer.first_row == 12


# Frame stacks


def test_a_stack_repeats_the_first_frame_of_a_short_episode(create: Create) -> None:
    buffer = create()
    add_steps(buffer, range(90, 93), ended="terminated")
    add_steps(buffer, range(10, 12), ended="truncated")
    buffer.end_episode(obs=12)
    add_steps(buffer, range(70, 73))

    rows = drawn(buffer, frame_stack=5)

    assert said(rows, 3, "obs", "next_obs") == [[10, 10, 10, 10, 10], [10, 10, 10, 10, 11]]
    assert said(rows, 4, "obs", "next_obs") == [[10, 10, 10, 10, 11], [10, 10, 10, 11, 12]]
    assert said(rows, 6, "obs", "next_obs") == [[70, 70, 70, 70, 70], [70, 70, 70, 70, 71]]


def test_a_stack_of_one_has_an_axis_and_no_stack_has_none(create: Create) -> None:
    buffer = create()
    add_steps(buffer, range(10, 14))

    assert buffer.sample(7, frame_stack=1)["obs"].shape == (7, 1)
    assert buffer.sample(7, frame_stack=1)["next_obs"].shape == (7, 1)
    assert buffer.sample(7)["obs"].shape == (7,)
    assert buffer.sample(7)["next_obs"].shape == (7,)


@pytest.mark.parametrize(("frame_stack", "oldest"), [(None, 20), (1, 20), (2, 21), (4, 23)])
def test_a_step_whose_stack_was_evicted_is_not_drawn(
    create: Create, frame_stack: int | None, oldest: int
) -> None:
    buffer = create(capacity=8)
    add_steps(buffer, range(100, 130))
    buffer.flush()

    rows = drawn(buffer, frame_stack=frame_stack)

    assert set(rows) == set(range(oldest, 29))
    if frame_stack is not None:
        assert rows[oldest]["obs"] == list(range(120, 120 + frame_stack))


def test_an_episode_that_begins_at_the_oldest_row_is_drawn_with_any_stack(
    create: Create,
) -> None:
    buffer = create(capacity=8)
    for start in range(0, 32, 4):
        add_steps(buffer, range(start, start + 4), ended="terminated")
    buffer.flush()

    rows = drawn(buffer, frame_stack=3)

    assert buffer.first_row == 24
    assert set(rows) == set(range(24, 32))
    assert rows[24]["obs"] == [24, 24, 24]


@pytest.mark.parametrize("block_rows", [1, 2, 4])
def test_windows_go_on_over_blocks_chunks_and_the_tail(create: Create, block_rows: int) -> None:
    buffer = create(block_rows=block_rows)
    add_steps(buffer, range(100, 119))

    rows = drawn(buffer, frame_stack=6, n_step=7, gamma=1.0)

    for i in range(5, 12):
        assert said(rows, i, "obs", "next_obs", "reward", "n_steps") == [
            list(range(95 + i, 101 + i)),
            list(range(102 + i, 108 + i)),
            7.0,
            7,
        ]


def test_obs_and_next_obs_overlap_in_memory(create: Create) -> None:
    buffer = create()
    add_steps(buffer, range(10, 20))

    batch = buffer.sample(8, frame_stack=3)

    assert np.shares_memory(batch["obs"], batch["next_obs"])


# Sums of rewards. The rewards are 1, 2, 4, 8; with gamma = 0.5 each step ahead halves.


@pytest.mark.parametrize("final", [None, 14])
def test_n_steps_stop_at_a_terminated_step(create: Create, final: int | None) -> None:
    buffer = create()
    add_rewards(buffer, ended="terminated", final=final)

    rows = drawn(buffer, n_step=3, gamma=0.5)

    names = ("reward", "n_steps", "discount", "terminated", "next_obs", "mask")
    last = [final or 0, final is not None]
    assert said(rows, 0, *names) == [3.0, 3, 0.125, False, 13, True]
    assert said(rows, 1, *names) == [6.0, 3, 0.0, True, *last]
    assert said(rows, 2, *names) == [8.0, 2, 0.0, True, *last]
    assert said(rows, 3, *names) == [8.0, 1, 0.0, True, *last]


def test_n_steps_stop_at_a_truncated_step_and_bootstrap_from_its_final_observation(
    create: Create,
) -> None:
    buffer = create()
    add_rewards(buffer, ended="truncated", final=14)

    rows = drawn(buffer, n_step=3, gamma=0.5)

    names = ("reward", "n_steps", "discount", "truncated", "next_obs", "mask")
    assert said(rows, 0, *names) == [3.0, 3, 0.125, False, 13, True]
    assert said(rows, 1, *names) == [6.0, 3, 0.125, True, 14, True]
    assert said(rows, 2, *names) == [8.0, 2, 0.25, True, 14, True]
    assert said(rows, 3, *names) == [8.0, 1, 0.5, True, 14, True]


@pytest.mark.parametrize("ended", ["truncated", "cut", "running"])
def test_n_steps_stop_before_a_step_with_no_observation_after_it(
    create: Create, ended: str
) -> None:
    buffer = create()
    add_rewards(buffer, ended=ended, final=None)

    rows = drawn(buffer, n_step=3, gamma=0.5)

    names = ("reward", "n_steps", "discount", "truncated", "next_obs", "mask")
    assert said(rows, 0, *names) == [3.0, 3, 0.125, False, 13, True]
    assert said(rows, 1, *names) == [4.0, 2, 0.25, False, 13, True]
    assert said(rows, 2, *names) == [4.0, 1, 0.5, False, 13, True]
    assert 3 not in rows


def test_n_steps_reach_a_next_observation_that_is_not_a_row_yet(create: Create) -> None:
    buffer = create()
    for i in range(3):
        buffer.append(obs=i, reward=1.0, terminated=False, truncated=False, next_obs=i + 1)

    rows = drawn(buffer, n_step=3, gamma=1.0)

    assert {i: (row["next_obs"], row["n_steps"]) for i, row in rows.items()} == {
        0: (3, 3),
        1: (3, 2),
        2: (3, 1),
    }


def test_a_sum_of_small_integers_does_not_wrap_or_lose_its_fraction(create: Create) -> None:
    buffer = create({**STEP, "reward": ((), "int8")})
    for i in range(4):
        buffer.append(obs=i, reward=np.int8(101), terminated=i == 3, truncated=False)

    assert drawn(buffer, n_step=3, gamma=1.0)[0]["reward"] == 303
    assert drawn(buffer, n_step=2, gamma=0.5)[0]["reward"] == 151.5


def test_asking_for_fewer_fields_does_not_change_the_sums(create: Create) -> None:
    buffer = create()
    add_rewards(buffer, ended="truncated", final=None)
    window = {"n_step": 3, "gamma": 0.5}
    everything = drawn(buffer, **window)

    some = drawn(buffer, **window, fields=["reward", "truncated"])

    for i in everything:
        assert said(some, i, "reward", "truncated") == said(everything, i, "reward", "truncated")
        assert "next_obs" not in some[i]
        assert "obs" not in some[i]


def test_asking_for_fewer_fields_does_not_change_what_is_drawn(create: Create) -> None:
    buffer = create()
    add_rewards(buffer, ended="truncated", final=None)

    assert set(drawn(buffer, fields=["obs", "reward"])) == set(drawn(buffer))


# What is drawn, and how often


def assert_uniform(ids: Any, valid: list[int]) -> None:
    """Pearson's chi-square test; the bound is six standard deviations away."""
    n_draws, n_valid = len(ids), len(valid)
    counts = dict(zip(*np.unique(ids, return_counts=True), strict=True))
    expected = n_draws / n_valid
    freedom = n_valid - 1
    chi_square = sum((counts.get(i, 0) - expected) ** 2 / expected for i in valid)

    assert set(counts) == set(valid)
    assert chi_square < freedom + 6 * (2 * freedom) ** 0.5


def fill_with_episodes(buffer: Buffer) -> list[int]:
    """Append ends of every kind until rows were evicted; return the ids to be drawn."""
    # 9 rows each: 2 steps and LAST; 3 steps, cut; 2 steps, terminated; 1 step, truncated.
    for start in range(100, 500, 20):
        add_steps(buffer, range(start, start + 2), ended="truncated")
        buffer.end_episode(obs=start + 2)
        add_steps(buffer, range(start + 3, start + 6))
        buffer.end_episode()
        add_steps(buffer, range(start + 6, start + 8), ended="terminated")
        add_steps(buffer, range(start + 8, start + 9), ended="truncated")
    return [i for i in range(buffer.rows) if i % 9 in (0, 1, 3, 4, 6, 7)]


def test_every_valid_row_is_drawn_with_its_exact_probability(create: Create) -> None:
    buffer = create(capacity=40)
    valid = fill_with_episodes(buffer)
    buffer.flush()
    # Rows 180 to 182 stay in the tail; the newest has no observation after it.
    add_steps(buffer, range(3))
    valid = [i for i in [*valid, 180, 181] if i >= 140]

    ids = buffer.sample(100_000, seed=3)["indices"]

    assert (buffer.first_row, buffer.rows) == (140, 183)
    assert_uniform(ids, valid)


def test_a_loader_draws_every_valid_row_with_its_exact_probability(create: Create) -> None:
    buffer = create(capacity=40)
    valid = fill_with_episodes(buffer)
    buffer.flush()
    valid = [i for i in valid if i >= buffer.first_row]

    with buffer.loader(500, seed=3, fields=["obs", "next_obs"]) as loader:
        ids = np.concatenate([batch["indices"] for batch in itertools.islice(loader, 100)])

    assert_uniform(ids, valid)


def test_one_valid_row_among_many_is_found(create: Create) -> None:
    buffer = create()
    for i in range(50):
        add_steps(buffer, range(i, i + 1), ended="truncated")
    add_steps(buffer, range(90, 92))

    assert set(buffer.sample(20)["indices"].tolist()) == {50}


def test_where_nothing_can_be_drawn_the_error_says_so(create: Create) -> None:
    buffer = create()

    with pytest.raises(SampleError, match="empty"):
        buffer.sample(4)
    add_steps(buffer, range(1))
    with pytest.raises(SampleError):
        buffer.sample(4)
    buffer.end_episode()
    with pytest.raises(SampleError):
        buffer.sample(4)


def test_a_stack_longer_than_what_is_left_of_the_only_episode_is_refused(
    create: Create,
) -> None:
    buffer = create(capacity=8)
    add_steps(buffer, range(30))
    buffer.flush()

    assert set(drawn(buffer, frame_stack=9)) == {28}
    with pytest.raises(SampleError, match="10"):
        buffer.sample(4, frame_stack=10)


@pytest.mark.parametrize(
    "bad",
    [
        {"batch_size": 0},
        {"batch_size": -1},
        {"frame_stack": 0},
        {"n_step": 0},
        {"gamma": float("nan")},
        {"gamma": -0.1},
        {"gamma": 1.1},
        {"fields": ["unheard_of"]},
    ],
    ids=str,
)
def test_a_window_that_makes_no_sense_is_refused(create: Create, bad: dict[str, Any]) -> None:
    buffer = create()
    add_steps(buffer, range(8))

    with pytest.raises(ValueError, match=next(iter(bad)).removesuffix("s")):
        buffer.sample(**bad)
    with pytest.raises(ValueError, match=next(iter(bad)).removesuffix("s")):
        buffer.loader(**bad)


# Transitions that store their own next observation


def test_explicit_transitions_are_all_drawn_with_their_own_next_obs(create: Create) -> None:
    buffer = create(Schema(STEP, next_obs="explicit"))
    for i in range(10):
        buffer.append(obs=i, next_obs=50 - i, reward=2.0, terminated=i == 3, truncated=i == 5)

    rows = drawn(buffer, gamma=0.5)

    assert buffer["step_type"][:].tolist() == [0, 1, 1, 1, 0, 1, 0, 1, 1, 1]
    for i in range(10):
        names = ("obs", "next_obs", "reward", "n_steps", "discount", "mask")
        assert said(rows, i, *names) == [i, 50 - i, 2.0, 1, 0.0 if i == 3 else 0.5, True]


def test_explicit_transitions_have_no_stacks_and_no_sums(create: Create) -> None:
    buffer = create(Schema(STEP, next_obs="explicit"))
    for i in range(3):
        buffer.append(obs=i, next_obs=9, reward=2.0, terminated=False, truncated=False)

    with pytest.raises(SampleError):
        buffer.sample(4, frame_stack=2)
    with pytest.raises(SampleError):
        buffer.sample(4, n_step=2)
    one = buffer.sample(4, frame_stack=1, n_step=1)
    assert (one["obs"].shape, one["next_obs"].shape) == ((4, 1), (4, 1))


# Batches


def assert_same_batch(a: Any, b: Any) -> None:
    assert list(a) == list(b)
    for name in a:
        assert (a[name].dtype, a[name].shape) == (b[name].dtype, b[name].shape)
        assert a[name].tobytes() == b[name].tobytes()


def kept(batch: Any) -> dict[str, Any]:
    return {name: array.copy() for name, array in batch.items()}


def test_a_batch_has_the_dtypes_of_its_fields(create: Create) -> None:
    buffer = create({**STEP, "obs": ((2, 3), "uint8"), "weight": ((0,), "<U4")})
    for _ in range(5):
        buffer.append(
            obs=np.ones((2, 3), np.uint8),
            reward=1.0,
            terminated=False,
            truncated=False,
            weight=np.zeros(0, "<U4"),
        )

    batch = buffer.sample(6, frame_stack=4, n_step=2)

    assert {name: (array.dtype.str, array.shape) for name, array in batch.items()} == {
        "obs": ("|u1", (6, 4, 2, 3)),
        "next_obs": ("|u1", (6, 4, 2, 3)),
        "reward": ("<f4", (6,)),
        "terminated": ("|b1", (6,)),
        "truncated": ("|b1", (6,)),
        "weight": ("<U4", (6, 0)),
        "indices": ("<i8", (6,)),
        "n_steps": ("<i8", (6,)),
        "discount": ("<f4", (6,)),
        "mask": ("|b1", (6,)),
    }


def test_the_same_seed_draws_the_same_batch(create: Create) -> None:
    buffer = create()
    fill_with_episodes(buffer)
    window = {"frame_stack": 2, "n_step": 2}

    first = buffer.sample(64, seed=5, **window)

    assert_same_batch(first, buffer.sample(64, seed=5, **window))
    assert_same_batch(
        buffer.sample(64, seed=np.random.default_rng(5), **window),
        buffer.sample(64, seed=np.random.default_rng(5), **window),
    )
    assert first["indices"].tolist() != buffer.sample(64, seed=6, **window)["indices"].tolist()
    assert buffer.sample(64)["indices"].tolist() != buffer.sample(64)["indices"].tolist()


@pytest.mark.parametrize("prefetch", [0, 1, 4])
def test_loaders_with_the_same_seed_give_the_same_batches(create: Create, prefetch: int) -> None:
    buffer = create()
    fill_with_episodes(buffer)
    buffer.flush()
    options = {"frame_stack": 2, "n_step": 2}

    with (
        buffer.loader(16, seed=5, prefetch=prefetch, **options) as one,
        buffer.loader(16, seed=5, prefetch=2, **options) as two,
        buffer.loader(16, seed=6, prefetch=prefetch, **options) as other,
    ):
        batches = list(itertools.islice(one, 8))
        same = list(itertools.islice(two, 8))
        others = list(itertools.islice(other, 8))

    for a, b in zip(batches, same, strict=True):
        assert_same_batch(a, b)
    drawn_ids = [batch["indices"].tolist() for batch in [*batches, *others]]
    assert len({tuple(ids) for ids in drawn_ids}) == 16


def test_a_loader_on_the_closed_buffer_draws_what_the_writer_drew(create: Create) -> None:
    buffer = create()
    fill_with_episodes(buffer)
    buffer.flush()
    with buffer.loader(16, seed=5, frame_stack=3) as loader:
        batches = list(itertools.islice(loader, 4))
    buffer.close()

    with zbuffer.open(buffer.path) as closed, closed.loader(16, seed=5, frame_stack=3) as loader:
        for batch in batches:
            assert_same_batch(batch, next(loader))


def test_a_returned_batch_is_not_changed_by_what_comes_later(create: Create) -> None:
    buffer = create(capacity=40)
    fill_with_episodes(buffer)
    batches = [buffer.sample(32, frame_stack=3, seed=i) for i in range(4)]
    with buffer.loader(32, frame_stack=3, seed=9) as loader:
        batches += list(itertools.islice(loader, 6))
        before = [kept(batch) for batch in batches]

        for _ in range(20):
            next(loader)
    for seed in range(20):
        buffer.sample(32, frame_stack=3, seed=seed)
    fill_with_episodes(buffer)
    buffer.close()

    for batch, copied in zip(batches, before, strict=True):
        assert_same_batch(batch, copied)


def test_changing_a_batch_changes_no_row(create: Create) -> None:
    buffer = create()
    fill_with_episodes(buffer)
    before = buffer["obs"][:].copy()

    for array in buffer.sample(32, frame_stack=3, seed=0).values():
        array[...] = np.zeros((), array.dtype)
    buffer["obs"][:][...] = 0
    buffer.take([3, 4])["obs"][...] = 0

    assert buffer["obs"][:].tolist() == before.tolist()


def test_the_parts_of_a_nested_observation_are_found_under_its_name(create: Create) -> None:
    schema = {name: field for name, field in STEP.items() if name != "obs"}
    buffer = create({"obs/a": ((), "int64"), "obs/b": ((2,), "uint8"), **schema})
    for i in range(3):
        buffer.append(
            obs={"a": i, "b": np.full(2, i, np.uint8)},
            next_obs={"a": i + 1, "b": np.full(2, i + 1, np.uint8)},
            reward=0.0,
            terminated=False,
            truncated=False,
        )

    batch = buffer.sample(50, frame_stack=2, seed=0)

    assert set(batch["indices"].tolist()) == {0, 1, 2}
    assert (batch["next_obs"]["a"][:, 1] == batch["indices"] + 1).all()
    assert (batch["next_obs/b"][:, 1] == batch["indices"][:, None] + 1).all()
    assert (batch["obs"]["b"][:, 1] == batch["indices"][:, None]).all()


# The observation that is not a row yet, at every place in a chunk


@pytest.mark.parametrize("n_rows", range(1, 10))
def test_flushing_keeps_the_pending_observation(
    create: Create, tmp_path: Path, n_rows: int
) -> None:
    buffer = create()
    for i in range(n_rows):
        buffer.append(obs=i, reward=1.0, terminated=False, truncated=False, next_obs=i + 1)
    buffer.flush()

    shutil.copytree(buffer.path, tmp_path / "killed.zarr")
    with zbuffer.open(buffer.path) as reader:
        seen = {i: row["next_obs"] for i, row in drawn(reader).items()}
        ended = reader.episodes[-1].ended
    with zbuffer.open(tmp_path / "killed.zarr", mode="a") as killed:
        after_kill = killed["obs"][:].tolist()

    assert seen == {i: i + 1 for i in range(n_rows)}
    assert ended == "running"
    assert after_kill == list(range(n_rows + 1))
