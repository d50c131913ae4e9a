"""What every sampler has to do: a suite to run against one of your own."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np

from zbuffer.format.segments import Segments
from zbuffer.sampling.rowset import RowSet
from zbuffer.sampling.samplers import Draw, Sampler, generator

Array = np.ndarray[Any, Any]


def check_sampler(make: Callable[[], Sampler]) -> None:
    """Check a sampler against what a loader relies on.

    Parameters
    ----------
    make
        Returns a new sampler, always the same.

    Raises
    ------
    AssertionError
        Says what the sampler does that it must not.
    """
    for name, rows in row_sets():
        _check_draws(name, make, rows)
        if not getattr(make(), "replacement", True):
            _check_epochs(name, make, rows)
        if hasattr(make(), "state_dict"):
            _check_state(name, make, rows)
    _check_growth(make)


def row_sets() -> Iterator[tuple[str, RowSet]]:
    """Yield rows of all kinds: one, many, with an evicted beginning, with lanes and gaps."""
    yield "one row", RowSet(0, 1, 16, 4)
    yield "one lane", RowSet(0, 203, 16, 4)
    yield "an evicted beginning", RowSet(64, 301, 16, 4)
    lane = np.array([0, 1, 2, 0, 1, 0, 2, 1, 0])
    used = np.array([8, 8, 3, 8, 0, 8, 8, 1, 5])
    yield "lanes with gaps", RowSet(32, 104, 16, 4, Segments.of(8, 4, lane, used))


def _check_draws(name: str, make: Callable[[], Sampler], rows: RowSet) -> None:
    for n in (1, 7, 64):
        sampler, twin = make(), make()
        for step in range(3):
            draw = _draw(sampler, n, rows, step)
            _check_draw(name, draw, n, rows, sampler)
            again = _draw(twin, n, rows, step)
            assert np.array_equal(draw.ids, again.ids), (
                f"{name}: the same state, rows and random numbers give other rows"
            )


def _check_draw(name: str, draw: Draw, n: int, rows: RowSet, sampler: Sampler) -> None:
    ids = draw.ids
    assert isinstance(ids, np.ndarray), f"{name}: ids are {type(ids).__name__}, not an array"
    assert ids.dtype == np.int64, f"{name}: ids are {ids.dtype}, not int64"
    assert ids.ndim == 1, f"{name}: ids have {ids.ndim} axes, not one"
    assert rows.contains(ids).all(), f"{name}: row {ids[~rows.contains(ids)]} is not there"
    if getattr(sampler, "replacement", True):
        assert len(ids) == n, f"{name}: {n} rows were asked for, {len(ids)} came"
    else:
        assert len(ids) <= n, f"{name}: {n} rows were asked for, {len(ids)} came"
    if draw.weights is not None:
        weights = np.asarray(draw.weights)
        assert weights.shape == ids.shape, f"{name}: there is not one weight for each row"
        assert np.isfinite(weights).all(), f"{name}: a weight is not finite"
        assert (weights > 0).all(), f"{name}: a weight is not above 0"


def _check_epochs(name: str, make: Callable[[], Sampler], rows: RowSet) -> None:
    sampler = make()
    seen: list[int] = []
    for step in range(10 * len(rows) + 10):
        ids = _draw(sampler, 7, rows, step).ids.tolist()
        if not ids:
            break
        seen += ids
    else:
        raise AssertionError(f"{name}: without replacement an epoch has to end, by an empty draw")
    assert len(seen) == len(set(seen)), f"{name}: a row came twice in an epoch"


def _check_state(name: str, make: Callable[[], Sampler], rows: RowSet) -> None:
    sampler: Any = make()
    for step in range(3):
        _draw(sampler, 5, rows, step)
    state = json.loads(json.dumps(sampler.state_dict()))
    wanted = [_draw(sampler, 5, rows, step).ids.tolist() for step in range(3, 9)]
    other: Any = make()
    other.load_state_dict(state)
    found = [_draw(other, 5, rows, step).ids.tolist() for step in range(3, 9)]
    assert wanted == found, f"{name}: after load_state_dict() other rows follow"


def _check_growth(make: Callable[[], Sampler]) -> None:
    sampler = make()
    newest = 0
    for step in range(60):
        rows = RowSet(step, 20 + 8 * step, 16, 4)
        draw = _draw(sampler, 16, rows, step)
        if len(draw.ids):
            _check_draw("a growing buffer", draw, 16, rows, sampler)
            newest = max(newest, int(draw.ids.max()))
    assert newest >= 300, "a growing buffer: new rows are never drawn"


def _draw(sampler: Sampler, n: int, rows: RowSet, step: int) -> Draw:
    begin = getattr(sampler, "begin", None)
    if begin is not None:
        begin(step)
    return sampler.draw(n, rows, generator(1, step))
