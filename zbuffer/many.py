"""Many buffers as one: offline data beside a live run, or the buffers of many writers."""

from __future__ import annotations

import glob
import os
from collections.abc import Mapping, Sequence
from types import TracebackType
from typing import Any, Self

import numpy as np

from zbuffer.buffer import Buffer
from zbuffer.errors import BufferNotFoundError, ClosedError, SampleError, SchemaError
from zbuffer.loading.batch import Assembled
from zbuffer.loading.maker import BatchMaker
from zbuffer.loading.mixture import MixtureMaker
from zbuffer.loading.upload import Transform, Uploader
from zbuffer.opening import open
from zbuffer.sampling.rowset import RowSet
from zbuffer.schema import Schema
from zbuffer.source import BatchSource, Request

Path = str | os.PathLike[str]


def open_many(
    paths: Mapping[Any, float] | Sequence[Any] | Path, *, threads: int | None = None
) -> BufferGroup:
    """Open several buffers as one, for reading.

    Parameters
    ----------
    paths
        A mapping of path to weight: how likely a row of a batch comes from there,
        against the others. Or a list of paths, or a pattern such as
        ``"runs/actor-*"``: then all rows are equally likely. In place of a path there
        may be an open :class:`zbuffer.Buffer`; it stays open when the group is closed.
    threads
        As in :func:`zbuffer.open`.

    Raises
    ------
    BufferNotFoundError
        There is nothing at a path, or the pattern fits no buffer.
    ValueError
        A weight is negative or not finite, or all are zero.
    """
    return BufferGroup(paths, threads)


class BufferGroup(BatchSource):
    """Several buffers, sampled as one; make it with :func:`open_many`.

    Batches have ``source`` (int64), the number of the buffer that each row is of; row
    ids (``indices``) are those of that buffer. The buffers may grow meanwhile, and may
    differ in capacity, lanes and chunks; the fields that are sampled must agree.

    Notes
    -----
    Any thread may call the methods.
    """

    def __init__(self, paths: Any, threads: int | None) -> None:
        super().__init__()
        self._threads = threads
        self._pattern: str | None = None
        self._closed = False
        self._given: list[Buffer] = []
        self._members: dict[str, Buffer] = {}
        weights: dict[str, float] | None = None
        if isinstance(paths, str | os.PathLike):
            self._pattern = os.path.expanduser(os.fspath(paths))
            paths = self._matches()
            if not paths:
                raise BufferNotFoundError(f"no buffer fits {self._pattern}")
        try:
            for path in paths:
                self._add(path)
        except BaseException:
            self.close()
            raise
        if isinstance(paths, Mapping):
            weights = dict(zip(self._members, map(float, paths.values()), strict=True))
        if not self._members:
            raise ValueError("open_many() needs at least one path")
        self._weights = weights
        if weights is not None:
            self.set_weights(weights)

    @property
    def buffers(self) -> list[Buffer]:
        """The buffers, by their number (``source``)."""
        return list(self._members.values())

    @property
    def paths(self) -> list[str]:
        """Where they lie, by their number."""
        return list(self._members)

    @property
    def weights(self) -> dict[str, float] | None:
        """How likely each is, by path; None where all rows are equally likely."""
        if self._weights is None:
            return None
        return {path: self._weights.get(path, 0.0) for path in self._members}

    def set_weights(self, weights: Mapping[Any, float] | None) -> None:
        """Change how likely each buffer is, from the next batch that is made on.

        Parameters
        ----------
        weights
            By path, all of them; None makes all rows equally likely.

        Raises
        ------
        ValueError
            A path is missing or unknown, a weight is negative or not finite, or all are
            zero. Nothing has changed.
        """
        if weights is None:
            self._weights = None
            return
        named = {_name(path): float(weight) for path, weight in weights.items()}
        for name in named.keys() ^ self._members.keys():
            which = "is not of this group" if name in named else "has no weight"
            raise ValueError(f"{name} {which}")
        for name, weight in named.items():
            if not np.isfinite(weight) or weight < 0:
                raise ValueError(f"the weight of {name} must be 0 or more, got {weight}")
        if not any(named.values()):
            raise ValueError("at least one weight must be above 0")
        self._weights = {name: named[name] for name in self._members}

    def refresh(self) -> int:
        """Look for new buffers that fit the pattern; returns how many were found.

        Where the buffers have weights, new ones have the weight 0 until they are given one.
        """
        self._check_open()
        if self._pattern is None:
            return 0
        new = [path for path in self._matches() if _name(path) not in self._members]
        for path in new:
            self._add(path)
        return len(new)

    def update_priorities(self, indices: Any, priorities: Any, source: Any) -> int:
        """Set priorities of rows; returns how many were ignored.

        Parameters
        ----------
        indices, priorities
            As in :meth:`zbuffer.Buffer.update_priorities`.
        source
            The number of each row's buffer: the ``source`` of a batch.
        """
        self._check_open()
        indices, priorities, source = (np.asarray(a) for a in (indices, priorities, source))
        if not indices.shape == priorities.shape == source.shape:
            raise SampleError(
                f"indices {indices.shape}, priorities {priorities.shape} and source "
                f"{source.shape} must be of one shape"
            )
        buffers = self.buffers
        if len(source) and not 0 <= source.min() <= source.max() < len(buffers):
            raise SampleError(f"source must be 0 to {len(buffers) - 1}")
        parts = [(buffers[n], source == n) for n in sorted(set(source.tolist()))]
        # All of them first: one that is refused must leave no buffer changed.
        for buffer, of in parts:
            buffer._priorities.check(indices[of], priorities[of])
        return sum(b.update_priorities(indices[of], priorities[of]) for b, of in parts)

    def __len__(self) -> int:
        """Return the number of steps of all buffers."""
        return sum(len(buffer) for buffer in self.buffers)

    def close(self) -> None:
        """Close the buffers that the group has opened; calling it again does nothing."""
        if self._closed:
            return
        self._closed = True
        self._close_loaders()
        for buffer in self.buffers:
            if not any(buffer is given for given in self._given):
                buffer.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self.close()

    def __repr__(self) -> str:
        state = " (closed)" if self._closed else ""
        return f"<zbuffer.BufferGroup of {len(self._members)} buffers{state}>"

    # -- inside ------------------------------------------------------------------

    def _add(self, path: Any) -> None:
        buffer = path
        if isinstance(path, Buffer):
            self._given.append(path)
        else:
            buffer = open(path, threads=self._threads)
        if buffer.path in self._members:
            raise ValueError(f"{buffer.path} is named twice")
        self._members[buffer.path] = buffer

    def _matches(self) -> list[str]:
        assert self._pattern is not None
        found = sorted(glob.glob(self._pattern))
        return [path for path in found if os.path.exists(os.path.join(path, "zarr.json"))]

    def _shares(self, n: int) -> np.ndarray[Any, Any]:
        """Return the probabilities of the first `n` buffers; more may come meanwhile."""
        buffers, weights = self.buffers[:n], self._weights
        rows = [rows for buffer in buffers for rows in buffer._row_sets()]
        shares = counts = np.array([len(r) for r in rows], np.float64)
        if weights is not None:
            # A buffer without rows has no share in a batch, whatever its weight.
            shares = np.array([weights.get(b.path, 0.0) for b in buffers]) * (counts > 0)
        total = shares.sum()
        return shares / total if total else shares

    def _check_open(self) -> None:
        if self._closed:
            raise ClosedError("the group of buffers is closed")

    def _make_maker(
        self, request: Request, uploader: Uploader, transform: Transform | None
    ) -> MixtureMaker:
        if request.order == "epoch":
            raise ValueError("order='epoch' is of one buffer: a group has no epochs")
        if not getattr(request.order, "replacement", True) or hasattr(request.order, "state_dict"):
            raise ValueError("a sampler that keeps a state is of one buffer, not of a group")
        self._check_fields(request.fields)
        makers: list[BatchMaker] = []

        def members() -> list[BatchMaker]:
            buffers = self.buffers
            while len(makers) < len(buffers):
                self._check_fields(request.fields)
                makers.append(buffers[len(makers)]._make_maker(request, uploader, None))
            return makers

        members()
        return MixtureMaker(members, self._shares, uploader, transform)

    def _check_fields(self, fields: Sequence[str] | None) -> None:
        first, *others = self.buffers
        for other in others:
            _check_alike(first, other, fields)

    def _draw_episodes(
        self, n: int, fields: Sequence[str] | None, rng: np.random.Generator
    ) -> Assembled:
        raise SampleError("sample_episodes() is of one buffer: ask one of .buffers")

    def _row_sets(self) -> list[RowSet]:
        return [rows for buffer in self.buffers for rows in buffer._row_sets()]

    def _n_appended(self) -> int:
        return sum(buffer._n_appended() for buffer in self.buffers)


def _name(path: Any) -> str:
    if isinstance(path, Buffer):
        return str(path.path)
    return str(os.path.abspath(os.path.expanduser(os.fspath(path))))


def _check_alike(first: Buffer, other: Buffer, fields: Sequence[str] | None) -> None:
    """Refuse buffers that differ in a field that is sampled."""
    a, b = first.schema, other.schema
    wanted = _sampled(a, fields) | _sampled(b, fields)
    for name in sorted(wanted):
        here, there = (str(s[name]) if name in s else "nothing" for s in (a, b))
        if here != there:
            raise SchemaError(
                name,
                f"is {here} in {first.path} and {there} in {other.path}: "
                "name the fields that agree with fields=",
            )
        if a[name].role != b[name].role:
            raise SchemaError(
                name,
                f"is the {a[name].role} in {first.path} and the {b[name].role} in {other.path}",
            )
    if a.explicit != b.explicit:
        raise SchemaError("next_obs", "is explicit in one buffer and chained in another")


def _sampled(schema: Schema, fields: Sequence[str] | None) -> set[str]:
    if fields is None:
        return set(schema)
    names = set()
    for name in fields:
        for known in schema:
            if name in (known, f"next_{known}") or f"{known}/".startswith(
                (f"{name}/", f"{name.removeprefix('next_')}/")
            ):
                names.add(known)
    return names
