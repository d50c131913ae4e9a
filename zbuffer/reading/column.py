"""A field as an array over the live rows."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import numpy as np

from zbuffer.errors import RowNotFoundError
from zbuffer.reading.chunks import View
from zbuffer.reading.rows import Rows

_SLAB_ROWS = 1024


class ColumnView:
    """Array-like over one field: position 0 is the oldest live row, -1 the newest.

    Indexing gives NumPy arrays. The view follows the buffer: its length grows with
    each row, and position 0 moves on when rows are evicted.
    """

    def __init__(self, rows: Rows, view: Callable[[], View], name: str) -> None:
        self._rows = rows
        self._view = view
        self._name = name
        self._field = rows.fields[name]

    @property
    def dtype(self) -> np.dtype[Any]:
        """The field's dtype."""
        return self._field.dtype

    @property
    def shape(self) -> tuple[int, ...]:
        """Live rows, then the shape of an item."""
        return (len(self), *self._field.shape)

    @property
    def ndim(self) -> int:
        """Number of axes, that of rows included."""
        return 1 + len(self._field.shape)

    def __len__(self) -> int:
        return self._view().n_rows

    def __getitem__(self, index: Any) -> Any:
        """Return items as NumPy: an int, a slice, an array of positions or of bools.

        A tuple's further parts index the item's axes.
        """
        rest: tuple[Any, ...] = ()
        if isinstance(index, tuple):
            index, rest = (index[0], index[1:]) if index else (slice(None), ())
        if index is Ellipsis:
            index, rest = slice(None), ((Ellipsis, *rest) if rest else ())
        if not isinstance(index, int | slice | np.integer) and index is not None:
            index = np.zeros(0, np.int64) if _is_empty_list(index) else np.asarray(index)
        items, ids = self._take(index)
        if rest:
            lead = (slice(None),) * ids.ndim
            return items[(*lead, *rest)]
        return items if ids.ndim or self._field.shape else items[()]

    def _take(self, index: Any) -> tuple[Any, np.ndarray[Any, Any]]:
        """Return the items at an index, and their rows."""
        while True:
            view = self._view()
            # NumPy's own rules turn the index into positions, and raise its errors.
            positions = np.arange(view.n_rows)[index]
            ids = view.ids(np.asarray(positions, np.int64))
            try:
                return self._rows.take(view, self._name, ids), ids
            except RowNotFoundError:
                # Rows that were evicted since the look are not at these positions any more.
                if self._view().first == view.first:
                    raise

    def __iter__(self) -> Iterator[Any]:
        for start in range(0, len(self), _SLAB_ROWS):
            yield from self[start : start + _SLAB_ROWS]

    def __array__(self, dtype: Any = None, copy: bool | None = None) -> np.ndarray[Any, Any]:
        if copy is False:
            raise ValueError("the rows are compressed: an array of them is always a copy")
        items: np.ndarray[Any, Any] = self[:]
        return items if dtype is None else items.astype(dtype)

    def __repr__(self) -> str:
        return f"<zbuffer column {self._name!r} {self.dtype} {self.shape}>"


def _is_empty_list(index: Any) -> bool:
    return isinstance(index, list) and not index
