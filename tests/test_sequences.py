"""Sequences and whole episodes, against lists."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import zbuffer

SCHEMA = {
    "obs": ((2,), "int32"),
    "action": ((), "int64"),
    "reward": ((), "float32"),
    "terminated": ((), "bool"),
    "truncated": ((), "bool"),
}
#: An episode: its number of steps, how it ends, and whether its final observation is kept.
EPISODES = st.lists(
    st.tuples(
        st.integers(1, 12),
        st.sampled_from(["terminated", "truncated", "cut"]),
        st.booleans(),
    ),
    min_size=1,
    max_size=8,
)


class Oracle:
    """The steps of one time line, each a dict, in a plain list."""

    def __init__(self) -> None:
        self.steps: list[dict[str, Any]] = []

    def fill(self, buffer: zbuffer.Buffer, episodes: Any, *, running: int) -> None:
        number = 0
        plan = [*episodes, (running, "running", False)] if running else episodes
        for index, (n, how, final) in enumerate(plan):
            for t in range(n):
                last = t == n - 1
                done = {"terminated": last and how == "terminated"}
                done["truncated"] = last and how == "truncated"
                step = {"episode": index, "t": t, "number": number, **done}
                step["is_first"] = t == 0
                step["is_last"] = last and how != "running"
                step["next"] = number + 1 if not last or (final and how != "running") else None
                self.steps.append(step)
                buffer.append(
                    obs=np.array([number, index], np.int32),
                    action=number,
                    reward=float(number),
                    **done,
                )
                number += 1
            if final and how != "running":
                buffer.end_episode(obs=np.array([number, index], np.int32))
                number += 1
            elif how == "cut":
                buffer.end_episode()

    def sequence(self, start: int, n: int, boundary: str) -> list[dict[str, Any] | None] | None:
        """Return the steps of the sequence that begins at a step; None without one."""
        steps = self.steps[start : start + n]
        if boundary != "cross":
            steps = [s for s in steps if s["episode"] == self.steps[start]["episode"]]
        if len(steps) < n and boundary != "pad":
            return None
        return [*steps, *[None] * (n - len(steps))]


def compare(batch: zbuffer.Batch, oracle: Oracle, n: int, boundary: str) -> set[int]:
    """Check every sequence of a batch; returns the numbers of their first steps."""
    by_number = {step["number"]: at for at, step in enumerate(oracle.steps)}
    seen = set()
    for b in range(len(batch["indices"])):
        number = int(batch["obs"][b, 0, 0])
        seen.add(number)
        wanted = oracle.sequence(by_number[number], n, boundary)
        assert wanted is not None
        for t, step in enumerate(wanted):
            assert batch["mask"][b, t] == (step is not None)
            if step is None:
                assert not batch["obs"][b, t].any()
                assert batch["reward"][b, t] == 0
                assert not batch["is_last"][b, t]
                continue
            assert batch["obs"][b, t].tolist() == [step["number"], step["episode"]]
            assert batch["reward"][b, t] == step["number"]
            assert batch["action"][b, t] == step["number"]
            assert batch["is_first"][b, t] == step["is_first"]
            assert batch["is_last"][b, t] == step["is_last"], (step, t)
            assert batch["is_terminal"][b, t] == step["terminated"]
            assert batch["next_mask"][b, t] == (step["next"] is not None)
            next_obs = [0, 0] if step["next"] is None else [step["next"], step["episode"]]
            assert batch["next_obs"][b, t].tolist() == next_obs
    return seen


FIELDS = ["obs", "next_obs", "action", "reward", "terminated", "truncated"]


@settings(max_examples=60, deadline=None)
@given(EPISODES, st.integers(0, 9), st.integers(1, 8), st.sampled_from(["stop", "pad", "cross"]))
def test_sequences_are_those_of_a_list(
    tmp_path_factory: Any, episodes: Any, running: int, n: int, boundary: Any
) -> None:
    oracle = Oracle()
    path = tmp_path_factory.mktemp("s") / "b"
    with zbuffer.create(path, SCHEMA, chunk_rows=8) as buffer:
        oracle.fill(buffer, episodes, running=running)
        starts = {
            step["number"]
            for at, step in enumerate(oracle.steps)
            if oracle.sequence(at, n, boundary) is not None
        }
        with buffer.sequences(400, n, boundary=boundary, fields=FIELDS, prefetch=0) as loader:
            if not starts:
                with pytest.raises(zbuffer.SampleError, match="begins a sequence"):
                    next(loader)
                return
            batch = next(loader)

    assert compare(batch, oracle, n, boundary) <= starts
    if len(starts) < 12:
        assert {int(number) for number in batch["obs"][:, 0, 0]} == starts


def test_a_sequence_longer_than_every_episode_is_an_error_that_names_both(tmp_path: Path) -> None:
    with zbuffer.create(tmp_path / "b", SCHEMA, chunk_rows=8) as buffer:
        Oracle().fill(buffer, [(5, "terminated", True), (7, "truncated", True)], running=3)
        loader = buffer.sequences(4, 8, prefetch=0)
        with pytest.raises(zbuffer.SampleError) as caught:
            next(loader)

    assert str(caught.value) == (
        "none of the 17 rows begins a sequence of 8 steps: the longest episode has 7"
    )


def test_burn_in_comes_before_the_steps_to_learn_from(tmp_path: Path) -> None:
    with zbuffer.create(tmp_path / "b", SCHEMA, chunk_rows=8) as buffer:
        Oracle().fill(buffer, [(12, "terminated", True)], running=0)
        with buffer.sequences(50, 4, burn_in=3, prefetch=0) as loader:
            batch = next(loader)

    assert batch["obs"].shape == (50, 7, 2)
    assert set(batch["obs"][:, 0, 0].tolist()) <= set(range(6))


@pytest.mark.parametrize("stride", [2, 3, 5])
def test_stride_counts_from_the_beginning_of_each_episode(tmp_path: Path, stride: int) -> None:
    oracle = Oracle()
    with zbuffer.create(tmp_path / "b", SCHEMA, chunk_rows=8) as buffer:
        oracle.fill(buffer, [(12, "terminated", True), (9, "cut", False)] * 3, running=4)
        with buffer.sequences(500, 3, stride=stride, prefetch=0) as loader:
            batch = next(loader)

    by_number = {step["number"]: step for step in oracle.steps}
    starts = {by_number[int(number)]["t"] for number in batch["obs"][:, 0, 0]}
    assert starts == set(range(0, 10, stride))


@settings(max_examples=40, deadline=None)
@given(EPISODES, st.integers(0, 5))
def test_whole_episodes_are_padded_to_the_longest(
    tmp_path_factory: Any, episodes: Any, running: int
) -> None:
    oracle = Oracle()
    path = tmp_path_factory.mktemp("e") / "b"
    with zbuffer.create(path, SCHEMA, chunk_rows=8) as buffer:
        oracle.fill(buffer, episodes, running=running)
        batch = buffer.sample_episodes(60, fields=FIELDS, seed=1)

    longest = int(batch["mask"].sum(axis=1).max())
    assert batch["obs"].shape == (60, longest, 2)
    compare(batch, oracle, longest, "pad")
    assert batch["is_first"][:, 0].all()
    assert (batch["is_last"].sum(axis=1) == 1).all()


def test_without_a_whole_episode_sampling_one_says_so(tmp_path: Path) -> None:
    with zbuffer.create(tmp_path / "b", SCHEMA) as buffer:
        Oracle().fill(buffer, [], running=3)

        with pytest.raises(zbuffer.SampleError, match="there is no whole episode"):
            buffer.sample_episodes(2)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"length": 0}, "length must be a whole number from 1 on, got 0"),
        ({"length": 2, "burn_in": -1}, "burn_in must be a whole number from 0 on, got -1"),
        ({"length": 2, "stride": 0}, "stride must be a whole number from 1 on, got 0"),
        (
            {"length": 2, "boundary": "wrap"},
            "boundary must be 'stop', 'pad' or 'cross', got 'wrap'",
        ),
    ],
)
def test_sequences_that_cannot_be_are_refused(
    tmp_path: Path, arguments: dict[str, Any], message: str
) -> None:
    with (
        zbuffer.create(tmp_path / "b", SCHEMA) as buffer,
        pytest.raises(zbuffer.SampleError, match=message),
    ):
        buffer.sequences(4, **arguments)


def test_sequences_of_rows_that_do_not_chain_are_refused(tmp_path: Path) -> None:
    schema = zbuffer.Schema({**SCHEMA, "next_obs": ((2,), "int32")}, next_obs="explicit")
    with (
        zbuffer.create(tmp_path / "b", schema) as buffer,
        pytest.raises(zbuffer.SampleError, match="these do not chain"),
    ):
        buffer.sequences(4, 2)
