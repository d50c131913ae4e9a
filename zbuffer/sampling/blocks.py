"""Draws that decode few blocks: groups of rows that lie close together."""

from __future__ import annotations

from typing import Any

import numpy as np

from zbuffer.sampling.rowset import RowSet
from zbuffer.sampling.samplers import Draw

Array = np.ndarray[Any, Any]


class BlockSampler:
    """Every row as likely as any other, drawn in groups that share blocks.

    A row costs the decoding of its whole block, so the rows beside it are nearly free.
    They also resemble it: see :func:`effective_sample_size`.

    Parameters
    ----------
    rows_per_group
        Rows that are drawn from the same span of ids. A span is as few blocks as hold
        that many rows.

    Notes
    -----
    The span of a group is that of one row chosen uniformly, so a span with few rows
    (the oldest, the newest, one with gaps) comes up as much less often as it has fewer
    rows. Its group then has rows twice; any other group has none twice.
    """

    def __init__(self, rows_per_group: int = 8) -> None:
        whole = isinstance(rows_per_group, int | np.integer)
        if not whole or isinstance(rows_per_group, bool) or rows_per_group < 1:
            raise ValueError(
                f"rows_per_group must be a whole number from 1 on, got {rows_per_group!r}"
            )
        self.rows_per_group = int(rows_per_group)

    def draw(self, n: int, rows: RowSet, rng: np.random.Generator, /) -> Draw:
        """Choose `n` ids of `rows`: as few groups as give that many, in random order."""
        n_groups = -(-n // self.rows_per_group)
        span = rows.block_rows * -(-self.rows_per_group // rows.block_rows)
        chosen = rows.ids(rng.integers(0, len(rows), n_groups))
        start = chosen // span * span
        first = rows.count_below(start)
        n_rows = rows.count_below(start + span) - first
        positions = (first + _choose(self.rows_per_group, n_rows, rng)).reshape(-1)
        # Shuffled before the cut: then it takes from all groups alike, and whoever
        # cuts the draw once more does so too.
        return Draw(rows.ids(rng.permutation(positions)[:n]))


def _choose(n: int, sizes: Array, rng: np.random.Generator) -> Array:
    """Choose `n` of ``range(size)`` for each size, int64 (n, groups) or (n, 1), uniformly.

    Without replacement by R. Floyd's method (Bentley, "Programming Pearls: a sample of
    brilliance", 1987), which takes a step a pick, of all groups at once, however wide
    the ranges are. With replacement where a size is below `n`.
    """
    place = np.arange(n)[:, None]
    if (sizes == n).all():
        # All rows of each: nothing to choose.
        return place
    # Pick k is one of the first limit + 1; if it was picked before, limit itself, which
    # no earlier pick could be.
    limit = sizes - n + place
    enough = sizes >= n
    picks = rng.integers(0, np.where(enough, limit + 1, sizes))
    for k in range(1, n):
        again = (picks[:k] == picks[k]).any(axis=0) & enough
        picks[k] = np.where(again, limit[k], picks[k])
    return picks


def effective_sample_size(ids: Array, block_rows: int) -> float:
    """Return how many independent rows a draw is worth, at worst.

    Kish's effective sample size, ``sum(c) ** 2 / sum(c ** 2)``, over the counts `c` of
    rows per block (Kish, "Survey Sampling", 1965). It is the number of rows if no two
    share a block, and the number of blocks if each has as many. The worst case: rows of
    a block count as one row seen several times. How far they differ in truth depends on
    the data, so a draw is worth between this and its number of rows.

    Parameters
    ----------
    ids
        int64 row ids, of any shape.
    block_rows
        Ids with the same ``id // block_rows`` share a block.

    Returns
    -------
    float
        0.0 where there are no ids.

    Raises
    ------
    ValueError
        `block_rows` is below 1.

    Examples
    --------
    >>> effective_sample_size(np.array([0, 1, 8, 9]), block_rows=8)
    2.0
    >>> effective_sample_size(np.array([0, 8, 16, 24]), block_rows=8)
    4.0
    """
    if block_rows < 1:
        raise ValueError(f"block_rows must be at least 1, got {block_rows}")
    blocks = np.sort(np.ravel(ids) // block_rows)
    n = len(blocks)
    if n == 0:
        return 0.0
    bounds = np.flatnonzero(blocks[1:] != blocks[:-1]) + 1
    counts = np.diff(bounds, prepend=0, append=n)
    return n * n / float((counts * counts).sum())
