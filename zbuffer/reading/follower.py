"""The rows of a buffer that another process may be writing."""

from __future__ import annotations

import json
import os
import threading
from collections.abc import Callable
from typing import Any

import numpy as np

from zbuffer.errors import BufferNotFoundError, DamagedError, NotABufferError
from zbuffer.forking import call_in_child
from zbuffer.format.commit import Commit, read_root
from zbuffer.format.layout import LOCK, ROOT, TAIL
from zbuffer.format.tail import PageState
from zbuffer.reading.chunks import View
from zbuffer.reading.lanes import lane_view
from zbuffer.reading.segments import read_segments
from zbuffer.storage import Store
from zbuffer.storage.local import LocalStore
from zbuffer.storage.pages import Page

Array = np.ndarray[Any, Any]
#: A writer commits at most once in the time of a look, so a few looks are plenty.
_LOOKS = 100


def read_commit(store: Store) -> Commit:
    """Read the root document.

    Raises
    ------
    BufferNotFoundError
        There is nothing at the path, or nothing of Zarr v3.
    NotABufferError
        There is something else.
    """
    try:
        data = store.read(ROOT)
    except FileNotFoundError:
        raise BufferNotFoundError(f"there is no zbuffer at {store.path}") from None
    except NotADirectoryError:
        raise NotABufferError(f"{store.path} is a file, not a zbuffer directory") from None
    try:
        document: Any = json.loads(data)
    except ValueError as error:
        raise DamagedError(f"{store.path}/{ROOT} is not JSON: {error}") from error
    return read_root(document, store.path)


class Follower:
    """Sees each row as soon as its writer, on this host, has appended it.

    Parameters
    ----------
    commit
        The root document as it was read a moment ago.
    on_change
        Called when the writer has committed, with the new commit, and the oldest chunk
        that may have been replaced by a fuller one.

    Notes
    -----
    Any thread may call the methods; the writer is never waited for.
    """

    def __init__(
        self, store: LocalStore, commit: Commit, on_change: Callable[[Commit, int], None]
    ) -> None:
        self._store = store
        self._on_change = on_change
        self.renew_lock()
        call_in_child(self.renew_lock)
        # No version yet: the first look reads the root document again.
        self._version: object = None
        self.commit = commit
        self._pages: dict[int, Page] = {}
        # With lanes: the committed segment table, once it is read.
        self._table: Array | None = None
        # Asked for at each look, so the name is put together here.
        self._tail = os.path.join(store.path, TAIL, "")
        # The rows of a buffer that no writer holds, and the version that this is so of.
        self._closed: tuple[object, View] | None = None

    def renew_lock(self) -> None:
        """Replace the lock, in a forked child."""
        self._lock = threading.Lock()

    def view(self) -> View:
        """Return the rows there are now."""
        with self._lock:
            for _ in range(_LOOKS):
                version = self._store.version(ROOT)
                if self._closed is not None and self._closed[0] == version:
                    return self._closed[1]
                if version != self._version:
                    self._reload(version)
                view = self._look()
                # Pages go when their chunk is committed: what was seen holds only
                # if there was no commit meanwhile.
                if self._store.version(ROOT) == self._version:
                    self._closed = (version, view) if self._is_closed() else None
                    return view
        raise DamagedError(f"{self._store.path} changes faster than it can be read")

    def _is_closed(self) -> bool:
        """Whether there is no writer: the next one takes the lock, then commits, then appends."""
        return self._store.version(LOCK) is None and self._store.version(TAIL) is None

    def _reload(self, version: object) -> None:
        if version is None:
            raise BufferNotFoundError(f"the zbuffer at {self._store.path} was removed")
        old, new = self.commit, read_commit(self._store)
        if new.uuid != old.uuid:
            raise NotABufferError(
                f"{self._store.path} was replaced by another buffer: open it anew"
            )
        self._version = version
        self.commit = new
        live = new.rows // new.chunk_rows
        # Chunks from here on may have been replaced by fuller ones.
        replaced = min([old.rows // old.chunk_rows, *self._pages])
        if new.lanes > 1:
            live, self._table = 0, None
        for chunk in list(self._pages):
            if chunk < live or new.epoch != old.epoch:
                self._pages.pop(chunk).retired = True
        self._on_change(new, replaced)

    def _look(self) -> View:
        commit = self.commit
        if commit.lanes > 1:
            return self._look_at_lanes(commit)
        stop = commit.rows
        chunk = stop // commit.chunk_rows
        pages: dict[int, Page] = {}
        pending, running = None, False
        # A flush at the end of a page commits all of it before the next page exists.
        full = self._page(chunk - 1) if chunk and stop == chunk * commit.chunk_rows else None
        if full is not None and full.state.count == commit.chunk_rows:
            pending = full if full.state.pending else None
            running = full.state.running
        while (page := self._page(chunk)) is not None:
            state = page.state
            if page.first + state.count < stop:
                break
            pages[chunk] = page
            stop = page.first + state.count
            if state != PageState():
                pending = page if state.pending else None
                running = state.running
            if state.count < commit.chunk_rows:
                break
            chunk += 1
        return View(commit.first_row, stop, pages, pending, running)

    def _look_at_lanes(self, commit: Commit) -> View:
        if self._table is None:
            self._table = read_segments(self._store, commit)
        try:
            names = os.listdir(self._tail)
        except FileNotFoundError:
            names = []
        chunks = sorted(int(name) for name in names if name.isdigit())
        pages = {
            chunk: page
            for chunk in chunks
            if chunk >= commit.first_chunk and (page := self._page(chunk)) is not None
        }
        for chunk in self._pages.keys() - pages.keys():
            self._pages.pop(chunk).retired = True
        return lane_view(self._table, commit, pages)

    def _page(self, chunk: int) -> Page | None:
        page = self._pages.get(chunk)
        if page is None:
            try:
                page = Page(self.commit, self._tail + str(chunk), chunk, writable=False)
            except FileNotFoundError:
                return None
            self._pages[chunk] = page
        return page
