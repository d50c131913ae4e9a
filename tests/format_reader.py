"""Which rows does a buffer hold? Answered from docs/format.md alone, without zbuffer or zarr.

Each function names the section of docs/format.md it follows. What the page does not
allow raises :class:`FormatError`.
"""

from __future__ import annotations

import json
import math
import re
import struct
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeVar

import blosc2
import google_crc32c
import numcodecs
import numpy as np
from numpy.typing import NDArray

Array = NDArray[Any]
Json = dict[str, Any]
Found = TypeVar("Found")

FIRST, MID, LAST, PADDING = 0, 1, 2, 255
SEGMENTS_PER_CHUNK = 256

COMMIT_KEYS = {
    "format": int,
    "uuid": str,
    "schema": dict,
    "codecs": dict,
    "chunk_rows": int,
    "segment_rows": int,
    "lanes": int,
    "capacity_rows": int | None,
    "capacity_nbytes": int | None,
    "first_row": int,
    "rows": int,
    "steps": int,
    "epoch": int,
    "snapshots": dict,
    "notes": dict,
}
ROLES = {
    "observation",
    "next_observation",
    "action",
    "reward",
    "terminated",
    "truncated",
    "extra",
}


class FormatError(Exception):
    """The directory is not what docs/format.md says."""


@dataclass(frozen=True, slots=True)
class Item:
    """What one row holds of one field."""

    dtype: np.dtype[Any]
    shape: tuple[int, ...]

    @property
    def nbytes(self) -> int:
        return self.dtype.itemsize * math.prod(self.shape)


@dataclass(frozen=True, slots=True)
class Tail:
    """The rows past the committed ones, and the observation that waits for its row."""

    first: int
    n_rows: int
    columns: Mapping[str, Array]
    is_running: bool
    pending: Mapping[str, Array] | None


def check(holds: bool, claim: str) -> None:
    """Raise unless what the page claims holds."""
    if not holds:
        raise FormatError(claim)


# -- section 2: the commit document ---------------------------------------------------


def read_commit(path: Path) -> Json:
    """Return the commit document, checked."""
    root = json.loads((path / "zarr.json").read_text())
    check(root["zarr_format"] == 3 and root["node_type"] == "group", "the root is a v3 group")
    commit: Json = root["attributes"]["zbuffer"]
    check(set(commit) == set(COMMIT_KEYS), f"keys of the commit: {sorted(commit)}")
    for key, kind in COMMIT_KEYS.items():
        check(isinstance(commit[key], kind), f"{key} is {commit[key]!r}")
    check(commit["format"] == 1, "format is 1")
    check(commit["lanes"] == 1, "lanes is 1")
    check(commit["chunk_rows"] >= 1, "chunk_rows is at least 1")
    check(commit["segment_rows"] == commit["chunk_rows"], "a segment is a chunk")
    check(commit["first_row"] % commit["chunk_rows"] == 0, "first_row begins a chunk")
    check(0 <= commit["first_row"] <= commit["rows"], "first_row is not above rows")
    check(set(commit["schema"]) == {"next_obs", "fields"}, "keys of the schema")
    check(commit["schema"]["next_obs"] in ("chained", "explicit"), "next_obs")
    check(set(commit["codecs"]) == {*commit["schema"]["fields"], "step_type"}, "a codec a field")
    for name, field in commit["schema"]["fields"].items():
        check(set(field) == {"shape", "dtype", "role"}, f"keys of {name}: {sorted(field)}")
        check(field["role"] in ROLES, f"{name} has role {field['role']}")
        parts_of(name)
    return commit


def consistently(path: Path, read: Callable[[Path, Json], Found]) -> Found:
    """Read what a commit counts; again, if a writer removed a file meanwhile."""
    while True:
        commit = read_commit(path)
        try:
            return read(path, commit)
        except FileNotFoundError:
            if read_commit(path) == commit:
                raise


def parts_of(name: str) -> list[str]:
    """Return the directories of a field; names that are no paths are refused."""
    parts = name.split("/")
    for part in parts:
        valid = re.fullmatch(r"[A-Za-z0-9_][A-Za-z0-9_.-]*", part)
        check(bool(valid) and part != "zarr.json" and part[:2] != "__", f"field name {name!r}")
    return parts


def items_of(commit: Json) -> dict[str, Item]:
    """Return what a row holds, `step_type` last."""
    fields = commit["schema"]["fields"].items()
    items = {name: Item(dtype_of(f["dtype"]), tuple(f["shape"])) for name, f in fields}
    check("step_type" not in items, "step_type is not in the schema")
    return items | {"step_type": Item(np.dtype("u1"), ())}


def dtype_of(described: Any) -> np.dtype[Any]:
    """Return the dtype that JSON describes as a `.npy` header would."""
    dtype: np.dtype[Any] = np.lib.format.descr_to_dtype(tuples_of(described))
    check(not dtype.hasobject, f"{described} is plain")
    return dtype


def tuples_of(described: Any) -> Any:
    """Return a description with the tuples that JSON made lists of."""
    if isinstance(described, str):
        return described
    return [(m[0], tuples_of(m[1]), *(tuple(shape) for shape in m[2:])) for m in described]


# -- section 3: arrays and chunks -----------------------------------------------------


def read_array(path: Path, commit: Json, name: str) -> Json:
    """Return the `zarr.json` of a field, checked against the commit."""
    item, chunk_rows = items_of(commit)[name], commit["chunk_rows"]
    node = path / "data"
    for part in parts_of(name):
        group = json.loads((node / "zarr.json").read_text())
        check(group["node_type"] == "group", f"{node} is a group")
        node /= part
    array: Json = json.loads((node / "zarr.json").read_text())
    check(array["zarr_format"] == 3 and array["node_type"] == "array", f"{name} is a v3 array")
    check(array["shape"][0] >= commit["rows"], f"{name} has all committed rows")
    check(array["shape"][1:] == list(item.shape), f"{name} has the item's shape")
    grid = {"chunk_shape": [chunk_rows, *(max(n, 1) for n in item.shape)]}
    check(array["chunk_grid"] == {"name": "regular", "configuration": grid}, f"grid of {name}")
    keys = {"name": "default", "configuration": {"separator": "/"}}
    check(array["chunk_key_encoding"] == keys, f"chunk keys of {name}")
    order = [codec["name"] for codec in array["codecs"]]
    expected = (["bytes", coder, "crc32c"] for coder in ("zbuffer.blosc2", "blosc"))
    check(order in expected, f"codecs of {name}: {order}")
    endian = array["codecs"][0].get("configuration", {}).get("endian")
    check(
        endian == endian_of(item.dtype, array["data_type"]),
        f"{name} of {item.dtype} is {endian}-endian",
    )
    if name == "step_type":
        check(array["fill_value"] == PADDING, "step_type is filled with 255")
    return array


def endian_of(dtype: np.dtype[Any], data_type: Any) -> str | None:
    """Return what the `bytes` codec must say of a dtype."""
    is_raw = isinstance(data_type, dict) and data_type["name"] == "raw_bytes"
    if dtype.itemsize == 1 or dtype.kind == "S" or is_raw:
        return None
    return "big" if dtype.str[0] == ">" else "little"


def chunk_path(path: Path, name: str, item: Item, k: int) -> Path:
    """Return the file of chunk `k` of a field."""
    return path.joinpath("data", *parts_of(name), "c", str(k), *("0" for _ in item.shape))


def read_payload(file: Path) -> bytes:
    """Return a chunk file without its checksum (section 3.3), which was right."""
    raw = file.read_bytes()
    payload, checksum = raw[:-4], raw[-4:]
    found = struct.unpack("<I", checksum)[0]
    check(google_crc32c.value(payload) == found, f"the checksum of {file}")
    return payload


def read_chunk(path: Path, commit: Json, name: str, k: int) -> Array:
    """Return all `chunk_rows` items of a chunk."""
    item, n = items_of(commit)[name], commit["chunk_rows"]
    file = chunk_path(path, name, item, k)
    if item.nbytes == 0:
        check(not file.exists(), f"{name} has no bytes, and no chunk files")
        return np.zeros((n, *item.shape), item.dtype)
    coder = read_array(path, commit, name)["codecs"][1]["name"]
    payload = read_payload(file)
    if coder == "blosc":
        decoded = bytes(numcodecs.Blosc().decode(payload))
    else:
        decoded = blosc2.decompress2(payload, nthreads=1)
    check(len(decoded) == n * item.nbytes, f"{file} holds {n} items")
    return np.frombuffer(decoded, item.dtype).reshape(n, *item.shape)


def read_column(path: Path, commit: Json, name: str) -> Array:
    """Return a field at the ids ``[first_row, rows)``, whether live or not."""
    item, n = items_of(commit)[name], commit["chunk_rows"]
    read_array(path, commit, name)
    chunks = range(commit["first_row"] // n, -(-commit["rows"] // n))
    column = np.zeros((len(chunks) * n, *item.shape), item.dtype)
    for i, k in enumerate(chunks):
        column[i * n : i * n + n] = read_chunk(path, commit, name, k)
    n_committed = commit["rows"] - commit["first_row"]
    # Of a buffer that is written, chunk files come before the commit that counts their rows.
    if not (path / "tail").exists():
        absent = set(column[n_committed:].tobytes())
        check(absent <= {PADDING if name == "step_type" else 0}, f"{name} of rows that are not")
    return column[:n_committed]


# -- section 1: rows ------------------------------------------------------------------


def read_ids(path: Path, commit: Json | None = None) -> NDArray[np.int64]:
    """Return the ids of the live committed rows, oldest first."""
    commit = commit or read_commit(path)
    kinds = read_column(path, commit, "step_type")
    check(bool(np.isin(kinds, [FIRST, MID, LAST, PADDING]).all()), "kinds of rows")
    check(int(np.isin(kinds, [FIRST, MID]).sum()) == commit["steps"], "steps of the commit")
    return commit["first_row"] + np.flatnonzero(kinds != PADDING)


def read_field(path: Path, name: str) -> Array:
    """Return a field (or `step_type`) at every live committed row, oldest first."""
    commit = read_commit(path)
    ids = read_ids(path, commit)
    return read_column(path, commit, name)[ids - commit["first_row"]]


# -- section 4: segments --------------------------------------------------------------


def read_segments(path: Path) -> NDArray[np.int64]:
    """Return the table: lane, steps of the lane before, rows used; one row a segment."""
    folder = path / "meta" / "segments"
    array = json.loads((folder / "zarr.json").read_text())
    check(array["data_type"] == "int64" and array["shape"][1:] == [3], "segments are int64 (n, 3)")
    shape = array["chunk_grid"]["configuration"]["chunk_shape"]
    check(shape == [SEGMENTS_PER_CHUNK, 3], "256 segments a chunk")
    little = {"name": "bytes", "configuration": {"endian": "little"}}
    check(array["codecs"][0] == little, "segments are little-endian")
    check([c["name"] for c in array["codecs"]] == ["bytes", "crc32c"], "codecs of segments")
    n = array["shape"][0]
    n_chunks = -(-n // SEGMENTS_PER_CHUNK)
    table = np.zeros((n_chunks * SEGMENTS_PER_CHUNK, 3), "<i8")
    for k in range(n_chunks):
        file = folder / "c" / str(k) / "0"
        if file.exists():
            rows = np.frombuffer(read_payload(file), "<i8").reshape(SEGMENTS_PER_CHUNK, 3)
            table[k * SEGMENTS_PER_CHUNK : (k + 1) * SEGMENTS_PER_CHUNK] = rows
    return table[:n].astype(np.int64)


# -- section 7: the tail --------------------------------------------------------------


def read_tail(path: Path) -> Tail:
    """Return the rows past the committed ones, from a writer on this host."""
    while True:
        commit = read_commit(path)
        try:
            return tail_of(path, commit)
        except FileNotFoundError:
            # A page went because its rows were committed; if they were not, it is missing.
            check(read_commit(path)["rows"] > commit["rows"], "pages have no gap")


def read_live(path: Path) -> tuple[NDArray[np.int64], dict[str, Array]]:
    """Return ids and fields of all live rows, committed and not, as of one commit."""

    def read(path: Path, commit: Json) -> tuple[NDArray[np.int64], dict[str, Array]]:
        ids = read_ids(path, commit)
        live = ids - commit["first_row"]
        columns = {name: read_column(path, commit, name)[live] for name in items_of(commit)}
        tail = tail_of(path, commit)
        if read_commit(path) != commit:
            # Pages go when their chunks are committed: what was read may lack some.
            raise FileNotFoundError("the commit has changed")
        ids = np.concatenate((ids, tail.first + np.arange(tail.n_rows)))
        return ids, {
            name: np.concatenate((column, tail.columns[name])).astype(column.dtype)
            for name, column in columns.items()
        }

    return consistently(path, read)


def tail_of(path: Path, commit: Json) -> Tail:
    """Return the rows past those of `commit`."""
    items, n, rows = items_of(commit), commit["chunk_rows"], commit["rows"]
    pieces = {name: [np.zeros((0, *i.shape), i.dtype)] for name, i in items.items()}
    stop, is_running, pending = rows, False, None
    for k in pages_of(path, commit):
        count, running, has_pending, page = read_page(path / "tail" / str(k), commit, k)
        if k * n + count < rows or (count, running, has_pending) == (0, False, False):
            continue
        check(stop == rows or stop == k * n, "all pages but the last are full")
        for name, piece in pieces.items():
            piece.append(page[name][max(rows - k * n, 0) : count])
        stop, is_running, pending = k * n + count, running, None
        if has_pending:
            fields = commit["schema"]["fields"].items()
            pending = {name: page[name][count] for name, f in fields if f["role"] == "observation"}
    columns = {name: np.concatenate(piece) for name, piece in pieces.items()}
    return Tail(rows, stop - rows, columns, is_running, pending)


def pages_of(path: Path, commit: Json) -> range:
    """Return the chunks that have a page, from that of the newest committed row on."""
    folder, n = path / "tail", commit["chunk_rows"]
    found = sorted(int(page.name) for page in folder.iterdir()) if folder.exists() else []
    # Where `rows` fills a chunk, the page after it may not be there yet, and the page of
    # the newest row holds what is pending.
    first = max(commit["rows"] - 1, 0) // n
    found = [k for k in found if k >= first]
    return range(max(first, found[0]) if found else 0, found[-1] + 1 if found else 0)


def read_page(file: Path, commit: Json, k: int) -> tuple[int, bool, bool, dict[str, Array]]:
    """Return the count of rows, whether the episode runs, whether one is pending, the regions."""
    n = commit["chunk_rows"]
    # The state first: rows below its count never change, whatever is read after it.
    with file.open("rb", buffering=0) as opened:
        header = opened.read(4096)
        raw = header + opened.read()
    magic, version, zero, size, chunk, epoch = struct.unpack_from("=8sIIqqq", raw, 0)
    check(magic == b"zbuftail" and version == 1 and zero == 0, f"{file} is a page")
    check(size == len(raw), f"{file} has its size")
    check(chunk == k, f"{file} is of chunk {k}")
    check(epoch <= commit["epoch"], f"{file} is not of a later writer")
    state = struct.unpack_from("=q", raw, 64)[0]
    count, is_running, is_pending = state >> 2, bool(state & 2), bool(state & 1)
    check(0 <= count <= n, f"{file} has {count} rows")
    regions, offset = {}, 4096
    for name, item in items_of(commit).items():
        region = np.frombuffer(raw, np.uint8, (n + 1) * item.nbytes, offset)
        regions[name] = region.view(item.dtype).reshape(n + 1, *item.shape)
        offset += -(-region.nbytes // 64) * 64
    check(offset == len(raw), f"{file} ends where its last region ends")
    return count, is_running, is_pending, regions
