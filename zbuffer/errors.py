"""What can go wrong, grouped by what the caller can do about it.

::

    ZBufferError
    ├── SchemaError          (ValueError)        the data does not fit the schema
    ├── EpisodeError         (ValueError)        rows do not follow each other as said
    ├── SampleError          (ValueError)        nothing to draw, or a window that cannot be had
    ├── RowNotFoundError     (IndexError)        the row was evicted, or does not exist yet
    ├── BufferNotFoundError  (FileNotFoundError) no buffer there
    ├── BufferExistsError    (FileExistsError)   something is already there
    ├── NotABufferError      (ValueError)        something else is there
    ├── BufferLockedError    (BlockingIOError)   another writer holds the buffer
    ├── ReadOnlyError        (PermissionError)   opened for reading
    ├── ClosedError          (ValueError)        used after close()
    ├── DamagedError         (OSError)           a file of the buffer is damaged
    └── StorageError         (OSError)           the disk is full or out of reach
"""

from __future__ import annotations


class ZBufferError(Exception):
    """Anything that zbuffer raises on purpose."""


class SchemaError(ZBufferError, ValueError):
    """A schema, or a row, that does not fit.

    Parameters
    ----------
    field
        Name of the field at fault.
    problem
        The rest of the sentence: what was wanted and what came.
    """

    def __init__(self, field: str, problem: str) -> None:
        super().__init__(f"field {field!r} {problem}")
        self.field = field


class EpisodeError(ZBufferError, ValueError):
    """Rows do not follow each other in the way the call says."""


class SampleError(ZBufferError, ValueError):
    """There is nothing to draw, or no row has the window that was asked for."""


class RowNotFoundError(ZBufferError, IndexError):
    """A row id that was evicted or does not exist yet."""


class BufferNotFoundError(ZBufferError, FileNotFoundError):
    """There is no buffer at this path."""


class BufferExistsError(ZBufferError, FileExistsError):
    """There is already something at this path."""


class NotABufferError(ZBufferError, ValueError):
    """What lies at this path is not a zbuffer, or is of a newer format."""


class BufferLockedError(ZBufferError, BlockingIOError):
    """Another writer holds the buffer."""


class ReadOnlyError(ZBufferError, PermissionError):
    """The buffer was opened for reading."""


class ClosedError(ZBufferError, ValueError):
    """The buffer or the loader has been closed."""


class DamagedError(ZBufferError, OSError):
    """A file of the buffer does not hold what the commit says."""


class StorageError(ZBufferError, OSError):
    """The disk is full, or the store is out of reach."""
