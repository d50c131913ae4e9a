"""Tail pages on the local disk: preallocated files that are mapped and shared."""

from __future__ import annotations

import contextlib
import mmap
import os
from pathlib import Path
from typing import Any

import numpy as np

from zbuffer.errors import DamagedError
from zbuffer.format.commit import Commit
from zbuffer.format.layout import TAIL
from zbuffer.format.tail import PageLayout, PageState, segment_states
from zbuffer.storage.local import storage_error


class Page:
    """The rows of one chunk, uncompressed, in a mapped file.

    Attributes
    ----------
    chunk
        Which chunk the rows belong to.
    columns
        Field name to an array of ``chunk_rows + 1`` items, a view of the file.

    Notes
    -----
    One writer and any number of readers, in this process or in others: rows below
    the count never change, and the count is stored after them.
    """

    def __init__(
        self, commit: Commit, file: str | os.PathLike[str], chunk: int, *, writable: bool
    ) -> None:
        with open(file, "r+b" if writable else "rb") as opened:
            layout = PageLayout.of(commit)
            if os.fstat(opened.fileno()).st_size != layout.nbytes:
                raise DamagedError(
                    f"{file} has {os.fstat(opened.fileno()).st_size} bytes, wanted {layout.nbytes}"
                )
            access = mmap.ACCESS_WRITE if writable else mmap.ACCESS_READ
            self._map = mmap.mmap(opened.fileno(), 0, access=access)
        view = memoryview(self._map)
        self.epoch = layout.check(view, chunk)
        self.chunk = chunk
        self.file = Path(file)
        #: Its chunk is sealed: nobody who looks it up anew should use the page.
        self.retired = False
        #: With lanes: it waits to be sealed, and nothing is added to it any more.
        self.queued = self.final = False
        self.first = chunk * commit.chunk_rows
        #: By segment, see :func:`zbuffer.format.tail.segment_states`.
        self.states = segment_states(view, commit.segments_of_chunk)
        counts = self.states[:, 0] >> 2
        if not 0 <= counts.min() <= counts.max() <= commit.rows_of_segment:
            raise DamagedError(f"{file} claims {counts.max()} rows of {commit.rows_of_segment}")
        self.columns: dict[str, np.ndarray[Any, Any]] = {}
        rows = commit.chunk_rows + 1
        for name, field in commit.fields.items():
            size = rows * (field.nbytes // max(field.dtype.itemsize, 1))
            flat = np.frombuffer(view, field.dtype, size, layout.offsets[name])
            self.columns[name] = flat.reshape(rows, *field.shape)

    @classmethod
    def create(cls, commit: Commit, root: Path, chunk: int) -> Page:
        """Make an empty page.

        All its bytes are allocated now, so that a full disk is an error here.

        Raises
        ------
        StorageError
            The disk has no room for the page.
        """
        layout = PageLayout.of(commit)
        file = page_file(root, chunk)
        partial = file.with_name(f"{file.name}.partial")
        try:
            file.parent.mkdir(exist_ok=True)
            with partial.open("w+b") as opened:
                _allocate(opened.fileno(), layout.nbytes)
                opened.write(layout.header(chunk, commit.epoch))
            partial.replace(file)
        except OSError as error:
            with contextlib.suppress(OSError):
                partial.unlink()
            raise storage_error(error, file, layout.nbytes) from error
        return cls(commit, file, chunk, writable=True)

    @property
    def state(self) -> PageState:
        """What the page holds now, or its first segment."""
        return PageState.unpack(int(self.states[0, 0]))

    def publish(self, state: PageState) -> None:
        """Make rows, and what follows them, visible to readers."""
        self.states[0, 0] = state.pack()

    def unlink(self) -> None:
        """Remove the file; maps of it stay valid."""
        self.file.unlink(missing_ok=True)


def page_file(root: Path, chunk: int) -> Path:
    """Return the file of a chunk's tail page."""
    return root / TAIL / str(chunk)


def page_numbers(root: Path) -> list[int]:
    """Return the chunks that have a tail page, oldest first."""
    try:
        names = os.listdir(root / TAIL)
    except FileNotFoundError:
        return []
    return sorted(int(name) for name in names if name.isdigit())


def _allocate(fd: int, nbytes: int) -> None:
    if hasattr(os, "posix_fallocate"):
        os.posix_fallocate(fd, 0, nbytes)
        return
    zeros = bytes(1 << 20)
    for at in range(0, nbytes, len(zeros)):
        os.pwrite(fd, zeros[: nbytes - at], at)
