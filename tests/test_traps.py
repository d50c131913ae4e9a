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
    """Return the bits of an observation as a tuple, those of several as a tuple of tuples."""
    values = np.ascontiguousarray(obs).view(np.uint32).tolist()
    return tuple(values) if obs.ndim == 1 else tuple(map(tuple, values))


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
            assert batch["mask"][b, t] == (step is not None)
            if step is None:
                assert bits(batch["obs"][b, t]) == bits(batch["next_obs"][b, t]) == NOTHING
                assert batch["reward"][b, t] == 0
                for name in ("next_mask", "is_first", "is_last", "is_terminal"):
                    assert not batch[name][b, t]
                continue
            after = NOTHING if step.after is None else bits_of(step.lane, step.after)
            assert batch["next_mask"][b, t] == (step.after is not None)
            assert bits(batch["obs"][b, t]) == bits_of(*step.key)
            assert bits(batch["next_obs"][b, t]) == after
            assert batch["reward"][b, t] == step.reward
            assert batch["is_first"][b, t] == step.is_first
            assert batch["is_last"][b, t] == step.ended
            assert batch["is_terminal"][b, t] == step.terminated
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
    """Close the buffer, and open it for reading, by the path that needs no extension."""
    recorder.buffer.close()
    for lane in range(recorder.n_lanes):
        if recorder.running[lane]:
            recorder.lines[lane][-1].ended = True
            if recorder.lines[lane][-1].after is not None:
                recorder.rows[lane].append((recorder.number[lane], False))
    return zbuffer.open(recorder.buffer.path, gather="ctypes")


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


@pytest.mark.parametrize("n_rows", [15, 16, 17, 23, 24, 25])
def test_trap_03_writing_around_the_capacity_is_exact(create: Create, n_rows: int) -> None:
    recorder = create(capacity=16)
    buffer, n_lanes = recorder.buffer, recorder.n_lanes
    for row in range(n_rows):
        # One row at a time, of one lane after the other.
        recorder.append({row % n_lanes: "no"}, next_obs=False)
        if row == 13 and n_lanes == 1:
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


@pytest.mark.parametrize("n_rows", [16, 17, 40])
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


def test_trap_04_stacks_and_sums_stay_in_their_episode(create: Create) -> None:
    recorder = create()
    record_all_kinds(recorder)
    kinds = [(1, 1), (2, 1), (5, 1), (2, 4), (5, 4)]

    wanted = [recorder.windows(stack, n_step) for stack, n_step in kinds]
    live = [every_window(recorder.buffer, stack, n_step) for stack, n_step in kinds]
    with reopened(recorder) as closed:
        read = [every_window(closed, stack, n_step) for stack, n_step in kinds]

    assert live == wanted
    assert read == [recorder.windows(stack, n_step) for stack, n_step in kinds]
    short = [s for s in recorder.steps if s.is_first and s.ended and s.key in wanted[2]]
    assert short
    for step in short:
        assert wanted[2][step.key]["obs"] == (bits_of(*step.key),) * 5


def test_trap_04_a_sequence_ends_where_its_boundary_says(create: Create) -> None:
    recorder = create()
    record_all_kinds(recorder)

    for boundary, length in itertools.product((None, "stop", "pad", "cross"), (1, 3, 6)):
        # Where none is named, a sequence lies in one episode.
        name = boundary or "stop"
        options: dict[str, Any] = {} if boundary is None else {"boundary": boundary}
        with recorder.buffer.sequences(
            32, length, fields=FIELDS, order="epoch", prefetch=0, **options
        ) as loader:
            keys = [k for batch in loader for k in check_sequences(batch, recorder, length, name)]
        wanted = [s.key for s in recorder.steps if recorder.sequence(s.key, length, name)]
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


def counted(source: zbuffer.Buffer, order: str) -> Counter[tuple[int, int]]:
    """Return how often each step is drawn, of twelve thousand times."""
    counts: Counter[tuple[int, int]] = Counter()
    for seed in range(3):
        obs = source.sample(4000, fields=["obs"], order=order, seed=seed)["obs"]
        counts.update((lane, number) for lane, number, _ in bits(obs))
    return counts


@pytest.mark.parametrize("next_obs", [True, False])
@pytest.mark.parametrize("where", ["tail", "closed"])
def test_trap_05_every_valid_step_has_its_exact_probability(
    create: Create, next_obs: bool, where: str
) -> None:
    recorder = create()
    record_all_kinds(recorder, 32)
    for _ in range(3):
        recorder.append(next_obs=next_obs)

    with reopened(recorder) if where == "closed" else recorder.buffer as source:
        counts = counted(source, "uniform")

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

    counts = counted(recorder.buffer, order)

    wanted = recorder.windows()
    assert set(counts) == set(wanted)
    degrees = len(wanted) - 1
    # Groups of rows come together: their counts are less even than those of single rows.
    spread = 8 if order == "blocks" else 1
    assert chi_squared(list(counts.values())) < spread * (degrees + 5 * (2 * degrees) ** 0.5)


def test_trap_06_n_step_sums_are_those_of_a_plain_loop(create: Create) -> None:
    recorder = create()
    record_all_kinds(recorder)

    for n_step, gamma in [(1, 0.5), (2, 0.5), (3, 0.5), (5, 1.0), (12, 0.5), (3, 0.0)]:
        found = every_window(recorder.buffer, 1, n_step, gamma)

        assert found == recorder.windows(1, n_step, gamma), (n_step, gamma)


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
            assert sample["reward"] == float32_bits(float(total))
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

    with (
        recorder.buffer.sequences(4, 8, order=order, prefetch=prefetch) as loader,
        pytest.raises(zbuffer.SampleError) as caught,
    ):
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

    with (
        recorder.buffer.sequences(4, 40, prefetch=0) as loader,
        pytest.raises(zbuffer.SampleError) as caught,
    ):
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

    asked: int

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
        path: Array = self._count(super().path(ids, behind, ahead))
        return path


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
    samplers: dict[str, Callable[[], Any]] = {
        "uniform": UniformSampler,
        "blocks": BlockSampler,
        "prioritized": lambda: PrioritizedSampler(PriorityTable()),
    }
    sampler = samplers[order]()
    sampler.draw(32, rows, generator(6, 0))
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
    ids = sampler.draw(32, rows, rng).ids
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

    assert 32 < few < 9_600
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


@pytest.mark.parametrize("n_lanes", [1, 48])
def test_trap_08_a_batch_allocates_as_much_whatever_the_number_of_rows(
    tmp_path: Path, n_lanes: int
) -> None:
    peaks: dict[str, list[int]] = {"uniform": [], "blocks": [], "prioritized": []}
    schema = {**SCHEMA, "obs": ((), "float32")}
    for n in (4_800, 240_000):
        path = tmp_path / f"b{n}"
        lanes: dict[str, Any] = {"lanes": n_lanes, "segment_rows": 256} if n_lanes > 1 else {}
        with zbuffer.create(path, schema, chunk_rows=1 << 15, **lanes) as buffer:
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

    # One byte for each row would be 240,000.
    for order, (few, many) in peaks.items():
        assert many < few + 20_000, order


# -- lanes ---------------------------------------------------------------------------------


def test_trap_09_environments_that_step_in_turn_keep_their_own_time(create: Create) -> None:
    recorder = create()
    n_lanes = recorder.n_lanes
    plan = [[0, 1, 2], [2, 0], [0], [0, 2], [1], [1, 0], [2], [2, 1, 0]]
    for t in range(64):
        chosen = [lane for lane in plan[t % 8] if lane < n_lanes]
        ends = {lane: len(recorder.lines[lane]) % (4 + lane) == 3 + lane for lane in chosen}
        if chosen:
            recorder.append({k: "truncated" if end else "no" for k, end in ends.items()})

    buffer = recorder.buffer
    live = every_window(buffer, 3, 2)
    with buffer.sequences(16, 5, boundary="cross", order="epoch", fields=FIELDS) as loader:
        keys = [key for batch in loader for key in check_sequences(batch, recorder, 5, "cross")]
    rows = live_keys(buffer)
    episodes = [(e.lane, e.length) for e in buffer.episodes]
    with reopened(recorder) as closed:
        read = every_window(closed, 3, 2)
        closed_rows = live_keys(closed)

    assert live == read == recorder.windows(3, 2)
    assert sorted(keys) == sorted(
        step.key for step in recorder.steps if recorder.sequence(step.key, 5, "cross") is not None
    )
    counts = Counter((step.lane, step.episode) for step in recorder.steps)
    assert episodes == [(lane, counts[lane, episode]) for lane, episode in sorted(counts)]
    # Within a lane ids are in the order of time.
    for lane in range(n_lanes):
        wanted = [(lane, number) for number, _ in recorder.rows[lane]]
        assert [key for key in closed_rows if key[0] == lane] == wanted
        assert [key for key in rows if key[0] == lane] == wanted[
            : -1 if recorder.running[lane] else None
        ]


def test_trap_09_one_lane_refuses_environments_that_step_in_turn(tmp_path: Path) -> None:
    with zbuffer.create(tmp_path / "b", SCHEMA, chunk_rows=CHUNK_ROWS) as buffer:
        flags = {"reward": 0.0, "terminated": False, "truncated": False}
        here, after = observation(0, 1), observation(0, 2)
        other = observation(1, 1)
        buffer.append(obs=here, next_obs=after, action=0, **flags)
        with pytest.raises(zbuffer.EpisodeError, match="'obs'"):
            buffer.append(obs=other, next_obs=observation(1, 2), action=1, **flags)

        assert len(buffer) == 1
        assert bits(buffer.sample(3)["next_obs"]) == (bits_of(0, 2),) * 3


def test_trap_09_eviction_leaves_each_lane_its_newest_rows(create: Create) -> None:
    recorder = create(capacity=24)
    for t in range(90):
        some = recorder.n_lanes > 1 and t % 3
        how = "terminated" if t % 7 == 6 else "no"
        recorder.append({0: how, 2: how} if some else how)
    recorder.buffer.flush()

    keys = live_keys(recorder.buffer)
    found = every_window(recorder.buffer, 1, 2)

    for lane, rows in enumerate(recorder.rows):
        numbers = [number for at, number in keys if at == lane]
        assert numbers == [number for number, _ in rows][len(rows) - len(numbers) :]
    wanted = recorder.windows(1, 2)
    assert found == {key: sample for key, sample in wanted.items() if key in set(keys)}


# -- batches -------------------------------------------------------------------------------


def frozen(batch: Any) -> dict[str, bytes]:
    return {name: np.asarray(value).tobytes() for name, value in batch.items()}


@pytest.mark.parametrize("n_lanes", [1, 3])
@pytest.mark.parametrize(
    ("kind", "prefetch", "device"),
    [("loader", 0, None), ("loader", 3, "cpu"), ("sequences", 3, None), ("sequences", 0, "cpu")],
)
def test_trap_10_a_batch_stays_as_it_was_while_others_are_made(
    tmp_path: Path, n_lanes: int, kind: str, prefetch: int, device: Any
) -> None:
    if device is not None:
        pytest.importorskip("torch")
    # Batches of a mebibyte and more, whose memory is used again once they are dropped.
    schema = {**SCHEMA, "obs": ((2, 1024), "int32")}
    lanes: dict[str, Any] = {"lanes": n_lanes, "segment_rows": SEGMENT_ROWS} if n_lanes > 1 else {}
    options: dict[str, Any] = {"device": device, "prefetch": prefetch, "seed": 3}
    with zbuffer.create(tmp_path / "b", schema, chunk_rows=CHUNK_ROWS, **lanes) as buffer:
        shape = (40, n_lanes) if n_lanes > 1 else (40,)
        numbers = np.arange(40 * n_lanes).reshape(shape)
        buffer.extend(
            obs=np.broadcast_to(numbers[..., None, None], (*shape, 2, 1024)).astype(np.int32),
            action=numbers,
            reward=numbers.astype(np.float32),
            terminated=numbers % 7 == 6,
            truncated=np.zeros(shape, bool),
        )
        if kind == "loader":
            made = buffer.loader(128, frame_stack=2, **options)
        else:
            made = buffer.sequences(64, 3, boundary="pad", **options)
        with made as loader:
            held = [(batch, frozen(batch)) for batch in itertools.islice(loader, 5)]
            # Of some batches only a part of one array is held on to.
            parts = []
            for batch in itertools.islice(loader, 5):
                part = batch["obs"][5:9]
                parts.append((part, np.asarray(part).tobytes()))
                del batch, part
            for _ in range(8):
                next(loader)
                buffer.sample(128, frame_stack=2)

        assert all(len(before["obs"]) >= 1 << 20 for _, before in held)
        assert all(frozen(batch) == before for batch, before in held)
        assert all(np.asarray(part).tobytes() == before for part, before in parts)
        assert len({before["indices"] for _, before in held}) == 5


def test_trap_10_sampled_batches_do_not_share_memory(create: Create, opened: list[Any]) -> None:
    first, second = create(), create()
    record_all_kinds(first)
    record_all_kinds(second, 30)
    group = zbuffer.open_many([first.buffer, second.buffer])
    opened.append(group)
    draws: list[Callable[[int], Any]] = [
        lambda seed: first.buffer.sample(16, seed=seed),
        lambda seed: first.buffer.sample(16, seed=seed, frame_stack=3, n_step=2),
        lambda seed: first.buffer.sample(16, seed=seed, order="prioritized"),
        lambda seed: first.buffer.sample_episodes(16, seed=seed, fields=FIELDS),
        lambda seed: group.sample(16, seed=seed, frame_stack=2),
    ]

    held = []
    for seed in range(8):
        for draw in draws:
            batch = draw(seed)
            held.append((batch, frozen(batch)))

    assert all(frozen(batch) == before for batch, before in held)
    for (a, _), (b, _) in itertools.combinations(held[:15], 2):
        for x, y in itertools.product(a.values(), b.values()):
            assert not np.may_share_memory(x, y)


def test_trap_10_appending_and_writing_into_a_batch_change_nothing(create: Create) -> None:
    recorder = create(capacity=64)
    record_all_kinds(recorder, 20)
    buffer = recorder.buffer
    batch = buffer.sample(32, seed=1)
    before = frozen(batch)
    record = buffer.take(batch["indices"])
    for _ in range(60):
        recorder.append()
    buffer.flush()
    assert frozen(batch) == before

    kept = buffer.sample(32, seed=2)
    wanted = frozen(kept)
    for value in kept.values():
        value[...] = 1
    assert frozen(buffer.sample(32, seed=2)) == wanted
    assert {"obs", "action"} <= set(record)


# -- priorities ----------------------------------------------------------------------------


def all_valid(recorder: Recorder, n: int) -> list[int]:
    """Record steps that are all samples, without other rows; returns their ids, ascending."""
    for t in range(n):
        some = recorder.n_lanes > 1 and t % 3 == 1
        recorder.append(
            dict.fromkeys([0, 2], "terminated") if some else "terminated", next_obs=False
        )
    return ids_of(recorder.buffer)


def ids_of(buffer: zbuffer.Buffer) -> list[int]:
    """Return the ids of all steps that are samples, ascending."""
    with buffer.loader(64, order="epoch", prefetch=0, fields=["action"]) as loader:
        return sorted(i for batch in loader for i in batch["indices"].tolist())


class Edges(np.random.Generator):
    """A generator whose floats are given, over and over."""

    def __init__(self, values: Sequence[float]) -> None:
        super().__init__(np.random.PCG64(0))
        self._values = np.array(values)

    def random(self, size: Any = None, *_: Any, **__: Any) -> Any:
        return np.resize(self._values, size)


def prioritized(buffer: Any, n: int, seed: Any, *, alpha: float = 1.0, beta: float = 1.0) -> Any:
    return buffer.sample(
        n, order="prioritized", alpha=alpha, beta=beta, seed=seed, fields=["action"]
    )


def test_trap_11_sums_do_not_drift_over_many_updates(create: Create) -> None:
    worn, fresh = create(), create()
    ids = all_valid(worn, 60)
    assert all_valid(fresh, 60) == ids
    prioritized(worn.buffer, 1, 0)
    rng = np.random.default_rng(5)
    for _ in range(400):
        some = rng.choice(ids, 40)
        worn.buffer.update_priorities(some, 10.0 ** rng.uniform(-12, 12, 40))
    last = [float(1 + i % 7) / 8 for i in range(len(ids))]
    worn.buffer.update_priorities(ids, last)
    fresh.buffer.update_priorities(ids, last)

    a = [prioritized(worn.buffer, 500, seed) for seed in range(4)]
    b = [prioritized(fresh.buffer, 500, seed) for seed in range(4)]

    of = dict(zip(ids, last, strict=True))
    for worn_batch, fresh_batch in zip(a, b, strict=True):
        assert frozen(worn_batch) == frozen(fresh_batch)
        assert worn_batch["weights"].dtype == np.float64
        # The largest weight is that of the least priority: no rounding is left behind.
        wanted = [min(last) / of[i] for i in worn_batch["indices"].tolist()]
        assert worn_batch["weights"].tolist() == wanted
    drawn = np.concatenate([batch["indices"] for batch in a])
    assert set(drawn.tolist()) <= set(ids)


def test_trap_11_the_sum_is_exact_after_what_float32_could_not_hold(create: Create) -> None:
    recorder = create()
    ids = all_valid(recorder, 40)
    # Beside a priority of 2**30 one of 1 is lost in a float32 sum.
    recorder.buffer.update_priorities(ids, [2.0**30] * len(ids))
    recorder.buffer.update_priorities(ids[::2], [1.0] * len(ids[::2]))
    priorities = [1 if i % 2 == 0 else 2**30 for i in range(len(ids))]
    sums = list(itertools.accumulate(priorities))
    # Near both ends of each row's share, and what its borders come to.
    places = [
        value / sums[-1]
        for end, size in zip(sums, priorities, strict=True)
        for value in (end - size, end - size + 0.25, end - 0.25)
    ]

    batch = prioritized(recorder.buffer, len(places), Edges(places))

    wanted = [ids[bisect.bisect_right(sums, place * sums[-1])] for place in places]
    assert batch["indices"].tolist() == wanted
    assert set(wanted) == set(ids)


def test_trap_11_eviction_leaves_nothing_behind(create: Create) -> None:
    recorder = create(capacity=40)
    buffer = recorder.buffer
    rng = np.random.default_rng(2)
    for _ in range(12):
        all_valid(recorder, 12)
        live = ids_of(buffer)
        buffer.update_priorities(live, 10.0 ** rng.uniform(-9, 9, len(live)))
    buffer.flush()
    ids = ids_of(buffer)
    assert ids[0] >= 40
    buffer.update_priorities(ids, [0.25] * len(ids))

    # Each row once: the middle of its share of the whole sum.
    n = len(ids)
    batch = prioritized(buffer, n, Edges([(i + 0.5) / n for i in range(n)]))

    assert sorted(batch["indices"].tolist()) == ids
    assert batch["weights"].tolist() == [1.0] * n


BAD = [float("nan"), float("inf"), -float("inf"), 0.0, -0.0, -1.0, -5e-324]


@pytest.mark.parametrize("bad", BAD)
def test_trap_12_what_is_no_priority_is_refused_by_id_and_nothing_changes(
    create: Create, bad: float
) -> None:
    recorder = create()
    buffer = recorder.buffer
    ids = all_valid(recorder, 12)
    buffer.update_priorities(ids, [1.0 + i for i in range(len(ids))])
    before = [frozen(prioritized(buffer, 64, seed)) for seed in range(3)]

    for at in (0, 5, len(ids) - 1):
        values = [100.0] * len(ids)
        values[at] = bad
        for given in (values, np.array(values, np.float32)):
            with pytest.raises(zbuffer.SampleError, match=rf"row {ids[at]} must be"):
                buffer.update_priorities(ids, given)

    assert [frozen(prioritized(buffer, 64, seed)) for seed in range(3)] == before
    path = buffer.path
    buffer.close()
    with zbuffer.open(path) as again:
        assert [frozen(prioritized(again, 64, seed)) for seed in range(3)] == before


def test_trap_12_a_priority_that_one_exponent_cannot_hold_changes_no_other(
    create: Create,
) -> None:
    recorder = create()
    buffer = recorder.buffer
    ids = all_valid(recorder, 12)
    exponents = (0.6, 1.0, 0.0)
    before = [frozen(prioritized(buffer, 64, 1, alpha=alpha)) for alpha in exponents]

    # Its power is held where alpha is 0.6, and not where it is 1.
    with pytest.raises(zbuffer.SampleError, match=rf"row {ids[3]} must be"):
        buffer.update_priorities([ids[2], ids[3]], [5.0, 1e200])

    assert [frozen(prioritized(buffer, 64, 1, alpha=alpha)) for alpha in exponents] == before


def test_trap_12_of_many_buffers_none_is_changed(create: Create, opened: list[Any]) -> None:
    first, second = create(), create()
    ids = all_valid(first, 12), all_valid(second, 9)
    group = zbuffer.open_many([first.buffer, second.buffer])
    opened.append(group)
    before = [frozen(prioritized(r.buffer, 64, 1)) for r in (first, second)]
    rows = [*ids[0], *ids[1]]
    source = [0] * len(ids[0]) + [1] * len(ids[1])
    values = [7.0 + i for i in range(len(rows) - 1)]

    with pytest.raises(zbuffer.SampleError, match=rf"row {rows[-1]} must be"):
        group.update_priorities(rows, [*values, float("nan")], source=source)

    assert [frozen(prioritized(r.buffer, 64, 1)) for r in (first, second)] == before


@pytest.mark.parametrize("n", [1, 2, 9, 40])
def test_trap_13_the_edges_of_a_draw_are_exact(create: Create, n: int) -> None:
    recorder = create()
    ids = all_valid(recorder, n)
    priorities = [1 + i * i % 13 for i in range(len(ids))]
    recorder.buffer.update_priorities(ids, priorities)
    sums = list(itertools.accumulate(priorities))
    total = sums[-1]
    # The ends, each border, and the floats beside it.
    places = [0.0, 5e-324, 1.0 - 2.0**-53]
    for border in sums[:-1]:
        u = border / total
        places += [np.nextafter(u, 0.0).item(), u, np.nextafter(u, 1.0).item()]

    batch = prioritized(recorder.buffer, len(places), Edges(places))

    wanted = [ids[min(bisect.bisect_right(sums, u * total), len(ids) - 1)] for u in places]
    assert batch["indices"].tolist() == wanted
    assert wanted[0] == ids[0]
    assert wanted[2] == ids[-1]
    assert set(wanted) == set(ids)


def test_trap_13_rows_without_a_sample_and_ids_without_a_row_are_never_drawn(
    create: Create,
) -> None:
    recorder = create(capacity=64)
    buffer = recorder.buffer
    record_all_kinds(recorder, 60)
    if recorder.n_lanes > 1:
        # Lane 1 stops early: what is left of its segment is no row.
        for _ in range(20):
            recorder.append({0: "no", 2: "no"})
    buffer.flush()
    valid = set(ids_of(buffer))

    ends = Edges([0.0, 1.0 - 2.0**-53, 0.5, 0.25, 0.75, *(i / 97 for i in range(97))])
    found = set(prioritized(buffer, 60, ends)["indices"].tolist())
    for seed in range(8):
        found |= set(prioritized(buffer, 500, seed)["indices"].tolist())

    assert found == valid


def test_trap_13_one_row_may_outweigh_all_others(create: Create) -> None:
    recorder = create()
    ids = all_valid(recorder, 20)
    for heavy in (ids[0], ids[-1], ids[len(ids) // 2]):
        values = [1e-12] * len(ids)
        values[ids.index(heavy)] = 1e12
        recorder.buffer.update_priorities(ids, values)
        batch = prioritized(recorder.buffer, 200, 1)
        assert set(batch["indices"].tolist()) == {heavy}
        assert batch["weights"].tolist() == [1e-12 / 1e12] * 200


@pytest.mark.parametrize(("mode", "saved_by"), [("r", "flush"), ("r", "close"), ("a", "close")])
def test_trap_14_priorities_are_the_same_after_reopening(
    create: Create, opened: list[Any], mode: Any, saved_by: str
) -> None:
    recorder = create()
    ids = all_valid(recorder, 30)
    rng = np.random.default_rng(1)
    values = rng.uniform(0.1, 3.0, len(ids))
    buffer = recorder.buffer
    buffer.update_priorities(ids, values)
    before = [frozen(prioritized(buffer, 200, seed, beta=0.7)) for seed in range(4)]
    buffer.flush() if saved_by == "flush" else buffer.close()

    again = zbuffer.open(buffer.path, mode=mode)
    opened.append(again)
    after = [frozen(prioritized(again, 200, seed, beta=0.7)) for seed in range(4)]

    assert after == before
    of = dict(zip(ids, values.tolist(), strict=True))
    batch = prioritized(again, 400, 9)
    assert batch["weights"].tolist() == [
        min(of.values()) / of[i] for i in batch["indices"].tolist()
    ]


def test_trap_14_rows_added_after_reopening_do_not_move_the_priorities_of_others(
    create: Create, opened: list[Any]
) -> None:
    recorder = create()
    ids = all_valid(recorder, 11)
    values = [0.5 + i / 64 for i in range(len(ids))]
    recorder.buffer.update_priorities(ids, values)
    recorder.buffer.update_priorities(ids[:1], [4.0])
    recorder.buffer.close()

    again = zbuffer.open(recorder.buffer.path, mode="a")
    opened.append(again)
    recorder.buffer = again
    everything = all_valid(recorder, 13)
    batch = prioritized(again, 3000, 2)

    # New rows have the largest priority there was.
    of = dict.fromkeys(everything, 4.0) | dict(zip(ids[1:], values[1:], strict=True))
    assert len(everything) > len(ids)
    assert batch["weights"].tolist() == [min(values[1:]) / of[i] for i in batch["indices"].tolist()]
    assert set(batch["indices"].tolist()) == set(everything)


@pytest.mark.parametrize("reopen", [False, True])
def test_trap_14_the_priority_of_an_evicted_row_lands_on_no_other(
    create: Create, opened: list[Any], reopen: bool
) -> None:
    recorder = create(capacity=16)
    old = all_valid(recorder, 5)
    assert recorder.buffer.update_priorities(old, [2.0] * len(old)) == 0
    if reopen:
        recorder.buffer.close()
        recorder.buffer = zbuffer.open(recorder.buffer.path, mode="a")
        opened.append(recorder.buffer)
    buffer = recorder.buffer
    # Where leaves are kept in a ring of 64, rows that took the places of old ones are there.
    all_valid(recorder, 40)
    ids = old
    while set(old) & set(ids) or not {i % 64 for i in old} & {i % 64 for i in ids}:
        all_valid(recorder, 1)
        buffer.flush()
        ids = ids_of(buffer)
    gone = [i for i in old if i not in ids]
    assert gone == old

    assert buffer.update_priorities(ids, [0.5] * len(ids)) == 0
    n_ignored = buffer.update_priorities(old, [1e9] * len(old))
    batch = prioritized(buffer, 1000, 3)

    assert n_ignored == len(old)
    assert batch["weights"].tolist() == [1.0] * 1000
    assert set(batch["indices"].tolist()) == set(ids)
    # Beside rows that are gone or not there yet, those that are there are set.
    some = [*old, ids[0], buffer.rows + 100]
    assert buffer.update_priorities(some, [1e9] * len(some)) == len(some) - 1
    assert set(prioritized(buffer, 100, 3)["indices"].tolist()) == {ids[0]}
    # A new row has the largest priority that a row ever had.
    newest = all_valid(recorder, 1)[-1]
    again = prioritized(buffer, 50, 4)
    assert newest in again["indices"].tolist()
    at = again["indices"].tolist().index(newest)
    assert again["weights"][at] == 0.5 / 1e9


def test_trap_14_priorities_that_a_reader_sets_are_its_own(create: Create) -> None:
    recorder = create()
    ids = all_valid(recorder, 11)
    recorder.buffer.update_priorities(ids, [1.0] * len(ids))
    recorder.buffer.flush()
    before = frozen(prioritized(recorder.buffer, 100, 1))

    with zbuffer.open(recorder.buffer.path) as reader:
        reader.update_priorities(ids[:1], [1000.0])
        found = prioritized(reader, 100, 1)["indices"].tolist()
        assert found.count(ids[0]) > 80

    assert frozen(prioritized(recorder.buffer, 100, 1)) == before
    with zbuffer.open(recorder.buffer.path) as reader:
        assert frozen(prioritized(reader, 100, 1)) == before
