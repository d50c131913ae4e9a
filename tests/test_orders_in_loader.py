"""Orders, resume, pace and samplers of one's own, through buffers and loaders."""

from __future__ import annotations

import json
import multiprocessing
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import zbuffer
from zbuffer.sampling.epoch import EpochSampler
from zbuffer.sampling.samplers import UniformSampler

Array = np.ndarray[Any, Any]
SCHEMA = {
    "obs": ((800,), "int32"),
    "action": ((), "int64"),
    "reward": ((), "float32"),
    "terminated": ((), "bool"),
    "truncated": ((), "bool"),
}
ORDERS: list[tuple[str, dict[str, Any]]] = [
    ("uniform", {}),
    ("blocks", {"rows_per_group": 4}),
    ("epoch", {"pool_rows": 50}),
    ("prioritized", {"alpha": 0.7, "beta": 0.5}),
]


def fill(buffer: zbuffer.Buffer, n: int, *, start: int = 0) -> None:
    """Append steps; every tenth terminates its episode, so all have a next observation."""
    numbers = np.arange(start, start + n)
    rows: dict[str, Any] = {
        "obs": np.broadcast_to(numbers[:, None], (n, 800)).astype(np.int32),
        "action": numbers,
        "reward": np.ones(n, np.float32),
        "terminated": numbers % 10 == 9,
        "truncated": np.zeros(n, bool),
    }
    if buffer.lanes > 1:
        wide = {k: np.repeat(v[:, None], buffer.lanes, axis=1) for k, v in rows.items()}
        buffer.extend(**wide)
    else:
        buffer.extend(**rows)


@pytest.fixture(params=[1, 3], ids=["one lane", "three lanes"])
def buffer(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[zbuffer.Buffer]:
    options = {"lanes": 3, "segment_rows": 8} if request.param == 3 else {}
    with zbuffer.create(tmp_path / "b", SCHEMA, chunk_rows=32, block_rows=4, **options) as opened:
        fill(opened, 400 if request.param == 1 else 130)
        yield opened


@pytest.mark.parametrize(("order", "options"), ORDERS)
@pytest.mark.parametrize("prefetch", [0, 2])
@pytest.mark.parametrize("taken", [0, 1, 7])
def test_a_restarted_loader_goes_on_with_the_batches_that_would_have_followed(
    buffer: zbuffer.Buffer, order: str, options: dict[str, Any], prefetch: int, taken: int
) -> None:
    arguments: dict[str, Any] = {"order": order, "seed": 3, "prefetch": prefetch, **options}
    with buffer.loader(16, **arguments) as loader:
        for _ in range(taken):
            next(loader)
        state = json.loads(json.dumps(loader.state_dict()))
        wanted = [next(loader) for _ in range(5)]
    reopened = zbuffer.open(buffer.path)

    with reopened, reopened.loader(16, **arguments) as loader:
        loader.load_state_dict(state)
        found = [next(loader) for _ in range(5)]

    for a, b in zip(wanted, found, strict=True):
        assert a.keys() == b.keys()
        for name in a:
            np.testing.assert_array_equal(a[name], b[name])


def test_a_state_of_another_seed_or_order_is_refused(buffer: zbuffer.Buffer) -> None:
    with buffer.loader(16, seed=1, prefetch=0) as loader:
        next(loader)
        state = loader.state_dict()
    loader = buffer.loader(16, seed=2, prefetch=0)
    with pytest.raises(ValueError, match="loader with seed=1, this one has 2"):
        loader.load_state_dict(state)
    with pytest.raises(ValueError, match="'step' is missing"):
        loader.load_state_dict({})
    loader = buffer.loader(16, seed=1, prefetch=0, order="epoch")
    with pytest.raises(ValueError, match="another order"):
        loader.load_state_dict(state)


@pytest.mark.parametrize("prefetch", [0, 3])
def test_an_epoch_has_every_step_once_and_iterating_again_is_the_next(
    buffer: zbuffer.Buffer, prefetch: int
) -> None:
    n = len(buffer)
    orders = []
    with buffer.loader(32, order="epoch", pool_rows=64, prefetch=prefetch) as loader:
        for _ in range(3):
            batches = list(loader)
            ids = np.concatenate([batch["indices"] for batch in batches])
            assert len(ids) == len(set(ids.tolist()))
            # The newest step of a lane has no next observation yet, unless it terminated.
            assert n - buffer.lanes <= len(ids) <= n
            assert all(len(batch["indices"]) == 32 for batch in batches[:-1])
            orders.append(ids.tolist())
    assert orders[0] != orders[1] != orders[2]


def test_drop_last_leaves_out_the_batch_that_is_not_full(buffer: zbuffer.Buffer) -> None:
    with buffer.loader(32, order="epoch", drop_last=True, prefetch=0) as loader:
        for _ in range(2):
            sizes = [len(batch["indices"]) for batch in loader]
            assert set(sizes) == {32}
            assert len(sizes) in (len(buffer) // 32, (len(buffer) - buffer.lanes) // 32)


def test_ranks_share_an_epoch_out_and_draw_apart_otherwise(buffer: zbuffer.Buffer) -> None:
    found: list[int] = []
    for rank in range(3):
        with buffer.loader(
            16, order="epoch", rank=rank, world_size=3, prefetch=0, seed=5
        ) as loader:
            found += [i for batch in loader for i in batch["indices"].tolist()]
    draws = []
    for rank in range(3):
        with buffer.loader(64, rank=rank, world_size=3, prefetch=0, seed=5) as loader:
            draws.append(next(loader)["indices"].tolist())

    with buffer.loader(16, order="epoch", prefetch=0, seed=5) as loader:
        whole = [i for batch in loader for i in batch["indices"].tolist()]
    assert sorted(found) == sorted(whole)
    assert draws[0] != draws[1] != draws[2]


def test_statistics_say_how_random_a_batch_is(buffer: zbuffer.Buffer) -> None:
    buffer.flush()  # rows in the tail are not decoded
    found = {}
    for order, options in ORDERS[:2]:
        with buffer.loader(64, order=order, prefetch=0, **options) as loader:
            for _ in range(10):
                next(loader)
            found[order] = loader.statistics()

    uniform, blocks = found["uniform"], found["blocks"]
    assert 0 < blocks.blocks_per_batch < 0.8 * uniform.blocks_per_batch
    assert blocks.effective_sample_size < 0.6 * uniform.effective_sample_size
    assert uniform.effective_sample_size == pytest.approx(uniform.uniform_sample_size, rel=0.4)
    assert 1 <= blocks.distinct_chunks <= uniform.distinct_chunks + 4


@pytest.mark.parametrize(
    ("arguments", "error", "message"),
    [
        ({"order": "newest"}, ValueError, "order must be one of uniform, blocks, epoch"),
        ({"order": "blocks", "alpha": 1}, TypeError, "order='blocks' takes no alpha="),
        ({"alpha": 1}, TypeError, "order='uniform' takes no alpha=: it takes no argument"),
        ({"order": 3}, ValueError, "must be a name or have draw"),
        ({"order": "blocks", "groups_per_batch": 5}, ValueError, "must divide batch_size=16"),
        ({"order": "blocks", "rows_per_group": 0}, ValueError, "rows_per_group"),
        ({"order": "epoch", "pool_rows": 0}, ValueError, "pool_rows"),
        ({"order": "prioritized", "alpha": -1}, ValueError, "alpha must be"),
        ({"order": "prioritized", "beta": 2}, ValueError, "beta must be"),
        ({"rank": 2, "world_size": 2}, ValueError, "rank must be below world_size=2, got 2"),
        ({"samples_per_insert": 0}, ValueError, "samples_per_insert"),
        ({"tolerance": 1}, ValueError, "tolerance"),
        ({"min_rows": -1}, ValueError, "min_rows"),
    ],
)
def test_orders_that_cannot_be_are_refused(
    buffer: zbuffer.Buffer, arguments: dict[str, Any], error: Any, message: str
) -> None:
    with pytest.raises(error, match=message):
        buffer.loader(16, **arguments)


# -- priorities ----------------------------------------------------------------------


def test_priorities_survive_reopening_and_new_rows_have_the_largest(
    buffer: zbuffer.Buffer,
) -> None:
    first = buffer.sample(200, seed=1)["indices"]
    assert buffer.update_priorities(first, np.full(len(first), 0.001)) == 0
    assert buffer.update_priorities(first[:1], [8.0]) == 0
    path = buffer.path
    buffer.close()

    with zbuffer.open(path, mode="a") as again:
        fill(again, 20, start=1000)
        batch = again.sample(5000, order="prioritized", alpha=1.0, beta=1.0, seed=2)

    counts = dict(zip(*np.unique(batch["indices"], return_counts=True), strict=True))
    new = [i for i, action in zip(batch["indices"], batch["action"], strict=True) if action >= 1000]
    low = set(first[1:].tolist()) - {int(first[0])}
    assert len(new) > 0.2 * 5000
    assert sum(counts.get(i, 0) for i in low) < 20
    # The weight undoes the probability: all rows count alike.
    heavy = batch["weights"][batch["indices"] == first[0]]
    assert len(heavy) > 0
    rest = batch["weights"][[int(i) in low for i in batch["indices"]]]
    if len(rest):
        assert heavy[0] == pytest.approx(rest[0] * 0.001 / 8.0)


def test_an_update_of_an_evicted_row_is_ignored_and_counted(tmp_path: Path) -> None:
    with zbuffer.create(tmp_path / "b", SCHEMA, chunk_rows=16, capacity=64) as buffer:
        fill(buffer, 60)
        ids = buffer.sample(30, seed=0)["indices"]
        buffer.update_priorities(ids, np.ones(30))
        fill(buffer, 200, start=60)
        buffer.flush()

        assert buffer.update_priorities(ids, np.full(30, 5.0)) == 30
        assert buffer.update_priorities([buffer.first_row, 0], [1.0, 1.0]) == 1
        buffer.sample(64, order="prioritized")


@pytest.mark.parametrize("value", [np.nan, np.inf, 0.0, -1.0])
def test_a_priority_that_cannot_be_is_refused_and_changes_nothing(
    buffer: zbuffer.Buffer, value: float
) -> None:
    before = buffer.sample(64, order="prioritized", seed=4)["indices"]

    with pytest.raises(zbuffer.SampleError, match="row 3"):
        buffer.update_priorities([2, 3], [9.0, value])

    np.testing.assert_array_equal(buffer.sample(64, order="prioritized", seed=4)["indices"], before)


def sample_by_priority(buffer: zbuffer.Buffer, queue: Any) -> None:
    queue.put(len(buffer.sample(8, order="prioritized")["indices"]))


@pytest.mark.skipif(
    "fork" not in multiprocessing.get_all_start_methods(), reason="there is no fork here"
)
@pytest.mark.filterwarnings("ignore:This process .* is multi-threaded:DeprecationWarning")
def test_a_forked_child_does_not_wait_for_priorities_that_its_parent_was_changing(
    buffer: zbuffer.Buffer,
) -> None:
    buffer.update_priorities(buffer.sample(20, seed=0)["indices"], np.ones(20))
    context = multiprocessing.get_context("fork")
    queue = context.Queue()
    with buffer._priorities._lock:
        child = context.Process(target=sample_by_priority, args=(buffer, queue))
        child.start()

        assert queue.get(timeout=60) == 8
    child.join(60)
    queue.close()
    queue.join_thread()


def test_beta_may_be_a_schedule_of_the_batchs_number(buffer: zbuffer.Buffer) -> None:
    buffer.update_priorities(buffer.sample(300, seed=0)["indices"], np.arange(1.0, 301.0))
    asked: list[int] = []

    def beta(step: int) -> float:
        asked.append(step)
        return min(0.4 + 0.1 * step, 1.0)

    with buffer.loader(16, order="prioritized", beta=beta, prefetch=0) as loader:
        for _ in range(4):
            next(loader)

    assert sorted(set(asked)) == [0, 1, 2, 3]


# -- samplers of one's own -----------------------------------------------------------


class Newest:
    """The newest rows, each other row half as likely as the one after it."""

    def draw(self, n: int, rows: zbuffer.RowSet, rng: np.random.Generator, /) -> zbuffer.Draw:
        back = np.minimum(rng.geometric(0.5, n), len(rows))
        return zbuffer.Draw(rows.ids(len(rows) - back))


def test_a_sampler_of_ones_own_plugs_in(buffer: zbuffer.Buffer) -> None:
    batch = buffer.sample(64, order=Newest())
    with buffer.loader(64, order=Newest(), prefetch=0) as loader:
        again = next(loader)

    newest = buffer.take(batch["indices"])["action"].max()
    assert batch["action"].min() > newest - 40
    assert again["action"].min() > newest - 40


class Wrong:
    def draw(self, n: int, rows: zbuffer.RowSet, rng: np.random.Generator, /) -> zbuffer.Draw:
        return zbuffer.Draw(np.full(n, rows.stop + 5))


def test_a_sampler_that_draws_rows_that_are_not_there_is_told_so(buffer: zbuffer.Buffer) -> None:
    with pytest.raises(zbuffer.SampleError, match=r"the sampler drew row \d+, which is not"):
        buffer.sample(8, order=Wrong())


# -- pace ------------------------------------------------------------------------------


def test_a_loader_waits_for_rows_and_takes_them_as_they_come(tmp_path: Path) -> None:
    with zbuffer.create(tmp_path / "b", SCHEMA, chunk_rows=32) as buffer:
        got = threading.Event()
        batches: list[Any] = []
        loader = buffer.loader(8, min_rows=50, prefetch=1)

        def take() -> None:
            batches.append(next(loader))
            got.set()

        thread = threading.Thread(target=take)
        thread.start()
        fill(buffer, 40)
        assert not got.wait(0.2)
        fill(buffer, 40, start=40)
        assert got.wait(10)
        thread.join()
        assert loader.statistics().paced_s > 0
        loader.close()


def test_learning_does_not_run_ahead_of_collecting(tmp_path: Path) -> None:
    with zbuffer.create(tmp_path / "b", SCHEMA, chunk_rows=32) as buffer:
        fill(buffer, 40)
        with buffer.loader(8, samples_per_insert=1.0, tolerance=8, prefetch=0) as loader:
            taken = 0
            while taken <= len(buffer) + 8 - 8:
                next(loader)
                taken += 8
            stopped = threading.Event()

            def take() -> None:
                with pytest.raises(zbuffer.ClosedError):
                    list(loader)
                stopped.set()

            thread = threading.Thread(target=take)
            thread.start()
            assert not stopped.wait(0.2)
        # Closing the loader ends the wait.
        assert stopped.wait(10)
        thread.join()


def test_a_loader_says_when_collecting_is_ahead(tmp_path: Path) -> None:
    with (
        zbuffer.create(tmp_path / "b", SCHEMA, chunk_rows=32) as buffer,
        buffer.loader(8, samples_per_insert=1.0, tolerance=16, prefetch=0) as loader,
    ):
        fill(buffer, 16)
        assert loader.may_append(0)
        fill(buffer, 40, start=16)
        assert not loader.may_append()
        assert not loader.wait_to_append(timeout_s=0.01)
        for _ in range(7):
            next(loader)
        assert loader.wait_to_append(10, timeout_s=1.0)


def test_loading_a_state_ends_a_wait_for_rows(tmp_path: Path) -> None:
    with (
        zbuffer.create(tmp_path / "b", SCHEMA, chunk_rows=32) as buffer,
        buffer.loader(8, min_rows=100, prefetch=2) as loader,
    ):
        loader.load_state_dict(loader.state_dict())
        fill(buffer, 120)

        assert len(next(loader)["indices"]) == 8


def test_a_follower_paces_itself_by_the_rows_of_the_writer(tmp_path: Path) -> None:
    with zbuffer.create(tmp_path / "b", SCHEMA, chunk_rows=32) as buffer:
        with zbuffer.open(tmp_path / "b") as reader, reader.loader(8, min_rows=30) as loader:
            fill(buffer, 64)
            batch = next(loader)

        assert batch["obs"].shape == (8, 800)


# -- many buffers as one ---------------------------------------------------------------


def three(folder: Path) -> list[Path]:
    paths = [folder / f"run-{i}" for i in range(3)]
    for i, path in enumerate(paths):
        options: dict[str, Any] = {"chunk_rows": 16 << i}
        if i == 1:
            options = {"lanes": 2, "chunk_rows": 32, "segment_rows": 8, "capacity": 500}
        with zbuffer.create(path, SCHEMA, **options) as buffer:
            fill(buffer, 100 * (i + 1), start=1000 * i)
    return paths


def test_weights_say_how_likely_each_buffer_is(tmp_path: Path) -> None:
    paths = three(tmp_path)
    with zbuffer.open_many({paths[0]: 0.7, paths[1]: 0.1, paths[2]: 0.2}) as group:
        batch = group.sample(20_000, frame_stack=2, n_step=2, seed=1)

        share = np.bincount(batch["source"], minlength=3) / 20_000
        np.testing.assert_allclose(share, [0.7, 0.1, 0.2], atol=0.015)
        assert (batch["action"] // 1000 == batch["source"]).all()
        for i, buffer in enumerate(group.buffers):
            of = batch["source"] == i
            read = buffer.take(batch["indices"][of])
            np.testing.assert_array_equal(read["obs"], batch["obs"][of][:, -1])
        group.set_weights({paths[0]: 0, paths[1]: 1, paths[2]: 0})
        assert (group.sample(50)["source"] == 1).all()


def test_without_weights_all_rows_are_equally_likely_also_as_members_grow(tmp_path: Path) -> None:
    three(tmp_path)
    with (
        zbuffer.open_many(str(tmp_path / "run-*")) as group,
        zbuffer.open(tmp_path / "run-0", mode="a") as writer,
        group.loader(256, prefetch=0, seed=0) as loader,
    ):
        fill(writer, 2000, start=5000)
        source = np.concatenate([next(loader)["source"] for _ in range(40)])
        lengths = np.array([len(buffer) for buffer in group.buffers])

        assert lengths[0] == 2100
        assert len(group) == lengths.sum()
        np.testing.assert_allclose(
            np.bincount(source) / len(source), lengths / lengths.sum(), atol=0.03
        )


def test_new_buffers_are_found_on_refresh(tmp_path: Path) -> None:
    paths = three(tmp_path / "a")
    paths[2].rename(tmp_path / "later")
    with (
        zbuffer.open_many(tmp_path / "a" / "run-*") as group,
        group.loader(64, prefetch=0) as loader,
    ):
        before = set(next(loader)["source"].tolist())
        (tmp_path / "later").rename(paths[2])
        assert group.refresh() == 1
        assert group.refresh() == 0
        after = {s for _ in range(20) for s in next(loader)["source"].tolist()}

    assert (before, after) == ({0, 1}, {0, 1, 2})


def test_a_new_buffer_of_a_group_with_weights_waits_for_one(tmp_path: Path) -> None:
    paths = three(tmp_path / "a")
    paths[2].rename(tmp_path / "later")
    with zbuffer.open_many(tmp_path / "a" / "run-*") as group:
        group.set_weights({paths[0]: 1, paths[1]: 1})
        with group.loader(64, prefetch=2) as loader:
            (tmp_path / "later").rename(paths[2])
            group.refresh()
            seen = {s for _ in range(10) for s in next(loader)["source"].tolist()}

        assert seen == {0, 1}
        assert group.weights == {str(paths[0]): 1, str(paths[1]): 1, str(paths[2]): 0}


def test_a_sampler_that_keeps_a_state_is_refused_by_a_group(tmp_path: Path) -> None:
    with (
        zbuffer.open_many(three(tmp_path)) as group,
        pytest.raises(ValueError, match="a sampler that keeps a state is of one buffer"),
    ):
        group.loader(8, order=EpochSampler())


def test_a_mixed_loader_can_be_resumed(tmp_path: Path) -> None:
    paths = three(tmp_path)
    with zbuffer.open_many(paths) as group:
        with group.loader(32, seed=9) as loader:
            next(loader)
            state = loader.state_dict()
            wanted = [next(loader)["indices"] for _ in range(3)]
        with group.loader(32, seed=9) as loader:
            loader.load_state_dict(state)
            found = [next(loader)["indices"] for _ in range(3)]

    np.testing.assert_array_equal(wanted, found)


def test_priorities_go_to_the_buffer_that_a_row_is_of(tmp_path: Path) -> None:
    with zbuffer.open_many(three(tmp_path)) as group:
        batch = group.sample(64, order="prioritized", seed=0)
        ignored = group.update_priorities(
            batch["indices"], np.full(64, 1e-6), source=batch["source"]
        )
        again = group.sample(500, order="prioritized", alpha=1.0, seed=1)

    assert ignored == 0
    low = set(zip(batch["source"].tolist(), batch["indices"].tolist(), strict=True))
    drawn = set(zip(again["source"].tolist(), again["indices"].tolist(), strict=True))
    assert not low & drawn


def test_buffers_that_differ_in_a_sampled_field_are_refused_by_its_name(tmp_path: Path) -> None:
    with zbuffer.create(tmp_path / "a", SCHEMA) as a:
        fill(a, 20)
    with zbuffer.create(tmp_path / "b", {**SCHEMA, "action": ((2,), "float32")}) as b:
        b.append(
            obs=np.zeros(800, np.int32),
            action=np.zeros(2, np.float32),
            reward=0.0,
            terminated=True,
            truncated=False,
        )
    with zbuffer.open_many([tmp_path / "a", tmp_path / "b"]) as group:
        with pytest.raises(zbuffer.SchemaError) as caught:
            group.sample(4)
        batch = group.sample(640, fields=["obs", "reward"], seed=0)

    assert "field 'action' is int64 () in" in str(caught.value)
    assert set(batch["source"].tolist()) == {0, 1}


@pytest.mark.parametrize(
    ("weights", "message"),
    [
        ([1.0, -1.0, 1.0], "must be 0 or more, got -1.0"),
        ([0.0, 0.0, 0.0], "at least one weight must be above 0"),
        ([1.0, float("nan"), 1.0], "must be 0 or more, got nan"),
    ],
)
def test_weights_that_cannot_be_are_refused(
    tmp_path: Path, weights: list[float], message: str
) -> None:
    paths = three(tmp_path)

    with pytest.raises(ValueError, match=message):
        zbuffer.open_many(dict(zip(paths, weights, strict=True)))


def test_a_pattern_that_fits_nothing_is_an_error(tmp_path: Path) -> None:
    with pytest.raises(zbuffer.BufferNotFoundError, match="no buffer fits"):
        zbuffer.open_many(tmp_path / "none-*")


def test_buffers_that_were_given_open_stay_open(tmp_path: Path) -> None:
    with zbuffer.create(tmp_path / "b", SCHEMA) as buffer:
        fill(buffer, 30)
        with zbuffer.open_many([buffer]) as group:
            assert len(group.sample(4)["indices"]) == 4
        assert len(buffer) == 30
        with pytest.raises(zbuffer.ClosedError):
            group.sample(4)


# -- exact probabilities through the whole path -------------------------------------------


@pytest.mark.parametrize("order", [UniformSampler(), "blocks", "prioritized"])
def test_each_step_has_its_exact_probability(buffer: zbuffer.Buffer, order: Any) -> None:
    options = {"alpha": 1.0} if order == "prioritized" else {}
    counts: dict[int, int] = {}
    n = 0
    for seed in range(40):
        for i in buffer.sample(2500, order=order, fields=["action"], seed=seed, **options)[
            "indices"
        ].tolist():
            counts[i] = counts.get(i, 0) + 1
            n += 1

    expected = n / len(counts)
    chi2 = sum((c - expected) ** 2 / expected for c in counts.values())
    degrees = len(counts) - 1
    assert len(buffer) - buffer.lanes <= len(counts) <= len(buffer)
    # Groups of rows come together: their counts are less even than those of single rows.
    spread = 4 if order == "blocks" else 1
    assert chi2 < spread * (degrees + 5 * (2 * degrees) ** 0.5)
