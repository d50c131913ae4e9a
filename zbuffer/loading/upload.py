"""Batches to the device: tensors on the CPU, or pinned slots and a side stream."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Protocol

import numpy as np

from zbuffer.errors import SchemaError
from zbuffer.loading.batch import Assembled, Batch
from zbuffer.loading.memory import Recycler

Array = np.ndarray[Any, Any]
Transform = Callable[[Batch], Any]


@dataclass(frozen=True, slots=True)
class Ready:
    """A batch on its way, and what the training thread does before it uses it."""

    batch: Any
    receive: Callable[[], None] = lambda: None


class Uploader(Protocol):
    """Where a batch is assembled, and how it gets to where it is wanted.

    Notes
    -----
    :meth:`allocate` and :meth:`upload` are called by one thread, in turn;
    :meth:`Ready.receive` by the thread that trains.
    """

    def begin(self) -> None:
        """Get ready to assemble one batch."""
        ...

    def allocate(self, name: str, shape: tuple[int, ...], dtype: np.dtype[Any]) -> Array:
        """Return memory to decode into."""
        ...

    def upload(self, assembled: Assembled, transform: Transform | None) -> Ready:
        """Send an assembled batch off."""
        ...


class HostUploader:
    """Batches stay in host memory, as NumPy arrays or as CPU tensors over them."""

    def __init__(self, memory: Recycler, *, tensors: bool) -> None:
        self._memory = memory
        self._tensors = tensors

    def begin(self) -> None:
        """Do nothing: every batch has memory of its own."""

    def allocate(self, name: str, shape: tuple[int, ...], dtype: np.dtype[Any]) -> Array:
        """Return memory that nobody else holds."""
        return self._memory.allocate(name, shape, dtype)

    def upload(self, assembled: Assembled, transform: Transform | None) -> Ready:
        """Wrap the arrays."""
        arrays: dict[str, Any] = assembled.arrays
        if self._tensors:
            arrays = {name: as_tensor(name, array) for name, array in arrays.items()}
        batch = assembled.batch(arrays)
        return Ready(batch if transform is None else transform(batch))


class CudaUploader:
    """Decode into pinned memory, copy on a side stream, never wait on the training stream.

    Parameters
    ----------
    device
        A CUDA ``torch.device``.
    n_slots
        Sets of pinned memory that take turns. A slot is used again only after
        the event behind its copies has passed.
    """

    def __init__(self, device: Any, n_slots: int) -> None:
        import torch

        self._torch = torch
        self._device = torch.device(device)
        self._stream = torch.cuda.Stream(self._device)
        self._slots = [_PinnedSlot(torch) for _ in range(n_slots)]
        self._turn = -1

    def begin(self) -> None:
        """Go on to the next slot, once its last copies are done."""
        self._turn = (self._turn + 1) % len(self._slots)
        self._slots[self._turn].wait()

    def allocate(self, name: str, shape: tuple[int, ...], dtype: np.dtype[Any]) -> Array:
        """Return pinned memory of the slot."""
        return self._slots[self._turn].allocate(name, shape, dtype)

    def upload(self, assembled: Assembled, transform: Transform | None) -> Ready:
        """Start the copies."""
        torch, slot = self._torch, self._slots[self._turn]
        with torch.cuda.device(self._device), torch.cuda.stream(self._stream):
            tensors = {}
            for name, array in assembled.arrays.items():
                pinned = slot.pinned(name, array)
                # Allocated on the side stream; the training stream is told in receive().
                tensors[name] = torch.empty_like(pinned, device=self._device)
                tensors[name].copy_(pinned, non_blocking=True)
            slot.mark(self._stream)
            batch = assembled.batch(tensors)
            result = batch if transform is None else transform(batch)
            done = torch.cuda.Event()
            done.record(self._stream)

        def receive() -> None:
            current = torch.cuda.current_stream(self._device)
            current.wait_event(done)
            # The memory may be handed out again only when the training stream is
            # past its use, not when the side stream is.
            for tensor in _tensors(result, torch) + list(tensors.values()):
                if tensor.is_cuda:
                    tensor.record_stream(current)

        return Ready(result, receive)


class _PinnedSlot:
    """One set of pinned arrays, by name, made at first use and kept."""

    def __init__(self, torch: Any) -> None:
        self._torch = torch
        self._bytes: dict[str, Any] = {}
        self._given: dict[str, tuple[Array, Any]] = {}
        self._event: Any = None

    def wait(self) -> None:
        """Wait for the copies out of this slot; on the prefetch thread only."""
        if self._event is not None:
            self._event.synchronize()
        self._given.clear()

    def mark(self, stream: Any) -> None:
        """Note that the copies so far end here."""
        self._event = self._torch.cuda.Event()
        self._event.record(stream)

    def allocate(self, name: str, shape: tuple[int, ...], dtype: np.dtype[Any]) -> Array:
        """Return an array over pinned bytes."""
        nbytes = int(np.prod(shape, dtype=np.int64)) * dtype.itemsize
        held = self._bytes.get(name)
        if held is None or held.numel() < nbytes:
            held = self._torch.empty(max(nbytes, 1), dtype=self._torch.uint8, pin_memory=True)
            self._bytes[name] = held
        array: Array = held[:nbytes].numpy().view(dtype).reshape(shape)
        self._given[name] = (array, as_tensor(name, array))
        return array

    def pinned(self, name: str, array: Array) -> Any:
        """Return the tensor of an array of this slot; other arrays are copied into it."""
        given = self._given.get(name)
        if given is None or given[0] is not array:
            target = self.allocate(name, array.shape, array.dtype)
            target[...] = array
            given = self._given[name]
        return given[1]


def make_uploader(device: Any, n_slots: int, memory: Recycler) -> Uploader:
    """Return the uploader for ``device=None`` (NumPy), ``"cpu"`` or a CUDA device."""
    if device is None:
        return HostUploader(memory, tensors=False)
    import torch

    device = torch.device(device)
    if device.type == "cpu":
        return HostUploader(memory, tensors=True)
    if device.type != "cuda":
        raise ValueError(f"device must be None, 'cpu' or 'cuda', got {str(device)!r}")
    if not torch.cuda.is_available():
        raise ValueError("device='cuda' but this PyTorch sees no CUDA device")
    return CudaUploader(device, n_slots)


def as_tensor(name: str, array: Array) -> Any:
    """Return a CPU tensor over the array's memory."""
    import torch

    try:
        return torch.from_numpy(array)
    except TypeError:
        raise SchemaError(
            name, f"has the dtype {array.dtype}, which torch has not; use device=None or fields="
        ) from None


def _tensors(value: Any, torch: Any) -> list[Any]:
    if isinstance(value, torch.Tensor):
        return [value]
    if isinstance(value, dict):
        value = list(value.values())
    if isinstance(value, list | tuple):
        return [tensor for item in value for tensor in _tensors(item, torch)]
    return []
