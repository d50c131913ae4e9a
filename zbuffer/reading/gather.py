"""The gather: wanted rows out of compressed chunks, in C or through ctypes."""

from __future__ import annotations

import importlib
import os
from typing import Any, Literal, Protocol

import numpy as np

Array = np.ndarray[Any, Any]
Backend = Literal["auto", "native", "ctypes"]


class Gather(Protocol):
    """Wanted rows out of chunks, in two steps; the one hot call."""

    def plan(
        self,
        ids: Array,
        first: int,
        stop: int,
        chunk_rows: int,
        base: int,
        addrs: Array,
        sizes: Array,
        owners: list[Any],
        pending: tuple[int, int, int, int],
        /,
    ) -> Any:
        """Find the chunk of each row.

        Parameters
        ----------
        ids
            int64, contiguous, in any order, repeated or not.
        first, stop
            Ids that may be asked for.
        chunk_rows
            Rows of a chunk.
        base
            The chunk that item 0 of the three tables describes.
        addrs, sizes, owners
            By chunk: address, or 0 where it is not known; bytes, or minus the rows
            that are there where the address is of raw rows; what keeps it alive.
        pending
            Id of the observation behind the newest row, and where it lies: address
            and rows of a raw page, and its row there. An id of -1 is none.

        Returns
        -------
        plan
            For :meth:`gather`. It keeps what it points to alive.
        list of int
            Instead, the wanted chunks that the tables lack.

        Raises
        ------
        IndexError
            An id outside `first` and `stop`.
        """
        ...

    def gather(self, dest: Array, row_nbytes: int, plan: Any, n_threads: int, /) -> int:
        """Fill ``dest[i]`` with row ``ids[i]``, threads at work without the GIL.

        Returns the number of blocks decoded, or minus one minus the chunk that is
        damaged.
        """
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
        module: Gather = native
        return module
    from zbuffer.reading.gather_ctypes import CtypesGather

    return CtypesGather()


def default_threads() -> int:
    """Return how many threads decode by default: the cores this process may use."""
    if hasattr(os, "sched_getaffinity"):
        return min(len(os.sched_getaffinity(0)), 16)
    return min(os.cpu_count() or 1, 16)
