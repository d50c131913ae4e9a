"""How fast is a batch of frame stacks, and how many bytes does a row take on disk?

Everything is timed in the same rounds of one run: zbuffer with zstd and lz4hc, with the
native extension and without, `numpy.take` of the same frames from RAM, and TorchRL.
Prints Markdown.

    python benchmarks/sample.py --rows 32768 --rounds 60
    python benchmarks/sample.py --toy
"""

from __future__ import annotations

import argparse
import tempfile
from collections.abc import Callable
from contextlib import ExitStack
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path

import numpy as np
from buffers import BATCH, ROW_NBYTES, STACK, Windows, write
from decode_limit import BlockDecoder, library
from frames import GAMES, Frames, load, synthetic_frames
from measure import Timing, cores, interleave, machine, table

import zbuffer
from zbuffer.reading.gather import Backend, native_module

TAKE = "numpy.take, uncompressed in RAM"
DEFAULT = "zbuffer zstd"
CODECS = ("zstd", "lz4hc")
SMALL_FIELDS = ("action", "reward", "terminated", "truncated")
HEADER = ("", "median ms", "min ms", "x take", "x zstd", "bytes a row", "times smaller")

Case = Callable[[int], object]


@dataclass
class Run:
    """What is timed for one game: the cases by name, and the bytes a row of some of them."""

    cases: dict[str, Case] = field(default_factory=dict)
    nbytes: dict[str, float] = field(default_factory=dict)
    overheads: dict[str, str] = field(default_factory=dict)  # limit -> the case to subtract
    notes: list[str] = field(default_factory=list)


def sample(buffer: zbuffer.Buffer, seed: int) -> zbuffer.Batch:
    """Draw the batch that everything here is about."""
    return buffer.sample(BATCH, frame_stack=STACK, seed=seed)


def add_zbuffer(run: Run, stack: ExitStack, path: Path, threads: int) -> list[zbuffer.Buffer]:
    """Add the buffer at `path`: as it opens, on one thread, and without the extension."""
    name = f"zbuffer {path.stem}"
    variants: dict[str, tuple[Backend, int]] = {
        name: ("auto", threads),
        f"{name}, 1 thread": ("auto", 1),
        f"{name}, without the extension": ("ctypes", threads),
    }
    buffers = []
    for variant, (gather, n_threads) in variants.items():
        buffer = stack.enter_context(zbuffer.open(path, gather=gather, threads=n_threads))
        run.cases[variant] = partial(sample, buffer)
        buffers.append(buffer)
    run.nbytes[name] = buffers[0].nbytes_stored() / len(buffers[0])
    return buffers


def plan(buffer: zbuffer.Buffer, windows: Windows, rounds: int) -> list[np.ndarray]:
    """Return the rows that the batch of each round holds."""
    return [windows.of(sample(buffer, seed=i)["indices"]) for i in range(rounds)]


def check(buffer: zbuffer.Buffer, windows: Windows, rows: np.ndarray) -> None:
    """Raise where the batch of round 0 does not hold the very frames of `rows`."""
    batch = sample(buffer, seed=0)
    np.testing.assert_array_equal(batch["obs"], windows.obs[rows[:, :-1]])
    np.testing.assert_array_equal(batch["next_obs"], windows.obs[rows[:, 1:]])


def add_limit(run: Run, path: Path, plans: list[np.ndarray]) -> None:
    """Add the decoding of the touched blocks alone, and the cost of as many empty calls."""
    lib = library()
    if lib is None:
        run.notes.append("The limit was not measured: the blosc2 wheel has no shared library.")
        return
    decoder = BlockDecoder(lib, path / "data" / "obs", ROW_NBYTES)
    calls = [decoder.calls(rows.ravel()) for rows in plans]
    empty = [decoder.empty(c) for c in calls]
    cname = path.stem
    name, overhead = f"limit {cname}: decoding alone, over the cores", f"empty calls {cname}"
    run.cases[name] = lambda i: decoder.run(calls[i])
    run.cases[overhead] = lambda i: decoder.run(empty[i])
    run.overheads[name] = overhead
    n_blocks = np.mean([len(c) for c in calls])
    run.notes.append(f"A batch touches {n_blocks:.0f} blocks ({cname}).")


def add_torchrl(
    run: Run, windows: Windows, fields: dict[str, np.ndarray], folder: Path, list_rows: int
) -> None:
    """Add TorchRL's storages, or say that it is not there."""
    try:
        from torchrl_storages import compressed_list, lazy_memmap
    except ImportError:
        run.notes.append("TorchRL is not installed: its storages were not measured.")
        return
    n_steps = len(windows.steps)
    n_listed = min(list_rows, n_steps)
    storages = {
        "TorchRL LazyMemmapStorage": (lazy_memmap(n_steps, folder), n_steps),
        "TorchRL CompressedListStorage": (compressed_list(n_listed), n_listed),
    }
    for name, (storage, n) in storages.items():
        storage.fill(windows, fields, n)
        run.cases[name] = storage.sample
        run.nbytes[name] = storage.nbytes_per_row()
    if n_listed < n_steps:
        run.notes.append(
            f"CompressedListStorage holds {n_listed} of the {n_steps} steps, to fill it in "
            "reasonable time; what a batch costs there does not grow with the rows."
        )


def measure(frames: Frames, args: argparse.Namespace) -> str:
    """Return the table of one game."""
    run = Run()
    if native_module() is None:
        run.notes.append("The C extension is not built here: all lines are without it.")
    with tempfile.TemporaryDirectory(prefix="zbuffer-") as name, ExitStack() as stack:
        paths = [Path(name) / f"{cname}.zarr" for cname in CODECS]
        for path in paths:
            write(path, frames, cname=path.stem)
        with zbuffer.open(paths[0]) as buffer:
            windows = Windows(buffer)
            plans = plan(buffer, windows, args.rounds)
            small = {name: np.asarray(buffer[name][:]) for name in SMALL_FIELDS}
        run.cases[TAKE] = lambda i: np.take(windows.obs, plans[i], axis=0)
        for path in paths:
            for opened in add_zbuffer(run, stack, path, args.threads):
                check(opened, windows, plans[0])
            add_limit(run, path, plans)
        add_torchrl(run, windows, small, Path(name) / "memmap", args.list_rows)
        timings = interleave(run.cases, args.rounds)
    return report(run, timings, args.threads)


def report(run: Run, timings: dict[str, Timing], threads: int) -> str:
    """Return the table and the notes as Markdown."""
    lines = []
    for name, timing in timings.items():
        if name in run.overheads.values():
            continue
        if name in run.overheads:
            empty = timings[run.overheads[name]]
            timing = Timing((timing.seconds - empty.seconds) / threads)
        median, minimum = timing.median_ms, timing.min_ms
        nbytes = run.nbytes.get(name)
        lines.append(
            (
                name,
                f"{median:.2f}",
                f"{minimum:.2f}",
                f"{median / timings[TAKE].median_ms:.2f}",
                f"{median / timings[DEFAULT].median_ms:.2f}",
                f"{nbytes:.1f}" if nbytes else "",
                f"{ROW_NBYTES / nbytes:.1f}" if nbytes else "",
            )
        )
    return "\n".join([table(HEADER, lines), "", *run.notes])


def arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--games", nargs="+", default=list(GAMES))
    parser.add_argument("--rows", type=int, default=32768)
    parser.add_argument("--rounds", type=int, default=60)
    parser.add_argument("--threads", type=int, default=cores())
    parser.add_argument(
        "--list-rows",
        type=int,
        default=8192,
        help="most rows to store in TorchRL's CompressedListStorage",
    )
    parser.add_argument("--cache", type=Path, default=None, help="folder of the recordings")
    parser.add_argument("--toy", action="store_true", help="2,000 made-up rows, few rounds")
    args = parser.parse_args()
    if args.toy:
        args.games, args.rows, args.rounds, args.list_rows = ["synthetic"], 2000, 5, 500
    return args


def main() -> None:
    args = arguments()
    print(f"{machine()}\n")
    print(
        f"`sample({BATCH}, frame_stack={STACK})` with next_obs, uniform, {args.rows} rows, "
        f"{args.threads} threads, {args.rounds} rounds:\n"
    )
    for game in args.games:
        toy = game == "synthetic"
        frames = synthetic_frames(args.rows) if toy else load(game, args.rows, args.cache)
        print(f"### {game}\n\n{measure(frames, args)}\n")


if __name__ == "__main__":
    main()
