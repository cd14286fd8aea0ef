"""A reader of checkpoint format 1 written from docs/format.md alone: nothing of Perdure is used.

`read(folder)` gives every leaf of every rank, all digests checked; AssertionError where something is not as the page says."""

import json
from pathlib import Path
from typing import Any

import blake3
import msgspec
import xxhash
import zstandard

WORDS = {
    "float16": (2, 2),
    "bfloat16": (2, 2),
    "float32": (4, 2),
    "float64": (8, 2),
    "complex32": (2, 2),
    "complex64": (4, 2),
    "complex128": (8, 2),
    "int16": (2, 1),
    "uint16": (2, 1),
    "int32": (4, 1),
    "uint32": (4, 1),
    "int64": (8, 1),
    "uint64": (8, 1),
}
"""dtype -> bytes of a word, transform."""
ELEMENTS = {**{dtype: word for dtype, (word, _) in WORDS.items()}, "complex32": 4, "complex64": 8, "complex128": 16}
Leaf = tuple[str, str, str, tuple[int, ...], bytes, bytes]
"""path, kind, dtype, shape, digest, bytes."""


def hex_blake3(data: bytes) -> str:
    return str(blake3.blake3(data).hexdigest())


def read_manifest(folder: Path) -> dict[str, Any]:
    text = (folder / "manifest.json").read_bytes()
    fields: dict[str, Any] = json.loads(text)
    assert fields["format"] == "perdure-checkpoint"
    assert fields["version"] == 1
    assert folder.name == f"{fields['step']:012d}-{fields['token']:04d}"
    digest = fields["digest"]
    assert hex_blake3(text.replace(f'"{digest}"'.encode(), b'""')) == digest
    return fields


def read_file(folder: Path, record: dict[str, Any]) -> bytes:
    data = (folder / record["name"]).read_bytes()
    assert len(data) == record["bytes"]
    kind, _, digest = record["digest"].partition(":")
    assert digest == {"blake3": hex_blake3, "xxh3-128": lambda data: xxhash.xxh3_128(data).hexdigest()}[kind](data)
    return data


def unframe(data: bytes, size: int) -> bytes:
    decoder = zstandard.ZstdDecompressor().decompressobj()
    out = decoder.decompress(data)
    assert decoder.eof
    assert not decoder.unused_data
    assert len(out) == size
    return out


def decode_plane(method: int, stored: bytes, size: int) -> bytes:
    out = {0: lambda: stored, 1: lambda: unframe(stored, size), 2: lambda: stored * size}[method]()
    assert len(out) == size
    return out


def decode_blob(stored: bytes, raw: int, dtype: str, layout: list[Any]) -> bytes:
    transform, planes = layout
    width, expected = WORDS.get(dtype, (1, 0))
    if raw < 512 or raw % width:
        width, expected = 1, 0
    assert (transform, len(planes)) == (expected, width)
    words, at = bytearray(raw), 0
    for number, (method, length) in enumerate(planes):
        words[width - 1 - number :: width] = decode_plane(method, stored[at : at + length], raw // width)
        at += length
    assert at == len(stored)
    if transform == 2:
        view = memoryview(words).cast({2: "H", 4: "I", 8: "Q"}[width])
        for number, word in enumerate(view):
            view[number] = word >> 1 | (word & 1) << (8 * width - 1)
    return bytes(words)


def read_leaf(entry: list[Any], pack: bytes, at: int) -> tuple[Leaf, int]:
    path, kind, dtype, shape, nbytes, digest, blobs = entry
    size, content, digests = ELEMENTS.get(dtype, 1), b"", b""
    for extent in shape:
        size *= extent
    assert size == nbytes
    for offset, stored, raw, xxh, blob_digest, layout in blobs:
        assert offset == at
        at += stored
        data = pack[offset:at]
        assert xxhash.xxh3_128(data).digest() == xxh
        decoded = decode_blob(data, raw, dtype, layout)
        assert blake3.blake3(decoded).digest() == blob_digest
        assert raw == min(8388608, nbytes - len(content))
        content, digests = content + decoded, digests + blob_digest
    assert len(content) == nbytes
    assert blake3.blake3(digests).digest() == digest
    return (path, kind, dtype, tuple(shape), digest, content), at


def read_rank(pack: bytes, index: bytes) -> list[Leaf]:
    size = zstandard.get_frame_parameters(index).content_size
    version, entries = msgspec.msgpack.decode(unframe(index, size))
    assert version == 1
    leaves, at = [], 0
    for entry in entries:
        leaf, at = read_leaf(entry, pack, at)
        leaves.append(leaf)
    assert at == len(pack)
    return leaves


def state_digest(leaves: list[Leaf]) -> str:
    text = b""
    for path, kind, dtype, shape, digest, _ in sorted(leaves, key=lambda leaf: leaf[0].encode()):
        for field in (path.encode(), kind.encode(), dtype.encode(), ",".join(map(str, shape)).encode(), digest):
            text += len(field).to_bytes(8, "little") + field
    return hex_blake3(text)


def read(folder: Path) -> list[list[Leaf]]:
    """The leaves of each rank."""
    manifest = read_manifest(folder)
    files = [read_file(folder, record) for record in manifest["files"]]
    ranks = [read_rank(pack, index) for pack, index in zip(files[::2], files[1::2], strict=True)]
    leaves = [leaf for rank in ranks for leaf in rank]
    assert state_digest(leaves) == manifest["state_digest"]
    assert len(leaves) == manifest["leaves"]
    assert sum(len(leaf[-1]) for leaf in leaves) == manifest["raw_bytes"]
    assert sum(map(len, files)) == manifest["stored_bytes"]
    return ranks


def unpack_plain(data: bytes) -> Any:
    return _value(msgspec.msgpack.decode(data))


def _value(item: Any) -> Any:
    if not isinstance(item, list):
        return item
    kind, rest = item[0], item[1:]
    if kind == "i":
        return int(rest[0], 16)
    if kind == "c":
        return complex(*rest)
    values = [_value(value) for value in rest]
    if kind in "do":
        return dict(zip(values[::2], values[1::2], strict=True))
    return {"l": list, "t": tuple, "s": set, "f": frozenset}[kind](values)
