"""Batches of every order, in every state of a buffer, against rows in plain lists."""

from __future__ import annotations

import os
import random
import tempfile
from collections.abc import Iterator
from contextlib import ExitStack
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import zbuffer

Array = np.ndarray[Any, Any]
MANY = int(os.environ.get("ZBUFFER_EXAMPLES", "1"))
SCHEMA = {
    "obs": ((2,), "int32"),
    "action": ((), "int64"),
    "reward": ((), "float32"),
    "terminated": ((), "bool"),
    "truncated": ((), "bool"),
}
FIRST, MID, LAST = 0, 1, 2
#: Rewards that add up to something else in another order, or in another precision.
REWARDS = [0.1, 1 / 3, -2.7, 16777217.0, -1e6, 1e-38, 3e-45, -0.0, 0.0, 1.0]


# -- the oracle ------------------------------------------------------------------------


class Row(NamedTuple):
    """What one row holds; the number names its observation within the lane."""

    step_type: int
    number: int
    reward: np.float32
    terminated: bool
    truncated: bool


class Window(NamedTuple):
    """How a batch is asked for."""

    frame_stack: int | None
    n_step: int
    gamma: float


@dataclass
class Lane:
    """The rows of one environment, oldest first, evicted ones included.

    ``pending`` is the number of an observation that came as ``next_obs`` and is not the
    observation of a row yet; ``first`` is the place of the oldest row that is not evicted.
    """

    index: int
    rows: list[Row] = field(default_factory=list)
    pending: int | None = None
    running: bool = False
    count: int = 0
    first: int = 0

    def new_number(self) -> int:
        self.count += 1
        return self.count

    def obs(self, number: int) -> list[int]:
        return [self.index, number]

    def step(self, reward: np.float32, terminated: bool, truncated: bool, chained: bool) -> Any:
        """Note a step; returns the numbers of its observation and of the one after it."""
        here = self.new_number() if self.pending is None else self.pending
        step_type = MID if self.running else FIRST
        self.rows.append(Row(step_type, here, reward, terminated, truncated))
        self.running, self.pending = True, None
        if chained:
            self.pending = self.new_number()
        after = self.pending
        if terminated or truncated:
            self.end(None)
        return here, after

    def end(self, final: int | None) -> None:
        """Note the end of an episode, perhaps with the number of a final observation."""
        final = self.pending if final is None else final
        if final is not None:
            self.rows.append(Row(LAST, final, np.float32(0), False, False))
        self.running, self.pending = False, None

    def after(self, at: int) -> int | None:
        """Return the number of the observation after a step, None where it is not stored."""
        if at + 1 == len(self.rows):
            return self.pending
        return None if self.rows[at + 1].step_type == FIRST else self.rows[at + 1].number

    def stack(self, at: int, n: int) -> list[int | None]:
        """Return the numbers of the `n` observations up to a place; None for evicted ones.

        The place may be one past the newest row: that of the pending observation.
        """
        found: list[int | None] = []
        place = at
        for _ in range(n):
            if place < self.first:
                found.insert(0, None)
                continue
            pending = place == len(self.rows)
            found.insert(0, self.pending if pending else self.rows[place].number)
            if pending or self.rows[place].step_type != FIRST:
                place -= 1
        return found

    def sample(self, at: int, window: Window) -> dict[str, Any] | None:
        """Return what a batch must hold for a step, None where it may not be drawn."""
        if at < self.first or self.rows[at].step_type == LAST:
            return None
        k = window.frame_stack or 1
        stack = self.stack(at, k)
        if None in stack:
            return None
        reward, n_steps, place = np.float32(0), 0, at
        terminated = truncated = False
        while n_steps < window.n_step:
            row = self.rows[place]
            if self.after(place) is None and not row.terminated:
                break
            part = row.reward * np.float32(window.gamma**n_steps)
            # A single reward is as it was stored: -0.0 is left as it is.
            reward = part if window.n_step == 1 else reward + part
            n_steps, place = n_steps + 1, place + 1
            terminated, truncated = row.terminated, row.truncated
            over = terminated or truncated or place == len(self.rows)
            if over or self.rows[place].step_type == LAST:
                break
        if n_steps == 0:
            return None
        stored = self.after(place - 1) is not None
        # The place of what is not stored is filled with zeros.
        following = self.stack(place, k) if stored else [*self.stack(place - 1, k)[1:], None]
        return {
            "obs": [self.obs(number) for number in stack],
            "action": self.rows[at].number,
            "reward": reward,
            "terminated": terminated,
            "truncated": truncated,
            "next_obs": [[0, 0] if number is None else self.obs(number) for number in following],
            "n_steps": n_steps,
            "discount": np.float32(0.0 if terminated else window.gamma**n_steps),
            "mask": stored,
        }


@dataclass
class Oracle:
    """All lanes of a buffer."""

    lanes: list[Lane]
    ids: dict[tuple[int, int], int] = field(default_factory=dict)

    def set_first(self, live: list[tuple[int, int, int]]) -> None:
        """Take note of what is evicted: each lane must have lost its oldest rows alone."""
        for lane in self.lanes:
            found = [(kind, number) for index, number, kind in live if index == lane.index]
            lane.first = len(lane.rows) - len(found)
            wanted = [(row.step_type, row.number) for row in lane.rows[max(lane.first, 0) :]]
            assert found == wanted

    def samples(self, window: Window) -> dict[tuple[int, int], dict[str, Any]]:
        """Return the sample of each step that may be drawn, by lane and number."""
        found = {}
        for lane in self.lanes:
            for at, row in enumerate(lane.rows):
                sample = lane.sample(at, window)
                if sample is not None:
                    found[lane.index, row.number] = sample
        return found


# -- what is played ----------------------------------------------------------------------


class Episode(NamedTuple):
    """Steps to append: how they end, and how they are handed over.

    ``end`` "open" leaves the episode running; ``final`` says whether its final
    observation is given. In transition style each step but perhaps the last brings the
    observation after it. ``whole`` "extend" or "add" hands all steps over in one call.
    """

    n_steps: int
    end: str
    final: bool
    transitions: bool
    whole: str


ENDS_OF_EPISODES = st.sampled_from(["terminated", "truncated", "both", "cut"])
HOW = st.sampled_from(["no", "no", "extend", "add"])
EPISODES = st.builds(
    Episode,
    st.one_of(st.integers(1, 9), st.integers(1, 9), st.integers(1, 60), st.integers(1, 300)),
    ENDS_OF_EPISODES,
    st.booleans(),
    st.booleans(),
    HOW,
)
OPEN = st.builds(
    Episode, st.integers(1, 20), st.just("open"), st.booleans(), st.booleans(), st.just("no")
)
#: Many short ones alike: stacks that begin everywhere, or hardly a step that may be drawn.
SHORT = st.builds(Episode, st.integers(1, 3), ENDS_OF_EPISODES, st.booleans(), st.booleans(), HOW)
PLANS = st.one_of(
    st.builds(list.__add__, st.lists(EPISODES, max_size=4), st.lists(OPEN, max_size=1)),
    st.builds(lambda one, n, rest: [one] * n + rest, SHORT, st.integers(1, 80), st.lists(SHORT)),
)


@dataclass
class Player:
    """Appends episodes to a buffer, and notes in the oracle what it should then hold."""

    oracle: Oracle
    random: random.Random

    def rewards(self, n: int) -> list[np.float32]:
        several = [self.random.choice([*REWARDS, self.random.gauss(0, 1)]) for _ in range(n)]
        return [np.float32(reward) for reward in several]

    def play(self, buffer: zbuffer.Buffer, plans: list[list[Episode]], speeds: list[int]) -> None:
        """Let lanes step side by side, each at every so manieth tick."""
        acts = [self.acts(lane, plan) for lane, plan in zip(self.oracle.lanes, plans, strict=True)]
        left, tick = set(range(len(acts))), 0
        while left:
            due: dict[Any, list[tuple[int, Any]]] = {}
            for index in sorted(left):
                if tick % speeds[index]:
                    continue
                act = next(acts[index], None)
                if act is None:
                    left.remove(index)
                else:
                    due.setdefault(act[0], []).append((index, act[1]))
            for (kind, _), parts in due.items():
                self.hand_over(buffer, kind, parts)
            tick += 1

    def acts(self, lane: Lane, plan: list[Episode]) -> Iterator[tuple[Any, Any]]:
        """Yield, one by one, the calls that append a plan to a lane."""
        for episode in plan:
            if lane.running:
                # What was left open ends where it is.
                lane.end(None)
                yield ("end", False), {}
            if episode.whole == "no":
                yield from self.steps(lane, episode)
            else:
                yield from self.whole(lane, episode)

    def flags(self, episode: Episode, t: int) -> tuple[bool, bool]:
        last = t == episode.n_steps - 1
        terminated = last and episode.end in ("terminated", "both")
        return terminated, last and episode.end in ("truncated", "both")

    def steps(self, lane: Lane, episode: Episode) -> Iterator[tuple[Any, Any]]:
        for t, reward in enumerate(self.rewards(episode.n_steps)):
            flags = self.flags(episode, t)
            last = t == episode.n_steps - 1
            chained = episode.transitions and (not last or episode.final)
            here, after = lane.step(reward, *flags, chained)
            row = {"obs": lane.obs(here), "action": here, "reward": reward}
            row |= {"terminated": flags[0], "truncated": flags[1]}
            if chained:
                row["next_obs"] = lane.obs(after)
            yield ("append", chained), row
        if episode.end == "open":
            return
        if episode.final and not episode.transitions:
            final = lane.new_number()
            lane.end(final)
            yield ("end", True), {"obs": lane.obs(final)}
        elif episode.end == "cut":
            lane.end(None)
            yield ("end", False), {}

    def whole(self, lane: Lane, episode: Episode) -> Iterator[tuple[Any, Any]]:
        """Append all steps by one call."""
        rewards = self.rewards(episode.n_steps)
        add = episode.whole == "add"
        chained = episode.final and (add or episode.transitions)
        rows: dict[str, list[Any]] = {name: [] for name in SCHEMA}
        following = []
        for t, reward in enumerate(rewards):
            flags = self.flags(episode, t)
            here, after = lane.step(reward, *flags, chained)
            for name, value in zip(SCHEMA, (lane.obs(here), here, reward, *flags), strict=True):
                rows[name].append(value)
            following.append(after)
        if chained and add and episode.transitions:
            rows["obs"].append(lane.obs(following[-1]))
        elif chained:
            rows["next_obs"] = [lane.obs(number) for number in following]
        yield (episode.whole, lane.index), rows
        if add:
            if lane.running:
                lane.end(None)
        elif episode.final and not chained:
            final = lane.new_number()
            lane.end(final)
            yield ("end", True), {"obs": lane.obs(final)}
        elif episode.end == "cut":
            lane.end(None)
            yield ("end", False), {}

    def hand_over(self, buffer: zbuffer.Buffer, kind: str, parts: list[tuple[int, Any]]) -> None:
        dtypes = {name: dtype for name, (_, dtype) in SCHEMA.items()} | {"next_obs": "int32"}
        lanes = [index for index, _ in parts]
        names = parts[0][1].keys()
        rows = {n: np.array([row[n] for _, row in parts], dtypes[n]) for n in names}
        one = buffer.lanes == 1
        where: dict[str, Any] = {} if one else {"lanes": lanes}
        if kind == "append":
            buffer.append(**{n: v[0] if one else v for n, v in rows.items()}, **where)
        elif kind == "end":
            buffer.end_episode(**{n: v[0] if one else v for n, v in rows.items()}, **where)
        elif kind == "extend":
            wide = {n: v[0] if one else np.moveaxis(v, 0, 1) for n, v in rows.items()}
            n_steps = buffer.extend(**wide, **where)
            assert n_steps == len(parts[0][1]["action"])
        else:
            (lane,) = lanes
            wide = {n: v[0] for n, v in rows.items()}
            n_steps = buffer.add_episode(**wide, **({} if one else {"lane": lane}))
            assert n_steps == len(parts[0][1]["action"])


# -- samplers of one's own -----------------------------------------------------------------


class InTurn:
    """Draws every row in turn, the oldest first, again and again."""

    def __init__(self) -> None:
        self.at = 0

    def draw(self, n: int, rows: zbuffer.RowSet, rng: np.random.Generator) -> zbuffer.Draw:
        positions = (self.at + np.arange(n)) % len(rows)
        self.at += n
        return zbuffer.Draw(rows.ids(positions), np.ones(n))


class OnceBackwards:
    """Draws every row once, the newest first, and then says that there are no more."""

    replacement = False

    def __init__(self) -> None:
        self.drawn = 0

    def state_dict(self) -> dict[str, Any]:
        return {"drawn": self.drawn}

    def load_state_dict(self, state: Any) -> None:
        self.drawn = state["drawn"]

    def draw(self, n: int, rows: zbuffer.RowSet, rng: np.random.Generator) -> zbuffer.Draw:
        n = min(n, len(rows) - self.drawn)
        positions = len(rows) - 1 - self.drawn - np.arange(n)
        self.drawn = 0 if n == 0 else self.drawn + n
        return zbuffer.Draw(rows.ids(positions))


# -- the comparison --------------------------------------------------------------------------

FIELDS = ["obs", "action", "reward", "terminated", "truncated"]
ENDS = ["next_obs", "n_steps", "discount", "mask"]
DTYPES = {"next_obs": "int32", "n_steps": "int64", "discount": "float32", "mask": "bool"}
DTYPES |= {name: dtype for name, (_, dtype) in SCHEMA.items()}


def live_rows(buffer: zbuffer.Buffer) -> list[tuple[int, int, int]]:
    """Return lane, number and step type of all rows that can be read, oldest first."""
    while True:
        first = buffer.first_row
        try:
            obs, types = buffer["obs"][:], buffer["step_type"][:]
        except zbuffer.RowNotFoundError:
            # Rows that are evicted while they are read.
            assert buffer.first_row > first
            continue
        if buffer.first_row == first:
            pairs = zip(obs.tolist(), types.tolist(), strict=True)
            return [(lane, number, kind) for (lane, number), kind in pairs]


def compare(
    batch: zbuffer.Batch, samples: dict[tuple[int, int], dict[str, Any]], window: Window
) -> list[tuple[int, int]]:
    """Check each value of a batch bit for bit; returns the lane and number of its steps."""
    obs = batch["obs"]
    frames = obs[:, -1] if window.frame_stack else obs
    keys = [(lane, number) for lane, number in frames.tolist()]
    assert batch.keys() - {"weights", "indices"} == {*FIELDS, *ENDS}
    for key in keys:
        assert key in samples, f"step {key} may not be drawn"
    for name in (*FIELDS, *ENDS):
        values = [samples[key][name] for key in keys]
        if name in ("obs", "next_obs") and window.frame_stack is None:
            values = [stack[-1] for stack in values]
        wanted = np.array(values, DTYPES[name])
        found = np.ascontiguousarray(batch[name])
        assert (found.dtype, found.shape) == (wanted.dtype, wanted.shape), name
        if found.tobytes() != wanted.tobytes():
            for i, key in enumerate(keys):
                same = found[i].tobytes() == wanted[i].tobytes()
                assert same, f"{name} of step {key}: {found[i]!r}, not {wanted[i]!r}"
    if "weights" in batch:
        assert ((batch["weights"] > 0) & (batch["weights"] <= 1)).all()
    return keys


def check_ids(oracle: Oracle, batch: zbuffer.Batch, taken: Array, keys: Any) -> None:
    """Check that an id names one row for ever, the one that take() reads."""
    ids = batch["indices"]
    assert (ids.dtype, ids.shape) == (np.dtype(np.int64), (len(keys),))
    assert taken.tolist() == [list(key) for key in keys]
    for key, row in zip(keys, ids.tolist(), strict=True):
        assert oracle.ids.setdefault(key, row) == row
        if len(oracle.lanes) == 1:
            assert oracle.lanes[0].rows[row].number == key[1]


def batches_of(
    buffer: zbuffer.Buffer, order: str, window: Window, n: int, seed: int
) -> list[zbuffer.Batch]:
    """Draw about `n` steps, or an epoch; no batches where no step may be drawn."""
    arguments: dict[str, Any] = {**window._asdict(), "seed": seed}
    once = order in ("epoch", "once")
    own = {"in turn": InTurn, "once": OnceBackwards}
    arguments["order"] = own[order]() if order in own else order
    if order == "blocks":
        arguments["rows_per_group"] = 4
    elif order == "epoch":
        arguments["pool_rows"] = (5, 50, 16384)[seed % 3]
    try:
        if once:
            with buffer.loader(17, prefetch=seed % 2 * 2, **arguments) as loader:
                return list(loader)
        if seed % 2:
            with buffer.loader(n, prefetch=seed % 3, **arguments) as loader:
                return [next(loader)]
        return [buffer.sample(n, **arguments)]
    except zbuffer.SampleError:
        return []


def check(
    buffer: zbuffer.Buffer, oracle: Oracle, order: str, window: Window, n: int, seed: int
) -> None:
    """Check what an order draws of a buffer as it is now."""
    all_in_turn = False
    while True:
        live = live_rows(buffer)
        try:
            oracle.set_first(live)
            samples = oracle.samples(window)
            if order == "in turn" and 20 * len(samples) > len(live):
                # So many that it comes to each step once.
                n, all_in_turn = len(samples), True
            batches = batches_of(buffer, order, window, n, seed)
            taken = [buffer.take(batch["indices"], ["obs"])["obs"] for batch in batches]
        except zbuffer.RowNotFoundError:
            assert live_rows(buffer) != live
            continue
        # What is sealed in the background may evict rows while others are drawn.
        if live_rows(buffer) == live:
            break
    keys = []
    for batch, obs in zip(batches, taken, strict=True):
        found = compare(batch, samples, window)
        check_ids(oracle, batch, obs, found)
        keys += found
    assert bool(keys) == bool(samples)
    if order in ("epoch", "once") or all_in_turn:
        assert sorted(keys) == sorted(samples)
    elif order == "uniform" and len(samples) < 8 and n == 200:
        # Each of them is missed with a probability of (7/8) ** 200, some 1e-12.
        assert set(keys) == set(samples)


WINDOWS = st.builds(
    Window,
    st.sampled_from([None, 1, 4]),
    st.sampled_from([1, 3, 5]),
    st.sampled_from([0.99, 0.9, 1.0, 0.0]),
)
ORDERS = ["uniform", "blocks", "epoch", "prioritized", "in turn", "once"]


@pytest.mark.parametrize("n_lanes", [1, 3])
@pytest.mark.timeout(300 * MANY)
@settings(max_examples=15 * MANY, deadline=None)
@given(data=st.data())
def test_batches_hold_what_plain_lists_say(n_lanes: int, data: st.DataObject) -> None:
    chunk_rows = data.draw(st.sampled_from([8, 16]), "chunk_rows")
    capacity = data.draw(st.sampled_from([None, None, 24, 64, 150]), "capacity")
    gather: Any = data.draw(st.sampled_from(["auto", "auto", "ctypes"]), "gather")
    options = {} if n_lanes == 1 else {"lanes": n_lanes, "segment_rows": 4}
    oracle = Oracle([Lane(i) for i in range(n_lanes)])
    player = Player(oracle, random.Random(data.draw(st.integers(0, 99), "rewards")))
    speeds = [data.draw(st.sampled_from([1, 1, 2, 9]), "speed") for _ in range(n_lanes)]

    with tempfile.TemporaryDirectory() as folder, ExitStack() as stack:
        opened = stack.enter_context
        path = Path(folder) / "b"
        buffer = opened(
            zbuffer.create(
                path,
                SCHEMA,
                chunk_rows=chunk_rows,
                block_rows=4,
                capacity=capacity,
                gather=gather,
                **options,
            )
        )
        follower = opened(zbuffer.open(path, gather=gather))

        def play() -> None:
            player.play(buffer, [data.draw(PLANS, "plan") for _ in range(n_lanes)], speeds)

        def check_all(*buffers: zbuffer.Buffer) -> None:
            for order in ORDERS:
                which = data.draw(st.integers(0, len(buffers) - 1), "who reads")
                window = data.draw(WINDOWS, f"window of {order}")
                seed = data.draw(st.integers(0, 5), "seed")
                n = data.draw(st.sampled_from([20, 200]), "n")
                check(buffers[which], oracle, order, window, n, seed)

        play()
        check_all(buffer, follower)
        if data.draw(st.booleans(), "flush"):
            buffer.flush()
            check_all(buffer, follower)
            play()
            check_all(buffer, follower)
        buffer.close()
        for lane in oracle.lanes:
            if lane.running:
                lane.end(None)
        with zbuffer.open(path, gather=gather) as reader:
            check_all(reader, follower)
        buffer = opened(zbuffer.open(path, mode="a", gather=gather))
        check_all(buffer, follower)
        play()
        check_all(buffer, follower)
