"""What a buffer is, in a few lines of text."""

from __future__ import annotations

from zbuffer.capacity import format_nbytes
from zbuffer.format.commit import Commit
from zbuffer.reading.chunks import View
from zbuffer.schema import Schema
from zbuffer.storage.local import LocalStore


def summary(
    store: LocalStore,
    schema: Schema,
    view: View,
    commit: Commit,
    *,
    steps: int,
    mode: str,
    gather: str,
) -> str:
    """Return the repr of a buffer: rows, bytes in chunk files, fields."""
    chunks = sum(size for _, size in store.walk("data"))
    raw = (commit.rows - commit.first_row) * commit.row_nbytes
    ratio = f" for {format_nbytes(raw)} ({raw / chunks:.1f}x smaller)" if raw else ""
    lanes = f" of {commit.lanes} lanes" if commit.lanes > 1 else ""
    fields = "\n".join(f"  {name}: {field}" for name, field in schema.items())
    return (
        f"<zbuffer.Buffer {store.name} mode={mode!r}\n"
        f"  {steps} steps{lanes} in rows {view.first} to {view.stop}, "
        f"{view.stop - commit.rows} of them in the tail, capacity {commit.capacity}\n"
        f"  {format_nbytes(chunks)} of chunks{ratio}, {gather} gather\n"
        f"{fields}>"
    )
