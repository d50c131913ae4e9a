"""The commit document: the one JSON that says which rows a buffer has."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from zbuffer.errors import DamagedError, NotABufferError
from zbuffer.format.geometry import Codec
from zbuffer.schema import STEP_TYPE, Field, Schema

FORMAT = 1
#: The built-in field that says which part of its episode a row is.
STEP_TYPE_FIELD = Field((), "uint8", "extra")
FIRST, MID, LAST, NO_ROW = 0, 1, 2, 255


@dataclass(frozen=True, slots=True)
class Commit:
    """What a buffer is and which of its rows are committed.

    Attributes
    ----------
    first_row, rows
        Committed rows are ``[first_row, rows)``.
    steps
        How many of them are steps (rows that are not LAST).
    uuid
        Names this buffer: another one that is created at its path has another.
    epoch
        Grows by one with each writer that opens the buffer.
    capacity_rows, capacity_nbytes
        The limit, if any, in rows or in bytes on disk.
    lanes
        Number of time lines. With one, ids have no gaps.
    """

    schema: Schema
    codecs: Mapping[str, Codec]
    chunk_rows: int
    uuid: str
    first_row: int = 0
    rows: int = 0
    steps: int = 0
    epoch: int = 1
    capacity_rows: int | None = None
    capacity_nbytes: int | None = None
    lanes: int = 1
    #: Rows of a segment; 0 stands for a whole chunk, as with one lane.
    segment_rows: int = 0
    notes: Mapping[str, Any] = field(default_factory=dict)

    @property
    def rows_of_segment(self) -> int:
        """Rows of a segment."""
        return self.segment_rows or self.chunk_rows

    @property
    def segments_of_chunk(self) -> int:
        """Segments of a chunk."""
        return self.chunk_rows // self.rows_of_segment

    @property
    def fields(self) -> dict[str, Field]:
        """All stored fields: the schema's, then ``step_type``."""
        return {**self.schema, STEP_TYPE: STEP_TYPE_FIELD}

    @property
    def row_nbytes(self) -> int:
        """Bytes of one uncompressed row."""
        return sum(field.nbytes for field in self.fields.values())

    @property
    def capacity(self) -> int | str | None:
        """The limit in rows, or as a text in bytes; None without one."""
        if self.capacity_nbytes is not None:
            return f"{self.capacity_nbytes}B"
        return self.capacity_rows

    @property
    def first_chunk(self) -> int:
        """Index of the oldest live chunk."""
        return self.first_row // self.chunk_rows

    @property
    def stop_chunk(self) -> int:
        """One past the index of the newest chunk that holds a committed row."""
        return -(-self.rows // self.chunk_rows)

    @property
    def stop_segment(self) -> int:
        """One past the index of the newest segment that holds a committed row."""
        return -(-self.rows // self.rows_of_segment)

    def to_json(self) -> dict[str, Any]:
        """Return the document as plain JSON values."""
        return {
            "format": FORMAT,
            "uuid": self.uuid,
            "schema": self.schema.to_json(),
            "codecs": {name: codec.to_json() for name, codec in self.codecs.items()},
            "chunk_rows": self.chunk_rows,
            "segment_rows": self.rows_of_segment,
            "lanes": self.lanes,
            "capacity_rows": self.capacity_rows,
            "capacity_nbytes": self.capacity_nbytes,
            "first_row": self.first_row,
            "rows": self.rows,
            "steps": self.steps,
            "epoch": self.epoch,
            "snapshots": {},
            "notes": dict(self.notes),
        }


def read_root(document: Any, path: str) -> Commit:
    """Read the commit out of a root ``zarr.json``.

    Raises
    ------
    NotABufferError
        The document is of something else, or of a format that is not known here.
    DamagedError
        The document is ours but does not hold together.
    """
    attributes = document.get("attributes") if isinstance(document, dict) else None
    body = attributes.get("zbuffer") if isinstance(attributes, dict) else None
    if not isinstance(body, dict):
        raise NotABufferError(f"{path} is a Zarr node but not a zbuffer")
    if body.get("format") != FORMAT:
        raise NotABufferError(
            f"{path} has format {body.get('format')!r}; this version of zbuffer reads format 1"
        )
    try:
        return _read_commit(body)
    except (KeyError, TypeError, ValueError, AttributeError) as error:
        raise DamagedError(
            f"the commit document of {path} does not hold together: {error}"
        ) from error


def _read_commit(body: Mapping[str, Any]) -> Commit:
    schema = Schema.from_json(body["schema"])
    codecs = {name: Codec(**values) for name, values in body["codecs"].items()}
    if set(codecs) != {*schema, STEP_TYPE}:
        raise ValueError("codecs and fields differ")
    numbers = {
        key: _count(body, key)
        for key in ("chunk_rows", "segment_rows", "first_row", "rows", "steps", "epoch", "lanes")
    }
    if not isinstance(body["uuid"], str):
        raise ValueError(f"uuid is {body['uuid']!r}")
    if not isinstance(body["notes"], dict):
        raise ValueError(f"notes are {body['notes']!r}")
    if numbers["chunk_rows"] < 1 or not numbers["first_row"] <= numbers["rows"]:
        raise ValueError("row counts do not fit together")
    lanes, segment_rows = numbers["lanes"], numbers["segment_rows"]
    if lanes < 1 or segment_rows < 1 or numbers["chunk_rows"] % segment_rows:
        raise ValueError("lanes and segments do not fit together")
    if lanes == 1 and segment_rows != numbers["chunk_rows"]:
        raise ValueError("with one lane a segment is a chunk")
    return Commit(
        schema=schema,
        codecs=codecs,
        uuid=body["uuid"],
        capacity_rows=_capacity(body, "capacity_rows"),
        capacity_nbytes=_capacity(body, "capacity_nbytes"),
        notes=body["notes"],
        **numbers,
    )


def _capacity(body: Mapping[str, Any], key: str) -> int | None:
    return None if body[key] is None else _count(body, key, least=1)


def _count(body: Mapping[str, Any], key: str, *, least: int = 0) -> int:
    value = body[key]
    if isinstance(value, bool) or not isinstance(value, int) or value < least:
        raise ValueError(f"{key} is {value!r}")
    return value
