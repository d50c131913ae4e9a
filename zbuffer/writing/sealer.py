"""Full tail pages to sealed chunks and commits, on a thread of its own."""

from __future__ import annotations

import contextlib
import threading
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

import numpy as np

from zbuffer.format import layout
from zbuffer.format.commit import MID, NO_ROW, Commit
from zbuffer.schema import STEP_TYPE
from zbuffer.storage import Store
from zbuffer.storage.pages import Page
from zbuffer.writing.encode import Encoder
from zbuffer.writing.ledger import Ledger

Array = np.ndarray[Any, Any]


@dataclass(frozen=True, slots=True)
class _Job:
    page: Page
    count: int
    segments: Array | None = None


class Sealer:
    """Compresses, writes and commits pages in order.

    Parameters
    ----------
    on_commit
        Called on the sealing thread after each commit with the new commit, and
        the page whose chunk it holds.

    Notes
    -----
    Any thread may call the methods. A failed write keeps its page; the error is
    raised by the next :meth:`wait`, which also starts another try.
    """

    def __init__(
        self,
        store: Store,
        commit: Commit,
        native: Any,
        on_commit: Callable[[Commit, Page], None],
    ) -> None:
        self.commit = commit
        self._store = store
        self._on_commit = on_commit
        self._encoders = {
            name: Encoder(field, commit.codecs[name], native)
            for name, field in commit.fields.items()
        }
        self._ledger = Ledger(store, commit)
        self._documents = layout.array_documents(commit)
        self._jobs: deque[_Job] = deque()
        self._changed = threading.Condition()
        self._error: BaseException | None = None
        self._stopping = False
        if commit.capacity_nbytes is not None:
            for chunk in range(commit.first_chunk, commit.stop_chunk):
                nbytes = sum(self._store.size(key) for key in self._keys(chunk))
                self._ledger.set_nbytes(chunk, nbytes)
        self._thread = threading.Thread(target=self._run, name="zbuffer-seal", daemon=True)
        self._thread.start()

    def submit(self, page: Page, count: int) -> None:
        """Queue the first `count` rows of a page."""
        with self._changed:
            self._jobs.append(_Job(page, count))
            self._changed.notify_all()

    def submit_segments(self, page: Page, segments: Array) -> None:
        """Queue a page of a buffer with lanes, as its part of the segment table says."""
        with self._changed:
            self._jobs.append(_Job(page, len(segments), segments))
            self._changed.notify_all()

    def wait(self, at_most: int) -> None:
        """Wait until at most so many pages are queued.

        Raises
        ------
        StorageError
            A page could not be written. It stays queued, and is tried again.
        """
        with self._changed:
            self._changed.wait_for(lambda: len(self._jobs) <= at_most or self._error is not None)
            error, self._error = self._error, None
            self._changed.notify_all()
            if error is not None and len(self._jobs) > at_most:
                raise error

    def stop(self) -> None:
        """End the thread; what is queued and not written stays in the tail."""
        with self._changed:
            self._stopping = True
            self._changed.notify_all()
        self._thread.join()

    def write_commit(self, commit: Commit) -> None:
        """Write arrays' metadata, then the commit."""
        for path, document in self._documents.items():
            rows = commit.stop_segment if path == layout.SEGMENTS else commit.rows
            self._store.write(f"{path}/zarr.json", layout.dump(layout.with_rows(document, rows)))
        self._store.write(layout.ROOT, layout.dump(layout.root_document(commit)))
        self.commit = commit

    def _run(self) -> None:
        while True:
            with self._changed:
                self._changed.wait_for(
                    lambda: self._stopping or (self._jobs and self._error is None)
                )
                if self._stopping:
                    return
                job = self._jobs[0]
            try:
                self._seal(job)
            except BaseException as error:
                with self._changed:
                    self._error = error
                    self._changed.notify_all()
                continue
            with self._changed:
                self._jobs.popleft()
                self._changed.notify_all()

    def _seal(self, job: _Job) -> None:
        commit, page = self.commit, job.page
        used = np.array([job.count])
        if job.segments is not None:
            # Segments of the chunk that are nobody's yet have no rows.
            used = np.zeros(commit.segments_of_chunk, np.int64)
            used[: job.count] = job.segments[:, 2]
        written = 0
        for name, field in commit.fields.items():
            if field.nbytes > 0:
                raw = _padded(page.columns[name], used, NO_ROW if name == STEP_TYPE else 0)
                data = self._encoders[name](raw)
                self._store.write(layout.chunk_path(name, field, page.chunk), data)
                written += len(data)
                if name == STEP_TYPE:
                    steps = int(np.count_nonzero(raw <= MID))
        if job.segments is None:
            rows = page.first + job.count
            table = self._ledger.record(page.chunk, job.count, steps, written)
        else:
            # A chunk that is sealed again may lie before others.
            rows = max(commit.rows, page.first + job.count * commit.rows_of_segment)
            table = self._ledger.record_segments(page.chunk, job.segments, steps, written)
        for key, data in table.items():
            self._store.write(key, data)
        commit = replace(commit, rows=rows, steps=self._ledger.total_steps)
        evicted = self._evict(commit)
        self.write_commit(evicted)
        for chunk in range(commit.first_chunk, evicted.first_chunk):
            self._ledger.drop_first()
            self._delete(chunk)
        self._on_commit(evicted, page)

    def _evict(self, commit: Commit) -> Commit:
        """Return the commit without the oldest chunks that are over the capacity."""
        first, steps = commit.first_chunk, commit.steps
        ledger = self._ledger
        rows, nbytes = ledger.total_rows, ledger.total_nbytes
        while first + 1 < commit.stop_chunk:
            if commit.capacity_rows is not None:
                over = rows - ledger.rows(first) >= commit.capacity_rows
            else:
                over = commit.capacity_nbytes is not None and nbytes > commit.capacity_nbytes
            if not over:
                break
            steps -= ledger.steps(first)
            rows -= ledger.rows(first)
            nbytes -= ledger.nbytes(first)
            first += 1
        return replace(commit, first_row=first * commit.chunk_rows, steps=steps)

    def _keys(self, chunk: int) -> list[str]:
        """Return the keys of a chunk, of all fields that have any bytes."""
        fields = self.commit.fields.items()
        return [layout.chunk_path(n, f, chunk) for n, f in fields if f.nbytes > 0]

    def _delete(self, chunk: int) -> None:
        # The commit is made: what cannot be deleted now is swept at the next opening.
        for key in self._keys(chunk):
            with contextlib.suppress(OSError):
                self._store.delete(key)


def _padded(column: Array, used: Array, fill: int) -> Array:
    """Return a whole chunk of whose segments only the used rows are not the fill value."""
    chunk_rows = len(column) - 1
    segment_rows = chunk_rows // len(used)
    if (used == segment_rows).all():
        return column[:chunk_rows]
    padded = np.zeros((chunk_rows, *column.shape[1:]), column.dtype)
    if fill:
        padded[...] = fill
    for segment, count in enumerate(used.tolist()):
        start = segment * segment_rows
        padded[start : start + count] = column[start : start + count]
    return padded
