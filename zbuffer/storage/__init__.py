"""Where bytes lie: one small Protocol, and the local disk behind it."""

from __future__ import annotations

from typing import Any, Protocol


class Store(Protocol):
    """Keys to bytes; what readers and writers need of a place.

    A write replaces the whole value at once: a reader sees the old bytes or the
    new ones. Safe to call from any thread.
    """

    @property
    def path(self) -> str:
        """Where this is, for messages."""
        ...

    def read(self, key: str) -> bytes:
        """Return the bytes at `key`; FileNotFoundError where there are none."""
        ...

    def map(self, key: str) -> Any:
        """Return the bytes at `key` as a read-only buffer that stays what it is."""
        ...

    def write(self, key: str, data: bytes) -> None:
        """Put `data` at `key`."""
        ...

    def delete(self, key: str) -> None:
        """Remove `key`; nothing happens where it does not exist."""
        ...

    def version(self, key: str) -> object:
        """Return a value that changes when the bytes at `key` do; None where missing."""
        ...

    def size(self, key: str) -> int:
        """Return how many bytes lie at `key`."""
        ...
