"""Batches of sequences: steps in a row, and whole episodes."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from zbuffer.errors import SampleError
from zbuffer.format.commit import FIRST
from zbuffer.loading.batch import Allocate, Assembled, expand, lookups
from zbuffer.loading.drawing import Drawn, draw, row_set
from zbuffer.reading.chunks import View
from zbuffer.reading.rows import Rows
from zbuffer.sampling.rowset import RowSet
from zbuffer.sampling.samplers import Sampler
from zbuffer.sampling.sequences import (
    Sequences,
    Span,
    longest_episode,
    order_of_lanes,
    resolve_sequences,
    step_index,
)
from zbuffer.sampling.windows import Lookups
from zbuffer.schema import Schema

Array = np.ndarray[Any, Any]
_FLAGS = ("mask", "is_first", "is_last", "is_terminal")


class SequenceAssembler:
    """Draws the first steps of sequences, and fills batches with them.

    Parameters
    ----------
    fields
        Names to deliver; by default all but the observations after the steps, which are
        delivered where ``next_obs`` is named.

    Notes
    -----
    Any thread may call the methods.
    """

    def __init__(
        self, rows: Rows, schema: Schema, span: Span, fields: Sequence[str] | None = None
    ) -> None:
        if schema.explicit or not schema.observations:
            raise SampleError("sequences need rows that follow each other: these do not chain")
        self._rows = rows
        self._schema = schema
        self._span = span
        following = {f"next_{name}": name for name in schema.observations}
        known = [*schema, *following]
        wanted = set(schema) if fields is None else expand(fields, known)
        self._fields = [name for name in schema if name in wanted]
        self._following = {key: name for key, name in following.items() if key in wanted}
        self._terminated = schema.named("terminated")
        self._truncated = schema.named("truncated")

    def draw(
        self, n: int, view: View, sampler: Sampler, rng: np.random.Generator
    ) -> Drawn[Sequences] | None:
        """Draw `n` first steps; see :func:`zbuffer.loading.drawing.draw`."""
        rows = row_set(self._rows, view)
        return draw(n, rows, sampler, rng, _SequenceShape(self._span, rows, self._lookups(view)))

    def episodes(self, n: int, view: View, rng: np.random.Generator) -> Drawn[Sequences]:
        """Draw `n` whole episodes, with replacement; the longest of them sets ``T``.

        Raises
        ------
        SampleError
            No episode is there from its first step to its end.
        """
        rows, looks = row_set(self._rows, view), self._lookups(view)
        starts, lengths = _whole_episodes(rows, looks)
        if len(starts) == 0:
            raise SampleError(
                "there is no whole episode: none has ended, or its beginning was evicted"
            )
        chosen = rng.integers(0, len(starts), n)
        span = Span(int(lengths[chosen].max()), boundary="pad")
        return Drawn(resolve_sequences(starts[chosen], span, rows, looks)[0], n, None)

    def hold(self, view: View, chunks: Sequence[int]) -> int:
        """Keep chunks decoded that all samples are about to come from; returns blocks."""
        return self._rows.hold(view, self._fields, chunks)

    def assemble(self, drawn: Drawn[Sequences], view: View, allocate: Allocate) -> Assembled:
        """Decode the sequences into arrays from `allocate`."""
        found = drawn.found
        arrays: dict[str, Array] = {}
        n_blocks = 0
        reads = [(name, name, found.ids, found.mask) for name in self._fields]
        reads += [(k, name, found.next_ids, found.next_mask) for k, name in self._following.items()]
        for key, name, ids, there in reads:
            field = self._schema[name]
            arrays[key] = allocate(key, (*ids.shape, *field.shape), field.dtype)
            n_blocks += self._rows.fill(view, name, ids, arrays[key])
            if not there.all():
                arrays[key][~there] = np.zeros((), field.dtype)
        arrays["indices"] = found.ids
        arrays.update({name: getattr(found, name) for name in _FLAGS})
        if self._following:
            arrays["next_mask"] = found.next_mask
        if drawn.weights is not None:
            arrays["weights"] = drawn.weights
        return Assembled(arrays, tuple((name, name, slice(None)) for name in arrays), n_blocks)

    def _lookups(self, view: View) -> Lookups:
        return lookups(self._rows, view, None, self._terminated, self._truncated)


@dataclass(frozen=True, slots=True)
class _SequenceShape:
    """Rows that begin a sequence."""

    span: Span
    rows: RowSet
    lookups: Lookups

    def pick(self, ids: Array, most: int) -> tuple[Sequences, Array]:
        found, valid = resolve_sequences(ids, self.span, self.rows, self.lookups)
        if self.span.stride > 1:
            valid &= step_index(ids, self.rows, self.lookups) % self.span.stride == 0
        keep = np.flatnonzero(valid)[:most]
        names = Sequences.__dataclass_fields__
        return Sequences(*(getattr(found, name)[keep] for name in names)), keep

    def join(self, parts: list[Sequences]) -> Sequences:
        return Sequences(
            *(
                np.concatenate([getattr(part, name) for part in parts])
                for name in Sequences.__dataclass_fields__
            )
        )

    def no_such_row(self) -> str:
        n, longest = self.span.n_steps, longest_episode(self.rows, self.lookups)
        if self.span.boundary == "stop" and longest < n:
            return f"begins a sequence of {n} steps: the longest episode has {longest}"
        return f"begins a sequence of {n} steps (boundary={self.span.boundary!r})"


def _whole_episodes(rows: RowSet, looks: Lookups) -> tuple[Array, Array]:
    """Return first row and number of steps of the episodes that have both their ends."""
    ordered = order_of_lanes(rows)
    types = looks.step_type(ordered)
    starts = np.flatnonzero(types == FIRST)
    if len(starts) == 0:
        return starts, starts
    lanes = rows.lanes(ordered)
    begins = types == FIRST
    begins[:1] = True
    begins[1:] |= lanes[1:] != lanes[:-1]
    bounds = np.append(np.flatnonzero(begins), len(types))
    stops = bounds[np.searchsorted(bounds, starts, "right")]
    newest = np.append(lanes[1:] != lanes[:-1], True)[stops - 1]
    whole = ~(newest & looks.running(lanes[starts]))
    steps = np.concatenate(([0], np.cumsum(types <= 1)))
    return ordered[starts[whole]], (steps[stops] - steps[starts])[whole]
