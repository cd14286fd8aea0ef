"""Leaves that are another's bytes or its cast are not stored, and come back bit for bit; nearly equal ones are stored."""

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from snapshots import FIRST, Source, random_bytes, write

from perdure.training.checkpoint import derive
from perdure.training.checkpoint.derive import cast, find
from perdure.training.checkpoint.pack import BLOB_BYTES, DERIVED, Derived
from perdure.training.checkpoint.reader import open_checkpoint
from perdure.training.checkpoint.verify import verify_folder
from perdure.training.run_dir import RunDir, rank_pack

TORCH = {"bfloat16": torch.bfloat16, "float16": torch.float16}


def weights(size: int, seed: int = 0) -> np.ndarray:  # type: ignore[type-arg]
    return np.random.default_rng(seed).normal(0, 0.02, size).astype(np.float32)


def cast_by_torch(values: np.ndarray, dtype: str) -> bytes:  # type: ignore[type-arg]
    return torch.from_numpy(values.copy()).to(TORCH[dtype]).view(torch.int16).numpy().tobytes()


def assert_comes_back(run: RunDir, source: Source, derived: dict[str, Derived]) -> None:
    assert find(source, 2) == derived
    write(run, source)
    assert verify_folder(run.checkpoint(FIRST)) == verify_folder(run.checkpoint(FIRST), deep=False) == []
    with open_checkpoint(run.checkpoint(FIRST)) as reader:
        assert {path: entry.derived for path, entry in reader.entries.items() if entry.derived} == derived
        for path, raw in ((path, reader.read(path)) for path in reader.entries):
            assert bytes(raw) == source.bytes[path] == bytes(reader.read(path))


@pytest.mark.parametrize("dtype", ["bfloat16", "float16"])
def test_a_cast_is_that_of_torch_for_every_kind_of_number(dtype: str) -> None:
    bits = np.arange(0, 1 << 32, 9973, dtype=np.uint64).astype(np.uint32)
    bits = np.concatenate(
        [bits, (np.arange(1 << 16) << 16).astype(np.uint32), (np.arange(1 << 16) << 16 | 0x8000).astype(np.uint32)]
    )
    values = bits.view(np.float32)
    values = np.concatenate([values, np.arange(1 << 16, dtype=np.uint16).view(np.float16).astype(np.float32)])
    numbers = values[~np.isnan(values)]
    assert bytes(cast(memoryview(numbers.tobytes()), dtype)) == cast_by_torch(numbers, dtype)


def test_a_nan_becomes_the_quiet_one() -> None:
    nans = np.array([0x7FC00000, 0x7F800001, 0xFFFFFFFF, 0xFF812345, 0x7FFFFFFF, 0x7F800000], np.uint32)
    assert np.frombuffer(cast(nans.view(np.uint8).data, "bfloat16"), np.uint16).tolist() == [0x7FC0] * 5 + [0x7F80]
    half = [0x7E00, 0x7E00, 0xFE00, 0xFE00, 0x7E00, 0x7C00]
    assert np.frombuffer(cast(nans.view(np.uint8).data, "float16"), np.uint16).tolist() == half


@pytest.mark.parametrize("dtype", ["bfloat16", "float16"])
@pytest.mark.parametrize("size", [2048, 100_001, BLOB_BYTES // 2 + 7, BLOB_BYTES // 4 * 3])
def test_the_copy_of_an_fp32_master_is_not_stored(run: RunDir, dtype: str, size: int) -> None:
    master = weights(size)
    source = Source().tensor("model/w", dtype, (size,), cast_by_torch(master, dtype)).array("moment", weights(size, 1))
    source.tensor("optimizer/w", "float32", (1, size), master.tobytes())
    assert_comes_back(run, source, {"model/w": Derived("cast", "optimizer/w")})


def test_tied_and_identical_leaves_are_stored_once(run: RunDir) -> None:
    tied, noise = weights(50_000), random_bytes(1, 9001)
    source = Source().array("head", tied).array("embedding", tied).tensor("a", "uint8", (9001,), noise)
    source.tensor("b", "int8", (9001,), noise).array("other", weights(50_000, 3))
    assert_comes_back(run, source, {"embedding": Derived("same", "head"), "b": Derived("same", "a")})


def test_tied_halves_are_both_made_from_the_master_and_twin_masters_from_one(run: RunDir) -> None:
    master = weights(50_000)
    half = cast_by_torch(master, "bfloat16")
    source = Source().tensor("head", "bfloat16", (50_000,), half).tensor("embedding", "bfloat16", (50_000,), half)
    source.array("twin", master).array("master", master)
    told = {"head": Derived("cast", "twin"), "embedding": Derived("cast", "twin"), "master": Derived("same", "twin")}
    assert_comes_back(run, source, told)


@pytest.mark.parametrize("at", [0, 1, 77_777, 150_001, 199_999])
def test_one_other_bit_anywhere_and_it_is_stored(run: RunDir, at: int) -> None:
    master = weights(100_000)
    half, twin = bytearray(cast_by_torch(master, "bfloat16")), bytearray(master.tobytes())
    half[at] ^= 1
    twin[2 * at] ^= 1
    source = Source().tensor("half", "bfloat16", (100_000,), bytes(half)).array("master", master)
    assert_comes_back(run, source.tensor("twin", "float32", (100_000,), bytes(twin)), {})


def test_among_masters_with_the_same_sample_the_right_one_is_found(run: RunDir) -> None:
    master = weights(100_000)
    near = master.copy()
    near[12_345] += 1
    source = Source().array("near", near).array("master", master)
    source.tensor("half", "float16", (100_000,), cast_by_torch(master, "float16"))
    assert_comes_back(run, source, {"half": Derived("cast", "master")})


def test_constant_small_plain_and_strange_leaves_are_left_to_the_codec(run: RunDir) -> None:
    source = Source().array("z1", np.zeros(5000, np.float32)).array("z2", np.zeros(5000, np.float32))
    source.tensor("z3", "bfloat16", (5000,), bytes(10_000)).array("s1", weights(100)).array("s2", weights(100))
    source.plain("p1", "x" * 9000).plain("p2", "x" * 9000).array("e", np.zeros((0,), np.float32))
    assert_comes_back(run, source, {})


def test_when_nothing_can_be_alike_nothing_is_read(monkeypatch: pytest.MonkeyPatch) -> None:
    looked: list[str] = []
    source = Source()
    for number in range(50):
        source.array(f"w{number}", weights(5000 + number, number))
    monkeypatch.setattr(source, "data", lambda entry: looked.append(entry.path))
    assert find(source, 2) == {}
    assert looked == []


def test_damage_of_the_source_is_damage_of_what_is_made_from_it_too(run: RunDir) -> None:
    master = weights(10_000)
    write(run, Source().tensor("half", "bfloat16", (10_000,), cast_by_torch(master, "bfloat16")).array("master", master))
    folder = run.checkpoint(FIRST)
    with open_checkpoint(folder) as reader:
        assert {blob.layout[0] for blob in reader.entries["half"].blobs} == {DERIVED}
    pack = folder / rank_pack(0)
    data = bytearray(pack.read_bytes())
    data[len(data) // 2] ^= 4
    pack.write_bytes(data)
    found = verify_folder(folder)
    assert [damage.part for damage in found] == ["half", "master"]
    assert "made from a damaged leaf" in found[0].detail
    assert [damage.part for damage in verify_folder(folder, deep=False)] == ["master"]


def test_pieces_and_blobs_meet_at_even_places() -> None:
    assert BLOB_BYTES % (4 * derive._PIECE) == 0


@settings(max_examples=30, deadline=None)
@given(st.lists(st.sampled_from(["master", "half", "other", "twin"]), max_size=7), st.sampled_from(["bfloat16", "float16"]))
def test_no_source_is_itself_derived_and_each_gives_the_bytes(leaves: list[str], dtype: str) -> None:
    masters = {"master": weights(3000), "other": weights(3000, 1)}
    masters["twin"] = masters["master"]
    source = Source()
    for number, kind in enumerate(leaves):
        if kind == "half":
            source.tensor(f"{number}", dtype, (3000,), cast_by_torch(masters["master"], dtype))
        else:
            source.array(f"{number}", masters[kind])
    found = find(source, 1)
    assert not {derived.source for derived in found.values()} & set(found)
    for path, derived in found.items():
        raw = source.bytes[derived.source]
        assert source.bytes[path] == (raw if derived.how == "same" else bytes(cast(memoryview(raw), dtype)))
    distinct = {source.bytes[entry.path] for entry in source.entries}
    stored = len(leaves) - len(found)
    assert stored <= len(distinct)
