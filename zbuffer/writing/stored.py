"""Chunks that are stored, read back by a writer."""

from __future__ import annotations

from typing import Any

import numpy as np

from zbuffer.errors import DamagedError
from zbuffer.format import layout
from zbuffer.format.commit import Commit
from zbuffer.storage import Store

Array = np.ndarray[Any, Any]


def read_chunk(store: Store, commit: Commit, name: str, chunk: int) -> Array:
    """Return one chunk of a field, decoded.

    Raises
    ------
    DamagedError
        It is not there, or not what the schema says.
    """
    import blosc2

    field = commit.fields[name]
    key = layout.chunk_path(name, field, chunk)
    try:
        raw = blosc2.decompress2(store.read(key)[:-4], nthreads=1)
    except (FileNotFoundError, RuntimeError, ValueError) as error:
        raise DamagedError(f"{store.path}/{key} cannot be decoded: {error}") from error
    wanted = field.nbytes * commit.chunk_rows
    if len(raw) != wanted:
        raise DamagedError(f"{store.path}/{key} holds {len(raw)} bytes, wanted {wanted}")
    return np.frombuffer(raw, field.dtype).reshape(commit.chunk_rows, *field.shape)
