"""The index of a pack: every leaf of a rank, its blobs and their digests. Strict: there is exactly one valid form."""

import math
from collections.abc import Iterable, Mapping, Sequence
from typing import Annotated

import blake3
import msgspec
import xxhash
import zstandard

from perdure.training.checkpoint.frames import decompress
from perdure.training.checkpoint.layout import DELTA, ITEM_SIZES, ROTATED, Layout, Plane
from perdure.training.errors import CheckpointDamaged

# gc=False below: there are hundreds of thousands of these, none in a circle, and looking for one took a third of the time
BLOB_BYTES = 8 << 20
"""Raw bytes of one blob; the last of a leaf is shorter."""
MAX_INDEX = 128 << 20
"""Bytes of an index, decoded (twelve terabytes of blobs, or a million leaves); a bomb makes no more than this."""
MAX_STORED_INDEX = MAX_INDEX
MAX_DIMENSIONS = 64
MAX_PLANES = 8
_STORED_SLACK = 1 << 12
"""Bytes by which the frames of a blob may exceed its raw bytes."""
_LEVEL = 3
KINDS = ("tensor", "plain")
REFERENCE, DERIVED = 6, 7
"""Transforms after those of the codec, of blobs that are not in the pack: the base's of that path and number; made from another
leaf of the checkpoint."""
NOTHING = xxhash.xxh3_128(b"").digest()
"""`xxh` of such a blob."""
NOT_STORED: dict[int, Layout] = {REFERENCE: (REFERENCE, ()), DERIVED: (DERIVED, ())}
CASTS = ("bfloat16", "float16")
"""Types that a float32 leaf is cast to."""
Digest = Annotated[bytes, msgspec.Meta(min_length=32, max_length=32)]


class Blob(msgspec.Struct, frozen=True, array_like=True, forbid_unknown_fields=True, gc=False):
    """`stored` bytes at `offset` of the pack that decode to `raw` bytes."""

    offset: int
    stored: int
    raw: int
    xxh: Annotated[bytes, msgspec.Meta(min_length=16, max_length=16)]
    """XXH3-128 of the stored bytes, 16 bytes big-endian."""
    digest: Digest
    """BLAKE3 of the raw bytes, 32 bytes."""
    layout: tuple[int, Annotated[tuple[Plane, ...], msgspec.Meta(max_length=MAX_PLANES)]]
    """Transform and planes (codec.Layout), or one of NOT_STORED."""


class Derived(msgspec.Struct, frozen=True, array_like=True, forbid_unknown_fields=True, gc=False):
    """How a leaf that is not stored is made: `same` (the bytes of `source`), `cast` (its float32 rounded to this type)."""

    how: str
    source: str


class _Entry1(msgspec.Struct, frozen=True, array_like=True, forbid_unknown_fields=True):
    """A leaf in an index of version 1."""

    path: str
    kind: str
    dtype: str
    shape: Annotated[tuple[int, ...], msgspec.Meta(max_length=MAX_DIMENSIONS)]
    nbytes: int
    digest: Digest
    blobs: tuple[Blob, ...]


class IndexEntry(msgspec.Struct, frozen=True, array_like=True, forbid_unknown_fields=True, gc=False):
    """One leaf: a tensor in C order, little-endian, or plain data (dtype `plain`)."""

    path: str
    kind: str
    dtype: str
    shape: Annotated[tuple[int, ...], msgspec.Meta(max_length=MAX_DIMENSIONS)]
    nbytes: int
    digest: Digest
    """BLAKE3 over the digests of its blobs, in order."""
    blobs: tuple[Blob, ...]
    derived: Derived | None
    """None where its blobs are stored, here or in the base."""


class _Index1(msgspec.Struct, frozen=True, array_like=True, forbid_unknown_fields=True):
    version: int
    entries: tuple[_Entry1, ...]


class _Index(msgspec.Struct, frozen=True, array_like=True, forbid_unknown_fields=True):
    version: int
    entries: tuple[IndexEntry, ...]


def leaf_digest(blobs: Iterable[bytes]) -> bytes:
    """Of a leaf, from the digests of its blobs."""
    return blake3.blake3(b"".join(blobs)).digest()


def blobs_digest(entries: Iterable[IndexEntry]) -> str:
    """Of a pack, from the digests of the blobs in it: `FileRecord.digest`."""
    stored = b"".join([blob.xxh for entry in entries for blob in entry.blobs if blob.stored])
    return f"blobs:{xxhash.xxh3_128_hexdigest(stored)}"


def state_digest(entries: Iterable[IndexEntry]) -> str:
    """Hex digest of a whole state: BLAKE3 over the leaves sorted by path, each as length-prefixed fields (docs/format.md)."""
    whole = blake3.blake3()
    for entry in sorted(entries, key=lambda entry: entry.path.encode()):
        shape = ",".join(map(str, entry.shape))
        fields = (entry.path.encode(), entry.kind.encode(), entry.dtype.encode(), shape.encode(), entry.digest)
        whole.update(b"".join([part for field in fields for part in (len(field).to_bytes(8, "little"), field)]))
    return whole.hexdigest()


def encode_index(entries: Sequence[IndexEntry]) -> bytes:
    """One zstd frame of msgpack."""
    data = msgspec.msgpack.encode(_Index(2, tuple(entries)))
    return zstandard.ZstdCompressor(level=_LEVEL, write_checksum=True).compress(data)


def decode_index(
    data: bytes, pack_bytes: int, where: str, *, version: int = 2, increment: bool = False
) -> tuple[IndexEntry, ...]:
    """Decode and check an index (of a manifest of that version) against the size of its pack; whether what an increment
    names in its base is there is left to `check_base`. Raises CheckpointDamaged (part "index")."""
    try:
        size = zstandard.get_frame_parameters(data).content_size
        if not 0 < size <= MAX_INDEX:
            raise ValueError(f"declares {size} bytes")
        text = bytearray(size)
        decompress(data, memoryview(text))
        entries = _decode_entries(text, version)
        _check(entries, pack_bytes, _transforms(version, increment))
    except (msgspec.DecodeError, ValueError, zstandard.ZstdError, OverflowError, RecursionError) as error:
        raise CheckpointDamaged(f"{where}: index is malformed: {error}", part="index") from None
    return entries


def _decode_entries(data: bytearray, version: int) -> tuple[IndexEntry, ...]:
    index = msgspec.msgpack.decode(data, type=_Index1 if version == 1 else _Index)
    if index.version != version:
        raise ValueError(f"version {index.version}")
    if isinstance(index, _Index):
        return index.entries
    return tuple(IndexEntry(e.path, e.kind, e.dtype, e.shape, e.nbytes, e.digest, e.blobs, None) for e in index.entries)


def _transforms(version: int, increment: bool) -> frozenset[int]:
    """Those that no blob may have: what came later, what was given up, what needs a base."""
    if version == 1:
        return frozenset(range(ROTATED + 1, DERIVED + 1))
    return frozenset({ROTATED} if increment else {ROTATED, DELTA, REFERENCE})


def _check(entries: Sequence[IndexEntry], pack_bytes: int, refused: frozenset[int]) -> None:
    """Every leaf once, blobs back to back from the start of the pack to its end, sizes that add up."""
    offset, paths = 0, {entry.path: entry for entry in entries}
    if len(paths) != len(entries) or "" in paths:
        raise ValueError("a leaf is twice there, or without a name")
    for entry in entries:
        _check_leaf(entry)
        offset = _check_blobs(entry, offset, refused)
        if entry.derived is not None:
            _check_derived(entry, entry.derived, paths.get(entry.derived.source))
    if offset != pack_bytes:
        raise ValueError(f"covers {offset} bytes of a pack of {pack_bytes}")


def _check_leaf(entry: IndexEntry) -> None:
    item = ITEM_SIZES.get(entry.dtype)
    if item is None or entry.kind not in KINDS or (entry.kind == "plain") != (entry.dtype == "plain"):
        raise ValueError(f"leaf {entry.path!r:.200} is of unknown kind {entry.kind!r:.40} or type {entry.dtype!r:.40}")
    if min(entry.shape, default=0) < 0 or math.prod(entry.shape) * item != entry.nbytes:
        raise ValueError(f"leaf {entry.path!r:.200} has a shape that does not fit its {entry.nbytes} bytes")


def _check_blobs(entry: IndexEntry, offset: int, refused: frozenset[int]) -> int:
    left = entry.nbytes
    for blob in entry.blobs:
        if blob.offset != offset or left <= 0 or blob.raw != min(left, BLOB_BYTES) or not _fits(entry, blob, refused):
            raise ValueError(f"a blob of leaf {entry.path!r:.200} is out of place")
        offset, left = offset + blob.stored, left - blob.raw
    if left or leaf_digest([blob.digest for blob in entry.blobs]) != entry.digest:
        raise ValueError(f"leaf {entry.path!r:.200} does not match its blobs")
    return offset


def _fits(entry: IndexEntry, blob: Blob, refused: frozenset[int]) -> bool:
    """Whether such a blob may stand there: all blobs of a derived leaf are derived, and no others."""
    transform, planes = blob.layout
    if transform in refused or (transform == DERIVED) != (entry.derived is not None):
        return False
    if transform in NOT_STORED:
        return blob.stored == 0 and not planes and blob.xxh == NOTHING
    total = 0
    for _, length in planes:
        if length < 1:
            return False
        total += length
    return 1 <= total == blob.stored <= blob.raw + _STORED_SLACK


def _check_derived(entry: IndexEntry, derived: Derived, source: IndexEntry | None) -> None:
    """The source is a stored tensor of as many bytes, or elements; never itself derived, so that nothing goes in a circle."""
    sizes = {"same": entry.nbytes, "cast": 2 * entry.nbytes if entry.dtype in CASTS else -1}
    ok = source is not None and source.kind == entry.kind == "tensor" and source.derived is None
    if source is None or not ok or not entry.nbytes or sizes.get(derived.how) != source.nbytes:
        raise ValueError(f"leaf {entry.path!r:.200} cannot be derived ({derived.how!r:.20}) from {derived.source!r:.200}")
    if derived.how == "cast" and source.dtype != "float32":
        raise ValueError(f"leaf {entry.path!r:.200} is cast from {derived.source!r:.200}, which is no float32")


def derived_from(derived: Derived, number: int, blobs: int) -> range:
    """The numbers of the source's blobs, of which there are so many, that the blob `number` of a derived leaf is made of."""
    return range(number, number + 1) if derived.how == "same" else range(2 * number, min(2 * number + 2, blobs))


def base_blob(entry: IndexEntry, number: int, base: Mapping[str, IndexEntry]) -> tuple[IndexEntry, Blob] | None:
    """The base's leaf of the same path and type and its blob of that number, if it is stored there and has as many bytes."""
    known = base.get(entry.path)
    if known is None or known.dtype != entry.dtype or number >= len(known.blobs):
        return None
    blob = known.blobs[number]
    return (known, blob) if blob.stored and blob.raw == entry.blobs[number].raw else None


def check_base(entries: Iterable[IndexEntry], base: Mapping[str, IndexEntry], where: str) -> None:
    """All that an increment needs of its base is in the base's index. Raises CheckpointDamaged (part "index")."""
    for entry in entries:
        for number, blob in enumerate(entry.blobs):
            if blob.layout[0] not in (REFERENCE, DELTA):
                continue
            found = base_blob(entry, number, base)
            if found is None or (blob.layout[0] == REFERENCE and found[1].digest != blob.digest):
                text = f"{where}: index names blob {number} of {entry.path!r:.200} of the base, which has none that fits"
                raise CheckpointDamaged(text, part="index")
