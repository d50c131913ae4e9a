"""From a path to a buffer: create a new one, or open one that exists."""

from __future__ import annotations

import json
import os
import uuid
from collections.abc import Mapping
from typing import Any, Literal

from zbuffer.buffer import Buffer
from zbuffer.capacity import read_capacity
from zbuffer.errors import BufferExistsError, NotABufferError
from zbuffer.format.commit import STEP_TYPE_FIELD, Commit
from zbuffer.format.geometry import (
    Codec,
    check_chunk_rows,
    check_lanes,
    check_segment_rows,
    choose_chunk_rows,
    choose_segment_rows,
    codecs_by_field,
    resolve_codec,
)
from zbuffer.reading.follower import Follower, read_commit
from zbuffer.reading.gather import Backend, default_threads, make_gather, native_module
from zbuffer.reading.rows import Rows
from zbuffer.schema import STEP_TYPE, Field, Schema
from zbuffer.storage.local import LocalStore, WriterLock
from zbuffer.storage.pages import Page
from zbuffer.writing.lanes import LaneWriter
from zbuffer.writing.recover import (
    lane_state,
    recover_lanes,
    recover_pages,
    sweep,
    take_over,
    write_new,
)
from zbuffer.writing.sealer import Sealer
from zbuffer.writing.writer import Writer

#: RAM for small fields that are kept decoded.
_COLUMNS_NBYTES = 1 << 30


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
    lanes: int = 1,
    segment_rows: int | None = None,
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
    lanes
        Number of environments that are recorded side by side. With more than one,
        :meth:`Buffer.append` takes a leading axis of lanes.
    segment_rows
        With lanes: rows that a lane has in one piece; a divisor of `chunk_rows`. By
        default so many that one of each lane fill a chunk, and take at most 64 MiB.
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
    check_lanes(schema, lanes)
    if segment_rows is None:
        segment_rows = choose_segment_rows(schema, lanes, chunk_rows)
    check_segment_rows(segment_rows, lanes, chunk_rows)
    default = Codec("blosc2", cname, clevel, None, block_rows)
    codecs = codecs_by_field(schema, codec, default)
    builtin = "blosc" if all(c.name == "blosc" for c in codecs.values()) else "blosc2"
    codecs[STEP_TYPE] = Codec(builtin)  # type: ignore[arg-type]  # one of the two names
    fields: dict[str, Field] = {**schema, STEP_TYPE: STEP_TYPE_FIELD}
    commit = Commit(
        schema=schema,
        codecs={name: resolve_codec(codecs[name], fields[name], chunk_rows) for name in fields},
        chunk_rows=chunk_rows,
        uuid=str(uuid.uuid4()),
        capacity_rows=capacity_rows,
        capacity_nbytes=capacity_nbytes,
        lanes=lanes,
        segment_rows=segment_rows,
        notes=_plain_json(notes or {}),
    )
    _check_threads(threads)
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
    _check_threads(threads)
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
    commit = read_commit(store)
    rows = _make_rows(store, commit, native, threads)
    return Buffer(
        store, rows, Follower(store, commit, rows.on_change), None, native=native is not None
    )


def _open_writer(
    store: LocalStore, commit: Commit, lock: WriterLock, native: Any, threads: int | None
) -> Buffer:
    rows = _make_rows(store, commit, native, threads)
    writers: list[Writer | LaneWriter] = []

    def on_commit(new: Commit, page: Page) -> None:
        rows.forget_before(new)
        writers[0].on_commit(page)

    def new_page(now: Commit, chunk: int) -> Page:
        return Page.create(now, store.file(""), chunk)

    sealer = Sealer(store, commit, native, on_commit)
    try:
        sealer.write_commit(commit)
        if commit.lanes > 1:
            left = recover_lanes(store, commit)
            state = lane_state(store, commit, left)
            writers.append(LaneWriter(sealer, *state, left, new_page, rows.forget))
        else:
            pages = recover_pages(store, commit, new_page)
            writers.append(Writer(sealer, pages, new_page, rows.forget))
        writers[0].resume()
    except BaseException:
        sealer.stop()
        raise
    return Buffer(store, rows, writers[0], lock, native=native is not None)


def _make_rows(store: LocalStore, commit: Commit, native: Any, threads: int | None) -> Rows:
    n_threads = default_threads() if threads is None else threads
    return Rows(store, commit, make_gather(native), n_threads, _COLUMNS_NBYTES)


def _check_threads(threads: int | None) -> None:
    whole = isinstance(threads, int) and not isinstance(threads, bool)
    if threads is not None and (not whole or threads < 1):
        raise ValueError(f"threads must be a whole number above 0, got {threads!r}")


def _local_store(path: str | os.PathLike[str], native: Any) -> LocalStore:
    if "://" in os.fspath(path):
        raise ValueError(f"{os.fspath(path)!r} is a URL; this version opens local paths only")
    return LocalStore(path) if native is None else LocalStore(path, native.map_file)


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


def _plain_json(notes: Mapping[str, Any]) -> dict[str, Any]:
    try:
        plain: dict[str, Any] = json.loads(json.dumps(dict(notes), allow_nan=False))
    except (TypeError, ValueError) as error:
        raise ValueError(f"notes must be plain JSON: {error}") from None
    return plain
