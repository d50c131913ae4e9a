"""A directory of the local disk: maps, whole-file writes, and the writer's lock."""

from __future__ import annotations

import contextlib
import errno
import json
import os
import shutil
import socket
import time
import weakref
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

from zbuffer.errors import BufferLockedError, StorageError
from zbuffer.forking import call_in_child
from zbuffer.format.layout import LOCK, PARTIAL
from zbuffer.storage.maps import map_file

_FULL = (errno.ENOSPC, errno.EDQUOT)


class LocalStore:
    """Files below one directory.

    Parameters
    ----------
    path
        The directory; ``~`` is expanded. It need not exist.
    map_file
        How a file is mapped.

    Attributes
    ----------
    name
        The path as it was given.

    Notes
    -----
    Safe to use from several threads and after fork.
    """

    def __init__(
        self, path: str | os.PathLike[str], map_file: Callable[[str], Any] = map_file
    ) -> None:
        self.name = os.fspath(path)
        self._root = Path(os.path.abspath(os.path.expanduser(path)))
        self._prefix = os.path.join(self._root, "")
        self._map_file = map_file

    @property
    def path(self) -> str:
        """The directory."""
        return str(self._root)

    def file(self, key: str) -> Path:
        """Return the file of a key."""
        return self._root / key

    def read(self, key: str) -> bytes:
        """Return the bytes at `key`."""
        return self.file(key).read_bytes()

    def map(self, key: str) -> Any:
        """Return the file at `key`, mapped read-only."""
        return self._map_file(self._prefix + key)

    def write(self, key: str, data: bytes) -> None:
        """Write a temporary file beside `key`, then rename it over.

        Raises
        ------
        StorageError
            The disk is full or refuses; what was at `key` is still there.
        """
        target = self.file(key)
        partial = target.with_name(target.name + PARTIAL)
        try:
            try:
                file = partial.open("wb")
            except FileNotFoundError:
                target.parent.mkdir(parents=True, exist_ok=True)
                file = partial.open("wb")
            with file:
                file.write(data)
            partial.replace(target)
        except OSError as error:
            with contextlib.suppress(OSError):
                partial.unlink()
            raise storage_error(error, target, len(data)) from error

    def delete(self, key: str) -> None:
        """Remove the file at `key`, and the chunk directories that it leaves empty."""
        target = self.file(key)
        target.unlink(missing_ok=True)
        with contextlib.suppress(OSError):
            while target.parent.name.isdigit():
                target = target.parent
                target.rmdir()

    def version(self, key: str) -> object:
        """Return what tells one version of a file from the next."""
        try:
            status = os.stat(f"{self._prefix}{key}")
        except (FileNotFoundError, NotADirectoryError):
            return None
        return status.st_ino, status.st_mtime_ns, status.st_size

    def size(self, key: str) -> int:
        """Return the size of the file at `key` in bytes."""
        return os.stat(self._root / key).st_size

    def exists(self) -> bool:
        """Whether the directory exists."""
        return self._root.exists()

    def is_empty(self) -> bool:
        """Whether there is nothing but perhaps an old lock file."""
        return not self._root.exists() or all(p.name == LOCK for p in self._root.iterdir())

    def clear(self) -> None:
        """Remove all but the lock file, the root document first."""
        (self._root / "zarr.json").unlink(missing_ok=True)
        for child in self._root.iterdir():
            if child.is_dir() and not child.is_symlink():
                shutil.rmtree(child)
            elif child.name != LOCK:
                child.unlink()

    def walk(self, key: str) -> Iterator[tuple[str, int]]:
        """Yield every file below `key` with its size in bytes."""
        top = str(self._root / key)
        for folder, _, names in os.walk(top):
            for name in names:
                file = os.path.join(folder, name)
                with contextlib.suppress(FileNotFoundError):
                    yield os.path.relpath(file, self._root), os.stat(file).st_size


def storage_error(error: OSError, path: Path, nbytes: int) -> StorageError:
    """Say in one sentence which file could not be written, and how much was wanted."""
    reason = "the disk is full" if error.errno in _FULL else error.strerror or str(error)
    new = StorageError(error.errno, f"cannot write {nbytes} bytes to {path}: {reason}")
    new.filename = str(path)
    return new


class WriterLock:
    """The right to write a buffer; it dies with the process that holds it.

    Raises
    ------
    BufferLockedError
        Another writer, in this process or another, holds the lock.
    """

    def __init__(self, root: str) -> None:
        self._path = Path(root, LOCK)
        fd = self._open()
        # A file that was removed between open and lock is nobody's lock.
        while not self._is_current(fd):
            os.close(fd)
            fd = self._open()
        note = {"host": socket.gethostname(), "pid": os.getpid(), "since": time.time()}
        os.truncate(fd, 0)
        os.pwrite(fd, json.dumps(note).encode(), 0)
        self._close = weakref.finalize(self, os.close, fd)
        # A forked child shares the lock through its copy of the descriptor, and
        # would keep it alive after the writer died.
        call_in_child(self._drop)

    def release(self) -> None:
        """Remove the file and give the lock up; calling it again does nothing."""
        if self._close.alive:
            with contextlib.suppress(OSError):
                self._path.unlink()
            self._close()

    def _drop(self) -> None:
        self._close()

    def _open(self) -> int:
        """Return a descriptor of the file that holds the lock."""
        import fcntl

        try:
            fd = os.open(self._path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o644)
        except OSError as error:
            raise storage_error(error, self._path, 0) from error
        try:
            fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError as error:
            holder = _read_holder(fd)
            os.close(fd)
            if error.errno not in (errno.EWOULDBLOCK, errno.EACCES):
                raise StorageError(
                    error.errno, f"cannot lock {self._path}: {error.strerror}"
                ) from error
            raise BufferLockedError(
                errno.EWOULDBLOCK, f"{self._path.parent} is being written by {holder}"
            ) from None
        return fd

    def _is_current(self, fd: int) -> bool:
        try:
            return os.path.samestat(os.fstat(fd), os.stat(self._path))
        except FileNotFoundError:
            return False


def _read_holder(fd: int) -> str:
    try:
        note = json.loads(os.pread(fd, 4096, 0))
        since = time.strftime("%Y-%m-%d %H:%M:%S", time.localtime(note["since"]))
        return f"process {int(note['pid'])} on {note['host']} since {since}"
    except (ValueError, KeyError, TypeError):
        return "another process"
