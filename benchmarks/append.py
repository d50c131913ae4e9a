"""How many rows a second does a buffer take in, while it compresses and commits them?

Rows come one by one as transitions (`append`) and in slabs (`extend`), from one thread.
Beside them: how fast the encoder alone compresses the same frames on one core, which is
the limit where frames are hard and one core is left for it. Prints Markdown.

    python benchmarks/append.py --rows 32768 --runs 5
    python benchmarks/append.py --toy
"""

from __future__ import annotations

import argparse
import tempfile
import time
from collections.abc import Callable
from pathlib import Path

import numpy as np
from buffers import schema
from frames import GAMES, Frames, load, synthetic_frames
from measure import machine, table

import zbuffer
from zbuffer.format.geometry import Codec, choose_chunk_rows, resolve_codec
from zbuffer.reading.gather import native_module
from zbuffer.writing.encode import Encoder

SLAB_ROWS = 1000
HEADER = ("", "rows/s", "slowest run", "rows/s until closed")


def timed(folder: Path, cname: str, fill: Callable[[zbuffer.Buffer], None]) -> tuple[float, float]:
    """Return the seconds that `fill` took, and those until the buffer was closed as well."""
    with tempfile.TemporaryDirectory(dir=folder) as name:
        buffer = zbuffer.create(Path(name) / "buffer.zarr", schema(), cname=cname)
        start = time.perf_counter()
        fill(buffer)
        filled = time.perf_counter()
        buffer.close()
        return filled - start, time.perf_counter() - start


def appending(frames: Frames) -> Callable[[zbuffer.Buffer], None]:
    """Return a function that appends every step by itself, as a training loop does."""
    steps = frames.steps()

    def fill(buffer: zbuffer.Buffer) -> None:
        append = buffer.append
        for step in steps:
            append(**step)

    return fill


def extending(frames: Frames) -> Callable[[zbuffer.Buffer], None]:
    """Return a function that adds the steps in slabs."""
    slabs = list(frames.slabs(SLAB_ROWS))

    def fill(buffer: zbuffer.Buffer) -> None:
        for slab in slabs:
            buffer.extend(**slab)

    return fill


def encoding(frames: Frames, cname: str) -> Callable[[], float]:
    """Return a function that compresses the frames on this thread and says its rows/s."""
    field = schema()["obs"]
    chunk_rows = min(choose_chunk_rows(schema(), None), len(frames))
    encode = Encoder(field, resolve_codec(Codec(cname=cname), field, chunk_rows), native_module())
    starts = range(0, len(frames) - chunk_rows + 1, chunk_rows)

    def rate() -> float:
        start = time.perf_counter()
        for first in starts:
            encode(frames.obs[first : first + chunk_rows])
        return len(starts) * chunk_rows / (time.perf_counter() - start)

    return rate


def measure(frames: Frames, cname: str, runs: int) -> str:
    """Return the table of one game and one compressor; runs of the cases alternate."""
    fills = {
        "`append`, one row a call": appending(frames),
        f"`extend`, {SLAB_ROWS} rows a call": extending(frames),
    }
    encode = encoding(frames, cname)
    filled, encoded = np.empty((len(fills), runs, 2)), np.empty(runs)
    with tempfile.TemporaryDirectory(prefix="zbuffer-") as folder:
        for run in range(runs):
            for j, fill in enumerate(fills.values()):
                filled[j, run] = timed(Path(folder), cname, fill)
            encoded[run] = encode()
    lines = []
    for case, seconds in zip(fills, filled, strict=True):
        rates, closed = len(frames) / seconds.T
        lines.append((case, _rate(np.median(rates)), _rate(rates.min()), _rate(np.median(closed))))
    lines.append(("encoder alone, one core", _rate(np.median(encoded)), _rate(encoded.min()), ""))
    return table(HEADER, lines)


def _rate(rows_per_s: float) -> str:
    return f"{rows_per_s:,.0f}"


def arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--games", nargs="+", default=list(GAMES))
    parser.add_argument("--rows", type=int, default=32768)
    parser.add_argument("--runs", type=int, default=5)
    parser.add_argument("--cnames", nargs="+", default=["zstd", "lz4hc"])
    parser.add_argument("--cache", type=Path, default=None, help="folder of the recordings")
    parser.add_argument("--toy", action="store_true", help="2,000 made-up rows, two runs")
    args = parser.parse_args()
    if args.toy:
        args.games, args.rows, args.runs = ["synthetic"], 2000, 2
    return args


def main() -> None:
    args = arguments()
    print(f"{machine()}\n")
    print(f"{args.rows} rows, sealing on, median of {args.runs} runs:\n")
    for game in args.games:
        toy = game == "synthetic"
        frames = synthetic_frames(args.rows) if toy else load(game, args.rows, args.cache)
        for cname in args.cnames:
            print(f"### {game}, {cname}\n\n{measure(frames, cname, args.runs)}\n")


if __name__ == "__main__":
    main()
