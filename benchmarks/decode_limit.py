"""How long does it take to decode the blocks that a batch touches, and nothing else?

The blocks are handed one by one to the zstd or LZ4 decoder inside the blosc2 wheel,
on one core, each into the same scratch memory: no planning, no threads, no batch.
"""

from __future__ import annotations

import ctypes
from collections.abc import Callable
from pathlib import Path

import blosc2
import numpy as np

HEADER_NBYTES = 32
LZ4, ZSTD = 1, 4  # codec numbers in a chunk's flags


def library() -> ctypes.CDLL | None:
    """Return the blosc2 wheel's library, which exports its zstd and LZ4; None without."""
    folder = Path(blosc2.__file__).parent / "lib"
    for name in ("libblosc2.so", "libblosc2.dylib"):
        if (folder / name).exists():
            return ctypes.CDLL(str(folder / name))
    return None


class BlockDecoder:
    """The blocks of one field of a closed, local buffer with one lane."""

    def __init__(self, lib: ctypes.CDLL, field: Path, row_nbytes: int) -> None:
        folders = sorted((field / "c").iterdir(), key=lambda folder: int(folder.name))
        self._chunks = [_read_chunk(folder) for folder in folders]
        nbytes, self._block_nbytes = self._chunks[0][4:12].view("<i4").tolist()
        self._block_rows = self._block_nbytes // row_nbytes
        self._blocks_per_chunk = -(-nbytes // self._block_nbytes)
        self._scratch = np.empty(self._block_nbytes, np.uint8)
        self._codec = int(self._chunks[0][2]) >> 5
        self._decode = self._decoder(lib)

    def _decoder(self, lib: ctypes.CDLL) -> Callable[..., int]:
        """Return the function of the codec, with its types declared."""
        void, size = ctypes.c_void_p, ctypes.c_size_t
        if self._codec == LZ4:
            lib.LZ4_decompress_safe.argtypes = [void, void, ctypes.c_int, ctypes.c_int]
            return lib.LZ4_decompress_safe
        lib.ZSTD_createDCtx.restype = void
        lib.ZSTD_decompressDCtx.restype = size
        lib.ZSTD_decompressDCtx.argtypes = [void, void, size, void, size]
        self._context = lib.ZSTD_createDCtx()
        return lib.ZSTD_decompressDCtx

    def calls(self, rows: np.ndarray) -> list[tuple[int, ...]]:
        """Return the arguments of one decoder call for each block that holds any of `rows`."""
        calls = []
        for block in np.unique(rows // self._block_rows).tolist():
            chunk = self._chunks[block // self._blocks_per_chunk]
            at = HEADER_NBYTES + 4 * (block % self._blocks_per_chunk)
            start = int(chunk[at : at + 4].view("<i4")[0])
            size = int(chunk[start : start + 4].view("<i4")[0])
            if 0 < size < self._block_nbytes:  # others are stored raw, or as one repeated byte
                calls.append(self._arguments(chunk.ctypes.data + start + 4, size))
        return calls

    def _arguments(self, source: int, size: int) -> tuple[int, ...]:
        scratch, room = self._scratch.ctypes.data, self._block_nbytes
        if self._codec == LZ4:
            return (source, scratch, size, room)
        return (self._context, scratch, room, source, size)

    def empty(self, calls: list[tuple[int, ...]]) -> list[tuple[int, ...]]:
        """Return as many calls with nothing to decode: what calling through ctypes costs."""
        return [self._arguments(self._scratch.ctypes.data, 0)] * len(calls)

    def run(self, calls: list[tuple[int, ...]]) -> None:
        """Decode the blocks of `calls`, one after the other."""
        decode = self._decode
        for arguments in calls:
            decode(*arguments)


def _read_chunk(folder: Path) -> np.ndarray:
    (file,) = (path for path in folder.rglob("*") if path.is_file())
    return np.fromfile(file, np.uint8)
