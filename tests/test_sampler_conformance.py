"""Every sampler that comes with zbuffer passes the suite for samplers of one's own."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest

from zbuffer import Draw, RowSet
from zbuffer.sampling.blocks import BlockSampler
from zbuffer.sampling.epoch import EpochSampler
from zbuffer.sampling.prioritized import PrioritizedSampler, PriorityTable
from zbuffer.sampling.samplers import UniformSampler
from zbuffer.testing import check_sampler


class RecencyWeighted:
    """Newer rows are likelier: half as likely each `half_life` rows back."""

    def __init__(self, half_life: int = 100) -> None:
        self._scale = half_life / np.log(2)

    def draw(self, n: int, rows: RowSet, rng: np.random.Generator, /) -> Draw:
        reach = -np.expm1(-len(rows) / self._scale)
        back = -self._scale * np.log1p(-rng.random(n) * reach)
        return Draw(rows.ids(len(rows) - 1 - np.minimum(back.astype(np.int64), len(rows) - 1)))


@pytest.mark.parametrize(
    "make",
    [
        UniformSampler,
        BlockSampler,
        lambda: BlockSampler(3),
        EpochSampler,
        lambda: EpochSampler(seed=4, pool_rows=20),
        lambda: PrioritizedSampler(PriorityTable(0.5)),
        RecencyWeighted,
    ],
)
def test_a_built_in_sampler_passes_the_suite(make: Callable[[], Any]) -> None:
    check_sampler(make)


class Broken(UniformSampler):
    def __init__(self, fault: str) -> None:
        self.fault = fault
        self.calls = 0

    def draw(self, n: int, rows: RowSet, rng: np.random.Generator, /) -> Draw:
        ids = super().draw(n, rows, rng).ids
        if self.fault == "other rows":
            return Draw(ids + 10_000)
        if self.fault == "too few":
            return Draw(ids[1:])
        if self.fault == "int32":
            return Draw(ids.astype(np.int32))
        if self.fault == "weights":
            return Draw(ids, np.zeros(n))
        if self.fault == "own randomness":
            return Draw(rows.ids(np.random.default_rng().integers(0, len(rows), n)))
        return Draw(rows.ids(np.minimum(np.arange(n), len(rows) - 1)))


@pytest.mark.parametrize(
    ("fault", "message"),
    [
        ("other rows", "is not there"),
        ("too few", "rows were asked for"),
        ("int32", "ids are int32, not int64"),
        ("weights", "a weight is not above 0"),
        ("own randomness", "the same state, rows and random numbers give other rows"),
        ("never the new", "new rows are never drawn"),
    ],
)
def test_a_broken_sampler_is_told_what_is_wrong(fault: str, message: str) -> None:
    with pytest.raises(AssertionError, match=message):
        check_sampler(lambda: Broken(fault))
