"""What does each order cost, and what do vector environments?

Frames are repeated to a million rows. Each order is timed beside `uniform` and
`numpy.take` in the same rounds; planning alone is timed over small fields only, without
any decoding. Prints Markdown.

    python benchmarks/sampling.py
    python benchmarks/sampling.py --toy
"""

from __future__ import annotations

import argparse
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

import numpy as np
from buffers import BATCH, ROW_NBYTES, STACK, schema, write
from frames import GAMES, Frames, load, synthetic_frames
from measure import Timing, interleave, machine, table

import zbuffer
from zbuffer.sampling.prioritized import PrioritizedSampler, PriorityTable
from zbuffer.sampling.rowset import RowSet
from zbuffer.sampling.samplers import generator
from zbuffer.sampling.windows import Lookups, Window, resolve

HEADER = ("", "median ms", "min ms", "rows/s", "x uniform", "x take")


def fill(path: Path, frames: Frames, rows: int) -> None:
    """Write frames to `path`, repeated until there are so many rows."""
    with zbuffer.create(path, schema()) as buffer:
        while (missing := rows - len(buffer)) > 0:
            for slab in frames.head(missing).slabs(1000):
                buffer.extend(**slab)
            print(f"\rwriting: {len(buffer):,} of {rows:,} rows", end="", file=sys.stderr)
    print(file=sys.stderr)


def orders(path: Path, frames: Frames, args: argparse.Namespace) -> str:
    """Return the table of a batch of frame stacks in every order."""
    ram = frames.obs
    rng = np.random.default_rng(0)
    picks = [rng.integers(STACK, len(ram) - 1, BATCH)[:, None] for _ in range(args.rounds)]
    plans = [pick + np.arange(1 - STACK, 2) for pick in picks]
    window: dict[str, Any] = {"frame_stack": STACK, "prefetch": 0, "seed": 1}
    with zbuffer.open(path) as buffer:
        ids = buffer.sample(BATCH, seed=0)["indices"]
        buffer.update_priorities(ids, np.ones(BATCH))
        loaders = {
            "uniform": buffer.loader(BATCH, **window),
            "blocks, 8 rows a group": buffer.loader(
                BATCH, order="blocks", rows_per_group=8, **window
            ),
            "epoch": buffer.loader(BATCH, order="epoch", **window),
            "prioritized, with update": buffer.loader(BATCH, order="prioritized", **window),
        }

        def prioritized(_: int) -> None:
            batch = next(loaders["prioritized, with update"])
            buffer.update_priorities(batch["indices"], rng.random(BATCH) + 0.1)

        cases: dict[str, Any] = {"numpy.take from RAM": lambda i: np.take(ram, plans[i], axis=0)}
        for name, loader in loaders.items():
            cases[name] = lambda _, loader=loader: next(loader)
        cases["prioritized, with update"] = prioritized
        timings = interleave(cases, args.rounds)
        blocks = {name: loader.statistics() for name, loader in loaders.items()}
    lines = [
        (
            name,
            f"{timing.median_ms:.2f}",
            f"{timing.min_ms:.2f}",
            f"{BATCH / timing.median_ms * 1e3:,.0f}",
            f"{timing.median_ms / timings['uniform'].median_ms:.2f}",
            f"{timing.median_ms / timings['numpy.take from RAM'].median_ms:.2f}",
        )
        for name, timing in timings.items()
    ]
    notes = [
        f"{name}: {found.blocks_per_batch:.0f} blocks a batch, effective sample size "
        f"{found.effective_sample_size:.0f}."
        for name, found in blocks.items()
    ]
    return "\n".join([table(HEADER, lines), "", *notes])


def epoch(path: Path, args: argparse.Namespace) -> str:
    """Return how many bytes of frames an epoch delivers a second."""
    lines = []
    with zbuffer.open(path) as buffer:
        for size in (256, 1024):
            with buffer.loader(size, order="epoch", fields=["obs", "action"], prefetch=2) as loader:
                next(loader)
                start, n = time.perf_counter(), 0
                for batch in loader:
                    n += len(batch["indices"])
                    if n >= args.epoch_rows:
                        break
                seconds = time.perf_counter() - start
            rate = n * ROW_NBYTES / seconds / 1e9
            lines.append((f"epoch, batches of {size}", f"{n / seconds:,.0f}", f"{rate:.2f}"))
    return table(("", "rows/s", "GB/s of frames"), lines)


def priorities(args: argparse.Namespace) -> str:
    """Return what drawing and updating priorities costs without any frames."""
    rows, rng = RowSet(0, args.rows), np.random.default_rng(0)
    shared = PriorityTable(0.6)
    sampler = PrioritizedSampler(shared, 0.4)
    sampler.draw(BATCH, rows, rng)

    def both(i: int) -> None:
        draw = sampler.draw(BATCH, rows, generator(0, i))
        shared.update(draw.ids, rng.random(BATCH) + 0.1)

    timing = interleave({"both": both}, args.rounds)["both"]
    return f"Draw {BATCH} and update {BATCH} of {args.rows:,}: {timing.median_ms:.2f} ms."


def planning(args: argparse.Namespace) -> str:
    """Return what drawing and finding windows costs, over small fields that are made up."""
    lines = []
    window = Window(STACK, n_step=5, gamma=0.99)
    timings: dict[str, Timing] = {}
    for n in args.planned:
        step_type = np.ones(n, np.uint8)
        step_type[::200] = 0
        step_type[199::200] = 2
        reward, ends = np.ones(n, np.float32), step_type == 9
        lookups = Lookups(
            lambda ids, t=step_type: t[np.clip(ids, 0, len(t) - 1)],
            lambda lanes: np.ones(len(lanes), bool),
            lambda ids, r=reward: r[ids],
            lambda ids, e=ends: e[ids],
            lambda ids, e=ends: e[ids],
        )
        rows = RowSet(0, n)

        def plan(i: int, rows: RowSet = rows, lookups: Lookups = lookups) -> None:
            ids = generator(0, i).integers(rows.first, rows.stop, BATCH)
            resolve(ids, window, rows, lookups)

        timings[f"{n:,} rows"] = interleave({"plan": plan}, args.rounds)["plan"]
    for name, timing in timings.items():
        lines.append((name, f"{timing.median_ms:.3f}", f"{timing.min_ms:.3f}"))
    return table(("planning in NumPy, n_step=5, frame_stack=4", "median ms", "min ms"), lines)


def lanes(folder: Path, frames: Frames, n_lanes: int, args: argparse.Namespace) -> str:
    """Return what a vector environment costs: each lane plays a stretch of the frames."""
    steps = min(len(frames) // n_lanes, args.lane_steps)
    one, many = folder / "one.zarr", folder / "many.zarr"
    head = frames.head(steps * n_lanes)
    write(one, head)
    names = ("action", "reward", "terminated", "truncated")
    starts = np.arange(n_lanes) * steps
    rows = []
    for t in range(steps):
        at = starts + t
        row = {name: getattr(head, name)[at] for name in names}
        row["obs"] = head.obs[at]
        rows.append(row)
    buffer = zbuffer.create(many, schema(), lanes=n_lanes)
    start = time.perf_counter()
    for row in rows:
        buffer.append(**row)
    seconds = time.perf_counter() - start
    buffer.close()
    closed = time.perf_counter() - start
    sizes = []
    for path in (one, many):
        with zbuffer.open(path) as opened:
            sizes.append(opened.nbytes_stored() / len(opened))
    n = steps * n_lanes
    return (
        f"{n_lanes} lanes, {n:,} rows: append {n / seconds:,.0f} rows/s "
        f"({n / closed:,.0f} until closed), {sizes[1]:.1f} bytes a row, "
        f"{sizes[1] / sizes[0]:.2f} times those of one lane ({sizes[0]:.1f})."
    )


def measure(frames: Frames, args: argparse.Namespace) -> str:
    """Return all tables of one game."""
    with tempfile.TemporaryDirectory(prefix="zbuffer-") as name:
        path = Path(name) / "large.zarr"
        fill(path, frames, args.rows)
        parts = [orders(path, frames, args), epoch(path, args)]
        parts.append(lanes(Path(name), frames, args.lanes, args))
    return "\n\n".join(parts)


def arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--games", nargs="+", default=list(GAMES)[:1])
    parser.add_argument("--rows", type=int, default=1_000_000)
    parser.add_argument("--recorded", type=int, default=32768)
    parser.add_argument("--rounds", type=int, default=100)
    parser.add_argument("--lanes", type=int, default=64)
    parser.add_argument("--lane-steps", type=int, default=512)
    parser.add_argument("--epoch-rows", type=int, default=200_000)
    parser.add_argument("--planned", type=int, nargs="+", default=[10_000, 100_000_000])
    parser.add_argument("--cache", type=Path, default=None, help="folder of the recordings")
    parser.add_argument("--toy", action="store_true", help="few made-up rows, few rounds")
    args = parser.parse_args()
    if args.toy:
        args.games, args.rows, args.rounds, args.recorded = ["synthetic"], 3000, 3, 2000
        args.lanes, args.epoch_rows, args.planned = 4, 1000, [1000]
    return args


def main() -> None:
    args = arguments()
    print(f"{machine()}\n")
    print(f"Batches of {BATCH} with frame_stack={STACK} and next_obs, {args.rows:,} rows:\n")
    for game in args.games:
        toy = game == "synthetic"
        frames = synthetic_frames(args.recorded) if toy else load(game, args.recorded, args.cache)
        print(f"### {game}\n\n{measure(frames, args)}\n")
    print(f"{priorities(args)}\n\n{planning(args)}")


if __name__ == "__main__":
    main()
