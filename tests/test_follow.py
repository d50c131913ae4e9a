"""A reader in a second process follows a live writer."""

from __future__ import annotations

import multiprocessing
import shutil
import traceback
from collections.abc import Iterator
from contextlib import contextmanager
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import zbuffer

Array = np.ndarray[Any, Any]

CONTEXT = multiprocessing.get_context("forkserver")
CONTEXT.set_forkserver_preload([__name__, "zarr", "blosc2", "numcodecs", "google_crc32c"])

SCHEMA: dict[str, Any] = {
    "obs": ((6, 7), "uint8"),
    "action": ((), "int64"),
    "reward": ((), "float64"),
    "terminated": ((), "bool"),
}
CHUNK_ROWS = 8
EPISODE_STEPS = 11


def frames(n: Any) -> Array:
    n = np.asarray(n)[..., None, None]
    return ((n * 5 + np.arange(42).reshape(6, 7) * (n % 17 + 1)) % 251).astype(np.uint8)


def step(n: int) -> dict[str, Any]:
    terminated = n % EPISODE_STEPS == EPISODE_STEPS - 1
    return {"obs": frames(n), "action": n, "reward": n / 3, "terminated": terminated}


def transition(n: int) -> dict[str, Any]:
    return {**step(n), "next_obs": frames(n + 1)}


# -- the reader --------------------------------------------------------------------------


class Reader:
    """A reader that keeps what it saw, and checks each look against it."""

    def __init__(self, buffer: zbuffer.Buffer) -> None:
        self.buffer = buffer
        self.first = self.rows = 0
        self.action = -1
        self.seen_evicted = 0

    def look(self) -> tuple[int, int]:
        """Read what is new, and check it; returns the first row and the rows."""
        buffer = self.buffer
        first, rows = buffer.first_row, buffer.rows
        assert first >= self.first, "an evicted row came back"
        assert rows >= self.rows, "a row went away"
        ids = np.arange(max(self.rows, first), rows)
        if first > self.rows:
            # Rows came and went between two looks.
            self.action = -1
        self.first, self.rows = first, rows
        try:
            batch = buffer.take(ids)
        except zbuffer.RowNotFoundError:
            assert ids[0] < buffer.first_row, "a live row was not found"
            self.seen_evicted += 1
            self.action = -1
        else:
            self.check_new(ids, batch)
        self.sample()
        return first, rows

    def check_new(self, ids: Array, batch: Any) -> None:
        kinds, actions = batch["step_type"], batch["action"]
        assert np.isin(kinds, (0, 1, 2)).all()
        steps = kinds != 2
        numbers = actions.copy()
        for i in np.flatnonzero(~steps):
            numbers[i] = 1 + (numbers[i - 1] if i else self.action)
        if not (len(ids) and not steps[0] and self.action < 0):
            assert batch["obs"].tobytes() == frames(numbers).tobytes()
        assert np.array_equal(batch["reward"][steps], actions[steps] / 3)
        if steps.any():
            n = actions[steps]
            assert np.array_equal(n, np.arange(n[0], n[0] + len(n)))
            assert self.action in (-1, n[0] - 1)
            self.action = int(n[-1])

    def sample(self) -> None:
        if len(self.buffer) < 2:
            return
        batch = self.buffer.sample(16, frame_stack=2)
        n, known = batch["action"], batch["mask"]
        assert batch["obs"][:, -1].tobytes() == frames(n).tobytes()
        assert batch["next_obs"][known, -1].tobytes() == frames(n[known] + 1).tobytes()
        assert np.array_equal(batch["reward"], n / 3)
        starts = n % EPISODE_STEPS == 0
        before = np.where(starts, n, n - 1)
        cut = (batch["obs"][:, 0] == frames(n)).all((1, 2))
        assert ((batch["obs"][:, 0] == frames(before)).all((1, 2)) | cut).all()


def follow(path: str, pipe: Connection, gather: str) -> None:
    """Look each time it is asked to, or all the time; answer with what was seen, or the error."""
    try:
        with zbuffer.open(path, gather=gather) as buffer:
            reader = Reader(buffer)
            pipe.send("open")
            while (wanted := pipe.recv()) != "stop":
                if wanted == "look":
                    pipe.send(reader.look())
                    continue
                looks = 0
                while not pipe.poll():
                    reader.look()
                    looks += 1
                    if looks % 20 == 0:
                        pipe.send(looks)
        pipe.send("closed")
    except BaseException:
        pipe.send(traceback.format_exc())


class RemoteReader:
    """The reader in the other process, as the test sees it."""

    def __init__(self, pipe: Connection) -> None:
        self._pipe = pipe

    def answer(self) -> Any:
        answer = self._pipe.recv()
        assert not isinstance(answer, str) or answer in ("open", "closed"), answer
        return answer

    def look(self) -> tuple[int, int]:
        self._pipe.send("look")
        first, rows = self.answer()
        return first, rows

    def look_all_the_time(self) -> None:
        self._pipe.send("all the time")

    def has_answered(self) -> bool:
        return self._pipe.poll()

    def look_on_request(self) -> None:
        """Go back to looking when asked."""
        self._pipe.send("look")
        while isinstance(self.answer(), int):
            pass

    def stop(self) -> None:
        self._pipe.send("stop")
        while self.answer() != "closed":
            pass


@contextmanager
def reader_of(path: Path, gather: str = "auto") -> Iterator[RemoteReader]:
    mine, theirs = CONTEXT.Pipe()
    child = CONTEXT.Process(target=follow, args=(str(path), theirs, gather))
    child.start()
    theirs.close()
    with mine:
        reader = RemoteReader(mine)
        assert reader.answer() == "open"
        try:
            yield reader
            reader.stop()
        finally:
            child.kill() if child.exitcode is None and not mine.closed else None
            child.join()
    child.close()


# -- the tests -----------------------------------------------------------------------------


@pytest.mark.parametrize("gather", ["auto", "ctypes"])
def test_a_reader_sees_each_row_as_soon_as_it_is_appended(tmp_path: Path, gather: str) -> None:
    path = tmp_path / "buffer"
    with (
        zbuffer.create(path, SCHEMA, chunk_rows=CHUNK_ROWS) as buffer,
        reader_of(path, gather) as reader,
    ):
        for n in range(5 * CHUNK_ROWS):
            buffer.append(**transition(n))
            assert reader.look() == (0, buffer.rows)


def test_a_reader_sees_all_rows_while_the_writer_flushes_closes_and_reopens(
    tmp_path: Path,
) -> None:
    path = tmp_path / "buffer"
    rng = np.random.default_rng(0)
    zbuffer.create(path, SCHEMA, chunk_rows=CHUNK_ROWS).close()
    n = 0

    with reader_of(path) as reader:
        for _ in range(6):
            with zbuffer.open(path, mode="a") as buffer:
                assert reader.look() == (0, buffer.rows)
                for _ in range(rng.integers(1, 12)):
                    for _ in range(rng.integers(1, 2 * CHUNK_ROWS)):
                        buffer.append(**transition(n))
                        n += 1
                    if rng.integers(2):
                        assert reader.look() == (0, buffer.rows)
                    if rng.integers(2):
                        buffer.flush()
                        assert reader.look() == (0, buffer.rows)
                if rng.integers(2):
                    buffer.end_episode()
                    assert reader.look() == (0, buffer.rows)
            with zbuffer.open(path) as buffer:
                assert reader.look() == (0, buffer.rows)
                assert len(buffer) == n


def test_a_reader_sees_rows_of_a_stream_with_its_final_observations(tmp_path: Path) -> None:
    path = tmp_path / "buffer"
    with zbuffer.create(path, SCHEMA, chunk_rows=CHUNK_ROWS) as buffer, reader_of(path) as reader:
        for n in range(4 * CHUNK_ROWS):
            buffer.append(**step(n))
            assert reader.look() == (0, buffer.rows)
            if step(n)["terminated"]:
                buffer.end_episode(obs=frames(n + 1))
                assert reader.look() == (0, buffer.rows)


@pytest.mark.parametrize("gather", ["auto", "ctypes"])
@pytest.mark.parametrize("capacity", [None, 5 * CHUNK_ROWS])
def test_a_reader_that_looks_all_the_time_never_sees_a_wrong_row(
    tmp_path: Path, capacity: int | None, gather: str
) -> None:
    path = tmp_path / "buffer"
    rng = np.random.default_rng(0)
    zbuffer.create(path, SCHEMA, chunk_rows=CHUNK_ROWS, capacity=capacity).close()
    n = looks = 0

    with reader_of(path, gather) as reader:
        reader.look_all_the_time()
        # Writers come and go until the reader has had many looks at their work.
        while looks < 200 or n < 2000:
            with zbuffer.open(path, mode="a") as buffer:
                for _ in range(rng.integers(50, 400)):
                    buffer.append(**transition(n))
                    n += 1
                    if n % 97 == 0:
                        buffer.flush()
                    while reader.has_answered():
                        looks = reader.answer()
        reader.look_on_request()

        with zbuffer.open(path) as buffer:
            assert reader.look() == (buffer.first_row, buffer.rows)
            assert capacity is None or buffer.first_row > 0


def test_evicted_rows_are_not_found_by_a_reader_that_asks_for_them(tmp_path: Path) -> None:
    path = tmp_path / "buffer"
    writer = zbuffer.create(path, SCHEMA, chunk_rows=CHUNK_ROWS, capacity=2 * CHUNK_ROWS)
    with writer, zbuffer.open(path) as reader:
        writer.extend(**{k: np.array([step(n)[k] for n in range(16)]) for k in SCHEMA})
        assert np.array_equal(reader.take([0])["action"], [0])

        writer.extend(**{k: np.array([step(n)[k] for n in range(16, 64)]) for k in SCHEMA})
        writer.flush()

        assert reader.first_row == 48
        with pytest.raises(zbuffer.RowNotFoundError, match=r"^rows are 48 to 63, got 0 to 50$"):
            reader.take([50, 0])
        assert np.array_equal(reader.take([48, 63])["action"], [48, 63])


def test_a_reader_says_that_its_buffer_was_removed_or_replaced(tmp_path: Path) -> None:
    path = tmp_path / "buffer"
    zbuffer.create(path, SCHEMA, chunk_rows=CHUNK_ROWS).close()
    with zbuffer.open(path) as reader:
        zbuffer.create(path, {"x": ((), "int8")}, overwrite=True).close()

        with pytest.raises(zbuffer.NotABufferError) as caught:
            reader.sample(1)

        assert str(caught.value) == f"{path} was replaced by another buffer: open it anew"


def test_what_follows_a_row_is_there_when_a_flush_ends_with_its_page(tmp_path: Path) -> None:
    schema = {"obs": ((2,), "int64"), "reward": ((), "float32"), "terminated": ((), "bool")}
    writer = zbuffer.create(tmp_path / "b", schema, chunk_rows=4)
    for n in range(4):
        writer.append(obs=np.full(2, n), reward=1.0, terminated=False, next_obs=np.full(2, n + 1))
    writer.flush()

    with zbuffer.open(tmp_path / "b") as reader:
        batch = reader.sample(64, seed=0)
    killed = tmp_path / "killed"
    shutil.copytree(tmp_path / "b", killed)
    writer.close()

    newest = batch["indices"] == 3
    assert newest.any()
    assert (batch["next_obs"][newest] == 4).all()
    with zbuffer.open(killed, mode="a") as recovered:
        assert recovered["step_type"][:].tolist() == [0, 1, 1, 1, 2]
        assert recovered["obs"][-1].tolist() == [4, 4]
