"""Where does each episode begin and end, how long is it, and how did it end?"""

from __future__ import annotations

import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import zbuffer
from zbuffer import Buffer, Episode, EpisodeError

STEP = {
    "obs": ((), "int64"),
    "reward": ((), "float32"),
    "terminated": ((), "bool"),
    "truncated": ((), "bool"),
}
Create = Callable[..., Buffer]


@pytest.fixture
def create(tmp_path: Path) -> Any:
    """Make buffers with tiny chunks; they are closed in the end."""
    made: list[Buffer] = []

    def create(schema: Any = STEP, **options: Any) -> Buffer:
        path = tmp_path / f"{len(made)}.zarr"
        made.append(zbuffer.create(path, schema, **{"chunk_rows": 4, "block_rows": 2} | options))
        return made[-1]

    yield create

    for buffer in made:
        buffer.close()


def add_steps(buffer: Buffer, n_steps: int, *, ended: str = "") -> None:
    """Append steps with the rewards 1, 2, 3, ..., the last of which may have a flag."""
    for i in range(1, n_steps + 1):
        flags = {flag: i == n_steps and ended == flag for flag in ("terminated", "truncated")}
        buffer.append(obs=i, reward=float(i), **flags)


def table(buffer: Buffer) -> list[tuple[int, int, int, float, str]]:
    return [(e.start, e.stop, e.length, e.return_, e.ended) for e in buffer.episodes]


def test_an_empty_buffer_has_no_episodes(create: Create) -> None:
    buffer = create()

    assert len(buffer.episodes) == 0
    assert list(buffer.episodes) == []
    assert buffer.episodes.start.tolist() == []


def test_each_episode_says_how_it_ended(create: Create) -> None:
    buffer = create()
    add_steps(buffer, 2, ended="terminated")
    add_steps(buffer, 3, ended="truncated")
    add_steps(buffer, 1)
    buffer.end_episode()
    add_steps(buffer, 5)

    assert table(buffer) == [
        (0, 2, 2, 3.0, "terminated"),
        (2, 5, 3, 6.0, "truncated"),
        (5, 6, 1, 1.0, "cut"),
        (6, 11, 5, 15.0, "running"),
    ]


def test_a_final_observation_is_a_row_but_not_a_step(create: Create) -> None:
    buffer = create()
    add_steps(buffer, 2, ended="terminated")
    buffer.end_episode(obs=9)
    add_steps(buffer, 2, ended="truncated")
    buffer.end_episode(obs=9)
    add_steps(buffer, 2)
    buffer.end_episode(obs=9)

    assert table(buffer) == [
        (0, 3, 2, 3.0, "terminated"),
        (3, 6, 2, 3.0, "truncated"),
        (6, 9, 2, 3.0, "cut"),
    ]
    assert len(buffer) == 6
    assert buffer["step_type"][:].tolist() == [0, 1, 2] * 3
    assert buffer["obs"][:].tolist() == [1, 2, 9] * 3
    assert buffer["reward"][:].tolist() == [1.0, 2.0, 0.0] * 3


def test_a_pending_observation_becomes_a_row_only_when_the_episode_ends(create: Create) -> None:
    buffer = create()
    flags = {"terminated": False, "truncated": False}
    buffer.append(obs=1, reward=1.0, next_obs=2, **flags)
    assert table(buffer) == [(0, 1, 1, 1.0, "running")]

    buffer.end_episode()

    assert table(buffer) == [(0, 2, 1, 1.0, "cut")]
    assert buffer["obs"][:].tolist() == [1, 2]


def test_terminated_counts_where_both_flags_are_set(create: Create) -> None:
    buffer = create()
    buffer.append(obs=1, reward=1.0, terminated=True, truncated=True)

    assert table(buffer) == [(0, 1, 1, 1.0, "terminated")]


def test_columns_items_and_slices_say_the_same(create: Create) -> None:
    buffer = create()
    add_steps(buffer, 2, ended="terminated")
    add_steps(buffer, 3, ended="truncated")
    add_steps(buffer, 1)

    episodes = buffer.episodes

    assert episodes.start.tolist() == [0, 2, 5]
    assert episodes.stop.tolist() == [2, 5, 6]
    assert episodes.length.tolist() == [2, 3, 1]
    assert episodes.returns.tolist() == [3.0, 6.0, 1.0]
    assert episodes.ended.tolist() == ["terminated", "truncated", "running"]
    assert (episodes.start.dtype, episodes.stop.dtype, episodes.length.dtype) == ("i8",) * 3
    assert episodes.returns.dtype == np.float64
    assert episodes[1] == Episode(2, 5, 3, 6.0, "truncated")
    assert episodes[-1] == episodes[2] == list(episodes)[2]
    assert episodes[1:] == [episodes[1], episodes[2]]
    with pytest.raises(IndexError):
        episodes[3]


def test_rows_of_an_episode_are_taken_by_its_ids(create: Create) -> None:
    buffer = create(capacity=8)
    for _ in range(6):
        add_steps(buffer, 3, ended="terminated")
    buffer.flush()

    newest = buffer.episodes[-1]

    assert buffer.take(np.arange(newest.start, newest.stop))["reward"].tolist() == [1.0, 2.0, 3.0]


def test_returns_are_summed_in_double_precision(create: Create) -> None:
    buffer = create()
    for reward in (2.0**24, 1.0, 1.0, 1.0):
        buffer.append(obs=0, reward=reward, terminated=False, truncated=False)

    assert buffer.episodes[0].return_ == 2.0**24 + 3


def test_returns_of_small_integers_do_not_wrap(create: Create) -> None:
    buffer = create({**STEP, "reward": ((), "uint8")})
    for _ in range(3):
        buffer.append(obs=0, reward=np.uint8(200), terminated=False, truncated=False)

    assert buffer.episodes[0].return_ == 600.0


def test_one_endless_reward_spoils_no_other_return(create: Create) -> None:
    buffer = create()
    for reward in (1.0, float("inf"), float("nan"), 2.0):
        buffer.append(obs=0, reward=reward, terminated=True, truncated=False)

    assert buffer.episodes.returns.tolist() == pytest.approx(
        [1.0, float("inf"), float("nan"), 2.0], nan_ok=True
    )


def test_without_rewards_and_flags_returns_are_nan_and_episodes_are_cut(create: Create) -> None:
    buffer = create({"obs": ((), "int64")})
    buffer.append(obs=1)
    buffer.append(obs=2)
    buffer.end_episode(obs=3)
    buffer.append(obs=1)

    episodes = buffer.episodes

    assert [(e.start, e.stop, e.length, e.ended) for e in episodes] == [
        (0, 3, 2, "cut"),
        (3, 4, 1, "running"),
    ]
    assert np.isnan(episodes.returns).all()


# Calls that end episodes


@pytest.mark.parametrize("ended", ["terminated", "truncated", "cut"])
@pytest.mark.parametrize("final", [True, False])
def test_add_episode_adds_one_whole_episode(create: Create, ended: str, final: bool) -> None:
    buffer = create()
    flags = {} if ended == "cut" else {ended: True}

    for _ in range(2):
        n = buffer.add_episode(obs=np.arange(3 + final), reward=np.ones(3, np.float32), **flags)
        assert n == 3

    n_rows = 3 + final
    assert table(buffer) == [
        (0, n_rows, 3, 3.0, ended),
        (n_rows, 2 * n_rows, 3, 3.0, ended),
    ]
    assert buffer["obs"][:].tolist() == [*range(n_rows)] * 2


def test_add_episode_is_refused_while_an_episode_runs(create: Create) -> None:
    buffer = create()
    add_steps(buffer, 2)

    with pytest.raises(EpisodeError):
        buffer.add_episode(obs=np.arange(3), reward=np.ones(3, np.float32))

    assert table(buffer) == [(0, 2, 2, 3.0, "running")]


def test_extend_ends_episodes_where_the_flags_say_so(create: Create) -> None:
    buffer = create()
    add_steps(buffer, 1)

    n = buffer.extend(
        obs=np.arange(6),
        reward=np.ones(6, np.float32),
        terminated=np.array([0, 1, 0, 0, 0, 0], bool),
        truncated=np.array([0, 0, 0, 1, 0, 0], bool),
    )

    assert n == 6
    assert table(buffer) == [
        (0, 3, 3, 3.0, "terminated"),
        (3, 5, 2, 2.0, "truncated"),
        (5, 7, 2, 2.0, "running"),
    ]


def test_extend_with_a_broken_chain_changes_nothing(create: Create) -> None:
    buffer = create()
    add_steps(buffer, 1)
    rows = {"reward": np.ones(3, np.float32)} | {
        flag: np.zeros(3, bool) for flag in ("terminated", "truncated")
    }

    with pytest.raises(EpisodeError):
        buffer.extend(obs=np.array([5, 6, 8]), next_obs=np.array([6, 7, 9]), **rows)
    assert table(buffer) == [(0, 1, 1, 1.0, "running")]
    buffer.extend(obs=np.array([5, 6, 7]), next_obs=np.array([6, 7, 8]), **rows)
    buffer.end_episode()

    assert table(buffer) == [(0, 5, 4, 4.0, "cut")]
    assert buffer["obs"][:].tolist() == [1, 5, 6, 7, 8]


def test_where_no_episode_runs_none_can_be_ended(create: Create) -> None:
    buffer = create()

    with pytest.raises(EpisodeError):
        buffer.end_episode()
    with pytest.raises(EpisodeError):
        buffer.end_episode(obs=1)
    add_steps(buffer, 2)
    buffer.end_episode(obs=3)
    with pytest.raises(EpisodeError):
        buffer.end_episode(obs=4)

    assert buffer.rows == 3


def test_one_final_observation_follows_a_step_with_a_flag(create: Create) -> None:
    buffer = create()
    add_steps(buffer, 2, ended="truncated")
    buffer.end_episode(obs=3)
    with pytest.raises(EpisodeError):
        buffer.end_episode(obs=3)
    buffer.append(obs=1, reward=1.0, terminated=True, truncated=False, next_obs=2)
    with pytest.raises(EpisodeError):
        buffer.end_episode(obs=2)

    assert table(buffer) == [(0, 3, 2, 3.0, "truncated"), (3, 5, 1, 1.0, "terminated")]


# Over reopening, and seen by others


def test_an_episode_does_not_go_on_over_reopening(create: Create) -> None:
    buffer = create()
    add_steps(buffer, 2)
    buffer.close()

    with zbuffer.open(buffer.path, mode="a") as again:
        with pytest.raises(EpisodeError):
            again.end_episode(obs=3)
        assert table(again) == [(0, 2, 2, 3.0, "cut")]
        add_steps(again, 3)

        assert table(again) == [(0, 2, 2, 3.0, "cut"), (2, 5, 3, 6.0, "running")]

    with zbuffer.open(buffer.path) as closed:
        assert table(closed) == [(0, 2, 2, 3.0, "cut"), (2, 5, 3, 6.0, "cut")]


def test_closing_keeps_the_pending_observation_as_the_last_row(create: Create) -> None:
    buffer = create()
    buffer.append(obs=1, reward=1.0, terminated=False, truncated=False, next_obs=2)
    buffer.close()

    with zbuffer.open(buffer.path) as closed:
        assert table(closed) == [(0, 2, 1, 1.0, "cut")]
        assert closed["obs"][:].tolist() == [1, 2]
        assert closed["step_type"][:].tolist() == [0, 2]


@pytest.mark.parametrize("n_steps", range(1, 6))
def test_an_episode_of_a_killed_writer_is_cut(create: Create, tmp_path: Path, n_steps: int) -> None:
    buffer = create(chunk_rows=8)
    for i in range(n_steps):
        buffer.append(obs=i, reward=1.0, terminated=False, truncated=False, next_obs=i + 1)

    shutil.copytree(buffer.path, tmp_path / "killed.zarr")

    with zbuffer.open(tmp_path / "killed.zarr", mode="a") as again:
        assert table(again) == [(0, n_steps + 1, n_steps, float(n_steps), "cut")]
        assert again["obs"][:].tolist() == list(range(n_steps + 1))


def test_a_reader_sees_whether_the_writer_s_episode_is_running(create: Create) -> None:
    buffer = create()
    with zbuffer.open(buffer.path) as reader:
        assert table(reader) == []
        for _ in range(3):
            start = buffer.rows
            add_steps(buffer, 3)
            assert table(reader)[-1] == (start, start + 3, 3, 6.0, "running")
            buffer.flush()
            assert table(reader)[-1] == (start, start + 3, 3, 6.0, "running")
            buffer.end_episode()
            assert table(reader)[-1] == (start, start + 3, 3, 6.0, "cut")
            add_steps(buffer, 1, ended="terminated")
            assert table(reader)[-1] == (start + 3, start + 4, 1, 1.0, "terminated")
        assert table(reader) == table(buffer)
        add_steps(buffer, 2)
        buffer.close()
        assert table(reader)[-1] == (12, 14, 2, 3.0, "cut")


# Eviction


def test_the_oldest_episode_begins_at_the_oldest_row_there_is(create: Create) -> None:
    buffer = create(capacity=8)
    for _ in range(4):
        add_steps(buffer, 5, ended="truncated")
    buffer.flush()

    # Rows 0 to 11 were evicted; of the third episode the rewards 3, 4 and 5 are left.
    assert buffer.first_row == 12
    assert table(buffer) == [(12, 15, 3, 12.0, "truncated"), (15, 20, 5, 15.0, "truncated")]
    assert buffer["step_type"][:3].tolist() == [1, 1, 1]


def test_an_episode_longer_than_the_capacity_is_one_running_episode(create: Create) -> None:
    buffer = create(capacity=8)
    add_steps(buffer, 30)
    buffer.flush()

    assert table(buffer) == [(20, 30, 10, float(sum(range(21, 31))), "running")]
    assert len(buffer) == 10


def test_an_episode_of_which_only_the_final_observation_is_left_is_not_listed(
    create: Create,
) -> None:
    buffer = create(capacity=8)
    add_steps(buffer, 4, ended="truncated")
    buffer.end_episode(obs=5)
    add_steps(buffer, 7)
    buffer.flush()

    assert (buffer.first_row, buffer.rows) == (4, 12)
    assert buffer["step_type"][:2].tolist() == [2, 0]
    assert table(buffer) == [(5, 12, 7, 28.0, "running")]
    assert len(buffer) == 7


def test_lengths_add_up_to_the_steps_of_the_buffer(create: Create) -> None:
    buffer = create(capacity=12)
    for n_steps in (3, 1, 4, 1, 5, 9, 2, 6):
        add_steps(buffer, n_steps, ended="terminated")
        buffer.end_episode(obs=0)
        buffer.flush()

        assert buffer.episodes.length.sum() == len(buffer)
