"""The orders that a loader can be asked for by name."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from zbuffer.loading.priorities import Priorities
from zbuffer.sampling.blocks import BlockSampler
from zbuffer.sampling.epoch import EpochSampler
from zbuffer.sampling.samplers import Sampler, UniformSampler

#: What each order takes, beside its name.
OPTIONS: Mapping[str, tuple[str, ...]] = {
    "uniform": (),
    "blocks": ("rows_per_group", "groups_per_batch"),
    "epoch": ("pool_rows", "drop_last"),
    "prioritized": ("alpha", "beta"),
}


def make_sampler(
    order: str | Sampler,
    options: Mapping[str, Any],
    batch_size: int,
    priorities: Priorities,
    *,
    seed: int = 0,
    rank: int = 0,
    world_size: int = 1,
) -> Sampler:
    """Return the sampler of an order.

    Raises
    ------
    ValueError
        There is no such order, or an argument of it cannot be.
    TypeError
        The order takes no such argument.
    """
    if not isinstance(order, str):
        if options:
            raise TypeError(f"a sampler of your own takes no {sorted(options)[0]}= here")
        if not callable(getattr(order, "draw", None)):
            raise ValueError(f"order must be a name or have draw(n, rows, rng), got {order!r}")
        return order
    if order not in OPTIONS:
        raise ValueError(f"order must be one of {', '.join(OPTIONS)}, or a sampler, got {order!r}")
    for name in options:
        if name not in OPTIONS[order]:
            takes = ", ".join(OPTIONS[order]) or "no argument"
            raise TypeError(f"order={order!r} takes no {name}=: it takes {takes}")
    if order == "blocks":
        return BlockSampler(_rows_per_group(batch_size, **options))
    if order == "epoch":
        return EpochSampler(seed=seed, rank=rank, world_size=world_size, **options)
    if order == "prioritized":
        return priorities.sampler(**options)
    return UniformSampler()


def _rows_per_group(
    batch_size: int, rows_per_group: int | None = None, groups_per_batch: int | None = None
) -> int:
    if groups_per_batch is None:
        return 8 if rows_per_group is None else rows_per_group
    whole = isinstance(groups_per_batch, int) and not isinstance(groups_per_batch, bool)
    if not whole or groups_per_batch < 1 or batch_size % groups_per_batch:
        raise ValueError(
            f"groups_per_batch must divide batch_size={batch_size}, got {groups_per_batch!r}"
        )
    rows = batch_size // groups_per_batch
    if rows_per_group not in (None, rows):
        raise ValueError(
            f"batch_size={batch_size} is not rows_per_group={rows_per_group} "
            f"times groups_per_batch={groups_per_batch}"
        )
    return rows
