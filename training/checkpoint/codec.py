"""One blob's bytes: split into byte planes by type, each plane stored raw, as zstd, or as one repeated byte.

Floats have their sign rotated to the end first, so that the highest plane is the pure exponent (facts/checkpoints.md). Decoding
never produces more than the declared number of bytes and accepts exactly what encoding writes."""

import threading
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt
import zstandard

WHOLE, PLANES, ROTATED = 0, 1, 2
"""Transforms: the bytes as they are; planes; planes of the values rotated left by one bit."""
RAW, ZSTD, CONSTANT = 0, 1, 2
"""How a plane is stored."""
_SMALLEST = 512
"""Bytes below which planes and frames cost more than they save."""
_SAMPLE = 1 << 15
_LEVELS = {"auto": 1, "small": 9}
_WORTH = 0.97
"""A plane is stored compressed if that leaves at most this share."""
_FLOATS = {
    "float16": 2,
    "bfloat16": 2,
    "float32": 4,
    "float64": 8,
    "complex32": 2,  # each of its two parts
    "complex64": 4,
    "complex128": 8,
}
_INTEGERS = {"int16": 2, "uint16": 2, "int32": 4, "uint32": 4, "int64": 8, "uint64": 8}
ITEM_SIZES = {
    **_FLOATS,
    **_INTEGERS,
    **dict.fromkeys(("bool", "int8", "uint8", "float8_e4m3fn", "float8_e5m2", "float8_e4m3fnuz", "float8_e5m2fnuz"), 1),
    **dict.fromkeys(("float8_e8m0fnu", "float4_e2m1fn_x2"), 1),
    "complex32": 4,
    "complex64": 8,
    "complex128": 16,
    "plain": 1,
}
"""Bytes of one element of every dtype the format knows."""
Plane = tuple[int, int]
"""(how it is stored, stored bytes), from the most significant byte down."""
Layout = tuple[int, tuple[Plane, ...]]
_Bytes = npt.NDArray[np.uint8]
_local = threading.local()


@dataclass(frozen=True)
class EncodedBlob:
    parts: list[Any]  # Any: bytes or contiguous uint8 arrays, to be written back to back
    layout: Layout

    @property
    def stored(self) -> int:
        return sum(length for _, length in self.layout[1])


def _width_and_transform(dtype: str, size: int) -> tuple[int, int]:
    """Bytes of a plane group and the transform for `size` bytes of this dtype."""
    width = _FLOATS.get(dtype) or _INTEGERS.get(dtype) or 1
    if size < _SMALLEST or width == 1 or size % width:
        return 1, WHOLE
    return width, ROTATED if dtype in _FLOATS else PLANES


def encode_blob(raw: memoryview, dtype: str, encoding: str) -> EncodedBlob:
    """Encode the bytes of one blob; `raw` is not changed and parts may view it."""
    width, transform = _width_and_transform(dtype, len(raw))
    if transform == WHOLE:
        planes = [np.frombuffer(raw, np.uint8)]
    else:
        words = np.frombuffer(raw, np.dtype(f"<u{width}"))
        if transform == ROTATED:
            words = (words << np.array(1, words.dtype)) | (words >> np.array(8 * width - 1, words.dtype))
        table = words.view(np.uint8).reshape(-1, width)
        planes = [np.ascontiguousarray(table[:, column]) for column in reversed(range(width))]
    stored = [_encode_plane(plane, encoding) for plane in planes]
    return EncodedBlob([part for _, part in stored], (transform, tuple((kind, len(part)) for kind, part in stored)))


def _encode_plane(plane: _Bytes, encoding: str) -> tuple[int, Any]:  # Any: bytes or a uint8 array
    size = len(plane)
    if size < _SMALLEST or encoding == "raw":
        return RAW, plane
    if plane[0] == plane[-1] and not np.any(plane != plane[0]):
        return CONSTANT, plane[:1].tobytes()
    compressor = _compressor(_LEVELS[encoding])
    if size > 4 * _SAMPLE:
        middle = size // 2
        probe = np.concatenate((plane[:_SAMPLE], plane[middle : middle + _SAMPLE]))
        if len(compressor.compress(probe.data)) > _WORTH * len(probe):
            return RAW, plane
    packed = compressor.compress(plane.data)
    return (ZSTD, packed) if len(packed) <= _WORTH * size else (RAW, plane)


def _compressor(level: int) -> zstandard.ZstdCompressor:
    """One per thread: contexts are not to be shared, and making one per plane is slow."""
    known: dict[int, zstandard.ZstdCompressor] = _local.__dict__.setdefault("compressors", {})
    if level not in known:
        known[level] = zstandard.ZstdCompressor(level=level, write_checksum=True, write_content_size=True)
    return known[level]


def decode_blob(stored: memoryview, layout: Layout, dtype: str, raw_len: int) -> memoryview:
    """The raw bytes of a blob. Raises ValueError for whatever is not exactly `raw_len` bytes encoded by `layout`."""
    transform, planes = layout
    width, expected = _width_and_transform(dtype, raw_len)
    if transform != expected or len(planes) != width or sum(length for _, length in planes) != len(stored):
        raise ValueError("layout does not fit type and size")
    if transform == WHOLE:
        return memoryview(_decode_plane(stored, planes[0], raw_len))
    table = np.empty((raw_len // width, width), np.uint8)
    offset = 0
    for column, plane in zip(reversed(range(width)), planes, strict=True):
        table[:, column] = np.frombuffer(_decode_plane(stored[offset : offset + plane[1]], plane, len(table)), np.uint8)
        offset += plane[1]
    words = table.reshape(-1).view(np.dtype(f"<u{width}"))
    if transform == ROTATED:
        words = (words >> np.array(1, words.dtype)) | (words << np.array(8 * width - 1, words.dtype))
    return words.view(np.uint8).data


def _decode_plane(stored: memoryview, plane: Plane, size: int) -> Any:  # Any: bytes, memoryview or a uint8 array
    kind, length = plane
    if kind == RAW and length == size:
        return stored
    if kind == CONSTANT and length == 1 and size:
        return np.full(size, stored[0], np.uint8)
    if kind == ZSTD:
        return decompress(stored, size)
    raise ValueError("a plane of unknown kind or wrong size")


def decompress(stored: bytes | memoryview, size: int) -> bytes:
    """One zstd frame that decodes to exactly `size` bytes, with nothing before or after it. Raises ValueError."""
    try:
        declared = zstandard.get_frame_parameters(stored).content_size
        if declared not in (size, zstandard.CONTENTSIZE_UNKNOWN):
            raise ValueError(f"frame declares {declared} bytes, {size} are expected")
        data = zstandard.ZstdDecompressor().decompress(stored, max_output_size=size, allow_extra_data=False)
    except zstandard.ZstdError as error:
        raise ValueError(f"zstd: {error}") from None
    if len(data) != size:
        raise ValueError(f"frame holds {len(data)} bytes, {size} are expected")
    return data
