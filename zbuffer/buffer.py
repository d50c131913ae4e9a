"""The façade: a buffer that is appended to, read by row, and sampled."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence
from types import TracebackType
from typing import Any, Literal, Self, TypeVar

import numpy as np

from zbuffer.errors import (
    ClosedError,
    ReadOnlyError,
    RowNotFoundError,
    ZBufferError,
)
from zbuffer.forking import call_in_child
from zbuffer.loading.batch import Assembled, Assembler, Batch
from zbuffer.loading.drawing import row_set
from zbuffer.loading.episodes import read_episodes
from zbuffer.loading.maker import Assembling, BatchMaker
from zbuffer.loading.orders import make_sampler
from zbuffer.loading.priorities import Priorities
from zbuffer.loading.sequences import SequenceAssembler
from zbuffer.loading.upload import Transform, Uploader
from zbuffer.reading.chunks import View
from zbuffer.reading.column import ColumnView
from zbuffer.reading.follower import Follower
from zbuffer.reading.rows import Rows
from zbuffer.sampling.episodes import Episodes
from zbuffer.sampling.rowset import RowSet
from zbuffer.sampling.sequences import Span
from zbuffer.schema import Schema
from zbuffer.source import BatchSource, Request
from zbuffer.storage.local import LocalStore, WriterLock
from zbuffer.summary import summary
from zbuffer.writing.keep_priorities import Kept, PriorityStore
from zbuffer.writing.lanes import LaneWriter
from zbuffer.writing.writer import Writer

T = TypeVar("T")
#: Priorities are written at most so long after they have changed.
_SAVE_EVERY_S = 60.0


class Buffer(BatchSource):
    """A replay buffer on disk; make it with :func:`create` or :func:`open`.

    ``len(buffer)`` is the number of steps. ``buffer["obs"]`` is array-like over the
    live rows, oldest first, final observations included.

    Notes
    -----
    Any thread may call the methods. After fork, a child may read what it inherited
    but not write.
    """

    def __init__(
        self,
        store: LocalStore,
        rows: Rows,
        source: Writer | LaneWriter | Follower,
        lock: WriterLock | None,
        *,
        native: bool,
    ) -> None:
        self._store = store
        self._rows = rows
        self._source = source
        call_in_child(self._after_fork)
        self._lock = lock
        self._native = native
        self._closed = False
        self._forked = False
        self._priorities = Priorities(self._load_priorities)
        self._priority_store = PriorityStore(store)
        self._saved_at = time.monotonic()
        super().__init__()

    # -- writing -----------------------------------------------------------

    def append(self, **row: Any) -> None:
        """Add one step.

        Parameters
        ----------
        **row
            Every field of the schema: NumPy arrays, torch tensors, or Python
            scalars for scalar fields; dicts and tuples for nested fields. In a buffer
            with lanes each has a leading axis of lanes, and ``lanes=[3, 7]`` says which
            if it is not all of them. With
            ``next_obs=`` (transition style) the observation after the step is kept
            until the next row repeats it, or the episode ends. Without it (stream
            style), :meth:`end_episode` brings the final observation.

        Raises
        ------
        SchemaError
            A field is missing, unknown, or of another dtype or shape.
        EpisodeError
            In mid-episode, ``obs`` is not the ``next_obs`` of the row before.
        StorageError
            The disk is full.
        ReadOnlyError, ClosedError
            The buffer cannot be written. In all cases nothing has changed.

        Notes
        -----
        ``terminated`` or ``truncated`` ends the episode. A row whose append has
        returned survives the death of this process. Python floats (np.float64
        scalars are such) are rounded to the field's dtype; all else is exact.
        """
        self._writer().append(row)

    def extend(self, **rows: Any) -> int:
        """Add many steps of one time line; returns how many.

        Parameters
        ----------
        **rows
            As in :meth:`append`, each with a leading axis of steps, before that of
            lanes. Episodes end where ``terminated`` or ``truncated`` says so.

        Raises
        ------
        SchemaError, EpisodeError, ReadOnlyError, ClosedError
            As in :meth:`append`; nothing has changed.
        StorageError
            The disk is full; the steps that fitted are stored.
        """
        return self._writer().extend(rows)

    def add_episode(self, **rows: Any) -> int:
        """Add one whole episode; returns its number of steps.

        Parameters
        ----------
        **rows
            Arrays with a leading axis of ``T`` steps. Observations may have
            ``T + 1`` items: the last is the final one. ``terminated`` and
            ``truncated`` may be left out, or be one bool for the last step. In a
            buffer with lanes, ``lane=3`` says where it goes; 0 by default.
        """
        return self._writer().add_episode(rows)

    def end_episode(self, **final_observation: Any) -> None:
        """End the running episode.

        Parameters
        ----------
        **final_observation
            The observation after the last step (``obs=...``). Not needed if the
            last step came with its ``next_obs``. In a buffer with lanes it has a
            leading axis, and ``lanes=`` says which end; all that run by default.
        """
        self._writer().end_episode(final_observation)

    def flush(self) -> None:
        """Seal and commit all rows, so that readers on other machines see them."""
        self._writer().flush()
        self._save_priorities()

    def close(self) -> None:
        """End the running episode, commit all rows, and give the lock up.

        A closed buffer is a plain Zarr group. Calling it again does nothing.
        """
        if self._closed:
            return
        self._closed = True
        self._close_loaders()
        try:
            if isinstance(self._source, Writer | LaneWriter):
                self._source.close()
                self._save_priorities()
        finally:
            if self._lock is not None:
                self._lock.release()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self.close()

    # -- reading -----------------------------------------------------------

    def __len__(self) -> int:
        """Return the number of steps; LAST rows are not counted."""
        return self._read(lambda view: self._rows.count_steps(view, self._source.commit))

    def __getitem__(self, name: str) -> ColumnView:
        """Return a field as an array-like over the live rows."""
        if name not in self._rows.fields:
            raise KeyError(f"{name!r} is not a field; fields are {', '.join(self._rows.fields)}")
        return ColumnView(self._rows, self._view, name)

    def __contains__(self, name: object) -> bool:
        return name in self._rows.fields

    def keys(self) -> list[str]:
        """Return the names of all fields, ``step_type`` last."""
        return list(self._rows.fields)

    def take(self, ids: Any, fields: Sequence[str] | None = None) -> Batch:
        """Read rows by id: the ``indices`` of a batch.

        Parameters
        ----------
        ids
            int64 row ids, of any shape.
        fields
            Names to read; all by default.

        Returns
        -------
        Batch
            Name to array of shape ``ids.shape + item``.

        Raises
        ------
        RowNotFoundError
            A row was evicted, or does not exist yet.
        """
        view = self._view()
        ids = np.asarray(ids)
        if ids.size == 0:
            ids = ids.astype(np.int64)
        if ids.dtype.kind not in "iu":
            raise RowNotFoundError(f"row ids are whole numbers, got {ids.dtype}")
        there = view.contains(ids)
        if not there.all():
            which = f"got {ids.min()} to {ids.max()}"
            if view.first <= ids.min() and ids.max() < view.stop:
                which = f"but none is {ids[~there].reshape(-1)[0]}"
            raise RowNotFoundError(f"rows are {view.first} to {view.stop - 1}, {which}")
        names = self.keys() if fields is None else fields
        for name in names:
            self[name]
        return Batch({n: self._rows.take(view, n, ids.astype(np.int64)) for n in names})

    @property
    def episodes(self) -> Episodes:
        """The episodes, oldest first: start, stop, length, return and how each ended."""
        return self._read(lambda view: read_episodes(self._rows, view, self.schema))

    # -- sampling ----------------------------------------------------------

    def update_priorities(self, indices: Any, priorities: Any) -> int:
        """Set the priorities of rows, for ``order="prioritized"``.

        Parameters
        ----------
        indices
            int64 row ids, the ``indices`` of a batch.
        priorities
            As many numbers above 0.

        Returns
        -------
        int
            How many were ignored: their row was evicted meanwhile.

        Raises
        ------
        SampleError
            A priority is NaN, infinite, zero or negative; nothing has changed.

        Notes
        -----
        Priorities are kept with the buffer: they are written by :meth:`flush`, by
        :meth:`close`, and at most a minute after an update; a process that is killed
        loses those since. Those that a reader sets are its own, and end with it.
        """
        rows = row_set(self._rows, self._view())
        ignored = self._priorities.update(rows, indices, priorities)
        if time.monotonic() - self._saved_at > _SAVE_EVERY_S:
            self._save_priorities()
        return ignored

    def _make_maker(
        self, request: Request, uploader: Uploader, transform: Transform | None
    ) -> BatchMaker:
        sampler = make_sampler(
            request.order,
            dict(request.order_options),
            request.batch_size,
            self._priorities,
            seed=request.seed,
            rank=request.rank,
            world_size=request.world_size,
        )
        assembler: Assembling
        if isinstance(request.shape, Span):
            assembler = SequenceAssembler(self._rows, self.schema, request.shape, request.fields)
        else:
            assembler = Assembler(self._rows, self.schema, request.shape, request.fields)
        return BatchMaker(self._view, assembler, sampler, uploader, transform)

    def _draw_episodes(
        self, n: int, fields: Sequence[str] | None, rng: np.random.Generator
    ) -> Assembled:
        assembler = SequenceAssembler(self._rows, self.schema, Span(1, boundary="pad"), fields)
        return self._read(
            lambda view: assembler.assemble(
                assembler.episodes(n, view, rng), view, self._memory.allocate
            )
        )

    def _row_sets(self) -> list[RowSet]:
        return [row_set(self._rows, self._view())]

    def _n_appended(self) -> int:
        # Of what was evicted only ids are known: with lanes a few of them were no rows.
        view = self._view()
        return view.first + view.n_rows

    # -- about -------------------------------------------------------------

    @property
    def path(self) -> str:
        """Where the buffer lies."""
        return self._store.path

    @property
    def schema(self) -> Schema:
        """The fields of a row."""
        return self._source.commit.schema

    @property
    def capacity(self) -> int | str | None:
        """The limit in rows, or as a text in bytes; None without one."""
        return self._source.commit.capacity

    @property
    def lanes(self) -> int:
        """Number of environments that are recorded side by side."""
        return self._source.commit.lanes

    @property
    def notes(self) -> Mapping[str, Any]:
        """The user's notes, as they were given to :func:`create`."""
        return self._source.commit.notes

    @property
    def first_row(self) -> int:
        """Id of the oldest row that can be read."""
        return self._view().first

    @property
    def rows(self) -> int:
        """One past the id of the newest row; ids are never used again."""
        return self._view().stop

    @property
    def nbytes(self) -> int:
        """Bytes of the live rows, uncompressed."""
        view = self._view()
        return view.n_rows * self._source.commit.row_nbytes

    def nbytes_stored(self) -> int:
        """Return the bytes of all files of the buffer, the tail included."""
        self._check_open()
        return sum(size for _, size in self._store.walk(""))

    @property
    def gather(self) -> Literal["native", "ctypes"]:
        """Which gather runs: the C extension, or the one that needs no compiler."""
        return "native" if self._native else "ctypes"

    def __repr__(self) -> str:
        if self._closed:
            return f"<zbuffer.Buffer {self._store.name} (closed)>"
        # The commit before the view: it counts no row that the view lacks.
        commit = self._source.commit
        return summary(
            self._store,
            self.schema,
            self._view(),
            commit,
            steps=len(self),
            mode="a" if isinstance(self._source, Writer | LaneWriter) else "r",
            gather=self.gather,
        )

    # -- inside ------------------------------------------------------------

    def _read(self, read: Callable[[View], T]) -> T:
        """Read what there is now; anew where rows were evicted in the middle of it."""
        while True:
            view = self._view()
            try:
                return read(view)
            except RowNotFoundError:
                if self._view().first == view.first:
                    raise

    def _load_priorities(self) -> Kept | None:
        return self._priority_store.load(self.first_row)

    def _save_priorities(self) -> None:
        self._saved_at = time.monotonic()
        if isinstance(self._source, Writer | LaneWriter) and not self._forked:
            kept = self._priorities.take_changed()
            if kept is not None:
                self._priority_store.save(kept, self._source.commit.first_row)

    def _view(self) -> View:
        self._check_open()
        return self._source.view()

    def _after_fork(self) -> None:
        """Read as any other process does: the parent goes on, and this copy would not see it."""
        self._forked = True
        self._begin_anew()
        # A thread of the parent may have been changing them: those that were kept count.
        self._priorities = Priorities(self._load_priorities)
        if isinstance(self._source, Writer | LaneWriter) and not self._closed:
            self._source = Follower(self._store, self._source.commit, self._rows.on_change)

    def _writer(self) -> Writer | LaneWriter:
        self._check_open()
        if self._forked:
            raise ZBufferError("a forked process cannot write: open the buffer in the child")
        if not isinstance(self._source, Writer | LaneWriter):
            raise ReadOnlyError(
                f"{self.path} is open for reading: zbuffer.open(path, mode='a') can write"
            )
        return self._source

    def _check_open(self) -> None:
        if self._closed:
            raise ClosedError(f"the buffer at {self.path} is closed")
