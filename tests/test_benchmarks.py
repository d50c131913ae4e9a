"""Every benchmark runs at toy size, so that none of them rots."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

FOLDER = Path(__file__).parent.parent / "benchmarks"


@pytest.mark.parametrize("name", ["sample", "append", "million", "sampling"])
def test_a_benchmark_runs_at_toy_size(name: str) -> None:
    done = subprocess.run(
        [sys.executable, str(FOLDER / f"{name}.py"), "--toy"], capture_output=True, text=True
    )

    assert done.returncode == 0, done.stderr


@pytest.mark.parametrize("name", ["bytestream", "device"])
def test_a_benchmark_that_needs_torch_runs_at_toy_size(name: str) -> None:
    pytest.importorskip("torch")

    done = subprocess.run(
        [sys.executable, str(FOLDER / f"{name}.py"), "--toy"], capture_output=True, text=True
    )

    assert done.returncode == 0, done.stderr
