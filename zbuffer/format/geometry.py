"""How rows are cut into chunks and blocks, and how each field is coded."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, dataclass, replace
from typing import Any, Literal

from zbuffer.errors import SchemaError
from zbuffer.schema import Field, Schema

BLOCK_NBYTES = 64 << 10
CHUNK_NBYTES = 32 << 20
#: Rows of all lanes that are not sealed, before half-filled chunks.
OPEN_NBYTES = 64 << 20
#: A chunk has to fit one Blosc2 buffer (2 GiB less its header).
MAX_CHUNK_NBYTES = (1 << 31) - 1 - 32
MAX_CHUNK_ROWS = 1 << 16
CNAMES = ("zstd", "lz4hc", "lz4", "zlib", "blosclz")
#: Rows of at most this many bytes are kept decoded by readers, and are coded
#: with one block a chunk.
SMALL_NBYTES = 64


@dataclass(frozen=True, slots=True)
class Codec:
    """How the chunks of one field are compressed.

    Parameters
    ----------
    name
        ``"blosc2"`` (default), or ``"blosc"``: the registered Zarr codec, which
        every Zarr v3 reader knows; ratio and speed are nearly the same.
    cname
        ``"zstd"`` (default, smallest), ``"lz4hc"`` (decodes two to three times
        faster, 1.5 times larger), ``"lz4"``, ``"zlib"`` or ``"blosclz"``.
    clevel
        1 (fast) to 9 (small).
    shuffle
        Byte shuffle before compression; by default for items above one byte.
    block_rows
        Rows that are decoded together; by default about 64 KiB of them.
    """

    name: Literal["blosc2", "blosc"] = "blosc2"
    cname: str = "zstd"
    clevel: int = 5
    shuffle: bool | None = None
    block_rows: int | None = None

    def __post_init__(self) -> None:
        if self.name not in ("blosc2", "blosc"):
            raise SchemaError("codec", f"must be 'blosc2' or 'blosc', got {self.name!r}")
        if self.cname not in CNAMES:
            raise SchemaError("cname", f"must be one of {', '.join(CNAMES)}, got {self.cname!r}")
        if isinstance(self.clevel, bool) or self.clevel not in range(1, 10):
            raise SchemaError("clevel", f"must be 1 to 9, got {self.clevel!r}")
        rows = self.block_rows
        if rows is not None and (isinstance(rows, bool) or not isinstance(rows, int) or rows < 1):
            raise SchemaError("block_rows", f"must be a whole number above 0, got {rows!r}")

    def to_json(self) -> dict[str, Any]:
        """Return the codec as plain JSON values."""
        return asdict(self)


def choose_chunk_rows(schema: Schema, capacity_rows: int | None) -> int:
    """Return rows per chunk: 16 to 32 MiB of the largest field, a power of two."""
    largest = max(max(field.nbytes for field in schema.values()), 1)
    rows = min(_power_of_two_below(CHUNK_NBYTES // largest), MAX_CHUNK_ROWS)
    if capacity_rows is not None:
        # Capacity is held to within a chunk: keep that small against it.
        block = _power_of_two_below(BLOCK_NBYTES // largest)
        rows = min(rows, max(block, _power_of_two_below(capacity_rows // 8)))
    return rows


def choose_segment_rows(schema: Schema, lanes: int, chunk_rows: int) -> int:
    """Return rows per segment: a power of two, so that the lanes' segments fill a chunk together.

    No more than 64 MiB of open segments, and at least a block.
    """
    if lanes == 1:
        return chunk_rows
    largest = max(max(field.nbytes for field in schema.values()), 1)
    row_nbytes = sum(field.nbytes for field in schema.values()) + 1
    block = _power_of_two_below(BLOCK_NBYTES // largest)
    rows = _power_of_two_below(OPEN_NBYTES // (lanes * row_nbytes))
    rows = min(rows, _power_of_two_below(chunk_rows // lanes))
    rows = min(max(rows, min(block, 64), 16), chunk_rows)
    # What is passed over at an early flush costs next to nothing, but is counted through.
    while chunk_rows % rows:
        rows //= 2
    return rows


def check_chunk_rows(schema: Schema, chunk_rows: int) -> None:
    """Refuse a number of rows per chunk that no chunk can hold."""
    if isinstance(chunk_rows, bool) or not isinstance(chunk_rows, int) or chunk_rows < 1:
        raise SchemaError("chunk_rows", f"must be a whole number above 0, got {chunk_rows!r}")
    for name, field in schema.items():
        if field.nbytes * chunk_rows > MAX_CHUNK_NBYTES:
            raise SchemaError(name, f"takes over 2 GiB a chunk at chunk_rows={chunk_rows}")


def check_lanes(schema: Schema, lanes: int) -> None:
    """Refuse a number of lanes that cannot be, and fields that a lane's arguments would hide."""
    if isinstance(lanes, bool) or not isinstance(lanes, int) or lanes < 1:
        raise SchemaError("lanes", f"must be a whole number above 0, got {lanes!r}")
    for name in ("lane", "lanes"):
        if lanes > 1 and name in schema:
            raise SchemaError(name, "cannot be a field of a buffer with lanes: append() takes it")


def check_segment_rows(segment_rows: int, lanes: int, chunk_rows: int) -> None:
    """Refuse a number of rows per segment that does not fit the chunks."""
    if isinstance(segment_rows, bool) or not isinstance(segment_rows, int):
        raise SchemaError("segment_rows", f"must be a whole number, got {segment_rows!r}")
    if lanes == 1 and segment_rows != chunk_rows:
        raise SchemaError("segment_rows", "is for buffers with lanes")
    least = 1 if lanes == 1 else 2
    if segment_rows < least or chunk_rows % segment_rows:
        raise SchemaError(
            "segment_rows",
            f"must be at least {least} and divide chunk_rows={chunk_rows}, got {segment_rows}",
        )


def resolve_codec(codec: Codec, field: Field, chunk_rows: int) -> Codec:
    """Fill in what the codec leaves open for this field."""
    shuffle = codec.shuffle
    if shuffle is None:
        # Shuffling single bytes moves nothing and costs a quarter of the speed.
        shuffle = field.dtype.itemsize > 1
    block_rows = codec.block_rows
    if block_rows is None:
        if field.nbytes <= SMALL_NBYTES:
            block_rows = chunk_rows
        else:
            block_rows = _power_of_two_below(BLOCK_NBYTES // field.nbytes)
    return replace(codec, shuffle=shuffle, block_rows=min(block_rows, chunk_rows))


def codecs_by_field(
    schema: Schema, codec: str | Codec | Mapping[str, Any], default: Codec
) -> dict[str, Codec]:
    """Read what the user said about codecs: one for all, or by field.

    `default` holds for the fields that a mapping leaves out.
    """
    if isinstance(codec, str):
        return dict.fromkeys(schema, replace(default, name=codec))  # type: ignore[arg-type]  # checked by Codec
    if isinstance(codec, Codec):
        return dict.fromkeys(schema, codec)
    if not isinstance(codec, Mapping):
        raise SchemaError("codec", f"must be a name, a Codec or a mapping, got {codec!r}")
    unknown = set(codec) - set(schema)
    if unknown:
        raise SchemaError(sorted(unknown)[0], "has a codec but is not in the schema")
    return {name: _one_codec(codec.get(name, default), default) for name in schema}


def _one_codec(value: Any, default: Codec) -> Codec:
    if isinstance(value, Codec):
        return value
    if isinstance(value, str):
        return replace(default, name=value)  # type: ignore[arg-type]  # checked by Codec
    try:
        return replace(default, **value)
    except TypeError as error:
        raise SchemaError("codec", f"is not understood: {error}") from None


def _power_of_two_below(n: int) -> int:
    """Return the largest power of two that is at most `n`, and at least 1."""
    return 1 << max(int(n).bit_length() - 1, 0)
