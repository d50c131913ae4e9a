"""The one writer of a buffer: rows into the tail, full pages to the sealer."""

from __future__ import annotations

import contextlib
import os
import threading
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from typing import Any

import numpy as np

from zbuffer.errors import ClosedError, EpisodeError, StorageError, ZBufferError
from zbuffer.format.commit import FIRST, LAST, MID, Commit
from zbuffer.format.tail import PageState
from zbuffer.reading.chunks import View
from zbuffer.schema import STEP_TYPE
from zbuffer.storage.pages import Page
from zbuffer.writing.chains import as_transitions, check_chain
from zbuffer.writing.rows import RowReader
from zbuffer.writing.sealer import Sealer

#: Unsealed pages that may wait for the sealer before `append` waits: in bytes, and
#: in number, for each holds a descriptor.
_QUEUE_NBYTES = 192 << 20
_QUEUE_PAGES = 32

Array = np.ndarray[Any, Any]


@dataclass(frozen=True, slots=True)
class Tip:
    """The end of the rows: a value, so that threads that read it see one moment."""

    page: Page
    state: PageState

    @property
    def stop(self) -> int:
        """One past the id of the newest row."""
        return self.page.first + self.state.count


class Writer:
    """Appends rows and episodes.

    Notes
    -----
    Methods may be called from any thread; they take turns. A row is safe from the
    death of this process once the call that added it has returned.
    """

    def __init__(
        self,
        sealer: Sealer,
        pages: list[Page],
        new_page: Callable[[Commit, int], Page],
        on_retire: Callable[[int], None],
    ) -> None:
        self._on_retire = on_retire
        self._sealer = sealer
        self._new_page = new_page
        self._schema = sealer.commit.schema
        self._rows = RowReader(self._schema)
        self._chunk_rows = sealer.commit.chunk_rows
        self._lock = threading.RLock()
        self._fence = threading.Lock()
        self._closed = False
        self._pid = os.getpid()
        self._pages = {page.chunk: page for page in pages}
        # The episode of the writer before is over, whatever it left.
        self._tip = Tip(pages[-1], replace(pages[-1].state, running=False))
        self._submitted_stop = sealer.commit.rows
        pages_in_budget = _QUEUE_NBYTES // max(_page_nbytes(self._page), 1)
        self._max_queued = min(max(2, pages_in_budget), _QUEUE_PAGES)
        # The last row ended its episode, and its final observation may follow.
        self._final_may_follow = False
        self._names = list(self._schema)
        self._observations = self._schema.observations
        self._terminated = self._schema.named("terminated")
        self._truncated = self._schema.named("truncated")

    @property
    def commit(self) -> Commit:
        """What is committed."""
        return self._sealer.commit

    def view(self) -> View:
        """Return the rows there are now; waits for nothing."""
        # The tip before the pages: a page that has gone by then has a chunk file.
        first = self._sealer.commit.first_row
        tip = self._tip
        pages = self._pages.copy()
        pages[tip.page.chunk] = tip.page
        pending = tip.page if tip.state.pending else None
        return View(first, tip.stop, pages, pending, tip.state.running)

    @property
    def _page(self) -> Page:
        return self._tip.page

    @property
    def _count(self) -> int:
        return self._tip.state.count

    @property
    def _pending(self) -> bool:
        return self._tip.state.pending

    @property
    def _in_episode(self) -> bool:
        return self._tip.state.running

    def resume(self) -> None:
        """Take up what the writer before left: its full pages, and its open episode."""
        for page in list(self._pages.values())[:-1]:
            self._sealer.submit(page, self._chunk_rows)
            self._submitted_stop = page.first + self._chunk_rows
        if self._pending:
            self._promote_pending()

    def append(self, row: Mapping[str, Any]) -> None:
        """Add one step."""
        with self._lock:
            self._check_open()
            self._settle()
            values, following = self._rows.step(row)
            if self._in_episode and self._pending:
                self._check_follows(values, "obs")
            done = self._is_done(values)
            self._make_room()
            page, i = self._page, self._count
            for name in self._names:
                page.columns[name][i] = values[name]
            page.columns[STEP_TYPE][i] = MID if self._in_episode else FIRST
            if following is not None:
                for name in self._observations:
                    page.columns[name][i + 1] = following[name]
            self._publish(PageState(i + 1, following is not None, not done))
            self._final_may_follow = done and following is None
            if done and following is not None:
                # The row and what follows it are safe in the tail. Without room for a
                # LAST row yet, the next call makes it: this one must not fail now.
                with contextlib.suppress(StorageError):
                    self._promote_pending()

    def extend(self, rows: Mapping[str, Any], *, ends: bool = False) -> int:
        """Add many steps; returns how many."""
        with self._lock:
            self._check_open()
            self._settle()
            values, following = self._rows.steps(rows)
            n = len(next(iter(values.values())))
            if n == 0:
                return 0
            done = np.zeros(n, bool)
            for name in (self._terminated, self._truncated):
                if name is not None:
                    done |= values[name]
            first = {name: values[name][0] for name in self._observations}
            if self._in_episode and self._pending:
                self._check_follows(first, "obs[0]")
            if following is not None:
                check_chain(self._schema, values, following, done)
            if ends:
                done[-1] = True
            starts = np.empty(n, bool)
            starts[0] = not self._in_episode
            starts[1:] = done[:-1]
            step_type = np.where(starts, FIRST, MID).astype(np.uint8)
            try:
                self._copy_steps({**values, STEP_TYPE: step_type}, following, done)
            except StorageError as error:
                error.add_note(
                    "steps of this call that fitted before the error are stored: "
                    "len(buffer) says how many there are"
                )
                raise
            self._final_may_follow = bool(done[-1]) and following is None and not ends
            return n

    def add_episode(self, rows: Mapping[str, Any]) -> int:
        """Add one whole episode; returns its number of steps."""
        with self._lock:
            self._check_open()
            self._settle()
            if self._in_episode:
                raise EpisodeError("an episode is running: call end_episode() before add_episode()")
            return self.extend(as_transitions(self._schema, rows), ends=True)

    def end_episode(self, final: Mapping[str, Any]) -> None:
        """End the running episode, with its final observation where there is one."""
        with self._lock:
            self._check_open()
            self._settle()
            if not self._in_episode and not (self._final_may_follow and final):
                if self._final_may_follow:
                    return
                raise EpisodeError("no episode is running")
            if final:
                if self._schema.explicit:
                    raise EpisodeError("every row has its own next_obs: end_episode() takes none")
                values = self._rows.observation(final)
                if self._pending:
                    self._check_follows(values, "the final observation")
                else:
                    self._make_room()
                    for name in self._observations:
                        self._page.columns[name][self._count] = values[name]
                    self._publish(PageState(self._count, pending=True))
            if self._pending:
                self._promote_pending()
            elif self._in_episode:
                self._publish(PageState(self._count))
            self._final_may_follow = False

    def flush(self) -> None:
        """Seal what is in the tail, and commit it."""
        with self._lock:
            self._check_open()
            self._settle()
            self._flush()

    def close(self) -> None:
        """End the running episode, flush, and stop the sealing thread."""
        with self._lock:
            if self._closed:
                return
            if os.getpid() != self._pid:
                self._closed = True
                return
            try:
                if self._pending:
                    self._promote_pending()
                self._flush()
            finally:
                self._closed = True
                self._sealer.stop()
            for page in self._pages.values():
                page.unlink()
            with contextlib.suppress(OSError):
                self._page.file.parent.rmdir()

    def on_commit(self, page: Page) -> None:
        """Let a page go whose chunk is committed whole; called by the sealer."""
        if page.state.count == self._chunk_rows and page is not self._page:
            self._retire(page)

    # -- one step ----------------------------------------------------------

    def _is_done(self, values: Mapping[str, Any]) -> bool:
        return bool(
            (self._terminated is not None and values[self._terminated])
            or (self._truncated is not None and values[self._truncated])
        )

    def _check_follows(self, values: Mapping[str, Any], what: str) -> None:
        """Refuse an observation that is not the one the last row said would come."""
        for name in self._observations:
            slot = self._page.columns[name][self._count]
            if np.asarray(values[name], slot.dtype).tobytes() != slot.tobytes():
                raise EpisodeError(
                    f"{what} of field {name!r} differs from the next_obs of the row before it in "
                    "the same episode: call end_episode() where an episode was cut, or create "
                    "the schema with next_obs='explicit' for transitions that do not chain"
                )

    def _publish(self, state: PageState) -> None:
        # Two turns of a lock are a full fence: readers in other processes must
        # not see the count before the rows, on any processor.
        with self._fence:
            pass
        with self._fence:
            pass
        page = self._page
        page.publish(state)
        self._tip = Tip(page, state)

    def _settle(self) -> None:
        """Make the LAST row of an episode that ended when the disk had no room for it."""
        if self._pending and not self._in_episode:
            self._promote_pending()

    def _promote_pending(self) -> None:
        """Make the pending observation a LAST row."""
        self._make_room()
        page, i = self._page, self._count
        for name in self._names:
            if name not in self._observations:
                page.columns[name][i] = np.zeros((), page.columns[name].dtype)
        page.columns[STEP_TYPE][i] = LAST
        self._publish(PageState(i + 1))

    # -- many steps --------------------------------------------------------

    def _copy_steps(
        self, values: dict[str, Array], following: dict[str, Array] | None, done: Array
    ) -> None:
        """Copy checked steps into the tail, a LAST row after each end that has one."""
        n = len(done)
        has_last = done if following is not None else np.zeros(n, bool)
        # Where each step goes, counted in rows from the first of them.
        at = np.arange(n) + np.concatenate(([0], np.cumsum(has_last)[:-1]))
        total = n + int(has_last.sum())
        written = 0
        while written < total:
            self._make_room()
            room = min(self._chunk_rows - self._count, total - written)
            low, high = np.searchsorted(at, [written, written + room])
            ends = np.flatnonzero(has_last)
            ends = ends[(at[ends] + 1 >= written) & (at[ends] + 1 < written + room)]
            self._copy_page(values, following, slice(low, high), at - written, ends)
            written += room
            last = int(high) - 1
            # What follows the newest row is kept behind it, unless it is a LAST row itself.
            pending = following is not None and at[last] == written - 1
            if pending:
                assert following is not None
                for name in self._observations:
                    self._page.columns[name][self._count + room] = following[name][last]
            self._publish(PageState(self._count + room, bool(pending), not done[last]))

    def _copy_page(
        self,
        values: dict[str, Array],
        following: dict[str, Array] | None,
        steps: slice,
        at: Array,
        ends: Array,
    ) -> None:
        slots = at[steps] + self._count
        # Without LAST rows between them the steps are one run, and a plain copy.
        run: Any = slots
        if len(slots) and slots[-1] - slots[0] == len(slots) - 1:
            run = slice(int(slots[0]), int(slots[-1]) + 1)
        last_slots = at[ends] + 1 + self._count
        for name, column in values.items():
            target = self._page.columns[name]
            target[run] = column[steps]
            if len(ends):
                if name in self._observations:
                    assert following is not None
                    target[last_slots] = following[name][ends]
                elif name == STEP_TYPE:
                    target[last_slots] = LAST
                else:
                    target[last_slots] = np.zeros((), target.dtype)

    # -- pages -------------------------------------------------------------

    def _make_room(self) -> None:
        """Go on to the next page where this one is full.

        Raises
        ------
        StorageError
            The disk is full. Nothing has changed; the same call may be made again.
        """
        if self._count < self._chunk_rows:
            return
        self._submit()
        self._sealer.wait(self._max_queued)
        old, state = self._page, replace(self._tip.state, count=0)
        page = self._new_page(self._sealer.commit, old.chunk + 1)
        if state.pending:
            for name in self._observations:
                page.columns[name][0] = old.columns[name][self._chunk_rows]
        page.publish(state)
        self._pages[page.chunk] = page
        self._tip = Tip(page, state)
        if self._sealer.commit.rows >= page.first:
            self._retire(old)

    def _submit(self) -> None:
        """Queue the current page, unless all of its rows are queued already."""
        if self._submitted_stop != self._tip.stop:
            self._submitted_stop = self._tip.stop
            self._sealer.submit(self._page, self._count)

    def _flush(self) -> None:
        self._submit()
        self._sealer.wait(0)

    def _retire(self, page: Page) -> None:
        if self._pages.pop(page.chunk, None) is not None:
            page.retired = True
            page.unlink()
            self._on_retire(page.chunk)

    def _check_open(self) -> None:
        if self._closed:
            raise ClosedError("the buffer is closed")
        if os.getpid() != self._pid:
            raise ZBufferError("a forked process cannot write: open the buffer in the child")


def _page_nbytes(page: Page) -> int:
    return sum(column.nbytes for column in page.columns.values())
