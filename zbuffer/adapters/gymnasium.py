"""Record what an environment of Gymnasium, or a vector of them, goes through."""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping
from typing import Any

import numpy as np

import zbuffer

try:
    import gymnasium
except ImportError as error:
    raise ImportError('recording needs Gymnasium: pip install "zbuffer[gymnasium]"') from error

Array = np.ndarray[Any, Any]
Target = str | os.PathLike[str] | zbuffer.Buffer


def RecordBuffer(
    env: gymnasium.Env[Any, Any] | gymnasium.vector.VectorEnv, target: Target, **options: Any
) -> RecordEnv | RecordVectorEnv:
    """Wrap an environment so that each step is appended to a buffer.

    Parameters
    ----------
    env
        An environment, or a vector environment with any autoreset mode.
    target
        A path, where a buffer is created, or is gone on with if there is one; or a buffer
        that is open for writing, which stays open when the environment is closed.
    **options
        For :func:`zbuffer.create`: ``capacity``, ``overwrite`` and so on.

    Returns
    -------
    RecordEnv or RecordVectorEnv
        The wrapped environment; its ``buffer`` is the buffer.
    """
    if isinstance(env, gymnasium.vector.VectorEnv):
        return RecordVectorEnv(env, target, **options)
    return RecordEnv(env, target, **options)


class RecordEnv(gymnasium.Wrapper[Any, Any, Any, Any]):
    """One environment whose steps are appended to a buffer; see :func:`RecordBuffer`."""

    def __init__(self, env: gymnasium.Env[Any, Any], target: Target, **options: Any) -> None:
        super().__init__(env)
        self.buffer, self._owned = _open(env, target, 1, options)
        self._obs: Any = None
        self._running = False

    def reset(
        self, *, seed: int | None = None, options: dict[str, Any] | None = None
    ) -> tuple[Any, dict[str, Any]]:
        """Begin an episode; one that runs is cut."""
        if self._running:
            self.buffer.end_episode()
        obs, info = self.env.reset(seed=seed, options=options)
        self._obs, self._running = _copied(obs), False
        return obs, info

    def step(self, action: Any) -> tuple[Any, Any, bool, bool, dict[str, Any]]:
        """Take a step, and append it."""
        obs, reward, terminated, truncated, info = self.env.step(action)
        following = _copied(obs)
        self.buffer.append(
            obs=self._obs,
            action=action,
            reward=float(reward),
            terminated=bool(terminated),
            truncated=bool(truncated),
            next_obs=following,
        )
        self._obs, self._running = following, not (terminated or truncated)
        return obs, reward, terminated, truncated, info

    def close(self) -> None:
        """Close the environment, and the buffer if it was opened here."""
        if self._owned:
            self.buffer.close()
        super().close()


class RecordVectorEnv(gymnasium.vector.VectorWrapper):
    """A vector environment whose lanes are recorded side by side; see :func:`RecordBuffer`.

    Each environment is a lane of the buffer. Where an environment was reset within a
    step, its last observation is taken from ``info["final_obs"]``; a step that only
    resets (next-step autoreset) is not recorded.
    """

    def __init__(self, env: gymnasium.vector.VectorEnv, target: Target, **options: Any) -> None:
        super().__init__(env)
        self.buffer, self._owned = _open(env, target, env.num_envs, options)
        mode = env.metadata.get("autoreset_mode", gymnasium.vector.AutoresetMode.NEXT_STEP)
        self._mode = gymnasium.vector.AutoresetMode(mode)
        self._obs: Any = None
        self._running = np.zeros(env.num_envs, bool)
        self._over = np.zeros(env.num_envs, bool)

    def reset(
        self, *, seed: int | list[int | None] | None = None, options: dict[str, Any] | None = None
    ) -> tuple[Any, dict[str, Any]]:
        """Begin an episode in each lane, or in those of ``options["reset_mask"]``."""
        chosen = np.ones(self.num_envs, bool)
        if options is not None and "reset_mask" in options:
            chosen = np.asarray(options["reset_mask"], bool)
        cut = np.flatnonzero(self._running & chosen)
        if len(cut):
            self._end(cut)
        obs, info = self.env.reset(seed=seed, options=options)
        self._obs = _copied(obs)
        self._running[chosen] = self._over[chosen] = False
        return obs, info

    def step(self, actions: Any) -> tuple[Any, Array, Array, Array, dict[str, Any]]:
        """Take a step in each lane, and append them."""
        obs, reward, terminated, truncated, info = self.env.step(actions)
        begins = _copied(obs)
        following = begins
        done = np.asarray(terminated) | np.asarray(truncated)
        if self._mode is gymnasium.vector.AutoresetMode.SAME_STEP and done.any():
            following = _with_final(begins, info, done)
        lanes = np.arange(self.num_envs)
        if self._mode is gymnasium.vector.AutoresetMode.NEXT_STEP:
            lanes = lanes[~self._over]
        if len(lanes):
            self._append(lanes, actions, reward, terminated, truncated, following)
        self._running[lanes] = ~done[lanes]
        self._obs = begins
        self._over = done
        return obs, reward, terminated, truncated, info

    def close(self, **kwargs: Any) -> None:
        """Close the environments, and the buffer if it was opened here."""
        if self._owned:
            self.buffer.close()
        super().close(**kwargs)

    def _append(
        self,
        lanes: Array,
        actions: Any,
        reward: Any,
        terminated: Any,
        truncated: Any,
        following: Any,
    ) -> None:
        row = {
            "obs": _taken(self._obs, lanes),
            "action": _taken(actions, lanes),
            "reward": np.asarray(reward, self.buffer.schema["reward"].dtype)[lanes],
            "terminated": np.asarray(terminated, bool)[lanes],
            "truncated": np.asarray(truncated, bool)[lanes],
            "next_obs": _taken(following, lanes),
        }
        if self.buffer.lanes > 1:
            self.buffer.append(**row, lanes=lanes)
        else:
            self.buffer.append(**{name: _taken(value, 0) for name, value in row.items()})

    def _end(self, lanes: Array) -> None:
        if self.buffer.lanes > 1:
            self.buffer.end_episode(lanes=lanes)
        else:
            self.buffer.end_episode()


def _open(
    env: Any, target: Target, lanes: int, options: dict[str, Any]
) -> tuple[zbuffer.Buffer, bool]:
    """Return the buffer of a target, and whether it was opened here."""
    if isinstance(target, zbuffer.Buffer):
        if options:
            raise TypeError(f"{sorted(options)[0]}= is for a buffer that is created here")
        buffer, owned = target, False
    else:
        exists = os.path.exists(os.path.join(os.path.expanduser(os.fspath(target)), "zarr.json"))
        if exists and not options.get("overwrite"):
            buffer = zbuffer.open(target, mode="a")
        else:
            schema = zbuffer.Schema.from_env(env)
            buffer = zbuffer.create(target, schema, lanes=lanes, **options)
        owned = True
    if buffer.lanes != lanes:
        found = buffer.lanes
        if owned:
            buffer.close()
        raise ValueError(
            f"{lanes} environments need a buffer with lanes={lanes}, this one has {found}"
        )
    return buffer, owned


def _copied(obs: Any) -> Any:
    """Return an observation that stays what it is when the environment steps on."""
    if isinstance(obs, Mapping):
        return {name: _copied(value) for name, value in obs.items()}
    if isinstance(obs, tuple):
        return tuple(_copied(value) for value in obs)
    return np.array(obs)


def _taken(value: Any, lanes: Any) -> Any:
    if isinstance(value, Mapping):
        return {name: _taken(part, lanes) for name, part in value.items()}
    if isinstance(value, tuple):
        return tuple(_taken(part, lanes) for part in value)
    return np.asarray(value)[lanes]


def _with_final(obs: Any, info: Mapping[str, Any], done: Array) -> Any:
    """Return the observations after a step, before the reset that came with it."""
    if "final_obs" not in info:
        raise ValueError("the environments were reset within a step, but info has no 'final_obs'")
    final = info["final_obs"]
    return _replaced(obs, lambda lane: _of_lane(final, lane), np.flatnonzero(done))


def _of_lane(final: Any, lane: int) -> Any:
    """Return one lane's observation: of a nesting of arrays, or of an array of observations."""
    if isinstance(final, Mapping):
        return {name: _of_lane(part, lane) for name, part in final.items()}
    if isinstance(final, tuple):
        return tuple(_of_lane(part, lane) for part in final)
    return final[lane]


def _replaced(obs: Any, final: Callable[[int], Any], lanes: Array) -> Any:
    if isinstance(obs, Mapping | tuple):
        keys = list(obs) if isinstance(obs, Mapping) else list(range(len(obs)))
        parts = {key: _replaced(obs[key], _part(final, key), lanes) for key in keys}
        return parts if isinstance(obs, Mapping) else tuple(parts.values())
    replaced = np.array(obs)
    for lane in lanes.tolist():
        replaced[lane] = final(lane)
    return replaced


def _part(final: Callable[[int], Any], key: Any) -> Callable[[int], Any]:
    return lambda lane: final(lane)[key]
