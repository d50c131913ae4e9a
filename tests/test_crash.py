"""A writer that is killed at a random moment: what had been appended is there."""

from __future__ import annotations

import multiprocessing
import os
import signal
import struct
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import zbuffer

Array = np.ndarray[Any, Any]

#: Children come from a server that has imported everything already.
CONTEXT = multiprocessing.get_context("forkserver")
CONTEXT.set_forkserver_preload([__name__, "zarr", "blosc2", "numcodecs", "google_crc32c"])

SCHEMA: dict[str, Any] = {
    "obs/pixels": ((5, 8), "uint8"),
    "obs/state": ((3,), "float64"),
    "action": ((), "int64"),
    "reward": ((), "float32"),
    "terminated": ((), "bool"),
}
EPISODE_STEPS = 23
CHUNK_ROWS = 8
CAPACITY = 24
STYLES = ("transitions", "stream", "evicting")
RECORD = struct.Struct("<q")


# -- the rows, each a function of its number ---------------------------------------------


def pixels(n: Any) -> Array:
    n = np.asarray(n)[..., None, None]
    return ((n * 7 + np.arange(40).reshape(5, 8) * (n % 13 + 1)) % 251).astype(np.uint8)


def state(n: Any) -> Array:
    return np.asarray(n)[..., None] * np.array([1.0, -0.1, 1e-300])


def step(n: int) -> dict[str, Any]:
    return {
        "obs": {"pixels": pixels(n), "state": state(n)},
        "action": n,
        "reward": n / 7,
        "terminated": n % EPISODE_STEPS == EPISODE_STEPS - 1,
    }


def observation(n: int, name: str = "obs") -> dict[str, Any]:
    return {name: {"pixels": pixels(n), "state": state(n)}}


# -- the child ---------------------------------------------------------------------------


def append_until_killed(path: str, style: str, reports: Connection) -> None:
    """Append rows for ever; report each call that returned, unbuffered."""
    pipe = reports.fileno()
    buffer = zbuffer.open(path, mode="a")
    n = check_rows(buffer, style, recovered=True)
    while True:
        if style == "stream":
            buffer.append(**step(n))
            os.write(pipe, RECORD.pack(2 * n))
            if step(n)["terminated"]:
                buffer.end_episode(**observation(n + 1))
                os.write(pipe, RECORD.pack(2 * n + 1))
        else:
            buffer.append(**step(n), **observation(n + 1, "next_obs"))
            os.write(pipe, RECORD.pack(2 * n))
        n += 1


# -- what must be there --------------------------------------------------------------------


def check_rows(buffer: zbuffer.Buffer, style: str, *, recovered: bool) -> int:
    """Check every live row bit for bit; returns the number of the next step."""
    rows = live_rows(buffer)
    kinds = rows["step_type"]
    if len(kinds) == 0:
        return 0
    steps = kinds != 2
    n = rows["action"][steps]
    assert np.array_equal(n, np.arange(n[0], n[0] + len(n)))
    numbers = np.empty(len(kinds), np.int64)
    numbers[steps] = n
    # A LAST row holds the observation after the step before it.
    last = np.flatnonzero(~steps)
    numbers[last] = numbers[last - 1] + 1
    if not steps[0]:
        numbers[0] = n[0]
    assert rows["obs/pixels"].tobytes() == pixels(numbers).tobytes()
    assert rows["obs/state"].tobytes() == state(numbers).tobytes()
    assert rows["reward"][steps].tobytes() == (n / 7).astype(np.float32).tobytes()
    ends = n % EPISODE_STEPS == EPISODE_STEPS - 1
    assert np.array_equal(rows["terminated"][steps], ends)
    # Episodes begin after the one before has ended.
    at = np.flatnonzero(steps)
    assert (kinds[at[1:]][ends[:-1]] == 0).all()
    if style != "stream":
        # The observation after the newest step is pending until a writer takes it up.
        ended = at[ends][at[ends] + 1 < len(kinds)]
        assert (kinds[ended + 1] == 2).all()
        if recovered:
            assert kinds[-1] == 2, "the pending observation did not come back as a LAST row"
    if style == "evicting":
        assert len(kinds) >= min(int(n[-1]), CAPACITY)
    else:
        assert n[0] == 0
        assert len(buffer) == len(n)
    return int(n[-1]) + 1


def live_rows(buffer: zbuffer.Buffer) -> zbuffer.Batch:
    """Return all rows there are at one moment."""
    while True:
        ids = np.arange(buffer.first_row, buffer.rows)
        try:
            return buffer.take(ids)
        except zbuffer.RowNotFoundError:
            # A recovered writer seals, and so evicts, what the one before left.
            assert buffer.first_row > ids[0]


def check_sample(buffer: zbuffer.Buffer) -> None:
    batch = buffer.sample(64, seed=0)
    n = batch["action"]
    assert batch["obs/pixels"].tobytes() == pixels(n).tobytes()
    known = batch["mask"]
    assert np.array_equal(batch["next_obs/state"][known], state(n + 1)[known])


def check_reports(buffer: zbuffer.Buffer, codes: list[int]) -> None:
    """Check that all that was reported is there, or was evicted."""
    if not codes:
        return
    rows = live_rows(buffer)
    kinds, n = rows["step_type"], rows["action"]
    there = set((2 * n[kinds != 2]).tolist())
    before = np.flatnonzero(kinds[1:] == 2)
    there |= set((2 * n[before] + 1).tolist())
    oldest = min(there)
    assert {code for code in codes if code >= oldest} <= there
    assert max(codes) in there


# -- the test ------------------------------------------------------------------------------


class Reports:
    """What the child says: the calls that returned."""

    def __init__(self, pipe: Connection) -> None:
        self._pipe = pipe
        self._data = b""

    def upto(self, count: int) -> None:
        """Read until there are so many reports, or until the child is gone."""
        while len(self._data) < count * RECORD.size:
            more = os.read(self._pipe.fileno(), 1 << 16)
            if not more:
                return
            self._data += more

    @property
    def codes(self) -> list[int]:
        whole = len(self._data) // RECORD.size * RECORD.size
        return [code for (code,) in RECORD.iter_unpack(self._data[:whole])]


def run_and_kill(path: Path, style: str, count: int) -> list[int]:
    """Let a child append until it has reported so many calls, kill it; returns its reports."""
    receiver, sender = CONTEXT.Pipe(duplex=False)
    child = CONTEXT.Process(target=append_until_killed, args=(str(path), style, sender))
    child.start()
    sender.close()
    reports = Reports(receiver)
    with receiver:
        reports.upto(count)
        assert child.pid is not None
        os.kill(child.pid, signal.SIGKILL)
        child.join()
        reports.upto(1 << 62)
    assert child.exitcode == -signal.SIGKILL, "the child ended by itself"
    child.close()
    return reports.codes


@pytest.mark.parametrize(
    ("style", "n_kills"), [("transitions", 17), ("stream", 17), ("evicting", 16)]
)
def test_every_row_whose_append_returned_is_there_after_a_kill(
    tmp_path: Path, style: str, n_kills: int
) -> None:
    path = tmp_path / "buffer"
    capacity = CAPACITY if style == "evicting" else None
    zbuffer.create(path, SCHEMA, chunk_rows=CHUNK_ROWS, capacity=capacity).close()
    rng = np.random.default_rng(len(style))
    # A kill before the first report lands in the opening, often in the recovery.
    counts = rng.permutation([0, 0, 1, 2, *rng.integers(3, 200, n_kills - 4)])

    for kill, count in enumerate(counts):
        codes = run_and_kill(path, style, int(count))

        with zbuffer.open(path) as buffer:
            n = check_rows(buffer, style, recovered=False)
            check_reports(buffer, codes)
            if n > 2:
                check_sample(buffer)
        if kill % 3 == 2:
            with zbuffer.open(path, mode="a") as buffer:
                assert check_rows(buffer, style, recovered=True) == n
                check_reports(buffer, codes)
                buffer.append(**step(n), **observation(n + 1, "next_obs"))
                assert int(buffer["action"][-1]) in (n, 0)
            with zbuffer.open(path) as buffer:
                assert check_rows(buffer, style, recovered=style != "stream") == n + 1
                assert style != "evicting" or len(buffer["action"]) < CAPACITY + CHUNK_ROWS


def test_the_observation_pending_at_a_kill_comes_back_as_a_last_row(tmp_path: Path) -> None:
    path = tmp_path / "buffer"
    zbuffer.create(path, SCHEMA, chunk_rows=CHUNK_ROWS).close()

    codes = run_and_kill(path, "transitions", 3)

    with zbuffer.open(path, mode="a") as buffer:
        n = int(buffer["action"][-2])
        assert 2 * n >= max(codes)
        assert buffer["step_type"][-1] == 2
        assert np.array_equal(buffer["obs/pixels"][-1], pixels(n + 1))
        assert np.array_equal(buffer["obs/state"][-1], state(n + 1))
        buffer.append(**step(n + 1))
        assert buffer["step_type"][-1] == 0


@pytest.mark.parametrize("steps", range(1, 2 * CHUNK_ROWS + 2))
def test_the_pending_observation_comes_back_at_every_place_in_a_chunk(
    tmp_path: Path, steps: int
) -> None:
    path = tmp_path / "buffer"
    zbuffer.create(path, SCHEMA, chunk_rows=CHUNK_ROWS).close()
    child = CONTEXT.Process(target=append_and_die, args=(str(path), steps))

    child.start()
    child.join()

    assert child.exitcode == -signal.SIGKILL
    for mode in ("r", "a", "r"):
        with zbuffer.open(path, mode=mode) as buffer:
            assert check_rows(buffer, "transitions", recovered=mode == "a") == steps
            assert len(buffer) == steps
            check_sample(buffer)
    child.close()


def append_and_die(path: str, steps: int) -> None:
    """Append so many transitions and be killed with the last observation pending."""
    buffer = zbuffer.open(path, mode="a")
    for n in range(steps):
        buffer.append(**step(n), **observation(n + 1, "next_obs"))
    os.kill(os.getpid(), signal.SIGKILL)


def test_nothing_is_left_beside_the_rows_after_recovery_and_close(tmp_path: Path) -> None:
    path = tmp_path / "buffer"
    zbuffer.create(path, SCHEMA, chunk_rows=CHUNK_ROWS).close()
    for count in (5, 60, 30):
        run_and_kill(path, "transitions", count)
    # What a kill in the middle of a write leaves behind.
    for stray in ("data/action/c/2.partial", "zarr.json.partial", "meta/segments/c/0/0.partial"):
        (path / stray).write_bytes(b"torn")
    (path / "data/action/c/9999").write_bytes(b"beyond the commit")

    with zbuffer.open(path, mode="a") as buffer:
        n = check_rows(buffer, "transitions", recovered=True)

    files = {str(file.relative_to(path)) for file in path.rglob("*") if file.is_file()}
    with zbuffer.open(path) as buffer:
        assert check_rows(buffer, "transitions", recovered=True) == n
        chunks = range(-(-buffer.rows // CHUNK_ROWS))
    assert not {file for file in files if file.endswith(".partial") or file.startswith("tail/")}
    assert {file for file in files if file.startswith("data/action/c/")} == {
        f"data/action/c/{chunk}" for chunk in chunks
    }
