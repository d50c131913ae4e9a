"""The gather: wanted rows out of compressed chunks, in C or through ctypes."""

from __future__ import annotations

import ctypes
import os
import threading
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any, Literal, Protocol

import numpy as np

Array = np.ndarray[Any, Any]
Backend = Literal["auto", "native", "ctypes"]


class Gather(Protocol):
    """Fill rows of a batch from chunks; the one hot call.

    Entries are sorted by chunk, then row. ``sizes`` is the bytes of the entry's
    chunk, or minus the number of rows where the address is of raw rows. Returns
    the number of blocks decoded, or minus one minus the entry that failed.
    """

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
        """Fill ``dest[slots[i]]`` with row ``rows[i]`` of the chunk at ``addrs[i]``."""
        ...


def native_module(backend: Backend = "auto") -> Any:
    """Return the C extension, or None where it is not built or not wanted.

    Raises
    ------
    ImportError
        ``backend="native"`` and there is no extension.
    """
    if backend == "ctypes" or (backend == "auto" and os.environ.get("ZBUFFER_GATHER") == "ctypes"):
        return None
    try:
        import importlib

        return importlib.import_module("zbuffer.reading._gather")
    except ImportError:
        if backend == "native":
            raise
        return None


def make_gather(native: Any) -> Gather:
    """Return the gather of the extension, or the one that needs none."""
    return CtypesGather() if native is None else _native_gather(native)


def default_threads() -> int:
    """Return how many threads decode by default: the cores this process may use."""
    if hasattr(os, "sched_getaffinity"):
        return min(len(os.sched_getaffinity(0)), 16)
    return min(os.cpu_count() or 1, 16)


def _native_gather(native: Any) -> Gather:
    gather: Callable[..., int] = native.gather

    def call(
        dest: Array,
        row_nbytes: int,
        chunk_nbytes: int,
        addrs: Array,
        sizes: Array,
        rows: Array,
        slots: Array,
        n_threads: int,
    ) -> int:
        return gather(
            dest, row_nbytes, chunk_nbytes, len(rows), addrs, sizes, rows, slots, n_threads
        )

    return call


class CtypesGather:
    """The gather on the ``libblosc2`` of the wheel, a call per run of rows in a block.

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
        """Fill rows of `dest`; see :class:`Gather`."""
        chunk_rows = chunk_nbytes // row_nbytes
        n_dest = dest.nbytes // row_nbytes
        limit = np.where(sizes < 0, -sizes, chunk_rows)
        if ((rows < 0) | (rows >= limit) | (slots < 0) | (slots >= n_dest)).any():
            raise ValueError("an entry lies outside its chunk or the batch")
        runs = _Runs(self._lib, row_nbytes, chunk_nbytes, addrs, sizes, rows, slots)
        if runs.failed is not None:
            return -1 - runs.failed
        n = len(runs.parts)
        n_threads = max(1, min(n_threads, n // 8))
        base = dest.ctypes.data
        if n_threads == 1:
            return self._work(base, runs, 0, n)
        bounds = [n * i // n_threads for i in range(n_threads + 1)]
        with ThreadPoolExecutor(n_threads - 1) as pool:
            others = [
                pool.submit(self._work, base, runs, bounds[i], bounds[i + 1])
                for i in range(1, n_threads)
            ]
            results = [self._work(base, runs, bounds[0], bounds[1])]
            results += [other.result() for other in others]
        return next((r for r in results if r < 0), sum(results))

    def _work(self, base: int, runs: _Runs, start: int, stop: int) -> int:
        context = self._context()
        getitem = self._lib.blosc2_getitem_bytes_ctx
        row_nbytes = runs.row_nbytes
        scratch = ctypes.create_string_buffer(max(runs.longest, 1) * row_nbytes)
        at = ctypes.addressof(scratch)
        for addr, size, row, count, straight, first in runs.parts[start:stop]:
            nbytes = count * row_nbytes
            target = base + straight * row_nbytes if straight >= 0 else at
            if size < 0:
                ctypes.memmove(target, addr + row * row_nbytes, nbytes)
            elif getitem(context, addr, size, row * row_nbytes, nbytes, target, nbytes) != nbytes:
                return -1 - first
            if straight < 0:
                for i in runs.entries_from(first):
                    offset = int(runs.rows[i]) - row
                    ctypes.memmove(
                        base + int(runs.slots[i]) * row_nbytes, at + offset * row_nbytes, row_nbytes
                    )
        return stop - start

    def _context(self) -> int:
        context: _Context | None = getattr(self._local, "context", None)
        if context is None:
            context = self._local.context = _Context(self._lib)
        return context.handle


class _Context:
    """A Blosc2 decompression context, freed with its thread."""

    def __init__(self, lib: ctypes.CDLL) -> None:
        self._lib = lib
        self.handle: int = lib.blosc2_create_dctx(_DParams(1, None, None, None, 0))
        if not self.handle:
            raise MemoryError("Blosc2 has no memory for a context")

    def __del__(self) -> None:
        if self.handle:
            self._lib.blosc2_free_ctx(self.handle)


class _Runs:
    """Entries grouped into runs: what one call decodes.

    A run is the wanted rows of one block. It goes straight into the batch where
    its rows and its slots are consecutive, and through scratch otherwise.
    """

    def __init__(
        self,
        lib: ctypes.CDLL,
        row_nbytes: int,
        chunk_nbytes: int,
        addrs: Array,
        sizes: Array,
        rows: Array,
        slots: Array,
    ) -> None:
        self.row_nbytes = row_nbytes
        self.rows = rows
        self.slots = slots
        self.failed: int | None = None
        n = len(rows)
        new_chunk = np.ones(n, bool)
        new_chunk[1:] = addrs[1:] != addrs[:-1]
        first_of_chunk = np.flatnonzero(new_chunk)
        block_nbytes = np.empty(len(first_of_chunk), np.int64)
        for j, i in enumerate(first_of_chunk.tolist()):
            block_nbytes[j] = _blocksize(lib, int(addrs[i]), int(sizes[i]), chunk_nbytes)
            if block_nbytes[j] <= 0:
                self.failed = i
                return
        blocksize = block_nbytes[np.cumsum(new_chunk) - 1]
        block = rows * row_nbytes // blocksize
        starts = new_chunk.copy()
        starts[1:] |= block[1:] != block[:-1]
        self._starts = np.append(np.flatnonzero(starts), n)
        first, last = self._starts[:-1], self._starts[1:] - 1
        count = rows[last] - rows[first] + 1
        one_run = np.ones(n, bool)
        one_run[1:] = starts[1:] | ((np.diff(rows) == 1) & (np.diff(slots) == 1))
        straight = np.where(np.logical_and.reduceat(one_run, first), slots[first], -1)
        self.longest = int(count.max())
        self.parts: list[tuple[int, int, int, int, int, int]] = list(
            zip(
                addrs[first].tolist(),
                sizes[first].tolist(),
                rows[first].tolist(),
                count.tolist(),
                straight.tolist(),
                first.tolist(),
                strict=True,
            )
        )

    def entries_from(self, first: int) -> range:
        """Return the entries of the run that begins at `first`."""
        stop = self._starts[np.searchsorted(self._starts, first, side="right")]
        return range(first, int(stop))


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
    lib.blosc2_create_dctx.restype = ctypes.c_void_p
    lib.blosc2_create_dctx.argtypes = [_DParams]
    lib.blosc2_free_ctx.argtypes = [ctypes.c_void_p]
    lib.blosc2_getitem_bytes_ctx.argtypes = [
        ctypes.c_void_p,
        ctypes.c_void_p,
        ctypes.c_int32,
        ctypes.c_int32,
        ctypes.c_int32,
        ctypes.c_void_p,
        ctypes.c_int32,
    ]
    lib.blosc2_cbuffer_sizes.argtypes = [ctypes.c_void_p] * 4
    return lib


def _blocksize(lib: ctypes.CDLL, addr: int, size: int, chunk_nbytes: int) -> int:
    """Return the block size of a chunk, or -1 where its header does not fit."""
    if size < 0:
        return 1 << 16
    if size < 16:
        return -1
    nbytes, cbytes, blocksize = ctypes.c_int32(), ctypes.c_int32(), ctypes.c_int32()
    code = lib.blosc2_cbuffer_sizes(
        addr, ctypes.byref(nbytes), ctypes.byref(cbytes), ctypes.byref(blocksize)
    )
    if code < 0 or nbytes.value != chunk_nbytes or not 16 <= cbytes.value <= size:
        return -1
    return blocksize.value if 0 < blocksize.value <= nbytes.value else -1
