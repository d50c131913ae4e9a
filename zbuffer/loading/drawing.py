"""Draws until a batch is full: rows that do not make a sample are left out."""

from __future__ import annotations

from typing import Any, Generic, NamedTuple, Protocol, TypeVar

import numpy as np

from zbuffer.errors import SampleError
from zbuffer.reading.chunks import View
from zbuffer.reading.rows import Rows
from zbuffer.sampling.rowset import RowSet
from zbuffer.sampling.samplers import Sampler, UniformSampler

Array = np.ndarray[Any, Any]
T = TypeVar("T")
#: Draws of a batch before the rows that make a sample are looked for one by one.
_MAX_DRAWS = 20
#: Draws after that of a sampler that is not uniform, as long as there are such rows.
_MOST_DRAWS = 2000
_SCAN_ROWS = 1 << 18


def row_set(rows: Rows, view: View) -> RowSet:
    """Return what there is to draw from at one moment."""
    return RowSet(view.first, view.stop, rows.chunk_rows, rows.block_rows, view.segments)


class Shape(Protocol[T]):
    """What drawn rows have to be, and what is known of them then."""

    def pick(self, ids: Array, most: int, /) -> tuple[T, Array]:
        """Return what is known of the first rows that make a sample, and which these are."""
        ...

    def join(self, parts: list[T], /) -> T:
        """Return several as one."""
        ...

    def no_such_row(self) -> str:
        """Say what is wanted that no row has."""
        ...


class Drawn(NamedTuple, Generic[T]):
    """The rows of a batch: what is known of them, and their weights if there are any."""

    found: T
    n: int
    weights: Array | None


def draw(
    n: int, rows: RowSet, sampler: Sampler, rng: np.random.Generator, shape: Shape[T]
) -> Drawn[T] | None:
    """Draw `n` rows that make a sample, each such row as likely as the sampler has it.

    Fewer where a sampler without replacement has no more, and None where it had none.

    Raises
    ------
    SampleError
        There are no rows, or none that makes a sample.
    """
    if len(rows) == 0:
        raise SampleError("the buffer is empty: append rows before sampling")
    if not getattr(sampler, "replacement", True):
        return _draw_once_each(n, rows, sampler, rng, shape)
    parts: list[T] = []
    weights: list[Array] = []
    missing = n
    looked = False
    for attempt in range(_MOST_DRAWS):
        if attempt == _MAX_DRAWS and not looked:
            looked = True
            if isinstance(sampler, UniformSampler):
                return Drawn(_draw_from_scan(n, rows, rng, shape), n, None)
            _scan(rows, shape)
        # Rows that make no sample are drawn, and left out. A few more than missing, where
        # that changes nothing: what comes in groups must not be cut by what is valid.
        spare = 8 + missing // 16 if getattr(sampler, "independent", False) else 0
        drawn = sampler.draw(missing + spare, rows, rng)
        _check_ids(drawn.ids, rows)
        found, keep = shape.pick(drawn.ids, missing)
        parts.append(found)
        if drawn.weights is not None:
            weights.append(drawn.weights[keep])
        missing -= len(keep)
        if missing == 0:
            whole = parts[0] if len(parts) == 1 else shape.join(parts)
            return Drawn(whole, n, np.concatenate(weights) if weights else None)
    raise SampleError(
        f"{_MOST_DRAWS} draws of {type(sampler).__name__} gave {n - missing} of {n} rows "
        f"that make a sample: {shape.no_such_row()}"
    )


def _draw_once_each(
    n: int, rows: RowSet, sampler: Sampler, rng: np.random.Generator, shape: Shape[T]
) -> Drawn[T] | None:
    parts: list[T] = []
    weights: list[Array] = []
    missing = n
    while missing:
        drawn = sampler.draw(missing, rows, rng)
        if len(drawn.ids) == 0:
            break
        _check_ids(drawn.ids, rows)
        found, keep = shape.pick(drawn.ids, len(drawn.ids))
        parts.append(found)
        if drawn.weights is not None:
            weights.append(drawn.weights[keep])
        missing -= len(keep)
    if missing == n:
        return None
    whole = parts[0] if len(parts) == 1 else shape.join(parts)
    return Drawn(whole, n - missing, np.concatenate(weights) if weights else None)


def _check_ids(ids: Array, rows: RowSet) -> None:
    """Refuse ids of a sampler that are no rows: looking them up would read anything."""
    if len(ids) == 0:
        raise SampleError("the sampler drew nothing")
    inside = rows.first <= ids.min() and ids.max() < rows.stop
    if inside and (rows.segments is None or rows.contains(ids).all()):
        return
    wrong = ids[~rows.contains(ids)][0]
    raise SampleError(f"the sampler drew row {wrong}, which is not in the buffer")


def _scan(rows: RowSet, shape: Shape[T]) -> Array:
    """Return every row that makes a sample; there is one, or this raises."""
    found = []
    for start in range(0, len(rows), _SCAN_ROWS):
        ids = rows.ids(np.arange(start, min(start + _SCAN_ROWS, len(rows))))
        found.append(ids[shape.pick(ids, len(ids))[1]])
    ids = np.concatenate(found)
    if len(ids) == 0:
        raise SampleError(f"none of the {len(rows)} rows {shape.no_such_row()}")
    return ids


def _draw_from_scan(n: int, rows: RowSet, rng: np.random.Generator, shape: Shape[T]) -> T:
    return shape.pick(rng.choice(_scan(rows, shape), n), n)[0]
