"""The gather without an extension: ctypes on the ``libblosc2`` of the blosc2 wheel."""

from __future__ import annotations

import ctypes
import threading
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

Array = np.ndarray[Any, Any]
#: Raw rows are copied in runs of at most this many bytes, so that threads share the work.
_RAW_NBYTES = 1 << 16


@dataclass(frozen=True, slots=True)
class _Plan:
    """What calls to make, and the request that they serve.

    A run is the wanted rows of one block. It is decoded straight into the batch
    where its rows and its slots are consecutive, and through scratch otherwise.

    Attributes
    ----------
    runs
        Per run: its first entry, one past its last, address and size of its chunk,
        whether that is a Blosc2 chunk, first row, number of rows from the first to
        the last, and its slot in the batch, or -1 for scratch.
    """

    items: Array
    rows: Array
    slots: Array
    runs: list[tuple[int, int, int, int, bool, int, int, int]]


class CtypesGather:
    """The gather of :class:`zbuffer.reading.gather.Gather`, a call per run of rows.

    Notes
    -----
    Safe to call from several threads, and after fork: contexts belong to threads,
    and threads are started per call.
    """

    def __init__(self) -> None:
        self._lib = _load_blosc2()
        self._local = threading.local()

    def __call__(
        self,
        dest: Array,
        row_nbytes: int,
        chunk_nbytes: int,
        addrs: Array,
        sizes: Array,
        rows: Array,
        slots: Array,
        n_threads: int,
    ) -> int:
        """Fill rows of `dest`; returns blocks decoded, or minus one minus the failed entry."""
        items = dest.reshape(-1).view(np.uint8)[: dest.nbytes // row_nbytes * row_nbytes]
        items = items.reshape(-1, row_nbytes)
        limit = np.where(sizes < 0, -sizes, chunk_nbytes // row_nbytes)
        if ((rows < 0) | (rows >= limit) | (slots < 0) | (slots >= len(items))).any():
            raise ValueError("an entry lies outside its chunk or the batch")
        if len(rows) == 0:
            return 0
        chunk_starts, heads = self._heads(addrs, sizes, chunk_nbytes)
        if heads[-1][0] <= 0:
            return -1 - int(chunk_starts[len(heads) - 1])
        runs = _runs(addrs, sizes, rows, slots, row_nbytes, chunk_starts, heads)
        plan = _Plan(items, rows, slots, runs)
        n_threads = max(1, min(n_threads, len(runs) // 8))
        if n_threads == 1:
            return self._work(plan, 0, 1)
        with ThreadPoolExecutor(n_threads - 1) as pool:
            others = [pool.submit(self._work, plan, i, n_threads) for i in range(1, n_threads)]
            results = [self._work(plan, 0, n_threads), *(other.result() for other in others)]
        return next((r for r in results if r < 0), sum(results))

    def _work(self, plan: _Plan, share: int, n_shares: int) -> int:
        """Do every `n_shares`-th run; returns how many, or minus one minus the failed entry."""
        contexts = self._contexts()
        getitem = self._lib.blosc2_getitem_bytes_ctx
        row_nbytes = plan.items.shape[1]
        base = plan.items.ctypes.data
        runs = plan.runs[share::n_shares]
        for start, stop, addr, size, extended, row, count, slot in runs:
            nbytes = count * row_nbytes
            scratch = None
            if slot >= 0:
                target = base + slot * row_nbytes
            else:
                scratch = np.empty((count, row_nbytes), np.uint8)
                target = scratch.ctypes.data
            if size < 0:
                ctypes.memmove(target, addr + row * row_nbytes, nbytes)
            else:
                context = contexts[extended].handle
                got = getitem(context, addr, size, row * row_nbytes, nbytes, target, nbytes)
                if got != nbytes:
                    # A context that met a damaged chunk may not be used again.
                    self._local.contexts = None
                    return -1 - start
            if scratch is not None:
                plan.items[plan.slots[start:stop]] = scratch[plan.rows[start:stop] - row]
        return len(runs)

    def _heads(
        self, addrs: Array, sizes: Array, chunk_nbytes: int
    ) -> tuple[Array, list[tuple[int, bool]]]:
        """Return the first entry of each chunk, and its block size and kind.

        Stops at a chunk whose header does not fit, with -1 for it.
        """
        new = np.ones(len(addrs), bool)
        new[1:] = addrs[1:] != addrs[:-1]
        starts = np.flatnonzero(new)
        heads = []
        for addr, size in zip(addrs[starts].tolist(), sizes[starts].tolist(), strict=True):
            heads.append(_head(self._lib, addr, size, chunk_nbytes))
            if heads[-1][0] <= 0:
                break
        return starts, heads

    def _contexts(self) -> tuple[_Context, _Context]:
        """Return this thread's contexts, for Blosc1 and for Blosc2 chunks.

        What the extended header of the latter has set is not reset by the short one
        of the former.
        """
        contexts: tuple[_Context, _Context] | None = getattr(self._local, "contexts", None)
        if contexts is None:
            contexts = self._local.contexts = (_Context(self._lib), _Context(self._lib))
        return contexts


def _runs(
    addrs: Array,
    sizes: Array,
    rows: Array,
    slots: Array,
    row_nbytes: int,
    chunk_starts: Array,
    heads: list[tuple[int, bool]],
) -> list[tuple[int, int, int, int, bool, int, int, int]]:
    n = len(rows)
    lengths = np.diff(np.append(chunk_starts, n))
    block_nbytes, extended = (np.repeat(values, lengths) for values in zip(*heads, strict=True))
    blocks = rows * row_nbytes // block_nbytes
    new = np.ones(n, bool)
    new[1:] = blocks[1:] != blocks[:-1]
    new[chunk_starts] = True
    # Whether an entry goes on where the one before it ended, in its chunk and in the batch.
    goes_on = np.ones(n, bool)
    goes_on[1:] = (np.diff(rows) == 1) & (np.diff(slots) == 1)
    start = np.flatnonzero(new)
    stop = np.append(start[1:], n)
    straight = np.logical_and.reduceat(goes_on | new, start)
    columns = (
        start,
        stop,
        addrs[start],
        sizes[start],
        extended[start],
        rows[start],
        rows[stop - 1] - rows[start] + 1,
        np.where(straight, slots[start], -1),
    )
    return list(zip(*(column.tolist() for column in columns), strict=True))


def _head(lib: ctypes.CDLL, addr: int, size: int, chunk_nbytes: int) -> tuple[int, bool]:
    """Return a chunk's block size, -1 where its header does not fit, and if it is Blosc2's."""
    if size < 0:
        return _RAW_NBYTES, False
    if size < 16:
        return -1, False
    nbytes, cbytes, blocksize = ctypes.c_int32(), ctypes.c_int32(), ctypes.c_int32()
    code = lib.blosc2_cbuffer_sizes(
        addr, ctypes.byref(nbytes), ctypes.byref(cbytes), ctypes.byref(blocksize)
    )
    if code < 0 or nbytes.value != chunk_nbytes or not 16 <= cbytes.value <= size:
        return -1, False
    if not 0 < blocksize.value <= nbytes.value:
        return -1, False
    # Both shuffle bits at once announce the extended header.
    return blocksize.value, ctypes.string_at(addr + 2, 1)[0] & 0x05 == 0x05


class _Context:
    """A Blosc2 decompression context, freed with its thread."""

    def __init__(self, lib: ctypes.CDLL) -> None:
        self._free: Callable[[int], None] = lib.blosc2_free_ctx
        self.handle: int = lib.blosc2_create_dctx(_DParams(1, None, None, None, 0))
        if not self.handle:
            raise MemoryError("Blosc2 has no memory for a context")

    def __del__(self) -> None:
        if self.handle:
            self._free(self.handle)


class _DParams(ctypes.Structure):
    """``blosc2_dparams``, with room behind it for fields that later versions add."""

    _fields_ = (
        ("nthreads", ctypes.c_int16),
        ("schunk", ctypes.c_void_p),
        ("postfilter", ctypes.c_void_p),
        ("postparams", ctypes.c_void_p),
        ("typesize", ctypes.c_int64),
    )


def _load_blosc2() -> ctypes.CDLL:
    import blosc2

    folder = Path(blosc2.__file__).parent / "lib"
    names = ("libblosc2.so", "libblosc2.dylib", "libblosc2.dll", "blosc2.dll")
    path = next((folder / name for name in names if (folder / name).exists()), None)
    if path is None:
        raise ImportError(f"the blosc2 package has no shared library in {folder}")
    lib = ctypes.CDLL(str(path))
    lib.blosc2_init()
    pointer, int32 = ctypes.c_void_p, ctypes.c_int32
    lib.blosc2_create_dctx.restype = pointer
    lib.blosc2_create_dctx.argtypes = [_DParams]
    lib.blosc2_free_ctx.argtypes = [pointer]
    lib.blosc2_getitem_bytes_ctx.argtypes = [
        pointer,
        pointer,
        int32,
        int32,
        int32,
        pointer,
        int32,
    ]
    lib.blosc2_cbuffer_sizes.argtypes = [pointer] * 4
    return lib
