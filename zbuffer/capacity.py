"""What a user may say as a capacity: rows, or bytes on disk."""

from __future__ import annotations

import math
import re
from typing import Any

_UNITS = {"b": 1}
_UNITS |= {f"{p}b": 1000 ** (i + 1) for i, p in enumerate("kmgt")}
_UNITS |= {f"{p}ib": 1024 ** (i + 1) for i, p in enumerate("kmgt")}
_BYTES = re.compile(r"\s*([0-9]+(?:\.[0-9]+)?)\s*([kmgt]?i?b)\s*\Z", re.IGNORECASE)


def read_capacity(capacity: Any) -> tuple[int | None, int | None]:
    """Return the capacity in rows and in bytes on disk; None where there is no limit.

    Examples
    --------
    >>> read_capacity(1_000_000)
    (1000000, None)
    >>> read_capacity("20GB")
    (None, 20000000000)
    """
    if capacity is None:
        return None, None
    if isinstance(capacity, str):
        match = _BYTES.match(capacity)
        if match is None:
            raise _wrong(capacity)
        nbytes = int(float(match[1]) * _UNITS[match[2].lower()])
        if nbytes < 1:
            raise _wrong(capacity)
        return None, nbytes
    try:
        value = float(capacity)
    except (TypeError, ValueError, OverflowError):
        raise _wrong(capacity) from None
    if isinstance(capacity, bool) or not math.isfinite(value) or value != int(value) or value < 1:
        raise _wrong(capacity)
    return int(capacity), None


def format_nbytes(nbytes: float) -> str:
    """Return bytes in a unit that people read.

    Examples
    --------
    >>> format_nbytes(1_300_000)
    '1.3 MB'
    """
    for unit in ("B", "kB", "MB", "GB"):
        if nbytes < 1000:
            return f"{nbytes:.0f} B" if unit == "B" else f"{nbytes:.1f} {unit}"
        nbytes /= 1000
    return f"{nbytes:.1f} TB"


def _wrong(capacity: Any) -> ValueError:
    return ValueError(
        f"capacity must be a whole number of rows above 0, or bytes such as '20GB', "
        f"got {capacity!r}"
    )
