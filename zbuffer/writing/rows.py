"""What the caller passed to arrays that fit the schema, or one clear error."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import numpy as np

from zbuffer.errors import SchemaError
from zbuffer.schema import Field, Schema, flatten, is_tensor

Array = np.ndarray[Any, Any]


class RowReader:
    """Checks rows against a schema.

    Exact in dtype and shape for arrays; a scalar field also takes Python scalars
    and NumPy scalars that fit without loss. Nothing is clipped, padded or dropped.
    """

    def __init__(self, schema: Schema) -> None:
        self._schema = schema
        self._fields = dict(schema)
        self._convert = {name: _converter(name, field) for name, field in schema.items()}
        self._convert_next = {
            name: _converter(f"next_{name}", schema[name]) for name in schema.observations
        }
        self._next_of = {}
        if not schema.explicit:
            self._next_of = {f"next_{name}": name for name in schema.observations}
        self._transition_keys = self._fields.keys() | self._next_of.keys()

    def step(self, row: Mapping[str, Any]) -> tuple[dict[str, Any], dict[str, Any] | None]:
        """Return the checked fields of one step, and its next observation where given."""
        keys = row.keys()
        following = None
        if keys != self._fields.keys():
            if keys != self._transition_keys:
                row = flatten(row)
            row, following = self._split(row)
        values = {}
        try:
            for name, convert in self._convert.items():
                values[name] = convert(row[name])
        except KeyError as error:
            raise self._missing(error.args[0], row) from None
        return values, following

    def steps(self, rows: Mapping[str, Any]) -> tuple[dict[str, Array], dict[str, Array] | None]:
        """Return the checked fields of many steps, and their next observations where given."""
        row, raw_following = self._split_raw(flatten(rows))
        missing = set(self._fields) - set(row)
        if missing:
            raise self._missing(sorted(missing)[0], row)
        values = {name: self.many(name, value) for name, value in row.items()}
        following = None
        if raw_following is not None:
            following = {
                name: self.many(name, value, f"next_{name}")
                for name, value in raw_following.items()
            }
        lengths = {name: len(value) for name, value in values.items()}
        lengths.update({f"next_{name}": len(value) for name, value in (following or {}).items()})
        first = next(iter(lengths))
        for name, length in lengths.items():
            if length != lengths[first]:
                raise SchemaError(name, f"has {length} rows where {first!r} has {lengths[first]}")
        return values, following

    def observation(self, row: Mapping[str, Any]) -> dict[str, Any]:
        """Return the checked fields of one observation."""
        row = flatten(row)
        names = self._schema.observations
        for name in names:
            if name not in row:
                raise self._missing(name, row)
        if len(row) != len(names):
            raise SchemaError(sorted(set(row) - set(names))[0], "is not part of the observation")
        return {name: self._convert[name](row[name]) for name in names}

    def many(self, name: str, value: Any, said: str | None = None) -> Array:
        """Return `value` as an array of items of a field; safe casts of scalars only."""
        field = self._fields[name]
        said = said or name
        wanted = f"{field.dtype} (n, {', '.join(map(str, field.shape))}".rstrip(", ") + ")"
        try:
            array = _as_array(value)
        except (TypeError, ValueError) as error:
            kind = type(value).__name__
            raise SchemaError(said, f"must be {wanted}, got {kind}: {error}") from None
        if array.ndim == 0 or array.shape[1:] != field.shape:
            raise SchemaError(said, f"must be {wanted}, got {array.dtype} {array.shape}")
        if array.dtype != field.dtype:
            if not _may_cast(array, field, value):
                raise SchemaError(said, f"must be {wanted}, got {array.dtype} {array.shape}")
            array = array.astype(field.dtype)
        return array

    def _split(self, row: Mapping[str, Any]) -> tuple[dict[str, Any], dict[str, Any] | None]:
        row, following = self._split_raw(row)
        if following is None:
            return row, None
        checked = {name: self._convert_next[name](value) for name, value in following.items()}
        return row, checked

    def _split_raw(self, row: Mapping[str, Any]) -> tuple[dict[str, Any], dict[str, Any] | None]:
        """Take the next observation out of a row; all of its parts, or none."""
        unknown = row.keys() - self._transition_keys
        if unknown:
            raise self._unknown(unknown)
        given = [key for key in self._next_of if key in row]
        if not given:
            return dict(row), None
        for key in self._next_of:
            if key not in row:
                raise self._missing(key, row)
        following = {self._next_of[key]: row[key] for key in given}
        return {k: v for k, v in row.items() if k not in self._next_of}, following

    def _missing(self, name: str, row: Mapping[str, Any]) -> SchemaError:
        came = ", ".join(sorted(row)) or "nothing"
        return SchemaError(name, f"is missing: every row needs all fields, got {came}")

    def _unknown(self, names: set[str]) -> SchemaError:
        return SchemaError(
            sorted(names)[0], f"is not in the schema, which has {', '.join(self._fields)}"
        )


def _converter(name: str, field: Field) -> Callable[[Any], Any]:
    dtype, shape = field.dtype, field.shape

    def convert(value: Any) -> Any:
        if type(value) is np.ndarray and value.dtype == dtype and value.shape == shape:
            return value
        return _one(name, field, value)

    def convert_scalar(value: Any) -> Any:
        kind = type(value)
        if kind is exact:
            return value
        if kind is float and floating:
            return value if -largest <= value <= largest else _one(name, field, value)
        if kind is int and whole and least <= value <= most:
            return value
        return _one(name, field, value)

    if shape == ():
        floating = dtype.kind == "f"
        largest = float(np.finfo(dtype).max) if floating else 0.0
        whole = dtype.kind in "iu"
        least, most = (np.iinfo(dtype).min, np.iinfo(dtype).max) if whole else (0, 0)
        # A record's type is np.void whatever its fields are, and so on: only the
        # types of numbers tell the whole dtype.
        exact = bool if dtype.kind == "b" else (dtype.type if dtype.kind in "fiuc" else None)
        return convert_scalar
    return convert


def _one(name: str, field: Field, value: Any) -> Array:
    """Return one item as an array of the field's dtype and shape, or raise."""
    try:
        array = _as_array(value)
    except (TypeError, ValueError) as error:
        raise SchemaError(name, f"must be {field}, got {type(value).__name__}: {error}") from None
    if array.shape != field.shape:
        raise SchemaError(name, f"must be {field}, got {array.dtype} {array.shape}")
    if array.dtype == field.dtype:
        return array
    if not _may_cast(array, field, value):
        raise SchemaError(name, f"must be {field}, got {array.dtype} {array.shape}")
    with np.errstate(over="ignore"):
        result = array.astype(field.dtype)
    return result


def _may_cast(array: Array, field: Field, value: Any) -> bool:
    """Whether values go into the field's dtype as they are (rounding of Python floats aside).

    Arrays of items with a shape have to be of the dtype, whatever its byte order;
    scalars may be of any type that holds no more than the field's.
    """
    if array.dtype.newbyteorder("=") == field.dtype.newbyteorder("="):
        return True
    # np.float64 is a Python float, and is rounded to the field like one.
    python = isinstance(value, bool | int | float | complex | str | bytes | list)
    if field.shape != () and not isinstance(value, list):
        return False
    if field.dtype.kind in "SUV":
        return array.dtype.kind == field.dtype.kind and np.can_cast(
            array.dtype, field.dtype, "safe"
        )
    if np.can_cast(array.dtype, field.dtype, "safe") and field.dtype.kind not in "Mm":
        return array.dtype.kind != "b" or field.dtype.kind == "b"
    if not python:
        return False
    if field.dtype.kind in "iu" and array.dtype.kind in "iu":
        info = np.iinfo(field.dtype)
        return array.size == 0 or (int(array.min()) >= info.min and int(array.max()) <= info.max)
    if field.dtype.kind in "fc" and array.dtype.kind in "iuf":
        finite = array[np.isfinite(array)]
        largest = np.finfo(field.dtype).max
        return finite.size == 0 or bool(np.abs(finite.astype("longdouble")).max() <= largest)
    return field.dtype.kind == "c" and array.dtype.kind == "c"


def _as_array(value: Any) -> Array:
    if is_tensor(value):
        # A CPU tensor becomes a view; a CUDA tensor is copied to the host once.
        return value.detach().cpu().resolve_conj().resolve_neg().numpy()  # type: ignore[no-any-return]  # torch is not imported here
    array = np.asarray(value)
    if array.dtype.hasobject:
        raise TypeError("Python objects are not stored")
    return array
