"""How steps follow each other: an episode as transitions, and whether transitions chain."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np

from zbuffer.errors import EpisodeError
from zbuffer.schema import Schema, flatten

Array = np.ndarray[Any, Any]


def check_chain(
    schema: Schema, values: dict[str, Array], following: dict[str, Array], done: Array
) -> None:
    """Refuse steps whose next observation is not, bit for bit, that of the step after them.

    Steps that are `done` need not chain.

    Raises
    ------
    EpisodeError
        Names the first such step.
    """
    for name in schema.observations:
        differs = _rows_differ(values[name][1:], following[name][:-1]) & ~done[:-1]
        if differs.any():
            i = int(np.flatnonzero(differs)[0])
            raise EpisodeError(
                f"obs[{i + 1}] of field {name!r} differs from next_obs[{i}] in the same "
                "episode: rows that do not chain need a schema with next_obs='explicit'"
            )


def as_transitions(schema: Schema, rows: Mapping[str, Any]) -> dict[str, Any]:
    """Return an episode's arrays as steps, each with its next observation.

    Observations may have one item more than the steps: the final one. A plain bool
    for terminated or truncated speaks of the last step; left out, it is False.

    Raises
    ------
    EpisodeError
        There is no step, or the episode would end before its last one.
    """
    row = flatten(rows)
    n_steps = _count_steps(schema, row)
    if n_steps < 1:
        raise EpisodeError("an episode needs at least one step")
    for name in (schema.named("terminated"), schema.named("truncated")):
        if name is None:
            continue
        if _is_flag(row.get(name, False)):
            flags = np.zeros(n_steps, bool)
            flags[-1] = row.get(name, False)
            row[name] = flags
        if np.asarray(row[name])[:-1].any():
            raise EpisodeError(f"field {name!r} is set before the last step of the episode")
    if not schema.explicit:
        for name in schema.observations:
            if name in row and len(row[name]) == n_steps + 1:
                row[f"next_{name}"] = row[name][1:]
                row[name] = row[name][:-1]
    return row


def _count_steps(schema: Schema, row: Mapping[str, Any]) -> int:
    """Return the steps of an episode: of a field that is no observation, if there is one."""
    for name, field in schema.items():
        if name in row and field.role != "observation" and not _is_flag(row[name]):
            return len(row[name])
    return next((len(row[name]) - 1 for name in schema.observations if name in row), 0)


def _is_flag(value: Any) -> bool:
    return isinstance(value, bool | np.bool_)


def _rows_differ(a: Array, b: Array) -> Array:
    """Return which rows of two equal-shaped arrays differ in any bit."""
    n = len(a)
    if a.nbytes == 0:
        return np.zeros(n, bool)
    a, b = np.ascontiguousarray(a), np.ascontiguousarray(b)
    word = "u8" if a[:1].nbytes % 8 == 0 else "u1"
    return np.asarray((a.reshape(n, -1).view(word) != b.reshape(n, -1).view(word)).any(axis=1))
