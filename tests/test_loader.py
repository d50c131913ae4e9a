"""Batches made ahead: errors, threads, devices, and what is shared."""

from __future__ import annotations

import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

import zbuffer

Array = np.ndarray[Any, Any]

SCHEMA: dict[str, Any] = {
    "obs": ((6, 5), "uint8"),
    "action": ((), "int64"),
    "reward": ((), "float32"),
    "terminated": ((), "bool"),
    "truncated": ((), "bool"),
}


def frames(n: Any) -> Array:
    n = np.asarray(n)[..., None, None]
    return ((n * 3 + np.arange(30).reshape(6, 5)) % 251).astype(np.uint8)


@pytest.fixture(scope="module")
def path(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A closed buffer of 200 steps in episodes of 20."""
    path = tmp_path_factory.mktemp("loader") / "buffer"
    n = np.arange(200)
    with zbuffer.create(path, SCHEMA, chunk_rows=16) as buffer:
        buffer.extend(
            obs=frames(n),
            action=n,
            reward=(n % 4).astype("float32"),
            terminated=n % 20 == 19,
            truncated=np.zeros(200, bool),
            next_obs=frames(n + 1),
        )
    return path


@pytest.fixture
def buffer(path: Path) -> Iterator[zbuffer.Buffer]:
    with zbuffer.open(path) as opened:
        yield opened


def prefetch_threads() -> list[str]:
    return [t.name for t in threading.enumerate() if t.name.startswith("zbuffer")]


def assert_equal(a: Any, b: Any) -> None:
    assert list(a) == list(b)
    for name in a:
        assert a[name].dtype == b[name].dtype
        assert np.array_equal(a[name], b[name])


# -- errors and threads ----------------------------------------------------------------


class OopsError(Exception):
    """Raised by a transform."""


def test_an_error_on_the_prefetch_thread_surfaces_in_the_loop_after_the_batches_before_it(
    buffer: zbuffer.Buffer,
) -> None:
    made: list[int] = []

    def fail_at_the_third(batch: Any) -> Any:
        made.append(len(made))
        if len(made) == 3:
            raise OopsError("third")
        return batch

    with buffer.loader(8, transform=fail_at_the_third, prefetch=4) as loader:
        next(loader)
        next(loader)
        for _ in range(2):
            with pytest.raises(OopsError, match=r"^third$"):
                next(loader)

    assert made == [0, 1, 2]


def test_an_error_without_prefetch_surfaces_and_the_loader_goes_on(
    buffer: zbuffer.Buffer,
) -> None:
    fails = [True, False]

    def fail_once(batch: Any) -> Any:
        if fails.pop(0):
            raise OopsError
        return batch

    with buffer.loader(8, transform=fail_once, prefetch=0, seed=3) as loader:
        with pytest.raises(OopsError):
            next(loader)
        batch = next(loader)

    with buffer.loader(8, prefetch=0, seed=3) as loader:
        assert_equal(next(loader), batch)


def test_a_system_exit_on_the_prefetch_thread_reaches_the_loop(buffer: zbuffer.Buffer) -> None:
    def leave(batch: Any) -> Any:
        raise SystemExit(3)

    with buffer.loader(8, transform=leave) as loader, pytest.raises(SystemExit):
        next(loader)


def test_close_leaves_no_thread(buffer: zbuffer.Buffer) -> None:
    loader = buffer.loader(8, prefetch=3)
    next(loader)
    assert prefetch_threads() == ["zbuffer-prefetch"]

    loader.close()
    loader.close()

    assert prefetch_threads() == []
    assert loader.closed
    with pytest.raises(zbuffer.ClosedError, match=r"^the loader is closed$"):
        next(loader)


def test_the_context_manager_leaves_no_thread_after_an_error(buffer: zbuffer.Buffer) -> None:
    def leave_by_an_error() -> None:
        with buffer.loader(8) as loader:
            next(loader)
            raise OopsError

    with pytest.raises(OopsError):
        leave_by_an_error()

    assert prefetch_threads() == []


def test_close_does_not_wait_for_batches_that_nobody_takes(buffer: zbuffer.Buffer) -> None:
    loader = buffer.loader(8, prefetch=1)

    loader.close()

    assert prefetch_threads() == []


def test_closing_the_buffer_closes_its_loaders(path: Path) -> None:
    buffer = zbuffer.open(path)
    loaders = [buffer.loader(8, prefetch=n) for n in (0, 1, 2)]
    for loader in loaders:
        next(loader)

    buffer.close()

    assert prefetch_threads() == []
    for loader in loaders:
        with pytest.raises(zbuffer.ClosedError):
            next(loader)


def test_a_loop_over_a_loader_that_another_thread_closes_ends_with_an_error(
    buffer: zbuffer.Buffer,
) -> None:
    taken, release = threading.Event(), threading.Event()

    def hold(batch: Any) -> Any:
        taken.set()
        release.wait(30)
        return batch

    loader = buffer.loader(8, transform=hold)
    caught: list[BaseException] = []

    def train() -> None:
        try:
            next(loader)
        except zbuffer.ClosedError as error:
            caught.append(error)

    trainer = threading.Thread(target=train)
    trainer.start()
    assert taken.wait(30)
    closer = threading.Thread(target=loader.close)
    closer.start()
    trainer.join(30)
    release.set()
    closer.join(30)

    assert not trainer.is_alive()
    assert [str(error) for error in caught] == ["the loader is closed"]


def test_a_loader_that_is_dropped_leaves_no_thread(path: Path) -> None:
    import gc

    with zbuffer.open(path) as buffer:
        loader = buffer.loader(8)
        next(loader)
        del loader
        gc.collect()

    assert prefetch_threads() == []


def test_prefetch_makes_so_many_batches_ahead_and_no_more(buffer: zbuffer.Buffer) -> None:
    made = threading.Semaphore(0)
    count = []

    def note(batch: Any) -> Any:
        count.append(1)
        made.release()
        return batch

    with buffer.loader(4, prefetch=3, transform=note) as loader:
        for _ in range(3):
            assert made.acquire(timeout=30)
        next(loader)
        assert made.acquire(timeout=30)

    assert len(count) <= 5


def test_transform_runs_on_the_prefetch_thread_and_its_answer_is_handed_out(
    buffer: zbuffer.Buffer,
) -> None:
    def where(batch: Any) -> Any:
        return threading.current_thread().name, batch["obs"].astype("float32") / 255

    with buffer.loader(4, transform=where) as loader:
        name, obs = next(loader)
    assert name == "zbuffer-prefetch"
    assert obs.dtype == np.float32

    with buffer.loader(4, transform=where, prefetch=0) as loader:
        assert next(loader)[0] == threading.current_thread().name


def test_statistics_count_batches_and_times(buffer: zbuffer.Buffer) -> None:
    with buffer.loader(4) as loader:
        for _ in range(3):
            next(loader)
        statistics = loader.statistics()

    assert statistics.batches == 3
    assert statistics.wait_s >= 0
    assert statistics.make_s > 0


# -- what a batch is -----------------------------------------------------------------------


@pytest.mark.parametrize("window", [{}, {"frame_stack": 3}, {"frame_stack": 2, "n_step": 3}])
def test_the_same_seed_draws_the_same_batches_with_and_without_prefetch(
    path: Path, window: dict[str, Any]
) -> None:
    batches = []
    for prefetch in (0, 2):
        with (
            zbuffer.open(path) as buffer,
            buffer.loader(16, prefetch=prefetch, seed=7, **window) as loader,
        ):
            batches.append([next(loader) for _ in range(5)])

    for a, b in zip(*batches, strict=True):
        assert_equal(a, b)
    assert not np.array_equal(batches[0][0]["indices"], batches[0][1]["indices"])


def test_another_seed_draws_other_batches(buffer: zbuffer.Buffer) -> None:
    with buffer.loader(16, seed=0) as a, buffer.loader(16, seed=1) as b:
        assert not np.array_equal(next(a)["indices"], next(b)["indices"])


def test_a_batch_stays_what_it_was(buffer: zbuffer.Buffer) -> None:
    with buffer.loader(16, prefetch=2, frame_stack=2) as loader:
        kept = [next(loader) for _ in range(6)]
        copies = [{name: value.copy() for name, value in batch.items()} for batch in kept]
        for _ in range(10):
            next(loader)

    for batch, copy in zip(kept, copies, strict=True):
        assert_equal(batch, copy)


@pytest.mark.parametrize("frame_stack", [None, 1, 4])
def test_obs_and_next_obs_are_overlapping_views(
    buffer: zbuffer.Buffer, frame_stack: int | None
) -> None:
    batch = buffer.sample(16, frame_stack=frame_stack)

    obs, following = batch["obs"], batch["next_obs"]
    whole = obs.base
    assert whole is not None
    assert following.base is whole
    assert whole.shape == (16, (frame_stack or 1) + 1, 6, 5)
    assert np.shares_memory(obs, following) == (frame_stack is not None and frame_stack > 1)
    assert obs.shape == following.shape == (16, *([frame_stack] if frame_stack else []), 6, 5)


def test_fields_are_those_that_were_asked_for(buffer: zbuffer.Buffer) -> None:
    every = {"obs", "next_obs", "action", "reward", "terminated", "truncated"}
    added = {"indices", "discount", "n_steps", "mask"}

    assert set(buffer.sample(4)) == every | added
    assert set(buffer.sample(4, fields=["obs", "action"])) == {"obs", "action", "indices"}
    assert set(buffer.sample(4, fields=["next_obs"])) == {"next_obs"} | {"indices"} | added
    with buffer.loader(4, fields=["action"], prefetch=0) as loader:
        assert set(next(loader)) == {"action", "indices"}


def test_fields_of_nested_observations_are_chosen_by_parent_or_part(tmp_path: Path) -> None:
    schema = {"obs/a": ((3,), "f4"), "obs/b": ((), "i4"), "action": ((), "i8")}
    with zbuffer.create(tmp_path / "b", schema) as buffer:
        buffer.extend(
            **{
                "obs/a": np.zeros((5, 3), "f4"),
                "obs/b": np.arange(5, dtype="i4"),
                "action": np.arange(5),
            }
        )

        assert set(buffer.sample(4, fields=["obs"])) == {"obs/a", "obs/b", "indices"}
        assert set(buffer.sample(4, fields=["obs/b"])) == {"obs/b", "indices"}
        batch = buffer.sample(4, fields=["next_obs/b", "action"])
        assert {"next_obs/b", "action"} <= set(batch)
        assert "next_obs/a" not in batch
        assert np.array_equal(batch["next_obs"]["b"], batch["action"] + 1)


@pytest.mark.parametrize("prefetch", [0, 2])
def test_without_a_device_batches_are_numpy(buffer: zbuffer.Buffer, prefetch: int) -> None:
    with buffer.loader(4, device=None, prefetch=prefetch) as loader:
        batch = next(loader)

    assert type(batch) is zbuffer.Batch
    assert all(type(value) is np.ndarray for value in batch.values())


# -- torch -------------------------------------------------------------------------------------


@pytest.mark.parametrize("prefetch", [0, 2])
def test_on_the_cpu_batches_are_tensors_of_the_same_values(path: Path, prefetch: int) -> None:
    torch = pytest.importorskip("torch")
    with zbuffer.open(path) as buffer:
        with buffer.loader(16, frame_stack=3, seed=1, prefetch=0) as loader:
            wanted = next(loader)
        with buffer.loader(16, frame_stack=3, seed=1, device="cpu", prefetch=prefetch) as loader:
            batch = next(loader)

    assert all(isinstance(value, torch.Tensor) for value in batch.values())
    assert_equal({name: value.numpy() for name, value in batch.items()}, wanted)
    # One memory: a tensor of 4 frames, seen twice.
    assert (
        batch["obs"].untyped_storage().data_ptr() == batch["next_obs"].untyped_storage().data_ptr()
    )


def test_a_torch_device_is_taken_too(buffer: zbuffer.Buffer) -> None:
    torch = pytest.importorskip("torch")

    with buffer.loader(4, device=torch.device("cpu")) as loader:
        assert next(loader)["obs"].device == torch.device("cpu")


def test_devices_that_cannot_be_are_refused(buffer: zbuffer.Buffer) -> None:
    torch = pytest.importorskip("torch")

    with pytest.raises(ValueError, match=r"^device must be None, 'cpu' or 'cuda', got 'meta'$"):
        buffer.loader(4, device="meta")
    if not torch.cuda.is_available():
        with pytest.raises(ValueError, match=r"^device='cuda' but") as caught:
            buffer.loader(4, device="cuda")
        assert str(caught.value) == "device='cuda' but this PyTorch sees no CUDA device"
    assert prefetch_threads() == []


def test_dtypes_that_torch_has_not_say_what_helps(tmp_path: Path) -> None:
    pytest.importorskip("torch")
    schema = {"obs": ((), "f4"), "name": ((), "U4")}
    with zbuffer.create(tmp_path / "b", schema) as buffer:
        for n in range(4):
            buffer.append(obs=n, name="x")

        loader = buffer.loader(4, device="cpu", prefetch=0)
        with pytest.raises(zbuffer.SchemaError) as caught:
            next(loader)

        assert str(caught.value) == (
            "field 'name' has the dtype <U4, which torch has not; use device=None or fields="
        )
        with buffer.loader(4, device="cpu", prefetch=0, fields=["obs"]) as loader:
            next(loader)


# -- CUDA, played by a module that writes down what it is asked -----------------------------------


class FakeTensor:
    """Memory with a place; the parts of a tensor that uploading uses."""

    def __init__(self, log: list[Any], array: Array, *, cuda: bool = False) -> None:
        self._log = log
        self.array = array
        self.is_cuda = cuda

    def numel(self) -> int:
        return self.array.size

    def numpy(self) -> Array:
        return self.array

    def __getitem__(self, index: Any) -> FakeTensor:
        return FakeTensor(self._log, self.array[index], cuda=self.is_cuda)

    def copy_(self, source: FakeTensor, *, non_blocking: bool) -> None:
        assert non_blocking
        self._log.append(("copy", FakeTorch.stream_of(self._log), source.array.ctypes.data))
        self.array[...] = source.array

    def record_stream(self, stream: str) -> None:
        self._log.append(("record_stream", stream))


class FakeEvent:
    """An event with a number."""

    def __init__(self, log: list[Any]) -> None:
        self._log = log
        self.number = sum(entry[0] == "event" for entry in log)
        log.append(("event", self.number))

    def record(self, stream: str) -> None:
        self._log.append(("record", self.number, stream))

    def synchronize(self) -> None:
        self._log.append(("synchronize", self.number))


class FakeStream(str):
    """A stream is its name; the training stream waits for events."""

    log: list[Any]

    def wait_event(self, event: FakeEvent) -> None:
        self.log.append(("wait", self, event.number))


class FakeTorch(SimpleNamespace):
    """What uploading uses of torch and of ``torch.cuda``."""

    def __init__(self) -> None:
        log: list[Any] = []
        training, side = FakeStream("training"), FakeStream("side")
        training.log = side.log = log
        cuda = SimpleNamespace(
            Stream=lambda device: side,
            Event=lambda: FakeEvent(log),
            stream=lambda stream: FakeTorch.current(log, stream),
            device=lambda device: FakeTorch.current(log, None),
            current_stream=lambda device: training,
            is_available=lambda: True,
        )
        super().__init__(log=log, cuda=cuda, uint8=np.uint8, Tensor=FakeTensor, pinned=[])

    @staticmethod
    @contextmanager
    def current(log: list[Any], stream: str | None) -> Iterator[None]:
        if stream is not None:
            log.append(("enter", stream))
        yield
        if stream is not None:
            log.append(("leave", stream))

    @staticmethod
    def stream_of(log: list[Any]) -> str:
        turns = [entry for entry in log if entry[0] in ("enter", "leave")]
        return turns[-1][1] if turns and turns[-1][0] == "enter" else "training"

    def device(self, device: Any) -> Any:
        return SimpleNamespace(type=device.partition(":")[0]) if isinstance(device, str) else device

    def empty(self, n: int, *, dtype: Any, pin_memory: bool) -> FakeTensor:
        assert pin_memory
        memory = np.zeros(n, dtype)
        self.pinned.append(memory)
        return FakeTensor(self.log, memory)

    def empty_like(self, tensor: FakeTensor, *, device: Any) -> FakeTensor:
        return FakeTensor(self.log, np.zeros_like(tensor.array), cuda=True)

    def from_numpy(self, array: Array) -> FakeTensor:
        return FakeTensor(self.log, array)


@pytest.fixture
def fake_torch(monkeypatch: pytest.MonkeyPatch) -> FakeTorch:
    fake = FakeTorch()
    monkeypatch.setitem(sys.modules, "torch", fake)
    return fake


def test_a_cuda_batch_has_the_values_of_a_host_batch(path: Path, fake_torch: FakeTorch) -> None:
    with zbuffer.open(path) as buffer:
        with buffer.loader(16, frame_stack=3, seed=1, prefetch=0) as loader:
            wanted = [next(loader) for _ in range(6)]
        with buffer.loader(16, frame_stack=3, seed=1, device="cuda", prefetch=0) as loader:
            found = [next(loader) for _ in range(6)]

    for a, b in zip(found, wanted, strict=True):
        assert_equal({name: value.array for name, value in a.items()}, b)
        assert all(value.is_cuda for value in a.values())


def test_cuda_copies_run_on_the_side_stream_out_of_pinned_memory(
    buffer: zbuffer.Buffer, fake_torch: FakeTorch
) -> None:
    with buffer.loader(16, frame_stack=3, device="cuda", prefetch=0) as loader:
        next(loader)

    copies = [entry for entry in fake_torch.log if entry[0] == "copy"]
    ranges = [(p.ctypes.data, p.ctypes.data + p.nbytes) for p in fake_torch.pinned]
    assert copies
    for _, stream, address in copies:
        assert stream == "side"
        assert any(start <= address < stop for start, stop in ranges)
    # The frames of both stacks go over once.
    assert len(copies) == len({address for _, _, address in copies})


def test_a_pinned_slot_is_used_again_only_after_its_copies(
    buffer: zbuffer.Buffer, fake_torch: FakeTorch
) -> None:
    with buffer.loader(16, device="cuda", prefetch=0) as loader:
        for _ in range(5):
            next(loader)

    log = fake_torch.log
    # With prefetch=0 there are two slots. Each batch makes two events: the end of its
    # copies, recorded on the side stream after them, and the end of its making.
    synchronized = [entry[1] for entry in log if entry[0] == "synchronize"]
    assert synchronized == [0, 2, 4]
    first_copies_again = [i for i, entry in enumerate(log) if entry[0] == "copy"]
    per_batch = len(first_copies_again) // 5
    for batch, event in ((2, 0), (3, 2), (4, 4)):
        at = log.index(("synchronize", event))
        assert log.index(("record", event, "side")) < at
        assert (
            first_copies_again[batch * per_batch - 1] < at < first_copies_again[batch * per_batch]
        )
    addresses = [log[i][2] for i in first_copies_again]
    by_batch = [addresses[i * per_batch : (i + 1) * per_batch] for i in range(5)]
    assert by_batch[0] == by_batch[2] == by_batch[4]
    assert by_batch[1] == by_batch[3]
    assert not set(by_batch[0]) & set(by_batch[1])


def test_the_training_stream_waits_for_the_event_and_never_synchronizes(
    buffer: zbuffer.Buffer, fake_torch: FakeTorch
) -> None:
    with buffer.loader(16, device="cuda", prefetch=0) as loader:
        batch = next(loader)

    log = fake_torch.log
    assert not [entry for entry in log if entry[0] == "synchronize"]
    waits = [entry for entry in log if entry[0] == "wait"]
    assert waits == [("wait", "training", 1)]
    assert log.index(("record", 1, "side")) < log.index(waits[0])
    told = [entry for entry in log if entry[0] == "record_stream"]
    assert len(told) >= len(batch)
    assert all(stream == "training" for _, stream in told)
    assert log.index(told[0]) > log.index(waits[0])


def test_a_transform_of_a_cuda_batch_runs_on_the_side_stream_before_the_event(
    buffer: zbuffer.Buffer, fake_torch: FakeTorch
) -> None:
    def halve(batch: Any) -> Any:
        fake_torch.log.append(("transform", FakeTorch.stream_of(fake_torch.log)))
        return batch["obs"], threading.current_thread().name

    with buffer.loader(16, device="cuda", transform=halve, prefetch=2) as loader:
        obs, thread = next(loader)

    log = fake_torch.log
    assert thread == "zbuffer-prefetch"
    assert obs.is_cuda
    assert log.index(("transform", "side")) < log.index(("record", 1, "side"))


def test_there_are_pinned_slots_for_the_batches_ahead_and_those_in_hand(
    buffer: zbuffer.Buffer, fake_torch: FakeTorch
) -> None:
    with buffer.loader(16, device="cuda", prefetch=2, fields=["action"]) as loader:
        batches = [next(loader) for _ in range(12)]

    # Two fields (action, indices) in each of prefetch + 2 slots, however many batches.
    assert len(fake_torch.pinned) == 2 * 4
    # What was handed out lies in memory of its own: no slot is seen through it.
    for batch in batches:
        ids = batch["indices"].array
        # Every 20 steps, one row with the final observation.
        assert np.array_equal(batch["action"].array, ids - ids // 21)
