"""Memory for batches: used again once nobody holds the batch any more."""

from __future__ import annotations

import sys
import threading
from typing import Any

import numpy as np

Array = np.ndarray[Any, Any]
#: Smaller arrays come from the allocator: it keeps those at hand itself.
_LEAST_NBYTES = 1 << 20
#: Arrays that are kept while nobody uses them.
_MOST_IDLE = 3
#: Reference counts tell who holds an array only under a GIL.
_COUNTS = hasattr(sys, "getrefcount") and getattr(sys, "_is_gil_enabled", lambda: True)()
#: The list's, the loop's, and the argument's.
_IDLE_COUNT = 3


class Recycler:
    """Hands out arrays over memory whose earlier arrays are all gone.

    A batch of frames is megabytes. Fresh memory for each costs a page fault every
    4 KiB, as much as a good part of its decoding. Whether anybody still holds an
    array, a view of it or a tensor over it, its reference count tells: so a batch
    stays what it was until the caller drops it.

    Notes
    -----
    Any thread may call the method.
    """

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._owners: list[Array] = []

    def allocate(self, name: str, shape: tuple[int, ...], dtype: np.dtype[Any]) -> Array:
        """Return an array, its contents arbitrary."""
        nbytes = dtype.itemsize
        for length in shape:
            nbytes *= length
        if nbytes < _LEAST_NBYTES or not _COUNTS:
            return np.empty(shape, dtype)
        with self._lock:
            found = None
            idle = 0
            for owner in self._owners:
                if sys.getrefcount(owner) == _IDLE_COUNT:
                    idle += 1
                    if found is None and nbytes <= owner.nbytes <= 2 * nbytes:
                        found = owner
            if found is None:
                if idle >= _MOST_IDLE:
                    self._drop_idle()
                found = np.empty(nbytes, np.uint8)
                self._owners.append(found)
            return found[:nbytes].view(dtype).reshape(shape)

    def _drop_idle(self) -> None:
        self._owners = [owner for owner in self._owners if sys.getrefcount(owner) != _IDLE_COUNT]
