"""The writer of a buffer with lanes: each lane fills segments of its own."""

from __future__ import annotations

import contextlib
import os
import threading
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import numpy as np

from zbuffer.errors import ClosedError, EpisodeError, SchemaError, StorageError, ZBufferError
from zbuffer.format.commit import FIRST, LAST, MID, Commit
from zbuffer.format.segments import NOBODY
from zbuffer.format.tail import PageState
from zbuffer.reading.chunks import View
from zbuffer.schema import STEP_TYPE, flatten
from zbuffer.storage.pages import Page
from zbuffer.writing.chains import as_transitions
from zbuffer.writing.rows import RowReader
from zbuffer.writing.sealer import Sealer
from zbuffer.writing.segment_table import SegmentTable

Array = np.ndarray[Any, Any]
#: Pages that are filled at a time, beyond those that the lanes need: a lane that stands
#: still gives its segment up when more are open.
_OPEN_PAGES = 3
_QUEUED_PAGES = 8


class LaneWriter:
    """Appends steps of many lanes at once.

    Parameters
    ----------
    lane_steps
        int64, by lane: its steps so far.
    pages
        Pages that another writer left; nothing is added to them any more.
    new_page
        Makes the page of a chunk.
    on_retire
        Called with a chunk whose page is gone.

    Notes
    -----
    Methods may be called from any thread; they take turns. A row is safe from the
    death of this process once the call that added it has returned. A lane has room for
    what follows a step before the step is written: its segment's next row, or the
    first of its next segment.
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
        #: Steps of each lane so far.
        self._steps = lane_steps
        self._new_page = new_page
        self._on_retire = on_retire
        self._schema = sealer.commit.schema
        self._rows = RowReader(self._schema)
        self._observations = self._schema.observations
        self._names = list(self._schema)
        self._ends = [
            name
            for role in ("terminated", "truncated")
            if (name := self._schema.named(role)) is not None
        ]
        self._lock = threading.RLock()
        self._fence = threading.Lock()
        self._closed = False
        self._pid = os.getpid()
        commit = sealer.commit
        self._segment_rows = commit.rows_of_segment
        self._per_chunk = commit.segments_of_chunk
        self._chunk_rows = commit.chunk_rows
        n = commit.lanes
        #: By lane: its segment, -1 without one; its rows there; what follows.
        self._segment: Array = np.full(n, -1)
        self._count: Array = np.zeros(n, np.int64)
        self._pending: Array = np.zeros(n, bool)
        self._running: Array = np.zeros(n, bool)
        self._final_may_follow: Array = np.zeros(n, bool)
        self._before = [table.last_of_lane(lane) for lane in range(n)]
        #: The next segment of a lane, handed out before it is needed; -1 without one.
        self._spare: Array = np.full(n, -1)
        self._pages = {page.chunk: page for page in pages}
        #: The chunk to begin with: what is left of another writer's stays empty.
        self._open_from = -(-table.stop // self._per_chunk)
        self._view: View | None = None

    @property
    def commit(self) -> Commit:
        """What is committed."""
        return self._sealer.commit

    def resume(self) -> None:
        """Seal what the writer before left, and end its episodes."""
        left = sorted(self._pages.values(), key=lambda page: page.chunk)
        for page in left:
            page.final = page.queued = True
            self._submit(page)
        # What was pending in them is in a slot that is no row: it becomes one.
        for page in left:
            self._promote_left(page)

    def view(self) -> View:
        """Return the rows there are now."""
        with self._lock:
            commit = self._sealer.commit
            known = self._view
            if known is not None and known.first == commit.first_row:
                return known
            first = commit.first_row // self._segment_rows
            self._table.drop_before(first)
            segments = self._table.snapshot(first)
            lanes = np.flatnonzero(self._pending)
            ids = np.sort(self._segment[lanes] * self._segment_rows + self._count[lanes])
            self._view = View(
                commit.first_row,
                self._table.stop * self._segment_rows,
                self._pages.copy(),
                None,
                self._running.copy(),
                segments,
                ids,
            )
            return self._view

    def append(self, row: Mapping[str, Any], lanes: Any = None) -> None:
        """Add one step of each lane, or of some."""
        with self._lock:
            self._check_open()
            chosen = self._chosen(lanes)
            values, following = self._rows.steps(row)
            _check_length(values, len(chosen))
            if len(chosen):
                self._append(chosen, values, following)

    def extend(self, rows: Mapping[str, Any], *, lanes: Any = None) -> int:
        """Add many steps, each of the lanes; returns how many rows that is."""
        with self._lock:
            self._check_open()
            chosen = self._chosen(lanes)
            flat = {name: _leading(name, value) for name, value in flatten(rows).items()}
            lengths = {len(value) for value in flat.values()}
            if len(lengths) != 1:
                raise SchemaError(sorted(flat)[0], f"the fields have {sorted(lengths)} steps")
            n = lengths.pop()
            for t in range(n):
                values, following = self._rows.steps({k: v[t] for k, v in flat.items()})
                _check_length(values, len(chosen))
                self._append(chosen, values, following)
            return n * len(chosen)

    def add_episode(self, rows: Mapping[str, Any], *, lane: int = 0) -> int:
        """Add one whole episode to a lane; returns its number of steps."""
        with self._lock:
            self._check_open()
            chosen = self._chosen([lane])
            if self._running[lane]:
                raise EpisodeError(
                    f"an episode is running in lane {lane}: call end_episode() before add_episode()"
                )
            values, following = self._rows.steps(as_transitions(self._schema, rows))
            n = len(next(iter(values.values())))
            for t in range(n):
                here = slice(t, t + 1)
                after = None
                if following is not None:
                    after = {name: value[here] for name, value in following.items()}
                step = {name: value[here] for name, value in values.items()}
                self._append(chosen, step, after)
            if self._running[lane]:
                self._end(chosen, None)
            self._final_may_follow[lane] = False
            return n

    def end_episode(self, final: Mapping[str, Any], lanes: Any = None) -> None:
        """End the running episodes of all lanes, or of some."""
        with self._lock:
            self._check_open()
            chosen = self._chosen(lanes)
            if lanes is None:
                open_ = self._running | (self._final_may_follow & bool(final))
                if final and not open_.all():
                    raise EpisodeError("some lanes run no episode: say which ones with lanes=")
                chosen = np.flatnonzero(open_)
            idle = chosen[~self._running[chosen] & ~self._final_may_follow[chosen]]
            if len(idle) or not len(chosen):
                which = f"in lane {idle[0]}" if len(idle) else "in any lane"
                raise EpisodeError(f"no episode is running {which}")
            values = None
            if final:
                flat = flatten(final)
                if self._schema.explicit or set(flat) != set(self._observations):
                    raise SchemaError(
                        "final observation",
                        f"needs {', '.join(self._observations)}, got "
                        f"{', '.join(flat) or 'nothing'}",
                    )
                values = {name: self._rows.many(name, value) for name, value in flat.items()}
                _check_length(values, len(chosen))
            self._end(chosen, values)

    def flush(self) -> None:
        """Seal what is in the tail, and commit it."""
        with self._lock:
            self._check_open()
            self._flush()

    def close(self) -> None:
        """End the running episodes, flush, and stop the sealing thread."""
        with self._lock:
            if self._closed:
                return
            if os.getpid() != self._pid:
                self._closed = True
                return
            try:
                lanes = np.flatnonzero(self._pending)
                if len(lanes):
                    self._promote(lanes)
                self._flush()
            finally:
                self._closed = True
                self._sealer.stop()
            folders = {page.file.parent for page in self._pages.values()}
            for page in self._pages.values():
                page.unlink()
            for folder in folders:
                with contextlib.suppress(OSError):
                    folder.rmdir()

    def on_commit(self, page: Page) -> None:
        """Let a page go whose chunk is committed for good; called by the sealer."""
        if page.final:
            self._retire(page)

    # -- steps ---------------------------------------------------------------

    def _append(
        self, lanes: Array, values: dict[str, Array], following: dict[str, Array] | None
    ) -> None:
        done = np.zeros(len(lanes), bool)
        for name in self._ends:
            done |= values[name]
        check = self._running[lanes] & self._pending[lanes]
        if check.any():
            self._check_follows(lanes, values, check)
        self._make_room(lanes, 1 + (following is not None))
        fields: dict[str, Any] = dict(values)
        fields[STEP_TYPE] = np.where(self._running[lanes], MID, FIRST).astype(np.uint8)
        self._put(lanes, fields)
        self._steps[lanes] += 1
        if following is not None:
            # What is behind the row is written before the row counts.
            self._put(lanes, following, behind=1)
        self._step_on(lanes, pending=following is not None, running=~done)
        self._final_may_follow[lanes] = done & (following is None)
        if following is not None and done.any():
            self._promote(lanes[done])
        self._seal_finished()

    def _end(self, lanes: Array, final: dict[str, Array] | None) -> None:
        if final is not None:
            with_pending = self._pending[lanes]
            if with_pending.any():
                self._check_follows(lanes, final, with_pending)
            without = np.flatnonzero(~with_pending)
            if len(without):
                self._make_room(lanes[without], 1)
                self._put(lanes[without], {k: v[without] for k, v in final.items()})
                self._pending[lanes[without]] = True
        pending = lanes[self._pending[lanes]]
        if len(pending):
            self._promote(pending)
        rest = lanes[self._running[lanes]]
        self._running[rest] = False
        self._final_may_follow[lanes] = False
        self._publish(rest)

    def _promote(self, lanes: Array) -> None:
        """Make the pending observations LAST rows; the room for them is there."""
        zeros: dict[str, Any] = {
            name: np.zeros((), self._schema[name].dtype)
            for name in self._names
            if name not in self._observations
        }
        self._put(lanes, {**zeros, STEP_TYPE: np.uint8(LAST)})
        self._step_on(lanes, pending=False, running=np.zeros(len(lanes), bool))

    def _put(self, lanes: Array, fields: Mapping[str, Any], behind: int = 0) -> None:
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

    def _step_on(self, lanes: Array, *, pending: bool, running: Array) -> None:
        """Count the row that was put for each lane, and show it."""
        self._count[lanes] += 1
        self._running[lanes] = running
        self._pending[lanes] = pending
        full = lanes[self._count[lanes] == self._segment_rows]
        moving = full[self._spare[full] >= 0]
        if len(moving):
            # The full segments first: what is pending in the next ones belongs behind them.
            held, self._pending[moving] = self._pending[moving], False
            self._publish(lanes)
            self._pending[moving] = held
            self._move_on(moving)
            self._publish(moving)
        else:
            self._publish(lanes)

    def _move_on(self, lanes: Array) -> None:
        """Go on to the spare segments, whose first row may be pending there."""
        for lane in lanes.tolist():
            if self._segment[lane] >= 0 and self._count[lane] > 0:
                self._before[lane] = int(self._segment[lane])
            segment = int(self._spare[lane])
            self._segment[lane], self._spare[lane], self._count[lane] = segment, -1, 0
            self._table.link(self._before[lane], segment, int(self._steps[lane]))
            page = self._pages[segment // self._per_chunk]
            page.states[segment % self._per_chunk, 2] = self._steps[lane]

    def _publish(self, lanes: Array) -> None:
        """Make the rows of lanes visible to readers, in this process and in others."""
        with self._fence:
            pass
        with self._fence:
            pass
        segments, counts = self._segment[lanes], self._count[lanes]
        words = 4 * counts + 2 * self._running[lanes] + self._pending[lanes]
        chunks = segments // self._per_chunk
        for chunk in sorted(set(chunks.tolist())):
            here = chunks == chunk
            states = self._pages[chunk].states
            states[segments[here] % self._per_chunk, 0] = words[here]
        self._table.fill(segments, counts)
        self._view = None

    def _check_follows(self, lanes: Array, values: Mapping[str, Array], check: Array) -> None:
        """Refuse observations that are not those that the lanes' last rows said would come."""
        for at in np.flatnonzero(check).tolist():
            lane = int(lanes[at])
            segment, offset = divmod(int(self._segment[lane]), self._per_chunk)
            row = offset * self._segment_rows + int(self._count[lane])
            columns = self._pages[segment].columns
            for name in self._observations:
                if values[name][at].tobytes() != columns[name][row].tobytes():
                    raise EpisodeError(
                        f"the observation of field {name!r} in lane {lane} differs from the "
                        "next_obs of the row before it in the same episode: call "
                        "end_episode(lanes=[...]) where an episode was cut"
                    )

    # -- segments and pages -----------------------------------------------------

    def _make_room(self, lanes: Array, n: int) -> None:
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

    def _seal_finished(self) -> None:
        """Queue the oldest pages that nothing is added to any more, in their order."""
        for chunk in sorted(self._pages):
            page = self._pages[chunk]
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
            self._submit(page)

    def _is_in_use(self, chunk: int) -> bool:
        current = self._lanes_in(self._segment, chunk)
        # What is to come of a full segment's episode is said where the segment is.
        current &= (self._count < self._segment_rows) | self._pending | self._running
        return bool((current | self._lanes_in(self._spare, chunk)).any())

    def _lanes_in(self, segments: Array, chunk: int) -> Array:
        there: Array = segments // self._per_chunk == chunk
        return there

    def _part_from(self, chunk: int) -> None:
        """Let lanes that have stood still go on in other segments than those of a chunk."""
        self._spare[self._lanes_in(self._spare, chunk)] = -1
        lanes = np.flatnonzero(self._lanes_in(self._segment, chunk))
        for lane in lanes[self._spare[lanes] < 0].tolist():
            self._spare[lane] = self._hand_out(lane)
        for lane in lanes.tolist():
            old, count = int(self._segment[lane]), int(self._count[lane])
            slot = old % self._per_chunk * self._segment_rows + count
            chosen, held = np.array([lane]), bool(self._pending[lane])
            self._pending[lane] = False
            self._publish(chosen)
            self._move_on(chosen)
            if held:
                columns = self._pages[chunk].columns
                self._put(chosen, {n: columns[n][slot][None] for n in self._observations})
            self._pending[lane] = held
            self._publish(chosen)

    def _submit(self, page: Page) -> None:
        start = page.chunk * self._per_chunk
        stop = min(start + self._per_chunk, self._table.stop)
        self._sealer.submit_segments(page, self._table.rows(start, stop))

    def _flush(self) -> None:
        for chunk in sorted(self._pages):
            if not self._pages[chunk].queued:
                self._submit(self._pages[chunk])
        self._sealer.wait(0)

    def _retire(self, page: Page) -> None:
        if self._pages.pop(page.chunk, None) is not None:
            page.retired = True
            page.unlink()
            self._view = None
            self._on_retire(page.chunk)

    def _promote_left(self, page: Page) -> None:
        """Make LAST rows of what was pending in a page of another writer."""
        for place, (word, owner, _) in enumerate(page.states.tolist()):
            state = PageState.unpack(word)
            if owner == 0 or not state.pending:
                continue
            slot = place * self._segment_rows + state.count
            chosen = np.array([owner - 1])
            self._make_room(chosen, 1)
            self._put(chosen, {n: page.columns[n][slot][None] for n in self._observations})
            self._promote(chosen)

    # -- arguments ----------------------------------------------------------------

    def _chosen(self, lanes: Any) -> Array:
        n = len(self._segment)
        if lanes is None:
            return np.arange(n)
        chosen = np.asarray(lanes)
        if chosen.size == 0:
            chosen = chosen.astype(np.int64)
        if chosen.ndim != 1 or chosen.dtype.kind not in "iu":
            raise ValueError(f"lanes must be a list of lane numbers, got {lanes!r}")
        chosen = chosen.astype(np.int64)
        if len(chosen) and not 0 <= chosen.min() <= chosen.max() < n:
            raise ValueError(f"lanes must be 0 to {n - 1}, got {lanes!r}")
        if len(set(chosen.tolist())) != len(chosen):
            raise ValueError(f"a lane is named twice in lanes={lanes!r}")
        return chosen

    def _check_open(self) -> None:
        if self._closed:
            raise ClosedError("the buffer is closed")
        if os.getpid() != self._pid:
            raise ZBufferError("a forked process cannot write: open the buffer in the child")


def _check_length(values: Mapping[str, Array], n: int) -> None:
    for name, value in values.items():
        if len(value) != n:
            raise SchemaError(name, f"has {len(value)} rows for {n} lanes")


def _leading(name: str, value: Any) -> Sequence[Any]:
    array: Any = value if hasattr(value, "shape") else np.asarray(value)
    if len(array.shape) < 2:
        raise SchemaError(name, f"must have axes of steps and lanes, got shape {array.shape}")
    return array  # type: ignore[no-any-return]  # an array or a tensor
