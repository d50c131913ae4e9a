"""Train a small DQN on an Atari game, from frames that live on disk, compressed.

    python examples/train_dqn.py                        # about two minutes on two cores
    python examples/train_dqn.py --game Pong --steps 1000000
    python examples/train_dqn.py --toy                  # a few seconds, to see that all is wired up

One process plays, stores and learns. Every step goes into a buffer on disk as
one 84x84 frame; the loader draws batches from the same buffer in the
background, stacks four frames, sums three rewards and hands over tensors.

Two minutes are 80,000 frames of the game; published agents see 10 to 200
million. So expect a curve that leaves random play behind and no more; for a
real agent raise `--steps`.
"""

from __future__ import annotations

import argparse
import os
import random
import sys
import time
from collections import deque
from pathlib import Path

import ale_py
import gymnasium as gym
import numpy as np
import torch
from gymnasium.wrappers import AtariPreprocessing
from matplotlib.figure import Figure  # pyplot would look for a display
from torch import nn
from tqdm import tqdm

import zbuffer

FRAME_STACK = 4
N_STEP = 3
GAMMA = 0.99
BATCH_SIZE = 32
TRAIN_EVERY = 4  # environment steps
TARGET_EVERY = 200  # updates
LEARNING_RATE = 5e-4
EPSILON_LAST = 0.02


def parse_args() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description="Train a small DQN from frames on disk.")
    parser.add_argument("--game", default="Breakout", help="a game of the ALE, e.g. Pong")
    parser.add_argument("--steps", type=int, default=20_000, help="environment steps")
    parser.add_argument("--path", type=Path, default=Path("runs/dqn.zarr"))
    parser.add_argument("--overwrite", action="store_true", help="replace the buffer at --path")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--toy", action="store_true", help="600 steps, to try the wiring")
    args = parser.parse_args()
    if args.toy:
        args.steps = 600
    if args.path.exists() and not args.overwrite:
        parser.error(f"{args.path} exists: choose another --path, or replace it with --overwrite")
    return args


def make_env(game: str) -> gym.Env:
    """The usual 84x84 gray frames, one in four; a game begins anew when a life is lost."""
    gym.register_envs(ale_py)
    env = gym.make(f"ALE/{game}-v5", frameskip=1, repeat_action_probability=0.0)
    return AtariPreprocessing(env, frame_skip=4, screen_size=84, terminal_on_life_loss=True)


class Player:
    """Plays one environment and appends every step to the buffer.

    It acts on the last four frames but stores single ones: the buffer stacks
    them again when they are drawn.
    """

    def __init__(self, env: gym.Env, buffer: zbuffer.Buffer, seed: int) -> None:
        self.env = env
        self.buffer = buffer
        self.returns: list[float] = []
        self._begin_episode(seed)

    def _begin_episode(self, seed: int | None = None) -> None:
        obs, _ = self.env.reset(seed=seed)
        self.frames = deque([obs] * FRAME_STACK, maxlen=FRAME_STACK)
        self.episode_return = 0.0

    def step(self, action: int) -> None:
        next_obs, reward, terminated, truncated, _ = self.env.step(action)
        self.buffer.append(
            obs=self.frames[-1],
            action=action,
            reward=reward,
            terminated=terminated,
            truncated=truncated,
            next_obs=next_obs,  # stored only where the episode ends: elsewhere it is the next obs
        )
        self.frames.append(next_obs)
        self.episode_return += float(reward)
        if terminated or truncated:
            self.returns.append(self.episode_return)
            self._begin_episode()


class QNetwork(nn.Module):
    """The network of the first DQN paper (Mnih et al. 2013): two convolutions, two layers."""

    def __init__(self, n_actions: int) -> None:
        super().__init__()
        self.layers = nn.Sequential(
            nn.Conv2d(FRAME_STACK, 16, kernel_size=8, stride=4),
            nn.ReLU(),
            nn.Conv2d(16, 32, kernel_size=4, stride=2),
            nn.ReLU(),
            nn.Flatten(),
            nn.Linear(32 * 9 * 9, 256),
            nn.ReLU(),
            nn.Linear(256, n_actions),
        )

    def forward(self, frames: torch.Tensor) -> torch.Tensor:
        return self.layers(frames.float() / 255)


class Agent:
    """DQN with n-step returns."""

    def __init__(self, n_actions: int, device: str) -> None:
        self.device = device
        self.online = QNetwork(n_actions).to(device)
        self.target = QNetwork(n_actions).to(device)
        self.target.load_state_dict(self.online.state_dict())
        self.optimizer = torch.optim.Adam(self.online.parameters(), LEARNING_RATE, fused=True)
        self.updates = 0

    @torch.no_grad()
    def best_action(self, frames: deque[np.ndarray]) -> int:
        stacked = torch.from_numpy(np.stack(frames)).to(self.device)
        return int(self.online(stacked[None]).argmax())

    def learn(self, batch: dict[str, torch.Tensor]) -> None:
        with torch.no_grad():
            future = self.target(batch["next_obs"]).max(dim=1).values
            # `reward` is the discounted sum of up to N_STEP rewards; `discount` is gamma to the
            # number of steps summed, and 0 where the episode terminated within them.
            wanted = batch["reward"].clamp(-1, 1) + batch["discount"] * future
        value = self.online(batch["obs"]).gather(1, batch["action"].long()[:, None]).squeeze(1)
        loss = nn.functional.smooth_l1_loss(value, wanted)
        self.optimizer.zero_grad()
        loss.backward()
        self.optimizer.step()

        self.updates += 1
        if self.updates % TARGET_EVERY == 0:
            self.target.load_state_dict(self.online.state_dict())


def train(args: argparse.Namespace) -> str:
    """Play and learn for `args.steps` steps; say what share of the time went into waiting."""
    random.seed(args.seed)
    torch.manual_seed(args.seed)
    torch.set_num_threads(min(4, os.cpu_count() or 1))  # so small a network gains nothing from more
    device = "cuda" if torch.cuda.is_available() else "cpu"

    env = make_env(args.game)
    n_actions = int(env.action_space.n)
    agent = Agent(n_actions, device)
    schema = zbuffer.Schema.from_env(env)
    waited_s = 0.0

    with (
        zbuffer.create(args.path, schema, capacity=1_000_000, overwrite=args.overwrite) as buffer,
        tqdm(total=args.steps, unit="step", mininterval=0.2 if sys.stderr.isatty() else 10) as bar,
    ):
        player = Player(env, buffer, args.seed)
        warmup = args.steps // 20
        for _ in range(warmup):
            player.step(random.randrange(n_actions))
            bar.update()

        start = time.perf_counter()
        with buffer.loader(
            batch_size=BATCH_SIZE,
            frame_stack=FRAME_STACK,
            n_step=N_STEP,
            gamma=GAMMA,
            device=device,
            prefetch=2,
            seed=args.seed,
        ) as batches:
            for step in range(warmup, args.steps):
                epsilon = max(EPSILON_LAST, 1 - step / (0.4 * args.steps))
                if random.random() < epsilon:
                    player.step(random.randrange(n_actions))
                else:
                    player.step(agent.best_action(player.frames))

                if step % TRAIN_EVERY == 0:
                    asked = time.perf_counter()
                    batch = next(batches)
                    waited_s += time.perf_counter() - asked
                    agent.learn(batch)

                bar.update()
                if player.returns and step % 50 == 0:
                    recent = f"{np.mean(player.returns[-50:]):.2f}"
                    bar.set_postfix({"return": recent, "epsilon": f"{epsilon:.2f}"}, refresh=False)
            n_batches = batches.statistics().batches
        training_s = time.perf_counter() - start

    env.close()
    share = f"{waited_s:.1f} s of {training_s:.1f} s of training ({waited_s / training_s:.1%})"
    return f"{share} for {n_batches:,} batches"


def plot_curve(episodes: zbuffer.Episodes, game: str, path: Path) -> None:
    """Draw the return of each finished episode over the steps played until its end."""
    finished = np.isin(episodes.ended, ["terminated", "truncated"])
    steps = np.cumsum(episodes.length)[finished]
    returns = episodes.returns[finished]

    figure = Figure(figsize=(7, 4), layout="constrained")
    axes = figure.subplots()
    axes.plot(steps, returns, ".", color="0.7", markersize=4, label="one episode")
    if n := -(-len(returns) // 10):
        mean = np.convolve(returns, np.full(n, 1 / n), mode="valid")
        axes.plot(steps[n - 1 :], mean, color="C0", linewidth=2, label=f"mean of {n}")
    axes.set(title=f"DQN on {game}", xlabel="environment steps", ylabel="return of one life")
    axes.legend(loc="upper left", frameon=False)
    axes.spines[["top", "right"]].set_visible(False)
    figure.savefig(path, dpi=120)


def main() -> None:
    begin = time.perf_counter()
    args = parse_args()
    waiting = train(args)

    buffer = zbuffer.open(args.path)
    episodes = buffer.episodes
    curve = args.path.with_suffix(".png")
    plot_curve(episodes, args.game, curve)

    rows, raw, stored = len(buffer["step_type"]), buffer.nbytes, buffer.nbytes_stored()
    n = max(1, len(episodes) // 10)
    first, last = episodes.returns[:n].mean(), episodes.returns[-n:].mean()
    print(
        f"""
buffer      {args.path}
rows        {rows:,} ({len(buffer):,} steps in {len(episodes):,} episodes)
raw         {raw / 1e6:.1f} MB
on disk     {stored / 1e6:.2f} MB, {raw / stored:.0f} times smaller
waiting     {waiting}
return      {first:.2f} in the first {n} episodes, {last:.2f} in the last {n}
curve       {curve}
total       {time.perf_counter() - begin:.0f} s"""
    )


if __name__ == "__main__":
    main()
