"""The gather: wanted rows out of compressed chunks, in C or through ctypes."""

from __future__ import annotations

import importlib
import os
from collections.abc import Callable
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
        return importlib.import_module("zbuffer.reading._gather")
    except ImportError:
        if backend == "native":
            raise
        return None


def make_gather(native: Any) -> Gather:
    """Return the gather of the extension, or the one that needs none."""
    if native is not None:
        return _native_gather(native)
    from zbuffer.reading.gather_ctypes import CtypesGather

    return CtypesGather()


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
