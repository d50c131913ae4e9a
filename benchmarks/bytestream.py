"""What does it cost to hand one tensor over for storage?

Repeats the measurement in TorchRL's pull request #3062 (a CPU tensor turned into bytes by
five methods) and sets beside it what one tensor field costs in `append`: the difference
between a buffer with two such fields and one with one. Prints Markdown.

    python benchmarks/bytestream.py
    python benchmarks/bytestream.py --toy
"""

from __future__ import annotations

import argparse
import io
import pickle
import tempfile
import time
from collections.abc import Callable
from contextlib import ExitStack
from pathlib import Path

import numpy as np
import torch
from frames import SIZE, Frames, load, synthetic_frames
from measure import machine, table

import zbuffer

# The pull request's figures for (1, 4, 84, 84) uint8, on its author's machine.
PUBLISHED_US = {
    "numpy": 1.19,
    "safetensors": 11.7,
    "pickle": 17.5,
    "torch.save": 29.3,
    "untyped_storage": 37_213.0,
}
METHODS: dict[str, Callable[[torch.Tensor], bytes]] = {
    "numpy": lambda tensor: tensor.numpy().tobytes(),
    "pickle": pickle.dumps,
    "torch.save": lambda tensor: _torch_save(tensor),
    "untyped_storage": lambda tensor: bytes(tensor.untyped_storage()),
}


def _torch_save(tensor: torch.Tensor) -> bytes:
    file = io.BytesIO()
    torch.save(tensor, file)
    return file.getvalue()


def methods() -> dict[str, Callable[[torch.Tensor], bytes]]:
    """Return the methods, with safetensors where it is installed."""
    try:
        from safetensors.torch import save
    except ImportError:
        return METHODS
    return {**METHODS, "safetensors": lambda tensor: save({"0": tensor})}


def median_us(function: Callable[[torch.Tensor], object], tensors: list[torch.Tensor]) -> float:
    """Return the median time of one call, over calls with tensor after tensor."""
    function(tensors[0])
    seconds = np.empty(len(tensors))
    for i, tensor in enumerate(tensors):
        start = time.perf_counter()
        function(tensor)
        seconds[i] = time.perf_counter() - start
    return float(np.median(seconds)) * 1e6


def appending(folder: Path, tensors: list[torch.Tensor]) -> tuple[float, float]:
    """Return the median us of an append of one tensor field, and of two, call by call."""
    field = zbuffer.Field(tuple(tensors[0].shape), "uint8")
    schemas = [zbuffer.Schema({"obs": field}), zbuffer.Schema({"obs": field, "other": field})]
    seconds = np.empty((2, len(tensors)))
    with ExitStack() as stack:
        one, two = (
            stack.enter_context(zbuffer.create(folder / f"{len(schema)}.zarr", schema))
            for schema in schemas
        )
        for i, tensor in enumerate(tensors):
            start = time.perf_counter()
            one.append(obs=tensor)
            middle = time.perf_counter()
            two.append(obs=tensor, other=tensor)
            seconds[:, i] = middle - start, time.perf_counter() - middle
    low, high = np.median(seconds, axis=1) * 1e6
    return float(low), float(high)


def tensors_of(frames: Frames, shape: tuple[int, ...]) -> list[torch.Tensor]:
    """Cut the frames into tensors of `shape`, each with memory of its own."""
    n_frames = int(np.prod(shape)) // (SIZE * SIZE)
    count = len(frames) // n_frames
    cut = frames.obs[: count * n_frames].reshape(count, *shape)
    return [torch.from_numpy(item.copy()) for item in cut]


def measure(frames: Frames, shape: tuple[int, ...], slow_calls: int) -> str:
    """Return the table for tensors of one shape."""
    tensors = tensors_of(frames, shape)
    lines = []
    for name, method in sorted(methods().items(), key=lambda item: PUBLISHED_US[item[0]]):
        some = tensors[:slow_calls] if name == "untyped_storage" else tensors
        us = median_us(method, some)
        published = f"{PUBLISHED_US[name]:,.2f}" if shape == (1, 4, SIZE, SIZE) else ""
        lines.append((f"to bytes: {name}", f"{us:,.2f}", published))
    with tempfile.TemporaryDirectory(prefix="zbuffer-") as name:
        one, two = appending(Path(name), tensors)
    lines.append(("zbuffer: one more field in `append`", f"{two - one:,.2f}", ""))
    lines.append(("zbuffer: whole `append` of one field", f"{one:,.2f}", ""))
    return table(("", "median us", "published us"), lines)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--game", default="Breakout")
    parser.add_argument("--rows", type=int, default=32768)
    parser.add_argument("--cache", type=Path, default=None, help="folder of the recordings")
    parser.add_argument("--toy", action="store_true", help="2,000 made-up frames")
    args = parser.parse_args()
    frames = synthetic_frames(2000) if args.toy else load(args.game, args.rows, args.cache)
    print(f"{machine()}\n")
    for shape in ((1, 4, SIZE, SIZE), (SIZE, SIZE)):
        print(f"### uint8 {shape}\n\n{measure(frames, shape, 3 if args.toy else 20)}\n")


if __name__ == "__main__":
    main()
