"""Sums of a million changing numbers, and the one of them that a given sum falls on."""

from __future__ import annotations

from typing import Any

import numpy as np

Array = np.ndarray[Any, Any]
_LEAST_CAPACITY = 64
#: A level with this many nodes, or as many for each changed leaf, is computed as a whole:
#: that is less work than picking the changed nodes out.
_WHOLE_LEVEL = 2048
_WHOLE_PER_LEAF = 16
#: Nodes of the topmost level at most. One search among their running sums does what
#: ten more levels would, in a tenth of the time.
_TOP_NODES = 1024


class SumTree:
    """Values by leaf number, float64, with their sum and the least one above 0.

    Leaves are numbered ``[first, stop)``. Both ends only grow: :meth:`grow` adds leaves
    of value 0, :meth:`drop` takes the oldest away.

    Parameters
    ----------
    first
        Number of the first leaf.

    Notes
    -----
    For one thread at a time. A binary tree in an array without its topmost levels: the
    children of node ``i`` are ``2 * i`` and ``2 * i + 1``. Leaf numbers go around the
    leaves as in a ring, so that neither end moves anything; the ring is doubled when it
    is too short. A parent depends on its children alone, so the tree over some leaves is
    the same to the bit however they came about.
    """

    def __init__(self, first: int = 0) -> None:
        self._first = self._stop = first
        self._make(_LEAST_CAPACITY)

    @property
    def first(self) -> int:
        """Number of the oldest leaf."""
        return self._first

    @property
    def stop(self) -> int:
        """One past the number of the newest leaf."""
        return self._stop

    @property
    def total(self) -> float:
        """The sum of all leaves."""
        return float(self._running[-1])

    @property
    def least(self) -> float:
        """The least value above 0; infinity where there is none."""
        return float(self._least[self._top : 2 * self._top].min())

    def grow(self, stop: int) -> None:
        """Add leaves of value 0, up to `stop`."""
        self._stop = max(stop, self._stop)
        wanted = self._stop - self._first
        if wanted > self._capacity:
            self._enlarge(1 << (wanted - 1).bit_length())

    def drop(self, first: int) -> None:
        """Take away the leaves before `first`."""
        if first <= self._first:
            return
        gone = np.arange(self._first, min(first, self._stop))
        self.set(gone, np.zeros(len(gone)))
        self._first = first
        self._stop = max(first, self._stop)

    def get(self, leaves: Array) -> Array:
        """Return the values of leaves, which are inside ``[first, stop)``."""
        return self._sums.take(self._nodes(leaves))

    def set(self, leaves: Array, values: Array) -> None:
        """Set the values of leaves; where a leaf is named twice, the last one counts.

        Parameters
        ----------
        leaves
            int64 (n,), inside ``[first, stop)``.
        values
            float64 (n,), finite, 0 or above.
        """
        if len(leaves) == 0:
            return
        leaves, values = keep_last(leaves, values)
        nodes = self._nodes(leaves)
        self._sums[nodes] = values
        self._least[nodes] = np.where(values > 0, values, np.inf)
        self._compute_above(nodes)

    def find(self, values: Array) -> Array:
        """Return the leaf that each value falls on, int64; its value is never 0.

        Parameters
        ----------
        values
            float64 (n,), from 0 to `total`, which is above 0. Leaves follow each other
            in the order of the ring. On a border the later one is found, and for
            `total` itself the last one above 0.
        """
        nodes = self._descend(values)
        # Where rounding made a value reach the sum of a subtree, it ran off its end.
        lost = np.flatnonzero(self._sums.take(nodes) == 0)
        if len(lost):
            nodes[lost] = self._descend(values[lost], careful=True)
        leaves: Array = self._first + ((nodes - self._first) & (self._capacity - 1))
        return leaves

    def _make(self, capacity: int) -> None:
        self._capacity = capacity
        self._top = min(_TOP_NODES, capacity)
        self._sums = np.zeros(2 * capacity)
        self._least = np.full(2 * capacity, np.inf)
        #: Sums of the topmost nodes before each, and of all.
        self._running = np.zeros(self._top + 1)

    def _enlarge(self, capacity: int) -> None:
        nodes = self._nodes(np.arange(self._first, min(self._stop, self._first + self._capacity)))
        sums, least = self._sums[nodes], self._least[nodes]
        self._make(capacity)
        nodes = self._nodes(np.arange(self._first, self._first + len(sums)))
        self._sums[nodes] = sums
        self._least[nodes] = least
        self._compute_above(nodes)

    def _nodes(self, leaves: Array) -> Array:
        # Capacity is a power of two, and negative numbers never come here.
        nodes: Array = (leaves & (self._capacity - 1)) + self._capacity
        return nodes

    def _compute_above(self, nodes: Array) -> None:
        """Compute all ancestors of some leaves.

        From their children, rather than by adding differences: differences leave
        rounding behind, and in time the root is not the sum of its leaves any more.
        """
        sums, least = self._sums, self._least
        whole = max(_WHOLE_LEVEL, _WHOLE_PER_LEAF * len(nodes))
        level = self._capacity >> 1
        while level > whole and level >= self._top:
            nodes = nodes >> 1
            pairs = sums.reshape(-1, 2).take(nodes, axis=0)
            sums[nodes] = pairs[:, 0] + pairs[:, 1]
            pairs = least.reshape(-1, 2).take(nodes, axis=0)
            least[nodes] = np.minimum(pairs[:, 0], pairs[:, 1])
            level >>= 1
        while level >= self._top:
            here = slice(level, 2 * level)
            left = slice(2 * level, 4 * level, 2)
            right = slice(2 * level + 1, 4 * level, 2)
            np.add(sums[left], sums[right], out=sums[here])
            np.minimum(least[left], least[right], out=least[here])
            level >>= 1
        np.cumsum(sums[self._top : 2 * self._top], out=self._running[1:])

    def _descend(self, values: Array, *, careful: bool = False) -> Array:
        """Return a leaf's node for each value; with care, never go where all is 0."""
        last = self._top - 1
        if careful:
            last = np.flatnonzero(self._sums[self._top : 2 * self._top])[-1]
        place = np.minimum(self._running[1:].searchsorted(values, "right"), last)
        values = values - self._running.take(place)
        nodes: Array = place + self._top
        level = self._top
        while level < self._capacity:
            nodes <<= 1
            left = self._sums.take(nodes)
            is_right = values >= left
            if careful:
                is_right &= self._sums.take(nodes + 1) > 0
            left *= is_right
            values -= left
            nodes += is_right
            level <<= 1
        return nodes


def keep_last(leaves: Array, values: Array) -> tuple[Array, Array]:
    """Return each leaf once, ascending, with the last value it was given."""
    if (leaves[1:] > leaves[:-1]).all():
        return leaves, values
    # NumPy does not say which value an element has that is assigned twice.
    order = np.argsort(leaves, kind="stable")
    leaves = leaves[order]
    last = np.append(leaves[1:] != leaves[:-1], True)
    return leaves[last], values[order[last]]
