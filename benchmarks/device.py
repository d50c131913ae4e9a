"""Does the loader's CUDA path hand out right batches, and does it overlap with training?

Run it on a machine with a GPU; without one it runs the same checks on the CPU and says so.

    python benchmarks/device.py
    python benchmarks/device.py --toy
"""

from __future__ import annotations

import argparse
import tempfile
import time
from pathlib import Path
from typing import Any

import numpy as np
import torch
from frames import synthetic_frames
from measure import machine

import zbuffer

WINDOW: dict[str, Any] = {"batch_size": 256, "frame_stack": 4, "n_step": 1, "gamma": 0.99}


def make_buffer(path: Path, rows: int) -> zbuffer.Buffer:
    """Return a buffer of frames that compress like Atari's, open for reading."""
    frames = synthetic_frames(rows, 0)
    schema = {
        "obs": ((84, 84), "uint8"),
        "action": ((), "int64"),
        "reward": ((), "float32"),
        "terminated": ((), "bool"),
        "truncated": ((), "bool"),
    }
    with zbuffer.create(path, zbuffer.Schema(schema)) as buffer:
        buffer.extend(
            obs=frames.obs,
            action=frames.action,
            reward=frames.reward,
            terminated=frames.terminated,
            truncated=frames.truncated,
        )
    return zbuffer.open(path)


def check_batches(buffer: zbuffer.Buffer, device: torch.device, n_batches: int) -> None:
    """Compare batches with NumPy's of the same seed, while the training stream is kept busy."""
    busy = torch.ones(1024, 1024, device=device)
    with (
        buffer.loader(**WINDOW, device=None, prefetch=0, seed=1) as plain,
        buffer.loader(**WINDOW, device=device, prefetch=2, seed=1) as loader,
    ):
        held = []
        for _ in range(n_batches):
            expected, batch = next(plain), next(loader)
            for _ in range(20):
                busy = busy @ busy / 1024
            held.append((expected, batch))
            held = held[-4:]
            # Older batches too: a slot that was used again too early would show there.
            for want, got in held:
                for name, array in want.items():
                    assert got[name].device.type == device.type
                    assert np.array_equal(got[name].cpu().numpy(), array), name
    print(f"{n_batches} batches equal to NumPy's, the last four also when looked at again")


def network(device: torch.device) -> torch.nn.Module:
    """Return a network of the size that learns Atari."""
    return torch.nn.Sequential(
        torch.nn.Conv2d(4, 32, 8, 4),
        torch.nn.ReLU(),
        torch.nn.Conv2d(32, 64, 4, 2),
        torch.nn.ReLU(),
        torch.nn.Flatten(),
        torch.nn.Linear(64 * 81, 512),
        torch.nn.ReLU(),
        torch.nn.Linear(512, 6),
    ).to(device)


def time_training(
    buffer: zbuffer.Buffer, device: torch.device, n_steps: int, *, loaded: bool
) -> tuple[float, float]:
    """Return seconds per step, and the share waited; one batch for ever if not loaded."""
    net = network(device)
    optimizer = torch.optim.Adam(net.parameters())
    with buffer.loader(**WINDOW, device=device, prefetch=2, seed=2) as loader:
        batch = next(loader)
        waited_before = loader.statistics().wait_s
        synchronize(device)
        start = time.perf_counter()
        for _ in range(n_steps):
            if loaded:
                batch = next(loader)
            loss = net(batch["obs"].float() / 255).square().mean()
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
        synchronize(device)
        elapsed = time.perf_counter() - start
        waited = loader.statistics().wait_s - waited_before
    return elapsed / n_steps, waited / elapsed


def synchronize(device: torch.device) -> None:
    """Wait for the device, where there is one to wait for."""
    if device.type == "cuda":
        torch.cuda.synchronize(device)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rows", type=int, default=32_768)
    parser.add_argument("--toy", action="store_true", help="2,000 rows and a few steps")
    arguments = parser.parse_args()
    rows, n_batches, n_steps = (2_000, 5, 3) if arguments.toy else (arguments.rows, 200, 300)

    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    print(machine())
    print(
        f"device: {torch.cuda.get_device_name() if device.type == 'cuda' else 'CPU, no GPU here'}"
    )
    with tempfile.TemporaryDirectory() as folder:
        buffer = make_buffer(Path(folder) / "frames.zarr", rows)
        check_batches(buffer, device, n_batches)
        alone, _ = time_training(buffer, device, n_steps, loaded=False)
        loaded, waited = time_training(buffer, device, n_steps, loaded=True)
        buffer.close()
    print(f"a training step on one batch: {alone * 1e3:.2f} ms")
    print(
        f"with a new batch each step:   {loaded * 1e3:.2f} ms ({loaded / alone:.2f}x), "
        f"{waited:.0%} of it waited for batches"
    )


if __name__ == "__main__":
    main()
