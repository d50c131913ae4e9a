"""docs/format.md against the files that zbuffer writes, through a reader of its own."""

from __future__ import annotations

import json
import struct
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import format_reader
import numcodecs
import numpy as np
import pytest

import zbuffer

CODECS = ["blosc2", "blosc"]
ZSTD_MAGIC = 0xFD2FB528
CHUNK_ROWS, BLOCK_ROWS = 16, 8

ENDS: dict[str, Any] = {
    "action": ((), "i4"),
    "reward": ((), "f4"),
    "terminated": ((), "?"),
    "truncated": ((), "?"),
}
PLAIN: dict[str, Any] = {"obs": ((6, 5), "u1"), **ENDS}
ODD: dict[str, Any] = {
    "obs/pixels": ((6, 5), "u1"),
    "obs/speed": ((2,), ">f4"),
    "when": ((), "M8[ns]"),
    "since": ((), ">m8[s]"),
    "record": ((), [("id", "<i4"), ("x", "<f8")]),
    "mixed": ((), [("id", ">i4"), ("x", "<f8", (2,))]),
    "padded": ((2,), np.dtype([("id", "u1"), ("x", "<i4")], align=True)),
    "deep": ((), [("id", [("a", "<i2")]), ("x", "<U3")]),
    "nothing": ((0, 3), "f4"),
    "text": ((), ">U8"),
    "ascii": ((2,), "S3"),
    "raw": ((), "V16"),
    "wide": ((), "V300"),
    "c": ((), ">c8"),
    **ENDS,
}


def values(dtype: Any, shape: tuple[int, ...], row: int) -> np.ndarray[Any, Any]:
    """Return one item that depends on `row`, and compresses, but not to nothing."""
    item = np.zeros(shape, np.dtype(dtype))
    if item.dtype.names:
        item["id"], item["x"] = row % 250, row // 2
    elif item.dtype.kind == "V":
        item[...] = np.frombuffer(struct.pack("<q", row).ljust(item.itemsize, b"."), item.dtype)[0]
    elif item.dtype.kind in "US":
        item[...] = np.array(f"r{row % 90}").astype(item.dtype)
    elif item.dtype.kind in "mM":
        item[...] = np.int64(row * 1000).astype(item.dtype)
    else:
        steps = np.arange(item.size).reshape(shape) // 7
        item[...] = ((row + steps) % 200).astype(item.dtype)
    return item


def stack(items: list[np.ndarray[Any, Any]]) -> np.ndarray[Any, Any]:
    """Return the items as one array, of the same byte order."""
    return np.stack(items).astype(items[0].dtype)


def row_of(schema: dict[str, Any], row: int, **changes: Any) -> dict[str, Any]:
    """Return a whole row as `append` takes it."""
    filled: dict[str, Any] = {}
    for name, (shape, dtype) in schema.items():
        *parents, leaf = name.split("/")
        node = filled
        for parent in parents:
            node = node.setdefault(parent, {})
        node[leaf] = values(dtype, shape, row)
    return filled | {"terminated": False, "truncated": False} | changes


def fill(buffer: zbuffer.Buffer, schema: dict[str, Any], start: int, stop: int) -> None:
    """Append steps; episodes of seven, each third one without a final observation."""
    for row in range(start, stop):
        buffer.append(**row_of(schema, row))
        if row % 7 == 6:
            final = {} if row % 3 == 0 else {"obs": row_of(schema, row + 1)["obs"]}
            buffer.end_episode(**final)


def assert_same(found: np.ndarray[Any, Any], expected: np.ndarray[Any, Any], name: str) -> None:
    """Fail unless dtype, shape and values are the same, to the bit."""
    assert (found.dtype, found.shape) == (expected.dtype, expected.shape), name
    if found.dtype.names:
        # NumPy does not copy the bytes between the members.
        assert np.array_equal(found, expected), name
    else:
        assert found.tobytes() == expected.tobytes(), name


def assert_all_read(path: Path, buffer: zbuffer.Buffer) -> None:
    """Fail unless the reader finds the live rows of `buffer`, the tail's included."""
    ids, columns = format_reader.read_live(path)
    assert ids.tolist() == list(range(buffer.first_row, buffer.rows))
    assert list(columns) == buffer.keys()
    for name, column in columns.items():
        assert_same(column, buffer[name][:], name)


def chunk_payloads(path: Path) -> Iterator[tuple[str, format_reader.Item, bytes]]:
    """Yield all chunks of all fields, without their checksums."""
    commit = format_reader.read_commit(path)
    n = commit["chunk_rows"]
    for name, item in format_reader.items_of(commit).items():
        for k in range(commit["first_row"] // n, -(-commit["rows"] // n)):
            if item.nbytes:
                file = format_reader.chunk_path(path, name, item, k)
                yield name, item, format_reader.read_payload(file)


# -- rows -----------------------------------------------------------------------------


@pytest.mark.parametrize("codec", CODECS)
@pytest.mark.parametrize("schema", [PLAIN, ODD], ids=["plain", "odd"])
def test_a_closed_buffer_holds_what_was_appended(
    tmp_path: Path, codec: str, schema: dict[str, Any]
) -> None:
    path = tmp_path / "b"
    with zbuffer.create(path, schema, chunk_rows=CHUNK_ROWS, codec=codec) as buffer:
        fill(buffer, schema, 0, 39)

    commit = format_reader.read_commit(path)
    assert not (path / "tail").exists()
    assert commit["rows"] % CHUNK_ROWS != 0
    with zbuffer.open(path) as buffer:
        assert_all_read(path, buffer)
    kinds = format_reader.read_field(path, "step_type")
    steps = np.flatnonzero(kinds != format_reader.LAST)
    assert len(steps) == commit["steps"] == 39
    for name, (shape, dtype) in schema.items():
        if name not in ("terminated", "truncated"):
            expected = stack([values(dtype, shape, row) for row in range(39)])
            assert_same(format_reader.read_field(path, name)[steps], expected, name)


@pytest.mark.parametrize("codec", CODECS)
def test_a_flushed_buffer_is_read_while_it_is_open(tmp_path: Path, codec: str) -> None:
    path = tmp_path / "b"
    with zbuffer.create(path, ODD, chunk_rows=CHUNK_ROWS, codec=codec) as buffer:
        fill(buffer, ODD, 0, 20)
        buffer.flush()

        assert format_reader.read_commit(path)["rows"] == buffer.rows
        assert format_reader.read_tail(path).n_rows == 0
        assert_all_read(path, buffer)


def test_a_part_filled_chunk_is_replaced_by_a_fuller_one(tmp_path: Path) -> None:
    path = tmp_path / "b"
    with zbuffer.create(path, PLAIN, chunk_rows=CHUNK_ROWS) as buffer:
        for stop in (3, 5, 15):
            fill(buffer, PLAIN, len(buffer), stop)
            buffer.flush()
            assert_all_read(path, buffer)


def test_rows_of_the_tail_are_read_before_they_are_committed(tmp_path: Path) -> None:
    path = tmp_path / "b"
    with zbuffer.create(path, ODD, chunk_rows=CHUNK_ROWS) as buffer:
        fill(buffer, ODD, 0, 5)

        tail = format_reader.read_tail(path)
        assert format_reader.read_commit(path)["rows"] == 0
        assert (tail.n_rows, tail.is_running, tail.pending) == (5, True, None)
        assert_all_read(path, buffer)


def test_a_tail_of_many_pages_is_read_while_chunks_are_sealed(tmp_path: Path) -> None:
    path = tmp_path / "b"
    with zbuffer.create(path, PLAIN, chunk_rows=4) as buffer:
        for start in range(0, 60, 3):
            fill(buffer, PLAIN, start, start + 3)
            assert_all_read(path, buffer)


def test_rows_of_the_tail_follow_the_flushed_ones(tmp_path: Path) -> None:
    path = tmp_path / "b"
    with zbuffer.create(path, PLAIN, chunk_rows=CHUNK_ROWS) as buffer:
        fill(buffer, PLAIN, 0, 5)
        buffer.flush()
        fill(buffer, PLAIN, 5, 7)

        tail = format_reader.read_tail(path)
        assert (tail.first, tail.n_rows, tail.is_running) == (5, 2, False)
        assert_all_read(path, buffer)


@pytest.mark.parametrize("n_steps", [1, CHUNK_ROWS - 1, CHUNK_ROWS, CHUNK_ROWS + 1])
@pytest.mark.parametrize("is_flushed", [False, True])
def test_the_pending_observation_is_in_the_tail(
    tmp_path: Path, n_steps: int, is_flushed: bool
) -> None:
    path = tmp_path / "b"
    with zbuffer.create(path, PLAIN, chunk_rows=CHUNK_ROWS) as buffer:
        for row in range(n_steps):
            buffer.append(**row_of(PLAIN, row), next_obs=row_of(PLAIN, row + 1)["obs"])
        if is_flushed:
            buffer.flush()

        tail = format_reader.read_tail(path)
        assert tail.is_running
        assert tail.pending is not None
        assert_same(tail.pending["obs"], values("u1", (6, 5), n_steps), "obs")


def test_a_pending_observation_becomes_a_last_row_of_zeros_otherwise(tmp_path: Path) -> None:
    path = tmp_path / "b"
    with zbuffer.create(path, PLAIN, chunk_rows=CHUNK_ROWS) as buffer:
        for row in range(1, 4):
            next_obs = row_of(PLAIN, row + 1)["obs"]
            buffer.append(**row_of(PLAIN, row, truncated=row == 3), next_obs=next_obs)

    assert format_reader.read_field(path, "step_type").tolist() == [0, 1, 1, 2]
    assert_same(format_reader.read_field(path, "obs")[-1], values("u1", (6, 5), 4), "obs")
    for name in ENDS:
        assert not format_reader.read_field(path, name)[-1]


@pytest.mark.parametrize("codec", CODECS)
def test_evicted_rows_leave_the_others_as_they_were(tmp_path: Path, codec: str) -> None:
    path = tmp_path / "b"
    with zbuffer.create(path, ODD, capacity=40, chunk_rows=CHUNK_ROWS, codec=codec) as buffer:
        fill(buffer, ODD, 0, 100)
        buffer.flush()

        assert format_reader.read_commit(path)["first_row"] > 0
        assert_all_read(path, buffer)

    commit = format_reader.read_commit(path)
    assert commit["capacity_rows"] == 40
    kept = range(commit["first_row"] // CHUNK_ROWS, -(-commit["rows"] // CHUNK_ROWS))
    for name, item in format_reader.items_of(commit).items():
        chunks = format_reader.chunk_path(path, name, item, 0)
        while chunks.name != "c":
            chunks = chunks.parent
        found = sorted(int(chunk.name) for chunk in chunks.iterdir()) if item.nbytes else list(kept)
        assert found == list(kept), name
    with zbuffer.open(path) as buffer:
        assert_all_read(path, buffer)


def test_rows_of_an_explicit_schema_do_not_chain(tmp_path: Path) -> None:
    path = tmp_path / "b"
    fields = {"obs": ((3,), ">f4"), "next_obs": ((3,), ">f4"), **ENDS}
    schema = zbuffer.Schema(fields, next_obs="explicit")
    with zbuffer.create(path, schema, chunk_rows=CHUNK_ROWS) as buffer:
        for row in range(20):
            next_obs = values(">f4", (3,), 3 * row + 1)
            buffer.append(**row_of(fields, row, next_obs=next_obs, terminated=row % 6 == 5))
        assert_all_read(path, buffer)

    commit = format_reader.read_commit(path)
    assert commit["schema"]["next_obs"] == "explicit"
    assert commit["schema"]["fields"]["next_obs"]["role"] == "next_observation"
    assert format_reader.LAST not in format_reader.read_field(path, "step_type")
    expected = stack([values(">f4", (3,), 3 * row + 1) for row in range(20)])
    assert_same(format_reader.read_field(path, "next_obs"), expected, "next_obs")


def test_an_episode_does_not_go_on_over_a_reopening(tmp_path: Path) -> None:
    path = tmp_path / "b"
    with zbuffer.create(path, PLAIN, chunk_rows=CHUNK_ROWS) as buffer:
        fill(buffer, PLAIN, 0, 3)
    assert format_reader.read_commit(path)["epoch"] == 1

    with zbuffer.open(path, "a") as buffer:
        assert format_reader.read_commit(path)["epoch"] == 2
        buffer.append(**row_of(PLAIN, 3))
        assert_all_read(path, buffer)

    assert format_reader.read_field(path, "step_type").tolist() == [0, 1, 1, 0]


# -- the commit document and the segments ---------------------------------------------


def test_counts_of_the_commit_are_those_of_the_rows(tmp_path: Path) -> None:
    path = tmp_path / "b"
    with zbuffer.create(
        path, PLAIN, capacity=40, chunk_rows=CHUNK_ROWS, notes={"env": "pong"}
    ) as buffer:
        fill(buffer, PLAIN, 0, 100)
        buffer.flush()
        commit = format_reader.read_commit(path)

        assert commit["rows"] == buffer.rows
        assert commit["first_row"] == buffer.first_row
        assert commit["steps"] == len(buffer)
        assert commit["notes"] == {"env": "pong"}
        assert commit["snapshots"] == {}
        assert commit["epoch"] == 1
        assert format_reader.read_ids(path).tolist() == list(range(buffer.first_row, buffer.rows))


def test_segments_count_the_steps_before_them_and_their_rows(tmp_path: Path) -> None:
    path = tmp_path / "b"
    kinds: list[int] = []
    with zbuffer.create(path, PLAIN, capacity=40, chunk_rows=CHUNK_ROWS) as buffer:
        for start in range(0, 100, 4):
            first = len(kinds)
            fill(buffer, PLAIN, start, start + 4)
            kinds += buffer["step_type"][first - buffer.first_row :].tolist()

    commit, segments = format_reader.read_commit(path), format_reader.read_segments(path)
    assert len(kinds) == commit["rows"]
    for k in range(commit["first_row"] // CHUNK_ROWS, -(-commit["rows"] // CHUNK_ROWS)):
        start, stop = k * CHUNK_ROWS, min((k + 1) * CHUNK_ROWS, commit["rows"])
        n_before = sum(kind != format_reader.LAST for kind in kinds[:start])
        assert segments[k].tolist() == [0, n_before, stop - start]


def test_more_than_one_chunk_of_segments(tmp_path: Path) -> None:
    path = tmp_path / "b"
    schema = {"obs": ((), "u1")}
    with zbuffer.create(path, schema, chunk_rows=1) as buffer:
        buffer.extend(obs=np.arange(300, dtype="u1"))

    expected = [[0, k, 1] for k in range(300)]
    assert format_reader.read_segments(path)[:300].tolist() == expected


@pytest.mark.parametrize("name", ["", "a//b", "../a", "a/..", ".a", "__a", "a/__b", "zarr.json"])
def test_names_that_are_no_paths_are_refused(tmp_path: Path, name: str) -> None:
    path = tmp_path / "b"
    zbuffer.create(path, {"obs": ((), "u1")}).close()
    root = json.loads((path / "zarr.json").read_text())
    commit = root["attributes"]["zbuffer"]
    for fields in (commit["schema"]["fields"], commit["codecs"]):
        fields[name] = fields["obs"]
    (path / "zarr.json").write_text(json.dumps(root))

    with pytest.raises(format_reader.FormatError, match="field name"):
        format_reader.read_commit(path)
    with pytest.raises(zbuffer.ZBufferError):
        zbuffer.open(path)


# -- chunks ---------------------------------------------------------------------------


def blosc2_header(payload: bytes) -> dict[str, int]:
    n_bytes, block_size, size = struct.unpack_from("<iii", payload, 4)
    return {
        "flags": payload[2],
        "typesize": payload[3],
        "nbytes": n_bytes,
        "blocksize": block_size,
        "size": size,
        "special": payload[31] >> 4 & 7,
    }


def unshuffle(block: bytes, typesize: int) -> bytes:
    whole = len(block) // typesize * typesize
    planes = np.frombuffer(block[:whole], np.uint8).reshape(typesize, -1)
    return planes.T.tobytes() + block[whole:]


def blosc2_blocks(payload: bytes) -> Iterator[tuple[str, bytes]]:
    """Yield how each block is stored, and its bytes: section 3.2 under "Inside"."""
    header = blosc2_header(payload)
    n_blocks = -(-header["nbytes"] // header["blocksize"])
    for i, start in enumerate(struct.unpack_from(f"<{n_blocks}i", payload, 32)):
        n_bytes = min(header["blocksize"], header["nbytes"] - i * header["blocksize"])
        size = struct.unpack_from("<i", payload, start)[0]
        stream = payload[start + 4 : start + 4 + max(size, 0)]
        if size <= 0:
            kind, block = "run", bytes([-size]) * n_bytes
        elif size == n_bytes:
            kind, block = "stored", stream
        else:
            assert struct.unpack_from("<I", stream)[0] == ZSTD_MAGIC
            kind, block = "zstd", bytes(numcodecs.Zstd().decode(stream))
        assert len(block) == n_bytes
        yield kind, unshuffle(block, header["typesize"]) if payload[21] else block


def write_blocks(path: Path, schema: dict[str, Any], **options: Any) -> None:
    options = {"chunk_rows": CHUNK_ROWS, "block_rows": BLOCK_ROWS} | options
    with zbuffer.create(path, schema, **options) as buffer:
        fill(buffer, schema, 0, 60)


@pytest.mark.parametrize("block_rows", [1, 3, BLOCK_ROWS, CHUNK_ROWS])
def test_a_blosc2_chunk_is_one_whose_blocks_can_be_decoded_singly(
    tmp_path: Path, block_rows: int
) -> None:
    path = tmp_path / "b"
    write_blocks(path, ODD, block_rows=block_rows)
    commit = format_reader.read_commit(path)

    for name, item, payload in chunk_payloads(path):
        header = blosc2_header(payload)
        config = format_reader.read_array(path, commit, name)["codecs"][1]["configuration"]
        assert header["nbytes"] == CHUNK_ROWS * item.nbytes
        assert header["size"] == len(payload)
        assert header["blocksize"] % item.nbytes == 0
        assert header["blocksize"] <= header["nbytes"]
        rows = commit["codecs"][name]["block_rows"]
        assert header["blocksize"] == config["blocksize"] == rows * item.nbytes
        assert header["typesize"] == config["typesize"]
        size = item.dtype.itemsize
        assert header["typesize"] == (size if size <= 255 else 1)
        assert list(payload[16:21]) == [0] * 5
        assert payload[21] == (config["shuffle"] == "shuffle")
        if not header["flags"] & 0x02:
            assert header["flags"] & 0x10
            assert header["flags"] >> 5 == 4


def test_blosc2_blocks_are_as_the_page_says(tmp_path: Path) -> None:
    path = tmp_path / "b"
    write_blocks(path, ODD)
    kinds = set()

    for name, item, payload in chunk_payloads(path):
        header = blosc2_header(payload)
        expected = format_reader.blosc2.decompress2(payload, nthreads=1)
        if header["flags"] & 0x02:
            kinds.add("copy")
            decoded = payload[32:]
        elif header["special"]:
            kinds.add("special")
            assert header["special"] == 1
            decoded = bytes(header["nbytes"])
        else:
            blocks = list(blosc2_blocks(payload))
            kinds |= {kind for kind, _ in blocks}
            decoded = b"".join(block for _, block in blocks)
        assert decoded == expected, name
        assert len(decoded) == CHUNK_ROWS * item.nbytes

    assert kinds >= {"copy", "run", "zstd"}


@pytest.mark.parametrize("value", [0, 1, 130, 255])
def test_a_run_is_minus_its_byte_and_a_token(tmp_path: Path, value: int) -> None:
    path = tmp_path / "b"
    schema = {"obs": ((64,), "u1")}
    with zbuffer.create(path, schema, chunk_rows=4, block_rows=2) as buffer:
        for row in range(4):
            run = np.full(64, value, "u1")
            buffer.append(obs=run if row < 2 else np.arange(64, dtype="u1"))

    payload = next(payload for name, _, payload in chunk_payloads(path) if name == "obs")
    start = struct.unpack_from("<i", payload, 32)[0]
    assert struct.unpack_from("<i", payload, start)[0] == -value
    assert [kind for kind, _ in blosc2_blocks(payload)] == ["run", "zstd"]


@pytest.mark.parametrize("cname", ["zstd", "lz4", "lz4hc", "zlib", "blosclz"])
@pytest.mark.parametrize("name", CODECS)
def test_every_compressor_is_read_back(tmp_path: Path, name: str, cname: str) -> None:
    path = tmp_path / "b"
    write_blocks(path, PLAIN, codec=name, cname=cname)

    with zbuffer.open(path) as buffer:
        assert_all_read(path, buffer)
    ids = {"blosclz": 0, "lz4": 1, "lz4hc": 1, "zlib": 3, "zstd": 4}
    found = {p[2] >> 5 for _, _, p in chunk_payloads(path) if not p[2] & 0x02}
    assert found == {ids[cname]}


@pytest.mark.parametrize("codec", CODECS)
def test_a_damaged_byte_is_found_by_the_checksum(tmp_path: Path, codec: str) -> None:
    path = tmp_path / "b"
    write_blocks(path, PLAIN, codec=codec)
    commit = format_reader.read_commit(path)
    file = format_reader.chunk_path(path, "obs", format_reader.items_of(commit)["obs"], 0)
    whole = file.read_bytes()

    for at in (0, len(whole) // 2, len(whole) - 1):
        damaged = bytearray(whole)
        damaged[at] ^= 0x01
        file.write_bytes(damaged)
        with pytest.raises(format_reader.FormatError, match="checksum"):
            format_reader.read_field(path, "obs")

    file.write_bytes(whole)
    assert len(format_reader.read_field(path, "obs")) == commit["rows"]


def test_a_damaged_segment_table_is_found_by_the_checksum(tmp_path: Path) -> None:
    path = tmp_path / "b"
    write_blocks(path, PLAIN)
    file = path / "meta" / "segments" / "c" / "0" / "0"
    damaged = bytearray(file.read_bytes())
    damaged[8] ^= 0x01
    file.write_bytes(damaged)

    with pytest.raises(format_reader.FormatError, match="checksum"):
        format_reader.read_segments(path)
