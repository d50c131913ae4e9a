"""Buffers as datasets of ``torch.utils.data``, for workers and for distributed training."""

from __future__ import annotations

import os
from collections.abc import Iterator, Sequence
from typing import Any

import numpy as np
import torch
from torch.utils.data import Dataset, IterableDataset, get_worker_info

import zbuffer

Array = np.ndarray[Any, Any]
Path = str | os.PathLike[str]
_SCAN = 1 << 16


class BufferStream(IterableDataset[Any]):
    """Batches of a buffer, made in the workers of a ``DataLoader``.

    Give it to ``DataLoader(stream, batch_size=None, num_workers=4)``: batches are whole
    already. Each worker opens the buffer itself, so all start methods work.

    Parameters
    ----------
    path
        Of the buffer, or several as for :func:`zbuffer.open_many`.
    batch_size, **options
        As for :meth:`zbuffer.Buffer.loader`, without ``device``, ``prefetch``, ``rank``
        and ``world_size``.
    rank, world_size
        Of this process; by default those of ``torch.distributed``, if it is set up.
    n_batches
        Batches of one iteration, of all workers together; by default endless, but with
        ``order="epoch"``.

    Notes
    -----
    ``"epoch"`` gives each worker of each rank disjoint rows that together are the epoch;
    the other orders give each random numbers of its own.
    """

    def __init__(
        self,
        path: Any,
        batch_size: int = 256,
        *,
        rank: int | None = None,
        world_size: int | None = None,
        n_batches: int | None = None,
        seed: int = 0,
        **options: Any,
    ) -> None:
        super().__init__()
        self._path = path
        self._batch_size = batch_size
        self._rank, self._world_size = _rank(rank, world_size)
        self._n_batches = n_batches
        self._seed = seed
        self._options = options
        self._epoch = 0

    def set_epoch(self, epoch: int) -> None:
        """Say which epoch the next iteration is, so that its order is another one.

        To be called before each iteration, as with ``DistributedSampler``.
        """
        self._epoch = int(epoch)

    def __iter__(self) -> Iterator[Any]:
        worker = get_worker_info()
        number, n_workers = (0, 1) if worker is None else (worker.id, worker.num_workers)
        n_batches = self._n_batches
        if n_batches is not None:
            n_batches = n_batches // n_workers + (number < n_batches % n_workers)
        opened: Any = (
            zbuffer.open(self._path)
            if isinstance(self._path, str | os.PathLike)
            else zbuffer.open_many(self._path)
        )
        with (
            opened as source,
            source.loader(
                self._batch_size,
                device="cpu",
                prefetch=0,
                # Another seed each epoch; the same for all workers, who share an epoch out.
                seed=self._seed + 1_000_003 * self._epoch,
                rank=self._rank * n_workers + number,
                world_size=self._world_size * n_workers,
                **self._options,
            ) as loader,
        ):
            for made, batch in enumerate(loader):
                if made == n_batches:
                    return
                yield dict(batch)


class BufferDataset(Dataset[Any]):
    """The steps of a buffer that have a window, by number.

    Which steps these are is looked up once, at construction: 8 bytes a step. Give it to
    ``DataLoader(dataset, batch_size=32, collate_fn=dataset.collate)``: a batch is
    gathered in one go.

    Parameters
    ----------
    path
        Of the buffer.
    **window
        ``frame_stack``, ``n_step``, ``gamma`` and ``fields`` of
        :meth:`zbuffer.Buffer.sample`.
    """

    def __init__(self, path: Path, **window: Any) -> None:
        self._path = os.fspath(path)
        self._window = window
        self._opened: tuple[int, zbuffer.Buffer] | None = None
        with zbuffer.open(path) as buffer:
            self._ids = _steps_with_window(buffer, window)

    def __len__(self) -> int:
        return len(self._ids)

    def __getitem__(self, index: int) -> dict[str, Any]:
        """Return one sample, tensors without a batch axis."""
        batch = self.__getitems__([index])
        return {name: value[0] for name, value in batch.items()}

    def __getitems__(self, indices: Sequence[int]) -> dict[str, Any]:
        """Return a whole batch of samples, tensors with a leading axis."""
        ids = self._ids[np.asarray(indices, np.int64)]
        batch = self._buffer().sample(len(ids), order=_These(ids), **self._window)
        if len(batch["indices"]) != len(ids):
            raise IndexError("rows of the dataset were evicted from the buffer")
        return {name: torch.from_numpy(np.ascontiguousarray(v)) for name, v in batch.items()}

    @staticmethod
    def collate(batch: Any) -> Any:
        """Return a batch of :meth:`__getitems__` as it is."""
        return batch

    def __getstate__(self) -> dict[str, Any]:
        return {**self.__dict__, "_opened": None}

    def _buffer(self) -> zbuffer.Buffer:
        """Return the buffer, opened by this process."""
        if self._opened is None or self._opened[0] != os.getpid():
            self._opened = (os.getpid(), zbuffer.open(self._path))
        return self._opened[1]


class _These:
    """Draws given rows, once."""

    replacement = False

    def __init__(self, ids: Array) -> None:
        self._ids = ids
        self._done = 0

    def draw(self, n: int, rows: zbuffer.RowSet, rng: np.random.Generator, /) -> zbuffer.Draw:
        """Return the next of them."""
        ids = self._ids[self._done : self._done + n]
        self._done += len(ids)
        return zbuffer.Draw(ids[rows.contains(ids)])

    def state_dict(self) -> dict[str, Any]:
        """Return where it stands."""
        return {"done": self._done}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Go back to where it stood."""
        self._done = state["done"]


class _All:
    """Draws every row there is, in their order."""

    replacement = False

    def __init__(self) -> None:
        self.position = 0

    def draw(self, n: int, rows: zbuffer.RowSet, rng: np.random.Generator, /) -> zbuffer.Draw:
        """Return the next rows."""
        stop = min(self.position + n, len(rows))
        ids = rows.ids(np.arange(self.position, stop))
        self.position = stop
        return zbuffer.Draw(ids)

    def state_dict(self) -> dict[str, Any]:
        """Return where it stands."""
        return {"position": self.position}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Go back to where it stood."""
        self.position = state["position"]


def _steps_with_window(buffer: zbuffer.Buffer, window: dict[str, Any]) -> Array:
    """Return the ids of the steps that can be sampled, in their order."""
    small = [name for name, field in buffer.schema.items() if field.nbytes <= 64]
    observations = set(buffer.schema.observations)
    names = [name for name in small if name not in observations][:1]
    wanted = {**window, "fields": names or None}
    with buffer.loader(_SCAN, order=_All(), prefetch=0, **wanted) as loader:
        parts = [batch["indices"] for batch in loader]
    return np.concatenate(parts) if parts else np.zeros(0, np.int64)


def _rank(rank: int | None, world_size: int | None) -> tuple[int, int]:
    if rank is not None or world_size is not None:
        return rank or 0, world_size or 1
    distributed = torch.distributed
    if distributed.is_available() and distributed.is_initialized():
        return distributed.get_rank(), distributed.get_world_size()
    return 0, 1
