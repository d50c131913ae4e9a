"""Vector environments: each lane is a time line of its own, whatever the others do."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import tempfile
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import zarr
from hypothesis import given, settings
from hypothesis import strategies as st

import zbuffer

Array = np.ndarray[Any, Any]
SCHEMA = {
    "obs": ((3,), "int32"),
    "action": ((), "int64"),
    "reward": ((), "float32"),
    "terminated": ((), "bool"),
    "truncated": ((), "bool"),
}


class Lanes:
    """What a buffer with lanes should hold: a list of rows for each lane.

    A row is (kind, number, reward, terminated, truncated); the observation is the lane
    and the number, so that no two are alike.
    """

    def __init__(self, n: int) -> None:
        self.rows: list[list[tuple[str, int, float, bool, bool]]] = [[] for _ in range(n)]
        self.running = [False] * n
        self.pending: list[int | None] = [None] * n
        self.number = [0] * n

    def obs(self, lane: int, number: int) -> Array:
        return np.array([lane, number, lane * 1000 + number], np.int32)

    def step(self, lane: int, done: str, *, chained: bool) -> dict[str, Any]:
        """Note one step, and return the row to append."""
        pending = self.pending[lane]
        if pending is None:
            self.number[lane] += 1
        here = self.number[lane]
        kind = "mid" if self.running[lane] else "first"
        reward = float(here % 7)
        ended = done != "no"
        self.rows[lane].append((kind, here, reward, done == "terminated", done == "truncated"))
        row: dict[str, Any] = {
            "obs": self.obs(lane, here),
            "action": here,
            "reward": reward,
            "terminated": done == "terminated",
            "truncated": done == "truncated",
        }
        self.pending[lane] = None
        self.running[lane] = not ended
        if chained:
            self.number[lane] += 1
            row["next_obs"] = self.obs(lane, self.number[lane])
            if ended:
                self.rows[lane].append(("last", self.number[lane], 0.0, False, False))
            else:
                self.pending[lane] = self.number[lane]
        return row

    def end(self, lane: int) -> None:
        """Note the end of an episode without a final observation of its own."""
        if self.pending[lane] is not None:
            self.rows[lane].append(("last", self.number[lane], 0.0, False, False))
        self.pending[lane], self.running[lane] = None, False


def stacked(rows: list[dict[str, Any]]) -> dict[str, Any]:
    names = rows[0].keys()
    dtypes = {"action": np.int64, "reward": np.float32, "terminated": bool, "truncated": bool}
    return {n: np.array([row[n] for row in rows], dtypes.get(n, np.int32)) for n in names}


def lanes_of(buffer: zbuffer.Buffer) -> list[list[tuple[str, int, float, bool, bool]]]:
    """Return the rows of each lane, read by id along the windows' own path."""
    (rows,) = buffer._row_sets()
    ids = rows.ids(np.arange(len(rows)))
    lanes = rows.lanes(ids)
    read = buffer.take(ids)
    kinds = {0: "first", 1: "mid", 2: "last"}
    found: list[list[tuple[str, int, float, bool, bool]]] = [[] for _ in range(buffer.lanes)]
    for i in range(len(ids)):
        lane, number, both = read["obs"][i].tolist()
        assert lane == lanes[i]
        assert both == lane * 1000 + number
        found[lane].append(
            (
                kinds[int(read["step_type"][i])],
                number,
                float(read["reward"][i]),
                bool(read["terminated"][i]),
                bool(read["truncated"][i]),
            )
        )
    for lane in range(buffer.lanes):
        of = ids[lanes == lane]
        if len(of):
            np.testing.assert_array_equal(rows.path(of[:1], 0, len(of) - 1)[0], of)
            np.testing.assert_array_equal(rows.path(of[-1:], len(of) - 1, 0)[0], of)
            assert rows.path(of[:1], 1, 0)[0, 0] == -1
    return found


def check(buffer: zbuffer.Buffer, lanes: Lanes, *, evicted: bool = False) -> None:
    found = lanes_of(buffer)
    for lane, rows in enumerate(lanes.rows):
        if evicted:
            assert found[lane] == rows[len(rows) - len(found[lane]) :]
        else:
            assert found[lane] == rows
    assert len(buffer) == sum(kind != "last" for rows in found for kind, *_ in rows)


DONE = st.sampled_from(["no", "no", "no", "terminated", "truncated"])


@settings(max_examples=int(os.environ.get("ZBUFFER_EXAMPLES", "40")), deadline=None)
@given(st.data())
def test_lanes_hold_what_a_list_for_each_would(data: st.DataObject) -> None:
    n = data.draw(st.integers(2, 5), "lanes")
    segment_rows = data.draw(st.sampled_from([2, 4, 8]), "segment_rows")
    chunk_rows = segment_rows * data.draw(st.sampled_from([1, 2, 4]), "segments a chunk")
    chained = data.draw(st.booleans(), "next_obs")
    lanes = Lanes(n)
    with tempfile.TemporaryDirectory() as folder, ExitStack() as stack:
        path = Path(folder) / "b"
        opened = stack.enter_context
        buffer = opened(
            zbuffer.create(path, SCHEMA, lanes=n, segment_rows=segment_rows, chunk_rows=chunk_rows)
        )
        reader = opened(zbuffer.open(path))
        for _ in range(data.draw(st.integers(1, 40), "actions")):
            action = data.draw(
                st.sampled_from(["all"] * 6 + ["some"] * 3 + ["end", "flush", "reopen"])
            )
            if action == "all":
                rows = [lanes.step(i, data.draw(DONE), chained=chained) for i in range(n)]
                buffer.append(**stacked(rows))
            elif action == "some":
                chosen = data.draw(
                    st.lists(st.integers(0, n - 1), min_size=1, max_size=n, unique=True)
                )
                rows = [lanes.step(i, data.draw(DONE), chained=chained) for i in chosen]
                buffer.append(**stacked(rows), lanes=chosen)
            elif action == "end":
                running = [i for i in range(n) if lanes.running[i]]
                if running:
                    buffer.end_episode(lanes=running)
                    for i in running:
                        lanes.end(i)
            elif action == "flush":
                buffer.flush()
            else:
                buffer.close()
                for i in range(n):
                    lanes.end(i)
                buffer = opened(zbuffer.open(path, mode="a"))
            check(buffer, lanes)
            check(reader, lanes)
        buffer.close()
        for i in range(n):
            lanes.end(i)
        check(reader, lanes)
        check(opened(zbuffer.open(path)), lanes)
        check(opened(zbuffer.open(path, mode="a")), lanes)


def filled(path: Path, n_steps: int, **options: Any) -> tuple[zbuffer.Buffer, Lanes]:
    """Return a buffer of four lanes whose episodes have 5, 6, 7 and 8 steps."""
    lanes = Lanes(4)
    buffer = zbuffer.create(path, SCHEMA, lanes=4, **options)
    for t in range(n_steps):
        rows = []
        for lane in range(4):
            done = "terminated" if t % (5 + lane) == 4 + lane else "no"
            rows.append(lanes.step(lane, done, chained=True))
        buffer.append(**stacked(rows))
    return buffer, lanes


def test_windows_follow_their_lane(tmp_path: Path) -> None:
    buffer, lanes = filled(tmp_path / "b", 60, segment_rows=4, chunk_rows=16)
    with buffer:
        batch = buffer.sample(2000, frame_stack=3, n_step=2, gamma=0.5, seed=1)

        obs = batch["obs"]
        seen = set()
        for i in range(2000):
            lane, number = int(obs[i, -1, 0]), int(obs[i, -1, 1])
            rows = lanes.rows[lane]
            at = next(j for j, row in enumerate(rows) if row[1] == number)
            seen.add((lane, number))
            start = at
            while rows[start][0] != "first":
                start -= 1
            for place, back in enumerate((2, 1, 0)):
                assert obs[i, place].tolist()[:2] == [lane, rows[max(at - back, start)][1]]
            n_steps, reward, terminated = 0, 0.0, False
            for j in (0, 1):
                n_steps += 1
                reward += rows[at + j][2] * 0.5**j
                terminated = rows[at + j][3]
                if terminated or at + j + 1 >= len(rows) or rows[at + j + 1][0] == "last":
                    break
            assert batch["n_steps"][i] == n_steps
            assert batch["reward"][i] == np.float32(reward)
            assert batch["discount"][i] == (0.0 if terminated else 0.5**n_steps)
            after = at + n_steps
            number_after = rows[after][1] if after < len(rows) else lanes.pending[lane]
            assert batch["next_obs"][i, -1].tolist()[:2] == [lane, number_after]
        steps = {(k, r[1]) for k, rows in enumerate(lanes.rows) for r in rows if r[0] != "last"}
        assert seen == steps


def test_eviction_drops_the_oldest_rows_of_every_lane(tmp_path: Path) -> None:
    buffer, lanes = filled(tmp_path / "b", 300, segment_rows=4, chunk_rows=16, capacity=200)
    with buffer:
        buffer.flush()

        assert 200 <= len(buffer["obs"]) <= 200 + 3 * 16 + 16
        check(buffer, lanes, evicted=True)
        buffer.sample(500, frame_stack=4, n_step=3)


def test_a_lane_that_stands_still_keeps_no_page_from_being_sealed(tmp_path: Path) -> None:
    lanes = Lanes(3)
    with zbuffer.create(tmp_path / "b", SCHEMA, lanes=3, segment_rows=4, chunk_rows=8) as buffer:
        buffer.append(**stacked([lanes.step(i, "no", chained=True) for i in range(3)]))
        for _ in range(200):
            rows = [lanes.step(i, "no", chained=True) for i in (0, 1)]
            buffer.append(**stacked(rows), lanes=[0, 1])

        pages = len(list((tmp_path / "b" / "tail").iterdir()))
        buffer.append(**stacked([lanes.step(i, "no", chained=True) for i in range(3)]))

        assert pages <= 16
        check(buffer, lanes)
        assert buffer.episodes.length.tolist() == [202, 202, 2]
        assert buffer.episodes.ended.tolist() == ["running"] * 3


def test_many_steps_that_do_not_chain_are_refused_whole(tmp_path: Path) -> None:
    buffer, lanes = filled(tmp_path / "b", 3, segment_rows=4, chunk_rows=16)
    rows = [[Lanes(4).step(i, "no", chained=True) for i in range(4)] for _ in range(5)]
    steps = [stacked(row) for row in rows]
    many = {name: np.stack([step[name] for step in steps]) for name in steps[0]}
    with buffer:
        buffer.end_episode()
        for lane in range(4):
            lanes.end(lane)

        # Each step is the first of its lane: the second does not follow it.
        with pytest.raises(zbuffer.EpisodeError, match=r"obs\[1\] of field 'obs' differs"):
            buffer.extend(**many)

        check(buffer, lanes)


def test_rows_that_are_not_there_are_zero_whatever_the_dtype(tmp_path: Path) -> None:
    schema = {"obs": ((2,), "uint8"), "name": ((), "<U4"), "tag": ((), "S3")}
    with zbuffer.create(tmp_path / "b", schema, lanes=2, segment_rows=4, chunk_rows=8) as buffer:
        buffer.append(
            obs=np.ones((2, 2), np.uint8), name=np.array(["a", "b"]), tag=np.array([b"c", b"d"])
        )

    group = zarr.open_group(tmp_path / "b", mode="r")
    assert group["data/name"][:].tolist() == ["a", "", "", "", "b", "", "", ""]
    assert group["data/tag"][:].tolist() == [b"c", b"", b"", b"", b"d", b"", b"", b""]


def test_the_repr_says_how_many_lanes_there_are(tmp_path: Path) -> None:
    buffer, _ = filled(tmp_path / "b", 6, segment_rows=4, chunk_rows=16)
    with buffer:
        assert "24 steps of 4 lanes in rows 0 to " in repr(buffer)


def test_episodes_are_those_of_each_lane(tmp_path: Path) -> None:
    buffer, _ = filled(tmp_path / "b", 24, segment_rows=4, chunk_rows=16)
    with buffer:
        episodes = buffer.episodes

        assert [len(episodes.length[episodes.lane == i]) for i in range(4)] == [5, 4, 4, 3]
        assert episodes.length[episodes.lane == 3].tolist() == [8, 8, 8]
        assert set(episodes.ended[episodes.lane == 3].tolist()) == {"terminated"}
        assert episodes.ended[episodes.lane == 1].tolist() == ["terminated"] * 4
        assert episodes[-1].lane == 3


def test_end_episode_brings_final_observations_to_some_lanes(tmp_path: Path) -> None:
    lanes = Lanes(3)
    with zbuffer.create(tmp_path / "b", SCHEMA, lanes=3, segment_rows=2, chunk_rows=4) as buffer:
        for _ in range(3):
            buffer.append(**stacked([lanes.step(i, "no", chained=False) for i in range(3)]))
        final = np.stack([lanes.obs(2, 99), lanes.obs(0, 98)])
        buffer.end_episode(obs=final, lanes=[2, 0])
        lanes.rows[2].append(("last", 99, 0.0, False, False))
        lanes.rows[0].append(("last", 98, 0.0, False, False))
        lanes.running[0] = lanes.running[2] = False

        check(buffer, lanes)
        with pytest.raises(zbuffer.EpisodeError, match="no episode is running in lane 2"):
            buffer.end_episode(lanes=[1, 2])
        check(buffer, lanes)


def test_an_episode_is_added_to_the_lane_that_is_named(tmp_path: Path) -> None:
    with zbuffer.create(tmp_path / "b", SCHEMA, lanes=3, segment_rows=4, chunk_rows=8) as buffer:
        obs = np.arange(33, dtype=np.int32).reshape(11, 3)
        n = buffer.add_episode(
            lane=1, obs=obs, action=np.arange(10), reward=np.ones(10, np.float32), terminated=True
        )

        assert n == 10
        (episode,) = list(buffer.episodes)
        assert (episode.lane, episode.length, episode.ended) == (1, 10, "terminated")
        batch = buffer.sample_episodes(1, fields=["obs", "next_obs"])
        np.testing.assert_array_equal(batch["obs"][0], obs[:-1])
        np.testing.assert_array_equal(batch["next_obs"][0], obs[1:])


def test_extend_takes_axes_of_steps_and_lanes(tmp_path: Path) -> None:
    lanes = Lanes(2)
    rows = [[lanes.step(i, "no", chained=True) for i in range(2)] for _ in range(9)]
    steps = [stacked(row) for row in rows]

    with zbuffer.create(tmp_path / "b", SCHEMA, lanes=2, segment_rows=4, chunk_rows=8) as buffer:
        n = buffer.extend(**{name: np.stack([s[name] for s in steps]) for name in steps[0]})

        assert n == 18
        check(buffer, lanes)


@pytest.mark.parametrize(
    ("lanes", "message"),
    [
        ([0, 5], r"lanes must be 0 to 3, got \[0, 5\]"),
        ([1, 1], r"a lane is named twice in lanes=\[1, 1\]"),
        ([0.5], r"lanes must be a list of lane numbers, got \[0.5\]"),
        (-1, "lanes must be a list of lane numbers, got -1"),
    ],
)
def test_lanes_that_cannot_be_are_refused(tmp_path: Path, lanes: Any, message: str) -> None:
    buffer, model = filled(tmp_path / "b", 3, segment_rows=4, chunk_rows=16)
    row = {"obs": np.zeros((2, 3), np.int32), "action": np.zeros(2, np.int64)}
    flags = {name: np.zeros(2, bool) for name in ("terminated", "truncated")}
    with buffer:
        with pytest.raises(ValueError, match=message):
            buffer.append(**row, **flags, reward=np.zeros(2, np.float32), lanes=lanes)
        check(buffer, model)


def test_a_row_for_too_few_lanes_is_refused(tmp_path: Path) -> None:
    buffer, lanes = filled(tmp_path / "b", 3, segment_rows=4, chunk_rows=16)
    with buffer:
        rows = stacked([Lanes(4).step(i, "no", chained=False) for i in range(3)])
        with pytest.raises(zbuffer.SchemaError, match="has 3 rows for 4 lanes"):
            buffer.append(**rows)
        check(buffer, lanes)


def test_an_observation_that_does_not_follow_is_refused_and_nothing_changes(
    tmp_path: Path,
) -> None:
    buffer, lanes = filled(tmp_path / "b", 3, segment_rows=4, chunk_rows=16)
    with buffer:
        rows = stacked([lanes.step(i, "no", chained=True) for i in range(4)])
        for lane in range(4):
            lanes.rows[lane].pop()
            lanes.pending[lane] = lanes.number[lane] = lanes.number[lane] - 1
        wrong = {**rows, "obs": rows["obs"].copy()}
        wrong["obs"][2, 1] += 1
        with pytest.raises(zbuffer.EpisodeError, match=r"field 'obs' in lane 2 differs"):
            buffer.append(**wrong)
        check(buffer, lanes)
        buffer.append(**rows)


@pytest.mark.parametrize("value", [0, -1, True, 1.5, "4"])
def test_a_number_of_lanes_that_cannot_be_is_refused(tmp_path: Path, value: Any) -> None:
    with pytest.raises(zbuffer.SchemaError, match="'lanes' must be a whole number above 0"):
        zbuffer.create(tmp_path / "b", SCHEMA, lanes=value)

    assert not (tmp_path / "b").exists()


def test_a_closed_buffer_with_lanes_is_a_plain_zarr_group(tmp_path: Path) -> None:
    buffer, lanes = filled(tmp_path / "b", 50, segment_rows=4, chunk_rows=16)
    buffer.close()

    group = zarr.open_group(tmp_path / "b", mode="r")

    table = group["meta/segments"][:]
    obs, types = group["data/obs"][:], group["data/step_type"][:]
    found: list[list[int]] = [[] for _ in range(4)]
    steps = [0] * 4
    for segment, (lane, before, used) in enumerate(table.tolist()):
        if used == 0:
            continue
        assert before == steps[lane]
        rows = slice(segment * 4, segment * 4 + used)
        found[lane] += obs[rows, 1].tolist()
        steps[lane] += int((types[rows] < 2).sum())
        assert (types[segment * 4 + used : segment * 4 + 4] == 255).all()
    for lane in range(4):
        lanes.end(lane)
        assert found[lane] == [row[1] for row in lanes.rows[lane]]
    assert not (tmp_path / "b" / "tail").exists()


WRITE = """
import sys
sys.path[:] = {path!r}
import test_lanes, zbuffer
buffer, _ = test_lanes.filled(sys.argv[1], 0, segment_rows=4, chunk_rows=16)
lanes = test_lanes.Lanes(4)
t = 0
while True:
    rows = []
    for lane in range(4):
        done = "terminated" if t % (5 + lane) == 4 + lane else "no"
        rows.append(lanes.step(lane, done, chained=True))
    buffer.append(**test_lanes.stacked(rows))
    print(t, flush=True)
    t += 1
    if t % 37 == 0:
        buffer.flush()
"""


def kill_writer(script: str, path: Path, after: int) -> int:
    """Kill a writer after so many appends; returns how many had returned."""
    child = subprocess.Popen(
        [sys.executable, "-c", script.format(path=sys.path), str(path)],
        stdout=subprocess.PIPE,
        text=True,
    )
    assert child.stdout is not None
    while int(child.stdout.readline()) < after:
        pass
    child.send_signal(signal.SIGKILL)
    returned = after + 1 + len(child.stdout.read().splitlines())
    child.stdout.close()
    child.wait()
    return returned


@pytest.mark.parametrize("after", [1, 3, 17, 64, 150])
def test_rows_of_a_killed_writer_come_back_lane_by_lane(tmp_path: Path, after: int) -> None:
    path = tmp_path / "b"
    returned = kill_writer(WRITE, path, after)
    lanes = Lanes(4)
    for t in range(returned + 3):
        for lane in range(4):
            done = "terminated" if t % (5 + lane) == 4 + lane else "no"
            lanes.step(lane, done, chained=True)

    for mode in ("r", "a", "r"):
        with zbuffer.open(path, mode=mode) as buffer:  # type: ignore[arg-type]  # r or a
            found = lanes_of(buffer)
            for lane in range(4):
                n = len(found[lane])
                steps = [row for row in found[lane] if row[0] != "last"]
                assert returned <= len(steps) <= returned + 1
                wanted = lanes.rows[lane][:n]
                # What was pending has become a LAST row.
                assert [r[:2] for r in found[lane][:-1]] == [r[:2] for r in wanted[:-1]]
                assert found[lane][-1][1] == wanted[-1][1]
                if mode == "a":
                    assert found[lane][-1][0] == "last"


WRITE_WITH_A_SLOW_LANE = """
import sys
sys.path[:] = {path!r}
import test_lanes, zbuffer
lanes = test_lanes.Lanes(3)
buffer = zbuffer.create(
    sys.argv[1], test_lanes.SCHEMA, lanes=3, segment_rows=2, chunk_rows=4
)
for t in range(100_000):
    chosen = [0, 1, 2] if t % 50 == 0 else [0, 1]
    rows = [lanes.step(lane, "no", chained=True) for lane in chosen]
    buffer.append(**test_lanes.stacked(rows), lanes=chosen)
    print(t, flush=True)
"""


@pytest.mark.parametrize("after", [3, 20, 49, 51, 77, 120, 260])
def test_a_kill_loses_nothing_of_a_lane_that_was_moved(tmp_path: Path, after: int) -> None:
    path = tmp_path / "b"
    returned = kill_writer(WRITE_WITH_A_SLOW_LANE, path, after)

    with zbuffer.open(path, mode="a") as buffer:
        found = lanes_of(buffer)

    for lane, steps in enumerate((returned, returned, -(-returned // 50))):
        rows = found[lane]
        # What was pending is there, once, as the last row; a step may be under way.
        assert rows[-1][0] == "last"
        assert [row[1] for row in rows] == list(range(1, len(rows) + 1))
        assert steps + 1 <= len(rows) <= steps + 2
