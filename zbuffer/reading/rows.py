"""Items of any field by row id, from wherever they are."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from typing import Any

import numpy as np

from zbuffer.errors import RowNotFoundError
from zbuffer.forking import call_in_child
from zbuffer.format.commit import LAST, MID, NO_ROW, Commit
from zbuffer.format.segments import Segments
from zbuffer.reading.chunks import FieldChunks, View
from zbuffer.reading.columns import Columns
from zbuffer.reading.gather import Gather
from zbuffer.schema import STEP_TYPE
from zbuffer.storage import Store

Array = np.ndarray[Any, Any]
Kept = tuple[Array, int]


class Rows:
    """Reads rows of one buffer.

    Parameters
    ----------
    n_threads
        How many threads decode.
    budget_nbytes
        How much RAM the small fields may take while they are kept decoded.

    Notes
    -----
    Any thread may call the methods.
    """

    def __init__(
        self, store: Store, commit: Commit, gather: Gather, n_threads: int, budget_nbytes: int
    ) -> None:
        #: The extension's, or None without it.
        self.native_windows: Any = getattr(gather, "windows", None)
        self.fields = commit.fields
        self.n_threads = n_threads
        self.chunk_rows = commit.chunk_rows
        self.block_rows = _block_rows(commit)
        self._chunks = {
            name: FieldChunks(store, name, field, commit.chunk_rows, gather)
            for name, field in self.fields.items()
        }
        # With gaps: the steps with ids from one to another, to which none is added.
        self._counted = (-1, 0, 0)
        self._columns = Columns(commit, self._chunks, budget_nbytes)
        call_in_child(self.after_fork)

    def take(self, view: View, name: str, ids: Array) -> Array:
        """Return the items of rows `ids` of a field, in their order.

        Parameters
        ----------
        view
            Rows that may be read.
        name
            Of the field.
        ids
            int64 of any shape; repeats are decoded once.

        Raises
        ------
        RowNotFoundError
            An id is not in the view, or was evicted meanwhile.
        DamagedError
            A chunk does not decode.
        """
        field = self.fields[name]
        out = np.empty((*ids.shape, *field.shape), field.dtype)
        self.fill(view, name, ids, out)
        return out

    def fill(self, view: View, name: str, ids: Array, out: Array) -> int:
        """Put the items of rows `ids` into `out`; returns how many blocks were decoded.

        As :meth:`take`; `out` is C-contiguous, of shape ``ids.shape + item``.
        """
        flat = np.ascontiguousarray(ids, np.int64).reshape(-1)
        column = self._columns.get(name, view)
        if column is None:
            return self._chunks[name].gather(view, flat, out, self.n_threads)
        values, base = column.upto(view, self.n_threads)
        if len(flat) == 0:
            return 0
        if view.segments is not None and (flat.min() < view.first or flat.max() >= view.stop):
            raise RowNotFoundError(f"rows are {view.first} to {view.stop - 1}")
        if view.segments is None and (flat.min() < view.first or flat.max() >= view.stop):
            if view.pending is None or flat.min() < view.first or flat.max() > view.stop:
                raise RowNotFoundError(f"rows are {view.first} to {view.stop - 1}")
            return self._chunks[name].gather(view, flat, out, self.n_threads)
        shape = self.fields[name].shape
        np.take(values, flat - base, axis=0, out=out.reshape(len(flat), *shape), mode="clip")
        return 0

    def lookup(self, view: View, name: str, kept: Kept | None) -> Callable[[Array], Array]:
        """Return a function from row ids of the view to items of a field.

        `kept` is what :meth:`kept` says of it.
        """
        if kept is None:
            return lambda ids: self.take(view, name, ids)
        values, base = kept
        return lambda ids: values[ids - base]

    def hold(self, view: View, names: Iterable[str], chunks: Sequence[int]) -> int:
        """Keep chunks of fields decoded, those only; returns how many blocks were decoded.

        Fields that are kept in memory anyway are passed over.
        """
        n_blocks = 0
        for name in names:
            if self._columns.get(name, view) is None and self.fields[name].nbytes:
                n_blocks += self._chunks[name].hold(view, chunks, self.n_threads)
        return n_blocks

    def kept(self, view: View, name: str) -> Kept | None:
        """Return a field's array in memory and the id of its item 0; None where it is not."""
        column = self._columns.get(name, view)
        return None if column is None else column.upto(view, self.n_threads)

    def step_types(self, view: View, ids: Array) -> Array:
        """Return step types: NO_ROW outside the rows, LAST for the pending observation."""
        look_up = self.lookup(view, STEP_TYPE, self.kept(view, STEP_TYPE))
        if view.segments is None and (
            ids.size == 0 or (ids.min() >= view.first and ids.max() < view.stop)
        ):
            return look_up(ids)
        inside = view.contains(ids)
        types = np.full(ids.shape, NO_ROW, np.uint8)
        types[inside] = look_up(ids[inside])
        if view.pending is not None:
            types[ids == view.stop] = LAST
        if view.pending_ids is not None and len(view.pending_ids):
            places = np.minimum(np.searchsorted(view.pending_ids, ids), len(view.pending_ids) - 1)
            types[view.pending_ids[places] == ids] = LAST
        return types

    def count_steps(self, view: View, commit: Commit) -> int:
        """Return how many rows of the view are steps; only those past the commit are looked at."""
        if view.segments is not None:
            return self._count_with_gaps(view, view.segments)
        counted, start = commit.steps, commit.rows
        if commit.first_row != view.first or commit.rows > view.stop:
            # The commit is of another moment than the view.
            counted, start = 0, view.first
        types = self.take(view, STEP_TYPE, np.arange(start, view.stop))
        return counted + int(np.count_nonzero(types <= MID))

    def _count_with_gaps(self, view: View, segments: Segments) -> int:
        settled = view.settled_stop(self.chunk_rows)
        first, upto, counted = self._counted
        if first != view.first or upto > settled:
            upto, counted = view.first, 0

        def between(start: int, stop: int) -> int:
            low, high = segments.count_below(np.array([start, stop])).tolist()
            types = self.take(view, STEP_TYPE, view.ids(np.arange(low, high)))
            return int(np.count_nonzero(types <= MID))

        counted += between(upto, settled)
        self._counted = (view.first, settled, counted)
        return counted + between(settled, view.stop)

    def after_fork(self) -> None:
        """Let go of locks that threads of the parent may have held."""
        for chunks in self._chunks.values():
            chunks.forget_all()
        self._columns.renew_locks()

    def forget(self, chunk: int) -> None:
        """Look a chunk up anew: its page is sealed."""
        for chunks in self._chunks.values():
            chunks.forget(chunk)

    def forget_before(self, commit: Commit) -> None:
        """Let go of chunks that a commit has evicted."""
        for chunks in self._chunks.values():
            chunks.forget_before(commit.first_chunk)

    def on_change(self, new: Commit, replaced: int) -> None:
        """Let go of what a commit has made old: evicted chunks, and those from `replaced` on."""
        self.forget_before(new)
        for chunks in self._chunks.values():
            chunks.forget_from(replaced)


def _block_rows(commit: Commit) -> int:
    """Return how many rows of the largest field are decoded together."""
    largest = max(commit.fields, key=lambda name: commit.fields[name].nbytes)
    return commit.codecs[largest].block_rows or 1
