"""Row ids to the memory that holds them: mapped chunks and raw tail pages."""

from __future__ import annotations

import threading
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from zbuffer.errors import DamagedError, RowNotFoundError
from zbuffer.format.layout import chunk_path
from zbuffer.format.segments import Segments
from zbuffer.reading.gather import Gather
from zbuffer.schema import Field
from zbuffer.storage import Store
from zbuffer.storage.pages import Page

Array = np.ndarray[Any, Any]
#: Chunks of one field that stay mapped.
MAX_MAPPED = 8192


@dataclass(frozen=True, slots=True, eq=False)
class View:
    """The rows of a buffer at one moment: ids in ``[first, stop)``.

    Attributes
    ----------
    pages
        Tail pages by chunk, for the rows that no chunk file has yet.
    pending
        The page with one observation more, that of row ``stop``, or None.
    running
        Whether the newest row's episode goes on; with segments, bool by lane.
    segments
        Which of the ids are rows, where not all are; None where all are, in one lane.
    pending_ids
        With segments, int64, ascending: ids that are no rows yet, but whose observation
        can be read.
    """

    first: int
    stop: int
    pages: dict[int, Page]
    pending: Page | None = None
    running: bool | Array = False
    segments: Segments | None = None
    pending_ids: Array | None = None

    @property
    def readable_stop(self) -> int:
        """One past the last id whose observation can be read."""
        return self.stop + (self.pending is not None)

    @property
    def n_rows(self) -> int:
        """Number of rows."""
        return self.stop - self.first if self.segments is None else len(self.segments)

    def ids(self, positions: Array) -> Array:
        """Return the ids of rows, counted from the oldest."""
        return self.first + positions if self.segments is None else self.segments.ids(positions)

    def settled_stop(self, chunk_rows: int) -> int:
        """One past the ids to which nothing is added any more, before the oldest page."""
        if not self.pages:
            return self.stop
        return min(max(min(self.pages) * chunk_rows, self.first), self.stop)

    def contains(self, ids: Array) -> Array:
        """Return which ids are rows."""
        if self.segments is not None:
            return self.segments.contains(ids)
        return (ids >= self.first) & (ids < self.stop)

    def running_lanes(self, lanes: Array) -> Array:
        """Return whether the episode of each lane's newest row goes on."""
        if isinstance(self.running, bool):
            return np.full(len(lanes), self.running)
        running: Array = self.running[lanes]
        return running


class FieldChunks:
    """The chunks of one field, mapped at first use and kept.

    Notes
    -----
    Any thread may call the methods. What :meth:`gather` reads is pinned while it
    reads, so a chunk may be forgotten or deleted meanwhile.
    """

    def __init__(
        self, store: Store, name: str, field: Field, chunk_rows: int, gather: Gather
    ) -> None:
        self._store = store
        self._name = name
        self._field = field
        self._chunk_rows = chunk_rows
        self._gather = gather
        self.forget_all()

    def forget_all(self) -> None:
        """Begin anew, lock included; also what a forked child has to do.

        Another thread of the parent may have held the lock, in the middle of a change.
        """
        self._lock = threading.Lock()
        self._base = 0
        self._addrs = np.zeros(0, np.uint64)
        self._sizes = np.zeros(0, np.int64)
        self._owners: list[Any] = []
        # The chunks that are mapped, in the order in which they were; used as a set.
        self._mapped: dict[int, None] = {}
        # Chunks that are kept decoded.
        self._held: dict[int, Array] = {}

    def gather(self, view: View, ids: Array, dest: Array, n_threads: int) -> int:
        """Fill ``dest[i]`` with the item of row ``ids[i]``; returns blocks decoded.

        Parameters
        ----------
        view
            Rows that may be read.
        ids
            int64 row ids, in any order, repeated or not.
        dest
            C-contiguous array of ``len(ids)`` items of the field.
        n_threads
            How many threads decode.

        Raises
        ------
        RowNotFoundError
            An id is not in the view, or its chunk was evicted meanwhile.
        DamagedError
            A chunk does not decode to what the schema says.
        """
        if self._field.nbytes == 0 or len(ids) == 0:
            if len(ids) and (ids.min() < view.first or ids.max() >= view.readable_stop):
                raise _not_found(view, ids)
            return 0
        result = self._gather.gather(dest, self._field.nbytes, self._plan(view, ids), n_threads)
        if result < 0:
            key = chunk_path(self._name, self._field, -1 - result)
            raise DamagedError(f"{self._store.path}/{key} is damaged: it does not decode")
        return result

    def hold(self, view: View, chunks: Sequence[int], n_threads: int) -> int:
        """Keep whole chunks decoded, and let go of those that were held and are not named.

        Only chunks that nothing is added to any more; the others are read as ever.
        Returns how many blocks were decoded.
        """
        n_blocks = 0
        with self._lock:
            for chunk in self._held.keys() - set(chunks):
                self._let_go(chunk)
            missing = [chunk for chunk in chunks if chunk not in self._held]
        for chunk in missing:
            start, stop = chunk * self._chunk_rows, (chunk + 1) * self._chunk_rows
            if start < view.first or stop > view.stop or chunk in view.pages:
                continue
            rows = np.empty((self._chunk_rows, *self._field.shape), self._field.dtype)
            n_blocks += self.gather(view, np.arange(start, stop), rows, n_threads)
            with self._lock:
                self._held[chunk] = rows
                self._reserve(chunk, chunk)
                self._drop(chunk)
                at = chunk - self._base
                self._owners[at] = rows
                self._addrs[at] = rows.ctypes.data
                self._sizes[at] = -len(rows)
        return n_blocks

    def forget(self, chunk: int) -> None:
        """Drop what is known of a chunk; the next use looks again."""
        with self._lock:
            self._drop(chunk)

    def forget_before(self, chunk: int) -> None:
        """Drop what is known of all chunks before this one: they are evicted."""
        with self._lock:
            n = min(chunk - self._base, len(self._owners))
            if n > 0:
                for evicted in range(self._base, self._base + n):
                    self._mapped.pop(evicted, None)
                self._addrs = self._addrs[n:].copy()
                self._sizes = self._sizes[n:].copy()
                self._owners = self._owners[n:]
                self._base += n

    def forget_from(self, chunk: int) -> None:
        """Drop what is known of this chunk and those after it."""
        with self._lock:
            at = max(chunk - self._base, 0)
            for number in [n for n, a in enumerate(self._addrs[at:], self._base + at) if a]:
                self._drop(number)

    def _plan(self, view: View, ids: Array) -> Any:
        pending = (-1, 0, 0, 0)
        if view.pending is not None:
            # Its page itself, not what the table says of its chunk: that may be
            # sealed by now, and a chunk has no room for one row more.
            page = view.pending
            column = page.columns[self._name]
            row = view.stop - page.chunk * self._chunk_rows
            pending = (view.stop, column.ctypes.data, len(column), row)
        with self._lock:
            while True:
                try:
                    plan = self._gather.plan(
                        ids,
                        view.first,
                        view.readable_stop,
                        self._chunk_rows,
                        self._base,
                        self._addrs,
                        self._sizes,
                        self._owners,
                        pending,
                    )
                except IndexError:
                    raise _not_found(view, ids) from None
                if not isinstance(plan, list):
                    break
                self._reserve(view.first // self._chunk_rows, plan[-1])
                for chunk in plan:
                    self._load(view, chunk)
            if len(self._mapped) > MAX_MAPPED:
                self._trim()
            return plan

    def _reserve(self, first: int, last: int) -> None:
        if not self._owners:
            self._base = first
        if first < self._base:
            n = self._base - first
            self._addrs = np.concatenate((np.zeros(n, np.uint64), self._addrs))
            self._sizes = np.concatenate((np.zeros(n, np.int64), self._sizes))
            self._owners = [None] * n + self._owners
            self._base = first
        missing = last + 1 - self._base - len(self._owners)
        if missing > 0:
            missing += len(self._owners) // 4 + 16
            self._addrs = np.concatenate((self._addrs, np.zeros(missing, np.uint64)))
            self._sizes = np.concatenate((self._sizes, np.zeros(missing, np.int64)))
            self._owners.extend([None] * missing)

    def _load(self, view: View, chunk: int) -> None:
        at = chunk - self._base
        page = view.pages.get(chunk)
        if page is not None and not page.retired:
            column = page.columns[self._name]
            self._owners[at] = page
            self._addrs[at] = column.ctypes.data
            self._sizes[at] = -len(column)
            return
        key = chunk_path(self._name, self._field, chunk)
        try:
            owner = self._store.map(key)
        except FileNotFoundError:
            raise RowNotFoundError(
                f"chunk {chunk} of field {self._name!r} is gone: its rows were evicted, "
                "or its file is missing"
            ) from None
        except (OSError, ValueError) as error:
            raise DamagedError(f"{self._store.path}/{key} cannot be mapped: {error}") from error
        data = np.frombuffer(owner, np.uint8)
        if len(data) <= 20:
            raise DamagedError(f"{self._store.path}/{key} is damaged: {len(data)} bytes")
        self._owners[at] = data
        self._addrs[at] = data.ctypes.data
        self._sizes[at] = len(data) - 4
        self._mapped[chunk] = None

    def _let_go(self, chunk: int) -> None:
        rows, at = self._held.pop(chunk), chunk - self._base
        if 0 <= at < len(self._owners) and self._owners[at] is rows:
            self._drop(chunk)

    def _drop(self, chunk: int) -> None:
        at = chunk - self._base
        if 0 <= at < len(self._owners):
            self._owners[at] = None
            self._addrs[at] = 0
            self._mapped.pop(chunk, None)

    def _trim(self) -> None:
        """Drop the maps made longest ago; plans hold on to what they use."""
        for chunk in list(self._mapped)[: len(self._mapped) - MAX_MAPPED]:
            self._drop(chunk)


def _not_found(view: View, ids: Array) -> RowNotFoundError:
    return RowNotFoundError(
        f"rows are {view.first} to {view.stop - 1}, got {int(ids.min())} to {int(ids.max())}"
    )
