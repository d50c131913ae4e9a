"""Writes the golden buffers of format 1: `python tests/data/make_golden.py`.

Run once for a format version; what it wrote must open for ever. The rows follow from
their ids, so a test needs only `rows_of` to know what a buffer holds.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

import zbuffer

FOLDER = Path(__file__).parent / "format-1"

FIRST, MID, LAST = 0, 1, 2
ENDS: dict[str, Any] = {
    "action": ((), "<i8"),
    "reward": ((), "<f4"),
    "terminated": ((), "?"),
    "truncated": ((), "?"),
}


@dataclass(frozen=True, slots=True)
class Golden:
    """How a buffer was made."""

    schema: dict[str, Any]
    n_steps: int
    options: dict[str, Any]


GOLDEN = {
    # Nested observations, rows evicted, the last chunk part-filled.
    "nested-blosc2": Golden(
        {
            "obs/pixels": ((12, 10), "|u1"),
            "obs/speed": ((2,), ">f4"),
            **ENDS,
            "when": ((), "<M8[ms]"),
            "info": ((), [("lives", "|u1"), ("score", "<i4")]),
        },
        150,
        {"codec": "blosc2", "capacity": 64, "chunk_rows": 16, "block_rows": 4},
    ),
    # Nothing evicted.
    "flat-blosc": Golden(
        {"obs": ((5,), "<f4"), **ENDS, "note": ((), "<U4")},
        70,
        {"codec": "blosc", "chunk_rows": 32, "block_rows": 8, "notes": {"env": "golden"}},
    ),
}

# How an episode ends: (terminated, truncated, whether its final observation is stored).
# The third was cut.
EPISODE_ENDS = [(True, False, True), (False, True, True), (False, False, False)]


def length_of(episode: int) -> int:
    """Return the number of steps of an episode."""
    return 4 + episode * 3 % 8


def item(name: str, row: int) -> Any:
    """Return what a step row holds of a field, but for its ends."""
    match name:
        case "obs/pixels":
            return ((np.arange(120).reshape(12, 10) // 11 * 7 + row * 3) % 256).astype("u1")
        case "obs/speed":
            return np.array([row / 4, -row], ">f4")
        case "obs":
            return (np.arange(5) * 0.5 + row).astype("<f4")
        case "action":
            return np.int64(row * 5 % 18)
        case "reward":
            return np.float32(row % 7 - 3)
        case "when":
            return np.datetime64("2024-02-29T12:00:00.000", "ms") + np.timedelta64(row, "ms")
        case "info":
            return np.array((row % 5, row * row), GOLDEN["nested-blosc2"].schema["info"][1])
        case "note":
            return np.array(f"n{row}", "<U4")
    raise KeyError(name)


def rows_of(golden: Golden) -> Iterator[dict[str, Any]]:
    """Yield every row ever written, ids from 0 on, with its `step_type`."""
    row = step = episode = 0
    while step < golden.n_steps:
        terminated, truncated, has_last = EPISODE_ENDS[episode % 3]
        n = length_of(episode)
        for i in range(n):
            filled = {name: item(name, row) for name in golden.schema if name not in ENDS}
            filled |= {name: item(name, row) for name in ("action", "reward")}
            filled["terminated"] = np.bool_(terminated and i == n - 1)
            filled["truncated"] = np.bool_(truncated and i == n - 1)
            yield filled | {"step_type": np.uint8(FIRST if i == 0 else MID)}
            row, step = row + 1, step + 1
            if step == golden.n_steps:
                return
        if has_last:
            zeros = {name: np.zeros(s, d)[()] for name, (s, d) in golden.schema.items()}
            final = {name: item(name, row) for name in golden.schema if is_observation(name)}
            yield zeros | final | {"step_type": np.uint8(LAST)}
            row += 1
        episode += 1


def is_observation(name: str) -> bool:
    """Return whether a field is (a part of) the observation."""
    return name.split("/")[0] == "obs"


def nested(row: dict[str, Any]) -> dict[str, Any]:
    """Return a row with its observation as `append` takes it."""
    parts = {name.partition("/")[2]: row[name] for name in row if is_observation(name)}
    rest = {name: row[name] for name in row if not is_observation(name)}
    return {"obs": parts.get("", parts), **rest}


def append(buffer: zbuffer.Buffer, rows: list[dict[str, Any]]) -> None:
    """Append rows in stream style; a FIRST row cuts an episode that did not end."""
    for i, row in enumerate(map(nested, rows)):
        kind = row.pop("step_type")
        if kind == LAST:
            buffer.end_episode(obs=row["obs"])
            continue
        if kind == FIRST and i and rows[i - 1]["step_type"] != LAST:
            buffer.end_episode()
        buffer.append(**row)


LANES = 3
LANES_SCHEMA: dict[str, Any] = {"obs": ((4, 3), "|u1"), **ENDS}


def lane_rows(lane: int) -> list[dict[str, Any]]:
    """Return the rows of one lane of the golden buffer with lanes, in their order."""
    rows: list[dict[str, Any]] = []
    for step in range(40):
        # Lane 1 steps every other time, so it has half as many steps.
        if lane == 1 and step % 2:
            continue
        t = step // 2 if lane == 1 else step
        length = 5 + 2 * lane
        done, first = t % length == length - 1, t % length == 0
        rows.append(
            {
                "obs": np.full((4, 3), 100 * lane + t, np.uint8),
                "action": t + 1000 * lane,
                "reward": np.float32(t / 2),
                "terminated": done and lane != 2,
                "truncated": done and lane == 2,
                "step_type": FIRST if first else MID,
            }
        )
        # Closing the buffer ends the running episodes too.
        if done or step == (38 if lane == 1 else 39):
            zero = {"action": 0, "reward": 0.0, "terminated": False, "truncated": False}
            final = np.full((4, 3), 100 * lane + t + 1, np.uint8)
            rows.append({"obs": final, **zero, "step_type": LAST})
    return rows


def make_lanes(path: Path) -> None:
    """Write the golden buffer with lanes, whose priorities are its rows' numbers."""
    kept = [[r for r in lane_rows(lane) if r["step_type"] != LAST] for lane in range(LANES)]
    with zbuffer.create(
        path, LANES_SCHEMA, lanes=LANES, segment_rows=4, chunk_rows=16, block_rows=2
    ) as buffer:
        for step in range(40):
            lanes = [0, 2] if step % 2 else [0, 1, 2]
            rows = [kept[lane][step // 2 if lane == 1 else step] for lane in lanes]
            row = {
                name: np.array([r[name] for r in rows], dtype)
                for name, (_, dtype) in LANES_SCHEMA.items()
            }
            row["next_obs"] = row["obs"] + np.uint8(1)
            buffer.append(**row, lanes=lanes)
            if step == 20:
                buffer.flush()
        ids = np.unique(buffer.sample(2000, seed=0)["indices"])
        buffer.update_priorities(ids, ids + 1.0)


def make(folder: Path = FOLDER) -> None:
    """Write the golden buffers anew."""
    make_lanes(folder / "lanes-blosc2.zarr")
    for name, golden in GOLDEN.items():
        path = folder / f"{name}.zarr"
        with zbuffer.create(path, golden.schema, overwrite=True, **golden.options) as buffer:
            append(buffer, list(rows_of(golden)))
        # It names the host and the time, and no reader needs it.


if __name__ == "__main__":
    make()
