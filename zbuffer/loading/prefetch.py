"""A bounded pipeline: one thread makes items ahead, another takes them."""

from __future__ import annotations

import threading
import time
from collections import deque
from collections.abc import Callable
from typing import Generic, TypeVar

from zbuffer.errors import ClosedError

T = TypeVar("T")


class Prefetcher(Generic[T]):
    """Calls `make` on a thread, at most `depth` items ahead.

    Notes
    -----
    One thread takes items. An error of `make` is raised by :meth:`take`, once the
    items made before it are taken; the thread ends with it.
    """

    def __init__(self, make: Callable[[], T], depth: int) -> None:
        self._make = make
        self._depth = depth
        self._items: deque[T] = deque()
        self._changed = threading.Condition()
        self._error: BaseException | None = None
        self._closed = False
        self._thread = threading.Thread(target=self._run, name="zbuffer-prefetch", daemon=True)
        self._thread.start()

    def take(self) -> tuple[T, float]:
        """Return the next item, and the seconds waited for it."""
        start = time.perf_counter()
        with self._changed:
            self._changed.wait_for(lambda: self._items or self._error or self._closed)
            if self._items:
                item = self._items.popleft()
                self._changed.notify_all()
                return item, time.perf_counter() - start
            if self._error is not None:
                raise self._error
            raise ClosedError("the loader is closed")

    def close(self) -> None:
        """End the thread and drop what it made."""
        with self._changed:
            self._closed = True
            self._items.clear()
            self._changed.notify_all()
        if self._thread is not threading.current_thread():
            self._thread.join()

    def _run(self) -> None:
        while True:
            with self._changed:
                self._changed.wait_for(lambda: self._closed or len(self._items) < self._depth)
                if self._closed:
                    return
            try:
                item = self._make()
            except BaseException as error:
                with self._changed:
                    self._error = error
                    self._changed.notify_all()
                return
            with self._changed:
                if self._closed:
                    return
                self._items.append(item)
                self._changed.notify_all()
