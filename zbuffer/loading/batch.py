"""From drawn rows to a batch: what to decode where, and how it is seen."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from zbuffer.errors import SampleError, SchemaError
from zbuffer.loading.drawing import Drawn, draw, row_set
from zbuffer.loading.native_windows import NativeWindow, native_window, native_windows
from zbuffer.reading.chunks import View
from zbuffer.reading.rows import Rows
from zbuffer.sampling.rowset import RowSet
from zbuffer.sampling.samplers import Sampler
from zbuffer.sampling.windows import Lookups, Window, Windows, join, resolve, select
from zbuffer.schema import STEP_TYPE, Schema

Array = np.ndarray[Any, Any]
Allocate = Callable[[str, tuple[int, ...], np.dtype[Any]], Array]


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
    n_blocks: int = 0

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
        wanted = set(known) if fields is None else expand(fields, known)
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
        reward = self._reward if self._chained else None
        self._native = native_window(rows.native_windows, self._window, schema, reward)
        self._images = list(dict.fromkeys([*self._observations, *self._following]))
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
    ) -> Drawn[Windows] | None:
        """Draw `n` rows that have a window; see :func:`zbuffer.loading.drawing.draw`."""
        rows = row_set(self._rows, view)
        shape = _WindowShape(self._window, rows, self._lookups(view), view, self._native)
        return draw(n, rows, sampler, rng, shape)

    def hold(self, view: View, chunks: Sequence[int]) -> int:
        """Keep chunks decoded that all samples are about to come from; returns blocks."""
        return self._rows.hold(view, self._images, chunks)

    def assemble(self, drawn: Drawn[Windows], view: View, allocate: Allocate) -> Assembled:
        """Decode the windows into arrays from `allocate`."""
        windows = drawn.found
        arrays: dict[str, Array] = {}
        slices: list[tuple[str, str, Any]] = []
        n_blocks = 0
        for name in self._images:
            ids, views = self._places(name, windows)
            field = self._schema[name]
            frames = allocate(name, (*ids.shape, *field.shape), field.dtype)
            n_blocks += self._rows.fill(view, name, ids, frames)
            arrays[name] = frames
            if name in self._following and not windows.mask.all():
                frames[~windows.mask, -1] = np.zeros((), field.dtype)
            slices += [(key, name, index) for key, index in views]
        n = drawn.n
        rows = windows.ids
        for name in self._plain:
            field = self._schema[name]
            # A stack of one has its axis where rows bring their own next observation too.
            stacked = field.role == "next_observation" and self._window.frame_stack
            shape = (n, 1, *field.shape) if stacked else (n, *field.shape)
            arrays[name] = allocate(name, shape, field.dtype)
            n_blocks += self._rows.fill(view, name, rows, arrays[name])
        for name, role in self._computed.items():
            arrays[name] = getattr(windows, role)
        arrays["indices"] = rows
        if self._following:
            arrays["discount"] = windows.discount
            arrays["n_steps"] = windows.n_steps
            arrays["mask"] = windows.mask
        elif self._schema.explicit:
            arrays.update(self._explicit_ends(rows, view))
        if drawn.weights is not None:
            arrays["weights"] = drawn.weights
        whole = slice(None)
        observed = {name for _, name, _ in slices}
        slices += [(name, name, whole) for name in arrays if name not in observed]
        return Assembled(arrays, tuple(slices), n_blocks)

    def _places(self, name: str, windows: Windows) -> tuple[Array, list[tuple[str, Any]]]:
        """Return the rows to decode for an observation, (B, places), and its views of them."""
        k = self._window.stack
        behind: Any = slice(0, k) if self._window.frame_stack else 0
        every = slice(None)
        if name not in self._following:
            return windows.stacks[:, :k], [(name, (every, behind))]
        if name not in self._observations:
            return windows.stacks[:, -k:], [(f"next_{name}", (every, behind))]
        # One step on, the next stack is this one moved by a row: one row more holds both.
        start = 1 if self._window.n_step == 1 else k
        ahead: Any = slice(start, start + k) if self._window.frame_stack else start
        return windows.stacks, [(name, (every, behind)), (f"next_{name}", (every, ahead))]

    def _lookups(self, view: View) -> Lookups:
        if not self._chained:
            return lookups(self._rows, view)
        return lookups(self._rows, view, self._reward, self._terminated, self._truncated)

    def _explicit_ends(self, ids: Array, view: View) -> dict[str, Array]:
        """Return what a batch says of steps that bring their own next observation."""
        n = len(ids)
        discount = np.full(n, self._window.gamma, np.float32)
        if self._terminated is not None:
            discount[self._rows.take(view, self._terminated, ids)] = 0.0
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


def lookups(
    rows: Rows,
    view: View,
    reward: str | None = None,
    terminated: str | None = None,
    truncated: str | None = None,
) -> Lookups:
    """Return the small fields of a view by row id, those that have a name."""
    named = {"reward": reward, "terminated": terminated, "truncated": truncated}
    kept = {role: rows.kept(view, name) for role, name in named.items() if name is not None}
    columns = {role: rows.lookup(view, named[role] or "", found) for role, found in kept.items()}
    kept["step_type"] = rows.kept(view, STEP_TYPE)
    whole = {role: found for role, found in kept.items() if found is not None}
    return Lookups(
        lambda ids: rows.step_types(view, ids),
        view.running_lanes,
        **columns,
        kept=whole if len(whole) == len(kept) else None,
    )


@dataclass(frozen=True, slots=True)
class _WindowShape:
    """Rows that have a window."""

    window: Window
    rows: RowSet
    lookups: Lookups
    view: View
    native: NativeWindow | None

    def pick(self, ids: Array, most: int) -> tuple[Windows, Array]:
        if self.native is not None and self.lookups.kept is not None:
            return native_windows(self.native, ids, most, self.view, self.lookups.kept)
        windows, valid = resolve(ids, self.window, self.rows, self.lookups)
        keep = np.flatnonzero(valid)[:most]
        return select(windows, keep), keep

    def join(self, parts: list[Windows]) -> Windows:
        return join(parts)

    def no_such_row(self) -> str:
        return (
            f"has the window asked for (frame_stack={self.window.frame_stack}, "
            f"n_step={self.window.n_step}): its stack was evicted, or the observation "
            "after it is not stored yet"
        )


def expand(fields: Sequence[str], known: list[str]) -> set[str]:
    if isinstance(fields, str):
        raise SchemaError(fields, "must be in a list of names: fields=['obs', 'action']")
    wanted = set()
    for name in fields:
        parts = {k for k in known if k == name or k.startswith(f"{name}/")}
        if not parts:
            raise SchemaError(name, f"is not in the schema, which has {', '.join(known)}")
        wanted |= parts
    return wanted
