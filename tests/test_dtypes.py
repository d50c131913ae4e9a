"""What comes out equals what went in, for every fixed-size dtype."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest

import zbuffer
from zbuffer import Field, Schema, SchemaError

Array = np.ndarray[Any, Any]

N_ROWS = 37
NESTED = np.dtype([("id", "<i2"), ("pose", [("x", "<f4", (2,)), ("ok", "?")]), ("tag", "S3")])
ALIGNED = np.dtype([("a", "i1"), ("b", "f8"), ("c", "i2")], align=True)
DTYPES = [
    "bool",
    *("int8", "int16", "int32", "int64", "uint8", "uint16", "uint32", "uint64"),
    *("float16", "float32", "float64", "longdouble"),
    *("complex64", "complex128", "clongdouble"),
    *("datetime64[ns]", "datetime64[D]", "datetime64[25s]"),
    *("timedelta64[us]", "timedelta64[h]", "timedelta64"),
    *("S1", "S7", "U1", "U5", "V1", "V9", "V300"),
    *(">i2", ">u8", ">f4", ">f8", ">c16", ">M8[ms]", ">U3"),
    NESTED,
    ALIGNED,
    np.dtype([("be", ">i4"), ("le", "<i4")]),
]
SHAPES = [(), (3,), (20, 5), (0,), (2, 0, 3)]


def items(dtype: np.dtype[Any], shape: tuple[int, ...], n: int = N_ROWS) -> Array:
    """Return random values of a dtype: any bits where all bits are values."""
    rng = np.random.default_rng(0)
    total = (n, *shape)
    if dtype.names:
        records = np.zeros(total, dtype)
        for name in dtype.names:
            assert dtype.fields is not None
            inner = dtype.fields[name][0]
            if inner.subdtype is None:
                records[name] = items(inner, shape, n)
            else:
                records[name] = items(inner.base, (*shape, *inner.shape), n)
        return records
    if dtype.kind == "b":
        return rng.integers(0, 2, total).astype(bool)
    if dtype.kind == "S":
        letters = rng.integers(0, 128, (*total, dtype.itemsize), np.uint8)
        return letters.view(dtype).reshape(total)
    if dtype.kind == "U":
        letters = rng.integers(1, 0xD000, (*total, dtype.itemsize // 4), np.uint32)
        return letters.astype(dtype.byteorder + "u4").view(dtype).reshape(total)
    if dtype.itemsize in (16, 32) and dtype.char in "gG":
        real = rng.standard_normal(total).astype(dtype) / 3
        if real.size:
            real.reshape(-1)[:4] = [np.inf, -np.inf, np.nan, np.finfo(dtype).tiny]
        return real
    return np.frombuffer(rng.bytes(int(np.prod(total)) * dtype.itemsize), dtype).reshape(total)


def assert_same(found: Array, wanted: Array) -> None:
    assert found.dtype == wanted.dtype
    assert found.dtype.byteorder == wanted.dtype.byteorder
    assert found.shape == wanted.shape
    # Padding bytes are nobody's values.
    if wanted.dtype == ALIGNED:
        for name in ALIGNED.names or ():
            assert found[name].tobytes() == wanted[name].tobytes()
    elif wanted.dtype.char in "gG":
        np.testing.assert_array_equal(found, wanted)
    else:
        assert found.tobytes() == wanted.tobytes()


@pytest.mark.parametrize("shape", SHAPES, ids=str)
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_values_and_dtype_come_back_after_close_and_reopen(
    tmp_path: Path, dtype: Any, shape: tuple[int, ...]
) -> None:
    dtype = np.dtype(dtype)
    values = items(dtype, shape)
    with zbuffer.create(tmp_path / "b", {"obs": (shape, dtype)}, chunk_rows=8) as buffer:
        for value in values[:10]:
            buffer.append(obs=value)
        buffer.extend(obs=values[10:])
        assert_same(buffer["obs"][:], values)

    for backend in ("auto", "ctypes"):
        with zbuffer.open(tmp_path / "b", gather=backend) as buffer:
            assert_same(buffer["obs"][:], values)
            assert buffer["obs"].dtype == dtype
            assert buffer.schema["obs"] == Field(shape, dtype, "observation")
            ids = np.array([36, 0, 7, 8, 8, 15])
            assert_same(buffer.take(ids)["obs"], values[ids])
    with zbuffer.open(tmp_path / "b", mode="a") as buffer:
        assert_same(buffer["obs"][:], values)
        buffer.append(obs=values[0])
    with zbuffer.open(tmp_path / "b") as buffer:
        assert_same(buffer["obs"][:N_ROWS], values)
        assert_same(buffer["obs"][N_ROWS:], values[:1])


@pytest.mark.parametrize("codec", ["blosc", "blosc2"])
@pytest.mark.parametrize("dtype", ["uint8", "float16", ">f8", "U5", "V9", "datetime64[ns]", NESTED])
def test_values_come_back_with_either_codec(tmp_path: Path, dtype: Any, codec: str) -> None:
    dtype = np.dtype(dtype)
    values = items(dtype, (4, 30))
    schema = {"obs": ((4, 30), dtype)}
    with zbuffer.create(tmp_path / "b", schema, chunk_rows=8, codec=codec) as buffer:
        buffer.extend(obs=values)

    with zbuffer.open(tmp_path / "b") as buffer:
        assert_same(buffer["obs"][:], values)


@pytest.mark.parametrize(
    ("dtype", "bits"),
    [("float16", "u2"), ("float32", "u4"), ("float64", "u8"), (">f4", ">u4")],
)
def test_the_payload_bits_of_nan_and_the_sign_of_zero_come_back(
    tmp_path: Path, dtype: str, bits: str
) -> None:
    width = np.dtype(bits).itemsize * 8
    exponent = {16: 0x7C00, 32: 0x7F800000, 64: 0x7FF0000000000000}[width]
    sign = 1 << (width - 1)
    patterns = [exponent | 1, exponent | sign | 5, exponent, sign, 0, 1, sign | 1]
    values = np.array(patterns, bits).view(dtype)
    with zbuffer.create(tmp_path / "b", {"obs": ((), dtype)}, chunk_rows=4) as buffer:
        for value in values:
            buffer.append(obs=np.asarray(value, dtype))

    with zbuffer.open(tmp_path / "b") as buffer:
        assert np.array_equal(buffer["obs"][:].view(bits), values.view(bits))


def test_not_a_time_comes_back(tmp_path: Path) -> None:
    when = np.array(["NaT", "2026-01-01", "NaT"], "M8[ns]")
    lasted = np.array(["NaT", 5, "NaT"], "m8[s]")
    schema = {"when": ((), "M8[ns]"), "lasted": ((), "m8[s]")}
    with zbuffer.create(tmp_path / "b", schema) as buffer:
        buffer.extend(when=when, lasted=lasted)

    with zbuffer.open(tmp_path / "b") as buffer:
        assert_same(buffer["when"][:], when)
        assert_same(buffer["lasted"][:], lasted)


def test_times_of_another_unit_are_refused(tmp_path: Path) -> None:
    with zbuffer.create(tmp_path / "b", {"when": ((), "M8[s]")}) as buffer:
        with pytest.raises(SchemaError):
            buffer.append(when=np.datetime64("2026-01-01T00:00:00.5", "ms"))
        with pytest.raises(SchemaError):
            buffer.append(when=np.datetime64("2026-01-01", "D"))
        assert buffer.rows == 0


def test_text_that_is_too_long_is_refused_and_shorter_text_is_kept(tmp_path: Path) -> None:
    with zbuffer.create(tmp_path / "b", {"a": ((), "U3"), "b": ((), "S3")}) as buffer:
        buffer.append(a="ab", b=b"a")
        buffer.append(a="abc", b=b"abc")
        for bad in ({"a": "abcd", "b": b""}, {"a": "", "b": b"abcd"}, {"a": b"a", "b": b""}):
            with pytest.raises(SchemaError):
                buffer.append(**bad)

        assert buffer["a"][:].tolist() == ["ab", "abc"]
        assert buffer["b"][:].tolist() == [b"a", b"abc"]


# -- Python and NumPy scalars -----------------------------------------------------------------


@pytest.mark.parametrize(
    ("dtype", "value"),
    [
        ("bool", True),
        ("int8", -128),
        ("uint64", 2**64 - 1),
        ("float32", 7),
        ("float32", 0.1),
        ("float64", float("inf")),
        ("float16", float("nan")),
        ("complex64", 1 + 2j),
        ("complex128", 3.5),
        ("int32", np.int8(5)),
        ("float64", np.float32(0.1)),
        ("float64", np.int32(7)),
        ("int64", np.array(9)),
        ("float32", np.float64(0.25)),
        ("U4", "é"),
        ("S4", b"x"),
    ],
    ids=repr,
)
def test_scalars_that_fit_are_stored_exactly(tmp_path: Path, dtype: str, value: Any) -> None:
    with zbuffer.create(tmp_path / "b", {"x": ((), dtype)}) as buffer:
        buffer.append(x=value)

    with zbuffer.open(tmp_path / "b") as buffer:
        found = buffer["x"][:]
        wanted = np.asarray([value], dtype)
        assert found.dtype == wanted.dtype
        assert found.tobytes() == wanted.tobytes()


@pytest.mark.parametrize(
    ("dtype", "value"),
    [
        ("int8", 128),
        ("uint8", -1),
        ("uint8", 1.0),
        ("int64", np.uint64(1)),
        ("int32", np.int64(1)),
        ("float32", np.int64(1)),
        ("float32", 1e39),
        ("float16", 65536),
        ("float32", 1j),
        ("bool", 0),
        ("int8", True),
        ("float32", True),
        ("float32", "1"),
        ("U4", 1),
        ("V2", b"ab"),
    ],
    ids=repr,
)
def test_scalars_that_would_lose_something_are_refused(
    tmp_path: Path, dtype: str, value: Any
) -> None:
    with zbuffer.create(tmp_path / "b", {"x": ((), dtype)}) as buffer:
        with pytest.raises(SchemaError):
            buffer.append(x=value)

        assert buffer.rows == 0


def test_big_endian_arrays_go_into_little_endian_fields_by_value(tmp_path: Path) -> None:
    values = np.array([1, 2, 300], ">i4")
    with zbuffer.create(tmp_path / "b", {"x": ((3,), "<i4")}) as buffer:
        buffer.append(x=values)

        assert buffer["x"][0].tolist() == [1, 2, 300]


def test_arrays_that_are_not_contiguous_are_stored_by_value(tmp_path: Path) -> None:
    base = np.arange(48, dtype="int32").reshape(6, 8)
    views = [
        base[:4, :3],
        base[::-1, ::-1][:4, :3],
        base.T[:4, :3],
        np.broadcast_to(base[0, :3], (4, 3)),
    ]
    with zbuffer.create(tmp_path / "b", {"x": ((4, 3), "int32")}) as buffer:
        for view in views:
            buffer.append(x=view)

        assert np.array_equal(buffer["x"][:], np.stack(views))


def test_what_was_appended_may_be_changed_afterwards(tmp_path: Path) -> None:
    frame = np.zeros((4, 4), "uint8")
    with zbuffer.create(tmp_path / "b", {"obs": ((4, 4), "uint8")}) as buffer:
        for n in range(5):
            frame[:] = n
            buffer.append(obs=frame, next_obs=frame + 1)

        assert buffer["obs"][:, 0, 0].tolist() == [0, 1, 2, 3, 4]


# -- objects ------------------------------------------------------------------------------------


@pytest.mark.parametrize("dtype", ["O", [("a", "i4"), ("b", "O")], np.dtypes.StringDType()])
def test_objects_are_refused_by_the_schema(dtype: Any) -> None:
    with pytest.raises(SchemaError):
        Schema({"x": ((), dtype)})


@pytest.mark.parametrize("dtype", ["S", "U", "V", "S0"])
def test_dtypes_without_a_size_are_refused_by_the_schema(dtype: str) -> None:
    with pytest.raises(SchemaError, match="has a dtype without a size"):
        Schema({"x": ((), dtype)})


def test_object_arrays_are_refused_by_append(tmp_path: Path) -> None:
    with zbuffer.create(tmp_path / "b", {"x": ((2,), "int64")}) as buffer:
        with pytest.raises(SchemaError, match="Python objects are not stored"):
            buffer.append(x=np.array([1, 2], object))

        assert buffer.rows == 0


# -- nesting --------------------------------------------------------------------------------------


def test_nested_rows_come_back_flat_and_by_parent(tmp_path: Path) -> None:
    row = {
        "obs": {"pixels": np.ones((5, 4), "uint8"), "state": (np.float32(0.5), np.arange(3))},
        "action": (3, np.array([0.1, 0.2], "float32")),
        "reward": 1.0,
    }
    schema = Schema.from_example(row)
    assert list(schema) == [
        *("obs/pixels", "obs/state/0", "obs/state/1", "action/0", "action/1", "reward")
    ]
    assert schema.observations == ("obs/pixels", "obs/state/0", "obs/state/1")
    with zbuffer.create(tmp_path / "b", schema) as buffer:
        buffer.append(**row, next_obs=row["obs"])

    with zbuffer.open(tmp_path / "b") as buffer:
        batch = buffer.take([0])
        assert_same(batch["obs"]["pixels"][0], row["obs"]["pixels"])
        assert_same(batch["obs/state/1"][0], np.arange(3))
        assert batch["obs"]["state"]["0"][0] == np.float32(0.5)
        assert set(batch["action"]) == {"0", "1"}
        sample = buffer.sample(2)
        assert_same(sample["next_obs"]["pixels"][0], row["obs"]["pixels"])


# -- torch --------------------------------------------------------------------------------


def test_torch_tensors_are_stored_as_their_values(tmp_path: Path) -> None:
    torch = pytest.importorskip("torch")
    base = torch.arange(48, dtype=torch.float32).reshape(6, 8)
    tensors = [base[:4, :3], base.T[:4, :3], base[::2, ::2][:3, :4].T, base[0, :3].expand(4, 3)]
    schema = {"obs": ((4, 3), "float32"), "action": ((), "int64"), "z": ((2,), "complex64")}
    z = torch.tensor([1 + 2j, 3 - 1j], dtype=torch.complex64)
    with zbuffer.create(tmp_path / "b", schema) as buffer:
        for n, tensor in enumerate(tensors):
            buffer.append(obs=tensor.requires_grad_(), action=torch.tensor(n), z=z.conj())
        buffer.extend(obs=torch.stack(tensors), action=torch.arange(4), z=z.expand(4, 2))

        wanted = torch.stack([*tensors, *tensors]).detach().numpy()
        assert np.array_equal(buffer["obs"][:], wanted)
        assert buffer["action"][:].tolist() == [0, 1, 2, 3] * 2
        assert np.array_equal(buffer["z"][0], z.conj().resolve_conj().numpy())


def test_torch_tensors_that_do_not_fit_are_refused(tmp_path: Path) -> None:
    torch = pytest.importorskip("torch")
    with zbuffer.create(tmp_path / "b", {"obs": ((3,), "float32")}) as buffer:
        for bad in (
            torch.zeros(3, dtype=torch.float64),
            torch.zeros(4),
            torch.zeros(3, dtype=torch.bfloat16),
            torch.zeros(3).to_sparse(),
        ):
            with pytest.raises(SchemaError, match=r"^field 'obs' must be float32 \(3,\), got "):
                buffer.append(obs=bad)

        assert buffer.rows == 0


def test_an_example_of_torch_tensors_makes_a_schema() -> None:
    torch = pytest.importorskip("torch")

    schema = Schema.from_example({"obs": torch.zeros(2, 3, dtype=torch.uint8), "action": 1})

    assert schema["obs"] == Field((2, 3), "uint8", "observation")
    assert schema["action"] == Field((), "int64", "action")


# -- schemas from spaces ------------------------------------------------------------


class FakeEnv:
    """All that a schema asks of an environment."""

    def __init__(self, observation_space: Any, action_space: Any) -> None:
        self.observation_space = observation_space
        self.action_space = action_space


def test_every_fixed_size_space_becomes_fields() -> None:
    spaces = pytest.importorskip("gymnasium.spaces")
    observation = spaces.Dict(
        pixels=spaces.Box(0, 255, (8, 9), np.uint8),
        inner=spaces.Dict(bits=spaces.MultiBinary([2, 3])),
        both=spaces.Tuple((spaces.Discrete(4), spaces.Box(-1, 1, (2,), np.float32))),
    )
    action = spaces.MultiDiscrete([3, 4, 5])

    schema = Schema.from_env(FakeEnv(observation, action))

    assert {name: (f.shape, f.dtype.str, f.role) for name, f in schema.items()} == {
        "obs/pixels": ((8, 9), "|u1", "observation"),
        "obs/inner/bits": ((2, 3), "|i1", "observation"),
        "obs/both/0": ((), "<i8", "observation"),
        "obs/both/1": ((2,), "<f4", "observation"),
        "action": ((3,), "<i8", "action"),
        "reward": ((), "<f4", "reward"),
        "terminated": ((), "|b1", "terminated"),
        "truncated": ((), "|b1", "truncated"),
    }


def test_samples_of_every_space_are_stored_and_come_back(tmp_path: Path) -> None:
    spaces = pytest.importorskip("gymnasium.spaces")
    observation = spaces.Dict(
        pixels=spaces.Box(0, 255, (8, 9), np.uint8),
        bits=spaces.MultiBinary(5),
        both=spaces.Tuple((spaces.Discrete(4), spaces.Box(-1, 1, (2,), np.float32))),
    )
    action = spaces.Tuple((spaces.Discrete(3), spaces.MultiDiscrete([3, 4])))
    observation.seed(0)
    action.seed(0)
    rows = [
        {
            "obs": observation.sample(),
            "action": action.sample(),
            "reward": 0.5,
            "terminated": False,
            "truncated": False,
        }
        for _ in range(5)
    ]
    schema = Schema.from_env(FakeEnv(observation, action))
    with zbuffer.create(tmp_path / "b", schema) as buffer:
        for row in rows:
            buffer.append(**row)

    with zbuffer.open(tmp_path / "b") as buffer:
        for n, row in enumerate(rows):
            found = buffer.take(n)
            assert np.array_equal(found["obs"]["pixels"], row["obs"]["pixels"])
            assert np.array_equal(found["obs"]["bits"], row["obs"]["bits"])
            assert found["obs/both/0"] == row["obs"]["both"][0]
            assert np.array_equal(found["obs/both/1"], row["obs"]["both"][1])
            assert np.array_equal(found["action/1"], row["action"][1])


def test_the_single_spaces_of_a_vector_environment_are_taken() -> None:
    spaces = pytest.importorskip("gymnasium.spaces")
    env = FakeEnv(spaces.Box(0, 1, (16, 4)), spaces.MultiDiscrete([2] * 16))
    env.single_observation_space = spaces.Box(0, 1, (4,))  # type: ignore[attr-defined]  # as vector environments have
    env.single_action_space = spaces.Discrete(2)  # type: ignore[attr-defined]  # as vector environments have

    schema = Schema.from_env(env)

    assert schema["obs"] == Field((4,), "float32", "observation")
    assert schema["action"] == Field((), "int64", "action")


def test_a_space_without_a_fixed_size_is_refused() -> None:
    spaces = pytest.importorskip("gymnasium.spaces")
    env = FakeEnv(spaces.Dict(name=spaces.Text(5)), spaces.Discrete(2))

    with pytest.raises(SchemaError) as caught:
        Schema.from_env(env)

    assert str(caught.value).startswith("field 'obs/name' has the space Text(")
    assert str(caught.value).endswith(", whose items have no fixed size")


def test_an_example_row_makes_a_schema_without_next_obs() -> None:
    row = {
        "obs": np.zeros((2, 2), ">f4"),
        "action": 3,
        "reward": 0.5,
        "terminated": False,
        "next_obs": np.zeros((2, 2), ">f4"),
    }

    schema = Schema.from_example(row)

    assert {n: (f.shape, f.dtype.str) for n, f in schema.items()} == {
        "obs": ((2, 2), ">f4"),
        "action": ((), "<i8"),
        "reward": ((), "<f8"),
        "terminated": ((), "|b1"),
    }


def test_a_schema_survives_its_json() -> None:
    schema = Schema(
        {f"f{i}": ((2, i), dtype) for i, dtype in enumerate(DTYPES)}, next_obs="chained"
    )

    again = Schema.from_json(schema.to_json())

    assert dict(again) == dict(schema)
    assert [f.dtype.str for f in again.values()] == [f.dtype.str for f in schema.values()]
