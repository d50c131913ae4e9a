"""The façade: a buffer that is appended to, read by row, and sampled."""

from __future__ import annotations

import os
import secrets
from collections.abc import Callable, Mapping, Sequence
from types import TracebackType
from typing import Any, Literal, Self

import numpy as np

from zbuffer.capacity import read_capacity
from zbuffer.errors import (
    BufferExistsError,
    ClosedError,
    NotABufferError,
    ReadOnlyError,
    RowNotFoundError,
)
from zbuffer.format.commit import STEP_TYPE_FIELD, Commit
from zbuffer.format.geometry import (
    Codec,
    check_chunk_rows,
    choose_chunk_rows,
    codecs_by_field,
    resolve_codec,
)
from zbuffer.loading.batch import Assembler, Batch, allocate
from zbuffer.loading.loader import Loader
from zbuffer.loading.upload import make_uploader
from zbuffer.reading.chunks import View
from zbuffer.reading.column import ColumnView
from zbuffer.reading.follower import Follower, read_commit
from zbuffer.reading.gather import Backend, default_threads, make_gather, native_module
from zbuffer.reading.rows import Rows
from zbuffer.sampling.episodes import Episodes
from zbuffer.sampling.samplers import UniformSampler, generator
from zbuffer.sampling.windows import Window
from zbuffer.schema import STEP_TYPE, Field, Schema
from zbuffer.storage.local import LocalStore, WriterLock
from zbuffer.storage.pages import Page
from zbuffer.writing.recover import recover_pages, sweep, take_over, write_new
from zbuffer.writing.sealer import Sealer
from zbuffer.writing.writer import Writer

#: RAM for small fields that are kept decoded.
_COLUMNS_NBYTES = 1 << 30


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
        commit: Callable[[], Commit],
        lock: WriterLock | None,
        *,
        native: bool,
    ) -> None:
        self._store = store
        self._rows = rows
        self._source = source
        self._commit = commit
        self._lock = lock
        self._native = native
        self._closed = False
        self._loaders: list[Loader] = []

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
        view, commit = self._view(), self._commit()
        steps = commit.steps
        if commit.first_row != view.first or commit.rows > view.stop:
            ids = np.arange(view.first, view.stop)
            return int(np.count_nonzero(self._rows.take(view, STEP_TYPE, ids) < 2))
        ids = np.arange(commit.rows, view.stop)
        return steps + int(np.count_nonzero(self._rows.take(view, STEP_TYPE, ids) < 2))

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

        if isinstance(self._source, Writer):
            running = self._source.running
        else:
            running = bool(view.pages)
        return Episodes(
            view.first,
            self._rows.take(view, STEP_TYPE, ids),
            column("reward"),
            column("terminated"),
            column("truncated"),
            running=running,
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
        loader = self._make_loader(
            batch_size,
            Window(frame_stack, n_step, gamma),
            fields,
            seed=0,
            device=None,
            prefetch=0,
            transform=None,
            rng=_generator(seed),
        )
        batch: Batch = next(loader)
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
        if order != "uniform":
            raise ValueError(f"order must be 'uniform', got {order!r}")
        if isinstance(prefetch, bool) or not isinstance(prefetch, int) or prefetch < 0:
            raise ValueError(f"prefetch must be a whole number from 0 on, got {prefetch!r}")
        loader = self._make_loader(
            batch_size,
            Window(frame_stack, n_step, gamma),
            fields,
            seed=seed,
            device=device,
            prefetch=prefetch,
            transform=transform,
        )
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
        return self._commit().schema

    @property
    def capacity(self) -> int | str | None:
        """The limit in rows, or as a text in bytes; None without one."""
        commit = self._commit()
        if commit.capacity_nbytes is not None:
            return f"{commit.capacity_nbytes}B"
        return commit.capacity_rows

    @property
    def notes(self) -> Mapping[str, Any]:
        """The user's notes, as they were given to :func:`create`."""
        return self._commit().notes

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
        return (view.stop - view.first) * sum(f.nbytes for f in self._rows.fields.values())

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
            return f"<zbuffer.Buffer {self.path} (closed)>"
        view = self._view()
        fields = "\n".join(f"  {name}: {field}" for name, field in self.schema.items())
        mode = "a" if isinstance(self._source, Writer) else "r"
        stored, raw = self.nbytes_stored(), self.nbytes
        ratio = f", {raw / stored:.1f}x smaller than raw" if view.stop > view.first else ""
        return (
            f"<zbuffer.Buffer {self.path} mode={mode!r}\n"
            f"  {len(self)} steps in rows {view.first} to {view.stop}, "
            f"capacity {self.capacity}\n"
            f"  {stored / 1e6:.1f} MB on disk{ratio}, {self.gather} gather\n"
            f"{fields}>"
        )

    # -- inside ------------------------------------------------------------

    def _make_loader(
        self,
        batch_size: int,
        window: Window,
        fields: Sequence[str] | None,
        *,
        seed: int,
        device: Any,
        prefetch: int,
        transform: Callable[[Batch], Any] | None,
        rng: np.random.Generator | None = None,
    ) -> Loader:
        self._check_open()
        if isinstance(batch_size, bool) or not isinstance(batch_size, int | np.integer):
            raise ValueError(f"batch_size must be a whole number above 0, got {batch_size!r}")
        if batch_size < 1:
            raise ValueError(f"batch_size must be a whole number above 0, got {batch_size!r}")
        if isinstance(seed, bool) or not isinstance(seed, int | np.integer) or seed < 0:
            raise ValueError(f"seed must be a whole number from 0 on, got {seed!r}")
        return Loader(
            self._view,
            Assembler(self._rows, self.schema, window, fields),
            UniformSampler(),
            make_uploader(device, prefetch + 2),
            batch_size=int(batch_size),
            seed=int(seed),
            prefetch=prefetch,
            transform=transform,
            rng=rng,
        )

    def _view(self) -> View:
        self._check_open()
        if isinstance(self._source, Follower):
            return self._source.view()
        # The commit first: rows that it evicts are gone, rows after it only come.
        first = self._commit().first_row
        pages = self._source.pages
        tip = self._source.tip
        pages[tip.page.chunk] = tip.page
        return View(first, tip.stop, pages, tip.page if tip.pending else None)

    def _writer(self) -> Writer:
        self._check_open()
        if not isinstance(self._source, Writer):
            raise ReadOnlyError(
                f"{self.path} is open for reading: zbuffer.open(path, mode='a') opens it for writing"
            )
        return self._source

    def _check_open(self) -> None:
        if self._closed:
            raise ClosedError(f"the buffer at {self.path} is closed")


def create(
    path: str | os.PathLike[str],
    schema: Schema | Mapping[str, Any],
    *,
    capacity: int | str | None = None,
    overwrite: bool = False,
    codec: str | Codec | Mapping[str, Any] = "blosc2",
    cname: str = "zstd",
    clevel: int = 5,
    block_rows: int | None = None,
    chunk_rows: int | None = None,
    notes: Mapping[str, Any] | None = None,
    threads: int | None = None,
    gather: Backend = "auto",
) -> Buffer:
    """Make a new buffer, and open it for writing.

    Parameters
    ----------
    path
        A directory that does not exist yet, or is empty. ``~`` is expanded.
    schema
        What a row is: a :class:`Schema`, or the mapping that makes one.
    capacity
        Newest rows to keep (LAST rows count), or bytes on disk as in ``"20GB"``;
        held to within one chunk. No limit by default.
    overwrite
        Remove the buffer that is there. Anything else at `path` is refused.
    codec
        ``"blosc2"``, ``"blosc"`` (readable by every Zarr v3 library), a
        :class:`Codec`, or a mapping of field name to one of these or to a dict of
        :class:`Codec` arguments.
    cname, clevel, block_rows
        Defaults for the codecs; see :class:`Codec`.
    chunk_rows
        Rows per chunk file; by default 16 to 32 MiB of the largest field.
    notes
        Plain JSON that stays with the buffer.
    threads
        How many threads decode; by default the cores of this process.
    gather
        ``"native"``, ``"ctypes"``, or whichever is there.

    Returns
    -------
    Buffer

    Raises
    ------
    BufferExistsError
        There is something at `path`.
    BufferLockedError
        Another writer holds the buffer that would be overwritten.
    SchemaError, ValueError
        An argument that cannot be; nothing was written.
    """
    schema = schema if isinstance(schema, Schema) else Schema(schema)
    capacity_rows, capacity_nbytes = read_capacity(capacity)
    if chunk_rows is None:
        chunk_rows = choose_chunk_rows(schema, capacity_rows)
    check_chunk_rows(schema, chunk_rows)
    default = Codec("blosc2", cname, clevel, None, block_rows)
    codecs = codecs_by_field(schema, codec, default)
    builtin = "blosc" if all(c.name == "blosc" for c in codecs.values()) else "blosc2"
    codecs[STEP_TYPE] = Codec(builtin)  # type: ignore[arg-type]  # one of the two names
    fields: dict[str, Field] = {**schema, STEP_TYPE: STEP_TYPE_FIELD}
    commit = Commit(
        schema=schema,
        codecs={name: resolve_codec(codecs[name], fields[name], chunk_rows) for name in fields},
        chunk_rows=chunk_rows,
        capacity_rows=capacity_rows,
        capacity_nbytes=capacity_nbytes,
        notes=_plain_json(notes or {}),
    )
    native = native_module(gather)
    store = _local_store(path, native)
    _check_free(store, overwrite=overwrite)
    os.makedirs(store.path, exist_ok=True)
    lock = WriterLock(store.path)
    try:
        _check_free(store, overwrite=overwrite)
        if not store.is_empty():
            store.clear()
        write_new(store, commit)
        return _open_writer(store, commit, lock, native, threads)
    except BaseException:
        lock.release()
        raise


def open(
    path: str | os.PathLike[str],
    mode: Literal["r", "a"] = "r",
    *,
    threads: int | None = None,
    gather: Backend = "auto",
) -> Buffer:
    """Open a buffer that exists.

    Parameters
    ----------
    path
        Its directory. ``~`` is expanded.
    mode
        ``"r"``: read, also while a writer is at work on this host, whose rows are
        seen as soon as they are appended. ``"a"``: append; the rows of a writer
        that was killed come back. An episode never goes on over a reopening.
    threads, gather
        As in :func:`create`.

    Raises
    ------
    BufferNotFoundError
        There is nothing at `path`.
    NotABufferError
        There is something else.
    BufferLockedError
        ``mode="a"`` and another writer holds the buffer.
    DamagedError
        Files of the buffer are damaged.
    """
    if mode not in ("r", "a"):
        raise ValueError(f"mode must be 'r' or 'a', got {mode!r}")
    native = native_module(gather)
    store = _local_store(path, native)
    if mode == "r":
        return _open_reader(store, native, threads)
    read_commit(store)
    lock = WriterLock(store.path)
    try:
        commit = take_over(read_commit(store))
        sweep(store, commit)
        return _open_writer(store, commit, lock, native, threads)
    except BaseException:
        lock.release()
        raise


def _open_reader(store: LocalStore, native: Any, threads: int | None) -> Buffer:
    changes: list[Callable[[Commit, Commit], None]] = []
    follower = Follower(store, lambda old, new: changes[0](old, new))
    rows = _make_rows(store, follower.commit, native, threads)
    changes.append(rows.on_change)
    return Buffer(store, rows, follower, lambda: follower.commit, None, native=native is not None)


def _open_writer(
    store: LocalStore, commit: Commit, lock: WriterLock, native: Any, threads: int | None
) -> Buffer:
    rows = _make_rows(store, commit, native, threads)
    writers: list[Writer] = []

    def on_commit(new: Commit, page: Page) -> None:
        rows.forget_before(new)
        writers[0].on_commit(page)

    sealer = Sealer(store, commit, native, on_commit)
    try:
        sealer.write_commit(commit)

        def new_page(now: Commit, chunk: int) -> Page:
            return Page.create(now, store.file(""), chunk)

        pages = recover_pages(store, commit, new_page)
        writers.append(Writer(store, sealer, pages, new_page, rows.forget))
        writers[0].resume()
    except BaseException:
        sealer.stop()
        raise
    return Buffer(
        store, rows, writers[0], lambda: sealer.commit, lock, native=native is not None
    )


def _make_rows(store: LocalStore, commit: Commit, native: Any, threads: int | None) -> Rows:
    n_threads = default_threads() if threads is None else int(threads)
    if n_threads < 1:
        raise ValueError(f"threads must be at least 1, got {threads!r}")
    return Rows(store, commit, make_gather(native), n_threads, _COLUMNS_NBYTES)


def _local_store(path: str | os.PathLike[str], native: Any) -> LocalStore:
    if "://" in os.fspath(path):
        raise ValueError(f"{os.fspath(path)!r} is a URL; this version opens local paths only")
    return LocalStore(path, None if native is None else native.map_file)


def _check_free(store: LocalStore, *, overwrite: bool) -> None:
    root = store.file("")
    if root.exists() and not root.is_dir():
        raise BufferExistsError(f"{store.path} is a file")
    if store.is_empty():
        return
    if not overwrite:
        raise BufferExistsError(
            f"there is something at {store.path}: zbuffer.open(path, mode='a') goes on with a "
            "buffer, create(..., overwrite=True) replaces it"
        )
    try:
        read_commit(store)
    except NotABufferError as error:
        raise BufferExistsError(f"{error}; overwrite=True replaces only buffers") from None
    except FileNotFoundError:
        raise BufferExistsError(
            f"{store.path} holds something that is not a zbuffer; overwrite=True replaces only "
            "buffers"
        ) from None


def _generator(seed: int | np.random.Generator | None) -> np.random.Generator:
    if isinstance(seed, np.random.Generator):
        return seed
    return generator(secrets.randbits(63) if seed is None else seed, 0)


def _plain_json(notes: Mapping[str, Any]) -> dict[str, Any]:
    import json

    try:
        plain: dict[str, Any] = json.loads(json.dumps(dict(notes), allow_nan=False))
    except (TypeError, ValueError) as error:
        raise ValueError(f"notes must be plain JSON: {error}") from None
    return plain


