"""Files mapped read-only, without a descriptor kept open for each."""

from __future__ import annotations

import ctypes
import mmap
import os
import sys
import weakref
from typing import Any


def map_file(path: str) -> Any:
    """Return a file as a read-only buffer; FileNotFoundError where there is none.

    The standard library's maps keep a descriptor each before Python 3.13, so there
    the C library is called where it is known. The C extension has a way of its own.
    """
    fd = os.open(path, os.O_RDONLY | getattr(os, "O_CLOEXEC", 0) | getattr(os, "O_BINARY", 0))
    try:
        if sys.version_info >= (3, 13):
            return mmap.mmap(fd, 0, access=mmap.ACCESS_READ, trackfd=False)
        if sys.platform in ("linux", "darwin"):
            return _map_by_libc(fd, os.fstat(fd).st_size, path)
        return mmap.mmap(fd, 0, access=mmap.ACCESS_READ)
    finally:
        os.close(fd)


def _map_by_libc(fd: int, nbytes: int, path: str) -> Any:
    libc = ctypes.CDLL(None, use_errno=True)
    libc.mmap.restype = ctypes.c_void_p
    libc.mmap.argtypes = [
        ctypes.c_void_p,
        ctypes.c_size_t,
        ctypes.c_int,
        ctypes.c_int,
        ctypes.c_int,
        ctypes.c_longlong,
    ]
    libc.munmap.argtypes = [ctypes.c_void_p, ctypes.c_size_t]
    address = libc.mmap(None, nbytes, mmap.PROT_READ, mmap.MAP_SHARED, fd, 0)
    if address is None or address == ctypes.c_void_p(-1).value:
        code = ctypes.get_errno()
        raise OSError(code, os.strerror(code), path)
    mapped = (ctypes.c_ubyte * nbytes).from_address(address)
    weakref.finalize(mapped, libc.munmap, address, nbytes)
    return mapped
