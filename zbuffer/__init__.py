"""A replay buffer that lives on disk, compressed, and is sampled at the speed of RAM."""

from __future__ import annotations

from zbuffer.buffer import Buffer
from zbuffer.errors import (
    BufferExistsError,
    BufferLockedError,
    BufferNotFoundError,
    ClosedError,
    DamagedError,
    EpisodeError,
    NotABufferError,
    ReadOnlyError,
    RowNotFoundError,
    SampleError,
    SchemaError,
    StorageError,
    ZBufferError,
)
from zbuffer.format.geometry import Codec
from zbuffer.loading.batch import Batch
from zbuffer.loading.loader import Loader
from zbuffer.many import BufferGroup, open_many
from zbuffer.opening import create, open
from zbuffer.sampling.episodes import Episode, Episodes
from zbuffer.sampling.rowset import RowSet
from zbuffer.sampling.samplers import Draw, Sampler
from zbuffer.schema import Field, Schema

__version__ = "0.1.0"

__all__ = [
    "Batch",
    "Buffer",
    "BufferExistsError",
    "BufferGroup",
    "BufferLockedError",
    "BufferNotFoundError",
    "ClosedError",
    "Codec",
    "DamagedError",
    "Draw",
    "Episode",
    "EpisodeError",
    "Episodes",
    "Field",
    "Loader",
    "NotABufferError",
    "ReadOnlyError",
    "RowNotFoundError",
    "RowSet",
    "SampleError",
    "Sampler",
    "Schema",
    "SchemaError",
    "StorageError",
    "ZBufferError",
    "create",
    "open",
    "open_many",
]
