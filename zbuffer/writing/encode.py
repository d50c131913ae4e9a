"""One raw chunk of one field to the bytes of its file."""

from __future__ import annotations

from typing import Any

import google_crc32c
import numpy as np

from zbuffer.format.geometry import SMALL_NBYTES, Codec
from zbuffer.format.layout import blosc_typesize
from zbuffer.schema import Field

#: How much larger a chunk may become for decoding a quarter faster.
_RAW_LITERALS_LIMIT = 1.10
_SAMPLE_BLOCKS = 4


class Encoder:
    """Compresses the chunks of one field, without the GIL.

    Parameters
    ----------
    field, codec
        What the chunks hold, and how they are coded; all choices made.
    native
        The C extension, or None.

    Notes
    -----
    Not safe to share between threads that run the python-blosc2 path.
    """

    def __init__(self, field: Field, codec: Codec, native: Any) -> None:
        assert codec.block_rows is not None
        self._codec = codec
        self._native = native
        self._typesize = blosc_typesize(field)
        self._blocksize = codec.block_rows * field.nbytes
        self._is_frames = (
            field.dtype.itemsize == 1
            and not codec.shuffle
            and codec.cname == "zstd"
            and field.nbytes > SMALL_NBYTES
        )

    def __call__(self, raw: np.ndarray[Any, Any]) -> bytes:
        """Return the chunk's file: the compressed chunk, then its crc32c."""
        data = raw.reshape(-1).view(np.uint8)
        packed = self._blosc(data) if self._codec.name == "blosc" else self._blosc2(data)
        checksum: bytes = google_crc32c.value(packed).to_bytes(4, "little")
        return packed + checksum

    def _blosc(self, data: np.ndarray[Any, Any]) -> bytes:
        from numcodecs import blosc

        # The sealing thread is not the main thread, so numcodecs uses a context
        # of its own there and releases the GIL.
        packed: bytes = blosc.compress(
            data.view(f"V{self._typesize}") if self._typesize > 1 else data,
            self._codec.cname.encode(),
            self._codec.clevel,
            blosc.SHUFFLE if self._codec.shuffle else blosc.NOSHUFFLE,
            self._blocksize,
        )
        return bytes(packed)

    def _blosc2(self, data: np.ndarray[Any, Any]) -> bytes:
        if self._native is None:
            return self._python_blosc2(data)
        return self._native_blosc2(data, raw_literals=self._is_frames and self._prefers_raw(data))

    def _native_blosc2(self, data: np.ndarray[Any, Any], *, raw_literals: bool) -> bytes:
        codec = self._codec
        packed: bytes = self._native.compress(
            data,
            self._typesize,
            self._blocksize,
            codec.cname,
            codec.clevel,
            1 if codec.shuffle else 0,
            raw_literals,
        )
        return packed

    def _prefers_raw(self, data: np.ndarray[Any, Any]) -> bool:
        """Whether uncompressed literals cost little: tried on a few blocks of the chunk."""
        n_blocks = max(data.size // self._blocksize, 1)
        sizes = [0, 0]
        for i in range(min(_SAMPLE_BLOCKS, n_blocks)):
            at = (2 * i + 1) * n_blocks // (2 * _SAMPLE_BLOCKS) * self._blocksize
            block = data[at : at + self._blocksize]
            for raw in (False, True):
                sizes[raw] += len(self._native_blosc2(block, raw_literals=raw))
        return sizes[True] <= _RAW_LITERALS_LIMIT * sizes[False]

    def _python_blosc2(self, data: np.ndarray[Any, Any]) -> bytes:
        import blosc2

        from zbuffer.format.codec import compress

        # python-blosc2 holds the GIL unless it is told otherwise, for all of its
        # users at once; so it is told only for the time of this call.
        before = blosc2.set_releasegil(True)
        try:
            return compress(
                data,
                typesize=self._typesize,
                blocksize=self._blocksize,
                cname=self._codec.cname,
                clevel=self._codec.clevel,
                shuffle="shuffle" if self._codec.shuffle else "noshuffle",
            )
        finally:
            blosc2.set_releasegil(before)
