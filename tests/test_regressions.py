"""Slips that were found by reading or by use, each with its right value."""

from __future__ import annotations

import errno
import multiprocessing
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import zbuffer
from zbuffer.reading import chunks
from zbuffer.reading.chunks import View
from zbuffer.storage.local import LocalStore

SCHEMA: dict[str, Any] = {"obs": ((70,), "uint8"), "action": ((), "int64")}


def steps(start: int, stop: int) -> dict[str, Any]:
    n = np.arange(start, stop)
    return {"obs": np.repeat((n % 251).astype(np.uint8)[:, None], 70, axis=1), "action": n}


def test_a_column_in_use_is_not_touched_when_an_older_view_is_read(tmp_path: Path) -> None:
    with zbuffer.create(tmp_path / "b", SCHEMA, chunk_rows=8) as buffer:
        buffer.extend(**steps(0, 64))
        buffer.flush()
        new, old = View(32, 64, {}), View(0, 64, {})
        column = buffer._rows._columns.get("action", new)
        assert column is not None

        values, base = column.upto(new, 1)
        kept = values[np.arange(32, 64) - base].copy()
        column.upto(old, 1)

        assert np.array_equal(values[np.arange(32, 64) - base], kept)


def sample_in_child(buffer: zbuffer.Buffer, pipe: Any) -> None:
    pipe.send(buffer.sample(300_000, fields=["obs"], seed=0)["obs"].nbytes)


def test_a_child_forked_while_a_batch_gets_its_memory_does_not_hang(tmp_path: Path) -> None:
    context = multiprocessing.get_context("fork")
    with zbuffer.create(tmp_path / "b", SCHEMA, chunk_rows=8) as buffer:
        buffer.extend(**steps(0, 64))
        mine, theirs = context.Pipe(duplex=False)

        with buffer._memory._lock:
            child = context.Process(target=sample_in_child, args=(buffer, theirs))
            child.start()
        came = mine.poll(30)
        if not came:
            child.kill()
        child.join()

        assert came


def test_a_chunk_that_cannot_be_deleted_is_left_and_counts_nothing_twice(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuse(store: LocalStore, key: str) -> None:
        raise PermissionError(errno.EACCES, "no", key)

    with zbuffer.create(tmp_path / "b", SCHEMA, chunk_rows=8, capacity=16) as buffer:
        with monkeypatch.context() as patch:
            patch.setattr(LocalStore, "delete", refuse)
            buffer.extend(**steps(0, 64))
            buffer.flush()
        assert len(buffer) == buffer.rows - buffer.first_row == 16

    with zbuffer.open(tmp_path / "b", mode="a") as buffer:
        assert np.array_equal(buffer["action"][:], np.arange(48, 64))
        assert len(list((tmp_path / "b/data/action/c").iterdir())) == 2


def test_few_maps_are_kept_however_many_chunks_are_read(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(chunks, "MAX_MAPPED", 4)
    with zbuffer.create(tmp_path / "b", SCHEMA, chunk_rows=8) as buffer:
        buffer.extend(**steps(0, 400))
    with zbuffer.open(tmp_path / "b") as buffer:
        table = buffer._rows._chunks["obs"]

        for _ in range(20):
            for row in (0, 100, 399, 7, 250):
                assert buffer["obs"][row][0] == row % 251
                table.forget(row // 8)
        assert np.array_equal(buffer["obs"][:], steps(0, 400)["obs"])
        assert buffer["obs"][3][0] == 3

        assert sum(owner is not None for owner in table._owners) <= 4


def test_a_reader_notices_that_its_buffer_was_replaced(tmp_path: Path) -> None:
    with zbuffer.create(tmp_path / "b", SCHEMA, chunk_rows=8) as buffer:
        buffer.extend(**steps(0, 20))
    with zbuffer.open(tmp_path / "b") as reader:
        assert reader["obs"][9][0] == 9

        with zbuffer.create(tmp_path / "b", SCHEMA, chunk_rows=8, overwrite=True) as buffer:
            buffer.extend(**steps(100, 140))

        with pytest.raises(zbuffer.NotABufferError, match="was replaced by another buffer"):
            reader["obs"][9]


@pytest.mark.parametrize("call", ["append", "extend"])
def test_what_numpy_cannot_hold_is_a_schema_error(tmp_path: Path, call: str) -> None:
    torch = pytest.importorskip("torch")
    rows = {"obs": torch.zeros((2, 70), dtype=torch.bfloat16), "action": np.arange(2)}
    one = {"obs": rows["obs"][0], "action": 0}
    with zbuffer.create(tmp_path / "b", SCHEMA) as buffer:
        with pytest.raises(zbuffer.SchemaError, match=r"^field 'obs' must be uint8"):
            getattr(buffer, call)(**(one if call == "append" else rows))

        assert buffer.rows == 0


def test_a_next_observation_that_does_not_fit_is_named(tmp_path: Path) -> None:
    with (
        zbuffer.create(tmp_path / "b", SCHEMA) as buffer,
        pytest.raises(zbuffer.SchemaError) as caught,
    ):
        buffer.append(obs=np.zeros(70, "uint8"), action=0, next_obs=np.zeros(70))

    assert str(caught.value) == "field 'next_obs' must be uint8 (70,), got float64 (70,)"
    assert caught.value.field == "next_obs"


def test_no_ids_are_no_rows_not_an_error(tmp_path: Path) -> None:
    with zbuffer.create(tmp_path / "b", {"obs": ((2,), "uint8")}) as buffer:
        buffer.append(obs=np.zeros(2, np.uint8))

        assert buffer.take([])["obs"].shape == (0, 2)


def test_small_rows_of_many_lanes_share_a_page(tmp_path: Path) -> None:
    with zbuffer.create(tmp_path / "b", {"obs": ((2,), "uint8")}, lanes=48) as buffer:
        buffer.append(obs=np.zeros((48, 2), np.uint8))

        assert len(list((tmp_path / "b" / "tail").iterdir())) == 1
