"""The gather without an extension: ctypes on the ``libblosc2`` of the blosc2 wheel."""

from __future__ import annotations

import ctypes
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from zbuffer.reading.plan import Plan, make_plan

Array = np.ndarray[Any, Any]


@dataclass(frozen=True, slots=True)
class _Runs:
    """The wanted rows of one block each: what a single call decodes.

    Attributes
    ----------
    extended
        Whether the chunk is a Blosc2 chunk, not a Blosc1 chunk.
    addrs, sizes
        Of the chunk.
    starts, nbytes
        From the first wanted row of the block to the last, in bytes of the chunk.
    targets
        Address to decode to: in the batch where the rows are neighbours there too,
        else in a scratch.
    chunks
        Number of the chunk.
    """

    extended: list[bool]
    addrs: list[int]
    sizes: list[int]
    starts: list[int]
    nbytes: list[int]
    targets: list[int]
    chunks: list[int]


class CtypesGather:
    """The gather of :class:`zbuffer.reading.gather.Gather`, a call per block.

    Each call gives the GIL up and takes it again, so a second thread helps less than
    it does in the extension.

    Notes
    -----
    Safe to call from several threads, and after fork: a decoder is used by one thread
    at a time, and threads are started per call.
    """

    def __init__(self) -> None:
        self._lib = _load_blosc2()
        # Taken and given back whole, so that a forked child finds only idle ones.
        self._idle: list[tuple[_Context, _Context]] = []

    def plan(self, *args: Any) -> Plan | list[int]:
        """Find the chunk of each row."""
        return make_plan(*args)

    def gather(self, dest: Array, row_nbytes: int, plan: Plan, n_threads: int) -> int:
        """Fill rows of `dest`; returns blocks decoded, or minus one minus the damaged chunk."""
        n = len(plan.ids)
        if row_nbytes <= 0 or dest.nbytes < n * row_nbytes:
            raise ValueError("the batch has no room for the rows of the plan")
        items = dest.reshape(-1).view(np.uint8)[: n * row_nbytes].reshape(n, row_nbytes)
        packed = np.flatnonzero(plan.sizes >= 0)
        if len(packed) < n:
            _copy_raw(items, plan)
        if len(packed) == 0:
            return 0
        heads = self._heads(plan, packed, row_nbytes * plan.chunk_rows)
        if isinstance(heads, int):
            return -1 - heads
        runs, scratch, slots, places = _runs(items, plan, packed, *heads)
        n_runs = len(runs.addrs)
        n_threads = max(1, min(n_threads, n_runs // 8))
        if n_threads == 1:
            damaged = self._decode(runs, 0, 1)
        else:
            with ThreadPoolExecutor(n_threads - 1) as pool:
                others = [
                    pool.submit(self._decode, runs, i, n_threads) for i in range(1, n_threads)
                ]
                results = [self._decode(runs, 0, n_threads), *(o.result() for o in others)]
            damaged = next((r for r in results if r is not None), None)
        if damaged is not None:
            return -1 - damaged
        items[slots] = scratch[places]
        return n_runs

    def _decode(self, runs: _Runs, share: int, n_shares: int) -> int | None:
        """Decode every `n_shares`-th run; returns the chunk that is damaged, if one is."""
        try:
            contexts = self._idle.pop()
        except IndexError:
            contexts = (_Context(self._lib), _Context(self._lib))
        mine = slice(share, None, n_shares)
        nbytes = runs.nbytes[mine]
        # The loop is map()'s: the less is done with the GIL between two calls, the
        # less do threads wait for each other.
        results = map(
            self._lib.blosc2_getitem_bytes_ctx,
            [contexts[extended].handle for extended in runs.extended[mine]],
            runs.addrs[mine],
            runs.sizes[mine],
            runs.starts[mine],
            nbytes,
            runs.targets[mine],
            nbytes,
        )
        for at, (got, wanted) in enumerate(zip(results, nbytes, strict=True)):
            if got != wanted:
                # A context that met a damaged chunk may not be used again.
                return runs.chunks[mine][at]
        self._idle.append(contexts)
        return None

    def _heads(self, plan: Plan, packed: Array, chunk_nbytes: int) -> tuple[Array, Array] | int:
        """Return block size and kind of each packed entry's chunk, or the damaged chunk."""
        addrs = plan.addrs[packed]
        new = np.ones(len(addrs), bool)
        new[1:] = addrs[1:] != addrs[:-1]
        starts = np.flatnonzero(new)
        heads = []
        for entry in packed[starts].tolist():
            addr, size = int(plan.addrs[entry]), int(plan.sizes[entry])
            heads.append(_head(self._lib, addr, size, chunk_nbytes))
            if heads[-1][0] <= 0:
                return int(plan.ids[entry]) // plan.chunk_rows
        lengths = np.diff(np.append(starts, len(packed)))
        block_nbytes, extended = (np.repeat(values, lengths) for values in zip(*heads, strict=True))
        return block_nbytes, extended


def _copy_raw(items: Array, plan: Plan) -> None:
    """Copy the entries that lie in raw pages."""
    entries = np.flatnonzero(plan.sizes < 0)
    addrs = plan.addrs[entries]
    for addr in sorted(set(addrs.tolist())):
        here = entries[addrs == addr]
        nbytes = -int(plan.sizes[here[0]]) * items.shape[1]
        memory = np.frombuffer((ctypes.c_uint8 * nbytes).from_address(addr), np.uint8)
        items[plan.slots[here]] = memory.reshape(-1, items.shape[1])[plan.rows[here]]


def _runs(
    items: Array, plan: Plan, packed: Array, block_nbytes: Array, extended: Array
) -> tuple[_Runs, Array, Array, Array]:
    """Return the runs, a scratch, and which slots take which rows of it afterwards."""
    n, row_nbytes = len(packed), items.shape[1]
    addrs, rows, slots = plan.addrs[packed], plan.rows[packed], plan.slots[packed]
    blocks = rows * row_nbytes // block_nbytes
    new = np.ones(n, bool)
    new[1:] = (blocks[1:] != blocks[:-1]) | (addrs[1:] != addrs[:-1])
    # Whether an entry goes on where the one before it ended, in its chunk and in the batch.
    goes_on = np.ones(n, bool)
    goes_on[1:] = (np.diff(rows) == 1) & (np.diff(slots) == 1)
    start = np.flatnonzero(new)
    stop = np.append(start[1:], n)
    straight = np.logical_and.reduceat(goes_on | new, start)
    counts = rows[stop - 1] - rows[start] + 1
    ends = np.cumsum(np.where(straight, 0, counts))
    scratch = np.empty((int(ends[-1]), row_nbytes), np.uint8)
    offsets = ends - counts
    targets = np.where(
        straight,
        items.ctypes.data + slots[start] * row_nbytes,
        scratch.ctypes.data + offsets * row_nbytes,
    )
    later = ~np.repeat(straight, stop - start)
    places = rows + np.repeat(offsets - rows[start], stop - start)
    first = packed[start]
    columns = (
        extended[start],
        addrs[start],
        plan.sizes[first],
        rows[start] * row_nbytes,
        counts * row_nbytes,
        targets,
        plan.ids[first] // plan.chunk_rows,
    )
    return _Runs(*(column.tolist() for column in columns)), scratch, slots[later], places[later]


def _head(lib: ctypes.CDLL, addr: int, size: int, chunk_nbytes: int) -> tuple[int, bool]:
    """Return a chunk's block size, -1 where its header does not fit, and if it is Blosc2's."""
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
