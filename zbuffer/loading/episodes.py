"""The episodes of a buffer, read off its small fields."""

from __future__ import annotations

from typing import Any

from zbuffer.loading.drawing import row_set
from zbuffer.reading.chunks import View
from zbuffer.reading.rows import Rows
from zbuffer.sampling.episodes import Episodes
from zbuffer.sampling.sequences import order_of_lanes
from zbuffer.schema import STEP_TYPE, Schema


def read_episodes(rows: Rows, view: View, schema: Schema) -> Episodes:
    """Return the episodes of a view, lane by lane."""
    there = row_set(rows, view)
    ids = order_of_lanes(there)
    lanes = there.lanes(ids)

    def column(role: str) -> Any:
        name = schema.named(role)
        return None if name is None else rows.take(view, name, ids)

    return Episodes(
        ids,
        lanes,
        rows.take(view, STEP_TYPE, ids),
        column("reward"),
        column("terminated"),
        column("truncated"),
        running=view.running_lanes(lanes),
    )
