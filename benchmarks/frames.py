"""Which frames do the benchmarks use?

Real ones: Atari games played by a random policy, recorded once into a cache folder.
`synthetic_frames` makes a small stand-in that compresses like them, for tests.

    python benchmarks/frames.py --games Breakout Seaquest --rows 32768
"""

from __future__ import annotations

import argparse
import os
from collections.abc import Iterator
from dataclasses import dataclass, fields, replace
from pathlib import Path
from typing import Any

import numpy as np

SIZE = 84
GAMES = ("Breakout", "Seaquest")


@dataclass(frozen=True, slots=True)
class Frames:
    """Recorded steps, one item a step; the last step always ends its episode.

    `ends` are the steps that end an episode and `final_obs` the observations after
    them. The observation after any other step is that of the next step.
    """

    obs: np.ndarray  # uint8 (n, 84, 84)
    action: np.ndarray  # int64 (n,)
    reward: np.ndarray  # float32 (n,)
    terminated: np.ndarray  # bool (n,)
    truncated: np.ndarray  # bool (n,)
    ends: np.ndarray  # int64 (episodes,)
    final_obs: np.ndarray  # uint8 (episodes, 84, 84)

    def __len__(self) -> int:
        return len(self.obs)

    def head(self, n: int) -> Frames:
        """Return the first `n` steps; an episode that runs on is truncated there."""
        if n >= len(self):
            return self
        whole = int(np.searchsorted(self.ends, n))
        ends, final_obs = self.ends[:whole], self.final_obs[:whole]
        truncated = self.truncated[:n]
        if whole == 0 or ends[-1] != n - 1:
            truncated = truncated.copy()
            truncated[-1] = True
            ends = np.append(ends, n - 1)
            final_obs = np.concatenate([final_obs, self.obs[n : n + 1]])
        return Frames(
            obs=self.obs[:n],
            action=self.action[:n],
            reward=self.reward[:n],
            terminated=self.terminated[:n],
            truncated=truncated,
            ends=ends,
            final_obs=final_obs,
        )

    def slab(self, start: int, stop: int) -> dict[str, np.ndarray]:
        """Return the steps ``[start, stop)`` as arrays for `Buffer.extend`."""
        stop = min(stop, len(self))
        next_obs = np.empty((stop - start, *self.obs.shape[1:]), self.obs.dtype)
        following = self.obs[start + 1 : stop + 1]
        next_obs[: len(following)] = following
        first, last = np.searchsorted(self.ends, [start, stop])
        next_obs[self.ends[first:last] - start] = self.final_obs[first:last]
        return {
            "obs": self.obs[start:stop],
            "action": self.action[start:stop],
            "reward": self.reward[start:stop],
            "terminated": self.terminated[start:stop],
            "truncated": self.truncated[start:stop],
            "next_obs": next_obs,
        }

    def slabs(self, n_steps: int) -> Iterator[dict[str, np.ndarray]]:
        """Yield all steps, `n_steps` at a time."""
        for start in range(0, len(self), n_steps):
            yield self.slab(start, start + n_steps)

    def steps(self) -> list[dict[str, Any]]:
        """Return one dict a step for `Buffer.append`, as a training loop would have it.

        The `next_obs` of a step is the very array that is `obs` of the next one.
        """
        obs = list(self.obs)
        next_obs = [*obs[1:], obs[-1]]
        for end, final in zip(self.ends.tolist(), self.final_obs, strict=True):
            next_obs[end] = final
        names = ("obs", "action", "reward", "terminated", "truncated", "next_obs")
        columns = (
            obs,
            self.action.tolist(),
            self.reward.tolist(),
            self.terminated.tolist(),
            self.truncated.tolist(),
            next_obs,
        )
        return [dict(zip(names, step, strict=True)) for step in zip(*columns, strict=True)]


def default_cache() -> Path:
    """Return the folder that recordings are kept in."""
    base = os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache"
    return Path(base) / "zbuffer-benchmarks"


def load(game: str, rows: int, cache: Path | None = None) -> Frames:
    """Return `rows` recorded steps of `game`, recording them where the cache has none."""
    folder = default_cache() if cache is None else cache
    path = folder / f"{game}-{rows}-seed0.npz"
    if not path.exists():
        folder.mkdir(parents=True, exist_ok=True)
        _save(path, record(game, rows))
    with np.load(path) as arrays:
        return Frames(**{field.name: arrays[field.name] for field in fields(Frames)})


def _save(path: Path, frames: Frames) -> None:
    # Under its final name only when whole: a recording cut short must not be read.
    partial = path.with_suffix(f".{os.getpid()}.partial")
    with partial.open("wb") as file:
        np.savez(file, **{field.name: getattr(frames, field.name) for field in fields(Frames)})
    partial.replace(path)


def make_env(game: str) -> Any:
    """Return the game as 84x84 gray frames, four frames a step."""
    import ale_py
    import gymnasium
    from gymnasium.wrappers import AtariPreprocessing

    gymnasium.register_envs(ale_py)
    env = gymnasium.make(f"ALE/{game}-v5", frameskip=1, repeat_action_probability=0.0)
    return AtariPreprocessing(env, frame_skip=4, screen_size=SIZE, grayscale_obs=True)


def record(game: str, rows: int, seed: int = 0) -> Frames:
    """Play `rows` steps of `game` with a random policy."""
    from tqdm import trange

    env = make_env(game)
    rng = np.random.default_rng(seed)
    frames = _empty(rows)
    ends: list[int] = []
    final_obs: list[np.ndarray] = []
    obs, _ = env.reset(seed=seed)
    for i in trange(rows, desc=f"recording {game}", unit="step"):
        action = int(rng.integers(env.action_space.n))
        frames.obs[i], frames.action[i] = obs, action
        obs, reward, terminated, truncated, _ = env.step(action)
        truncated = truncated or (i == rows - 1 and not terminated)
        frames.reward[i], frames.terminated[i], frames.truncated[i] = reward, terminated, truncated
        if terminated or truncated:
            ends.append(i)
            final_obs.append(np.array(obs))
            obs, _ = env.reset()
    env.close()
    return replace(frames, ends=np.array(ends, np.int64), final_obs=np.stack(final_obs))


def synthetic_frames(n: int, seed: int = 0) -> Frames:
    """Return `n` steps of a made-up game: a ball, a paddle and sprites before a fixed scene."""
    rng = np.random.default_rng(seed)
    scene = _scene(rng)
    sprites = rng.integers(60, 255, (4, 6, 5), dtype=np.uint8)
    frames = _empty(n)
    frames.action[:] = rng.integers(4, size=n)
    frames.reward[:] = rng.random(n) < 0.02
    _mark_ends(frames, rng)
    step_in_episode, paddle = 0, SIZE // 2
    observations = np.empty((n + 1, SIZE, SIZE), np.uint8)
    final_obs = []
    for i in range(n):
        observations[i] = _draw(scene, sprites, step_in_episode, paddle)
        step_in_episode += 1
        paddle = int(np.clip(paddle + 3 * (frames.action[i] - 1.5), 4, SIZE - 16))
        if frames.terminated[i] or frames.truncated[i]:
            final_obs.append(_draw(scene, sprites, step_in_episode, paddle))
            step_in_episode = 0
    ends = np.flatnonzero(frames.terminated | frames.truncated)
    return replace(frames, obs=observations[:n], ends=ends, final_obs=np.stack(final_obs))


def _empty(rows: int) -> Frames:
    return Frames(
        obs=np.zeros((rows, SIZE, SIZE), np.uint8),
        action=np.zeros(rows, np.int64),
        reward=np.zeros(rows, np.float32),
        terminated=np.zeros(rows, bool),
        truncated=np.zeros(rows, bool),
        ends=np.zeros(0, np.int64),
        final_obs=np.zeros((0, SIZE, SIZE), np.uint8),
    )


def _mark_ends(frames: Frames, rng: np.random.Generator) -> None:
    ended = rng.random(len(frames)) < 1 / 150
    is_truncation = rng.random(len(frames)) < 0.25
    frames.terminated[:] = ended & ~is_truncation
    frames.truncated[:] = ended & is_truncation
    frames.truncated[-1] = not frames.terminated[-1]


def _scene(rng: np.random.Generator) -> np.ndarray:
    scene = np.zeros((SIZE, SIZE), np.uint8)
    scene[:, :4] = scene[:, -4:] = 142
    for row in range(6):  # bricks, some of them already gone
        for column in range(4, 80, 4):
            if rng.random() < 0.8:
                scene[24 + 3 * row : 27 + 3 * row, column : column + 4] = 80 + 20 * row
    return scene


def _draw(scene: np.ndarray, sprites: np.ndarray, step: int, paddle: int) -> np.ndarray:
    frame = scene.copy()
    for k, sprite in enumerate(sprites):
        x = (step * (k + 1) + 17 * k) % (SIZE - 12) + 4
        frame[48 + 7 * k : 54 + 7 * k, x : x + 5] = sprite
    bounce = abs((2 * step) % 100 - 50)
    frame[26 + bounce : 28 + bounce, 6 + step % 72 : 8 + step % 72] = 200
    frame[79:81, paddle : paddle + 10] = 180
    score = step // 10 % 10
    frame[2:9, 30 : 30 + 2 * score + 1] = 142
    return frame


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--games", nargs="+", default=list(GAMES))
    parser.add_argument("--rows", type=int, default=32768)
    parser.add_argument("--cache", type=Path, default=None)
    args = parser.parse_args()
    for game in args.games:
        frames = load(game, args.rows, args.cache)
        print(f"{game}: {len(frames)} steps, {len(frames.ends)} episodes")


if __name__ == "__main__":
    main()
