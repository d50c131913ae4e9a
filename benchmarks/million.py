"""Does a buffer of one million rows behave like a small one?

Frames are repeated to reach a million rows. Measured: opening it in a fresh process, a
batch beside one of a small buffer in the same rounds, the memory of a process that
samples it, and the cost of its last rows beside that of the first rows of a new buffer.
Prints Markdown.

    python benchmarks/million.py
    python benchmarks/million.py --toy
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
import tempfile
import time
from pathlib import Path

import numpy as np
from buffers import BATCH, STACK, schema, write
from frames import Frames, load, synthetic_frames
from measure import interleave, machine, table

import zbuffer

OPEN_SCRIPT = """
import json, sys, time
import zbuffer
start = time.perf_counter()
buffer = zbuffer.open(sys.argv[1])
seconds = time.perf_counter() - start
print(json.dumps({"seconds": seconds, "rows": len(buffer)}))
"""
MEMORY_SCRIPT = """
import json, resource, sys
import zbuffer
buffer = zbuffer.open(sys.argv[1])
for seed in range(int(sys.argv[2])):
    buffer.sample(int(sys.argv[3]), frame_stack=int(sys.argv[4]), seed=seed)
try:
    with open("/proc/self/status") as status:
        kib = {k: int(v.split()[0]) for k, v in (l.split(":", 1) for l in status)
               if k in ("VmHWM", "RssAnon", "RssFile", "RssShmem")}
except FileNotFoundError:
    unit = 1 if sys.platform == "darwin" else 1024
    kib = {"VmHWM": resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * unit // 1024}
print(json.dumps(kib))
"""


def fill(path: Path, frames: Frames, rows: int, n_last: int) -> np.ndarray:
    """Write `rows` rows to `path`; return the seconds of the last and the first `n_last`.

    The last rows go in by `append`, in three parts; each is timed until it is flushed, and
    alternates with the same rows going into a new buffer. Float64 (3, 2).
    """
    n_repeated = rows - 3 * n_last
    last = frames.head(n_last)
    seconds = np.empty((3, 2))
    with zbuffer.create(path, schema()) as buffer:
        while (missing := n_repeated - len(buffer)) > 0:
            for slab in frames.head(missing).slabs(1000):
                buffer.extend(**slab)
            _progress(len(buffer), rows)
        buffer.flush()
        for part in range(3):
            seconds[part, 0] = append(buffer, last)
            with zbuffer.create(path.with_name(f"new-{part}.zarr"), schema()) as new:
                seconds[part, 1] = append(new, last)
    return seconds


def append(buffer: zbuffer.Buffer, frames: Frames) -> float:
    """Return the seconds to append all steps one by one and flush them."""
    steps = frames.steps()
    start = time.perf_counter()
    for step in steps:
        buffer.append(**step)
    buffer.flush()
    return time.perf_counter() - start


def _progress(done: int, rows: int) -> None:
    print(f"\rwriting: {done:,} of {rows:,} rows", end="", file=sys.stderr, flush=True)


def child(script: str, *arguments: object) -> dict[str, float]:
    """Run a script in a fresh process and return the JSON that it prints."""
    command = [sys.executable, "-c", script, *map(str, arguments)]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    if done.returncode != 0:
        raise RuntimeError(f"the child process failed:\n{done.stderr}")
    result: dict[str, float] = json.loads(done.stdout)
    return result


def opening_ms(path: Path, processes: int) -> tuple[float, int]:
    """Return the median time of `open` over fresh processes, and the rows it found."""
    found = [child(OPEN_SCRIPT, path) for _ in range(processes)]
    return float(np.median([f["seconds"] for f in found])) * 1e3, int(found[0]["rows"])


def measure(frames: Frames, args: argparse.Namespace) -> str:
    """Return the table."""
    with tempfile.TemporaryDirectory(prefix="zbuffer-") as name:
        large, small = Path(name) / "large.zarr", Path(name) / "small.zarr"
        start = time.perf_counter()
        appended = fill(large, frames, args.rows, args.last)
        filling = time.perf_counter() - start
        write(small, frames.head(args.small))
        print(file=sys.stderr)
        open_ms, rows = opening_ms(large, args.processes)
        open_small_ms, small_rows = opening_ms(small, args.processes)
        with zbuffer.open(large) as a, zbuffer.open(small) as b:
            nbytes = a.nbytes_stored()
            timings = interleave(
                {
                    "large": lambda i: a.sample(BATCH, frame_stack=STACK, seed=i),
                    "small": lambda i: b.sample(BATCH, frame_stack=STACK, seed=i),
                },
                args.rounds,
            )
        memory = child(MEMORY_SCRIPT, large, args.batches, BATCH, STACK)
        idle = child(MEMORY_SCRIPT, large, 0, BATCH, STACK)
    batch, small_batch = timings["large"].median_ms, timings["small"].median_ms
    last, first = np.median(appended, axis=0) / args.last * 1e6
    lines = [
        (
            "`open` in a fresh process, ms",
            f"{open_ms:.1f}",
            f"{open_small_ms:.1f}",
            f"{open_ms / open_small_ms:.2f}",
        ),
        (
            "one batch, median ms",
            f"{batch:.2f}",
            f"{small_batch:.2f}",
            f"{batch / small_batch:.2f}",
        ),
        (
            f"`append` of {args.last:,} rows and flush, us a row",
            f"{last:.1f}",
            f"{first:.1f} (first rows of a new one)",
            f"{last / first:.2f}",
        ),
    ]
    peak = memory["VmHWM"] / 1024
    parts = ", ".join(f"{k} {v / 1024:.0f} MiB" for k, v in memory.items() if k != "VmHWM")
    return "\n".join(
        [
            table(("", f"{rows:,} rows", f"{small_rows:,} rows", "ratio"), lines),
            "",
            f"A process that opens the large buffer and samples {args.batches} batches peaks at "
            f"{peak:.0f} MiB ({parts}); one that only opens it, at {idle['VmHWM'] / 1024:.0f} MiB.",
            f"On disk: {nbytes / 1e6:.1f} MB, {nbytes / rows:.1f} bytes a row; "
            f"written in {filling:.0f} s.",
        ]
    )


def arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--game", default="Breakout")
    parser.add_argument("--rows", type=int, default=1_000_000)
    parser.add_argument("--small", type=int, default=30_000, help="rows of the small buffer")
    parser.add_argument("--last", type=int, default=10_000, help="rows whose cost is compared")
    parser.add_argument("--rounds", type=int, default=60)
    parser.add_argument("--batches", type=int, default=500, help="batches before memory is read")
    parser.add_argument("--processes", type=int, default=5, help="fresh processes that open it")
    parser.add_argument("--cache", type=Path, default=None, help="folder of the recordings")
    parser.add_argument("--toy", action="store_true", help="6,000 made-up rows, few rounds")
    args = parser.parse_args()
    if args.toy:
        args.game, args.rows, args.small, args.last = "synthetic", 6000, 1000, 500
        args.rounds, args.batches, args.processes = 5, 5, 1
    return args


def main() -> None:
    args = arguments()
    toy = args.game == "synthetic"
    frames = synthetic_frames(2000) if toy else load(args.game, 32768, args.cache)
    print(f"{machine()}\n\n{args.game}, its {len(frames)} frames repeated:\n")
    print(measure(frames, args))


if __name__ == "__main__":
    main()
