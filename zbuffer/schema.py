"""What a row is: its fields, their shapes and dtypes, and the part each plays."""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal

import numpy as np
import numpy.typing as npt

from zbuffer.errors import SchemaError

ROLES = (
    "observation",
    "next_observation",
    "action",
    "reward",
    "terminated",
    "truncated",
    "extra",
)
STEP_TYPE = "step_type"

#: Names that batches and buffers use themselves.
RESERVED = frozenset(
    {STEP_TYPE, "indices", "weights", "mask", "discount", "n_steps", "source"}
    | {"is_first", "is_last", "is_terminal"}
)
_ROLE_OF_NAME = {
    "action": "action",
    "reward": "reward",
    "terminated": "terminated",
    "truncated": "truncated",
}
_PART = re.compile(r"[A-Za-z0-9_][A-Za-z0-9_.\-]*\Z")


@dataclass(frozen=True, slots=True, init=False)
class Field:
    """One named array with one item a row.

    Parameters
    ----------
    shape
        Shape of one item; ``()`` for a scalar. Zero-size items are allowed.
    dtype
        Any NumPy dtype of fixed size.
    role
        ``"observation"``, ``"action"``, ``"reward"``, ``"terminated"``,
        ``"truncated"`` or ``"extra"``; by default it follows from the name
        (Gymnasium's: ``obs``, ``obs/...``, ``action``, ``reward``, ...).

    Examples
    --------
    >>> Field((84, 84), "uint8")
    Field(shape=(84, 84), dtype=dtype('uint8'), role=None)
    """

    shape: tuple[int, ...]
    dtype: np.dtype[Any]
    role: str | None

    def __init__(
        self, shape: int | Sequence[int], dtype: npt.DTypeLike, role: str | None = None
    ) -> None:
        lengths = (shape,) if isinstance(shape, int | np.integer) else shape
        if not all(isinstance(n, int | np.integer) for n in lengths):
            raise TypeError(f"a shape is whole numbers, got {shape!r}")
        object.__setattr__(self, "shape", tuple(int(n) for n in lengths))
        object.__setattr__(self, "dtype", np.dtype(dtype))
        object.__setattr__(self, "role", role)

    @property
    def nbytes(self) -> int:
        """Bytes of one uncompressed item."""
        size: int = self.dtype.itemsize
        for n in self.shape:
            size *= n
        return size

    def __str__(self) -> str:
        return f"{self.dtype} {self.shape}"


class Schema(Mapping[str, Field]):
    """The fields of a row, by name, in order.

    Parameters
    ----------
    fields
        Name to :class:`Field`, or to a ``(shape, dtype)`` pair. A ``/`` in a name
        nests: ``obs/pixels`` and ``obs/state`` are the parts of one observation.
    next_obs
        ``"chained"`` (default): the observation after a step is the observation
        of the next row, and is stored only where an episode ends.
        ``"explicit"``: every row stores its own ``next_obs``, for transitions
        that do not follow each other.

    Raises
    ------
    SchemaError
        A name, shape, dtype or role that cannot be stored.

    Examples
    --------
    >>> schema = Schema({"obs": Field((4,), "float32"), "action": Field((), "int64")})
    >>> schema.observations
    ('obs',)
    """

    def __init__(
        self,
        fields: Mapping[str, Field | tuple[Any, Any]],
        *,
        next_obs: Literal["chained", "explicit"] = "chained",
    ) -> None:
        if next_obs not in ("chained", "explicit"):
            raise SchemaError("next_obs", f"must be 'chained' or 'explicit', got {next_obs!r}")
        if not fields:
            raise SchemaError("obs", "is missing: a schema needs at least one field")
        self._fields = {name: _with_role(name, field) for name, field in fields.items()}
        self.next_obs: Literal["chained", "explicit"] = next_obs
        if next_obs == "explicit":
            self._add_next_observations()
        _check_names(self._fields)
        _check_roles(self._fields)

    @classmethod
    def from_env(cls, env: Any, *, next_obs: Literal["chained", "explicit"] = "chained") -> Schema:
        """Read the schema off a Gymnasium environment.

        Parameters
        ----------
        env
            A :class:`gymnasium.Env`, or a vector environment, of which the
            single spaces are taken. Box, Discrete, MultiBinary, MultiDiscrete,
            and Dict and Tuple of these are understood; nesting becomes ``/``.
        next_obs
            As in :class:`Schema`.

        Returns
        -------
        Schema
            ``obs``, ``action``, ``reward`` (float32), ``terminated``, ``truncated``.
        """
        observation = getattr(env, "single_observation_space", env.observation_space)
        action = getattr(env, "single_action_space", env.action_space)
        fields: dict[str, Field] = {}
        fields.update(_fields_of_space("obs", observation, "observation"))
        fields.update(_fields_of_space("action", action, "action"))
        fields["reward"] = Field((), "float32")
        fields["terminated"] = Field((), "bool")
        fields["truncated"] = Field((), "bool")
        return cls(fields, next_obs=next_obs)

    @classmethod
    def from_example(
        cls, row: Mapping[str, Any], *, next_obs: Literal["chained", "explicit"] = "chained"
    ) -> Schema:
        """Read the schema off one row.

        Parameters
        ----------
        row
            Name to array, tensor, scalar, or a nesting of dicts and tuples of
            these. ``next_obs`` in it is left out: it has the shape of ``obs``.
        next_obs
            As in :class:`Schema`.
        """
        leaves = flatten(row)
        following = {f"next_{name}" for name in leaves if not name.startswith("next_")}
        fields = {}
        for name, value in leaves.items():
            if name not in following:
                array = value.detach().cpu().numpy() if is_tensor(value) else np.asarray(value)
                fields[name] = Field(array.shape, array.dtype)
        return cls(fields, next_obs=next_obs)

    @property
    def observations(self) -> tuple[str, ...]:
        """Names of the fields that make up the observation."""
        return tuple(n for n, f in self._fields.items() if f.role == "observation")

    def named(self, role: str) -> str | None:
        """Name of the one field with this role, or None."""
        return next((n for n, f in self._fields.items() if f.role == role), None)

    @property
    def explicit(self) -> bool:
        """Whether every row stores its own next observation."""
        return self.next_obs == "explicit"

    def to_json(self) -> dict[str, Any]:
        """Return the schema as plain JSON values."""
        return {
            "next_obs": self.next_obs,
            "fields": {
                name: {
                    "shape": list(field.shape),
                    "dtype": np.lib.format.dtype_to_descr(field.dtype),
                    "role": field.role,
                }
                for name, field in self._fields.items()
            },
        }

    @classmethod
    def from_json(cls, document: Mapping[str, Any]) -> Schema:
        """Rebuild a schema from :meth:`to_json`."""
        fields = {
            name: Field(
                tuple(field["shape"]),
                np.lib.format.descr_to_dtype(_as_descr(field["dtype"])),
                field["role"],
            )
            for name, field in document["fields"].items()
            if field["role"] != "next_observation"
        }
        return cls(fields, next_obs=document["next_obs"])

    def _add_next_observations(self) -> None:
        for name in self.observations:
            field = self._fields[name]
            self._fields[f"next_{name}"] = Field(field.shape, field.dtype, "next_observation")

    def __getitem__(self, name: str) -> Field:
        return self._fields[name]

    def __iter__(self) -> Iterator[str]:
        return iter(self._fields)

    def __len__(self) -> int:
        return len(self._fields)

    def __repr__(self) -> str:
        lines = [f"    {name!r}: {field} {field.role}," for name, field in self._fields.items()]
        how = ", next_obs='explicit'" if self.explicit else ""
        return "Schema({\n" + "\n".join(lines) + "\n}" + how + ")"


def flatten(row: Mapping[str, Any]) -> dict[str, Any]:
    """Return the leaves of nested dicts and tuples under ``/``-joined names."""
    if not any(isinstance(value, Mapping | tuple) for value in row.values()):
        return dict(row)
    leaves: dict[str, Any] = {}
    for name, value in row.items():
        if isinstance(value, tuple):
            value = {str(i): item for i, item in enumerate(value)}
        if isinstance(value, Mapping):
            leaves.update({f"{name}/{k}": v for k, v in flatten(value).items()})
        else:
            leaves[name] = value
    return leaves


def is_tensor(value: Any) -> bool:
    """Whether `value` is a torch tensor, without importing torch."""
    return type(value).__module__.partition(".")[0] == "torch" and hasattr(value, "detach")


def _with_role(name: str, field: Field | tuple[Any, Any]) -> Field:
    if not isinstance(name, str):
        raise SchemaError(str(name), f"must be named by a string, got {type(name).__name__}")
    try:
        field = field if isinstance(field, Field) else Field(*field)
    except (TypeError, ValueError) as error:
        raise SchemaError(name, f"must be a Field or a (shape, dtype) pair: {error}") from None
    dtype = field.dtype
    if dtype.hasobject:
        raise SchemaError(name, "holds Python objects, which are never stored")
    if dtype.subdtype is not None:
        raise SchemaError(name, f"has the sub-array dtype {dtype}: put its shape into the Field")
    if dtype.itemsize == 0:
        raise SchemaError(name, f"has a dtype without a size ({dtype}): say how long, as in 'U16'")
    if np.lib.format.descr_to_dtype(np.lib.format.dtype_to_descr(dtype)) != dtype:
        raise SchemaError(name, f"has the dtype {dtype}, which NumPy cannot describe in a file")
    if any(n < 0 for n in field.shape):
        raise SchemaError(name, f"has a negative length in its shape {field.shape}")
    if field.nbytes >= 1 << 30:
        raise SchemaError(name, f"takes {field.nbytes} bytes a row; the limit is 1 GiB")
    role = field.role
    if role is None:
        part = name.partition("/")[0]
        is_observation = part in ("obs", "observation")
        role = "observation" if is_observation else _ROLE_OF_NAME.get(part, "extra")
    elif role not in ROLES:
        raise SchemaError(name, f"has the role {role!r}; roles are {', '.join(ROLES)}")
    return Field(field.shape, dtype, role)


def _check_names(fields: Mapping[str, Field]) -> None:
    folded: dict[str, str] = {}
    for name in fields:
        parts = name.split("/")
        if not all(_PART.match(p) and not p.startswith("__") and p != "zarr.json" for p in parts):
            raise SchemaError(
                name,
                "is not a usable name: parts between '/' are letters, digits, '_', '-' and '.', "
                "and start with a letter, a digit or one '_'",
            )
        if name in RESERVED:
            raise SchemaError(name, "has a name that zbuffer uses itself")
        if name.lower() in folded:
            raise SchemaError(
                name, f"differs from {folded[name.lower()]!r} only by case, which some disks ignore"
            )
        folded[name.lower()] = name
        for i in range(1, len(parts)):
            parent = "/".join(parts[:i])
            if parent in fields:
                raise SchemaError(name, f"cannot lie below {parent!r}, which is a field itself")
    for name, field in fields.items():
        following = fields.get(f"next_{name}")
        if (
            field.role == "observation"
            and following is not None
            and following.role != "next_observation"
        ):
            raise SchemaError(
                f"next_{name}", "is derived from the rows; say next_obs='explicit' to store it"
            )


def _check_roles(fields: Mapping[str, Field]) -> None:
    for role in ("reward", "terminated", "truncated"):
        names = [n for n, f in fields.items() if f.role == role]
        if len(names) > 1:
            raise SchemaError(names[1], f"is a second field with the role {role!r}")
        for name in names:
            field = fields[name]
            if role == "reward":
                if field.dtype.kind not in "fiub":
                    raise SchemaError(name, f"must be real numbers to be a reward, got {field}")
            elif field.shape != () or field.dtype.kind not in "b":
                raise SchemaError(name, f"must be bool () to say how episodes end, got {field}")


def _as_descr(value: Any) -> Any:
    """Undo what JSON did to a NumPy dtype description: tuples became lists."""
    if not isinstance(value, list):
        return value
    return [(item[0], _as_descr(item[1]), *(tuple(shape) for shape in item[2:])) for item in value]


def _fields_of_space(name: str, space: Any, role: str) -> dict[str, Field]:
    kind = type(space).__name__
    if kind in ("Box", "MultiBinary", "MultiDiscrete", "Discrete"):
        return {name: Field(tuple(space.shape), space.dtype, role)}
    if kind == "Dict":
        parts = dict(space.spaces)
    elif kind == "Tuple":
        parts = {str(i): part for i, part in enumerate(space.spaces)}
    else:
        raise SchemaError(name, f"has the space {space}, whose items have no fixed size")
    fields: dict[str, Field] = {}
    for key, part in parts.items():
        fields.update(_fields_of_space(f"{name}/{key}", part, role))
    return fields
