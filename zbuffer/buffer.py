"""The façade: a buffer that is appended to, read by row, and sampled."""

from __future__ import annotations

import os
import secrets
import threading
from collections.abc import Callable, Mapping, Sequence
from types import TracebackType
from typing import Any, Literal, Self

import numpy as np

from zbuffer.errors import (
    ClosedError,
    ReadOnlyError,
    RowNotFoundError,
    ZBufferError,
)
from zbuffer.forking import call_in_child
from zbuffer.loading.batch import Assembler, Batch
from zbuffer.loading.loader import Loader, LoaderOptions, check_count
from zbuffer.loading.maker import BatchMaker
from zbuffer.loading.memory import Recycler
from zbuffer.loading.upload import make_uploader
from zbuffer.reading.chunks import View
from zbuffer.reading.column import ColumnView
from zbuffer.reading.follower import Follower
from zbuffer.reading.rows import Rows
from zbuffer.sampling.episodes import Episodes
from zbuffer.sampling.samplers import UniformSampler, generator
from zbuffer.sampling.windows import Window
from zbuffer.schema import STEP_TYPE, Schema
from zbuffer.storage.local import LocalStore, WriterLock
from zbuffer.summary import summary
from zbuffer.writing.writer import Writer


class Buffer:
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
        source: Writer | Follower,
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
        self._memory = Recycler()
        self._loaders: list[Loader] = []
        self._last_maker: tuple[Any, Any] = (None, None)
        self._random = _Random()

    # -- writing -----------------------------------------------------------

    def append(self, **row: Any) -> None:
        """Add one step.

        Parameters
        ----------
        **row
            Every field of the schema: NumPy arrays, torch tensors, or Python
            scalars for scalar fields; dicts and tuples for nested fields. With
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
            As in :meth:`append`, each with a leading axis of steps. Episodes end
            where ``terminated`` or ``truncated`` says so.

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
            ``truncated`` may be left out, or be one bool for the last step.
        """
        return self._writer().add_episode(rows)

    def end_episode(self, **final_observation: Any) -> None:
        """End the running episode.

        Parameters
        ----------
        **final_observation
            The observation after the last step (``obs=...``). Not needed if the
            last step came with its ``next_obs``.
        """
        self._writer().end_episode(final_observation)

    def flush(self) -> None:
        """Seal and commit all rows, so that readers on other machines see them."""
        self._writer().flush()

    def close(self) -> None:
        """End the running episode, commit all rows, and give the lock up.

        A closed buffer is a plain Zarr group. Calling it again does nothing.
        """
        if self._closed:
            return
        self._closed = True
        for loader in self._loaders:
            loader.close()
        try:
            if isinstance(self._source, Writer):
                self._source.close()
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
        view = self._view()
        return self._rows.count_steps(view, self._source.commit)

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
        if ids.dtype.kind not in "iu":
            raise RowNotFoundError(f"row ids are whole numbers, got {ids.dtype}")
        view = View(view.first, view.stop, view.pages)
        if ids.size and (ids.min() < view.first or ids.max() >= view.stop):
            raise RowNotFoundError(
                f"rows are {view.first} to {view.stop - 1}, got {ids.min()} to {ids.max()}"
            )
        names = self.keys() if fields is None else fields
        for name in names:
            self[name]
        return Batch({n: self._rows.take(view, n, ids.astype(np.int64)) for n in names})

    @property
    def episodes(self) -> Episodes:
        """The episodes, oldest first: start, stop, length, return and how each ended."""
        view = self._view()
        ids = np.arange(view.first, view.stop)
        schema = self.schema

        def column(role: str) -> Any:
            name = schema.named(role)
            return None if name is None else self._rows.take(view, name, ids)

        return Episodes(
            view.first,
            self._rows.take(view, STEP_TYPE, ids),
            column("reward"),
            column("terminated"),
            column("truncated"),
            running=view.running,
        )

    # -- sampling ----------------------------------------------------------

    def sample(
        self,
        batch_size: int = 256,
        *,
        frame_stack: int | None = None,
        n_step: int = 1,
        gamma: float = 0.99,
        fields: Sequence[str] | None = None,
        seed: int | np.random.Generator | None = None,
    ) -> Batch:
        """Draw steps uniformly, with replacement.

        Parameters
        ----------
        batch_size
            Number of steps ``B``.
        frame_stack
            Observations per stack, within the episode, its first one repeated
            before its start. Adds an axis: ``(B, frame_stack, *item)``. By
            default one observation, without that axis.
        n_step, gamma
            ``reward`` is the discounted sum of up to `n_step` rewards, stopping
            where the episode ends; ``next_obs`` is the observation after them.
        fields
            Names to deliver, ``"next_obs"`` among them; all by default.
        seed
            A number or a generator, for draws that can be repeated.

        Returns
        -------
        Batch
            NumPy arrays: the fields, ``next_obs``, and ``indices`` (int64 row ids),
            ``n_steps`` (int64, how many rewards were summed), ``discount``
            (float32, ``gamma ** n_steps``, 0 where the episode terminated: what
            the value of ``next_obs`` is multiplied with) and ``mask`` (bool,
            False where no observation after the steps is stored, which is only
            so at terminated steps). With ``n_step=1``, ``obs`` and ``next_obs``
            are overlapping views of one array.

        Raises
        ------
        SampleError
            The buffer is empty, or no row has such a window.

        Notes
        -----
        Steps without a stored observation after them (the newest of a stream, the
        last before a cut) and steps whose stack was evicted are not drawn.
        """
        self._check_open()
        maker = self._sample_maker(frame_stack, n_step, gamma, fields)
        batch: Batch = maker.make(
            check_count("batch_size", batch_size, 1), self._random.generator(seed)
        ).batch
        return batch

    def loader(
        self,
        batch_size: int = 256,
        *,
        frame_stack: int | None = None,
        n_step: int = 1,
        gamma: float = 0.99,
        fields: Sequence[str] | None = None,
        order: Literal["uniform"] = "uniform",
        device: Any = None,
        prefetch: int = 2,
        seed: int = 0,
        transform: Callable[[Batch], Any] | None = None,
    ) -> Loader:
        """Return an endless iterator of batches, made ahead on a thread.

        Parameters
        ----------
        batch_size, frame_stack, n_step, gamma, fields
            As in :meth:`sample`.
        order
            ``"uniform"``: every step with the same probability, with replacement.
        device
            None for NumPy arrays; ``"cpu"`` for torch tensors; ``"cuda"`` for
            tensors there, copied from pinned memory on a stream of their own.
        prefetch
            Batches made ahead; 0 makes each when it is asked for.
        seed
            With the same seed and the same rows, the same batches follow.
        transform
            Called with each batch on the prefetch thread; its answer is handed out.
        """
        self._check_open()
        if order != "uniform":
            raise ValueError(f"order must be 'uniform', got {order!r}")
        options = LoaderOptions(batch_size, prefetch, seed)
        # A slot for each batch made ahead, one for the batch being made, and one for
        # the batch whose copies may still run.
        uploader = make_uploader(device, options.prefetch + 2, self._memory)
        assembler = Assembler(
            self._rows, self.schema, Window(frame_stack, n_step, gamma), _listed(fields)
        )
        maker = BatchMaker(self._view, assembler, UniformSampler(), uploader, transform)
        loader = Loader(maker, options)
        self._loaders = [other for other in self._loaders if not other.closed]
        self._loaders.append(loader)
        return loader

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
        return (view.stop - view.first) * self._source.commit.row_nbytes

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
            mode="a" if isinstance(self._source, Writer) else "r",
            gather=self.gather,
        )

    # -- inside ------------------------------------------------------------

    def _sample_maker(
        self, frame_stack: int | None, n_step: int, gamma: float, fields: Sequence[str] | None
    ) -> BatchMaker:
        """Return what makes the batches of :meth:`sample`; the last is kept for the next call."""
        wanted = (frame_stack, n_step, gamma, _listed(fields))
        last, maker = self._last_maker
        if last != wanted:
            window = Window(frame_stack, n_step, gamma)
            assembler = Assembler(self._rows, self.schema, window, wanted[3])
            uploader = make_uploader(None, 1, self._memory)
            maker = BatchMaker(self._view, assembler, UniformSampler(), uploader)
            self._last_maker = (wanted, maker)
        kept: BatchMaker = maker
        return kept

    def _view(self) -> View:
        self._check_open()
        return self._source.view()

    def _after_fork(self) -> None:
        """Read as any other process does: the parent goes on, and this copy would not see it."""
        self._forked = True
        # A thread of the parent may have held its lock.
        self._memory = Recycler()
        self._last_maker = (None, None)
        if isinstance(self._source, Writer) and not self._closed:
            self._source = Follower(self._store, self._source.commit, self._rows.on_change)

    def _writer(self) -> Writer:
        self._check_open()
        if self._forked:
            raise ZBufferError("a forked process cannot write: open the buffer in the child")
        if not isinstance(self._source, Writer):
            raise ReadOnlyError(
                f"{self.path} is open for reading: zbuffer.open(path, mode='a') can write"
            )
        return self._source

    def _check_open(self) -> None:
        if self._closed:
            raise ClosedError(f"the buffer at {self.path} is closed")


def _listed(fields: Sequence[str] | None) -> Sequence[str] | None:
    return fields if fields is None or isinstance(fields, str) else tuple(fields)


class _Random(threading.local):
    """The generators of :meth:`Buffer.sample`, one set for each thread."""

    def __init__(self) -> None:
        self._own: np.random.Generator | None = None
        self._pid = 0

    def generator(self, seed: int | np.random.Generator | None) -> np.random.Generator:
        """Return the numbers that a seed names; without one, new ones."""
        if isinstance(seed, np.random.Generator):
            return seed
        if seed is not None:
            return generator(check_count("seed", seed, 0), 0)
        if self._own is None or self._pid != os.getpid():
            # A forked child draws numbers of its own.
            self._own, self._pid = generator(secrets.randbits(63), 0), os.getpid()
        return self._own
