"""A reader of checkpoint formats 2 and 1 written from docs/format.md alone: nothing of Perdure is used.

`read(folder)` gives every leaf of every rank, all digests checked; AssertionError where something is not as the page says."""

import json
import struct
from pathlib import Path
from typing import Any

import blake3
import msgspec
import xxhash
import zstandard

WORDS = {
    "float16": 2,
    "bfloat16": 2,
    "float32": 4,
    "float64": 8,
    "complex32": 2,
    "complex64": 4,
    "complex128": 8,
    "int16": 2,
    "uint16": 2,
    "int32": 4,
    "uint32": 4,
    "int64": 8,
    "uint64": 8,
}
"""dtype -> bytes of a word."""
ELEMENTS = {**WORDS, "complex32": 4, "complex64": 8, "complex128": 16}
CODES = {1: "B", 2: "H", 4: "I", 8: "Q"}
Leaf = tuple[str, str, str, tuple[int, ...], bytes, bytes]
"""path, kind, dtype, shape, digest, bytes."""


def hex_blake3(data: bytes) -> str:
    return str(blake3.blake3(data).hexdigest())


def read_manifest(folder: Path) -> dict[str, Any]:
    text = (folder / "manifest.json").read_bytes()
    fields: dict[str, Any] = json.loads(text)
    assert fields["format"] == "perdure-checkpoint"
    assert fields["version"] in (1, 2)
    assert folder.name == f"{fields['step']:012d}-{fields['token']:04d}"
    digest = fields["digest"]
    assert hex_blake3(text.replace(f'"{digest}"'.encode(), b'""')) == digest
    return fields


def read_file(folder: Path, record: dict[str, Any]) -> bytes:
    data = (folder / record["name"]).read_bytes()
    assert len(data) == record["bytes"]
    kind, _, digest = record["digest"].partition(":")
    if kind != "blobs":  # those are checked with the index
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


def join(planes: list[bytes], width: int) -> memoryview:
    """Words of which each plane holds a byte, the most significant first."""
    words = bytearray(len(planes[0]) * width)
    for number, plane in enumerate(planes):
        words[width - 1 - number :: width] = plane
    return memoryview(words).cast(CODES[width])


def join_exponent(planes: list[bytes], width: int) -> memoryview:
    words = join([planes[0], planes[1], *[bytes(len(planes[0]))] * (width - 2)], width)
    for number, word in enumerate(words):
        top = word >> 8 * (width - 2)
        low = planes[2][number * (width - 2) : (number + 1) * (width - 2)] if width > 2 else b""
        words[number] = (top >> 1 | (top & 1) << 15) << 8 * (width - 2) | int.from_bytes(low, "little")
    return words


def decode_blob(stored: bytes, raw: int, dtype: str, layout: list[Any], base: bytes | None) -> bytes:
    transform, parts = layout
    width = WORDS.get(dtype, 1)
    if transform == 0 or raw % width:
        width = 1
    if transform == 4:
        assert raw >= 512
        assert parts == [[0, ELEMENTS.get(dtype, 1)]]
        return stored * (raw // len(stored))
    count = raw // width
    sizes = [count, count, count * (width - 2)][: min(width, 3)] if transform == 3 else [count] * width
    assert len(parts) == len(sizes)
    planes, at = [], 0
    for (method, length), size in zip(parts, sizes, strict=True):
        planes.append(decode_plane(method, stored[at : at + length], size))
        at += length
    assert at == len(stored)
    if transform == 0:
        return planes[0]
    words = join_exponent(planes, width) if transform == 3 else join(planes, width)
    if transform == 2:
        for number, word in enumerate(words):
            words[number] = word >> 1 | (word & 1) << (8 * width - 1)
    if transform == 5:
        assert base is not None
        assert len(base) == raw
        for number, (word, old) in enumerate(zip(words, memoryview(base).cast(CODES[width]), strict=True)):
            words[number] = old + (~(word >> 1) if word & 1 else word >> 1) & (1 << 8 * width) - 1
    return words.tobytes()


def cast(content: bytes, dtype: str) -> bytes:
    """float32 to a half, in Python's own arithmetic."""
    out = b""
    for word, value in zip(memoryview(content).cast("I"), memoryview(content).cast("f"), strict=True):
        if dtype == "bfloat16":
            half = 0x7FC0 if value != value else (word + 0x7FFF + (word >> 16 & 1)) >> 16
        elif value != value:
            half = 0x7E00 | word >> 16 & 0x8000
        else:
            try:
                half = int.from_bytes(struct.pack("<e", value), "little")
            except OverflowError:
                half = 0x7C00 | word >> 16 & 0x8000
        out += half.to_bytes(2, "little")
    return out


Base = dict[str, tuple[str, list[Any], list[bytes]]]
"""path -> dtype, blobs, their content; of those that are in the base's pack."""


def from_base(path: str, dtype: str, number: int, raw: int, base: Base) -> tuple[list[Any], bytes]:
    kind, blobs, contents = base[path]
    assert kind == dtype
    assert blobs[number][1] > 0
    assert blobs[number][2] == raw
    return blobs[number], contents[number]


def read_blobs(entry: list[Any], pack: bytes, at: int, base: Base | None) -> tuple[list[bytes], int]:
    path, _, dtype, _, nbytes, digest, blobs, *derived = entry
    contents, left = [], nbytes
    for number, (offset, stored, raw, xxh, blob_digest, layout) in enumerate(blobs):
        assert offset == at
        at += stored
        assert xxhash.xxh3_128(pack[offset:at]).digest() == xxh
        assert raw == min(8388608, left)
        left -= raw
        assert (layout[0] == 7) == (derived not in ([], [None]))
        old = b""
        if layout[0] in (5, 6):
            assert base is not None
            known, old = from_base(path, dtype, number, raw, base)
            assert layout[0] == 5 or known[4] == blob_digest
        if layout[0] in (6, 7):
            assert (stored, layout[1]) == (0, [])
        contents.append(old if layout[0] in (6, 7) else decode_blob(pack[offset:at], raw, dtype, layout, old))
        assert layout[0] == 7 or blake3.blake3(contents[-1]).digest() == blob_digest
    assert left == 0
    assert blake3.blake3(b"".join(blob[4] for blob in blobs)).digest() == digest
    return contents, at


def derive(entry: list[Any], sources: dict[str, tuple[list[Any], bytes]]) -> bytes:
    how, source = entry[7]
    origin, content = sources[source]
    assert origin[7] is None
    assert content
    assert origin[1] == entry[1] == "tensor"
    if how == "cast":
        assert origin[2] == "float32"
        assert entry[2] in ("bfloat16", "float16")
        content = cast(content, entry[2])
    else:
        assert how == "same"
    assert len(content) == entry[4]
    for number, blob in enumerate(entry[6]):
        assert blake3.blake3(content[number * 8388608 :][: blob[2]]).digest() == blob[4]
    return content


def read_rank(pack: bytes, index: bytes, version: int, told: str, base: Base | None) -> tuple[list[Leaf], Base]:
    size = zstandard.get_frame_parameters(index).content_size
    found, entries = msgspec.msgpack.decode(unframe(index, size))
    assert found == version
    at, sources, own = 0, {}, {}
    for entry in entries:
        assert len(entry) == (7 if version == 1 else 8)
        contents, at = read_blobs(entry, pack, at, base)
        sources[entry[0]] = (entry, b"".join(contents))
        own[entry[0]] = (entry[2], entry[6], contents)
    assert at == len(pack)
    assert len(sources) == len(entries)
    if version > 1:
        stored = b"".join(blob[3] for entry in entries for blob in entry[6] if blob[1])
        assert told == f"blobs:{xxhash.xxh3_128(stored).hexdigest()}"
    leaves = []
    for path, kind, dtype, shape, nbytes, digest, _, *derived in entries:
        content = derive(sources[path][0], sources) if derived not in ([], [None]) else sources[path][1]
        size = ELEMENTS.get(dtype, 1)
        for extent in shape:
            size *= extent
        assert size == nbytes == len(content)
        leaves.append((path, kind, dtype, tuple(shape), digest, content))
    return leaves, own


def state_digest(leaves: list[Leaf]) -> str:
    text = b""
    for path, kind, dtype, shape, digest, _ in sorted(leaves, key=lambda leaf: leaf[0].encode()):
        for field in (path.encode(), kind.encode(), dtype.encode(), ",".join(map(str, shape)).encode(), digest):
            text += len(field).to_bytes(8, "little") + field
    return hex_blake3(text)


def read(folder: Path) -> list[list[Leaf]]:
    """The leaves of each rank."""
    manifest, bases = read_manifest(folder), None
    if manifest["base"] is not None:
        place = folder.parent / manifest["base"]["name"]
        base = read_manifest(place)
        assert (base["base"], base["run"], base["digest"]) == (None, manifest["run"], manifest["base"]["digest"])
        bases = [own for _, own in read_ranks(place, base, None)]
    ranks = [leaves for leaves, _ in read_ranks(folder, manifest, bases)]
    leaves = [leaf for rank in ranks for leaf in rank]
    assert state_digest(leaves) == manifest["state_digest"]
    assert len(leaves) == manifest["leaves"]
    assert sum(len(leaf[-1]) for leaf in leaves) == manifest["raw_bytes"]
    return ranks


def read_ranks(folder: Path, manifest: dict[str, Any], bases: list[Base] | None) -> list[tuple[list[Leaf], Base]]:
    records = manifest["files"]
    middle = ".full" if records[0]["name"] == "rank-00000.full.pack" else ""
    assert not middle or (manifest["base"] is None and manifest["version"] == 2)
    names = [f"rank-{rank:05d}{middle}.{kind}" for rank in range(len(records) // 2) for kind in ("pack", "index")]
    assert [record["name"] for record in records] == names
    assert sum(record["bytes"] for record in records) == manifest["stored_bytes"]
    found = []
    for rank, (pack, index) in enumerate(zip(records[::2], records[1::2], strict=True)):
        base = None if bases is None else bases[rank] if rank < len(bases) else {}
        data = read_file(folder, pack), read_file(folder, index)
        found.append(read_rank(*data, manifest["version"], pack["digest"], base))
    return found


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
