"""Blosc2 as a codec of Zarr v3: a bare Blosc2 chunk for a chunk of an array.

The payload is that of ``imagecodecs_blosc2``; only the name differs, until one is
registered with zarr-extensions. Loaded by Zarr through the entry point
``zbuffer.blosc2``.
"""

from __future__ import annotations

import asyncio
from dataclasses import dataclass
from typing import Any, Self

import blosc2
from zarr.abc.codec import BytesBytesCodec

CODEC_NAME = "zbuffer.blosc2"


@dataclass(frozen=True)
class Blosc2Codec(BytesBytesCodec):
    """A bare Blosc2 chunk, its blocks unsplit.

    Parameters
    ----------
    cname, clevel, shuffle, typesize, blocksize
        As Blosc2 has them; ``shuffle`` is ``"noshuffle"``, ``"shuffle"`` or
        ``"bitshuffle"``; ``blocksize`` is in bytes, 0 lets Blosc2 choose. Used
        for encoding; a chunk says itself how it is decoded.
    """

    is_fixed_size = False

    cname: str = "zstd"
    clevel: int = 5
    shuffle: str = "noshuffle"
    typesize: int = 1
    blocksize: int = 0

    def __post_init__(self) -> None:
        if self.shuffle not in _FILTERS:
            raise ValueError(f"shuffle must be one of {', '.join(_FILTERS)}, got {self.shuffle!r}")

    @classmethod
    def from_dict(cls, data: dict[str, Any]) -> Self:
        """Read the codec off its entry in ``zarr.json``."""
        return cls(**data.get("configuration", {}))

    def to_dict(self) -> dict[str, Any]:
        """Return the codec's entry for ``zarr.json``."""
        configuration = {
            "cname": self.cname,
            "clevel": self.clevel,
            "shuffle": self.shuffle,
            "typesize": self.typesize,
            "blocksize": self.blocksize,
        }
        return {"name": CODEC_NAME, "configuration": configuration}

    def compute_encoded_size(self, input_byte_length: int, chunk_spec: Any) -> int:
        """Raise: the size is known only after encoding."""
        raise NotImplementedError

    def _decode_sync(self, chunk_bytes: Any, chunk_spec: Any) -> Any:
        raw = blosc2.decompress2(chunk_bytes.as_numpy_array(), nthreads=1)
        return chunk_spec.prototype.buffer.from_bytes(raw)

    def _encode_sync(self, chunk_bytes: Any, chunk_spec: Any) -> Any:
        packed = compress(
            chunk_bytes.as_numpy_array(),
            typesize=self.typesize,
            blocksize=self.blocksize,
            cname=self.cname,
            clevel=self.clevel,
            shuffle=self.shuffle,
        )
        return chunk_spec.prototype.buffer.from_bytes(packed)

    async def _decode_single(self, chunk_bytes: Any, chunk_spec: Any) -> Any:
        return await asyncio.to_thread(self._decode_sync, chunk_bytes, chunk_spec)

    async def _encode_single(self, chunk_bytes: Any, chunk_spec: Any) -> Any:
        return await asyncio.to_thread(self._encode_sync, chunk_bytes, chunk_spec)


def compress(
    raw: Any, *, typesize: int, blocksize: int, cname: str, clevel: int, shuffle: str
) -> bytes:
    """Return `raw` as one bare Blosc2 chunk, by python-blosc2, on this thread."""
    packed: bytes = blosc2.compress2(
        raw,
        codec=blosc2.Codec[cname.upper()],
        clevel=clevel,
        typesize=typesize,
        blocksize=blocksize,
        # Filters run from the first place to the last: one filter goes last, as in C.
        filters=[*[blosc2.Filter.NOFILTER] * 5, _FILTERS[shuffle]],
        filters_meta=[0] * 6,
        splitmode=blosc2.SplitMode.NEVER_SPLIT,
        # More than one thread hangs in a forked child.
        nthreads=1,
    )
    return packed


_FILTERS = {
    "noshuffle": blosc2.Filter.NOFILTER,
    "shuffle": blosc2.Filter.SHUFFLE,
    "bitshuffle": blosc2.Filter.BITSHUFFLE,
}
