"""Steps in a row as one sample, for recurrent and world models."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Literal

import numpy as np

from zbuffer.errors import SampleError
from zbuffer.format.commit import FIRST, LAST, MID
from zbuffer.sampling.rowset import RowSet
from zbuffer.sampling.windows import Lookups

Array = np.ndarray[Any, Any]
Boundary = Literal["stop", "pad", "cross"]
BOUNDARIES = ("stop", "pad", "cross")


@dataclass(frozen=True, slots=True)
class Span:
    """What one sequence spans.

    Parameters
    ----------
    length
        Steps to learn from.
    burn_in
        Steps before them, to warm a recurrent state up.
    boundary
        At the end of an episode: ``"stop"``: only sequences that lie in one episode are
        drawn; ``"pad"``: a sequence ends with its episode, and the places after that are
        zero; ``"cross"``: it goes on with the next episode of the lane.
    stride
        Only every so manieth step of an episode begins a sequence.
    """

    length: int
    burn_in: int = 0
    boundary: Boundary = "stop"
    stride: int = 1

    def __post_init__(self) -> None:
        for name, least in (("length", 1), ("burn_in", 0), ("stride", 1)):
            value = getattr(self, name)
            whole = isinstance(value, int | np.integer) and not isinstance(value, bool)
            if not whole or value < least:
                raise SampleError(f"{name} must be a whole number from {least} on, got {value!r}")
        if self.boundary not in BOUNDARIES:
            raise SampleError(f"boundary must be 'stop', 'pad' or 'cross', got {self.boundary!r}")

    @property
    def n_steps(self) -> int:
        """Steps of a sequence, ``T``."""
        return self.burn_in + self.length


@dataclass(frozen=True, slots=True)
class Sequences:
    """``B`` sequences of ``T`` steps.

    Attributes
    ----------
    ids
        int64 (B, T): the steps. Where ``mask`` is False, any row of the buffer.
    next_ids
        int64 (B, T): the rows that hold the observations after them; the step itself
        where none is stored.
    mask
        bool (B, T): whether there is a step.
    next_mask
        bool (B, T): whether the observation after it is stored.
    is_first, is_last, is_terminal
        bool (B, T): whether the step is the first of its episode, the last, or one at
        which the environment terminated.
    """

    ids: Array
    next_ids: Array
    mask: Array
    next_mask: Array
    is_first: Array
    is_last: Array
    is_terminal: Array


def resolve_sequences(
    ids: Array, span: Span, rows: RowSet, lookups: Lookups
) -> tuple[Sequences, Array]:
    """Find the sequence that begins at each id.

    Returns
    -------
    Sequences
        Of all ids, in their order.
    valid : ndarray of bool
        Which of them there are.
    """
    n_steps = span.n_steps
    n_places = 2 * n_steps if span.boundary == "cross" else n_steps
    path = np.ascontiguousarray(rows.path(ids, 0, n_places))
    types = lookups.step_type(path)
    if span.boundary == "cross":
        is_step = types[:, :-1] <= MID
        # The places of the steps first, in their order; LAST rows lie between episodes.
        places = np.argsort(~is_step, axis=1, kind="stable")[:, :n_steps]
        mask = np.take_along_axis(is_step, places, axis=1)
    else:
        alive = types[:, :-1] == MID
        alive[:, 0] = types[:, 0] <= MID
        mask = np.logical_and.accumulate(alive, axis=1)
        places = np.broadcast_to(np.arange(n_steps), mask.shape)
    valid = mask[:, 0] & (types[:, 0] <= MID)
    if span.boundary != "pad":
        valid &= mask.all(axis=1)
    steps = np.where(mask, np.take_along_axis(path, places, axis=1), ids[:, None])
    following = np.take_along_axis(path, places + 1, axis=1)
    next_type = np.take_along_axis(types, places + 1, axis=1)
    next_mask = mask & ((next_type == MID) | (next_type == LAST))
    terminated = _flags(lookups.terminated, steps, mask)
    ended = terminated | _flags(lookups.truncated, steps, mask)
    # Behind the newest row lies nothing yet, or what its step came with.
    newest = ~rows.contains(following)
    going_on = np.where(newest, lookups.running(rows.lanes(ids))[:, None], next_type == MID)
    return (
        Sequences(
            steps,
            np.where(next_mask, following, steps),
            mask,
            next_mask,
            mask & (np.take_along_axis(types, places, axis=1) == FIRST),
            mask & (ended | ~going_on),
            terminated,
        ),
        valid,
    )


def _flags(lookup: Any, steps: Array, mask: Array) -> Array:
    return np.zeros(mask.shape, bool) if lookup is None else mask & lookup(steps)


def order_of_lanes(rows: RowSet) -> Array:
    """Return the ids of all rows, lane by lane, in the order of time."""
    ids = rows.ids(np.arange(len(rows)))
    if rows.segments is None:
        return ids
    ordered: Array = ids[np.argsort(rows.lanes(ids), kind="stable")]
    return ordered


def step_index(ids: Array, rows: RowSet, lookups: Lookups) -> Array:
    """Return how many steps of its episode come before each row, int64.

    Counted from the oldest row there is, where the beginning was evicted.
    """
    if rows.segments is None:
        return _index_back(ids, rows, lookups)
    ordered = order_of_lanes(rows)
    lanes = rows.lanes(ordered)
    first = lookups.step_type(ordered) == FIRST
    first[0] = True
    first[1:] |= lanes[1:] != lanes[:-1]
    starts = np.flatnonzero(first)
    place = np.empty(len(rows), np.int64)
    place[rows.count_below(ordered)] = np.arange(len(ordered))
    at = place[rows.count_below(ids)]
    index: Array = at - starts[np.searchsorted(starts, at, "right") - 1]
    return index


def _index_back(ids: Array, rows: RowSet, lookups: Lookups) -> Array:
    """Look back from each row in steps that double, until its FIRST row is seen."""
    start = np.full(len(ids), rows.first)
    open_, reach = np.arange(len(ids)), 64
    while len(open_):
        here = ids[open_]
        back = here[:, None] - np.arange(reach)
        types = lookups.step_type(np.maximum(back, rows.first))
        found = (types == FIRST) & (back >= rows.first)
        seen = found.any(axis=1)
        start[open_[seen]] = here[seen] - np.argmax(found[seen], axis=1)
        open_ = open_[~seen & (back[:, -1] > rows.first)]
        reach *= 4
    index: Array = ids - start
    return index


def longest_episode(rows: RowSet, lookups: Lookups) -> int:
    """Return the most steps that follow each other in one episode."""
    ordered = order_of_lanes(rows)
    types = lookups.step_type(ordered)
    is_step = types <= MID
    begins = types != MID
    begins[:1] = True
    if rows.segments is not None:
        lanes = rows.lanes(ordered)
        begins[1:] |= lanes[1:] != lanes[:-1]
    starts = np.flatnonzero(begins)
    return int(np.add.reduceat(is_step.astype(np.int64), starts).max()) if len(starts) else 0
