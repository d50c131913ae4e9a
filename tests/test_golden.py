"""Buffers of format 1 that were written long ago open, and hold what they held."""

from __future__ import annotations

import importlib.util
import shutil
import sys
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType
from typing import Any

import format_reader
import numpy as np
import pytest
import zarr

import zbuffer

DATA = Path(__file__).parent / "data"
NAMES = ["nested-blosc2", "flat-blosc"]


def load_script() -> ModuleType:
    """Return `data/make_golden.py`, which knows what the rows are."""
    spec = importlib.util.spec_from_file_location("make_golden", DATA / "make_golden.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules["make_golden"] = module
    spec.loader.exec_module(module)
    return module


make_golden = load_script()


def files_of(folder: Path) -> dict[str, tuple[int, bytes]]:
    """Return every file below a folder, with its time and its bytes."""
    files = sorted(file for file in folder.rglob("*") if file.is_file())
    return {str(f.relative_to(folder)): (f.stat().st_mtime_ns, f.read_bytes()) for f in files}


def column_of(rows: list[dict[str, Any]], name: str, dtype: Any) -> np.ndarray[Any, Any]:
    column = np.zeros((len(rows), *np.shape(rows[0][name])), dtype)
    for i, row in enumerate(rows):
        column[i] = row[name]
    return column


@pytest.fixture(params=NAMES)
def name(request: pytest.FixtureRequest) -> str:
    return str(request.param)


@pytest.fixture
def path(name: str) -> Iterator[Path]:
    """Yield a golden buffer, and fail a test that wrote there."""
    path = DATA / "format-1" / f"{name}.zarr"
    before = files_of(path)

    yield path

    assert files_of(path) == before


@pytest.fixture
def rows(name: str) -> list[dict[str, Any]]:
    return list(make_golden.rows_of(make_golden.GOLDEN[name]))


def assert_holds(columns: Any, rows: list[dict[str, Any]], schema: dict[str, Any]) -> None:
    """Fail unless columns (read by name) have exactly these rows."""
    for field, (_, dtype) in {**schema, "step_type": ((), "|u1")}.items():
        found, expected = columns(field), column_of(rows, field, dtype)
        assert (found.dtype, found.shape) == (expected.dtype, expected.shape), field
        assert found.tobytes() == expected.tobytes(), field


def test_every_row_is_as_it_was_written(path: Path, name: str, rows: list[dict[str, Any]]) -> None:
    schema = make_golden.GOLDEN[name].schema

    with zbuffer.open(path, mode="r") as buffer:
        assert buffer.rows == len(rows)
        assert (buffer.first_row > 0) == (name == "nested-blosc2")
        live = rows[buffer.first_row :]
        assert len(buffer) == sum(row["step_type"] != make_golden.LAST for row in live)
        assert_holds(lambda field: buffer[field][:], live, schema)


def test_the_reader_of_the_page_finds_the_same_rows(
    path: Path, name: str, rows: list[dict[str, Any]]
) -> None:
    commit = format_reader.read_commit(path)

    assert commit["format"] == 1
    assert commit["rows"] == len(rows)
    live = rows[commit["first_row"] :]
    ids = format_reader.read_ids(path)
    assert ids.tolist() == list(range(commit["first_row"], commit["rows"]))
    schema = make_golden.GOLDEN[name].schema
    assert_holds(lambda field: format_reader.read_field(path, field), live, schema)


def test_segments_are_as_they_were_written(path: Path, rows: list[dict[str, Any]]) -> None:
    commit, segments = format_reader.read_commit(path), format_reader.read_segments(path)
    n = commit["chunk_rows"]

    for k in range(commit["first_row"] // n, -(-len(rows) // n)):
        n_before = sum(row["step_type"] != make_golden.LAST for row in rows[: k * n])
        assert segments[k].tolist() == [0, n_before, min(n, len(rows) - k * n)]


def test_episodes_end_as_they_did(path: Path, rows: list[dict[str, Any]]) -> None:
    with zbuffer.open(path, mode="r") as buffer:
        first = buffer.first_row
        found = [(episode.start, episode.length) for episode in buffer.episodes]
        ends = {episode.ended for episode in buffer.episodes}

    starts = [i for i in range(first, len(rows)) if rows[i]["step_type"] == make_golden.FIRST]
    starts = starts if starts[0] == first else [first, *starts]
    expected = []
    for start, stop in zip(starts, [*starts[1:], len(rows)], strict=True):
        n_last = rows[stop - 1]["step_type"] == make_golden.LAST
        expected.append((start, stop - start - int(n_last)))
    assert found == expected
    assert {"terminated", "truncated"} < ends


def test_a_golden_buffer_can_be_sampled(path: Path, rows: list[dict[str, Any]]) -> None:
    with zbuffer.open(path, mode="r") as buffer:
        batch = buffer.sample(64, seed=0)

    for row, action, reward in zip(batch["indices"], batch["action"], batch["reward"], strict=True):
        assert (action, reward) == (rows[row]["action"], rows[row]["reward"])


def test_a_copy_of_a_golden_buffer_goes_on(
    path: Path, name: str, rows: list[dict[str, Any]], tmp_path: Path
) -> None:
    schema = make_golden.GOLDEN[name].schema
    copy = shutil.copytree(path, tmp_path / "copy.zarr")
    epoch = format_reader.read_commit(copy)["epoch"]

    with zbuffer.open(copy, mode="a") as buffer:
        assert buffer.rows == len(rows)
        make_golden.append(buffer, rows[:40])
        assert buffer.rows == len(rows) + 40

    commit = format_reader.read_commit(copy)
    assert commit["epoch"] == epoch + 1
    everything = (rows + rows[:40])[commit["first_row"] :]
    assert_holds(lambda field: format_reader.read_field(copy, field), everything, schema)
    with zbuffer.open(copy, mode="r") as buffer:
        assert_holds(lambda field: buffer[field][:], everything, schema)


def test_the_golden_buffers_are_small() -> None:
    n_bytes = sum(len(content) for _, content in files_of(DATA / "format-1").values())

    assert n_bytes < 200_000


def test_a_golden_buffer_with_lanes_is_as_it_was_written() -> None:
    with zbuffer.open(DATA / "format-1" / "lanes-blosc2.zarr") as buffer:
        (rows,) = buffer._row_sets()
        ids = rows.ids(np.arange(len(rows)))
        read, lanes = buffer.take(ids), rows.lanes(ids)
        batch = buffer.sample(400, order="prioritized", alpha=1.0, beta=1.0, seed=0)

    for lane in range(make_golden.LANES):
        wanted = make_golden.lane_rows(lane)
        for name in (*make_golden.LANES_SCHEMA, "step_type"):
            found = read[name][lanes == lane]
            np.testing.assert_array_equal(found, [row[name] for row in wanted], err_msg=name)
    # Priorities are the ids plus one: so are the odds, and the weights undo them.
    np.testing.assert_allclose(
        batch["weights"] * (batch["indices"] + 1), batch["weights"][0] * (batch["indices"][0] + 1)
    )


def test_the_table_of_a_golden_buffer_with_lanes_tells_plain_zarr_which_rows_there_are() -> None:
    group = zarr.open_group(DATA / "format-1" / "lanes-blosc2.zarr", mode="r")
    table, obs = group["meta/segments"][:], group["data/obs"][:]
    found: list[list[int]] = [[] for _ in range(make_golden.LANES)]
    for segment, (lane, _, used) in enumerate(table.tolist()):
        found[lane] += obs[4 * segment : 4 * segment + used, 0, 0].tolist()

    priorities, steps = group["meta/priorities"], group["data/step_type"][:] < 2
    ids = np.flatnonzero(steps)
    # Steps have their id plus one; LAST rows, the largest there was when they were new.
    np.testing.assert_array_equal(priorities[:][ids], ids + 1.0)
    assert priorities.attrs["max_priority"] == ids.max() + 1.0
    for lane in range(make_golden.LANES):
        assert found[lane] == [int(row["obs"][0, 0]) for row in make_golden.lane_rows(lane)]
