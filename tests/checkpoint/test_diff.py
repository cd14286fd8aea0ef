"""diff names every leaf that differs, with the numbers NumPy and torch would give, of every type; and reads nothing else."""

import math
import tracemalloc
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from snapshots import FIRST, Source, random_bytes, write

from perdure.training.checkpoint.diff import Change, LeafDiff, diff
from perdure.training.checkpoint.layout import ITEM_SIZES
from perdure.training.checkpoint.reader import open_checkpoint
from perdure.training.checkpoint.widen import distance, is_integer, widened, words_of
from perdure.training.errors import CheckpointDamaged
from perdure.training.run_dir import RunDir, rank_pack

torch = pytest.importorskip("torch")
SMALL = [f"float8_{kind}" for kind in ("e4m3fn", "e5m2", "e4m3fnuz", "e5m2fnuz", "e8m0fnu")]
WIDE = sorted({*ITEM_SIZES} - {"plain", "float4_e2m1fn_x2", *SMALL})


def compare(tmp_path: Path, old: Source, new: Source, only: str | None = None) -> list[LeafDiff]:
    runs = [RunDir(tmp_path / "a"), RunDir(tmp_path / "b")]
    for run, source in zip(runs, (old, new), strict=True):
        if not run.root.exists():
            write(run, source)
    with open_checkpoint(runs[0].checkpoint(FIRST)) as a, open_checkpoint(runs[1].checkpoint(FIRST)) as b:
        return list(diff(a, b, only=only))


def tensor(dtype: str, data: bytes) -> Any:
    return torch.frombuffer(bytearray(data), dtype=getattr(torch, dtype))


# numbers


@pytest.mark.parametrize("dtype", SMALL)
def test_every_eight_bit_float_is_torch_s(dtype: str) -> None:
    every = bytes(range(256))
    expected = tensor(dtype, every).to(torch.float32).to(torch.float64).numpy()
    np.testing.assert_array_equal(widened(words_of(memoryview(every), dtype), dtype), expected)


def test_every_four_bit_float_is_as_the_format_says() -> None:
    positive = [0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0]
    words = words_of(memoryview(bytes([0x10, 0x32, 0x54, 0x76, 0x98, 0xBA, 0xDC, 0xFE])), "float4_e2m1fn_x2")
    assert widened(words, "float4_e2m1fn_x2").tolist() == [*positive, *(-value for value in positive)]


@pytest.mark.parametrize("dtype", WIDE)
def test_any_bits_of_a_wide_type_are_torch_s_numbers(dtype: str) -> None:
    data = random_bytes(dtype, 1 << 15)
    if dtype == "bool":
        data = bytes(byte & 1 for byte in data)
    wide = "complex128" if dtype.startswith("complex") else "float64"
    expected = tensor(dtype, data).to(getattr(torch, wide)).numpy()
    np.testing.assert_array_equal(widened(words_of(memoryview(data), dtype), dtype), expected)


@pytest.mark.parametrize("dtype", [name for name in WIDE if is_integer(name) and name != "bool"])
@given(data=st.data())
@settings(max_examples=50, deadline=None)
def test_distances_of_integers_are_exact_however_far_apart(dtype: str, data: st.DataObject) -> None:
    info = np.iinfo(dtype)
    numbers = st.integers(int(info.min), int(info.max))
    pairs = data.draw(st.lists(st.tuples(numbers, numbers), min_size=1, max_size=20))
    sides = [np.array([pair[side] for pair in pairs], dtype) for side in (0, 1)]
    words = [words_of(memoryview(side.tobytes()), dtype) for side in sides]
    assert distance(words[0], words[1], dtype).tolist() == [float(abs(x - y)) for x, y in pairs]


# tensors


def test_equal_checkpoints_differ_in_nothing(tmp_path: Path) -> None:
    source = Source().array("w", np.arange(9.0)).plain("p", {"a": 1})
    assert compare(tmp_path, source, Source().plain("p", {"a": 1}).array("w", np.arange(9.0))) == []


def test_a_changed_tensor_tells_how_much_and_how_many(tmp_path: Path) -> None:
    old = np.arange(12, dtype=np.float32).reshape(3, 4)
    new = old.copy()
    new[0, 0], new[2, 3] = 3.0, 7.0
    (found,) = compare(tmp_path, Source().array("w", old), Source().array("w", new))
    assert (found.path, found.what, found.old, found.elements, found.differing) == ("w", "changed", "float32[3, 4]", 12, 2)
    assert (found.max_abs, found.not_finite, found.share) == (4.0, 0, 2 / 12)
    assert found.rms == pytest.approx(math.sqrt((9 + 16) / 12), rel=1e-12)


@pytest.mark.parametrize("dtype", [*WIDE, *SMALL])
def test_of_any_type_the_figures_are_those_of_one_computation_over_the_whole(tmp_path: Path, dtype: str) -> None:
    size = 3 * (1 << 17) * ITEM_SIZES[dtype] // 2
    a = np.frombuffer(random_bytes("a", size), np.uint8).copy()
    b = a.copy()
    b[size // 3 : size // 2] = np.frombuffer(random_bytes("b", size // 2 - size // 3), np.uint8)
    if dtype == "bool":
        a, b = a & 1, b & 1
    shape = (size // ITEM_SIZES[dtype],)
    (found,) = compare(
        tmp_path, Source().tensor("w", dtype, shape, a.tobytes()), Source().tensor("w", dtype, shape, b.tobytes())
    )
    words = [words_of(memoryview(side.tobytes()), dtype) for side in (a, b)]
    bits = (words[0] != words[1]).reshape(shape[0], -1).any(axis=1)
    with np.errstate(all="ignore"):
        x, y = (widened(side, dtype).astype(np.clongdouble if dtype.startswith("complex") else np.longdouble) for side in words)
        far = np.abs(x - y)[bits]
        far[~np.isfinite(far.astype(np.float64))] = np.nan
    finite = far[np.isfinite(far)]
    assert found.differing == np.count_nonzero(bits) > 0
    assert found.not_finite == len(far) - len(finite)
    assert found.max_abs == pytest.approx(float(finite.max()), rel=1e-12)
    rms = float(np.sqrt(np.sum(finite**2) / (shape[0] - found.not_finite)))
    assert found.rms == pytest.approx(rms, rel=1e-9)


def test_nan_and_infinity_are_counted_and_leave_the_figures_alone(tmp_path: Path) -> None:
    inf, nan = math.inf, math.nan
    old = np.array([1.0, nan, inf, -inf, inf, 1.0, 0.0, 5.0])
    new = np.array([1.5, nan, inf, inf, 2.0, nan, -0.0, 5.0])
    (found,) = compare(tmp_path, Source().array("w", old), Source().array("w", new))
    assert (found.differing, found.not_finite, found.max_abs) == (5, 3, 0.5)
    assert found.rms == pytest.approx(math.sqrt(0.25 / 5))


def test_squares_that_overflow_do_not(tmp_path: Path) -> None:
    (found,) = compare(tmp_path, Source().array("w", np.zeros(2)), Source().array("w", np.array([3e200, 4e200])))
    assert found.max_abs == 4e200
    assert found.rms == pytest.approx(5e200 / math.sqrt(2))


def test_added_removed_and_retyped_leaves_are_named(tmp_path: Path) -> None:
    old = Source().array("gone", np.zeros(2)).array("kind", np.zeros(4, np.float32)).array("shape", np.zeros((2, 3)))
    new = Source().array("kind", np.zeros(4, np.float16)).array("shape", np.zeros((3, 2))).array("new", np.zeros(1, np.int8))
    old.plain("mixed", 1)
    new.array("mixed", np.zeros(1))
    assert [(one.path, one.what, one.old, one.new) for one in compare(tmp_path, old, new)] == [
        ("gone", "removed", "float64[2]", ""),
        ("kind", "retyped", "float32[4]", "float16[4]"),
        ("mixed", "retyped", "plain", "float64[1]"),
        ("new", "added", "", "int8[1]"),
        ("shape", "retyped", "float64[2, 3]", "float64[3, 2]"),
    ]


def test_each_rank_s_leaves_are_compared_with_the_same_rank_s(tmp_path: Path) -> None:
    runs = [RunDir(tmp_path / "a"), RunDir(tmp_path / "b")]
    for number, run in enumerate(runs):
        write(run, Source().array("w", np.zeros(3)), Source().array("w", np.full(3, float(number))))
    with open_checkpoint(runs[0].checkpoint(FIRST)) as a, open_checkpoint(runs[1].checkpoint(FIRST)) as b:
        assert [(one.rank, one.path, one.max_abs) for one in diff(a, b)] == [(1, "w", 1.0)]


def test_only_what_matches_is_compared(tmp_path: Path) -> None:
    old = Source().array("model/w", np.zeros(2)).array("optimizer/w", np.zeros(2))
    new = Source().array("model/w", np.ones(2)).array("optimizer/w", np.ones(2))
    assert [one.path for one in compare(tmp_path, old, new, "model.*")] == ["model/w"]
    assert [one.path for one in compare(tmp_path, old, new, "optimizer/*")] == ["optimizer/w"]
    assert compare(tmp_path, old, new, "nothing") == []


def test_what_is_equal_is_not_read(tmp_path: Path) -> None:
    """Damage in an equal leaf, or an equal blob of a changed one, goes unseen; in what is compared it is refused."""
    size = 9 << 20
    old = (
        Source()
        .tensor("equal", "uint8", (size,), random_bytes(1, size))
        .tensor("half", "uint8", (size,), random_bytes(2, size))
    )
    other = old.bytes["half"][:-1] + bytes([old.bytes["half"][-1] ^ 1])
    new = Source().tensor("equal", "uint8", (size,), old.bytes["equal"]).tensor("half", "uint8", (size,), other)
    assert [one.differing for one in compare(tmp_path, old, new)] == [1]
    folder = RunDir(tmp_path / "a").checkpoint(FIRST)
    with open_checkpoint(folder) as reader:
        equal, half = reader.entries["equal"].blobs[0], reader.entries["half"].blobs
    _flip(folder / rank_pack(0), equal.offset)
    _flip(folder / rank_pack(0), half[0].offset)
    assert [one.differing for one in compare(tmp_path, old, new)] == [1]
    _flip(folder / rank_pack(0), half[1].offset)
    with pytest.raises(CheckpointDamaged, match="half"):
        compare(tmp_path, old, new)


def _flip(path: Path, at: int) -> None:
    data = bytearray(path.read_bytes())
    data[at] ^= 1
    path.write_bytes(data)


def test_memory_stays_a_few_blobs_however_large_the_tensor(tmp_path: Path) -> None:
    size = 64 << 20
    old = Source().tensor("w", "bfloat16", (size // 2,), random_bytes(1, size))
    new = Source().tensor("w", "bfloat16", (size // 2,), random_bytes(2, size))
    for run, source in zip(("a", "b"), (old, new), strict=True):
        write(RunDir(tmp_path / run), source)
    tracemalloc.start()
    try:
        (found,) = compare(tmp_path, old, new)
        peak = tracemalloc.get_traced_memory()[1]
    finally:
        tracemalloc.stop()
    assert found.differing > size // 4
    assert peak < size


# plain leaves


@pytest.mark.parametrize(
    ("old", "new", "changes"),
    [
        (1, 2, [("", "1", "2")]),
        ({"a": {"b": 1}, "c": 3}, {"a": {"b": 2}, "d": 4}, [("a/b", "1", "2"), ("c", "3", None), ("d", None, "4")]),
        ([1, 2], [1, 3, 4], [("1", "2", "3"), ("2", None, "4")]),
        ({"x": (0.5, math.nan)}, {"x": (0.25, math.nan)}, [("x/0", "0.5", "0.25")]),
        ({"x": 0.0, "y": 1}, {"x": -0.0, "y": True}, [("x", "0.0", "-0.0"), ("y", "1", "True")]),
        ({"x": [1]}, {"x": (1,)}, [("x", "[1]", "(1,)")]),
        ({"a": 1, "b": 2}, {"b": 2, "a": 1}, [(" (order of keys)", "['a', 'b']", "['b', 'a']")]),
        ({"s": {3, 1}}, {"s": {1, 2}}, [("s", "set(['1', '3'])", "set(['1', '2'])")]),
    ],
)
def test_a_plain_leaf_tells_which_values_changed(
    tmp_path: Path, old: Any, new: Any, changes: list[tuple[str, str | None, str | None]]
) -> None:
    (found,) = compare(tmp_path, Source().plain("p", old), Source().plain("p", new))
    assert found.what == "values"
    assert found.values == tuple(Change(key=key, old=x, new=y) for key, x, y in changes)


def test_long_values_are_shortened(tmp_path: Path) -> None:
    (found,) = compare(tmp_path, Source().plain("p", "a" * 10**6), Source().plain("p", "b" * 10**6))
    assert [len(text or "") for text in (found.values[0].old, found.values[0].new)] == [200, 200]
