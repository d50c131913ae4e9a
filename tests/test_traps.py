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
    lanes = range(recorder.n_lanes)
    ends = ["truncated", "terminated", "no", "both"]
    left = [1 + lane for lane in lanes]
    played = [0] * len(lanes)
    for t in range(n_rounds):
        transitions = t // 10 % 2 == 0
        chosen = [lane for lane in lanes if lane != 1 or t % 5]
        how = {}
        closed = {True: [], False: []}
        for lane in chosen:
            left[lane] -= 1
            over = left[lane] == 0
            how[lane] = ends[played[lane] % 4] if over else "no"
            if over:
                played[lane] += 1
                left[lane] = 1 + (played[lane] * 5 + lane) % 9
                if how[lane] == "no" or not transitions:
                    closed[played[lane] % 2 == 0].append(lane)
        recorder.append(how, next_obs=transitions)
        for final, ended in closed.items():
            # A step that came with its next observation needs no other.
            if transitions and ended:
                end_with_pending(recorder, ended)
            elif ended:
                without = [lane for lane in ended if final or how[lane] == "no"]
                if without:
                    recorder.end(without, final=final)


def end_with_pending(recorder: Recorder, lanes: Sequence[int]) -> None:
    """End episodes whose last steps came with their next observations."""
    for lane in lanes:
        recorder.rows[lane].append((recorder.lines[lane][-1].after or 0, False))
    recorder.end(lanes, final=False)
