"""The writer of a buffer with lanes: each lane fills segments of its own."""

from __future__ import annotations

import os
import threading
from collections.abc import Callable, Mapping
from typing import Any

import numpy as np

from zbuffer.errors import ClosedError, EpisodeError, SchemaError, ZBufferError
from zbuffer.format.commit import FIRST, LAST, MID, Commit
from zbuffer.format.tail import PageState
from zbuffer.reading.chunks import View
from zbuffer.schema import STEP_TYPE, flatten
from zbuffer.storage.pages import Page
from zbuffer.writing.chains import as_transitions, check_chain
from zbuffer.writing.lane_space import LaneSpace
from zbuffer.writing.rows import RowReader
from zbuffer.writing.sealer import Sealer
from zbuffer.writing.segment_table import SegmentTable

Array = np.ndarray[Any, Any]


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
    death of this process once the call that added it has returned.
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
        self._space = LaneSpace(sealer, table, lane_steps, pages, new_page, on_retire)
        self._left = pages
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
        self._closed = False
        self._pid = os.getpid()
        self._n_lanes = sealer.commit.lanes
        self._segment_rows = sealer.commit.rows_of_segment
        # The last row ended its episode, and its final observation may follow.
        self._final_may_follow: Array = np.zeros(self._n_lanes, bool)

    @property
    def commit(self) -> Commit:
        """What is committed."""
        return self._sealer.commit

    def resume(self) -> None:
        """Seal what the writer before left, and end its episodes."""
        left, self._left = sorted(self._left, key=lambda page: page.chunk), []
        for page in left:
            page.final = page.queued = True
            self._space.submit(page)
        # What was pending in them is in an item that is no row: it becomes one.
        for lane, (page, place, state) in _newest_of_lanes(left).items():
            if state.pending:
                self._promote_left(lane, page, place * self._segment_rows + state.count)

    def view(self) -> View:
        """Return the rows there are now."""
        with self._lock:
            return self._space.view()

    def append(self, row: Mapping[str, Any]) -> None:
        """Add one step of each lane, or of those that ``lanes`` names."""
        with self._lock:
            self._check_open()
            row, chosen = self._split(row)
            values, following = self._rows.steps(row)
            _check_length(values, len(chosen))
            if len(chosen):
                self._append(chosen, values, following)

    def extend(self, rows: Mapping[str, Any]) -> int:
        """Add many steps, each of the lanes; returns how many rows that is."""
        with self._lock:
            self._check_open()
            rows, chosen = self._split(rows)
            n_lanes = len(chosen)
            flat = {n: _by_step(n, value, n_lanes) for n, value in flatten(rows).items()}
            values, following = self._rows.steps(flat)
            n = len(next(iter(values.values()))) // max(n_lanes, 1)
            self._append_steps(chosen, n, values, following)
            return n * n_lanes

    def add_episode(self, rows: Mapping[str, Any]) -> int:
        """Add one whole episode to ``lane``, 0 by default; returns its number of steps."""
        with self._lock:
            self._check_open()
            rest = dict(rows)
            lane = rest.pop("lane", 0)
            chosen = self._chosen([lane])
            if self._space.running[lane]:
                raise EpisodeError(
                    f"an episode is running in lane {lane}: call end_episode() before add_episode()"
                )
            values, following = self._rows.steps(as_transitions(self._schema, rest))
            n = len(next(iter(values.values())))
            self._append_steps(chosen, n, values, following)
            if self._space.running[lane]:
                self._end(chosen, None)
            self._final_may_follow[lane] = False
            return n

    def end_episode(self, final: Mapping[str, Any]) -> None:
        """End the running episodes of all lanes, or of those that ``lanes`` names."""
        with self._lock:
            self._check_open()
            everywhere = final.get("lanes") is None
            final, chosen = self._split(final)
            if everywhere:
                open_ = self._space.running | (self._final_may_follow & bool(final))
                if final and not open_.all():
                    raise EpisodeError("some lanes run no episode: say which ones with lanes=")
                chosen = np.flatnonzero(open_)
            idle = chosen[~self._space.running[chosen] & ~self._final_may_follow[chosen]]
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
            self._space.flush()

    def close(self) -> None:
        """End the running episodes, flush, and stop the sealing thread."""
        with self._lock:
            if self._closed:
                return
            if os.getpid() != self._pid:
                self._closed = True
                return
            try:
                lanes = np.flatnonzero(self._space.pending)
                if len(lanes):
                    self._promote(lanes)
                self._space.flush()
            finally:
                self._closed = True
                self._sealer.stop()
            self._space.remove_pages()

    def on_commit(self, page: Page) -> None:
        """Let a page go whose chunk is committed for good; called by the sealer."""
        if page.final:
            self._space.retire(page)

    # -- steps ---------------------------------------------------------------

    def _append_steps(
        self, lanes: Array, n: int, values: dict[str, Array], following: dict[str, Array] | None
    ) -> None:
        """Append `n` steps of each lane, whose fields have them step by step; all, or none.

        But for a full disk: then those that fitted are stored.
        """
        n_lanes = len(lanes)
        if following is not None:
            done = self._done(values)
            for lane in range(n_lanes):
                of = slice(lane, None, n_lanes)
                check_chain(
                    self._schema,
                    {name: value[of] for name, value in values.items()},
                    {name: value[of] for name, value in following.items()},
                    done[of],
                )
        for t in range(n):
            of = slice(t * n_lanes, (t + 1) * n_lanes)
            after = None
            if following is not None:
                after = {name: value[of] for name, value in following.items()}
            self._append(lanes, {name: value[of] for name, value in values.items()}, after)

    def _done(self, values: Mapping[str, Array]) -> Array:
        done = np.zeros(len(next(iter(values.values()))), bool)
        for name in self._ends:
            done |= values[name]
        return done

    def _append(
        self, lanes: Array, values: dict[str, Array], following: dict[str, Array] | None
    ) -> None:
        done = self._done(values)
        check = self._space.running[lanes] & self._space.pending[lanes]
        if check.any():
            self._check_follows(lanes, values, check)
        self._space.make_room(lanes, 1 + (following is not None))
        fields: dict[str, Any] = dict(values)
        fields[STEP_TYPE] = np.where(self._space.running[lanes], MID, FIRST).astype(np.uint8)
        self._space.put(lanes, fields)
        self._space.steps[lanes] += 1
        if following is not None:
            # What is behind the row is written before the row counts.
            self._space.put(lanes, following, behind=1)
        self._space.step_on(lanes, pending=following is not None, running=~done)
        self._final_may_follow[lanes] = done & (following is None)
        if following is not None and done.any():
            self._promote(lanes[done])
        self._space.seal_finished()

    def _end(self, lanes: Array, final: dict[str, Array] | None) -> None:
        if final is not None:
            with_pending = self._space.pending[lanes]
            if with_pending.any():
                self._check_follows(lanes, final, with_pending)
            without = np.flatnonzero(~with_pending)
            if len(without):
                self._space.make_room(lanes[without], 1)
                self._space.put(lanes[without], {k: v[without] for k, v in final.items()})
                self._space.pending[lanes[without]] = True
        pending = lanes[self._space.pending[lanes]]
        if len(pending):
            self._promote(pending)
        rest = lanes[self._space.running[lanes]]
        self._space.running[rest] = False
        self._final_may_follow[lanes] = False
        self._space.publish(rest)

    def _promote(self, lanes: Array) -> None:
        """Make the pending observations LAST rows; the room for them is there."""
        zeros: dict[str, Any] = {
            name: np.zeros((), self._schema[name].dtype)
            for name in self._names
            if name not in self._observations
        }
        self._space.put(lanes, {**zeros, STEP_TYPE: np.uint8(LAST)})
        self._space.step_on(lanes, pending=False, running=np.zeros(len(lanes), bool))

    def _check_follows(self, lanes: Array, values: Mapping[str, Array], check: Array) -> None:
        """Refuse observations that are not those that the lanes' last rows said would come."""
        for at in np.flatnonzero(check).tolist():
            lane = int(lanes[at])
            page, item = self._space.slot(lane)
            for name in self._observations:
                if values[name][at].tobytes() != page.columns[name][item].tobytes():
                    raise EpisodeError(
                        f"the observation of field {name!r} in lane {lane} differs from the "
                        "next_obs of the row before it in the same episode: call "
                        "end_episode(lanes=[...]) where an episode was cut"
                    )

    def _promote_left(self, lane: int, page: Page, item: int) -> None:
        """Make a LAST row of what was pending in a page of another writer."""
        chosen = np.array([lane])
        self._space.make_room(chosen, 1)
        self._space.put(chosen, {n: page.columns[n][item][None] for n in self._observations})
        self._promote(chosen)

    # -- arguments ----------------------------------------------------------------

    def _split(self, row: Mapping[str, Any]) -> tuple[dict[str, Any], Array]:
        """Return a row without its ``lanes``, and these."""
        rest = dict(row)
        return rest, self._chosen(rest.pop("lanes", None))

    def _chosen(self, lanes: Any) -> Array:
        n = self._n_lanes
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


def _newest_of_lanes(pages: list[Page]) -> dict[int, tuple[Page, int, PageState]]:
    """Return the newest segment of each lane that has a state: its page, place and state."""
    found = {}
    for page in pages:
        for place, (word, owner, _) in enumerate(page.states.tolist()):
            if owner and word:
                found[owner - 1] = (page, place, PageState.unpack(word))
    return found


def _check_length(values: Mapping[str, Array], n: int) -> None:
    for name, value in values.items():
        if len(value) != n:
            raise SchemaError(name, f"has {len(value)} rows for {n} lanes")


def _by_step(name: str, value: Any, n_lanes: int) -> Any:
    """Return an array or tensor (steps, lanes, ...) with both axes as one."""
    array: Any = value if hasattr(value, "shape") else np.asarray(value)
    shape = tuple(array.shape)
    if len(shape) < 2 or shape[1] != n_lanes:
        raise SchemaError(name, f"must have axes of steps and {n_lanes} lanes, got shape {shape}")
    return array.reshape((shape[0] * n_lanes, *shape[2:]))
