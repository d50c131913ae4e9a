"""How rows are drawn."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Protocol

import numpy as np

# NumPy loads this part at first use, under a lock that a child forked meanwhile
# would wait for in vain.
import numpy.random


@dataclass(frozen=True, slots=True)
class RowRange:
    """The readable rows of a buffer: ids in ``[first, stop)``.

    Ids only grow, so an id names one row for ever: a stale id is found by
    comparison, never mistaken for the row that took its place.
    """

    first: int
    stop: int


@dataclass(frozen=True, slots=True)
class Draw:
    """A sampler's answer: int64 row ids, with float64 weights where it has them."""

    ids: np.ndarray[Any, Any]
    weights: np.ndarray[Any, Any] | None = None


class Sampler(Protocol):
    """Chooses rows; the seam for a sampler of your own.

    A draw depends on the sampler's state, `rows` and `rng`, and on nothing else.
    """

    def draw(self, n: int, rows: RowRange, rng: np.random.Generator, /) -> Draw:
        """Choose `n` ids inside `rows`, which is never empty."""
        ...


class UniformSampler:
    """Every row with the same probability, with replacement."""

    def draw(self, n: int, rows: RowRange, rng: np.random.Generator, /) -> Draw:
        """Choose `n` ids inside `rows`."""
        return Draw(rng.integers(rows.first, rows.stop, n))


class RandomStream:
    """The random numbers of each batch: a function of seed and step alone.

    Notes
    -----
    For one thread: the generator is one and the same, set anew at each step.
    """

    def __init__(self, seed: int) -> None:
        self._key = np.array([seed, 0], np.uint64)
        self._bits = np.random.Philox(key=self._key)
        self._generator = np.random.Generator(self._bits)
        # Setting a state is a tenth of the work of making a generator.
        self._state: Any = {
            "bit_generator": "Philox",
            "state": {"counter": np.zeros(4, np.uint64), "key": self._key},
            "buffer": np.zeros(4, np.uint64),
            "buffer_pos": 4,
            "has_uint32": 0,
            "uinteger": 0,
        }

    def at(self, step: int) -> np.random.Generator:
        """Return the numbers of one batch; they are for use until the next call."""
        self._key[1] = step
        self._bits.state = self._state
        return self._generator


def generator(seed: int, step: int) -> np.random.Generator:
    """Return the random numbers of one batch, in a generator of its own."""
    return RandomStream(seed).at(step)
