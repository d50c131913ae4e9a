"""How rows are drawn."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Protocol

import numpy as np

# NumPy loads this part at first use, under a lock that a child forked meanwhile
# would wait for in vain.
import numpy.random

from zbuffer.sampling.rowset import RowSet

Array = np.ndarray[Any, Any]


@dataclass(frozen=True, slots=True)
class Draw:
    """A sampler's answer: int64 row ids, with float64 weights where it has them."""

    ids: Array
    weights: Array | None = None


class Sampler(Protocol):
    """Chooses rows; the seam for a sampler of your own.

    A draw depends on the sampler's state, `rows` and `rng`, and on nothing else.
    A sampler may also have

    ``independent``
        True where the rows of a draw do not depend on each other: such a sampler may be
        asked for a few more rows than are used.
    ``replacement``
        False where each row is drawn once at most, until all were: such a sampler is
        asked for no row that is not used, and answers with fewer than `n` rows where
        no more are left, with none at the end of an epoch.
    ``state_dict()``, ``load_state_dict(state)``
        What it must keep, beside seed and step, for the same draws to follow: plain
        values that JSON can hold.
    """

    def draw(self, n: int, rows: RowSet, rng: np.random.Generator, /) -> Draw:
        """Choose `n` ids of `rows`, which is never empty."""
        ...


class UniformSampler:
    """Every row with the same probability, with replacement."""

    independent = True

    def draw(self, n: int, rows: RowSet, rng: np.random.Generator, /) -> Draw:
        """Choose `n` ids of `rows`."""
        return Draw(rows.ids(rng.integers(0, len(rows), n)))


class RandomStream:
    """The random numbers of each batch: a function of seed, rank and step alone.

    Notes
    -----
    For one thread: the generator is one and the same, set anew at each step.
    """

    def __init__(self, seed: int, rank: int = 0) -> None:
        self._key = np.array([seed, 0], np.uint64)
        self._bits = np.random.Philox(key=self._key)
        self._generator = np.random.Generator(self._bits)
        # Setting a state is a tenth of the work of making a generator.
        self._state: Any = {
            "bit_generator": "Philox",
            "state": {"counter": np.array([0, 0, 0, rank], np.uint64), "key": self._key},
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
