"""Row ids to the chunks that hold them, in NumPy: what ``_plan.c`` does, without a compiler."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np

Array = np.ndarray[Any, Any]


@dataclass(frozen=True, slots=True)
class Plan:
    """Wanted rows, sorted by id, and where the chunk (or raw page) of each lies.

    Attributes
    ----------
    ids
        int64, ascending.
    rows
        int64: row inside the chunk or page.
    sizes
        int64: bytes of the chunk, or minus the rows of a raw page.
    addrs
        uint64: where the chunk or page lies.
    slots
        int64: row of the batch to fill.
    pinned
        What keeps the addresses valid while the plan lives.
    """

    chunk_rows: int
    ids: Array
    rows: Array
    sizes: Array
    addrs: Array
    slots: Array
    pinned: list[Any]


def make_plan(
    ids: Array,
    first: int,
    stop: int,
    chunk_rows: int,
    base: int,
    addrs: Array,
    sizes: Array,
    owners: list[Any],
    pending: tuple[int, int, int, int],
) -> Plan | list[int]:
    """Return the plan; see :meth:`zbuffer.reading.gather.Gather.plan`."""
    slots = np.argsort(ids, kind="stable")
    ordered = ids[slots]
    if len(ids) and (ordered[0] < max(first, 0) or ordered[-1] >= stop):
        raise IndexError("ids outside the rows")
    chunks = ordered // chunk_rows
    is_pending = ordered == pending[0]
    new = np.ones(len(ids), bool)
    new[1:] = chunks[1:] != chunks[:-1]
    needed = chunks[new & ~is_pending]
    at = needed - base
    known = (at >= 0) & (at < len(addrs))
    known[known] = addrs[at[known]] != 0
    if not known.all():
        missing: list[int] = needed[~known].tolist()
        return missing
    pinned = [owners[i] for i in at.tolist()]
    rows = ordered - chunks * chunk_rows
    # The pending observation lies in no chunk; any place of the table stands in for it.
    places = np.where(is_pending, 0, chunks - base)
    if len(needed):
        addrs, sizes = addrs[places], sizes[places]
    else:
        addrs, sizes = np.zeros(len(ids), np.uint64), np.zeros(len(ids), np.int64)
    _, addrs[is_pending], count, rows[is_pending] = pending
    sizes[is_pending] = -count
    outside = rows >= np.where(sizes < 0, -sizes, chunk_rows)
    if outside.any():
        raise ValueError(f"row {ordered[outside][0]} lies outside its chunk")
    return Plan(chunk_rows, ordered, rows, sizes, addrs, slots, pinned)
