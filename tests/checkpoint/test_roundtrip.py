"""What is written comes back bit for bit: every dtype, odd sizes, several ranks, plain values, planes."""

import math
from collections import OrderedDict
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import safetensors.numpy
from hypothesis import given, settings
from hypothesis import strategies as st
from snapshots import FIRST, Source, item_bytes, random_bytes, small_source, write

from perdure.training.checkpoint import manifest
from perdure.training.checkpoint.layout import ITEM_SIZES
from perdure.training.checkpoint.pack import BLOB_BYTES
from perdure.training.checkpoint.plain import MAX_DEPTH, pack_plain, unpack_plain
from perdure.training.checkpoint.reader import open_checkpoint
from perdure.training.checkpoint.restore import restore_safetensors, tensor_name
from perdure.training.checkpoint.verify import verify_folder
from perdure.training.errors import CheckpointDamaged, CheckpointNotFound, PerdureError
from perdure.training.run_dir import RunDir

DTYPES = sorted(set(ITEM_SIZES) - {"plain"})


def assert_comes_back(run: RunDir, *sources: Source, threads: int = 2) -> None:
    """Write, verify, read every leaf both ways."""
    written = write(run, *sources, threads=threads)
    folder = run.checkpoint(written.name)
    assert verify_folder(folder) == []
    assert manifest.read(folder) == written
    with open_checkpoint(folder) as reader:
        assert reader.ranks == len(sources)
        for rank, source in enumerate(sources):
            assert list(reader.rank_entries(rank)) == [entry.path for entry in source.entries]
            for entry in source.entries:
                found = reader.rank_entries(rank)[entry.path]
                assert (found.kind, found.dtype, found.shape, found.nbytes) == (
                    entry.kind,
                    entry.dtype,
                    entry.shape,
                    entry.nbytes,
                )
                assert bytes(reader.read(entry.path, rank)) == source.bytes[entry.path]
                out = memoryview(bytearray(entry.nbytes))
                reader.read_into(entry.path, out, rank)
                assert out == source.bytes[entry.path]


@pytest.mark.parametrize("dtype", DTYPES)
def test_every_dtype_comes_back_from_random_bytes_of_every_shape(run: RunDir, dtype: str) -> None:
    source, item = Source(), item_bytes(dtype)
    for number, shape in enumerate([(), (0,), (3, 0, 2), (1,), (7,), (33, 5), (129, 3, 2)]):
        source.tensor(f"m/{number}", dtype, shape, random_bytes((dtype, number), math.prod(shape) * item))
    assert_comes_back(run, source)


def test_nan_payloads_infinities_and_negative_zero_keep_their_bits(run: RunDir) -> None:
    bits32 = np.array([0x7FC00001, 0xFFC12345, 0x7F800001, 0x80000000, 0, 0x7F800000, 0xFF800000, 1] * 100, np.uint32)
    bits64 = np.array([0x7FF8000000000001, 0xFFF0000000000001, 1 << 63, 0x7FF0000000000000] * 100, np.uint64)
    bits16 = np.arange(1 << 16, dtype=np.uint16)
    source = Source()
    source.tensor("a", "float32", bits32.shape, bits32.tobytes()).tensor("b", "float64", bits64.shape, bits64.tobytes())
    source.tensor("c", "bfloat16", bits16.shape, bits16.tobytes()).tensor("d", "float16", bits16.shape, bits16.tobytes())
    source.tensor("e", "complex64", (400,), bits32.tobytes()).plain("p", [math.nan, -0.0, -math.inf, complex(-0.0, math.nan)])
    assert_comes_back(run, source)


def test_leaves_around_the_blob_border_come_back(run: RunDir) -> None:
    source = Source()
    noise = np.frombuffer(random_bytes("border", BLOB_BYTES + 4096), np.uint8)
    for extra in (-1, 0, 1):
        source.tensor(f"bytes{extra}", "uint8", (BLOB_BYTES + extra,), noise[: BLOB_BYTES + extra].tobytes())
    source.tensor("f4", "float32", (BLOB_BYTES // 4 + 3,), noise[: BLOB_BYTES + 12].tobytes())
    source.array("zeros", np.zeros(2 * BLOB_BYTES // 8 + 1, np.int64))
    assert_comes_back(run, source)
    with open_checkpoint(run.checkpoint(FIRST)) as reader:
        assert [[blob.raw for blob in entry.blobs] for entry in reader.entries.values()] == [
            [BLOB_BYTES - 1],
            [BLOB_BYTES],
            [BLOB_BYTES, 1],
            [BLOB_BYTES, 12],
            [BLOB_BYTES, BLOB_BYTES, 8],
        ]


@pytest.mark.parametrize("threads", [1, 3])
def test_several_ranks_come_back_whatever_the_number_of_threads(run: RunDir, threads: int) -> None:
    assert_comes_back(run, small_source(seed=1), small_source(seed=2), small_source(seed=3), threads=threads)


def test_a_state_of_no_leaves_and_one_of_empty_leaves_come_back(run: RunDir) -> None:
    assert_comes_back(run, Source())
    assert_comes_back(run, Source(step=3).array("nothing", np.zeros((0,), np.float32)))


def test_the_same_state_has_the_same_digest_whoever_writes_it_and_any_difference_another(tmp_path: Path) -> None:
    def digest(folder: str, source: Source, threads: int = 1) -> str:
        return write(RunDir(tmp_path / folder), source, threads=threads).state_digest

    zeros = np.zeros((2, 3), np.float32)
    same = digest("a", Source().array("w", zeros).array("v", zeros))
    assert same == digest("b", Source(step=9, loss={"mean": 2.0}).array("v", zeros).array("w", zeros), threads=3)
    others = [
        Source().array("w", zeros),
        Source().array("w", zeros).array("u", zeros),
        Source().array("w", zeros).array("v", zeros.reshape(3, 2)),
        Source().array("w", zeros).array("v", zeros.astype(np.int32)),
        Source().array("w", zeros).array("v", -zeros),
    ]
    assert len({digest(f"c{number}", other) for number, other in enumerate(others)} | {same}) == 6


def test_what_the_rank_says_of_itself_stands_in_the_manifest(run: RunDir) -> None:
    told = {"world": {"size": 2, "mesh": [2, 1]}, "data": {"samples": 1 << 40}, "loss": {"mean": 0.1, "bad": None}}
    found = write(run, Source(step=5, exact=False, exact_reasons=("cudnn.benchmark",), **told))
    again = manifest.read(run.checkpoint(found.name))
    assert (again.world, again.data, again.loss) == (told["world"], told["data"], told["loss"])
    assert (again.step, again.token, again.run, again.exact, again.exact_reasons) == (
        5,
        1,
        "gpt-1234",
        False,
        ("cudnn.benchmark",),
    )
    assert again.raw_bytes == again.leaves == 0


def test_writing_again_gives_the_committed_one_and_refuses_another_state(run: RunDir) -> None:
    first = write(run, small_source())
    before = run.manifest(FIRST).read_bytes()
    assert write(run, small_source()) == first
    with pytest.raises(CheckpointDamaged, match="committed already"):
        write(run, small_source(seed=1))
    assert run.manifest(FIRST).read_bytes() == before


@pytest.mark.parametrize("broken", ["short", "long", "dtype", "shape", "twice", "no path", "kind"])
def test_a_snapshot_that_could_not_be_read_back_is_refused_and_leaves_nothing(run: RunDir, broken: str) -> None:
    source = small_source()
    data = random_bytes(broken, 4000)
    source.tensor(
        "" if broken == "no path" else "model/weight" if broken == "twice" else "broken",
        "float7" if broken == "dtype" else "float32",
        (999,) if broken == "shape" else (1000,),
        data,
        kind="pickle" if broken == "kind" else "tensor",
    )
    if broken in ("short", "long"):
        source.bytes["broken"] = data[:-1] if broken == "short" else data + b"x"
    with pytest.raises(PerdureError):
        write(run, source)
    assert list(run.checkpoints.iterdir()) == []


# plain values

scalars = st.none() | st.booleans() | st.integers() | st.integers(-(1 << 80), 1 << 80) | st.floats() | st.text() | st.binary()
hashable = st.recursive(
    scalars | st.complex_numbers(),
    lambda inner: st.tuples(inner) | st.tuples(inner, inner) | st.frozensets(inner, max_size=3),
    max_leaves=5,
)
values = st.recursive(
    hashable,
    lambda inner: (
        st.lists(inner, max_size=4)
        | st.tuples(inner, inner)
        | st.dictionaries(hashable, inner, max_size=4)
        | st.dictionaries(st.text(), inner, max_size=4).map(OrderedDict)
        | st.sets(hashable, max_size=4)
    ),
    max_leaves=20,
)


def same(a: Any, b: Any) -> bool:
    """Equal in value, type and order, with NaN equal to itself and -0.0 unlike 0.0 (repr tells all of it, but for sets)."""
    if type(a) is not type(b):
        return False
    if isinstance(a, (list, tuple)):
        return len(a) == len(b) and all(map(same, a, b))
    if isinstance(a, dict):
        return same(list(a.items()), list(b.items()))
    if isinstance(a, (set, frozenset)):
        return len(a) == len(b) and sorted(map(pack_key, a)) == sorted(map(pack_key, b))
    return repr(a) == repr(b)


def pack_key(value: Any) -> bytes:
    return pack_plain(value, "key")


@settings(max_examples=200, deadline=None)
@given(values)
def test_any_plain_value_comes_back_with_type_and_order_and_always_as_the_same_bytes(value: Any) -> None:
    data = pack_plain(value, "x")
    assert same(unpack_plain(data), value)
    assert pack_plain(unpack_plain(data), "x") == data


def test_integers_at_the_border_of_64_bits_come_back() -> None:
    numbers = [sign * (1 << power) + off for power in (31, 32, 63, 64, 20_000) for sign in (1, -1) for off in (-1, 0, 1)]
    assert unpack_plain(pack_plain(numbers, "x")) == numbers


@pytest.mark.parametrize(
    "value",
    [object(), Path("x"), np.float32(1), np.zeros(2), bytearray(b"x"), int, range(3), "\ud800", type("I", (int,), {})(3)],
)
def test_what_is_not_plain_is_refused_by_path_and_type(value: Any) -> None:
    with pytest.raises(PerdureError, match="not Unicode" if isinstance(value, str) else "^loader/state/0 is "):
        pack_plain({"state": [value]}, "loader")


def test_a_cycle_is_refused_and_the_deepest_allowed_value_comes_back() -> None:
    cycle: list[Any] = []
    cycle.append(cycle)
    with pytest.raises(PerdureError, match="cycle"):
        pack_plain(cycle, "x")
    deep: Any = 1
    for _ in range(MAX_DEPTH):
        deep = [deep]
    assert unpack_plain(pack_plain(deep, "x")) == deep
    with pytest.raises(PerdureError, match="nested"):
        pack_plain([deep], "x")


# restore


def test_a_restored_file_is_read_by_safetensors_with_every_bit(run: RunDir, tmp_path: Path) -> None:
    source = small_source().array("model/a%2Fb", np.array(-0.0, np.float64))
    write(run, source)
    out = tmp_path / "out.safetensors"
    with open_checkpoint(run.checkpoint(FIRST)) as reader:
        size = restore_safetensors(reader, out)
    found = safetensors.numpy.load_file(out)
    tensors = {tensor_name(entry.path): entry for entry in source.entries if entry.kind == "tensor"}
    assert {name: value.tobytes() for name, value in found.items()} == {n: source.bytes[e.path] for n, e in tensors.items()}
    assert {name: value.shape for name, value in found.items()} == {name: entry.shape for name, entry in tensors.items()}
    assert "model.a/b" in found
    assert size == sum(entry.nbytes for entry in tensors.values())


def test_only_restores_what_matches_and_says_when_nothing_does(run: RunDir, tmp_path: Path) -> None:
    write(run, small_source())
    with open_checkpoint(run.checkpoint(FIRST)) as reader:
        restore_safetensors(reader, tmp_path / "out", only="model.*")
        assert sorted(safetensors.numpy.load_file(tmp_path / "out")) == ["model.weight", "model.zeros"]
        with pytest.raises(CheckpointNotFound, match="nothing-like-it"):
            restore_safetensors(reader, tmp_path / "none", only="nothing-like-it")
    assert not (tmp_path / "none").exists()
