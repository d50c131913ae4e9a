"""Recording environments of Gymnasium, and buffers as datasets of PyTorch."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import zbuffer

gymnasium = pytest.importorskip("gymnasium")

from gymnasium import spaces  # noqa: E402
from gymnasium.vector import AutoresetMode, SyncVectorEnv  # noqa: E402

from zbuffer.adapters.gymnasium import RecordBuffer  # noqa: E402

Array = np.ndarray[Any, Any]


class Counter(gymnasium.Env):  # type: ignore[misc]  # gymnasium is not looked into
    """Observations say lane, episode and step; episodes of lane i have 3 + i steps."""

    def __init__(self, lane: int, kind: str = "box") -> None:
        self.lane, self.kind = lane, kind
        self.episode = self.t = -1
        box = spaces.Box(0, 10_000, (3,), np.int64)
        self.observation_space: Any = box
        if kind == "dict":
            self.observation_space = spaces.Dict({"a": box, "b": spaces.Dict({"c": box})})
        self.action_space = spaces.Discrete(1000)

    def obs(self) -> Any:
        here = np.array([self.lane, self.episode, self.t])
        return here if self.kind == "box" else {"a": here, "b": {"c": here + 1}}

    def reset(self, *, seed: Any = None, options: Any = None) -> Any:
        self.episode += 1
        self.t = 0
        return self.obs(), {}

    def step(self, action: Any) -> Any:
        self.t += 1
        done = self.t == 3 + self.lane
        truncated = done and self.episode % 2 == 1
        return self.obs(), float(self.t), done and not truncated, truncated, {}


def check(buffer: zbuffer.Buffer, n_lanes: int, kind: str) -> None:
    """Check that the buffer holds each lane's episodes, bit for bit, and nothing else."""
    name = "obs" if kind == "box" else "obs/a"
    for lane in range(n_lanes):
        episodes = [e for e in buffer.episodes if e.lane == lane]
        for number, episode in enumerate(episodes):
            whole = number < len(episodes) - 1 or episode.ended != "running"
            (rows,) = buffer._row_sets()
            n = episode.length + (1 if whole else 0)
            ids = rows.path(np.array([episode.start]), 0, n - 1)[0]
            read = buffer.take(ids)
            wanted = [[lane, number, t] for t in range(n)]
            np.testing.assert_array_equal(read[name], wanted)
            if kind == "dict":
                np.testing.assert_array_equal(read["obs/b/c"], np.array(wanted) + 1)
            steps = slice(0, episode.length)
            np.testing.assert_array_equal(read["reward"][steps], np.arange(1, episode.length + 1))
            if whole:
                assert episode.length == 3 + lane
                assert episode.ended == ("truncated" if number % 2 else "terminated")
                assert read["step_type"][-1] == 2


@pytest.mark.parametrize("mode", [AutoresetMode.NEXT_STEP, AutoresetMode.SAME_STEP])
@pytest.mark.parametrize("kind", ["box", "dict"])
@pytest.mark.parametrize("n_lanes", [1, 3])
def test_a_vector_environment_is_recorded_lane_by_lane(
    tmp_path: Path, mode: Any, kind: str, n_lanes: int
) -> None:
    made = [lambda i=i: Counter(i, kind) for i in range(n_lanes)]
    env = RecordBuffer(SyncVectorEnv(made, autoreset_mode=mode), tmp_path / "b", chunk_rows=32)
    env.reset(seed=0)

    for t in range(60):
        env.step(np.full(n_lanes, t))

    check(env.buffer, n_lanes, kind)
    n_steps = len(env.buffer)
    if mode is AutoresetMode.SAME_STEP:
        assert n_steps == 60 * n_lanes
    else:
        assert n_steps == sum(60 - 60 // (4 + lane) for lane in range(n_lanes))
    env.close()
    with zbuffer.open(tmp_path / "b") as closed:
        assert len(closed) == n_steps


def test_a_single_environment_is_recorded_and_a_reset_cuts_its_episode(tmp_path: Path) -> None:
    env = RecordBuffer(Counter(4), tmp_path / "b")
    env.reset()
    for _ in range(7):
        env.step(1)
    env.reset()
    env.step(1)
    env.reset()
    for _ in range(7):
        env.step(1)

    assert env.buffer.episodes.ended.tolist() == ["terminated", "cut", "terminated"]
    assert env.buffer.episodes.length.tolist() == [7, 1, 7]
    env.close()


def test_recording_goes_on_with_a_buffer_that_is_there(tmp_path: Path) -> None:
    for _ in range(2):
        env = RecordBuffer(Counter(0), tmp_path / "b")
        env.reset()
        for _ in range(3):
            env.step(0)
        env.close()

    with zbuffer.open(tmp_path / "b") as buffer:
        assert len(buffer) == 6


def test_a_buffer_with_another_number_of_lanes_is_refused(tmp_path: Path) -> None:
    RecordBuffer(Counter(0), tmp_path / "b").close()

    with pytest.raises(ValueError, match="2 environments need a buffer with lanes=2"):
        RecordBuffer(SyncVectorEnv([lambda: Counter(0)] * 2), tmp_path / "b")


# -- datasets -----------------------------------------------------------------------------


def write(path: Path, n: int = 600) -> None:
    numbers = np.arange(n)
    with zbuffer.create(
        path,
        {
            "obs": ((40,), "int32"),
            "action": ((), "int64"),
            "reward": ((), "float32"),
            "terminated": ((), "bool"),
            "truncated": ((), "bool"),
        },
        chunk_rows=64,
    ) as buffer:
        buffer.extend(
            obs=np.broadcast_to(numbers[:, None], (n, 40)).astype(np.int32),
            action=numbers,
            reward=np.ones(n, np.float32),
            terminated=numbers % 10 == 9,
            truncated=np.zeros(n, bool),
        )


@pytest.mark.parametrize("method", ["fork", "forkserver", "spawn"])
def test_workers_share_an_epoch_out_whatever_the_start_method(tmp_path: Path, method: str) -> None:
    pytest.importorskip("torch")
    from torch.utils.data import DataLoader

    from zbuffer.adapters.dataloader import BufferStream

    write(tmp_path / "b")
    with zbuffer.open(tmp_path / "b") as opened:
        opened.sample(4)  # the parent has used the buffer before it forks
        orders = []
        for epoch in range(2):
            stream = BufferStream(tmp_path / "b", 32, order="epoch", seed=1)
            stream.set_epoch(epoch)
            loader = DataLoader(
                stream, batch_size=None, num_workers=2, multiprocessing_context=method
            )
            actions = [int(a) for batch in loader for a in batch["action"]]
            assert sorted(actions) == list(range(600))
            orders.append(actions)

    assert orders[0] != orders[1]


def test_ranks_of_a_stream_are_disjoint_and_complete(tmp_path: Path) -> None:
    pytest.importorskip("torch")
    from zbuffer.adapters.dataloader import BufferStream

    write(tmp_path / "b")
    actions: list[int] = []
    for rank in range(3):
        stream = BufferStream(tmp_path / "b", 32, order="epoch", rank=rank, world_size=3)
        actions += [int(a) for batch in stream for a in batch["action"]]
    uniform = []
    for rank in range(2):
        stream = BufferStream(tmp_path / "b", 32, n_batches=3, rank=rank, world_size=2)
        uniform.append([int(a) for batch in stream for a in batch["action"]])

    assert sorted(actions) == list(range(600))
    assert [len(u) for u in uniform] == [96, 96]
    assert uniform[0] != uniform[1]


@pytest.mark.parametrize("workers", [0, 2])
def test_a_dataset_gives_each_step_by_its_number(tmp_path: Path, workers: int) -> None:
    torch = pytest.importorskip("torch")
    from torch.utils.data import DataLoader

    from zbuffer.adapters.dataloader import BufferDataset

    write(tmp_path / "b")
    dataset = BufferDataset(tmp_path / "b", frame_stack=2)
    loader = DataLoader(
        dataset, batch_size=50, shuffle=True, num_workers=workers, collate_fn=dataset.collate
    )

    actions = []
    for batch in loader:
        assert batch["obs"].shape == (50, 2, 40)
        assert torch.equal(batch["obs"][:, -1, 0], batch["action"].int())
        actions += batch["action"].tolist()
    one = dataset[7]

    assert sorted(actions) == list(range(600))
    assert int(one["action"]) == 7
    assert one["obs"].shape == (2, 40)


def test_without_gymnasium_the_error_says_what_to_install() -> None:
    code = (
        "import sys; sys.modules['gymnasium'] = None\n"
        "try:\n    import zbuffer.adapters.gymnasium\n"
        "except ImportError as error:\n    print(error)\n"
    )

    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)

    assert done.stdout == 'recording needs Gymnasium: pip install "zbuffer[gymnasium]"\n'


def train(rank: int, path: str, rendezvous: str, queue: Any) -> None:
    """Be one process of distributed training: say which rows it saw."""
    import torch.distributed as distributed

    from zbuffer.adapters.dataloader import BufferStream

    distributed.init_process_group(
        "gloo", init_method=f"file://{rendezvous}", rank=rank, world_size=2
    )
    stream = BufferStream(path, 32, order="epoch", seed=3)
    queue.put((rank, [int(a) for batch in stream for a in batch["action"]]))
    distributed.barrier()
    distributed.destroy_process_group()


def test_processes_of_distributed_training_share_an_epoch_out(tmp_path: Path) -> None:
    torch = pytest.importorskip("torch")
    if not (torch.distributed.is_available() and torch.distributed.is_gloo_available()):
        pytest.skip("this PyTorch has no gloo")
    write(tmp_path / "b")
    context = torch.multiprocessing.get_context("spawn")
    queue = context.Queue()
    arguments = (str(tmp_path / "b"), str(tmp_path / "rendezvous"), queue)
    children = [context.Process(target=train, args=(rank, *arguments)) for rank in range(2)]
    for child in children:
        child.start()

    seen = dict(queue.get(timeout=120) for _ in children)

    for child in children:
        child.join(60)
    queue.close()
    queue.join_thread()
    assert [child.exitcode for child in children] == [0, 0]
    assert len(seen[0]) == len(seen[1]) == 300
    assert sorted(seen[0] + seen[1]) == list(range(600))
