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
from zbuffer.format.commit import LAST, NO_ROW, Commit
from zbuffer.format.segments import decode_segments, encode_segments
from zbuffer.schema import STEP_TYPE
from zbuffer.storage import Store
from zbuffer.storage.pages import Page
from zbuffer.writing.encode import Encoder


class Ledger:
    """What the writer knows about each live chunk: steps before it, and its bytes.

    Notes
    -----
    Used by the sealing thread, and at open before that thread exists.
    """

    def __init__(self, store: Store, commit: Commit) -> None:
        self._store = store
        self._first = commit.first_chunk
        self._first_steps: deque[int] = deque()
        self._used: deque[int] = deque()
        self.nbytes: dict[int, int] = {}
        for chunk in range(commit.first_chunk, commit.stop_chunk):
            part, row = divmod(chunk, layout.SEGMENT_CHUNK)
            if row == 0 or chunk == commit.first_chunk:
                key = layout.segments_path(part)
                table = decode_segments(store.read(key), f"{store.path}/{key}")
            self._first_steps.append(int(table[row, 1]))
            self._used.append(int(table[row, 2]))

    def first_step(self, chunk: int) -> int:
        """Return how many steps came before a chunk."""
        return self._first_steps[chunk - self._first]

    def record(self, chunk: int, first_step: int, used: int) -> bytes:
        """Note a chunk, and return the part of the segment table that holds it."""
        at = chunk - self._first
        if at == len(self._used):
            self._first_steps.append(first_step)
            self._used.append(used)
        self._used[at] = used
        start = chunk - chunk % layout.SEGMENT_CHUNK
        rows = np.zeros((chunk - start + 1, 3), np.int64)
        # Chunks before the first live one keep zeros: nothing is asked about them.
        for number in range(max(start, self._first), chunk + 1):
            i = number - self._first
            rows[number - start] = (0, self._first_steps[i], self._used[i])
        return encode_segments(rows)

    def drop_first(self) -> None:
        """Forget the oldest chunk."""
        self.nbytes.pop(self._first, None)
        self._first_steps.popleft()
        self._used.popleft()
        self._first += 1


@dataclass(frozen=True, slots=True)
class _Job:
    page: Page
    count: int


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
            self._measure_chunks()
        self._thread = threading.Thread(target=self._run, name="zbuffer-seal", daemon=True)
        self._thread.start()

    def submit(self, page: Page, count: int) -> None:
        """Queue the first `count` rows of a page."""
        with self._changed:
            self._jobs.append(_Job(page, count))
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
            rows = commit.stop_chunk if path == layout.SEGMENTS else commit.rows
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
        written = 0
        for name, field in commit.fields.items():
            if field.nbytes > 0:
                raw = _padded(page.columns[name], job.count, NO_ROW if name == STEP_TYPE else 0)
                data = self._encoders[name](raw)
                self._store.write(layout.chunk_path(name, field, page.chunk), data)
                written += len(data)
        self._ledger.nbytes[page.chunk] = written
        steps = np.count_nonzero(page.columns[STEP_TYPE][: job.count] != LAST)
        before = commit.steps
        if page.chunk == commit.rows // commit.chunk_rows and commit.rows % commit.chunk_rows:
            # A fuller version of a chunk whose first rows are committed already.
            first_step = self._ledger.first_step(page.chunk)
            before = first_step - self._ledger.first_step(commit.first_chunk)
        elif commit.rows == commit.first_row:
            first_step = 0
        else:
            first_step = self._ledger.first_step(commit.first_chunk) + commit.steps
        table = self._ledger.record(page.chunk, first_step, job.count)
        self._store.write(layout.segments_path(page.chunk // layout.SEGMENT_CHUNK), table)
        commit = replace(commit, rows=page.first + job.count, steps=before + int(steps))
        evicted = self._evict(commit)
        self.write_commit(evicted)
        for chunk in range(commit.first_chunk, evicted.first_chunk):
            self._ledger.drop_first()
            self._delete(chunk)
        self._on_commit(evicted, page)

    def _evict(self, commit: Commit) -> Commit:
        """Return the commit without the oldest chunks that are over the capacity."""
        first, steps = commit.first_chunk, commit.steps
        nbytes = sum(self._ledger.nbytes.values()) if commit.capacity_nbytes else 0
        while first + 1 < commit.stop_chunk and self._is_over(commit, first, nbytes):
            steps -= self._ledger.first_step(first + 1) - self._ledger.first_step(first)
            nbytes -= self._ledger.nbytes.get(first, 0)
            first += 1
        return replace(commit, first_row=first * commit.chunk_rows, steps=steps)

    def _is_over(self, commit: Commit, first: int, nbytes: int) -> bool:
        if commit.capacity_rows is not None:
            left = commit.rows - (first + 1) * commit.chunk_rows
            return left >= commit.capacity_rows
        return commit.capacity_nbytes is not None and nbytes > commit.capacity_nbytes

    def _keys(self, chunk: int) -> list[str]:
        """Return the keys of a chunk, of all fields that have any bytes."""
        fields = self.commit.fields.items()
        return [layout.chunk_path(n, f, chunk) for n, f in fields if f.nbytes > 0]

    def _delete(self, chunk: int) -> None:
        # The commit is made: what cannot be deleted now is swept at the next opening.
        for key in self._keys(chunk):
            with contextlib.suppress(OSError):
                self._store.delete(key)

    def _measure_chunks(self) -> None:
        for chunk in range(self.commit.first_chunk, self.commit.stop_chunk):
            self._ledger.nbytes[chunk] = sum(self._store.size(k) for k in self._keys(chunk))


def _padded(column: np.ndarray[Any, Any], count: int, fill: int) -> np.ndarray[Any, Any]:
    """Return a whole chunk whose rows from `count` on are the fill value."""
    chunk_rows = len(column) - 1
    if count == chunk_rows:
        return column[:chunk_rows]
    padded = np.zeros((chunk_rows, *column.shape[1:]), column.dtype)
    if fill:
        padded[count:] = fill
    padded[:count] = column[:count]
    return padded
