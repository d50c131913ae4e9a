"""Does a buffer do what a list of rows would do, whatever is called in whatever order?

``ZBUFFER_EXAMPLES=500 pytest tests/test_state_machine.py`` looks further, and at
other runs each time.
"""

from __future__ import annotations

import copy
import os
import random
import shutil
import tempfile
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import HealthCheck, Phase, settings
from hypothesis import strategies as st
from hypothesis.stateful import (
    RuleBasedStateMachine,
    initialize,
    invariant,
    precondition,
    rule,
    run_state_machine_as_test,
)

import zbuffer
from zbuffer import Buffer, EpisodeError, Field, SampleError, Schema, SchemaError
from zbuffer.reading.gather import native_module
from zbuffer.testing import ModelBuffer

VECTOR = {"obs": Field((3,), "float32")}
PIXELS = {"obs": Field((2, 2), "uint8")}
NESTED = {"obs/a": Field((3,), "float32"), "obs/b": Field((2, 2), "uint8")}
STEP = {
    "action": Field((), "int64"),
    "reward": Field((), "float32"),
    "terminated": Field((), "bool"),
    "truncated": Field((), "bool"),
    "nothing": Field((0, 2), "float32"),
}
SCHEMAS = {
    "vector": Schema(VECTOR | STEP),
    "pixels": Schema(PIXELS | STEP),
    "nested": Schema(NESTED | STEP),
    "explicit": Schema(VECTOR | STEP, next_obs="explicit"),
}
#: What an observation holds besides its number: values that compare in odd ways.
ODD = (0.0, -0.0, float("nan"), float("inf"))
ENDINGS = ("", "", "", "", "terminated", "truncated", "both")

Step = dict[str, Any]
Window = dict[str, Any]


def some_steps(n_steps: int, seed: int) -> list[Step]:
    """Make many steps from two numbers: Hypothesis has a budget, and spends it on calls."""
    choose = random.Random(seed)
    return [
        {
            "reward": choose.randrange(-64, 64) / 8,
            "ending": choose.choice(ENDINGS),
            "odd": choose.choice(ODD),
        }
        for _ in range(n_steps)
    ]


seeds = st.integers(0, 2**16)
odd = st.sampled_from(ODD)
step = st.builds(lambda seed: some_steps(1, seed)[0], seeds)
few_steps = st.builds(some_steps, st.integers(1, 7), seeds)
many_steps = st.builds(some_steps, st.integers(0, 30), seeds)
window = st.fixed_dictionaries(
    {
        "frame_stack": st.sampled_from((None, 1, 2, 3, 5)),
        "n_step": st.sampled_from((1, 1, 2, 3, 5)),
        "gamma": st.sampled_from((0.5, 0.99, 1.0)),
    }
)


class BufferMachine(RuleBasedStateMachine):
    """Every call goes to a buffer and to the model; what comes back is compared."""

    def __init__(self, schema: Schema, gather: str) -> None:
        super().__init__()
        self.schema = schema
        self.gather: Any = gather
        self.directory = Path(tempfile.mkdtemp(prefix="zbuffer-machine-"))
        self.path = self.directory / "buffer.zarr"
        self.reader: Buffer | None = None
        self.count = 0

    @initialize(
        chunk_rows=st.sampled_from((4, 8)),
        block_rows=st.sampled_from((1, 2, 4)),
        capacity=st.sampled_from((12, 13, 16, 21, 32, 40, None)),
        steps=st.builds(some_steps, st.integers(0, 60), seeds),
    )
    def create(
        self,
        chunk_rows: int,
        block_rows: int,
        capacity: int | None,
        steps: list[Step],
    ) -> None:
        self.model = ModelBuffer(self.schema, chunk_rows=chunk_rows, capacity=capacity)
        self.buffer = zbuffer.create(
            self.path,
            self.schema,
            capacity=capacity,
            chunk_rows=chunk_rows,
            block_rows=block_rows,
            gather=self.gather,
        )
        self.both("extend", self.stacked(self.chain(steps, self.schema.explicit)))

    def teardown(self) -> None:
        if self.reader is not None:
            self.reader.close()
        if hasattr(self, "buffer"):
            self.buffer.close()
        shutil.rmtree(self.directory)

    # Writing

    @rule(step=step, with_next=st.booleans(), as_dict=st.booleans())
    def append(self, step: Step, with_next: bool, as_dict: bool) -> None:
        row = self.step(step) | self.next_observation()
        if with_next or self.schema.explicit:
            row |= self.following(step["odd"])

        self.both("append", nested(row) if as_dict else row)

    @rule(
        steps=many_steps,
        with_next=st.booleans(),
        as_dict=st.booleans(),
        broken=st.integers(0, 40),
    )
    def extend(self, steps: list[Step], with_next: bool, as_dict: bool, broken: int) -> None:
        rows = self.chain(steps, with_next or self.schema.explicit)
        if 0 < broken < len(rows):
            rows[broken] |= self.observation(0.0)
        columns = self.stacked(rows)

        self.both("extend", nested(columns) if as_dict else columns)

    @rule(
        steps=few_steps,
        ending=st.sampled_from(("", "terminated", "truncated")),
        flags=st.sampled_from(("left out", "one bool", "array")),
        with_final=st.booleans(),
    )
    def add_episode(self, steps: list[Step], ending: str, flags: str, with_final: bool) -> None:
        endings = [""] * (len(steps) - 1) + [ending]
        steps = [step | {"ending": e} for step, e in zip(steps, endings, strict=True)]
        rows = [self.step(step) | self.observation(step["odd"]) for step in steps]
        if self.schema.explicit:
            rows = [row | self.following(0.0) for row in rows]
        columns = self.stacked(rows)
        if with_final and not self.schema.explicit:
            final = self.observation(0.0)
            columns |= {name: np.stack([*columns[name], final[name]]) for name in final}
        for flag in ("terminated", "truncated"):
            if flags == "one bool":
                columns[flag] = ending == flag
            elif flags == "left out" and ending != flag:
                del columns[flag]

        self.both("add_episode", columns)

    @rule(with_final=st.booleans(), odd=odd)
    def end_episode(self, with_final: bool, odd: float) -> None:
        pending = self.model.pending
        final = {}
        if with_final and not self.schema.explicit:
            final = dict(pending) if pending is not None else self.observation(odd)

        self.both("end_episode", final)

    @precondition(lambda self: self.model.pending is not None)
    @rule(step=step)
    def append_what_is_not_the_next_obs(self, step: Step) -> None:
        other = self.differing_in_one_bit(self.model.pending)

        with pytest.raises(EpisodeError):
            self.buffer.append(**self.step(step), **other)

    @precondition(lambda self: self.model.pending is not None)
    @rule()
    def end_with_what_is_not_the_next_obs(self) -> None:
        other = self.differing_in_one_bit(self.model.pending)

        with pytest.raises(EpisodeError):
            self.buffer.end_episode(**other)

    @rule(step=step, spoil=st.integers(0, 100), with_next=st.booleans(), many=st.booleans())
    def append_what_does_not_fit(self, step: Step, spoil: int, with_next: bool, many: bool) -> None:
        rows = self.chain([step] * 5 if many else [step], with_next or self.schema.explicit)
        row = self.stacked(rows) if many else rows[0]
        spoils = list(ways_to_spoil(row, self.schema, many=many))
        name, value = spoils[spoil % len(spoils)]
        if value is None:
            del row[name]
        else:
            row[name] = value

        with pytest.raises(SchemaError):
            (self.buffer.extend if many else self.buffer.append)(**row)

    @precondition(lambda self: self.model.running and not self.model.schema.explicit)
    @rule(spoil=st.integers(0, 100))
    def end_with_what_does_not_fit(self, spoil: int) -> None:
        final = self.observation(0.0)
        spoils = list(ways_to_spoil(final, self.schema, many=False))
        name, value = spoils[spoil % len(spoils)]
        if value is None:
            if len(final) == 1:
                return
            del final[name]
        else:
            final[name] = value

        with pytest.raises(SchemaError):
            self.buffer.end_episode(**final)

    @rule(window=window)
    def flush(self, window: Window) -> None:
        self.buffer.flush()

        self.model.evict(self.buffer.first_row)
        if self.model.capacity is not None:
            live = len(self.model.rows) - self.model.first
            assert live <= self.model.capacity + self.model.chunk_rows
        self.compare(self.buffer, window)

    @rule(window=window)
    def close_and_reopen(self, window: Window) -> None:
        self.buffer.close()
        self.model.close()
        with zbuffer.open(self.path, gather=self.gather) as closed:
            self.compare(closed, window)
        self.buffer = zbuffer.open(self.path, mode="a", gather=self.gather)

        assert self.buffer.rows == len(self.model.rows)

    @rule(steps=few_steps, window=window)
    def kill_and_reopen_a_copy(self, steps: list[Step], window: Window) -> None:
        # As many appends as leave the last chunk part-filled: then nothing is being
        # sealed while the files are copied, as if the process were killed here.
        self.buffer.flush()
        for step in steps:
            if len(self.model.rows) % self.model.chunk_rows < self.model.chunk_rows - 2:
                self.append(step, with_next=True, as_dict=False)
        copied = self.directory / "killed.zarr"
        shutil.copytree(self.path, copied)
        model = copy.deepcopy(self.model)
        model.close()

        with self.using(model), zbuffer.open(copied, mode="a", gather=self.gather) as buffer:
            self.compare(buffer, window)
        with self.using(model), zbuffer.open(copied, gather=self.gather) as buffer:
            self.compare(buffer, window)
        shutil.rmtree(copied)

    # Reading

    @rule(window=window)
    def read_everything(self, window: Window) -> None:
        self.compare(self.buffer, window)

    @rule(window=window)
    def read_everything_with_another_buffer(self, window: Window) -> None:
        if self.reader is None:
            self.reader = zbuffer.open(self.path, gather=self.gather)

        self.compare(self.reader, window)

    @rule(
        places=st.lists(st.integers(1, 12), min_size=1, max_size=9),
        a=st.integers(1, 12),
        b=st.integers(0, 12),
        by=st.sampled_from((1, 2, 3)),
    )
    def read_some_rows(self, places: list[int], a: int, b: int, by: int) -> None:
        # Counted from the newest row: those are never evicted under our hands.
        stop = len(self.model.rows)
        places = [-p for p in places if p <= stop]
        slices = slice(-min(a, stop), -b if b else None, by)
        newest = self.model.rows[-12:]
        if not places:
            return

        for name in self.buffer.keys():
            column = self.buffer[name]
            assert_same(column[places], self.items(name, [newest[p] for p in places]))
            assert_same(column[places[0]], self.items(name, [newest[places[0]]])[0])
            assert_same(column[slices], self.items(name, newest[slices]))
        ids = np.array([[stop + p for p in places]] * 2)
        taken = self.buffer.take(ids)
        for name in self.buffer.keys():
            assert_same(taken[name], self.items(name, [newest[p] for p in places] * 2, ids.shape))

    @invariant()
    def the_rows_are_counted_right(self) -> None:
        self.settled(self.buffer, lambda: self.count_rows(self.buffer))

    # Comparing

    def both(self, call: str, arguments: dict[str, Any]) -> None:
        """Call the model and the buffer, which answer or refuse alike."""
        try:
            expected = getattr(self.model, call)(**arguments)
        except EpisodeError:
            with pytest.raises(EpisodeError):
                getattr(self.buffer, call)(**arguments)
        else:
            assert getattr(self.buffer, call)(**arguments) == expected

    def compare(self, buffer: Buffer, window: Window) -> None:
        """Compare all that can be read from a buffer with the model."""
        self.settled(buffer, lambda: self.count_rows(buffer))
        self.settled(buffer, lambda: self.compare_rows(buffer))
        self.settled(buffer, lambda: self.compare_episodes(buffer))
        self.settled(buffer, lambda: self.compare_samples(buffer, window))

    def settled(self, buffer: Buffer, comparison: Callable[[], None]) -> None:
        """Compare once more if rows were evicted meanwhile: sealing goes on on its own."""
        while True:
            before = self.model.first
            first = buffer.first_row
            assert first <= self.model.last_first()
            assert first % self.model.chunk_rows == 0
            if buffer is self.buffer:
                self.model.evict(first)
            self.model.first = first
            try:
                comparison()
            except Exception:
                if buffer.first_row == first:
                    raise
            finally:
                if buffer is not self.buffer:
                    self.model.first = before
            if buffer.first_row == first:
                return

    def count_rows(self, buffer: Buffer) -> None:
        assert buffer.rows == len(self.model.rows)
        assert len(buffer) == len(self.model)
        assert len(buffer["step_type"]) == len(self.model.rows) - self.model.first

    def compare_rows(self, buffer: Buffer) -> None:
        rows = self.model.rows[self.model.first :]
        ids = np.arange(self.model.first, len(self.model.rows))

        assert buffer.keys() == [*self.schema, "step_type"]
        taken = buffer.take(ids)
        for name in buffer.keys():
            assert_same(buffer[name][:], self.items(name, rows))
            assert_same(taken[name], self.items(name, rows))

    def compare_episodes(self, buffer: Buffer) -> None:
        episodes = buffer.episodes
        expected = self.model.episodes()

        assert [(e.start, e.stop, e.length, e.return_, e.ended) for e in episodes] == [
            (e.start, e.stop, e.length, e.return_, e.ended) for e in expected
        ]
        assert list(episodes.start) == [e.start for e in expected]
        assert list(episodes.stop) == [e.stop for e in expected]
        assert list(episodes.length) == [e.length for e in expected]
        assert list(episodes.returns) == [e.return_ for e in expected]
        assert list(episodes.ended) == [e.ended for e in expected]

    def compare_samples(self, buffer: Buffer, window: Window) -> None:
        frame_stack, n_step = window["frame_stack"], window["n_step"]
        drawable = self.model.drawable(frame_stack or 1)
        impossible = self.schema.explicit and ((frame_stack or 1) > 1 or n_step > 1)
        if impossible or not drawable:
            with pytest.raises(SampleError):
                buffer.sample(8, **window)
            return

        # The chance that this misses one of k rows is below k * exp(-30).
        batch = buffer.sample(30 * len(drawable), **window, seed=self.count)
        drawn, places = np.unique(batch["indices"], return_index=True)
        assert drawn.tolist() == drawable
        for place in [*places, *range(8)]:
            self.compare_sample(batch, int(place), window)

    def compare_sample(self, batch: zbuffer.Batch, i: int, window: Window) -> None:
        row_id = int(batch["indices"][i])
        row = self.model.rows[row_id]
        stacked = window["frame_stack"] is not None
        expected = self.model.window(row_id, **(window if stacked else window | {"frame_stack": 1}))

        for name in self.schema.observations:
            stack = np.stack([frame[name] for frame in expected.stack])
            next_stack = np.stack([frame[name] for frame in expected.next_stack])
            assert_same(batch[name][i], stack if stacked else stack[0])
            assert_same(batch[f"next_{name}"][i], next_stack if stacked else next_stack[0])
        if expected.n_steps == 1:
            assert batch["reward"][i] == row["reward"]
        assert batch["reward"][i] == pytest.approx(expected.reward, rel=1e-5, abs=1e-5)
        assert batch["n_steps"][i] == expected.n_steps
        assert batch["discount"][i] == np.float32(expected.discount)
        assert batch["terminated"][i] == expected.terminated
        assert batch["truncated"][i] == expected.truncated
        assert batch["mask"][i] == expected.mask
        for name in ("action", "nothing"):
            assert_same(batch[name][i], row[name])

    @contextmanager
    def using(self, model: ModelBuffer) -> Iterator[None]:
        """Compare with another model for a while."""
        mine, self.model = self.model, model
        try:
            yield
        finally:
            self.model = mine

    def items(self, name: str, rows: Sequence[Any], shape: Any = None) -> Any:
        """Return a field of some of the model's rows as one array."""
        field = self.schema[name] if name in self.schema else Field((), "uint8")
        shape = (len(rows),) if shape is None else shape
        items = [np.asarray(row[name], field.dtype) for row in rows]
        return np.array(items, field.dtype).reshape(*shape, *field.shape)

    # Making rows

    def step(self, step: Step) -> dict[str, Any]:
        """Return what a row holds but its observation."""
        self.count += 1
        return {
            "action": np.int64(self.count),
            "reward": np.float32(step["reward"]),
            "terminated": step["ending"] in ("terminated", "both"),
            "truncated": step["ending"] in ("truncated", "both"),
            "nothing": np.zeros((0, 2), np.float32),
        }

    def observation(self, odd: float) -> dict[str, Any]:
        """Return an observation that there has not been before."""
        self.count += 1
        values = {
            (3,): np.array([self.count, odd, -self.count], np.float32),
            (2, 2): np.array([[self.count % 256, self.count // 256], [0, 7]], np.uint8),
        }
        return {name: values[self.schema[name].shape] for name in self.schema.observations}

    def following(self, odd: float) -> dict[str, Any]:
        """Return a new observation under the names of next observations."""
        return {f"next_{name}": item for name, item in self.observation(odd).items()}

    def next_observation(self) -> dict[str, Any]:
        """Return the observation that the next row has to have, or any."""
        return self.observation(0.0) if self.model.pending is None else dict(self.model.pending)

    def chain(self, steps: list[Step], with_next: bool) -> list[dict[str, Any]]:
        """Return rows that follow each other, and what is in the buffer."""
        rows: list[dict[str, Any]] = []
        for step in steps:
            row = self.step(step) | self.observation(step["odd"])
            if not rows:
                row |= self.next_observation()
            elif with_next and not self.schema.explicit and not rows[-1]["ended"]:
                row |= {n: rows[-1][f"next_{n}"] for n in self.schema.observations}
            if with_next:
                row |= self.following(step["odd"])
            rows.append(row | {"ended": bool(step["ending"])})
        return [{name: item for name, item in row.items() if name != "ended"} for row in rows]

    def stacked(self, rows: list[dict[str, Any]]) -> dict[str, Any]:
        """Return rows as columns."""
        if rows:
            return {name: np.stack([np.asarray(row[name]) for row in rows]) for name in rows[0]}
        return {n: np.zeros((0, *field.shape), field.dtype) for n, field in self.schema.items()}

    def differing_in_one_bit(self, observation: Any) -> dict[str, Any]:
        """Return the observation with its last bit turned: 0.0 as -0.0, say."""
        other = {name: item.copy() for name, item in observation.items()}
        other[list(other)[-1]].reshape(-1).view(np.uint8)[-1] ^= 0x80
        return other


def ways_to_spoil(row: dict[str, Any], schema: Schema, *, many: bool) -> Iterator[tuple[str, Any]]:
    """Yield names with a value that does not fit there; None for taking it away."""
    lead = (5,) if many else ()
    yield "unheard_of", np.zeros(lead, np.float32)
    for name, value in row.items():
        if not (name.startswith("next_obs") and len(schema.observations) == 1):
            yield name, None
        field = schema.get(name.removeprefix("next_"), Field((), "bool"))
        yield name, np.zeros((*lead, *field.shape, 2), field.dtype)
        yield name, np.zeros((*lead, *field.shape), "complex64")
        yield name, np.full((*lead, *field.shape), "text")
        if (
            value is not None
            and field.dtype == np.float32
            and 0 not in (*lead, *field.shape, len(lead + field.shape))
        ):
            yield name, np.full((*lead, *field.shape), 0.1, np.float64).reshape(*lead, *field.shape)
        if many:
            yield name, np.zeros((4, *field.shape), field.dtype)
            yield name, np.zeros((6, *field.shape), field.dtype)


def nested(row: dict[str, Any]) -> dict[str, Any]:
    """Return flat names as dicts: ``obs/a`` as ``{"obs": {"a": ...}}``."""
    tree: dict[str, Any] = {}
    for name, value in row.items():
        parent, _, leaf = name.partition("/")
        if leaf:
            tree.setdefault(parent, {})[leaf] = value
        else:
            tree[name] = value
    return tree


def assert_same(got: Any, expected: Any) -> None:
    """Two arrays of the same dtype and shape, bit for bit."""
    got, expected = np.asarray(got), np.asarray(expected)
    assert (got.dtype, got.shape) == (expected.dtype, expected.shape)
    assert got.tobytes() == expected.tobytes(), f"got {got}, expected {expected}"


@pytest.mark.parametrize("gather", ["native", "ctypes"])
@pytest.mark.parametrize("schema", SCHEMAS)
def test_a_buffer_does_what_a_list_of_rows_does(schema: str, gather: str) -> None:
    if gather == "native" and native_module() is None:
        pytest.skip("the extension is not built")
    examples = os.environ.get("ZBUFFER_EXAMPLES")

    run_state_machine_as_test(
        lambda: BufferMachine(SCHEMAS[schema], gather),
        settings=settings(
            max_examples=int(examples or 12),
            stateful_step_count=30,
            derandomize=examples is None,
            deadline=None,
            database=None,
            print_blob=False,
            # Shrinking takes minutes: only for who looks further.
            phases=[Phase.generate, *([Phase.shrink] if examples else [])],
            suppress_health_check=list(HealthCheck),
        ),
    )
