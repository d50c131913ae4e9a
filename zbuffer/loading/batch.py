"""From drawn rows to a batch: what to decode where, and how it is seen."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from zbuffer.errors import SampleError, SchemaError
from zbuffer.reading.chunks import View
from zbuffer.reading.rows import Rows
from zbuffer.sampling.rowset import RowSet
from zbuffer.sampling.samplers import Sampler
from zbuffer.sampling.windows import Lookups, Window, Windows, join, resolve, select
from zbuffer.schema import Schema

Array = np.ndarray[Any, Any]
Allocate = Callable[[str, tuple[int, ...], np.dtype[Any]], Array]
#: Draws of a batch before the rows that have a window are counted one by one.
_MAX_DRAWS = 20
_SCAN_ROWS = 1 << 18


class Batch(dict[str, Any]):
    """Arrays or tensors by name, with a leading batch axis.

    A nested observation is stored flat, ``batch["obs/pixels"]``; its parent name
    gives the parts as a dict: ``batch["obs"]["pixels"]``.
    """

    def __missing__(self, name: str) -> Any:
        prefix = f"{name}/"
        parts = Batch({k[len(prefix) :]: v for k, v in self.items() if k.startswith(prefix)})
        if not parts:
            raise KeyError(name)
        return parts


@dataclass(frozen=True, slots=True)
class Assembled:
    """Arrays as they were filled, and the batch as slices of them.

    Kept apart so that frames shared by ``obs`` and ``next_obs`` move once.
    """

    arrays: dict[str, Array]
    slices: tuple[tuple[str, str, Any], ...]

    def batch(self, arrays: dict[str, Any] | None = None) -> Batch:
        """Return the batch over these arrays, or over their copies elsewhere."""
        source = self.arrays if arrays is None else arrays
        return Batch({key: source[name][index] for key, name, index in self.slices})


class Assembler:
    """Draws rows and fills batches for one kind of window.

    Parameters
    ----------
    fields
        Names to deliver; all by default. ``next_obs`` counts as a name.

    Notes
    -----
    Any thread may call the methods.
    """

    def __init__(
        self, rows: Rows, schema: Schema, window: Window, fields: Sequence[str] | None = None
    ) -> None:
        self._rows = rows
        self._schema = schema
        following = [f"next_{name}" for name in schema.observations]
        known = [*schema, *(n for n in following if n not in schema)]
        wanted = set(known) if fields is None else _expand(fields, known)
        self._observations = [n for n in schema.observations if n in wanted]
        self._following = [n for n in schema.observations if f"next_{n}" in wanted]
        if schema.explicit:
            self._check_explicit(window)
            self._following = []
        # What is drawn, and what is summed, does not depend on which fields are wanted.
        self._chained = bool(schema.observations) and not schema.explicit
        self._window = Window(
            window.frame_stack, window.n_step, window.gamma, next_obs=self._chained
        )
        computed = ("reward", "terminated", "truncated") if self._chained else ()
        self._reward = schema.named("reward")
        self._terminated = schema.named("terminated")
        self._truncated = schema.named("truncated")
        self._plain = [
            name
            for name, field in schema.items()
            if name in wanted and field.role not in ("observation", *computed)
        ]
        self._computed = {
            name: role
            for role in computed
            if (name := schema.named(role)) is not None and name in wanted
        }

    def draw(
        self, n: int, view: View, sampler: Sampler, rng: np.random.Generator
    ) -> tuple[Windows, Array | None]:
        """Draw `n` rows that have a window, each such row as likely as the sampler has it.

        Raises
        ------
        SampleError
            There are no rows, or none that has the window.
        """
        if view.stop <= view.first:
            raise SampleError("the buffer is empty: append rows before sampling")
        lookups = self._lookups(view)
        rows = RowSet(view.first, view.stop, self._rows.chunk_rows, self._rows.block_rows)
        parts: list[Windows] = []
        weights: list[Array] = []
        missing = n
        for _ in range(_MAX_DRAWS):
            # A few more than missing: rows without a window are drawn, and left out.
            drawn = sampler.draw(missing + 8 + missing // 16, rows, rng)
            windows, valid = resolve(drawn.ids, self._window, lookups)
            keep = np.flatnonzero(valid)[:missing]
            parts.append(select(windows, keep))
            if drawn.weights is not None:
                weights.append(drawn.weights[keep])
            missing -= len(keep)
            if missing == 0:
                return join(parts), np.concatenate(weights) if weights else None
        return self._draw_from_scan(n, view, lookups, rng), None

    def assemble(
        self, windows: Windows, view: View, allocate: Allocate, weights: Array | None = None
    ) -> Assembled:
        """Decode the windows into arrays from `allocate`."""
        arrays: dict[str, Array] = {}
        slices: list[tuple[str, str, Any]] = []
        for name in {**dict.fromkeys(self._observations), **dict.fromkeys(self._following)}:
            ids, views = self._places(name, windows)
            field = self._schema[name]
            frames = allocate(name, (*ids.shape, *field.shape), field.dtype)
            self._rows.take(view, name, ids, frames)
            arrays[name] = frames
            if name in self._following and not windows.mask.all():
                frames[~windows.mask, -1] = np.zeros((), field.dtype)
            slices += [(key, name, index) for key, index in views]
        n = len(windows.ids)
        for name in self._plain:
            field = self._schema[name]
            # A stack of one has its axis where rows bring their own next observation too.
            stacked = field.role == "next_observation" and self._window.frame_stack
            shape = (n, 1, *field.shape) if stacked else (n, *field.shape)
            arrays[name] = allocate(name, shape, field.dtype)
            self._rows.take(view, name, windows.ids, arrays[name])
        for name, role in self._computed.items():
            arrays[name] = getattr(windows, role)
        arrays["indices"] = windows.ids
        if self._following:
            arrays["discount"] = windows.discount
            arrays["n_steps"] = windows.n_steps
            arrays["mask"] = windows.mask
        elif self._schema.explicit:
            arrays.update(self._explicit_ends(windows, view))
        if weights is not None:
            arrays["weights"] = weights
        whole = slice(None)
        observed = {name for _, name, _ in slices}
        slices += [(name, name, whole) for name in arrays if name not in observed]
        return Assembled(arrays, tuple(slices))

    def _places(self, name: str, windows: Windows) -> tuple[Array, list[tuple[str, Any]]]:
        """Return the rows to decode for an observation, (B, places), and its views of them."""
        k = self._window.stack
        behind: Any = slice(0, k) if self._window.frame_stack else 0
        every = slice(None)
        if name not in self._following:
            return windows.obs_ids(k), [(name, (every, behind))]
        if name not in self._observations:
            return windows.next_ids(k), [(f"next_{name}", (every, behind))]
        if self._window.n_step == 1:
            # The next stack is this one moved on by a row: one row more holds both.
            ids = windows.both_ids(k)
            ahead: Any = slice(1, k + 1) if self._window.frame_stack else 1
        else:
            ids = np.concatenate((windows.obs_ids(k), windows.next_ids(k)), axis=1)
            ahead = slice(k, 2 * k) if self._window.frame_stack else 1
        return ids, [(name, (every, behind)), (f"next_{name}", (every, ahead))]

    def _lookups(self, view: View) -> Lookups:
        def column(name: str | None) -> Any:
            if name is None or not self._chained:
                return None
            return self._rows.lookup(view, name)

        return Lookups(
            view.stop - 1,
            lambda ids: self._rows.step_types(view, ids),
            column(self._reward),
            column(self._terminated),
            column(self._truncated),
        )

    def _draw_from_scan(
        self, n: int, view: View, lookups: Lookups, rng: np.random.Generator
    ) -> Windows:
        """Draw from the rows that have a window, found by looking at all of them."""
        found = []
        for start in range(view.first, view.stop, _SCAN_ROWS):
            ids = np.arange(start, min(start + _SCAN_ROWS, view.stop))
            found.append(ids[resolve(ids, self._window, lookups)[1]])
        ids = np.concatenate(found)
        if len(ids) == 0:
            raise SampleError(
                f"none of the {view.stop - view.first} rows has the window asked for "
                f"(frame_stack={self._window.frame_stack}, n_step={self._window.n_step}): "
                "its stack was evicted, or the observation after it is not stored yet"
            )
        return resolve(rng.choice(ids, n), self._window, lookups)[0]

    def _explicit_ends(self, windows: Windows, view: View) -> dict[str, Array]:
        """Return what a batch says of steps that bring their own next observation."""
        n = len(windows.ids)
        discount = np.full(n, self._window.gamma, np.float32)
        if self._terminated is not None:
            discount[self._rows.lookup(view, self._terminated)(windows.ids)] = 0.0
        return {
            "discount": discount,
            "n_steps": np.ones(n, np.int64),
            "mask": np.ones(n, bool),
        }

    def _check_explicit(self, window: Window) -> None:
        if (window.frame_stack or 1) > 1 or window.n_step > 1:
            raise SampleError(
                "frame_stack and n_step need rows that follow each other; "
                "this buffer's transitions do not chain (next_obs='explicit')"
            )


def _expand(fields: Sequence[str], known: list[str]) -> set[str]:
    if isinstance(fields, str):
        raise SchemaError(fields, "must be in a list of names: fields=['obs', 'action']")
    wanted = set()
    for name in fields:
        parts = {k for k in known if k == name or k.startswith(f"{name}/")}
        if not parts:
            raise SchemaError(name, f"is not in the schema, which has {', '.join(known)}")
        wanted |= parts
    return wanted
