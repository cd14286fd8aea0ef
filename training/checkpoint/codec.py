"""One blob's bytes: split into planes by type, each raw, as zstd, or one repeated byte; or the difference from a base.

Exponents of floats are a plane of their own (facts/checkpoints.md). Decoding never produces more than the declared number of
bytes and accepts exactly what encoding writes."""

import threading
from dataclasses import dataclass
from typing import Any

import numpy as np
import zstandard

from perdure.training.checkpoint import planes as split
from perdure.training.checkpoint.frames import decompress
from perdure.training.checkpoint.layout import (
    CONSTANT,
    DELTA,
    EXPONENT,
    FILL,
    FLOATS,
    INTEGERS,
    ITEM_SIZES,
    PLANES,
    RAW,
    ROTATED,
    WHOLE,
    ZSTD,
    Layout,
    Plane,
)
from perdure.training.checkpoint.planes import Bytes
from perdure.training.checkpoint.room import scratch

_SMALLEST = 512
"""Bytes below which planes and frames cost more than they save."""
_SAMPLES = 4
"""Pieces of a plane of which its coding is decided."""
_ENTROPY = "entropy"
_local = threading.local()


@dataclass(frozen=True)
class _Encoding:
    """How planes are compressed."""

    tried: tuple[int | str, ...]
    """"entropy" or zstd levels, the quickest first; samples decide."""
    enough: int | str
    """What even this makes no smaller is noise, and nothing else is tried."""
    better: float
    """Share of the quicker one's size that a slower one must get below."""
    worth: float
    """Share of a plane below which it is stored compressed at all."""
    sample: int
    """Bytes of each piece; with planes of a few hundred KB larger ones cost as much as the coding."""


_ENCODINGS = {
    "auto": _Encoding((_ENTROPY, 1), enough=_ENTROPY, better=0.85, worth=0.97, sample=1 << 12),
    "small": _Encoding((_ENTROPY, 1, 12), enough=1, better=0.99, worth=0.995, sample=1 << 14),
}


@dataclass(frozen=True)
class EncodedBlob:
    parts: list[Any]  # Any: bytes, memoryviews or contiguous uint8 arrays, to be written back to back
    layout: Layout

    @property
    def stored(self) -> int:
        return sum(length for _, length in self.layout[1])


def _word(dtype: str) -> int:
    return FLOATS.get(dtype) or INTEGERS.get(dtype) or 1


def encode_blob(raw: memoryview, dtype: str, encoding: str) -> EncodedBlob:
    """Encode the bytes of one blob; `raw` is not changed and parts may view it. `encoding`: auto, raw, small."""
    if encoding == "raw" or len(raw) < _SMALLEST:
        return EncodedBlob([raw], (WHOLE, ((RAW, len(raw)),)))
    item, width = ITEM_SIZES[dtype], _word(dtype)
    if _is_fill(split.as_words(raw, 1), item):
        return EncodedBlob([raw[:item]], (FILL, ((RAW, item),)))
    if width == 1 or len(raw) % width:
        return _encode(WHOLE, [split.as_words(raw, 1)], encoding)
    words = split.as_words(raw, width)
    if dtype in FLOATS:
        encoded = _encode(EXPONENT, split.split_exponent(words), encoding)
    else:
        encoded = _encode(PLANES, split.split_bytes(words), encoding)
    # nothing was gained: as they are, bytes are read straight to where they are wanted
    return encoded if encoded.stored < len(raw) else EncodedBlob([raw], (WHOLE, ((RAW, len(raw)),)))


def encode_delta(raw: memoryview, base: memoryview, dtype: str, encoding: str) -> EncodedBlob:
    """As the difference from the base's blob of the same length and type."""
    width = _word(dtype) if len(raw) % _word(dtype) == 0 else 1
    words = split.subtract(split.as_words(raw, width), split.as_words(base, width))
    return _encode(DELTA, split.split_bytes(words), "auto" if encoding == "raw" else encoding)


def _is_fill(data: Bytes, item: int) -> bool:
    """Every element is the first: the bytes equal themselves one element on."""
    head = data[: 8 * item]
    if len(data) % item or not np.array_equal(head[item:], head[:-item]):
        return False
    return bool(np.array_equal(data[item:], data[:-item]))


def _encode(transform: int, planes: list[Bytes], encoding: str) -> EncodedBlob:
    stored = [_encode_plane(plane, _ENCODINGS[encoding]) for plane in planes]
    return EncodedBlob([part for _, part in stored], (transform, tuple((kind, len(part)) for kind, part in stored)))


def _encode_plane(plane: Bytes, encoding: _Encoding) -> tuple[int, Any]:  # Any: bytes or a uint8 array
    size = len(plane)
    if size < _SMALLEST:
        return RAW, plane
    if _is_fill(plane, 1):
        return CONSTANT, plane[:1].tobytes()
    if size <= 2 * _SAMPLES * encoding.sample:
        packed = min((_compressor(how).compress(plane.data) for how in encoding.tried), key=len)
    else:
        how = _choose(plane, encoding)
        packed = _compressor(how).compress(plane.data) if how is not None else b""
    return (ZSTD, packed) if packed and len(packed) <= encoding.worth * size else (RAW, plane)


def _choose(plane: Bytes, encoding: _Encoding) -> int | str | None:
    """How to compress, from samples; None: not at all, so noise is stored raw without being compressed."""
    probe = plane[: len(plane) // _SAMPLES * _SAMPLES].reshape(_SAMPLES, -1)[:, : encoding.sample].ravel()
    best, size = None, encoding.worth * len(probe)
    for how in encoding.tried:
        packed = len(_compressor(how).compress(probe.data))
        if packed < size * (1.0 if best is None else encoding.better):
            best, size = how, packed
        if best is None and how == encoding.enough:
            return None
    return best


def _compressor(how: int | str) -> zstandard.ZstdCompressor:
    """One per thread: contexts are not to be shared, and making one per plane is slow."""
    known: dict[int | str, zstandard.ZstdCompressor] = _local.__dict__.setdefault("compressors", {})
    if how not in known:
        known[how] = _new_compressor(how)
    return known[how]


def _new_compressor(how: int | str) -> zstandard.ZstdCompressor:
    """Frames have no checksum of zstd's: a blob has digests of what is stored and of what it decodes to, and checking a third
    one is an eighth of decoding."""
    if how != _ENTROPY:
        return zstandard.ZstdCompressor(level=int(how), write_checksum=False, write_content_size=True)
    # Exponents hardly ever repeat in runs of seven: with the smallest table zstd allows it finds next to nothing, spends no
    # time on it, and its Huffman coder gets the whole block. Twice as fast as level 1 and 7 % smaller (docs/performance.md).
    settings = zstandard.ZstdCompressionParameters(
        strategy=zstandard.STRATEGY_FAST,
        min_match=7,
        hash_log=6,
        window_log=17,
        chain_log=6,
        search_log=1,
        target_length=0,
        write_checksum=0,
        write_content_size=1,
    )
    return zstandard.ZstdCompressor(compression_params=settings)


def decode_blob(stored: memoryview, layout: Layout, dtype: str, out: memoryview, base: memoryview | None = None) -> None:
    """The raw bytes of a blob, into `out`, which is as long. `base`: the base's raw blob, for a difference. Raises ValueError
    for whatever is not exactly that many bytes encoded by `layout`."""
    transform, planes = layout
    width = 1 if transform == WHOLE or len(out) % _word(dtype) else _word(dtype)
    if not _is_possible(transform, len(planes), width, dtype, len(out)) or sum(length for _, length in planes) != len(stored):
        raise ValueError("layout does not fit type and size")
    if transform == FILL:
        _decode_fill(stored, planes[0], ITEM_SIZES[dtype], out)
        return
    if transform == DELTA and (base is None or len(base) != len(out)):
        raise ValueError("a difference without the base it differs from")
    words = split.as_words(out, width)
    sizes = [len(words), len(words), len(words) * (width - 2)] if transform == EXPONENT else [len(words)] * width
    zeros = _leading_zeros(stored, planes) if transform == DELTA else 0
    found, offset = [], zeros
    for number in range(zeros, len(planes)):
        end = offset + planes[number][1]
        found.append(np.frombuffer(_decode_plane(stored[offset:end], planes[number], sizes[number], number), np.uint8))
        offset = end
    if transform == EXPONENT:
        split.join_exponent(found, words)
    elif transform == DELTA:
        split.add(found, split.as_words(base, width), words)
    else:
        split.join_bytes(found, words)
    if transform == ROTATED:
        split.rotate_right(words)


def _leading_zeros(stored: memoryview, planes: tuple[Plane, ...]) -> int:
    """How many of the first planes are nothing but zeros, by a byte each: of small differences, the high ones are."""
    count = 0
    while count < len(planes) and planes[count] == (CONSTANT, 1) and stored[count] == 0:
        count += 1
    return count


def _is_possible(transform: int, planes: int, width: int, dtype: str, size: int) -> bool:
    """Whether encoding may have made this transform with so many planes, here or in format 1."""
    split_up = width > 1 and size >= _SMALLEST
    return {
        WHOLE: planes == 1,
        PLANES: split_up and dtype in INTEGERS and planes == width,
        ROTATED: split_up and dtype in FLOATS and planes == width,
        EXPONENT: split_up and dtype in FLOATS and planes == min(width, 3),
        FILL: planes == 1 and size >= _SMALLEST and size % ITEM_SIZES[dtype] == 0,
        DELTA: planes == width and size > 0,
    }.get(transform, False)


def _decode_fill(stored: memoryview, plane: Plane, item: int, out: memoryview) -> None:
    if plane != (RAW, item):
        raise ValueError("a repeated element of the wrong size or kind")
    np.frombuffer(out, np.uint8).reshape(-1, item)[:] = np.frombuffer(stored, np.uint8)


def _decode_plane(stored: memoryview, plane: Plane, size: int, number: int) -> Any:  # Any: memoryview or a uint8 array
    kind, length = plane
    if kind == RAW and length == size:
        return stored
    if kind == CONSTANT and length == 1 and size:
        return np.full(size, stored[0], np.uint8)
    if kind == ZSTD:
        out = scratch(size, f"plane {number}")
        decompress(stored, out)
        return out
    raise ValueError("a plane of unknown kind or wrong size")
