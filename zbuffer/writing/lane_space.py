"""Where the rows of lanes go: segments in tail pages, and when pages are sealed."""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Callable, Mapping
from typing import Any

import numpy as np

from zbuffer.errors import StorageError
from zbuffer.format.commit import Commit
from zbuffer.format.segments import NOBODY
from zbuffer.reading.chunks import View
from zbuffer.storage.pages import Page
from zbuffer.writing.sealer import Sealer
from zbuffer.writing.segment_table import SegmentTable

Array = np.ndarray[Any, Any]
#: Pages that are filled at a time, beyond those that the lanes need: a lane that stands
#: still gives its segment up when more are open.
_OPEN_PAGES = 3
_QUEUED_PAGES = 8


class LaneSpace:
    """The place of each lane's next row, and the pages around it.

    A lane has room for what follows a row before the row is written: its segment's next
    row, or the first of its next segment. So what is pending always has an id.

    Attributes
    ----------
    running
        bool by lane: whether its episode goes on.
    pending
        bool by lane: whether the observation after its newest row lies behind it.
    steps
        int64 by lane: its steps so far.

    Notes
    -----
    The caller sees to it that one thread at a time calls the methods;
    :meth:`retire` may be called by the sealing thread meanwhile.
    """

    def __init__(
        self,
        sealer: Sealer,
        table: SegmentTable,
        lane_steps: Array,
        pages: list[Page],
        new_page: Callable[[Commit, int], Page],
        on_retire: Callable[[int], None],
    ) -> None:
        self._sealer = sealer
        self._table = table
        self._new_page = new_page
        self._on_retire = on_retire
        self._fence = threading.Lock()
        commit = sealer.commit
        self._segment_rows = commit.rows_of_segment
        self._per_chunk = commit.segments_of_chunk
        n = commit.lanes
        self.steps = lane_steps
        self.pending: Array = np.zeros(n, bool)
        self.running: Array = np.zeros(n, bool)
        #: By lane: its segment, -1 without one, and its rows there.
        self._segment: Array = np.full(n, -1)
        self._count: Array = np.zeros(n, np.int64)
        self._before = [table.last_of_lane(lane) for lane in range(n)]
        #: The next segment of a lane, handed out before it is needed; -1 without one.
        self._spare: Array = np.full(n, -1)
        self._pages = {page.chunk: page for page in pages}
        #: The chunk to begin with: what is left of another writer's stays empty.
        self._open_from = -(-table.stop // self._per_chunk)
        self._view: View | None = None

    def view(self) -> View:
        """Return the rows there are now."""
        commit = self._sealer.commit
        known = self._view
        if known is not None and known.first == commit.first_row:
            return known
        first = commit.first_row // self._segment_rows
        self._table.drop_before(first)
        segments = self._table.snapshot(first)
        lanes = np.flatnonzero(self.pending)
        ids = np.sort(self._segment[lanes] * self._segment_rows + self._count[lanes])
        self._view = View(
            commit.first_row,
            self._table.stop * self._segment_rows,
            self._pages.copy(),
            None,
            self.running.copy(),
            segments,
            ids,
        )
        return self._view

    def put(self, lanes: Array, fields: Mapping[str, Any], behind: int = 0) -> None:
        """Write items of fields for the next row of each lane, or the row behind that."""
        segment, offset = self._segment[lanes], self._count[lanes] + behind
        over = offset >= self._segment_rows
        segment = np.where(over, self._spare[lanes], segment)
        offset = np.where(over, offset - self._segment_rows, offset)
        chunks = segment // self._per_chunk
        slots = segment % self._per_chunk * self._segment_rows + offset
        for chunk in sorted(set(chunks.tolist())):
            columns = self._pages[chunk].columns
            here = chunks == chunk
            everywhere = bool(here.all())
            at = slots if everywhere else slots[here]
            for name, items in fields.items():
                if everywhere or np.ndim(items) == 0:
                    columns[name][at] = items
                else:
                    columns[name][at] = items[here]

    def step_on(self, lanes: Array, *, pending: bool, running: Array) -> None:
        """Count the row that was put for each lane, and show it."""
        self._count[lanes] += 1
        self.running[lanes] = running
        self.pending[lanes] = pending
        full = lanes[self._count[lanes] == self._segment_rows]
        moving = full[self._spare[full] >= 0]
        if len(moving):
            # The full segments first: what is pending in the next ones belongs behind them.
            held, self.pending[moving] = self.pending[moving], False
            self.publish(lanes)
            self.pending[moving] = held
            self._move_on(moving)
            self.publish(moving)
        else:
            self.publish(lanes)

    def _move_on(self, lanes: Array) -> None:
        """Go on to the spare segments, whose first row may be pending there."""
        for lane in lanes.tolist():
            if self._segment[lane] >= 0 and self._count[lane] > 0:
                self._before[lane] = int(self._segment[lane])
            segment = int(self._spare[lane])
            self._segment[lane], self._spare[lane], self._count[lane] = segment, -1, 0
            self._table.link(self._before[lane], segment, int(self.steps[lane]))
            page = self._pages[segment // self._per_chunk]
            page.states[segment % self._per_chunk, 2] = self.steps[lane]

    def publish(self, lanes: Array) -> None:
        """Make the rows of lanes visible to readers, in this process and in others."""
        with self._fence:
            pass
        with self._fence:
            pass
        segments, counts = self._segment[lanes], self._count[lanes]
        words = 4 * counts + 2 * self.running[lanes] + self.pending[lanes]
        chunks = segments // self._per_chunk
        for chunk in sorted(set(chunks.tolist())):
            here = chunks == chunk
            states = self._pages[chunk].states
            states[segments[here] % self._per_chunk, 0] = words[here]
        self._table.fill(segments, counts)
        self._view = None

    def make_room(self, lanes: Array, n: int) -> None:
        """See to it that each lane has room for `n` rows; StorageError where the disk is full."""
        left = self._segment_rows - self._count[lanes]
        left[self._segment[lanes] < 0] = 0
        for lane in lanes[(left < n) & (self._spare[lanes] < 0)].tolist():
            self._spare[lane] = self._hand_out(lane)
        self._move_on(lanes[left == 0])

    def _hand_out(self, lane: int) -> int:
        chunk = max(self._table.stop // self._per_chunk, self._open_from)
        if chunk not in self._pages:
            self._sealer.wait(_QUEUED_PAGES)
            self._pages[chunk] = self._new_page(self._sealer.commit, chunk)
        while self._table.stop < chunk * self._per_chunk:
            self._table.hand_out(NOBODY)
        segment = self._table.hand_out(lane)
        self._pages[chunk].states[segment % self._per_chunk, 1] = lane + 1
        self._view = None
        return segment

    def seal_finished(self) -> None:
        """Queue the oldest pages that nothing is added to any more, in their order."""
        for chunk, page in self._in_order():
            if page.queued:
                continue
            if self._table.stop < (chunk + 1) * self._per_chunk:
                return
            if self._is_in_use(chunk):
                behind = self._table.stop // self._per_chunk - chunk
                if behind <= _OPEN_PAGES + len(self._segment) // self._per_chunk:
                    return
                # The step is stored: without room for this now, the next call tries again.
                with contextlib.suppress(StorageError):
                    self._part_from(chunk)
                if self._is_in_use(chunk):
                    return
            page.final = page.queued = True
            self.submit(page)

    def _is_in_use(self, chunk: int) -> bool:
        current = self._lanes_in(self._segment, chunk)
        # What is to come of a full segment's episode is said where the segment is.
        current &= (self._count < self._segment_rows) | self.pending | self.running
        return bool((current | self._lanes_in(self._spare, chunk)).any())

    def _lanes_in(self, segments: Array, chunk: int) -> Array:
        there: Array = segments // self._per_chunk == chunk
        return there

    def _part_from(self, chunk: int) -> None:
        """Let lanes that have stood still go on in other segments than those of a chunk."""
        self._spare[self._lanes_in(self._spare, chunk)] = -1
        there = self._lanes_in(self._segment, chunk)
        waiting = there & (self.running | self.pending)
        for lane in np.flatnonzero(there & ~waiting).tolist():
            # Its next row, if there is ever one, gets a segment then.
            if self._count[lane] > 0:
                self._before[lane] = int(self._segment[lane])
            self._segment[lane], self._count[lane] = -1, 0
        for lane in np.flatnonzero(waiting & (self._spare < 0)).tolist():
            self._spare[lane] = self._hand_out(lane)
        for lane in np.flatnonzero(waiting).tolist():
            self._move_waiting(lane)

    def _move_waiting(self, lane: int) -> None:
        """Move a lane with all that its next row needs to its spare segment."""
        page, item = self.slot(lane)
        place = int(self._segment[lane]) % self._per_chunk
        count, chosen = int(self._count[lane]), np.array([lane])
        self._move_on(chosen)
        if self.pending[lane]:
            names = self._sealer.commit.schema.observations
            self.put(chosen, {name: page.columns[name][item][None] for name in names})
        # First there, then no longer here: a kill in between leaves it in both places, and
        # the later one counts.
        self.publish(chosen)
        page.states[place, 0] = 4 * count

    def _in_order(self) -> list[tuple[int, Page]]:
        """Return the pages, oldest first; the sealing thread may take some away meanwhile."""
        return sorted(self._pages.items(), key=lambda item: item[0])

    def submit(self, page: Page) -> None:
        """Queue a page to be sealed, with the rows that it has now."""
        start = page.chunk * self._per_chunk
        stop = min(start + self._per_chunk, self._table.stop)
        self._sealer.submit_segments(page, self._table.rows(start, stop))

    def flush(self) -> None:
        """Seal all rows, and commit them."""
        for _, page in self._in_order():
            if not page.queued:
                self.submit(page)
        self._sealer.wait(0)

    def retire(self, page: Page) -> None:
        """Let a page go whose chunk is committed for good."""
        if self._pages.pop(page.chunk, None) is not None:
            page.retired = True
            page.unlink()
            self._view = None
            self._on_retire(page.chunk)

    def slot(self, lane: int) -> tuple[Page, int]:
        """Return where a lane's next row goes: its page, and the item there."""
        segment = int(self._segment[lane])
        item = segment % self._per_chunk * self._segment_rows + int(self._count[lane])
        return self._pages[segment // self._per_chunk], item

    def remove_pages(self) -> None:
        """Remove the pages; all rows are committed."""
        folders = {page.file.parent for page in self._pages.values()}
        for page in self._pages.values():
            page.unlink()
        for folder in folders:
            with contextlib.suppress(OSError):
                folder.rmdir()
