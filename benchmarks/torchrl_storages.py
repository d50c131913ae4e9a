"""What do TorchRL's storages need for the same batch? Only imported where TorchRL is there."""

from __future__ import annotations

import logging
from pathlib import Path
from typing import Any

import numpy as np
import torch
from buffers import BATCH, Windows
from tensordict import TensorDict
from torchrl.data import CompressedListStorage, LazyMemmapStorage, ReplayBuffer

SLAB_ROWS = 512
logging.getLogger("torchrl").setLevel(logging.WARNING)  # it logs to stdout, among the Markdown


class TorchRLBuffer:
    """One of TorchRL's storages, holding stacked obs and next_obs of the same frames."""

    def __init__(self, storage: Any) -> None:
        self._storage = storage
        self._buffer = ReplayBuffer(storage=storage, batch_size=BATCH)

    def fill(self, windows: Windows, fields: dict[str, np.ndarray], n_steps: int) -> None:
        """Store the first `n_steps` steps with their stacks."""
        for start in range(0, n_steps, SLAB_ROWS):
            steps = windows.steps[start : min(start + SLAB_ROWS, n_steps)]
            frames = np.take(windows.obs, windows.of(steps), axis=0)
            data = {name: torch.from_numpy(array[steps]) for name, array in fields.items()}
            data["obs"] = torch.from_numpy(np.ascontiguousarray(frames[:, :-1]))
            data["next_obs"] = torch.from_numpy(np.ascontiguousarray(frames[:, 1:]))
            self._buffer.extend(TensorDict(data, batch_size=[len(steps)]))

    def sample(self, _round: int) -> dict[str, torch.Tensor]:
        """Return one batch as dense tensors; a lazy stack is stacked only when asked for."""
        batch = self._buffer.sample()
        names = ("obs", "next_obs", "action", "reward", "terminated", "truncated")
        return {name: batch[name] for name in names}

    def nbytes_per_row(self) -> float:
        """Return the bytes that one step takes in the storage."""
        if isinstance(self._storage, CompressedListStorage):
            return float(self._storage.bytes()) / len(self._storage)
        row = self._storage[0]
        return float(sum(value.nbytes for value in row.values()))


def compressed_list(max_steps: int) -> TorchRLBuffer:
    """Return an empty buffer that compresses each tensor of each step by itself, in RAM."""
    return TorchRLBuffer(CompressedListStorage(max_steps))


def lazy_memmap(max_steps: int, folder: Path) -> TorchRLBuffer:
    """Return an empty buffer that keeps uncompressed memory maps in `folder`."""
    return TorchRLBuffer(LazyMemmapStorage(max_steps, scratch_dir=str(folder)))
