"""Forked and spawned processes, locks that die with their holder, few file descriptors."""

from __future__ import annotations

import multiprocessing
import os
import signal
import threading
import traceback
from collections.abc import Callable
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import zbuffer
from zbuffer.reading.gather import native_module

Array = np.ndarray[Any, Any]

FORK = multiprocessing.get_context("fork")
SPAWN = multiprocessing.get_context("spawn")
FORKSERVER = multiprocessing.get_context("forkserver")
FORKSERVER.set_forkserver_preload([__name__, "zarr", "blosc2", "numcodecs", "google_crc32c"])

BACKENDS = [
    pytest.param(
        "native", marks=pytest.mark.skipif(native_module() is None, reason="extension not built")
    ),
    "ctypes",
]
#: Python 3.12 warns of any fork in a process with threads; these tests are about that.
pytestmark = pytest.mark.filterwarnings("ignore:.*fork:DeprecationWarning")

SCHEMA: dict[str, Any] = {
    "obs": ((30, 30), "uint8"),
    "action": ((), "int64"),
    "terminated": ((), "bool"),
}


def frames(n: Any) -> Array:
    n = np.asarray(n)[..., None, None]
    return ((n * 3 + np.arange(900).reshape(30, 30) // 7) % 251).astype(np.uint8)


def steps(start: int, stop: int) -> dict[str, Array]:
    n = np.arange(start, stop)
    return {"obs": frames(n), "action": n, "terminated": n % 50 == 49}


def check(buffer: zbuffer.Buffer, seed: int = 0) -> Array:
    """Check a sample and all actions; returns the indices drawn."""
    batch = buffer.sample(64, frame_stack=2, seed=seed)
    n = batch["action"]
    assert batch["obs"][:, -1].tobytes() == frames(n).tobytes()
    indices: Array = batch["indices"]
    return indices


@pytest.fixture
def path(tmp_path: Path) -> Path:
    """A closed buffer of 400 steps in 25 chunks."""
    with zbuffer.create(tmp_path / "buffer", SCHEMA, chunk_rows=16) as buffer:
        buffer.extend(**steps(0, 400))
    return tmp_path / "buffer"


def answer(work: Callable[..., Any], pipe: Connection, *arguments: Any) -> None:
    """Send what `work` returns, or its traceback."""
    try:
        pipe.send(("fine", work(*arguments)))
    except BaseException:
        pipe.send(("failed", traceback.format_exc()))


def run_child(
    context: Any, work: Callable[..., Any], *arguments: Any, timeout_s: float = 60
) -> Any:
    """Return what `work` returns in a child; a child that hangs is a failure."""
    mine, theirs = context.Pipe(duplex=False)
    child = context.Process(target=answer, args=(work, theirs, *arguments))
    child.start()
    theirs.close()
    with mine:
        came = mine.poll(timeout_s)
        if not came:
            child.kill()
        result = mine.recv() if came else ("failed", "the child hangs")
    child.join()
    child.close()
    assert result[0] == "fine", result[1]
    return result[1]


# -- forked children ---------------------------------------------------------------------


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("threads", [1, 2, 8])
def test_a_forked_child_samples_what_its_parent_samples(
    path: Path, threads: int, backend: Any
) -> None:
    with zbuffer.open(path, gather=backend, threads=threads) as buffer:
        drawn = check(buffer, seed=3)

        for _ in range(3):
            assert np.array_equal(run_child(FORK, check, buffer, 3), drawn)

        assert np.array_equal(check(buffer, seed=3), drawn)


@pytest.mark.parametrize("backend", BACKENDS)
def test_a_child_forked_while_threads_sample_does_not_hang(path: Path, backend: Any) -> None:
    stop = threading.Event()

    def sample() -> None:
        while not stop.is_set():
            buffer.sample(64, frame_stack=2)

    with zbuffer.open(path, gather=backend, threads=2) as buffer:
        samplers = [threading.Thread(target=sample) for _ in range(3)]
        for sampler in samplers:
            sampler.start()
        try:
            for seed in range(5):
                run_child(FORK, check, buffer, seed)
        finally:
            stop.set()
            for sampler in samplers:
                sampler.join()


def sample_from_own_loader(buffer: zbuffer.Buffer) -> list[int]:
    with buffer.loader(32, prefetch=2, seed=5) as loader:
        batches = [next(loader) for _ in range(5)]
    for batch in batches:
        assert batch["obs"].tobytes() == frames(batch["action"]).tobytes()
    return [int(batch["indices"].sum()) for batch in batches]


def test_a_forked_child_has_loaders_of_its_own(path: Path) -> None:
    with zbuffer.open(path, threads=2) as buffer, buffer.loader(32, seed=1) as running:
        next(running)

        there = run_child(FORK, sample_from_own_loader, buffer)

        assert there == sample_from_own_loader(buffer)
        next(running)


def use_inherited_loader(loader: zbuffer.Loader) -> str:
    try:
        for _ in range(5):
            batch = next(loader)
            assert batch["obs"].tobytes() == frames(batch["action"]).tobytes()
    except zbuffer.ZBufferError as error:
        return str(error)
    return "batches"


def test_a_loader_inherited_by_a_forked_child_works_or_says_so_and_never_hangs(
    path: Path,
) -> None:
    with zbuffer.open(path) as buffer, buffer.loader(32) as loader:
        next(loader)

        said = run_child(FORK, use_inherited_loader, loader, timeout_s=10)

        assert said == "batches" or "fork" in said


def close_inherited(buffer: zbuffer.Buffer) -> str:
    buffer.close()
    return "closed"


def test_an_inherited_buffer_with_a_running_loader_closes_in_a_forked_child(path: Path) -> None:
    with zbuffer.open(path) as buffer, buffer.loader(32) as loader:
        next(loader)

        assert run_child(FORK, close_inherited, buffer) == "closed"

        next(loader)
        check(buffer)


def read_and_try_to_write(buffer: zbuffer.Buffer) -> list[str]:
    check(buffer)
    said = []
    calls: list[Callable[[], Any]] = [
        lambda: buffer.append(obs=frames(0), action=0, terminated=False),
        lambda: buffer.extend(**steps(0, 3)),
        lambda: buffer.add_episode(**steps(0, 3)),
        lambda: buffer.end_episode(),
        lambda: buffer.flush(),
    ]
    for call in calls:
        try:
            call()
        except zbuffer.ZBufferError as error:
            said.append(str(error))
    check(buffer)
    return said


@pytest.mark.parametrize("backend", BACKENDS)
def test_the_child_of_a_writer_reads_and_is_refused_to_write(path: Path, backend: Any) -> None:
    with zbuffer.open(path, mode="a", gather=backend) as buffer:
        buffer.extend(**steps(400, 410))
        check(buffer)

        said = run_child(FORK, read_and_try_to_write, buffer)

        assert said == ["a forked process cannot write: open the buffer in the child"] * 5
        assert buffer.rows == 410
        buffer.extend(**steps(410, 440))
        assert np.array_equal(buffer["action"][:], np.arange(440))
    with zbuffer.open(path) as buffer:
        assert np.array_equal(buffer["action"][:], np.arange(440))


def test_closing_in_the_child_of_a_writer_leaves_the_writer_as_it_is(path: Path) -> None:
    with zbuffer.open(path, mode="a") as buffer:
        buffer.extend(**steps(400, 410))

        assert run_child(FORK, close_inherited, buffer) == "closed"

        with pytest.raises(zbuffer.BufferLockedError):
            zbuffer.open(path, mode="a")
        buffer.extend(**steps(410, 440))
        assert np.array_equal(buffer["action"][:], np.arange(440))


def test_a_child_forked_while_the_writer_appends_reads_right(tmp_path: Path) -> None:
    stop = threading.Event()

    def append() -> None:
        n = 100
        while not stop.is_set():
            buffer.extend(**steps(n, n + 10))
            n += 10

    schema = tmp_path / "buffer"
    with zbuffer.create(schema, SCHEMA, chunk_rows=16, capacity=600) as buffer:
        buffer.extend(**steps(0, 100))
        writer = threading.Thread(target=append)
        writer.start()
        try:
            for seed in range(8):
                run_child(FORK, check, buffer, seed)
        finally:
            stop.set()
            writer.join()


# -- spawned children ----------------------------------------------------------------------


def open_and_check(path: str, backend: Any) -> Array:
    with zbuffer.open(path, gather=backend) as buffer:
        return check(buffer, seed=3)


@pytest.mark.parametrize("backend", BACKENDS)
def test_a_spawned_child_opens_the_path_and_samples_the_same(path: Path, backend: Any) -> None:
    drawn = open_and_check(str(path), backend)

    assert np.array_equal(run_child(SPAWN, open_and_check, str(path), backend), drawn)


# -- locks -----------------------------------------------------------------------------------


def write_with_a_child(path: str, pipe: Connection) -> None:
    """Be a writer with a forked child that outlives it."""
    buffer = zbuffer.open(path, mode="a")
    buffer.extend(**steps(400, 410))
    pid = os.fork()
    if pid == 0:
        pipe.send("child")
        pipe.recv()
        os._exit(0)
    signal.pause()


def test_a_forked_child_does_not_keep_the_lock_of_a_writer_that_died(path: Path) -> None:
    mine, theirs = FORKSERVER.Pipe()
    writer = FORKSERVER.Process(target=write_with_a_child, args=(str(path), theirs))
    writer.start()
    theirs.close()
    with mine:
        assert mine.recv() == "child"
        with pytest.raises(zbuffer.BufferLockedError):
            zbuffer.open(path, mode="a")
        assert writer.pid is not None

        os.kill(writer.pid, signal.SIGKILL)
        writer.join()

        with zbuffer.open(path, mode="a") as buffer:
            assert np.array_equal(buffer["action"][:], np.arange(410))
        # The child was there all the time, and goes now.
        mine.send("go")
        with pytest.raises(EOFError):
            mine.recv()
    writer.close()


def write_until_killed(path: str, pipe: Connection) -> None:
    buffer = zbuffer.open(path, mode="a")
    pipe.send(buffer.rows)
    n = buffer.rows
    while True:
        buffer.extend(**steps(n, n + 5))
        n += 5


def test_a_buffer_opens_for_writing_right_after_its_writer_was_killed(path: Path) -> None:
    for _ in range(3):
        mine, theirs = FORKSERVER.Pipe()
        writer = FORKSERVER.Process(target=write_until_killed, args=(str(path), theirs))
        writer.start()
        with mine, theirs:
            before = mine.recv()
            assert writer.pid is not None

            os.kill(writer.pid, signal.SIGKILL)
            writer.join()

            with zbuffer.open(path, mode="a") as buffer:
                assert buffer.rows >= before
                assert np.array_equal(buffer["action"][:], np.arange(buffer.rows))
        writer.close()


# -- few descriptors -----------------------------------------------------------------------------


def read_with_few_descriptors(path: str, backend: Any) -> int:
    import resource

    resource.setrlimit(resource.RLIMIT_NOFILE, (256, 256))
    with zbuffer.open(path, gather=backend) as buffer:
        rows = buffer.rows
        assert buffer["obs"][:].tobytes() == frames(np.arange(rows)).tobytes()
        for seed in range(20):
            check(buffer, seed)
        assert np.array_equal(buffer["action"][:], np.arange(rows))
    with zbuffer.open(path, mode="a", gather=backend) as buffer:
        buffer.extend(**steps(rows, 2 * rows))
        for seed in range(20):
            check(buffer, seed)
        assert buffer["obs"][:].tobytes() == frames(np.arange(2 * rows)).tobytes()
        return len(os.listdir("/proc/self/fd"))


@pytest.mark.skipif(not Path("/proc/self/fd").exists(), reason="descriptors are counted in /proc")
@pytest.mark.parametrize("backend", BACKENDS)
def test_hundreds_of_chunks_are_read_and_written_with_256_descriptors(
    tmp_path: Path, backend: Any
) -> None:
    path = tmp_path / "buffer"
    with zbuffer.create(path, SCHEMA, chunk_rows=2) as buffer:
        buffer.extend(**steps(0, 700))

    n_open = run_child(FORKSERVER, read_with_few_descriptors, str(path), backend)

    assert n_open < 256
