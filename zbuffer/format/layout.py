"""Where things lie inside a buffer, and the Zarr metadata that describes them."""

from __future__ import annotations

import json
import warnings
from collections.abc import Mapping
from typing import Any

import numpy as np

from zbuffer.format.commit import NO_ROW, Commit
from zbuffer.format.geometry import Codec
from zbuffer.schema import STEP_TYPE, Field

ROOT = "zarr.json"
LOCK = "writer.lock"
TAIL = "tail"
PARTIAL = ".partial"
SEGMENTS = "meta/segments"
#: Rows of the segment table in one of its chunks.
SEGMENT_CHUNK = 256
PRIORITIES = "meta/priorities"
#: Rows in one chunk of the priorities.
PRIORITY_CHUNK = 1 << 13


def field_path(name: str) -> str:
    """Return the directory of a field's array."""
    return f"data/{name}"


def chunk_path(name: str, field: Field, chunk: int) -> str:
    """Return the key of one chunk of a field."""
    return "/".join([field_path(name), "c", str(chunk), *("0" for _ in field.shape)])


def segments_path(chunk: int) -> str:
    """Return the key of one chunk of the segment table."""
    return f"{SEGMENTS}/c/{chunk}/0"


def root_document(commit: Commit) -> dict[str, Any]:
    """Return the root ``zarr.json``: a Zarr v3 group that carries the commit."""
    return {
        "zarr_format": 3,
        "node_type": "group",
        "attributes": {"zbuffer": commit.to_json()},
    }


def group_paths(names: list[str]) -> list[str]:
    """Return the groups between the root and the arrays, parents first."""
    groups = {"data": None, "meta": None}
    for name in names:
        parts = name.split("/")[:-1]
        for i in range(len(parts)):
            groups["data/" + "/".join(parts[: i + 1])] = None
    return list(groups)


def array_document(field: Field, codec: Codec, chunk_rows: int, *, fill: int = 0) -> dict[str, Any]:
    """Return the ``zarr.json`` of a field's array with no rows yet.

    The data type and fill value are named by zarr-python, the rest is ours.
    Dtypes that Zarr has no name for are described as raw bytes; the commit
    document has their NumPy dtype.
    """
    document = _described_by_zarr(field.dtype, fill)
    document["shape"] = [0, *field.shape]
    document["chunk_grid"] = {
        "name": "regular",
        "configuration": {"chunk_shape": [chunk_rows, *(max(n, 1) for n in field.shape)]},
    }
    raw = "raw_bytes" in str(document["data_type"])
    document["codecs"] = [
        _bytes_codec(field.dtype, raw=raw),
        _zarr_codec(codec, field),
        {"name": "crc32c"},
    ]
    return document


def segments_document() -> dict[str, Any]:
    """Return the ``zarr.json`` of the segment table with no segments yet."""
    document = _described_by_zarr(np.dtype("<i8"), 0)
    document["shape"] = [0, 3]
    document["chunk_grid"] = {
        "name": "regular",
        "configuration": {"chunk_shape": [SEGMENT_CHUNK, 3]},
    }
    document["codecs"] = [
        {"name": "bytes", "configuration": {"endian": "little"}},
        {"name": "crc32c"},
    ]
    return document


def priorities_path(chunk: int) -> str:
    """Return the key of one chunk of the priorities."""
    return f"{PRIORITIES}/c/{chunk}"


def priorities_document(rows: int, max_priority: float) -> dict[str, Any]:
    """Return the ``zarr.json`` of the priorities."""
    document = _described_by_zarr(np.dtype("<f8"), 0)
    document["shape"] = [rows]
    document["chunk_grid"] = {
        "name": "regular",
        "configuration": {"chunk_shape": [PRIORITY_CHUNK]},
    }
    document["codecs"] = [
        {"name": "bytes", "configuration": {"endian": "little"}},
        {"name": "crc32c"},
    ]
    document["attributes"] = {"max_priority": max_priority}
    return document


def with_rows(document: Mapping[str, Any], rows: int) -> dict[str, Any]:
    """Return an array's document with another number of rows."""
    return {**document, "shape": [rows, *document["shape"][1:]]}


def array_documents(commit: Commit) -> dict[str, dict[str, Any]]:
    """Return every array's ``zarr.json``, by its directory."""
    documents = {
        field_path(name): array_document(
            field,
            commit.codecs[name],
            commit.chunk_rows,
            fill=NO_ROW if name == STEP_TYPE else 0,
        )
        for name, field in commit.fields.items()
    }
    documents[SEGMENTS] = segments_document()
    return documents


def dump(document: Mapping[str, Any]) -> bytes:
    """Return a document as the bytes of its file."""
    return json.dumps(document, indent=1, allow_nan=False).encode()


def _zarr_codec(codec: Codec, field: Field) -> dict[str, Any]:
    typesize = blosc_typesize(field)
    shuffle = "shuffle" if codec.shuffle else "noshuffle"
    assert codec.block_rows is not None
    configuration = {
        "cname": codec.cname,
        "clevel": codec.clevel,
        "shuffle": shuffle,
        "typesize": typesize,
        "blocksize": codec.block_rows * field.nbytes,
    }
    return {
        "name": "blosc" if codec.name == "blosc" else "zbuffer.blosc2",
        "configuration": configuration,
    }


def blosc_typesize(field: Field) -> int:
    """Return the item size that Blosc is told: it counts in one byte."""
    return field.dtype.itemsize if field.dtype.itemsize <= 255 else 1


def _bytes_codec(dtype: np.dtype[Any], *, raw: bool) -> dict[str, Any]:
    """Return the `bytes` codec; `raw` says that Zarr sees plain bytes."""
    if raw or dtype.itemsize == 1 or dtype.kind == "S":
        return {"name": "bytes"}
    order = "big" if dtype.str.startswith(">") else "little"
    return {"name": "bytes", "configuration": {"endian": order}}


def _described_by_zarr(dtype: np.dtype[Any], fill: int) -> dict[str, Any]:
    import zarr

    little = dtype.newbyteorder("<")
    raw = np.dtype(f"V{dtype.itemsize}")
    with warnings.catch_warnings():
        # Zarr says that its names for text and records are not final yet.
        warnings.simplefilter("ignore")
        if dtype.names and dtype != little:
            # A record has no one byte order that the `bytes` codec could name.
            return _describe(zarr, raw, fill)[0]
        try:
            document, seen = _describe(zarr, little, fill)
        except (TypeError, ValueError):
            return _describe(zarr, raw, fill)[0]
        # Zarr drops sub-arrays and padding of records: better no names than wrong ones.
        return document if seen == little else _describe(zarr, raw, fill)[0]


def _describe(zarr: Any, dtype: np.dtype[Any], fill: int) -> tuple[dict[str, Any], np.dtype[Any]]:
    """Return Zarr's document of an array of this dtype, and the dtype that Zarr sees in it."""
    store = zarr.storage.MemoryStore()
    fill_value = np.zeros((), dtype)[()] if dtype.kind in "SUVMm" else fill
    array = zarr.create_array(
        store, shape=(1,), chunks=(1,), dtype=dtype, fill_value=fill_value, compressors=None
    )
    document: dict[str, Any] = json.loads(json.dumps(array.metadata.to_dict()))
    document.pop("storage_transformers", None)
    return document, array.dtype
