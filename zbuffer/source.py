"""What can be sampled: the methods that one buffer and many as one have in common."""

from __future__ import annotations

import os
import secrets
import threading
from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from zbuffer.errors import SampleError
from zbuffer.loading.batch import Assembled, Batch
from zbuffer.loading.loader import Loader, LoaderOptions, check_count
from zbuffer.loading.maker import Maker
from zbuffer.loading.memory import Recycler
from zbuffer.loading.pace import Pace, PaceKeeper
from zbuffer.loading.upload import Transform, Uploader, make_uploader
from zbuffer.sampling.rowset import RowSet
from zbuffer.sampling.samplers import Sampler, generator
from zbuffer.sampling.sequences import Boundary, Span
from zbuffer.sampling.windows import Window


@dataclass(frozen=True, slots=True)
class Request:
    """What kind of batches is wanted, in which order."""

    shape: Window | Span
    fields: Sequence[str] | None
    order: str | Sampler
    order_options: tuple[tuple[str, Any], ...]
    batch_size: int
    seed: int = 0
    rank: int = 0
    world_size: int = 1


class BatchSource(ABC):
    """Rows to sample: a buffer, or several as one."""

    def __init__(self) -> None:
        self._loaders: list[Loader] = []
        self._random = _Random()
        self._last_maker: tuple[Any, Any] = (None, None)
        self._begin_anew()

    def sample(
        self,
        batch_size: int = 256,
        *,
        frame_stack: int | None = None,
        n_step: int = 1,
        gamma: float = 0.99,
        fields: Sequence[str] | None = None,
        order: str | Sampler = "uniform",
        seed: int | np.random.Generator | None = None,
        **order_options: Any,
    ) -> Batch:
        """Draw steps.

        Parameters
        ----------
        batch_size
            Number of steps ``B``.
        frame_stack
            Observations per stack, within the episode, its first one repeated
            before its start. Adds an axis: ``(B, frame_stack, *item)``. By
            default one observation, without that axis.
        n_step, gamma
            ``reward`` is the discounted sum of up to `n_step` rewards, stopping
            where the episode ends; ``next_obs`` is the observation after them.
        fields
            Names to deliver, ``"next_obs"`` among them; all by default.
        order
            ``"uniform"``: every step with the same probability, with replacement.
            ``"blocks"``, ``"prioritized"``, or a sampler of your own: see :meth:`loader`.
        seed
            A number or a generator, for draws that can be repeated.
        **order_options
            What the order takes.

        Returns
        -------
        Batch
            NumPy arrays: the fields, ``next_obs``, and ``indices`` (int64 row ids),
            ``n_steps`` (int64, how many rewards were summed), ``discount``
            (float32, ``gamma ** n_steps``, 0 where the episode terminated: what
            the value of ``next_obs`` is multiplied with) and ``mask`` (bool,
            False where no observation after the steps is stored, which is only
            so at terminated steps; there the newest frame of ``next_obs`` is zero).
            ``terminated`` and ``truncated`` are those of the last step that was summed.
            With ``n_step=1``, ``obs`` and ``next_obs`` are overlapping views of one
            array. ``weights`` (float64) where the
            order has them.

        Raises
        ------
        SampleError
            The buffer is empty, or no row has such a window.

        Notes
        -----
        Steps without a stored observation after them (the newest of a stream, the
        last before a cut) and steps whose stack was evicted are not drawn.
        """
        self._check_open()
        if order == "epoch":
            raise ValueError("order='epoch' has a place where it stands: use loader()")
        asked = (frame_stack, n_step, gamma, _listed(fields), order, batch_size)
        wanted = (*asked, tuple(sorted(order_options.items())))
        last, maker = self._last_maker
        if last != wanted:
            check_count("batch_size", batch_size, 1)
            window = Window(frame_stack, n_step, gamma)
            request = Request(window, asked[3], order, wanted[-1], batch_size)
            maker = self._make_maker(request, make_uploader(None, 1, self._memory), None)
            self._last_maker = (wanted, maker)
        made = maker.make(batch_size, self._random.generator(seed))
        if made is None:
            raise SampleError("the sampler has no rows left")
        batch: Batch = made.ready.batch
        return batch

    def loader(
        self,
        batch_size: int = 256,
        *,
        frame_stack: int | None = None,
        n_step: int = 1,
        gamma: float = 0.99,
        fields: Sequence[str] | None = None,
        order: str | Sampler = "uniform",
        device: Any = None,
        prefetch: int = 2,
        seed: int = 0,
        transform: Callable[[Batch], Any] | None = None,
        min_rows: int = 0,
        samples_per_insert: float | None = None,
        tolerance: float | None = None,
        rank: int = 0,
        world_size: int = 1,
        **order_options: Any,
    ) -> Loader:
        """Return an iterator of batches, made ahead on a thread.

        Parameters
        ----------
        batch_size, frame_stack, n_step, gamma, fields
            As in :meth:`sample`.
        order
            ``"uniform"``: every step with the same probability, with replacement.

            ``"blocks"``: groups of rows that are decoded together, several groups a
            batch; as likely as ``"uniform"`` row by row, and several times faster, but
            the rows of a group are neighbours. Takes ``rows_per_group`` (8) or
            ``groups_per_batch``.

            ``"epoch"``: every row once. Iterating over the loader is one epoch. Takes
            ``pool_rows`` (16384: so many rows are shuffled together at most, and whole
            chunks of them are kept decoded: 84x84 frames take 115 MB) and ``drop_last``
            (False).

            ``"prioritized"``: as likely as ``priority ** alpha`` (Schaul et al. 2016).
            Takes ``alpha`` (0.6) and ``beta`` (0.4; a number, or a function of the batch's
            number); batches have ``weights``. New rows have the largest priority there
            was; see :meth:`Buffer.update_priorities`.

            Or an object with ``draw(n, rows, rng)``, see :class:`zbuffer.Sampler`.
        device
            None for NumPy arrays; ``"cpu"`` for torch tensors; ``"cuda"`` for
            tensors there, copied from pinned memory on a stream of their own.
        prefetch
            Batches made ahead; 0 makes each when it is asked for.
        seed
            With the same seed and the same rows, the same batches follow.
        transform
            Called with each batch on the prefetch thread; its answer is handed out.
        min_rows
            Rows that have to be there before the first batch; the loader waits for them.
        samples_per_insert
            How often a row may be sampled on average: where learning is ahead, the loader
            waits for rows, of this process or of another.
        tolerance
            Samples by which learning may be ahead of that.
        rank, world_size
            Which of how many processes this is: with ``"epoch"`` they share the rows out,
            with the other orders each has random numbers of its own.
        **order_options
            What the order takes.
        """
        window = Window(frame_stack, n_step, gamma)
        options = LoaderOptions(batch_size, prefetch, seed, rank, world_size)
        pace = Pace(min_rows, samples_per_insert, tolerance)
        return self._loader(window, fields, order, order_options, options, pace, device, transform)

    def sequences(
        self,
        batch_size: int,
        length: int,
        *,
        burn_in: int = 0,
        boundary: Boundary = "stop",
        stride: int = 1,
        fields: Sequence[str] | None = None,
        order: str | Sampler = "uniform",
        device: Any = None,
        prefetch: int = 2,
        seed: int = 0,
        transform: Callable[[Batch], Any] | None = None,
        rank: int = 0,
        world_size: int = 1,
        **order_options: Any,
    ) -> Loader:
        """Return an iterator of batches of sequences: steps that follow each other.

        Parameters
        ----------
        batch_size
            Number of sequences ``B``.
        length, burn_in
            A sequence has ``T = burn_in + length`` steps.
        boundary
            ``"stop"``: only sequences that lie in one episode. ``"pad"``: a sequence
            ends with its episode; ``mask`` is False after that, and the fields zero.
            ``"cross"``: a sequence goes on with the next episode of its lane;
            ``is_first`` says where.
        stride
            Only every so manieth step of an episode begins a sequence.
        fields
            Names to deliver; by default all, without ``next_obs``.
        order, device, prefetch, seed, transform, rank, world_size, **order_options
            As in :meth:`loader`; the order is that of the first steps.

        Returns
        -------
        Loader
            Of batches with the fields, each ``(B, T, *item)``, and ``mask``,
            ``is_first``, ``is_last``, ``is_terminal`` (bool) and ``indices`` (int64 row
            ids), each ``(B, T)``. Where ``next_obs`` is asked for, ``next_mask`` says
            where it is stored.

        Raises
        ------
        SampleError
            By ``next()``: no step begins such a sequence.
        """
        span = Span(length, burn_in, boundary, stride)
        options = LoaderOptions(batch_size, prefetch, seed, rank, world_size)
        pace = Pace()
        return self._loader(span, fields, order, order_options, options, pace, device, transform)

    def sample_episodes(
        self,
        n: int,
        *,
        fields: Sequence[str] | None = None,
        seed: int | np.random.Generator | None = None,
    ) -> Batch:
        """Draw whole episodes, uniformly and with replacement.

        Parameters
        ----------
        n
            Number of episodes.
        fields
            As in :meth:`sequences`.
        seed
            As in :meth:`sample`.

        Returns
        -------
        Batch
            As :meth:`sequences` gives with ``boundary="pad"``, ``T`` the length of the
            longest of them.

        Raises
        ------
        SampleError
            No episode is there from its first step to its end.
        """
        self._check_open()
        check_count("n", n, 1)
        return self._draw_episodes(n, _listed(fields), self._random.generator(seed)).batch()

    # -- what a source has to bring ------------------------------------------

    @abstractmethod
    def _check_open(self) -> None: ...

    @abstractmethod
    def _make_maker(
        self, request: Request, uploader: Uploader, transform: Transform | None
    ) -> Maker: ...

    @abstractmethod
    def _draw_episodes(
        self, n: int, fields: Sequence[str] | None, rng: np.random.Generator
    ) -> Assembled: ...

    @abstractmethod
    def _row_sets(self) -> list[RowSet]: ...

    @abstractmethod
    def _n_appended(self) -> int: ...

    # -- inside ----------------------------------------------------------------

    def _loader(
        self,
        shape: Window | Span,
        fields: Sequence[str] | None,
        order: str | Sampler,
        order_options: dict[str, Any],
        options: LoaderOptions,
        pace: Pace,
        device: Any,
        transform: Transform | None,
    ) -> Loader:
        self._check_open()
        request = Request(
            shape,
            _listed(fields),
            order,
            tuple(sorted(order_options.items())),
            int(options.batch_size),
            int(options.seed),
            options.rank,
            options.world_size,
        )
        # A slot for each batch made ahead, one for the batch being made, and one for
        # the batch whose copies may still run.
        uploader = make_uploader(device, options.prefetch + 2, self._memory)
        maker = self._make_maker(request, uploader, transform)
        keeper = None if pace == Pace() else PaceKeeper(pace, self._n_appended)
        loader = Loader(maker, options, self._row_sets, keeper)
        self._loaders = [other for other in self._loaders if not other.closed]
        self._loaders.append(loader)
        return loader

    def _begin_anew(self) -> None:
        """Let go of what threads of a forked parent may have held."""
        self._memory = Recycler()
        self._last_maker = (None, None)

    def _close_loaders(self) -> None:
        for loader in self._loaders:
            loader.close()


def _listed(fields: Sequence[str] | None) -> Sequence[str] | None:
    return fields if fields is None or isinstance(fields, str) else tuple(fields)


class _Random(threading.local):
    """The generators of :meth:`BatchSource.sample`, one set for each thread."""

    def __init__(self) -> None:
        self._own: np.random.Generator | None = None
        self._pid = 0

    def generator(self, seed: int | np.random.Generator | None) -> np.random.Generator:
        """Return the numbers that a seed names; without one, new ones."""
        if isinstance(seed, np.random.Generator):
            return seed
        if seed is not None:
            return generator(check_count("seed", seed, 0), 0)
        if self._own is None or self._pid != os.getpid():
            # A forked child draws numbers of its own.
            self._own, self._pid = generator(secrets.randbits(63), 0), os.getpid()
        return self._own
