"""A closed buffer is a plain Zarr v3 group: what other readers see."""

from __future__ import annotations

import importlib.metadata
import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import blosc2
import google_crc32c
import numpy as np
import pytest
import zarr
import zarr.codecs
import zarr.registry

import zbuffer
from zbuffer.format.codec import CODEC_NAME, Blosc2Codec

Array = np.ndarray[Any, Any]

#: The lock and the tail lie in the root of the group, and Zarr wonders about them.
ignore_foreign_files = pytest.mark.filterwarnings(
    "ignore:Object at (writer.lock|tail) is not recognized"
)
INSTALLED = any(
    entry.name == CODEC_NAME for entry in importlib.metadata.entry_points(group="zarr.codecs")
)
if not INSTALLED:
    # The source tree on the path, but not installed: what its entry point would do.
    zarr.registry.register_codec(CODEC_NAME, Blosc2Codec)

SCHEMA: dict[str, Any] = {
    "obs/pixels": ((12, 11), "uint8"),
    "obs/state": ((3,), "float64"),
    "action": ((), "int64"),
    "reward": ((), "float32"),
    "terminated": ((), "bool"),
}
N_STEPS = 53


def rows(start: int, stop: int) -> dict[str, Array]:
    n = np.arange(start, stop)
    pixels = (n[:, None, None] * 3 + np.arange(132).reshape(12, 11)) % 251
    return {
        "obs/pixels": pixels.astype("uint8"),
        "obs/state": n[:, None] * np.array([1.0, 0.5, -0.1]),
        "action": n,
        "reward": (n / 8).astype("float32"),
        "terminated": n % 10 == 9,
    }


def make(path: Path, **arguments: Any) -> Path:
    with zbuffer.create(path, SCHEMA, chunk_rows=8, **arguments) as buffer:
        buffer.extend(**rows(0, N_STEPS))
    return path


def in_a_fresh_process(code: str) -> str:
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    return done.stdout


# -- zarr-python --------------------------------------------------------------------------


@pytest.mark.parametrize("codec", ["blosc2", "blosc"])
@pytest.mark.parametrize("cname", ["zstd", "lz4hc", "lz4", "zlib", "blosclz"])
def test_zarr_reads_a_closed_buffer(tmp_path: Path, codec: str, cname: str) -> None:
    make(tmp_path / "b", codec=codec, cname=cname)

    group = zarr.open_group(tmp_path / "b", mode="r")

    for name, values in rows(0, N_STEPS).items():
        array = group[f"data/{name}"]
        assert isinstance(array, zarr.Array)
        assert array.shape == values.shape
        assert array.dtype == values.dtype
        assert array.chunks == (8, *values.shape[1:])
        assert np.array_equal(array[:], values)
        assert np.array_equal(array[7:20], values[7:20])
        assert np.array_equal(array[-1], values[-1])
        assert np.array_equal(array.oindex[[50, 3, 3, 8]], values[[50, 3, 3, 8]])


def test_the_directory_of_a_closed_buffer_holds_nothing_but_zarr(tmp_path: Path) -> None:
    make(tmp_path / "b")

    files = {str(f.relative_to(tmp_path / "b")) for f in (tmp_path / "b").rglob("*") if f.is_file()}

    chunks = {
        f"data/{name}/c/{k}" + "/0" * len(shape)
        for name, (shape, _) in {**SCHEMA, "step_type": ((), "uint8")}.items()
        for k in range(7)
    }
    nodes = ["", "data/", "data/obs/", "meta/", "meta/segments/"]
    nodes += [f"data/{name}/" for name in (*SCHEMA, "step_type")]
    documents = {f"{node}zarr.json" for node in nodes}
    assert files == chunks | documents | {"meta/segments/c/0/0"}
    top = {file.name for file in (tmp_path / "b").iterdir()}
    assert top == {"zarr.json", "data", "meta"}


@ignore_foreign_files
def test_nested_fields_are_nested_groups(tmp_path: Path) -> None:
    make(tmp_path / "b")

    group = zarr.open_group(tmp_path / "b", mode="r")

    kinds = {name: type(node).__name__ for name, node in group.members(max_depth=None)}
    assert kinds == {
        "data": "Group",
        "data/action": "Array",
        "data/obs": "Group",
        "data/obs/pixels": "Array",
        "data/obs/state": "Array",
        "data/reward": "Array",
        "data/step_type": "Array",
        "data/terminated": "Array",
        "meta": "Group",
        "meta/segments": "Array",
    }


@ignore_foreign_files
def test_the_tree_of_zarr_shows_the_fields(tmp_path: Path) -> None:
    pytest.importorskip("rich")
    make(tmp_path / "b")

    tree = str(zarr.open_group(tmp_path / "b", mode="r").tree())

    for name in ("obs", "pixels", "state", "step_type", "segments"):
        assert name in tree


def test_the_commit_and_the_segments_are_plain_zarr(tmp_path: Path) -> None:
    make(tmp_path / "b", notes={"env": "Pong"})

    group = zarr.open_group(tmp_path / "b", mode="r")

    commit = group.attrs["zbuffer"]
    assert isinstance(commit, dict)
    assert (commit["format"], commit["rows"], commit["first_row"]) == (1, N_STEPS, 0)
    assert commit["notes"] == {"env": "Pong"}
    segments = group["meta/segments"][:]
    used = [8] * 6 + [5]
    assert segments[:, 0].tolist() == [0] * 7
    assert segments[:, 1].tolist() == [8 * i for i in range(7)]
    assert segments[:, 2].tolist() == used


def test_rows_before_the_first_read_as_the_fill_value(tmp_path: Path) -> None:
    make(tmp_path / "b", capacity=16)
    with zbuffer.open(tmp_path / "b") as buffer:
        first = buffer.first_row
    assert first > 0

    group = zarr.open_group(tmp_path / "b", mode="r")

    for name, values in rows(0, N_STEPS).items():
        array = group[f"data/{name}"]
        assert array.shape == values.shape
        assert np.array_equal(array[first:], values[first:])
        assert not np.asarray(array[:first]).any()
        assert len(list((tmp_path / "b/data" / name / "c").iterdir())) == (N_STEPS - first + 7) // 8
    assert (group["data/step_type"][:first] == 255).all()
    assert (group["data/step_type"][first:] <= 2).all()


def test_zarr_sees_what_an_open_writer_has_flushed(tmp_path: Path) -> None:
    with zbuffer.create(tmp_path / "b", SCHEMA, chunk_rows=8) as buffer:
        for stop in (3, 8, 13, 30):
            buffer.extend(**rows(buffer.rows, stop))
            buffer.flush()

            group = zarr.open_group(tmp_path / "b", mode="r")

            for name, values in rows(0, stop).items():
                assert np.array_equal(group[f"data/{name}"][:], values)


@pytest.mark.parametrize("codec", ["blosc2", "blosc"])
@pytest.mark.parametrize(
    ("dtype", "shape"),
    [
        ("bool", (2,)),
        ("float16", (3, 2)),
        ("complex64", ()),
        ("datetime64[ns]", (2,)),
        ("timedelta64[s]", ()),
        ("S5", (2,)),
        ("U3", ()),
        ("V9", (2,)),
        (">f8", (3,)),
        (">i2", ()),
        ("int64", (0,)),
    ],
)
def test_zarr_reads_the_values_of_every_dtype(
    tmp_path: Path, dtype: str, shape: tuple[int, ...], codec: str
) -> None:
    rng = np.random.default_rng(0)
    kind = np.dtype(dtype).kind
    numbers = rng.integers(0, 2 if kind == "b" else 100, (20, *shape))
    if kind == "V":
        values = numbers.astype("S9").astype(dtype)
    else:
        values = numbers.astype("S" if kind in "SU" else "i8").astype(dtype)
    with zbuffer.create(tmp_path / "b", {"x": (shape, dtype)}, chunk_rows=8, codec=codec) as buffer:
        buffer.extend(x=values)

    found = zarr.open_group(tmp_path / "b", mode="r")["data/x"][:]

    assert found.shape == values.shape
    assert found.dtype.newbyteorder("=") == values.dtype.newbyteorder("=")
    assert np.array_equal(found, values)


def test_dtypes_without_a_name_in_zarr_are_read_as_their_bytes(tmp_path: Path) -> None:
    values = np.arange(20, dtype="longdouble") / 3
    with zbuffer.create(tmp_path / "b", {"x": ((), "longdouble")}, chunk_rows=8) as buffer:
        buffer.extend(x=values)

    found = zarr.open_group(tmp_path / "b", mode="r")["data/x"][:]

    assert found.dtype == np.dtype(f"V{values.dtype.itemsize}")
    assert np.array_equal(found.view("longdouble"), values)


def test_records_are_read_by_zarr(tmp_path: Path) -> None:
    dtype = np.dtype([("a", "<i2"), ("b", "<f4"), ("c", "S3")])
    values = np.zeros(20, dtype)
    values["a"], values["b"], values["c"] = np.arange(20), np.arange(20) / 3, b"xy"
    with zbuffer.create(tmp_path / "b", {"x": ((), dtype)}, chunk_rows=8) as buffer:
        buffer.extend(x=values)

    found = zarr.open_group(tmp_path / "b", mode="r")["data/x"][:]

    assert found.tobytes() == values.tobytes()


@pytest.mark.parametrize(
    "dtype", [[("a", ">i2"), ("b", ">f4")], [("a", ">i4"), ("b", "<i4")], [("a", "u1", (3,))]]
)
def test_records_of_any_byte_order_are_never_read_wrong_by_zarr(tmp_path: Path, dtype: Any) -> None:
    values = np.zeros(20, dtype)
    for name in values.dtype.names or ():
        values[name] = np.arange(20).reshape(20, *([1] * (values[name].ndim - 1)))
    with zbuffer.create(tmp_path / "b", {"x": ((), dtype)}, chunk_rows=8) as buffer:
        buffer.extend(x=values)

    found = zarr.open_group(tmp_path / "b", mode="r")["data/x"][:]

    # Records of the same values; what Zarr cannot describe, as its bytes.
    for name in found.dtype.names or ():
        if found[name].dtype.kind not in "SV":
            assert np.array_equal(found[name], values[name])
    if found.dtype.names is None:
        assert found.tobytes() == values.tobytes()


def test_a_changed_byte_of_a_chunk_is_found_by_its_checksum(tmp_path: Path) -> None:
    make(tmp_path / "b")
    chunk = tmp_path / "b/data/obs/pixels/c/3/0/0"
    data = bytearray(chunk.read_bytes())
    assert google_crc32c.value(bytes(data[:-4])).to_bytes(4, "little") == data[-4:]
    data[40] ^= 1
    chunk.write_bytes(data)

    array = zarr.open_group(tmp_path / "b", mode="r")["data/obs/pixels"]

    assert np.array_equal(array[:24], rows(0, 24)["obs/pixels"])
    with pytest.raises(ValueError, match="checksum"):
        array[24:32]


# -- the codec in zarr -------------------------------------------------------------------------


@pytest.mark.skipif(not INSTALLED, reason="zbuffer is not installed, so it has no entry point")
def test_zarr_finds_the_codec_by_its_entry_point(tmp_path: Path) -> None:
    make(tmp_path / "b")

    said = in_a_fresh_process(
        "import sys, zarr\n"
        f"group = zarr.open_group({str(tmp_path / 'b')!r}, mode='r')\n"
        "print(int(group['data/obs/pixels'][:].sum()), 'zbuffer.buffer' in sys.modules)\n"
    )

    assert said.split()[0] == str(int(rows(0, N_STEPS)["obs/pixels"].sum()))


def test_the_blosc_codec_needs_no_package_of_ours(tmp_path: Path) -> None:
    make(tmp_path / "b", codec="blosc")

    said = in_a_fresh_process(
        "import sys, zarr\n"
        f"group = zarr.open_group({str(tmp_path / 'b')!r}, mode='r')\n"
        "sums = [int(group[f'data/{name}'][:].sum()) for name in ('obs/pixels', 'step_type')]\n"
        "print(*sums, [m for m in sys.modules if m.partition('.')[0] == 'zbuffer'])\n"
    )

    pixels = int(rows(0, N_STEPS)["obs/pixels"].sum())
    # Six episodes of one FIRST step each, all else MID; the stream has no LAST rows.
    assert said.split() == [str(pixels), str(N_STEPS - 6), "[]"]


def test_the_codecs_in_the_metadata_are_those_of_the_schema(tmp_path: Path) -> None:
    codecs = {"obs/pixels": {"cname": "lz4hc", "clevel": 9}, "obs/state": "blosc"}
    make(tmp_path / "b", codec=codecs, block_rows=2)

    def codecs_of(name: str) -> list[Any]:
        document = json.loads((tmp_path / "b/data" / name / "zarr.json").read_bytes())
        found: list[Any] = document["codecs"]
        return found

    assert codecs_of("obs/pixels") == [
        {"name": "bytes"},
        {
            "name": "zbuffer.blosc2",
            "configuration": {
                "cname": "lz4hc",
                "clevel": 9,
                "shuffle": "noshuffle",
                "typesize": 1,
                "blocksize": 264,
            },
        },
        {"name": "crc32c"},
    ]
    assert codecs_of("obs/state") == [
        {"name": "bytes", "configuration": {"endian": "little"}},
        {
            "name": "blosc",
            "configuration": {
                "cname": "zstd",
                "clevel": 5,
                "shuffle": "shuffle",
                "typesize": 8,
                "blocksize": 48,
            },
        },
        {"name": "crc32c"},
    ]
    group = zarr.open_group(tmp_path / "b", mode="r")
    for name, values in rows(0, N_STEPS).items():
        assert np.array_equal(group[f"data/{name}"][:], values)


@pytest.mark.parametrize("cname", ["zstd", "lz4", "lz4hc", "zlib", "blosclz"])
@pytest.mark.parametrize("shuffle", ["noshuffle", "shuffle", "bitshuffle"])
@pytest.mark.parametrize("checksum", [False, True])
def test_writing_through_zarr_with_the_codec_round_trips(
    tmp_path: Path, cname: str, shuffle: str, checksum: bool
) -> None:
    values = (np.arange(2000, dtype="float32") / 7).reshape(50, 40)
    codec = Blosc2Codec(cname=cname, clevel=5, shuffle=shuffle, typesize=4, blocksize=320)
    compressors: list[Any] = [codec, *([zarr.codecs.Crc32cCodec()] if checksum else [])]
    array = zarr.create_array(
        tmp_path / "a", shape=(50, 40), chunks=(16, 40), dtype="float32", compressors=compressors
    )

    array[:] = values
    array[3:5] = 0

    again = zarr.open_array(tmp_path / "a", mode="r")
    values[3:5] = 0
    assert np.array_equal(again[:], values)
    assert codec in again.metadata.codecs
    data = (tmp_path / "a/c/0/0").read_bytes()
    raw = blosc2.decompress2(data[:-4] if checksum else data, nthreads=1)
    assert raw == values[:16].tobytes()


def test_the_codec_is_what_its_metadata_says() -> None:
    codec = Blosc2Codec(cname="lz4", clevel=3, shuffle="shuffle", typesize=4, blocksize=4096)

    assert Blosc2Codec.from_dict(codec.to_dict()) == codec
    assert Blosc2Codec.from_dict({"name": CODEC_NAME}) == Blosc2Codec()
    with pytest.raises(ValueError, match=r"^shuffle must be") as caught:
        Blosc2Codec(shuffle="delta")
    assert str(caught.value) == (
        "shuffle must be one of noshuffle, shuffle, bitshuffle, got 'delta'"
    )


# -- TensorStore ---------------------------------------------------------------------------------


def read_by_tensorstore(path: Path, name: str) -> Array:
    tensorstore = pytest.importorskip("tensorstore")
    spec = {"driver": "zarr3", "kvstore": {"driver": "file", "path": f"{path}/{name}/"}}
    found: Array = tensorstore.open(spec, read=True, open=True).result().read().result()
    return found


@pytest.mark.parametrize("cname", ["zstd", "lz4hc", "lz4", "zlib", "blosclz"])
def test_tensorstore_reads_a_buffer_with_the_blosc_codec(tmp_path: Path, cname: str) -> None:
    pytest.importorskip("tensorstore")
    make(tmp_path / "b", codec="blosc", cname=cname)

    for name, values in rows(0, N_STEPS).items():
        found = read_by_tensorstore(tmp_path / "b", f"data/{name}")
        assert found.dtype == values.dtype
        assert np.array_equal(found, values)
    assert (read_by_tensorstore(tmp_path / "b", "data/step_type") <= 2).all()
    assert read_by_tensorstore(tmp_path / "b", "meta/segments").shape == (7, 3)


def test_tensorstore_reads_rows_before_the_first_as_the_fill_value(tmp_path: Path) -> None:
    pytest.importorskip("tensorstore")
    make(tmp_path / "b", codec="blosc", capacity=16)
    with zbuffer.open(tmp_path / "b") as buffer:
        first = buffer.first_row

    found = read_by_tensorstore(tmp_path / "b", "data/action")

    assert first > 0
    assert not found[:first].any()
    assert np.array_equal(found[first:], np.arange(first, N_STEPS))
    assert (read_by_tensorstore(tmp_path / "b", "data/step_type")[:first] == 255).all()


def test_tensorstore_checks_the_crc32c_of_a_chunk(tmp_path: Path) -> None:
    pytest.importorskip("tensorstore")
    make(tmp_path / "b", codec="blosc")
    chunk = tmp_path / "b/data/obs/pixels/c/3/0/0"
    data = bytearray(chunk.read_bytes())
    data[-1] ^= 1
    chunk.write_bytes(data)

    with pytest.raises(ValueError, match=r"(?i)crc|checksum|digest"):
        read_by_tensorstore(tmp_path / "b", "data/obs/pixels")


# -- the other way: foreign chunks by our reader ----------------------------------------


@pytest.mark.parametrize("codec", ["blosc2", "blosc"])
def test_chunks_rewritten_by_zarr_are_read_by_us(tmp_path: Path, codec: str) -> None:
    make(tmp_path / "b", codec=codec)
    array = zarr.open_group(tmp_path / "b", mode="r+")["data/obs/pixels"]

    array[:] = 255 - np.asarray(array[:])

    wanted = 255 - rows(0, N_STEPS)["obs/pixels"]
    for backend in ("auto", "ctypes"):
        with zbuffer.open(tmp_path / "b", gather=backend) as buffer:
            assert np.array_equal(buffer["obs/pixels"][:], wanted)
