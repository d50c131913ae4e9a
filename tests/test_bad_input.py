"""Bad input: a clear error from the tree, nothing written, nothing lost."""

from __future__ import annotations

import errno
import json
import math
import multiprocessing
import os
import socket
import time
from collections.abc import Iterator
from contextlib import contextmanager
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import zarr

import zbuffer
from zbuffer.storage.local import LocalStore

Array = np.ndarray[Any, Any]

CONTEXT = multiprocessing.get_context("forkserver")
CONTEXT.set_forkserver_preload([__name__, "zarr", "blosc2", "numcodecs", "google_crc32c"])

SCHEMA: dict[str, Any] = {
    "obs": ((4, 3), "uint8"),
    "action": ((), "int64"),
    "reward": ((), "float32"),
    "terminated": ((), "bool"),
}
N_STEPS = 20


def step(n: int) -> dict[str, Any]:
    return {
        "obs": np.full((4, 3), n % 251, np.uint8),
        "action": n,
        "reward": 0.5 * n,
        "terminated": n % 7 == 6,
    }


def snapshot(path: Path) -> dict[str, bytes]:
    """Return every file below a path, with its bytes."""
    files = sorted(file for file in path.rglob("*") if file.is_file())
    return {str(file.relative_to(path)): file.read_bytes() for file in files}


@contextmanager
def nothing_changes(buffer: zbuffer.Buffer) -> Iterator[None]:
    """Check that rows, episodes and files are the same before and after."""
    before = buffer.rows, len(buffer), list(buffer.episodes), buffer.take(range(buffer.rows))
    files = snapshot(Path(buffer.path))

    yield

    after = buffer.take(range(buffer.rows))
    assert (buffer.rows, len(buffer), list(buffer.episodes)) == before[:3]
    assert all(np.array_equal(after[name], before[3][name]) for name in before[3])
    assert snapshot(Path(buffer.path)) == files


@pytest.fixture
def path(tmp_path: Path) -> Path:
    """A closed buffer of 20 steps."""
    with zbuffer.create(tmp_path / "buffer", SCHEMA, chunk_rows=8) as buffer:
        for n in range(N_STEPS):
            buffer.append(**step(n))
    return tmp_path / "buffer"


@pytest.fixture
def buffer(path: Path) -> Iterator[zbuffer.Buffer]:
    """The same buffer open for writing, with a few rows more, in mid-episode."""
    with zbuffer.open(path, mode="a") as opened:
        for n in range(N_STEPS, N_STEPS + 3):
            opened.append(**step(n))
        yield opened


# -- rows that do not fit -----------------------------------------------------------------

GOOD = step(23)
BAD_ROWS = {
    "another dtype": (
        {**GOOD, "obs": np.zeros((4, 3), "float64")},
        "field 'obs' must be uint8 (4, 3), got float64 (4, 3)",
    ),
    "another shape": (
        {**GOOD, "obs": np.zeros((3, 4), "uint8")},
        "field 'obs' must be uint8 (4, 3), got uint8 (3, 4)",
    ),
    "a wider integer array": (
        {**GOOD, "obs": np.zeros((4, 3), "int64")},
        "field 'obs' must be uint8 (4, 3), got int64 (4, 3)",
    ),
    "a batch axis too many": (
        {**GOOD, "obs": np.zeros((1, 4, 3), "uint8")},
        "field 'obs' must be uint8 (4, 3), got uint8 (1, 4, 3)",
    ),
    "a float for an integer": (
        {**GOOD, "action": 1.5},
        "field 'action' must be int64 (), got float64 ()",
    ),
    "an integer beyond the dtype": (
        {**GOOD, "action": 2**63},
        "field 'action' must be int64 (), got uint64 ()",
    ),
    "a float beyond the dtype": (
        {**GOOD, "reward": 1e300},
        "field 'reward' must be float32 (), got float64 ()",
    ),
    "a number for a bool": (
        {**GOOD, "terminated": 1},
        "field 'terminated' must be bool (), got int64 ()",
    ),
    "a missing key": (
        {k: v for k, v in GOOD.items() if k != "reward"},
        "field 'reward' is missing: every row needs all fields, got action, obs, terminated",
    ),
    "no key at all": (
        {},
        "field 'obs' is missing: every row needs all fields, got nothing",
    ),
    "an extra key": (
        {**GOOD, "extra": 1},
        "field 'extra' is not in the schema, which has obs, action, reward, terminated",
    ),
    "next_obs of another dtype": (
        {**GOOD, "next_obs": np.zeros((4, 3), "float32")},
        "field 'next_obs' must be uint8 (4, 3), got float32 (4, 3)",
    ),
    "next_obs of another shape": (
        {**GOOD, "next_obs": np.zeros((4,), "uint8")},
        "field 'next_obs' must be uint8 (4, 3), got uint8 (4,)",
    ),
    "an image beyond uint8": (
        {**GOOD, "obs": [[256] * 3] * 4},
        "field 'obs' must be uint8 (4, 3), got int64 (4, 3)",
    ),
}


@pytest.mark.parametrize("kind", list(BAD_ROWS))
def test_a_row_that_does_not_fit_is_refused_and_changes_nothing(
    buffer: zbuffer.Buffer, kind: str
) -> None:
    row, message = BAD_ROWS[kind]

    with nothing_changes(buffer), pytest.raises(zbuffer.SchemaError) as caught:
        buffer.append(**row)

    assert str(caught.value) == message
    buffer.append(**step(23))
    assert buffer["action"][-1] == 23


@pytest.mark.parametrize("value", [None, object(), "text", {"a": 1}, [1, [2]]])
def test_things_that_are_no_rows_are_refused(buffer: zbuffer.Buffer, value: Any) -> None:
    for name in ("obs", "action"):
        with nothing_changes(buffer), pytest.raises(zbuffer.SchemaError):
            buffer.append(**{**GOOD, name: value})


def test_many_rows_of_which_one_array_does_not_fit_are_refused_whole(
    buffer: zbuffer.Buffer,
) -> None:
    rows = {name: np.array([step(n)[name] for n in range(23, 53)]) for name in SCHEMA}
    rows["reward"] = rows["reward"].astype("float32")

    for bad, message in [
        (
            {**rows, "obs": rows["obs"].astype("int16")},
            "field 'obs' must be uint8 (n, 4, 3), got int16 (30, 4, 3)",
        ),
        ({**rows, "action": rows["action"][:-1]}, "field 'action' has 29 rows where 'obs' has 30"),
        (
            {k: v for k, v in rows.items() if k != "action"},
            "field 'action' is missing: every row needs all fields, got obs, reward, terminated",
        ),
    ]:
        with nothing_changes(buffer), pytest.raises(zbuffer.SchemaError) as caught:
            buffer.extend(**bad)
        assert str(caught.value) == message
    assert buffer.extend(**rows) == 30


def test_an_episode_of_which_one_array_does_not_fit_is_refused_whole(path: Path) -> None:
    rows = {
        "obs": np.zeros((6, 4, 3), "uint8"),
        "action": np.arange(5),
        "reward": np.zeros(5, "float32"),
        "terminated": True,
    }
    with zbuffer.open(path, mode="a") as buffer:
        for bad in (
            {**rows, "obs": np.zeros((7, 4, 3), "uint8")},
            {**rows, "obs": np.zeros((6, 4, 3), "float32")},
            {**rows, "action": np.arange(4)},
            {**rows, "action": np.arange(5) / 2},
            {**rows, "extra": np.arange(5)},
            {k: v for k, v in rows.items() if k != "reward"},
        ):
            with nothing_changes(buffer), pytest.raises(zbuffer.SchemaError):
                buffer.add_episode(**bad)
        assert buffer.add_episode(**rows) == 5


def test_a_row_that_does_not_follow_is_refused_and_changes_nothing(
    buffer: zbuffer.Buffer,
) -> None:
    buffer.append(**step(23), next_obs=step(24)["obs"])

    with nothing_changes(buffer), pytest.raises(zbuffer.EpisodeError) as caught:
        buffer.append(**step(25))

    assert str(caught.value) == (
        "obs of field 'obs' differs from the next_obs of the row before it in the same episode: "
        "call end_episode() where an episode was cut, or create the schema with "
        "next_obs='explicit' for transitions that do not chain"
    )
    buffer.append(**step(24))


def test_ending_no_episode_is_refused(path: Path) -> None:
    with (
        zbuffer.open(path, mode="a") as buffer,
        nothing_changes(buffer),
        pytest.raises(zbuffer.EpisodeError, match=r"^no episode is running$"),
    ):
        buffer.end_episode()


# -- paths ----------------------------------------------------------------------------------


@pytest.mark.parametrize("mode", ["r", "a"])
def test_open_never_creates(tmp_path: Path, mode: Any) -> None:
    with pytest.raises(zbuffer.BufferNotFoundError) as caught:
        zbuffer.open(tmp_path / "typo", mode=mode)

    assert str(caught.value) == f"there is no zbuffer at {tmp_path}/typo"
    assert isinstance(caught.value, FileNotFoundError)
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize("mode", ["r", "a"])
@pytest.mark.parametrize(
    "content",
    [b"", b"\x89HDF\r\n\x1a\n" + bytes(64), b"{}"],
    ids=["empty", "HDF5", "JSON"],
)
def test_a_file_is_not_a_buffer(tmp_path: Path, content: bytes, mode: Any) -> None:
    file = tmp_path / "data.h5"
    file.write_bytes(content)

    with pytest.raises(zbuffer.NotABufferError) as caught:
        zbuffer.open(file, mode=mode)

    assert str(caught.value) == f"{file} is a file, not a zbuffer directory"
    for overwrite in (False, True):
        with pytest.raises(zbuffer.BufferExistsError) as exists:
            zbuffer.create(file, SCHEMA, overwrite=overwrite)
        assert str(exists.value) == f"{file} is a file"
    assert snapshot(tmp_path) == {"data.h5": content}


@pytest.mark.parametrize("mode", ["r", "a"])
def test_another_zarr_node_is_not_a_buffer(tmp_path: Path, mode: Any) -> None:
    zarr.create_group(tmp_path / "group", attributes={"mine": 1})
    zarr.create_array(tmp_path / "array", shape=(3,), dtype="int8")
    before = snapshot(tmp_path)

    for name in ("group", "array"):
        with pytest.raises(zbuffer.NotABufferError) as caught:
            zbuffer.open(tmp_path / name, mode=mode)
        assert str(caught.value) == f"{tmp_path / name} is a Zarr node but not a zbuffer"

    assert snapshot(tmp_path) == before


@pytest.mark.parametrize("mode", ["r", "a"])
def test_a_newer_format_is_refused(path: Path, mode: Any) -> None:
    document = json.loads((path / "zarr.json").read_bytes())
    document["attributes"]["zbuffer"]["format"] = 2
    (path / "zarr.json").write_text(json.dumps(document))
    before = snapshot(path)

    with pytest.raises(zbuffer.NotABufferError) as caught:
        zbuffer.open(path, mode=mode)

    assert str(caught.value) == f"{path} has format 2; this version of zbuffer reads format 1"
    assert snapshot(path) == before


def damaged_roots() -> Iterator[Any]:
    """Yield (what is damaged, the root document to the damaged bytes)."""
    yield pytest.param(lambda whole: whole[: len(whole) // 2], id="cut off")
    yield pytest.param(lambda whole: b"", id="empty")
    yield pytest.param(lambda whole: b"\xff\xfe\x00", id="not text")

    def with_value(whole: bytes, key: str, value: Any) -> bytes:
        document = json.loads(whole)
        document["attributes"]["zbuffer"][key] = value
        return json.dumps(document).encode()

    wrong: dict[str, list[Any]] = {
        "schema": [None, -1, "x", [], {}],
        "codecs": [None, -1, "x", [], {}, {"obs": {}}],
        "rows": [None, -1, "x", [], 1.5],
        "first_row": [None, -1, "x", 1000],
        "chunk_rows": [None, -1, 0, "x"],
        "epoch": [None, -1, "x"],
        "notes": [None, -1, "x"],
        "capacity_rows": [-1, "x", 0],
        "capacity_nbytes": [-1, "x", []],
        "lanes": [None, 0, "2"],
        "segment_rows": [None, 0, 7],
    }
    for key, values in wrong.items():
        for value in values:
            yield pytest.param(
                lambda whole, key=key, value=value: with_value(whole, key, value),
                id=f"{key}={value}",
            )


@pytest.mark.parametrize("mode", ["r", "a"])
@pytest.mark.parametrize("damage", list(damaged_roots()))
def test_a_damaged_root_document_is_a_damaged_error(path: Path, damage: Any, mode: Any) -> None:
    whole = (path / "zarr.json").read_bytes()
    (path / "zarr.json").write_bytes(damage(whole))
    before = snapshot(path)

    with pytest.raises(zbuffer.DamagedError) as caught:
        zbuffer.open(path, mode=mode).close()

    assert str(path) in str(caught.value)
    assert snapshot(path) == before
    (path / "zarr.json").write_bytes(whole)
    with zbuffer.open(path) as buffer:
        assert len(buffer) == N_STEPS


def test_a_directory_that_is_not_a_buffer_is_never_overwritten(tmp_path: Path) -> None:
    (tmp_path / "work").mkdir()
    (tmp_path / "work" / "thesis.tex").write_text("years")
    zarr.create_group(tmp_path / "group")
    before = snapshot(tmp_path)

    with pytest.raises(zbuffer.BufferExistsError) as directory:
        zbuffer.create(tmp_path / "work", SCHEMA, overwrite=True)
    with pytest.raises(zbuffer.BufferExistsError) as group:
        zbuffer.create(tmp_path / "group", SCHEMA, overwrite=True)

    assert str(directory.value) == (
        f"{tmp_path}/work holds something that is not a zbuffer; "
        "overwrite=True replaces only buffers"
    )
    assert str(group.value) == (
        f"{tmp_path}/group is a Zarr node but not a zbuffer; overwrite=True replaces only buffers"
    )
    assert snapshot(tmp_path) == before


def test_create_refuses_what_exists_and_overwrites_only_on_request(path: Path) -> None:
    before = snapshot(path)

    with pytest.raises(zbuffer.BufferExistsError) as caught:
        zbuffer.create(path, SCHEMA)

    assert str(caught.value) == (
        f"there is something at {path}: zbuffer.open(path, mode='a') goes on with a buffer, "
        "create(..., overwrite=True) replaces it"
    )
    assert isinstance(caught.value, FileExistsError)
    assert snapshot(path) == before
    with zbuffer.create(path, {"x": ((), "int8")}, overwrite=True) as buffer:
        assert buffer.keys() == ["x", "step_type"]
        assert buffer.rows == 0


def test_create_takes_an_empty_directory(tmp_path: Path) -> None:
    with zbuffer.create(tmp_path, SCHEMA) as buffer:
        assert len(buffer) == 0


def test_a_home_directory_is_expanded(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HOME", str(tmp_path))

    zbuffer.create("~/runs/b", SCHEMA).close()

    assert (tmp_path / "runs/b/zarr.json").exists()
    zbuffer.open("~/runs/b").close()


@pytest.mark.parametrize("url", ["s3://bucket/b", "file:///tmp/b"])
def test_urls_are_refused_by_both(url: str, tmp_path: Path, monkeypatch: Any) -> None:
    monkeypatch.chdir(tmp_path)
    message = f"{url!r} is a URL; this version opens local paths only"

    for call in (lambda: zbuffer.open(url), lambda: zbuffer.create(url, SCHEMA)):
        with pytest.raises(ValueError, match="is a URL") as caught:
            call()
        assert str(caught.value) == message

    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize("mode", ["w", "r+", "x", "", None])
def test_modes_are_r_and_a(path: Path, mode: Any) -> None:
    with pytest.raises(ValueError, match=r"^mode must be") as caught:
        zbuffer.open(path, mode=mode)

    assert str(caught.value) == f"mode must be 'r' or 'a', got {mode!r}"


# -- writers ----------------------------------------------------------------------------------


def hold(path: str, pipe: Connection) -> None:
    """Be a writer until told to stop."""
    with zbuffer.open(path, mode="a"):
        pipe.send("open")
        pipe.recv()


def assert_names_the_holder(error: zbuffer.BufferLockedError, path: Path, pid: int) -> None:
    start = f"{path} is being written by process {pid} on {socket.gethostname()} since "
    assert isinstance(error, BlockingIOError)
    assert error.errno == errno.EWOULDBLOCK
    message = error.strerror
    assert message is not None
    assert message.startswith(start)
    since = time.mktime(time.strptime(message.removeprefix(start), "%Y-%m-%d %H:%M:%S"))
    assert abs(time.time() - since) < 120


def test_a_second_writer_in_the_same_process_is_refused(buffer: zbuffer.Buffer) -> None:
    path = Path(buffer.path)

    with nothing_changes(buffer), pytest.raises(zbuffer.BufferLockedError) as caught:
        zbuffer.open(path, mode="a")

    assert_names_the_holder(caught.value, path, os.getpid())
    buffer.append(**step(23))


def test_a_second_writer_in_another_process_is_refused(path: Path) -> None:
    mine, theirs = CONTEXT.Pipe()
    child = CONTEXT.Process(target=hold, args=(str(path), theirs))
    child.start()
    with mine, theirs:
        assert mine.recv() == "open"
        assert child.pid is not None
        before = snapshot(path)

        with pytest.raises(zbuffer.BufferLockedError) as opening:
            zbuffer.open(path, mode="a")
        with pytest.raises(zbuffer.BufferLockedError) as creating:
            zbuffer.create(path, SCHEMA, overwrite=True)

        assert_names_the_holder(opening.value, path, child.pid)
        assert_names_the_holder(creating.value, path, child.pid)
        assert snapshot(path) == before
        mine.send("stop")
        child.join()
    assert child.exitcode == 0
    child.close()
    with zbuffer.open(path, mode="a") as buffer:
        assert len(buffer) == N_STEPS


def test_a_locked_buffer_is_not_overwritten(buffer: zbuffer.Buffer) -> None:
    with nothing_changes(buffer), pytest.raises(zbuffer.BufferLockedError) as caught:
        zbuffer.create(buffer.path, SCHEMA, overwrite=True)

    assert_names_the_holder(caught.value, Path(buffer.path), os.getpid())


def test_the_lock_is_free_after_an_open_that_failed(path: Path) -> None:
    chunk = path / "data/action/c/2"
    whole = chunk.read_bytes()
    chunk.write_bytes(whole[:30])
    with pytest.raises(zbuffer.DamagedError) as caught:
        zbuffer.open(path, mode="a")
    assert str(chunk) in str(caught.value)

    chunk.write_bytes(whole)

    with zbuffer.open(path, mode="a") as buffer:
        assert len(buffer) == N_STEPS


def test_a_reader_cannot_write(path: Path) -> None:
    before = snapshot(path)
    with zbuffer.open(path) as buffer:
        for call in (
            lambda: buffer.append(**step(0)),
            lambda: buffer.extend(obs=np.zeros((1, 4, 3), "uint8")),
            lambda: buffer.add_episode(obs=np.zeros((1, 4, 3), "uint8")),
            lambda: buffer.end_episode(),
            lambda: buffer.flush(),
        ):
            with pytest.raises(zbuffer.ReadOnlyError) as caught:
                call()
            assert str(caught.value) == (
                f"{path} is open for reading: zbuffer.open(path, mode='a') can write"
            )
    assert snapshot(path) == before


@pytest.mark.parametrize("mode", ["r", "a"])
def test_a_closed_buffer_says_so(path: Path, mode: Any) -> None:
    buffer = zbuffer.open(path, mode=mode)
    column = buffer["obs"]
    buffer.close()
    buffer.close()

    for call in (
        lambda: buffer.append(**step(0)),
        lambda: buffer.flush(),
        lambda: buffer.sample(1),
        lambda: buffer.loader(),
        lambda: buffer.take([0]),
        lambda: len(buffer),
        lambda: column[0],
        lambda: buffer.rows,
        lambda: buffer.episodes,
        lambda: buffer.nbytes_stored(),
    ):
        with pytest.raises(zbuffer.ClosedError) as caught:
            call()
        assert str(caught.value) == f"the buffer at {path} is closed"
    assert repr(buffer) == f"<zbuffer.Buffer {path} (closed)>"


# -- sampling -----------------------------------------------------------------------------------


def test_an_empty_buffer_is_not_sampled(tmp_path: Path) -> None:
    with zbuffer.create(tmp_path / "b", SCHEMA) as buffer:
        assert len(buffer) == 0
        for call in (lambda: buffer.sample(4), lambda: next(buffer.loader(4, prefetch=0))):
            with pytest.raises(zbuffer.SampleError) as caught:
                call()
            assert str(caught.value) == "the buffer is empty: append rows before sampling"
        with buffer.loader(4) as loader, pytest.raises(zbuffer.SampleError, match="is empty"):
            next(loader)


def test_a_buffer_without_the_window_says_which(tmp_path: Path) -> None:
    with zbuffer.create(tmp_path / "b", SCHEMA) as buffer:
        buffer.append(**step(0))

        with pytest.raises(zbuffer.SampleError) as caught:
            buffer.sample(4, n_step=3)

        assert str(caught.value) == (
            "none of the 1 rows has the window asked for (frame_stack=None, n_step=3): its stack "
            "was evicted, or the observation after it is not stored yet"
        )


@pytest.mark.parametrize(
    ("arguments", "error"),
    [
        ({"batch_size": 0}, ValueError),
        ({"batch_size": -1}, ValueError),
        ({"batch_size": 2.5}, ValueError),
        ({"batch_size": True}, ValueError),
        ({"frame_stack": 0}, ValueError),
        ({"frame_stack": 1.5}, ValueError),
        ({"n_step": 0}, ValueError),
        ({"n_step": -1}, ValueError),
        ({"gamma": math.nan}, ValueError),
        ({"gamma": "x"}, ValueError),
        ({"fields": ["obs", "reword"]}, zbuffer.SchemaError),
        ({"fields": "obs"}, zbuffer.SchemaError),
    ],
)
def test_window_arguments_that_cannot_be_are_refused(
    path: Path, arguments: dict[str, Any], error: type[Exception]
) -> None:
    with zbuffer.open(path) as buffer:
        with pytest.raises(error):
            buffer.sample(**arguments)
        with pytest.raises(error):
            buffer.loader(**arguments)


@pytest.mark.parametrize(
    "arguments",
    [{"prefetch": -1}, {"prefetch": 1.5}, {"seed": -1}, {"seed": 0.5}, {"order": "newest"}],
)
def test_loader_arguments_that_cannot_be_are_refused(path: Path, arguments: dict[str, Any]) -> None:
    with zbuffer.open(path) as buffer, pytest.raises(ValueError, match="must be"):
        buffer.loader(**arguments)


def test_rows_that_do_not_exist_are_not_found(path: Path) -> None:
    with zbuffer.open(path) as buffer:
        with pytest.raises(zbuffer.RowNotFoundError) as beyond:
            buffer.take([0, 20])
        with pytest.raises(zbuffer.RowNotFoundError) as negative:
            buffer.take([-1])
        with pytest.raises(zbuffer.RowNotFoundError) as text:
            buffer.take(["a"])
        with pytest.raises(IndexError):
            buffer["obs"][20]
        with pytest.raises(KeyError) as unknown:
            buffer["observation"]

    assert str(beyond.value) == "rows are 0 to 19, got 0 to 20"
    assert str(negative.value) == "rows are 0 to 19, got -1 to -1"
    assert str(text.value) == "row ids are whole numbers, got <U1"
    assert unknown.value.args == (
        "'observation' is not a field; fields are obs, action, reward, terminated, step_type",
    )


# -- arguments of create ---------------------------------------------------------------------------


@pytest.mark.parametrize(
    "capacity",
    [
        *(0, -1, math.nan, math.inf, -math.inf, 2.5, True),
        *("abc", "", "-5GB", "0B", "20 parrots", "nanGB", b"20GB", [1], {}, np.nan),
    ],
)
def test_a_capacity_that_cannot_be_is_refused(tmp_path: Path, capacity: Any) -> None:
    with pytest.raises(ValueError, match=r"^capacity must be") as caught:
        zbuffer.create(tmp_path / "b", SCHEMA, capacity=capacity)

    assert str(caught.value) == (
        "capacity must be a whole number of rows above 0, or bytes such as '20GB', "
        f"got {capacity!r}"
    )
    assert list(tmp_path.iterdir()) == []


BAD_CREATE = {
    "codec name": ({"codec": "blosc3"}, "field 'codec' must be 'blosc2' or 'blosc', got 'blosc3'"),
    "cname": (
        {"cname": "zst"},
        "field 'cname' must be one of zstd, lz4hc, lz4, zlib, blosclz, got 'zst'",
    ),
    "clevel 0": ({"clevel": 0}, "field 'clevel' must be 1 to 9, got 0"),
    "clevel 10": ({"clevel": 10}, "field 'clevel' must be 1 to 9, got 10"),
    "codec of an unknown field": (
        {"codec": {"pixels": "blosc"}},
        "field 'pixels' has a codec but is not in the schema",
    ),
    "codec name of a field": (
        {"codec": {"obs": "gzip"}},
        "field 'codec' must be 'blosc2' or 'blosc', got 'gzip'",
    ),
    "chunk_rows 0": ({"chunk_rows": 0}, "field 'chunk_rows' must be a whole number above 0, got 0"),
    "chunk_rows 2.5": (
        {"chunk_rows": 2.5},
        "field 'chunk_rows' must be a whole number above 0, got 2.5",
    ),
    "block_rows 0": ({"block_rows": 0}, "field 'block_rows' must be a whole number above 0, got 0"),
    "chunks over 2 GiB": (
        {"chunk_rows": 1 << 28},
        "field 'obs' takes over 2 GiB a chunk at chunk_rows=268435456",
    ),
}


@pytest.mark.parametrize("kind", list(BAD_CREATE))
def test_arguments_of_create_that_cannot_be_are_refused(tmp_path: Path, kind: str) -> None:
    arguments, message = BAD_CREATE[kind]

    with pytest.raises(zbuffer.SchemaError) as caught:
        zbuffer.create(tmp_path / "b", SCHEMA, **arguments)

    assert str(caught.value) == message
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize("codec", [5, None, {"obs": 5}, {"obs": {"level": 5}}, {"obs": None}])
def test_codecs_that_are_none_are_schema_errors(tmp_path: Path, codec: Any) -> None:
    with pytest.raises(zbuffer.SchemaError):
        zbuffer.create(tmp_path / "b", SCHEMA, codec=codec)

    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize("block_rows", [1.5, "x", True])
def test_block_rows_that_are_no_whole_number_are_schema_errors(
    tmp_path: Path, block_rows: Any
) -> None:
    with pytest.raises(zbuffer.SchemaError):
        zbuffer.create(tmp_path / "b", SCHEMA, block_rows=block_rows).close()

    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize("threads", [0, -1, "x", 1.5])
def test_threads_that_cannot_be_are_refused_and_nothing_is_written(
    tmp_path: Path, threads: Any
) -> None:
    with pytest.raises(ValueError, match="threads"):
        zbuffer.create(tmp_path / "b", SCHEMA, threads=threads).close()

    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize("notes", [{"a": object()}, {"a": math.nan}, [1], "text", {"a": {1, 2}}])
def test_notes_that_are_not_json_are_refused(tmp_path: Path, notes: Any) -> None:
    with pytest.raises(ValueError, match=r"^notes must be plain JSON"):
        zbuffer.create(tmp_path / "b", SCHEMA, notes=notes)

    assert list(tmp_path.iterdir()) == []


# -- schemas ------------------------------------------------------------------------------------

UNUSABLE = (
    "is not a usable name: parts between '/' are letters, digits, '_', '-' and '.', "
    "and start with a letter, a digit or one '_'"
)
BAD_NAMES = ["..", ".", "/abs", "a/", "a//b", "__x", "a/__b", "a/../b", "", " ", "a b", "a\\b"]
BAD_NAMES += ["a:b", "a\0", "a\n", "é", "zarr.json", "a/zarr.json", "a/.b", "-a"]


@pytest.mark.parametrize("name", BAD_NAMES)
def test_field_names_that_cannot_be_are_refused(name: str) -> None:
    with pytest.raises(zbuffer.SchemaError) as caught:
        zbuffer.Schema({"obs": ((), "int8"), name: ((), "int8")})

    assert str(caught.value) == f"field {name!r} {UNUSABLE}"


@pytest.mark.parametrize(
    "name", ["mask", "indices", "weights", "discount", "n_steps", "step_type", "is_first"]
)
def test_names_that_zbuffer_uses_are_refused(name: str) -> None:
    with pytest.raises(zbuffer.SchemaError) as caught:
        zbuffer.Schema({"obs": ((), "int8"), name: ((), "int8")})

    assert str(caught.value) == f"field {name!r} has a name that zbuffer uses itself"


BAD_SCHEMAS: dict[str, tuple[Any, str]] = {
    "case-only difference": (
        {"Obs": ((), "int8"), "obs": ((), "int8")},
        "field 'obs' differs from 'Obs' only by case, which some disks ignore",
    ),
    "case-only difference of a parent": (
        {"Obs/a": ((), "int8"), "obs/a": ((), "int8")},
        "field 'obs/a' differs from 'Obs/a' only by case, which some disks ignore",
    ),
    "a field below a field": (
        {"obs": ((), "int8"), "obs/a": ((), "int8")},
        "field 'obs/a' cannot lie below 'obs', which is a field itself",
    ),
    "no fields": ({}, "field 'obs' is missing: a schema needs at least one field"),
    "next_obs as a field": (
        {"obs": ((), "int8"), "next_obs": ((), "int8")},
        "field 'next_obs' is derived from the rows; say next_obs='explicit' to store it",
    ),
    "two rewards": (
        {"reward": ((), "f4"), "r": zbuffer.Field((), "f4", "reward")},
        "field 'r' is a second field with the role 'reward'",
    ),
    "an unknown role": (
        {"a": zbuffer.Field((), "f4", "prize")},
        "field 'a' has the role 'prize'; roles are observation, next_observation, action, "
        "reward, terminated, truncated, extra",
    ),
    "terminated that is no bool": (
        {"terminated": ((), "int8")},
        "field 'terminated' must be bool () to say how episodes end, got int8 ()",
    ),
    "a reward that is text": (
        {"reward": ((), "U4")},
        "field 'reward' must be real numbers to be a reward, got <U4 ()",
    ),
    "a negative length": (
        {"a": ((-1,), "int8")},
        "field 'a' has a negative length in its shape (-1,)",
    ),
    "over 1 GiB a row": (
        {"a": ((1 << 30,), "int8")},
        "field 'a' takes 1073741824 bytes a row; the limit is 1 GiB",
    ),
}


@pytest.mark.parametrize("kind", list(BAD_SCHEMAS))
def test_schemas_that_cannot_be_are_refused(tmp_path: Path, kind: str) -> None:
    fields, message = BAD_SCHEMAS[kind]

    with pytest.raises(zbuffer.SchemaError) as caught:
        zbuffer.create(tmp_path / "b", fields)

    assert str(caught.value) == message
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize(
    "field", [5, ((), "float33"), ((),), ("x", "int8"), None, (1.5, "int8"), ((1.5,), "int8")]
)
def test_things_that_are_no_fields_are_schema_errors(field: Any) -> None:
    with pytest.raises(zbuffer.SchemaError, match=r"^field 'a' "):
        zbuffer.Schema({"a": field})


# -- a full disk -----------------------------------------------------------------------------------


def test_a_disk_without_room_for_a_page_is_an_error_and_changes_nothing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = tmp_path / "b"
    with zbuffer.create(path, SCHEMA, chunk_rows=8) as buffer:
        for n in range(7):
            buffer.append(**step(n))
        buffer.append(**step(7), next_obs=step(8)["obs"])
        buffer.flush()

        with monkeypatch.context() as patch:
            patch.setattr(os, "posix_fallocate", refuse_to_allocate)
            for _ in range(2):
                with nothing_changes(buffer), pytest.raises(zbuffer.StorageError) as caught:
                    buffer.append(**step(8))
                assert caught.value.errno == errno.ENOSPC
                assert caught.value.filename == str(path / "tail/1")
                assert caught.value.strerror is not None
                assert caught.value.strerror.startswith("cannot write ")
                assert caught.value.strerror.endswith(f" bytes to {path}/tail/1: the disk is full")

        for n in range(8, 30):
            buffer.append(**step(n))
    with zbuffer.open(path) as buffer:
        assert np.array_equal(buffer["action"][:], np.arange(30))


def refuse_to_allocate(fd: int, offset: int, length: int) -> None:
    raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))


def test_extend_on_a_full_disk_stores_what_fitted(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    rows = {name: np.array([step(n)[name] for n in range(20)]) for name in SCHEMA}
    rows["reward"] = rows["reward"].astype("float32")
    with zbuffer.create(tmp_path / "b", SCHEMA, chunk_rows=8) as buffer:
        with monkeypatch.context() as patch:
            patch.setattr(os, "posix_fallocate", refuse_to_allocate)
            with pytest.raises(zbuffer.StorageError) as caught:
                buffer.extend(**rows)

        assert caught.value.__notes__ == [
            "steps of this call that fitted before the error are stored: "
            "len(buffer) says how many there are"
        ]
        assert np.array_equal(buffer["action"][:], np.arange(8))
        buffer.extend(**{name: values[8:] for name, values in rows.items()})
        assert np.array_equal(buffer["action"][:], np.arange(20))


def test_a_disk_without_room_for_a_new_buffer_is_an_error_and_frees_the_lock(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with monkeypatch.context() as patch:
        patch.setattr(os, "posix_fallocate", refuse_to_allocate)
        with pytest.raises(zbuffer.StorageError):
            zbuffer.create(tmp_path / "b", SCHEMA)

    with zbuffer.create(tmp_path / "b", SCHEMA, overwrite=True) as buffer:
        buffer.append(**step(0))


@pytest.mark.parametrize("what", ["data/", "meta/", "zarr.json"])
def test_a_disk_without_room_for_a_chunk_is_an_error_and_loses_no_row(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, what: str
) -> None:
    path = tmp_path / "b"
    write = LocalStore.write

    def refuse_to_write(store: LocalStore, key: str, data: bytes) -> None:
        if key.startswith(what):
            raise zbuffer.StorageError(errno.ENOSPC, f"cannot write to {key}: the disk is full")
        write(store, key, data)

    with zbuffer.create(path, SCHEMA, chunk_rows=8) as buffer:
        for n in range(12):
            buffer.append(**step(n))
        with monkeypatch.context() as patch:
            patch.setattr(LocalStore, "write", refuse_to_write)
            for n in range(12, 16):
                buffer.append(**step(n))
            for _ in range(2):
                with pytest.raises(zbuffer.StorageError, match="the disk is full"):
                    buffer.flush()
                assert np.array_equal(buffer["action"][:], np.arange(16))
                assert len(buffer) == 16
                buffer.sample(4)

        for n in range(16, 30):
            buffer.append(**step(n))
        buffer.flush()
        assert np.array_equal(buffer["action"][:], np.arange(30))
    with zbuffer.open(path) as buffer:
        assert np.array_equal(buffer["action"][:], np.arange(30))
        assert buffer["obs"][:].tobytes() == b"".join(step(n)["obs"].tobytes() for n in range(30))


def test_rows_survive_a_close_on_a_full_disk(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = tmp_path / "b"
    buffer = zbuffer.create(path, SCHEMA, chunk_rows=8)
    for n in range(12):
        buffer.append(**step(n))
    with monkeypatch.context() as patch:
        patch.setattr(LocalStore, "write", fail_to_write)
        with pytest.raises(zbuffer.StorageError, match="the disk is full"):
            buffer.close()

    with zbuffer.open(path) as reader:
        assert np.array_equal(reader["action"][:], np.arange(12))
    with zbuffer.open(path, mode="a") as again:
        assert np.array_equal(again["action"][:], np.arange(12))


def fail_to_write(store: LocalStore, key: str, data: bytes) -> None:
    raise zbuffer.StorageError(errno.ENOSPC, f"cannot write to {key}: the disk is full")


def test_a_directory_that_cannot_be_written_is_a_storage_error(tmp_path: Path) -> None:
    if os.geteuid() == 0:
        pytest.skip("root may write everywhere")
    (tmp_path / "locked").mkdir(mode=0o500)

    with pytest.raises(zbuffer.StorageError):
        zbuffer.create(tmp_path / "locked/b", SCHEMA)
