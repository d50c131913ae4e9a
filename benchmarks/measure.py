"""How do the benchmarks time things, and how do they say on what?"""

from __future__ import annotations

import os
import platform
import subprocess
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path

import numpy as np


@dataclass(frozen=True, slots=True)
class Timing:
    """How long each round of one case took."""

    seconds: np.ndarray

    @property
    def median_ms(self) -> float:
        return float(np.median(self.seconds)) * 1e3

    @property
    def min_ms(self) -> float:
        return float(np.min(self.seconds)) * 1e3


def interleave(cases: Mapping[str, Callable[[int], object]], rounds: int) -> dict[str, Timing]:
    """Time every case once a round, in an order that changes from round to round.

    A case is called with the number of the round. Slow spells of the machine then
    fall on all cases alike, and no case always follows the same other one.
    """
    rng = np.random.default_rng(0)
    names = list(cases)
    seconds = np.empty((len(names), rounds))
    for case in cases.values():
        case(0)
    for i in range(rounds):
        for j in rng.permutation(len(names)):
            start = time.perf_counter()
            result = cases[names[j]](i)
            seconds[j, i] = time.perf_counter() - start
            del result  # freed outside the time of the next case
    return {name: Timing(seconds[j]) for j, name in enumerate(names)}


def cores() -> int:
    """Return how many cores this process may use."""
    if hasattr(os, "sched_getaffinity"):
        return len(os.sched_getaffinity(0))
    return os.cpu_count() or 1


def machine() -> str:
    """Return the processor, the cores, the system and the versions, in one line."""
    packages = ("numpy", "blosc2", "zarr", "torch", "torchrl")
    versions = [f"{name} {found}" for name in packages if (found := _version(name))]
    python = f"Python {platform.python_version()}"
    system = f"{platform.system()} {platform.machine()}"
    return ", ".join([_processor(), f"{cores()} cores", system, python, *versions])


def _version(package: str) -> str | None:
    try:
        return version(package)
    except PackageNotFoundError:
        return None


def _processor() -> str:
    cpuinfo = Path("/proc/cpuinfo")
    if cpuinfo.exists():
        for line in cpuinfo.read_text().splitlines():
            if line.startswith("model name"):
                return line.split(":", 1)[1].strip()
    if sys.platform == "darwin":
        command = ["sysctl", "-n", "machdep.cpu.brand_string"]
        return subprocess.run(command, capture_output=True, text=True, check=True).stdout.strip()
    return platform.processor() or "unknown processor"


def table(header: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    """Return a Markdown table: the first column to the left, the others to the right."""
    widths = [max(len(cell) for cell in column) for column in zip(header, *rows, strict=True)]
    dashes = ["-" * widths[0], *("-" * (width - 1) + ":" for width in widths[1:])]
    lines = []
    for cells in (header, dashes, *rows):
        padded = [cells[0].ljust(widths[0])]
        padded += [cell.rjust(width) for cell, width in zip(cells[1:], widths[1:], strict=True)]
        lines.append("| " + " | ".join(padded) + " |")
    return "\n".join(lines)
