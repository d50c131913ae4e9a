"""Ways in which buffers of this kind have gone wrong, each with the right value.

The numbers are those of the list of traps. What is right is computed here in plain
Python, from lists of what was recorded, and compared bit for bit.
"""

from __future__ import annotations

import bisect
import itertools
import struct
import tracemalloc
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import zbuffer
from zbuffer.format.segments import Segments
from zbuffer.sampling.blocks import BlockSampler
from zbuffer.sampling.prioritized import PrioritizedSampler, PriorityTable
from zbuffer.sampling.samplers import UniformSampler, generator
from zbuffer.sampling.sequences import Span, resolve_sequences
from zbuffer.sampling.windows import Lookups, Window, resolve

Array = np.ndarray[Any, Any]
SCHEMA = {
    "obs": ((3,), "float32"),
    "action": ((), "int64"),
    "reward": ((), "float32"),
    "terminated": ((), "bool"),
    "truncated": ((), "bool"),
}
CHUNK_ROWS = 8
SEGMENT_ROWS = 4
FIELDS = ["obs", "next_obs", "action", "reward", "terminated", "truncated"]
NOTHING = (0, 0, 0)


def bits_of(lane: int, number: int) -> tuple[int, int, int]:
    """Return an observation as bits: two subnormal floats, and a NaN with a payload."""
    return lane, number, 0x7FC00000 + 1000 * lane + number


def observation(lane: int, number: int) -> Array:
    return np.frombuffer(struct.pack("=3I", *bits_of(lane, number)), np.float32)


def bits(obs: Array) -> Any:
    """Return the bits of observations, as nested tuples."""
    return _tuples(np.ascontiguousarray(obs).view(np.uint32).tolist())


def _tuples(value: Any) -> Any:
    return tuple(map(_tuples, value)) if isinstance(value, list) else value


def float32_bits(value: float) -> bytes:
    return struct.pack("=f", value)


@dataclass
class Step:
    """A step that was recorded; `number` names its observation, within its lane.

    `after` is the number of the observation after it, None where none was recorded.
    """

    lane: int
    number: int
    episode: int
    is_first: bool
    reward: float
    terminated: bool
    truncated: bool
    ended: bool
    after: int | None = None

    @property
    def key(self) -> tuple[int, int]:
        return self.lane, self.number


class Recorder:
    """Records into a buffer, and into a plain list of steps for each lane.

    `how` is ``"no"``, ``"terminated"``, ``"truncated"`` or ``"both"``.
    """

    def __init__(self, buffer: zbuffer.Buffer) -> None:
        self.buffer = buffer
        self.n_lanes = buffer.lanes
        self.lines: list[list[Step]] = [[] for _ in range(self.n_lanes)]
        self.number = [0] * self.n_lanes
        self.episode = [0] * self.n_lanes
        self.running = [False] * self.n_lanes
        #: Rows of each lane, as (number, whether it is a step).
        self.rows: list[list[tuple[int, bool]]] = [[] for _ in range(self.n_lanes)]

    @property
    def steps(self) -> list[Step]:
        return [step for line in self.lines for step in line]

    def append(self, how: dict[int, str] | str = "no", *, next_obs: bool = True) -> None:
        """Add a step to each lane that is named."""
        if isinstance(how, str):
            how = dict.fromkeys(range(self.n_lanes), how)
        rows = [self._step(lane, end, next_obs) for lane, end in how.items()]
        dtypes = {"action": np.int64, "reward": np.float32, "terminated": bool, "truncated": bool}
        row: dict[str, Any] = {
            name: np.array([r[name] for r in rows], dtypes.get(name, np.float32))
            for name in rows[0]
        }
        if self.n_lanes == 1:
            row = {name: value[0] for name, value in row.items()}
        elif list(how) != list(range(self.n_lanes)):
            row["lanes"] = list(how)
        self.buffer.append(**row)

    def end(self, lanes: Sequence[int], *, final: bool) -> None:
        """End the episodes of lanes, with a final observation or without."""
        options: dict[str, Any] = {}
        if final:
            for lane in lanes:
                self.number[lane] += 1
                self.lines[lane][-1].after = self.number[lane]
                self.rows[lane].append((self.number[lane], False))
            options["obs"] = np.stack([observation(lane, self.number[lane]) for lane in lanes])
        for lane in lanes:
            self.lines[lane][-1].ended = True
            self.running[lane] = False
        if self.n_lanes == 1:
            options = {name: value[0] for name, value in options.items()}
        else:
            options["lanes"] = list(lanes)
        self.buffer.end_episode(**options)

    def _step(self, lane: int, how: str, next_obs: bool) -> dict[str, Any]:
        line, goes_on = self.lines[lane], self.running[lane]
        if not goes_on:
            self.episode[lane] += 1
        if goes_on and line[-1].after is not None:
            number = line[-1].after
        else:
            number = self.number[lane] = self.number[lane] + 1
            if goes_on:
                line[-1].after = number
        terminated, truncated = how in ("terminated", "both"), how in ("truncated", "both")
        ended = terminated or truncated
        reward = float(number * 7 % 11 - 5)
        step = Step(
            lane, number, self.episode[lane], not goes_on, reward, terminated, truncated, ended
        )
        line.append(step)
        self.rows[lane].append((number, True))
        self.running[lane] = not ended
        row: dict[str, Any] = {"obs": observation(lane, number), "action": number}
        row |= {"reward": reward, "terminated": terminated, "truncated": truncated}
        if next_obs:
            self.number[lane] += 1
            step.after = self.number[lane]
            row["next_obs"] = observation(lane, step.after)
            if ended:
                self.rows[lane].append((step.after, False))
        return row

    # -- what is right -----------------------------------------------------------

    def window(self, key: tuple[int, int], k: int, n: int, gamma: float) -> dict[str, Any] | None:
        """Return the sample of a step, of which nothing was evicted; None if it has none."""
        line = self.lines[key[0]]
        at = next(i for i, step in enumerate(line) if step.key == key)
        begin = at
        while not line[begin].is_first:
            begin -= 1
        taken: list[Step] = []
        for step in line[at : at + n]:
            if taken and (taken[-1].ended or step.episode != taken[-1].episode):
                break
            if step.after is None and not step.terminated:
                break
            taken.append(step)
        if not taken:
            return None
        last = taken[-1]
        frames = [bits_of(*step.key) for step in line[begin : at + len(taken)]]
        after = NOTHING if last.after is None else bits_of(last.lane, last.after)
        before = frames[: at - begin + 1]
        reward = sum(step.reward * gamma**j for j, step in enumerate(taken))
        return {
            "obs": _stack(before, k),
            "next_obs": _stack([*frames, after], k),
            "action": line[at].number,
            "reward": float32_bits(reward),
            "n_steps": len(taken),
            "discount": float32_bits(0.0 if last.terminated else gamma ** len(taken)),
            "mask": last.after is not None,
            "terminated": last.terminated,
            "truncated": last.truncated,
        }

    def windows(self, k: int = 1, n: int = 1, gamma: float = 0.5) -> dict[Any, dict[str, Any]]:
        """Return the samples of all steps that have one."""
        found = {step.key: self.window(step.key, k, n, gamma) for step in self.steps}
        return {key: sample for key, sample in found.items() if sample is not None}

    def sequence(self, key: tuple[int, int], n: int, boundary: str) -> list[Step | None] | None:
        """Return the steps of the sequence that begins at a step; None without one."""
        line = self.lines[key[0]]
        at = next(i for i, step in enumerate(line) if step.key == key)
        steps: list[Step | None] = list(line[at : at + n])
        if boundary != "cross":
            steps = [step for step in line[at : at + n] if step.episode == line[at].episode]
        if len(steps) < n and boundary != "pad":
            return None
        return [*steps, *[None] * (n - len(steps))]


def _stack(frames: list[Any], k: int) -> tuple[Any, ...]:
    return tuple([frames[0]] * (k - len(frames)) + frames[-k:])


def key_of(obs: Array) -> tuple[int, int]:
    """Return (lane, number) of one observation."""
    lane, number, _ = bits(obs)
    return lane, number


def every_window(source: Any, k: int = 1, n: int = 1, gamma: float = 0.5) -> dict[Any, Any]:
    """Return each sample that an epoch has, as :meth:`Recorder.windows` has them."""
    found: dict[Any, Any] = {}
    options = {"frame_stack": k, "n_step": n, "gamma": gamma, "prefetch": 0}
    with source.loader(16, order="epoch", pool_rows=32, **options) as loader:
        for batch in loader:
            for i in range(len(batch["indices"])):
                key = key_of(batch["obs"][i, -1])
                assert key not in found, "an epoch has a step twice"
                found[key] = sample_of(batch, i)
    return found


def sample_of(batch: Any, i: int) -> dict[str, Any]:
    """Return one sample of a batch with stacks, in plain values."""
    plain = {name: bits(batch[name][i]) for name in ("obs", "next_obs")}
    plain |= {name: float32_bits(batch[name][i]) for name in ("reward", "discount")}
    for name in ("action", "n_steps", "mask", "terminated", "truncated"):
        plain[name] = batch[name][i].item()
    return plain


def check_sequences(batch: Any, recorder: Recorder, n: int, boundary: str) -> list[Any]:
    """Compare each sequence of a batch with the lists; returns the keys of the first steps."""
    keys = []
    for b in range(len(batch["indices"])):
        key = key_of(batch["obs"][b, 0])
        keys.append(key)
        wanted = recorder.sequence(key, n, boundary)
        assert wanted is not None, f"no sequence begins at {key}"
        for t, step in enumerate(wanted):
            there = step is not None
            after = step.after if there else None
            assert batch["mask"][b, t] == there
            assert batch["next_mask"][b, t] == (after is not None)
            assert bits(batch["obs"][b, t]) == (bits_of(*step.key) if there else NOTHING)
            wanted_next = NOTHING if after is None else bits_of(key[0], after)
            assert bits(batch["next_obs"][b, t]) == wanted_next
            assert batch["reward"][b, t] == (step.reward if there else 0)
            assert batch["is_first"][b, t] == (there and step.is_first)
            assert batch["is_last"][b, t] == (there and step.ended)
            assert batch["is_terminal"][b, t] == (there and step.terminated)
    return keys


def live_keys(buffer: zbuffer.Buffer) -> list[tuple[int, int]]:
    """Return (lane, number) of all rows there are, final observations included."""
    return [key_of(obs) for obs in buffer["obs"][:]]


Create = Callable[..., Recorder]


@pytest.fixture
def opened() -> Iterator[list[Any]]:
    """What is closed when the test is over."""
    things: list[Any] = []
    yield things
    for thing in reversed(things):
        thing.close()


@pytest.fixture(params=[1, 3], ids=["one lane", "three lanes"])
def create(request: pytest.FixtureRequest, tmp_path: Path, opened: list[Any]) -> Create:
    names = itertools.count()

    def make(**options: Any) -> Recorder:
        options = {"chunk_rows": CHUNK_ROWS, **options}
        if request.param > 1:
            options = {"lanes": request.param, "segment_rows": SEGMENT_ROWS, **options}
        buffer = zbuffer.create(tmp_path / f"b{next(names)}", SCHEMA, **options)
        opened.append(buffer)
        return Recorder(buffer)

    return make


def record_all_kinds(recorder: Recorder, n_rounds: int = 40) -> None:
    """Record episodes of many lengths and ends, in both styles, so that all borders are met.

    With lanes they end at different times, and in some rounds only lanes 0 and 2 step.
    """
    ends = ["truncated", "terminated", "no", "both"]
    left = [1 + lane for lane in range(recorder.n_lanes)]
    played = [0] * recorder.n_lanes
    for t in range(n_rounds):
        transitions = t // 10 % 2 == 0
        how = {}
        for lane in range(recorder.n_lanes):
            if lane == 1 and t % 5 == 0:
                continue
            left[lane] -= 1
            how[lane] = ends[played[lane] % 4] if left[lane] == 0 else "no"
        recorder.append(how, next_obs=transitions)
        over = [lane for lane in how if left[lane] == 0]
        cut = [lane for lane in over if how[lane] == "no"]
        final = [lane for lane in over if played[lane] // 4 % 2 == 0]
        for lane in over:
            played[lane] += 1
            left[lane] = 1 + (played[lane] * 5 + lane) % 9
        if transitions and cut:
            recorder.end(cut, final=False)
        if not transitions and final:
            recorder.end(final, final=True)
        if not transitions and (rest := [lane for lane in cut if lane not in final]):
            recorder.end(rest, final=False)


def reopened(recorder: Recorder) -> zbuffer.Buffer:
    """Close the buffer, and open it for reading."""
    recorder.buffer.close()
    for lane in range(recorder.n_lanes):
        if recorder.running[lane]:
            recorder.lines[lane][-1].ended = True
            if recorder.lines[lane][-1].after is not None:
                recorder.rows[lane].append((recorder.number[lane], False))
    return zbuffer.open(recorder.buffer.path)


# -- which rows --------------------------------------------------------------------------


@pytest.mark.parametrize("style", ["next_obs", "end_episode"])
def test_trap_01_a_truncated_step_is_paired_with_its_own_final_observation(
    create: Create, style: str
) -> None:
    recorder = create()
    n_lanes = recorder.n_lanes
    # Episodes of 1 to 9 steps: their final observations lie at every place of a chunk.
    for length in [*range(1, 10), 8, 7, 8]:
        for t in range(length):
            how = "truncated" if t == length - 1 else "no"
            recorder.append(how, next_obs=style == "next_obs")
        if style == "end_episode":
            recorder.end(range(n_lanes), final=True)
        if n_lanes > 1:
            # One lane stays behind, so that the others meet other borders than it.
            recorder.append({0: "no", 2: "no"}, next_obs=style == "next_obs")
            recorder.append({0: "truncated", 2: "truncated"}, next_obs=style == "next_obs")
            if style == "end_episode":
                recorder.end([2, 0], final=True)

    live = every_window(recorder.buffer)
    recorder.buffer.flush()
    flushed = every_window(recorder.buffer)
    with reopened(recorder) as closed:
        read = every_window(closed)

    wanted = recorder.windows()
    truncated = [step for step in recorder.steps if step.truncated]
    assert len(truncated) == 12 * n_lanes + (24 if n_lanes > 1 else 0)
    assert len(wanted) == len(recorder.steps)
    for step in truncated:
        assert wanted[step.key]["next_obs"] == (bits_of(step.lane, step.number + 1),)
    assert live == flushed == read == wanted


@pytest.mark.parametrize("n_step", [1, 3])
def test_trap_01_a_truncated_step_without_a_final_observation_borrows_none(
    create: Create, n_step: int
) -> None:
    recorder = create()
    for length in range(1, 10):
        for t in range(length):
            recorder.append("truncated" if t == length - 1 else "no", next_obs=False)

    wanted = recorder.windows(1, n_step)
    found = every_window(recorder.buffer, 1, n_step)
    with recorder.buffer.sequences(300, 9, boundary="pad", fields=FIELDS, prefetch=0) as loader:
        batch = next(loader)

    # A step with no observation after it is no sample, unless it terminated.
    lost = {step.key for step in recorder.steps if step.truncated}
    assert set(found) == {step.key for step in recorder.steps} - lost
    assert found == wanted
    check_sequences(batch, recorder, 9, "pad")
    at_end = batch["is_last"]
    assert at_end.sum() == 300
    assert not batch["next_mask"][at_end].any()
    assert not batch["next_obs"][at_end].view(np.uint32).any()


def test_trap_01_a_terminated_step_without_a_final_observation_says_so(create: Create) -> None:
    recorder = create()
    for length in range(1, 10):
        for t in range(length):
            recorder.append("terminated" if t == length - 1 else "no", next_obs=False)

    found = every_window(recorder.buffer, 2)

    assert len(found) == len(recorder.steps)
    for step in recorder.steps:
        assert found[step.key]["mask"] == (not step.terminated)
        if step.terminated:
            assert found[step.key]["next_obs"] == (bits_of(*step.key), NOTHING)
            assert found[step.key]["discount"] == float32_bits(0.0)
    assert found == recorder.windows(2)


@pytest.mark.parametrize("next_obs", [True, False])
def test_trap_02_the_newest_row_never_meets_the_oldest(create: Create, next_obs: bool) -> None:
    recorder = create(capacity=16)
    buffer = recorder.buffer
    n_evicted = 0
    for t in range(56):
        some = recorder.n_lanes > 1 and t % 3
        recorder.append({0: "no", 2: "no"} if some else "no", next_obs=next_obs)
        if t % 5 != 4:
            continue
        buffer.flush()
        batch = buffer.sample(60, frame_stack=1, fields=["obs", "next_obs"], seed=t)
        live = set(live_keys(buffer))
        n_evicted = len(recorder.steps) - len(live)
        newest = {line[-1].key for line in recorder.lines}
        for i in range(60):
            lane, number = key_of(batch["obs"][i, 0])
            assert (lane, number) in live
            assert bits(batch["next_obs"][i]) == (bits_of(lane, number + 1),)
            if not next_obs:
                assert (lane, number) not in newest
        # Ids grow with time, also where rows were evicted.
        ids = {int(i): key_of(o[0]) for i, o in zip(batch["indices"], batch["obs"], strict=True)}
        for lane in range(recorder.n_lanes):
            numbers = [ids[i][1] for i in sorted(ids) if ids[i][0] == lane]
            assert numbers == sorted(numbers)
    assert n_evicted >= 32


def test_trap_02_the_newest_rows_stack_is_of_the_rows_before_it(create: Create) -> None:
    recorder = create(capacity=16)
    for _ in range(48):
        recorder.append()
    recorder.buffer.flush()

    found = every_window(recorder.buffer, 3, 2)

    live = set(live_keys(recorder.buffer))
    newest = {line[-1].key for line in recorder.lines}
    assert newest <= set(found) <= live
    for (lane, number), sample in found.items():
        assert sample["obs"] == tuple(bits_of(lane, number + i) for i in (-2, -1, 0))
        n_steps = 1 if (lane, number) in newest else 2
        ahead = tuple(bits_of(lane, number + n_steps + i) for i in (-2, -1, 0))
        assert (sample["n_steps"], sample["next_obs"]) == (n_steps, ahead)
        # A stack of which a row was evicted is none.
        assert (lane, number - 2) in live
    assert set(found) == {(lane, n) for lane, n in live if (lane, n - 2) in live}


@pytest.mark.parametrize("n_rows", [15, 16, 17, 23, 24, 25, 31, 32, 33])
@pytest.mark.parametrize("flush", [True, False])
def test_trap_03_writing_around_the_capacity_is_exact(
    create: Create, n_rows: int, flush: bool
) -> None:
    recorder = create(capacity=16)
    buffer, n_lanes = recorder.buffer, recorder.n_lanes
    for row in range(n_rows):
        # One row at a time, of one lane after the other.
        recorder.append({row % n_lanes: "no"}, next_obs=False)
        if flush and n_lanes == 1:
            buffer.flush()
    buffer.flush()

    # Whole chunks go, as long as what is left is the capacity or more.
    keys = live_keys(buffer)
    if n_lanes == 1:
        first = 0
        while n_rows - (first + CHUNK_ROWS) >= 16:
            first += CHUNK_ROWS
        assert (buffer.first_row, buffer.rows) == (first, n_rows)
        assert keys == [(0, number + 1) for number in range(first, n_rows)]
    assert len(buffer) == len(keys)
    assert min(n_rows, 16) <= len(keys) < 16 + CHUNK_ROWS
    if n_rows < 16 + CHUNK_ROWS // n_lanes:
        assert len(keys) == n_rows
    for lane in range(n_lanes):
        numbers = [number for at, number in keys if at == lane]
        last = recorder.number[lane]
        assert numbers == list(range(last - len(numbers) + 1, last + 1))


@pytest.mark.parametrize("n_rows", [15, 16, 17, 24, 25, 40])
def test_trap_03_an_episode_over_the_seam_is_one(create: Create, n_rows: int) -> None:
    recorder = create(capacity=16)
    buffer = recorder.buffer
    for _ in range(n_rows):
        recorder.append()
    buffer.flush()

    episodes = list(buffer.episodes)
    keys = live_keys(buffer)
    with buffer.sequences(200, 5, fields=FIELDS, prefetch=0, seed=1) as loader:
        batch = next(loader)

    assert [e.lane for e in episodes] == list(range(recorder.n_lanes))
    assert [e.ended for e in episodes] == ["running"] * recorder.n_lanes
    for episode in episodes:
        assert episode.length == sum(lane == episode.lane for lane, _ in keys)
    starts = set(check_sequences(batch, recorder, 5, "stop"))
    # It goes on over the seam: all but the last four steps of a lane begin a sequence.
    assert starts == {(lane, number) for lane, number in keys if number <= n_rows - 4}


@pytest.mark.parametrize("stack", [1, 2, 5])
@pytest.mark.parametrize("n_step", [1, 4])
def test_trap_04_stacks_and_sums_stay_in_their_episode(
    create: Create, stack: int, n_step: int
) -> None:
    recorder = create()
    record_all_kinds(recorder)

    wanted = recorder.windows(stack, n_step)
    live = every_window(recorder.buffer, stack, n_step)
    with reopened(recorder) as closed:
        read = every_window(closed, stack, n_step)

    assert live == wanted
    assert read == recorder.windows(stack, n_step)
    short = [s for s in recorder.steps if s.is_first and s.ended and s.key in wanted]
    assert short
    if stack > 1:
        for step in short:
            assert wanted[step.key]["obs"] == (bits_of(*step.key),) * stack


@pytest.mark.parametrize("boundary", [None, "stop", "pad", "cross"])
@pytest.mark.parametrize("length", [1, 3, 6])
def test_trap_04_a_sequence_ends_where_its_boundary_says(
    create: Create, boundary: Any, length: int
) -> None:
    recorder = create()
    record_all_kinds(recorder)
    options = {} if boundary is None else {"boundary": boundary}
    name = boundary or "stop"

    with recorder.buffer.sequences(
        16, length, fields=FIELDS, order="epoch", prefetch=0, **options
    ) as loader:
        keys = [key for batch in loader for key in check_sequences(batch, recorder, length, name)]

    wanted = [s.key for s in recorder.steps if recorder.sequence(s.key, length, name) is not None]
    assert sorted(keys) == sorted(wanted)


def test_trap_04_a_sequence_longer_than_some_episodes_mixes_none(create: Create) -> None:
    recorder = create()
    for length in (3, 9, 3, 12, 3):
        for t in range(length):
            recorder.append("terminated" if t == length - 1 else "no")

    found = {}
    for boundary in ("stop", "pad", "cross"):
        with recorder.buffer.sequences(
            400, 6, boundary=boundary, fields=FIELDS, prefetch=0
        ) as loader:
            found[boundary] = next(loader)
            check_sequences(found[boundary], recorder, 6, boundary)

    firsts = {name: batch["is_first"][:, 1:].any() for name, batch in found.items()}
    assert firsts == {"stop": False, "pad": False, "cross": True}
    masked = {name: bool(batch["mask"].all()) for name, batch in found.items()}
    assert masked == {"stop": True, "pad": False, "cross": True}
    assert len(set(map(tuple, found["stop"]["indices"].tolist()))) == (4 + 7) * recorder.n_lanes


def chi_squared(counts: Sequence[int]) -> float:
    expected = sum(counts) / len(counts)
    return sum((count - expected) ** 2 / expected for count in counts)


@pytest.mark.parametrize("next_obs", [True, False])
@pytest.mark.parametrize("where", ["tail", "flushed", "closed"])
def test_trap_05_every_valid_step_has_its_exact_probability(
    create: Create, next_obs: bool, where: str
) -> None:
    recorder = create()
    record_all_kinds(recorder, 32)
    for _ in range(3):
        recorder.append(next_obs=next_obs)
    source = recorder.buffer
    if where == "flushed":
        source.flush()
    if where == "closed":
        source = reopened(recorder)
    with source:
        draws = [source.sample(2000, frame_stack=1, seed=seed)["action"] for seed in range(6)]
        lanes = [source.sample(2000, frame_stack=1, seed=seed)["obs"] for seed in range(6)]

    counts = Counter(
        (int(lane), int(action))
        for actions, obs in zip(draws, lanes, strict=True)
        for action, lane in zip(actions, obs[:, 0].view(np.uint32)[:, 0], strict=True)
    )
    wanted = recorder.windows()
    newest = [line[-1].key for line in recorder.lines]
    assert all((key in wanted) == next_obs for key in newest)
    assert any(s.ended and s.key in wanted for s in recorder.steps)
    assert set(counts) == set(wanted)
    degrees = len(wanted) - 1
    assert chi_squared(list(counts.values())) < degrees + 5 * (2 * degrees) ** 0.5


@pytest.mark.parametrize("order", ["blocks", "prioritized"])
def test_trap_05_other_orders_draw_every_valid_step_too(create: Create, order: str) -> None:
    recorder = create()
    record_all_kinds(recorder, 32)

    counts: Counter[Any] = Counter()
    for seed in range(6):
        obs = recorder.buffer.sample(2000, frame_stack=1, order=order, seed=seed)["obs"]
        counts.update(map(tuple, obs[:, 0, :2].copy().view(np.uint32).tolist()))

    wanted = recorder.windows()
    assert set(counts) == set(wanted)
    degrees = len(wanted) - 1
    # Groups of rows come together: their counts are less even than those of single rows.
    spread = 8 if order == "blocks" else 1
    assert chi_squared(list(counts.values())) < spread * (degrees + 5 * (2 * degrees) ** 0.5)


@pytest.mark.parametrize("n_step", [1, 2, 3, 5, 12])
@pytest.mark.parametrize("gamma", [0.5, 1.0, 0.0])
def test_trap_06_n_step_sums_are_those_of_a_plain_loop(
    create: Create, n_step: int, gamma: float
) -> None:
    recorder = create()
    record_all_kinds(recorder)

    found = every_window(recorder.buffer, 1, n_step, gamma)

    assert found == recorder.windows(1, n_step, gamma)


def test_trap_06_a_truncation_bootstraps_and_a_terminal_does_not(create: Create) -> None:
    recorder = create()
    for how in ("terminated", "truncated", "both"):
        for t in range(4):
            recorder.append(how if t == 3 else "no")
    recorder.append()

    found = every_window(recorder.buffer, 1, 3, 0.99)

    for lane in range(recorder.n_lanes):
        rewards = [step.reward for step in recorder.lines[lane]]
        numbers = [step.number for step in recorder.lines[lane]]
        # The third step of an episode has two left: the third reward is of the next one.
        for start, discount in ((0, 0.0), (4, 0.99**2), (8, 0.0)):
            at = start + 2
            sample = found[lane, numbers[at]]
            assert sample["n_steps"] == 2
            assert sample["discount"] == float32_bits(discount)
            total = np.float32(rewards[at]) + np.float32(rewards[at + 1]) * np.float32(0.99)
            assert sample["reward"] == float32_bits(total)
            assert sample["next_obs"] == (bits_of(lane, numbers[at + 1] + 1),)


def short_episodes(recorder: Recorder, lengths: Sequence[int] = (5, 7, 2)) -> None:
    for length in lengths:
        for t in range(length):
            recorder.append("terminated" if t == length - 1 else "no")


@pytest.mark.parametrize("order", ["uniform", "blocks", "prioritized"])
@pytest.mark.parametrize("prefetch", [0, 2])
def test_trap_07_no_legal_start_is_an_error_that_names_both_lengths(
    create: Create, order: str, prefetch: int
) -> None:
    recorder = create()
    short_episodes(recorder)
    recorder.append()

    with recorder.buffer.sequences(4, 8, order=order, prefetch=prefetch) as loader:
        with pytest.raises(zbuffer.SampleError) as caught:
            next(loader)

    assert "begins a sequence of 8 steps" in str(caught.value)
    assert "the longest episode has 7" in str(caught.value)


def test_trap_07_the_longest_episode_is_that_of_the_rows_that_are_left(create: Create) -> None:
    recorder = create(capacity=16)
    for _ in range(60):
        recorder.append(next_obs=False)
    recorder.buffer.flush()
    keys = live_keys(recorder.buffer)
    longest = max(sum(at == lane for at, _ in keys) for lane in range(recorder.n_lanes))

    with recorder.buffer.sequences(4, 40, prefetch=0) as loader:
        with pytest.raises(zbuffer.SampleError) as caught:
            next(loader)
    with recorder.buffer.sequences(20, longest, prefetch=0) as loader:
        assert next(loader)["mask"].all()

    assert "begins a sequence of 40 steps" in str(caught.value)
    assert f"the longest episode has {longest}" in str(caught.value)


def test_trap_07_an_epoch_without_a_legal_start_does_not_loop(create: Create) -> None:
    recorder = create()
    short_episodes(recorder)

    with recorder.buffer.sequences(4, 8, order="epoch", prefetch=0) as loader:
        assert list(loader) == []


def test_trap_07_few_legal_starts_among_many_rows_are_all_drawn(create: Create) -> None:
    recorder = create()
    short_episodes(recorder, [2] * 40 + [7] + [2] * 40)

    with recorder.buffer.sequences(60, 6, prefetch=0, fields=FIELDS) as loader:
        keys = [key for _ in range(3) for key in check_sequences(next(loader), recorder, 6, "stop")]

    wanted = {s.key for s in recorder.steps if recorder.sequence(s.key, 6, "stop")}
    assert len(wanted) == 2 * recorder.n_lanes
    assert set(keys) == wanted


def test_trap_07_a_window_that_no_row_has_is_an_error_that_names_it(create: Create) -> None:
    recorder = create(capacity=16)
    for _ in range(60):
        recorder.append(next_obs=False)
    recorder.buffer.flush()

    with pytest.raises(zbuffer.SampleError, match=r"frame_stack=40, n_step=2"):
        recorder.buffer.sample(4, frame_stack=40, n_step=2)
    assert recorder.buffer.sample(4, frame_stack=2)["obs"].shape == (4, 2, 3)


class CountingRowSet(zbuffer.RowSet):
    """Rows that count how many ids they are asked for."""

    def __init__(self, rows: zbuffer.RowSet) -> None:
        super().__init__(rows.first, rows.stop, rows.chunk_rows, rows.block_rows, rows.segments)
        object.__setattr__(self, "asked", 0)

    def _count(self, value: Any) -> Any:
        object.__setattr__(self, "asked", self.asked + np.size(value))
        return value

    def ids(self, positions: Array) -> Array:
        return super().ids(self._count(positions))

    def count_below(self, ids: Array) -> Array:
        return super().count_below(self._count(ids))

    def contains(self, ids: Array) -> Array:
        return super().contains(self._count(ids))

    def lanes(self, ids: Array) -> Array:
        return super().lanes(self._count(ids))

    def path(self, ids: Array, behind: int, ahead: int) -> Array:
        return self._count(super().path(ids, behind, ahead))


def synthetic_rows(n: int, n_lanes: int) -> CountingRowSet:
    """Return `n` rows in one lane, or in segments of `n_lanes` in turn."""
    if n_lanes == 1:
        return CountingRowSet(zbuffer.RowSet(0, n, 64, 4))
    n_segments = n // 8
    lane = np.arange(n_segments) % n_lanes
    segments = Segments.of(8, 0, lane, np.full(n_segments, 8))
    return CountingRowSet(zbuffer.RowSet(0, n, 64, 4, segments))


def counted_batch(n_rows: int, n_lanes: int, order: str) -> int:
    """Return how many ids drawing a batch and planning its windows look at."""
    rows = synthetic_rows(n_rows, n_lanes)
    rng = generator(7, 0)
    sampler: Any = {
        "uniform": UniformSampler,
        "blocks": BlockSampler,
        "prioritized": lambda: PrioritizedSampler(PriorityTable()),
    }[order]()
    sampler.draw(64, rows, generator(6, 0))
    object.__setattr__(rows, "asked", 0)

    def step_type(ids: Array) -> Array:
        rows._count(ids)
        # An episode is a thousand steps: FIRST, MID, ..., and none beyond the newest.
        types = np.where(ids % 1000 == 0, 0, 1).astype(np.uint8)
        return np.where((ids < 0) | (ids >= n_rows), np.uint8(255), types)

    def flag(ids: Array) -> Array:
        rows._count(ids)
        return np.zeros(np.shape(ids), bool)

    def reward(ids: Array) -> Array:
        rows._count(ids)
        return np.ones(np.shape(ids), np.float32)

    def running(lanes: Array) -> Array:
        return np.ones(np.shape(lanes), bool)

    lookups = Lookups(step_type, running, reward, flag, flag)
    ids = sampler.draw(64, rows, rng).ids
    resolve(ids, Window(4, 3), rows, lookups)
    for boundary in ("stop", "pad", "cross"):
        resolve_sequences(ids, Span(10, boundary=boundary), rows, lookups)
    asked: int = rows.asked
    return asked


@pytest.mark.parametrize("n_lanes", [1, 3])
@pytest.mark.parametrize("order", ["uniform", "blocks", "prioritized"])
def test_trap_08_a_batch_looks_at_as_many_ids_whatever_the_number_of_rows(
    n_lanes: int, order: str
) -> None:
    few = counted_batch(9_600, n_lanes, order)
    many = counted_batch(960_000, n_lanes, order)

    assert 64 < few < 9_600
    assert many == few


def allocated_by_batches(buffer: zbuffer.Buffer, order: str) -> int:
    """Return the most bytes that were allocated at a time while batches were made."""
    arguments: dict[str, Any] = {"order": order, "frame_stack": 2, "n_step": 3}
    with buffer.sequences(32, 4, order=order, prefetch=0) as loader:
        for seed in range(3):
            buffer.sample(32, seed=seed, **arguments)
            next(loader)
        tracemalloc.start()
        try:
            for seed in range(3):
                buffer.sample(32, seed=seed, **arguments)
                next(loader)
            return tracemalloc.get_traced_memory()[1]
        finally:
            tracemalloc.stop()


@pytest.mark.parametrize("n_lanes", [1, 3])
def test_trap_08_a_batch_allocates_as_much_whatever_the_number_of_rows(
    tmp_path: Path, n_lanes: int
) -> None:
    peaks: dict[str, list[int]] = {"uniform": [], "blocks": [], "prioritized": []}
    schema = {**SCHEMA, "obs": ((), "float32")}
    for n in (3_000, 300_000 if n_lanes == 1 else 60_000):
        path = tmp_path / f"b{n}"
        with zbuffer.create(path, schema, chunk_rows=1 << 15, lanes=n_lanes) as buffer:
            t = np.arange(n // n_lanes)
            rows = {
                "obs": t.astype(np.float32),
                "action": t,
                "reward": np.ones(len(t), np.float32),
                "terminated": t % 50 == 49,
                "truncated": np.zeros(len(t), bool),
            }
            if n_lanes > 1:
                rows = {k: np.repeat(v[:, None], n_lanes, axis=1) for k, v in rows.items()}
            buffer.extend(**rows)
        with zbuffer.open(path) as buffer:
            for order, found in peaks.items():
                found.append(allocated_by_batches(buffer, order))

    # One byte for each row would be 300,000.
    for order, (few, many) in peaks.items():
        assert many < few + 50_000, order
