"""Priorities beside the rows: the array ``meta/priorities``."""

from __future__ import annotations

import json
from typing import Any

import google_crc32c
import numpy as np

from zbuffer.errors import DamagedError
from zbuffer.format import layout
from zbuffer.storage import Store

Array = np.ndarray[Any, Any]
Kept = tuple[int, Array, float]


class PriorityStore:
    """Writes and reads the priorities of one buffer.

    Notes
    -----
    For one thread at a time.
    """

    def __init__(self, store: Store) -> None:
        self._store = store
        self._written: dict[int, int] = {}

    def save(self, kept: Kept, first_row: int) -> None:
        """Write priorities by row id, those parts of them that have changed.

        Parameters
        ----------
        kept
            Id of the first, float64 from there on, 0 where there is no row; and the
            largest that there ever was.
        first_row
            The buffer's oldest row: parts before it are removed.
        """
        first, values, largest = kept
        size = layout.PRIORITY_CHUNK
        stop = first + len(values)
        for part in range(first // size, -(-stop // size)):
            start = part * size
            full = np.zeros(size, "<f8")
            low, high = max(start, first), min(start + size, stop)
            full[low - start : high - start] = values[low - first : high - first]
            data = full.tobytes()
            checksum = google_crc32c.value(data)
            if self._written.get(part) != checksum:
                key = layout.priorities_path(part)
                self._store.write(key, data + checksum.to_bytes(4, "little"))
                self._written[part] = checksum
        document = layout.priorities_document(stop, largest)
        self._store.write(f"{layout.PRIORITIES}/zarr.json", layout.dump(document))
        for part in [part for part in self._written if part < first_row // size]:
            self._store.delete(layout.priorities_path(part))
            del self._written[part]

    def load(self, first_row: int) -> Kept | None:
        """Return what was written, from a row on; None where nothing was.

        Raises
        ------
        DamagedError
            A file does not hold together.
        """
        where = f"{self._store.path}/{layout.PRIORITIES}"
        try:
            document = json.loads(self._store.read(f"{layout.PRIORITIES}/zarr.json"))
            stop = int(document["shape"][0])
            largest = float(document["attributes"]["max_priority"])
        except FileNotFoundError:
            return None
        except (KeyError, TypeError, ValueError) as error:
            raise DamagedError(f"{where}/zarr.json does not hold together: {error}") from error
        size = layout.PRIORITY_CHUNK
        values = np.zeros(max(stop - first_row, 0))
        for part in range(first_row // size, -(-stop // size)):
            try:
                data = self._store.read(layout.priorities_path(part))
            except FileNotFoundError:
                continue
            checksum = google_crc32c.value(data[:-4])
            if len(data) != 8 * size + 4 or checksum.to_bytes(4, "little") != data[-4:]:
                raise DamagedError(f"{where}/c/{part} does not match its checksum")
            self._written[part] = checksum
            full = np.frombuffer(data[:-4], "<f8")
            low, high = max(part * size, first_row), min((part + 1) * size, stop)
            values[low - first_row : high - first_row] = full[
                low - part * size : high - part * size
            ]
        if not np.isfinite(values).all() or (values < 0).any():
            raise DamagedError(f"{where} has values that are no priorities")
        return first_row, values, largest
