"""Blobs of every type and content come back bit for bit, are as small, and are refused where they do not fit."""

from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from perdure.training.checkpoint import planes
from perdure.training.checkpoint.codec import EncodedBlob, decode_blob, encode_blob, encode_delta
from perdure.training.checkpoint.layout import CONSTANT, DELTA, EXPONENT, FILL, ITEM_SIZES, PLANES, RAW, ROTATED, WHOLE, ZSTD
from perdure.training.checkpoint.pack import BLOB_BYTES

DTYPES = sorted(ITEM_SIZES)
CONTENTS = ["noise", "zeros", "few", "normal", "one"]


def content(kind: str, size: int, item: int, seed: int) -> bytes:
    rng = np.random.default_rng(seed)
    if kind == "noise":
        return rng.bytes(size)
    if kind == "zeros":
        return bytes(size)
    if kind == "few":
        return rng.integers(0, 3, size, np.uint8).tobytes()
    if kind == "one":
        return (rng.bytes(item) * (size // item + 1))[:size]
    return np.resize(rng.normal(0, 0.02, 5000).astype(np.float32), size // 4 + 1).tobytes()[:size]


def stored(blob: EncodedBlob) -> memoryview:
    data = b"".join(bytes(memoryview(part)) for part in blob.parts)
    assert len(data) == blob.stored
    return memoryview(data)


def decoded(data: memoryview, layout: Any, dtype: str, size: int, base: bytes | None = None) -> bytes:  # Any: also wrong ones
    out = bytearray(size)
    decode_blob(data, layout, dtype, memoryview(out), None if base is None else memoryview(base))
    return bytes(out)


@settings(max_examples=120, deadline=None)
@given(
    st.sampled_from(DTYPES),
    st.integers(0, 300),
    st.sampled_from(CONTENTS),
    st.sampled_from(["auto", "raw", "small"]),
    st.integers(0, 9),
)
def test_a_blob_of_any_type_and_content_decodes_to_itself(dtype: str, items: int, kind: str, encoding: str, seed: int) -> None:
    size = items * items * ITEM_SIZES[dtype]
    raw = content(kind, size, ITEM_SIZES[dtype], seed)
    blob = encode_blob(memoryview(raw), dtype, encoding)
    assert decoded(stored(blob), blob.layout, dtype, size) == raw


@settings(max_examples=120, deadline=None)
@given(
    st.sampled_from(DTYPES),
    st.integers(1, 200),
    st.sampled_from(CONTENTS),
    st.sampled_from(CONTENTS),
    st.sampled_from(["auto", "raw"]),
)
def test_a_difference_from_any_base_decodes_to_the_new_bytes(dtype: str, items: int, old: str, new: str, encoding: str) -> None:
    size = items * items * ITEM_SIZES[dtype]
    base, raw = content(old, size, ITEM_SIZES[dtype], 1), content(new, size, ITEM_SIZES[dtype], 2)
    blob = encode_delta(memoryview(raw), memoryview(base), dtype, encoding)
    assert blob.layout[0] == DELTA
    assert decoded(stored(blob), blob.layout, dtype, size, base) == raw


@pytest.mark.parametrize("pieces", [1, 2, 3])
@pytest.mark.parametrize("width", [2, 4, 8])
def test_splitting_is_undone_beyond_one_piece_of_the_cache(width: int, pieces: int) -> None:
    size = pieces * planes._PIECE + 8 * 7
    words = np.frombuffer(np.random.default_rng(width).bytes(size), np.dtype(f"<u{width}"))
    base = np.frombuffer(np.random.default_rng(9).bytes(size), words.dtype)
    joined, zigzag = np.empty_like(words), planes.subtract(words, base)
    planes.join_exponent(planes.split_exponent(words), joined)
    assert joined.tobytes() == words.tobytes()
    planes.join_bytes(planes.split_bytes(base), joined)
    assert joined.tobytes() == base.tobytes()
    planes.add(planes.split_bytes(zigzag), base, joined)
    assert joined.tobytes() == words.tobytes()


def test_the_first_plane_of_a_float_is_its_exponent_and_noise_is_left_alone() -> None:
    values = np.random.default_rng(0).normal(0, 0.02, 500_000).astype(np.float32)
    blob = encode_blob(memoryview(values.tobytes()), "float32", "auto")
    transform, kinds = blob.layout[0], [kind for kind, _ in blob.layout[1]]
    assert (transform, kinds) == (EXPONENT, [ZSTD, RAW, RAW])
    exponents = planes.split_exponent(values.view(np.uint32))[0]
    _, expected = np.frexp(values)  # 0.5 <= mantissa < 1, so one more than the biased exponent says
    assert np.array_equal(exponents.astype(int) - 126, expected)


@pytest.mark.parametrize(("dtype", "least"), [("float32", 1.19), ("bfloat16", 1.48), ("float16", 1.10)])
def test_weights_shrink_as_far_as_the_entropy_of_their_exponents_lets_them(dtype: str, least: float) -> None:
    values = np.random.default_rng(0).normal(0, 0.02, 1_000_000).astype(np.float32)
    raw = {
        "float32": values.tobytes(),
        "bfloat16": (values.view(np.uint32) >> 16).astype(np.uint16).tobytes(),
        "float16": values.astype(np.float16).tobytes(),
    }[dtype]
    blob = encode_blob(memoryview(raw), dtype, "auto")
    assert len(raw) / blob.stored >= least


def test_a_small_encoding_is_never_larger_than_auto() -> None:
    for kind in CONTENTS:
        raw = memoryview(content(kind, 1 << 20, 4, 3))
        assert encode_blob(raw, "float32", "small").stored <= 1.01 * encode_blob(raw, "float32", "auto").stored


def test_raw_hands_out_the_snapshots_own_bytes() -> None:
    raw = memoryview(content("normal", 1 << 20, 4, 0))
    blob = encode_blob(raw, "float32", "raw")
    assert blob.layout == (WHOLE, ((RAW, 1 << 20),))
    assert blob.parts[0] is raw


@pytest.mark.parametrize("dtype", DTYPES)
def test_a_constant_is_one_element(dtype: str) -> None:
    item = ITEM_SIZES[dtype]
    blob = encode_blob(memoryview(bytes(range(1, item + 1)) * 5000), dtype, "auto")
    assert blob.layout == (FILL, ((RAW, item),))


def test_words_that_step_up_one_by_one_from_the_base_are_almost_nothing() -> None:
    base = np.random.default_rng(0).normal(0, 1, 1_000_000).astype(np.float32).view(np.uint32)
    moved = base + (np.arange(1_000_000) % 3 == 0).astype(np.uint32)
    blob = encode_delta(memoryview(moved.tobytes()), memoryview(base.tobytes()), "float32", "auto")
    assert [kind for kind, _ in blob.layout[1]] == [CONSTANT, CONSTANT, CONSTANT, ZSTD]
    assert blob.stored < moved.nbytes / 10


def test_encoding_leaves_the_snapshot_as_it_is() -> None:
    raw = bytearray(content("normal", 40_000, 2, 5))
    before = bytes(raw)
    encode_blob(memoryview(raw), "bfloat16", "auto")
    encode_delta(memoryview(raw), memoryview(bytes(40_000)), "bfloat16", "auto")
    assert raw == before


def rotated(values: Any) -> tuple[memoryview, Any]:  # Any: an array; a layout
    """As version 1 wrote floats: rotated left by a bit, a raw plane a byte."""
    words = values.view(np.uint32)
    table = ((words << np.uint32(1)) | (words >> np.uint32(31))).view(np.uint8).reshape(-1, 4)
    data = b"".join(table[:, column].tobytes() for column in (3, 2, 1, 0))
    return memoryview(data), (ROTATED, ((RAW, len(words)),) * 4)


def test_rotated_planes_of_format_1_are_still_read() -> None:
    values = np.random.default_rng(0).normal(0, 1, 10_000).astype(np.float32)
    data, layout = rotated(values)
    assert decoded(data, layout, "float32", values.nbytes) == values.tobytes()


WRONG: dict[str, tuple[Any, str, int]] = {  # Any: a layout; dtype, raw bytes
    "unknown transform": ((6, ((RAW, 1024),)), "float32", 1024),
    "negative transform": ((-1, ((RAW, 1024),)), "float32", 1024),
    "planes of bytes": ((PLANES, ((RAW, 1024),)), "uint8", 1024),
    "integer planes of floats": ((PLANES, ((RAW, 256),) * 4), "float32", 1024),
    "exponent of integers": ((EXPONENT, ((RAW, 256), (RAW, 256), (RAW, 512))), "int32", 1024),
    "too few planes": ((EXPONENT, ((RAW, 256), (RAW, 768))), "float32", 1024),
    "too many planes": ((WHOLE, ((RAW, 512), (RAW, 512))), "float32", 1024),
    "planes of a small blob": ((EXPONENT, ((RAW, 25), (RAW, 25), (RAW, 50))), "float32", 100),
    "plane too short": ((EXPONENT, ((RAW, 256), (RAW, 256), (RAW, 511))), "float32", 1024),
    "no words": ((EXPONENT, ((RAW, 256), (RAW, 256), (RAW, 511))), "float32", 1023),
    "fill of a small blob": ((FILL, ((RAW, 4),)), "float32", 100),
    "fill of the wrong size": ((FILL, ((RAW, 8),)), "float32", 1024),
    "fill of another kind": ((FILL, ((ZSTD, 4),)), "float32", 1024),
    "fill that does not divide": ((FILL, ((RAW, 4),)), "float32", 1023),
    "unknown method": ((WHOLE, ((3, 1024),)), "float32", 1024),
    "constant of nothing": ((WHOLE, ((CONSTANT, 1),)), "float32", 0),
    "difference without its base": ((DELTA, ((RAW, 256),) * 4), "float32", 1024),
}


@pytest.mark.parametrize("what", WRONG)
def test_a_layout_that_does_not_fit_is_refused(what: str) -> None:
    layout, dtype, size = WRONG[what]
    data = memoryview(bytes(sum(length for _, length in layout[1])))
    with pytest.raises(ValueError, match=r"layout|plane|element|difference"):
        decoded(data, layout, dtype, size)


def test_a_base_of_another_length_is_refused() -> None:
    with pytest.raises(ValueError, match="base"):
        decoded(memoryview(bytes(1024)), (DELTA, ((RAW, 256),) * 4), "float32", 1024, bytes(1020))


def test_blobs_are_cut_between_elements() -> None:
    assert all(BLOB_BYTES % size == 0 for size in ITEM_SIZES.values())
