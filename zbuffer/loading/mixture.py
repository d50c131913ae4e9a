"""Batches out of several buffers."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np

from zbuffer.errors import SampleError
from zbuffer.loading.batch import Allocate, Array, Assembled
from zbuffer.loading.maker import BatchMaker, Made
from zbuffer.loading.upload import Transform, Uploader


class MixtureMaker:
    """Makes batches of which each member brings a part.

    Parameters
    ----------
    members
        What makes the parts, by the member's number.
    shares
        Called for each batch with their number: the probability of each, float64, summing to 1.

    Notes
    -----
    For one thread at a time.
    """

    def __init__(
        self,
        members: Callable[[], list[BatchMaker]],
        shares: Callable[[int], Array],
        uploader: Uploader,
        transform: Transform | None,
    ) -> None:
        self._members = members
        self._shares = shares
        self._uploader = uploader
        self._transform = transform
        self.sampler: Any = _Samplers(members)

    def make(self, batch_size: int, rng: np.random.Generator) -> Made | None:
        """Draw from the members and gather; see :meth:`BatchMaker.make`."""
        self._uploader.begin()
        members = self._members()
        shares = self._shares(len(members))
        if len(shares) == 0 or shares.sum() == 0:
            raise SampleError("all buffers are empty: append rows before sampling")
        counts = rng.multinomial(batch_size, shares)
        whole: dict[str, Array] = {}
        parts: list[Assembled] = []
        numbers: list[int] = []
        start = 0
        for number in np.flatnonzero(counts).tolist():
            n = int(counts[number])
            place = _places(whole, self._uploader.allocate, batch_size, slice(start, start + n))
            part = members[number].make_part(n, rng, place)
            assert part is not None, "a mixture has no order that ends"
            parts.append(part)
            numbers.append(number)
            start += n
        arrays = {name: _joined(name, whole, parts) for name in parts[0].arrays}
        arrays["source"] = np.repeat(np.array(numbers, np.int64), counts[numbers])
        slices = (*parts[0].slices, ("source", "source", slice(None)))
        joined = Assembled(arrays, slices, sum(part.n_blocks for part in parts))
        ready = self._uploader.upload(joined, self._transform)
        return Made(ready, arrays["indices"], joined.n_blocks, arrays["source"])

    def let_go(self) -> None:
        """Drop what the members keep."""
        for member in self._members():
            member.let_go()


def _places(whole: dict[str, Array], allocate: Allocate, n: int, rows: slice) -> Allocate:
    """Return what gives a member its rows of the arrays of the whole batch."""

    def place(name: str, shape: tuple[int, ...], dtype: np.dtype[Any]) -> Array:
        if name not in whole:
            whole[name] = allocate(name, (n, *shape[1:]), dtype)
        return whole[name][rows]

    return place


def _joined(name: str, whole: dict[str, Array], parts: list[Assembled]) -> Array:
    if name in whole:
        return whole[name]
    return np.concatenate([part.arrays[name] for part in parts])


class _Samplers:
    """The samplers of all members, for a loader that tells its sampler the step."""

    def __init__(self, members: Callable[[], list[BatchMaker]]) -> None:
        self._members = members

    def begin(self, step: int) -> None:
        """Tell the step to those that want it."""
        for member in self._members():
            begin = getattr(member.sampler, "begin", None)
            if begin is not None:
                begin(step)
