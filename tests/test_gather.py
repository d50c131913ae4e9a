"""Both gathers against whole-chunk decoding by python-blosc2."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from threading import Barrier
from typing import Any

import blosc2
import numcodecs.blosc
import numpy as np
import pytest

import zbuffer
from zbuffer.format.codec import compress
from zbuffer.reading.gather import Gather, make_gather, native_module

Array = np.ndarray[Any, Any]
Encode = Callable[..., bytes]

NATIVE = native_module()
needs_native = pytest.mark.skipif(NATIVE is None, reason="the C extension is not built")
CNAMES = ("zstd", "lz4", "lz4hc", "zlib", "blosclz")


@pytest.fixture(params=[pytest.param("native", marks=needs_native), "ctypes"])
def gather(request: pytest.FixtureRequest) -> Gather:
    return make_gather(NATIVE) if request.param == "native" else make_gather(None)


# -- encoders: raw bytes to one chunk ------------------------------------------------


def by_python(raw: bytes, typesize: int, blocksize: int, cname: str, *, shuffle: bool) -> bytes:
    return compress(
        raw,
        typesize=typesize,
        blocksize=blocksize,
        cname=cname,
        clevel=5,
        shuffle="shuffle" if shuffle else "noshuffle",
    )


def by_native(raw: bytes, typesize: int, blocksize: int, cname: str, *, shuffle: bool) -> bytes:
    packed: bytes = NATIVE.compress(raw, typesize, blocksize, cname, 5, int(shuffle), False)
    return packed


def by_native_raw_literals(
    raw: bytes, typesize: int, blocksize: int, cname: str, *, shuffle: bool
) -> bytes:
    packed: bytes = NATIVE.compress(raw, typesize, blocksize, cname, 5, int(shuffle), True)
    return packed


def by_numcodecs(raw: bytes, typesize: int, blocksize: int, cname: str, *, shuffle: bool) -> bytes:
    data = np.frombuffer(raw, f"V{typesize}") if typesize > 1 else raw
    return bytes(numcodecs.blosc.compress(data, cname.encode(), 5, int(shuffle), blocksize))


def by_split_blosc2(
    raw: bytes, typesize: int, blocksize: int, cname: str, *, shuffle: bool
) -> bytes:
    packed: bytes = blosc2.compress2(
        raw,
        codec=blosc2.Codec[cname.upper()],
        typesize=typesize,
        blocksize=blocksize,
        filters=[blosc2.Filter.SHUFFLE if shuffle else blosc2.Filter.NOFILTER],
        filters_meta=[0],
        splitmode=blosc2.SplitMode.ALWAYS_SPLIT,
        nthreads=1,
    )
    return packed


ENCODERS = [
    by_python,
    by_numcodecs,
    by_split_blosc2,
    pytest.param(by_native, marks=needs_native),
]


# -- rows ------------------------------------------------------------------------------


def redundant(nbytes: int, seed: int = 0) -> bytes:
    """Return bytes that compress as frames do: long repeats with a little change."""
    rng = np.random.default_rng(seed)
    line = rng.integers(0, 256, 97, np.uint8)
    data = np.resize(line, nbytes)
    at = rng.integers(0, nbytes, max(nbytes // 60, 1))
    data[at] = rng.integers(0, 256, len(at))
    return data.tobytes()


def incompressible(nbytes: int, seed: int = 0) -> bytes:
    return np.random.default_rng(seed).bytes(nbytes)


def zeros(nbytes: int) -> bytes:
    return bytes(nbytes)


def constant(nbytes: int) -> bytes:
    return bytes([7]) * nbytes


def repeated_value(nbytes: int) -> bytes:
    return (bytes(range(1, 9)) * (nbytes // 8 + 1))[:nbytes]


def blocks_of_every_kind(nbytes: int) -> bytes:
    """Return runs of zeros, of one byte, of noise and of text, each longer than a block."""
    kinds = [zeros(3000), constant(3000), incompressible(3000), redundant(3000)]
    return (b"".join(kinds) * (nbytes // 12000 + 1))[:nbytes]


class Chunks:
    """Chunks of one field, and what they decode to by python-blosc2."""

    def __init__(self, chunks: list[bytes], row_nbytes: int) -> None:
        self.row_nbytes = row_nbytes
        # Copies: an entry is known by its address.
        self.packed = [np.frombuffer(chunk, np.uint8).copy() for chunk in chunks]
        self.sizes = [len(chunk) for chunk in chunks]
        decoded = [
            np.frombuffer(blosc2.decompress2(c, nthreads=1), np.uint8).reshape(-1, row_nbytes)
            for c in chunks
        ]
        self.chunk_rows = len(decoded[0])
        self.rows = np.concatenate(decoded)

    def add_page(self, page: Array) -> None:
        """Add a raw page, which has room for one row more than a chunk."""
        self.packed.append(page)
        self.sizes.append(-len(page))
        self.rows = np.concatenate((self.rows, page[: self.chunk_rows]))

    def read(self, gather: Gather, ids: Any, n_threads: int = 1) -> Array:
        """Return rows by a gather, in the order of the ids; RuntimeError where it fails."""
        ids = np.asarray(ids, np.int64)
        # A margin on both sides shows whether more than the batch was written.
        around = np.full((len(ids) + 2, self.row_nbytes), 0xA5, np.uint8)
        dest = around[1:-1]

        plan = self.plan(gather, ids)
        result = gather.gather(dest, self.row_nbytes, plan, n_threads)

        assert (around[[0, -1]] == 0xA5).all()
        if result < 0:
            raise RuntimeError(f"chunk {-1 - result}")
        return dest

    def plan(self, gather: Gather, ids: Array, stop: int | None = None) -> Any:
        """Return the plan of some rows; chunks are numbered from 3 on."""
        addrs = np.array([p.ctypes.data for p in self.packed], np.uint64)
        sizes = np.array(self.sizes, np.int64)
        first = 3 * self.chunk_rows
        stop = first + len(addrs) * self.chunk_rows if stop is None else first + stop
        place = (self.chunk_rows, 3, addrs, sizes, list(self.packed), (-1, 0, 0, 0))
        return gather.plan(ids + first, first, stop, *place)

    def some_ids(self) -> list[Array]:
        """Return lists of ids: first, last, all, backwards, repeated, and at random."""
        n, rng = len(self.rows), np.random.default_rng(1)
        return [
            np.array([0]),
            np.array([n - 1]),
            np.arange(n),
            np.arange(n)[::-1],
            np.array([n - 1, 0, 0, n - 1, n // 2, 0]),
            rng.integers(0, n, 50),
            np.repeat(rng.integers(0, n, 5), 3),
        ]


def assert_reads_right(gather: Gather, chunks: Chunks) -> None:
    for ids in chunks.some_ids():
        np.testing.assert_array_equal(chunks.read(gather, ids), chunks.rows[ids])


# -- every dtype and geometry ------------------------------------------------------------

DTYPES = [
    "bool",
    *("i1", "i2", "i4", "i8", "u1", "u2", "u4", "u8"),
    *("f2", "f4", "f8", "longdouble", "c8", "c16", "clongdouble"),
    *("M8[ns]", "m8[s]", "S5", "U3", "V7", "V300", ">i4", ">f8"),
    "i2,f4,S3",
]
#: Items a row, rows a chunk, items a block; the cases follow the item size.
GEOMETRIES = {
    "rows smaller than a block": (8, 32, 64),
    "rows as large as a block": (64, 8, 64),
    "rows larger than a block": (100, 8, 25),
    "rows that straddle blocks": (12, 30, 64),
    "rows that straddle blocks, the last one short": (7, 13, 30),
    "block is the chunk": (16, 16, 256),
    "one row a chunk": (100, 1, 100),
    "one row a chunk, in many blocks": (1000, 1, 64),
}


@pytest.mark.parametrize("geometry", list(GEOMETRIES))
@pytest.mark.parametrize("dtype", DTYPES)
def test_every_dtype_and_geometry_reads_as_the_whole_chunk(
    gather: Gather, dtype: str, geometry: str
) -> None:
    itemsize = np.dtype(dtype).itemsize
    items, chunk_rows, block_items = GEOMETRIES[geometry]
    raw = [redundant(items * chunk_rows * itemsize, seed) for seed in range(3)]
    typesize = itemsize if itemsize <= 255 else 1

    for encode in (by_python, by_numcodecs):
        packed = [encode(r, typesize, block_items * itemsize, "zstd", shuffle=True) for r in raw]
        chunks = Chunks(packed, items * itemsize)
        assert chunks.rows.tobytes() == b"".join(raw)
        assert_reads_right(gather, chunks)


@pytest.mark.parametrize("row_nbytes", [1, 2, 5, 16, 31, 33])
@pytest.mark.parametrize("chunk_rows", [1, 2, 3])
@pytest.mark.parametrize("encode", ENCODERS)
def test_chunks_below_the_least_size_of_blosc2(
    gather: Gather, encode: Encode, row_nbytes: int, chunk_rows: int
) -> None:
    nbytes = row_nbytes * chunk_rows

    for make in (redundant, zeros, constant):
        chunks = Chunks([encode(make(nbytes), 1, nbytes, "zstd", shuffle=False)] * 2, row_nbytes)
        assert_reads_right(gather, chunks)


# -- every codec ---------------------------------------------------------------------------

CONTENTS = [redundant, incompressible, zeros, constant, repeated_value, blocks_of_every_kind]


@pytest.mark.parametrize("content", CONTENTS)
@pytest.mark.parametrize("shuffle", [False, True], ids=["noshuffle", "shuffle"])
@pytest.mark.parametrize("cname", CNAMES)
@pytest.mark.parametrize("encode", ENCODERS)
def test_every_codec_and_content_reads_as_the_whole_chunk(
    gather: Gather, encode: Encode, cname: str, shuffle: bool, content: Callable[[int], bytes]
) -> None:
    row_nbytes, chunk_rows, block_rows, typesize = 600, 48, 4, 4 if shuffle else 1
    raw = content(row_nbytes * chunk_rows)
    packed = encode(raw, typesize, row_nbytes * block_rows, cname, shuffle=shuffle)

    chunks = Chunks([packed], row_nbytes)

    assert chunks.rows.tobytes() == raw
    assert_reads_right(gather, chunks)


@needs_native
@pytest.mark.parametrize("content", CONTENTS)
@pytest.mark.parametrize("block_rows", [1, 3, 8, 48])
def test_chunks_with_raw_literals_read_as_by_python_blosc2(
    gather: Gather, block_rows: int, content: Callable[[int], bytes]
) -> None:
    raw = content(600 * 48)
    packed = by_native_raw_literals(raw, 1, 600 * block_rows, "zstd", shuffle=False)

    chunks = Chunks([packed], 600)

    assert chunks.rows.tobytes() == raw
    assert_reads_right(gather, chunks)


@needs_native
@pytest.mark.parametrize("cname", CNAMES)
@pytest.mark.parametrize("content", CONTENTS)
def test_native_and_python_chunks_decode_to_the_same_bytes(
    cname: str, content: Callable[[int], bytes]
) -> None:
    raw = content(600 * 48)

    native = by_native(raw, 4, 2400, cname, shuffle=True)
    python = by_python(raw, 4, 2400, cname, shuffle=True)

    assert blosc2.decompress2(native, nthreads=1) == blosc2.decompress2(python, nthreads=1) == raw


def test_special_chunks_are_no_larger_than_their_header_and_read_right(gather: Gather) -> None:
    packed = by_python(zeros(60_000), 1, 6000, "zstd", shuffle=False)

    assert len(packed) == 32
    assert_reads_right(gather, Chunks([packed], 600))


@pytest.mark.parametrize("value", [0, 1, 255])
@pytest.mark.parametrize("typesize", [1, 4, 8])
def test_constant_values_of_any_size_read_right(gather: Gather, typesize: int, value: int) -> None:
    raw = (bytes([value]) + bytes(range(1, typesize))) * (48_000 // typesize)
    packed = by_python(raw, typesize, 4800, "zstd", shuffle=typesize > 1)

    chunks = Chunks([packed], 480)

    assert chunks.rows.tobytes() == raw
    assert_reads_right(gather, chunks)


def test_bitshuffled_chunks_of_foreign_arrays_read_right(gather: Gather) -> None:
    raw = redundant(60_000)
    packed = bytes(numcodecs.blosc.compress(raw, b"zstd", 5, numcodecs.blosc.BITSHUFFLE, 6000))

    assert_reads_right(gather, Chunks([packed], 600))


# -- raw pages, mixtures, threads ------------------------------------------------------------


def test_raw_pages_are_read_as_they_are_with_their_one_row_more(gather: Gather) -> None:
    page = np.frombuffer(incompressible(17 * 600), np.uint8).reshape(17, 600)
    ids = np.array([16, 3, 15, 0, 16])
    none = np.zeros(0, np.uint64)
    dest = np.zeros((5, 600), np.uint8)
    table = (0, np.zeros(1, np.uint64), np.zeros(1, np.int64), [None])

    # Row 16 is the one that a chunk has no room for: it is pending.
    missing = gather.plan(ids, 0, 17, 16, *table, (16, page.ctypes.data, 17, 16))
    table[1][0], table[2][0] = page.ctypes.data, -17
    plan = gather.plan(ids, 0, 17, 16, *table, (16, page.ctypes.data, 17, 16))

    assert missing == [0]
    assert gather.gather(dest, 600, plan, 1) >= 0
    np.testing.assert_array_equal(dest, page[ids])
    alone = gather.plan(
        ids[:1], 0, 17, 16, 0, none, none.view(np.int64), [], (16, page.ctypes.data, 17, 16)
    )
    assert gather.gather(dest, 600, alone, 1) >= 0
    np.testing.assert_array_equal(dest[0], page[16])


def test_a_plan_lists_each_chunk_that_is_not_known_once(gather: Gather) -> None:
    table = (2, np.array([1, 0, 1], np.uint64), np.full(3, 9), [None] * 3)
    ids = np.array([9, 13, 12, 25, 14, 24, 3])

    assert gather.plan(ids, 0, 30, 4, *table, (-1, 0, 0, 0)) == [0, 3, 6]


def test_a_plan_keeps_the_chunks_alive_and_lets_them_go(gather: Gather) -> None:
    chunks = Chunks([by_python(redundant(4800), 1, 600, "zstd", shuffle=False)], 600)
    owner = chunks.packed[0]
    held = sys.getrefcount(owner)

    plan = chunks.plan(gather, np.array([0, 5, 2]))

    assert sys.getrefcount(owner) > held
    del plan
    assert sys.getrefcount(owner) == held


@pytest.mark.parametrize("n", [2, 7, 300, 70_000])
def test_ids_in_any_order_far_apart_are_sorted_right(gather: Gather, n: int) -> None:
    # Chunks of one row each, at addresses that tell the row: only the plan is looked at.
    rng = np.random.default_rng(n)
    ids = rng.integers(0, 1 << 40, n)
    page = np.arange(1000, dtype=np.int64).reshape(1000, 1)
    table = (0, np.array([page.ctypes.data], np.uint64), np.array([-1000]), [page])

    near = ids % 1000
    plan = gather.plan(near, 0, 1000, 1000, *table, (-1, 0, 0, 0))
    dest = np.zeros(n, np.int64)
    assert gather.gather(dest, 8, plan, 2) >= 0
    np.testing.assert_array_equal(dest, near)

    far = gather.plan(ids, 0, 1 << 40, 1, *table, (-1, 0, 0, 0))
    assert far == sorted(set((ids[ids != 0]).tolist()))


def mixture() -> Chunks:
    """Return chunks of every encoder, with blocks of different sizes, and a raw page."""
    row_nbytes, chunk_rows = 840, 32
    nbytes = row_nbytes * chunk_rows
    packed = [
        by_python(redundant(nbytes), 1, row_nbytes * 8, "zstd", shuffle=False),
        by_python(incompressible(nbytes), 1, row_nbytes, "lz4", shuffle=False),
        by_numcodecs(redundant(nbytes, 2), 4, row_nbytes * 3, "zstd", shuffle=True),
        by_python(zeros(nbytes), 4, row_nbytes * 2, "zstd", shuffle=True),
        by_numcodecs(blocks_of_every_kind(nbytes), 1, 1000, "zlib", shuffle=False),
        by_python(blocks_of_every_kind(nbytes), 8, 1024, "lz4hc", shuffle=True),
    ]
    if NATIVE is not None:
        packed.append(
            by_native_raw_literals(redundant(nbytes, 3), 1, row_nbytes * 4, "zstd", shuffle=False)
        )
    chunks = Chunks(packed, row_nbytes)
    page = np.frombuffer(incompressible(row_nbytes * (chunk_rows + 1), 4), np.uint8)
    chunks.add_page(page.reshape(chunk_rows + 1, row_nbytes))
    return chunks


@pytest.mark.parametrize("n_threads", [1, 2, 8])
def test_one_call_reads_chunks_of_every_kind_on_any_number_of_threads(
    gather: Gather, n_threads: int
) -> None:
    chunks = mixture()

    for seed in range(5):
        ids = np.random.default_rng(seed).integers(0, len(chunks.rows), 300)
        np.testing.assert_array_equal(chunks.read(gather, ids, n_threads), chunks.rows[ids])


@pytest.mark.parametrize("special", [zeros, constant])
@pytest.mark.parametrize("content", [redundant, incompressible, blocks_of_every_kind])
@pytest.mark.parametrize("cname", ["zstd", "zlib"])
def test_a_blosc1_chunk_reads_right_after_a_special_chunk_of_blosc2(
    gather: Gather, cname: str, content: Callable[[int], bytes], special: Callable[[int], bytes]
) -> None:
    blosc1 = by_numcodecs(content(28_800), 4, 2400, cname, shuffle=True)
    blosc2_special = by_python(special(28_800), 4, 2400, "zstd", shuffle=True)

    chunks = Chunks([blosc2_special, blosc1, blosc2_special, blosc1], 600)

    assert_reads_right(gather, chunks)


def test_fields_of_both_codecs_in_one_buffer_read_right(tmp_path: Path) -> None:
    schema = {"a": ((200,), "float32"), "b": ((200,), "float32")}
    values = np.frombuffer(redundant(64 * 800), "float32").reshape(64, 200)
    path = tmp_path / "b"
    with zbuffer.create(path, schema, codec={"a": "blosc2", "b": "blosc"}, chunk_rows=8) as buffer:
        buffer.extend(a=np.zeros_like(values), b=values)

    for backend in ("auto", "ctypes"):
        with zbuffer.open(path, gather=backend, threads=1) as buffer:
            for _ in range(2):
                assert buffer["a"][:].tobytes() == bytes(values.nbytes)
                assert buffer["b"][:].tobytes() == values.tobytes()


@pytest.mark.parametrize("n_threads", [1, 2])
def test_several_threads_may_gather_at_once(gather: Gather, n_threads: int) -> None:
    chunks = mixture()
    start = Barrier(4)

    def work(seed: int) -> bool:
        rng = np.random.default_rng(seed)
        start.wait()
        for _ in range(10):
            ids = rng.integers(0, len(chunks.rows), 200)
            if not np.array_equal(chunks.read(gather, ids, n_threads), chunks.rows[ids]):
                return False
        return True

    with ThreadPoolExecutor(4) as pool:
        assert all(pool.map(work, range(4)))


def test_a_call_without_entries_fills_nothing(gather: Gather) -> None:
    none = np.zeros(0, np.int64)

    plan = gather.plan(none, 0, 0, 4, 0, none.astype(np.uint64), none, [], (-1, 0, 0, 0))

    assert gather.gather(np.zeros((0, 4), np.uint8), 4, plan, 2) == 0


@pytest.mark.parametrize("row", [-1, 8])
def test_rows_outside_the_buffer_are_refused(gather: Gather, row: int) -> None:
    chunks = Chunks([by_python(redundant(800), 1, 100, "zstd", shuffle=False)], 100)

    with pytest.raises(IndexError, match="outside the rows"):
        chunks.plan(gather, np.array([0, row, 3]))


def test_rows_that_a_raw_page_lacks_are_refused(gather: Gather) -> None:
    chunks = Chunks([by_python(redundant(800), 1, 100, "zstd", shuffle=False)], 100)
    chunks.packed, chunks.sizes = [np.zeros((5, 100), np.uint8)], [-5]

    with pytest.raises(ValueError, match="lies outside its chunk"):
        chunks.plan(gather, np.array([5]))


def test_a_batch_too_small_for_the_plan_is_refused(gather: Gather) -> None:
    chunks = Chunks([by_python(redundant(800), 1, 100, "zstd", shuffle=False)], 100)
    dest = np.full((2, 100), 0xA5, np.uint8)
    plan = chunks.plan(gather, np.array([0, 1, 3]))

    with pytest.raises(ValueError, match="has no room"):
        gather.gather(dest, 100, plan, 1)

    assert (dest == 0xA5).all()


# -- damage ----------------------------------------------------------------------------------


@pytest.mark.parametrize("encode", ENCODERS)
@pytest.mark.parametrize("keep", [0, 1, 15, 16, 31, 32, 40, -1])
def test_a_truncated_chunk_is_a_failed_chunk(gather: Gather, encode: Encode, keep: int) -> None:
    chunks = Chunks([encode(redundant(28_800), 1, 2400, "zstd", shuffle=False)] * 3, 600)
    chunks.sizes[1] = keep if keep >= 0 else chunks.sizes[1] - 1

    with pytest.raises(RuntimeError, match=r"^chunk 4$"):
        chunks.read(gather, np.arange(144))


def test_a_chunk_of_another_length_is_a_failed_chunk(gather: Gather) -> None:
    chunks = Chunks([by_python(redundant(28_800), 1, 2400, "zstd", shuffle=False)] * 2, 600)
    other = by_python(redundant(28_200), 1, 2400, "zstd", shuffle=False)
    chunks.packed[1], chunks.sizes[1] = np.frombuffer(other, np.uint8), len(other)

    with pytest.raises(RuntimeError, match=r"^chunk 4$"):
        chunks.read(gather, np.arange(96))


def test_a_chunk_of_zero_bytes_is_a_failed_chunk(gather: Gather) -> None:
    chunks = Chunks([by_python(redundant(28_800), 1, 2400, "zstd", shuffle=False)] * 2, 600)
    chunks.packed[1] = np.zeros(chunks.sizes[1], np.uint8)

    with pytest.raises(RuntimeError, match=r"^chunk 4$"):
        chunks.read(gather, np.arange(96))


def test_damage_in_a_file_is_a_damaged_error_that_names_the_file(tmp_path: Path) -> None:
    with zbuffer.create(tmp_path / "b", {"obs": ((50, 50), "uint8")}, chunk_rows=8) as buffer:
        frames = np.frombuffer(redundant(16 * 2500), np.uint8).reshape(16, 50, 50)
        buffer.extend(obs=frames)
    file = tmp_path / "b/data/obs/c/1/0/0"
    file.write_bytes(file.read_bytes()[:100])

    for backend in ("auto", "ctypes"):
        with zbuffer.open(tmp_path / "b", gather=backend) as buffer:
            np.testing.assert_array_equal(buffer["obs"][:8], frames[:8])
            with pytest.raises(zbuffer.DamagedError) as caught:
                buffer["obs"][7:9]
        assert str(caught.value) == f"{file} is damaged: it does not decode"


def mutate(packed: bytes, rng: np.random.Generator) -> bytes:
    """Return a damaged copy: bytes changed, mostly in the headers, or the end cut off."""
    data = np.frombuffer(packed, np.uint8).copy()
    kind = rng.integers(6)
    if kind == 0:
        return packed[: rng.integers(len(packed))]
    if kind == 1:
        start = rng.integers(len(data))
        data[start:] = rng.integers(0, 256, len(data) - start)
    elif kind == 2:
        data[rng.integers(len(data), size=20)] = rng.integers(0, 256, 20)
    else:
        # One byte of the header or of the block table that follows it.
        reach = (16, 32, 120)[kind - 3]
        data[rng.integers(min(reach, len(data)))] = rng.choice([0, 1, 127, 128, 255, 42])
    return data.tobytes()


def read_mutated_chunks(backend: str, n: int) -> None:
    """Read damaged chunks, each right before a page that may not be touched."""
    import ctypes
    import mmap

    mprotect = ctypes.CDLL(None).mprotect
    mprotect.argtypes = [ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int]
    size = 16 * mmap.PAGESIZE
    area = np.frombuffer(mmap.mmap(-1, size + mmap.PAGESIZE), np.uint8)
    assert mprotect(area.ctypes.data + size, mmap.PAGESIZE, 0) == 0
    gather = make_gather(native_module("native")) if backend == "native" else make_gather(None)
    row_nbytes, chunk_rows = 600, 48
    nbytes = row_nbytes * chunk_rows
    encoders: list[Encode] = [by_python, by_numcodecs, by_split_blosc2]
    whole = [
        encode(content(nbytes), typesize, row_nbytes * 4, cname, shuffle=typesize > 1)
        for encode in encoders
        for content in (redundant, blocks_of_every_kind, zeros, repeated_value)
        for cname in CNAMES
        for typesize in (1, 4)
    ]
    rng = np.random.default_rng(0)
    refused = 0
    for number in range(n):
        damaged = mutate(whole[rng.integers(len(whole))], rng)
        print(number, flush=True)
        # Cut chunks are padded to one byte: a chunk always has an address.
        place = area[size - max(len(damaged), 1) : size]
        place[: len(damaged)] = np.frombuffer(damaged, np.uint8)
        chunks = Chunks.__new__(Chunks)
        chunks.row_nbytes, chunks.chunk_rows = row_nbytes, chunk_rows
        chunks.packed, chunks.sizes = [place], [len(damaged)]
        ids = np.sort(rng.integers(0, chunk_rows, 20))
        try:
            chunks.read(gather, ids, 1 + number % 2)
        except (RuntimeError, ValueError):
            refused += 1
    chunks = mixture()
    for number in range(0, len(chunks.rows), 7):
        assert (chunks.read(gather, [number]) == chunks.rows[number]).all()
    print("refused", refused)


@pytest.mark.parametrize("backend", [pytest.param("native", marks=needs_native), "ctypes"])
def test_damaged_chunks_never_crash_nor_touch_memory_beyond_nor_spoil_later_reads(
    backend: str,
) -> None:
    code = (
        f"import sys; sys.path[:] = {sys.path!r}\n"
        f"import test_gather; test_gather.read_mutated_chunks({backend!r}, 600)"
    )

    child = subprocess.run(
        [sys.executable, "-c", code],
        capture_output=True,
        text=True,
        check=False,
    )

    lines = child.stdout.splitlines()
    assert child.returncode == 0, f"mutation {lines[-1:]}: {child.stderr[-2000:]}"
    assert lines[-1].startswith("refused ")
    assert int(lines[-1].split()[1]) > 100
