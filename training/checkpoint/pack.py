"""The index of a pack: every leaf of a rank, its blobs and their digests. Strict: there is exactly one valid form."""

import math
from collections.abc import Iterable, Sequence
from typing import Annotated

import blake3
import msgspec
import zstandard

from perdure.training.checkpoint.codec import ITEM_SIZES, Plane, decompress
from perdure.training.errors import CheckpointDamaged

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
Digest = Annotated[bytes, msgspec.Meta(min_length=32, max_length=32)]


class Blob(msgspec.Struct, frozen=True, array_like=True, forbid_unknown_fields=True):
    """`stored` bytes at `offset` of the pack that decode to `raw` bytes."""

    offset: int
    stored: int
    raw: int
    xxh: Annotated[bytes, msgspec.Meta(min_length=16, max_length=16)]
    """XXH3-128 of the stored bytes, 16 bytes big-endian."""
    digest: Digest
    """BLAKE3 of the raw bytes, 32 bytes."""
    layout: tuple[int, Annotated[tuple[Plane, ...], msgspec.Meta(min_length=1, max_length=MAX_PLANES)]]
    """Transform and planes (codec.Layout)."""


class IndexEntry(msgspec.Struct, frozen=True, array_like=True, forbid_unknown_fields=True):
    """One leaf: a tensor in C order, little-endian, or plain data (dtype `plain`)."""

    path: str
    kind: str
    dtype: str
    shape: Annotated[tuple[int, ...], msgspec.Meta(max_length=MAX_DIMENSIONS)]
    nbytes: int
    digest: Digest
    """BLAKE3 over the digests of its blobs, in order."""
    blobs: tuple[Blob, ...]


class _Index(msgspec.Struct, frozen=True, array_like=True, forbid_unknown_fields=True):
    version: int
    entries: tuple[IndexEntry, ...]


def leaf_digest(blobs: Iterable[bytes]) -> bytes:
    """Of a leaf, from the digests of its blobs."""
    return blake3.blake3(b"".join(blobs)).digest()


def state_digest(entries: Iterable[IndexEntry]) -> str:
    """Hex digest of a whole state: BLAKE3 over the leaves sorted by path, each as length-prefixed fields (docs/format.md)."""
    whole = blake3.blake3()
    for entry in sorted(entries, key=lambda entry: entry.path.encode()):
        shape = ",".join(map(str, entry.shape))
        for field in (entry.path.encode(), entry.kind.encode(), entry.dtype.encode(), shape.encode(), entry.digest):
            whole.update(len(field).to_bytes(8, "little") + field)
    return whole.hexdigest()


def encode_index(entries: Sequence[IndexEntry]) -> bytes:
    """One zstd frame of msgpack."""
    data = msgspec.msgpack.encode(_Index(1, tuple(entries)))
    return zstandard.ZstdCompressor(level=_LEVEL, write_checksum=True).compress(data)


def decode_index(data: bytes, pack_bytes: int, where: str) -> tuple[IndexEntry, ...]:
    """Decode and check an index against the size of its pack. Raises CheckpointDamaged (part "index")."""
    try:
        size = zstandard.get_frame_parameters(data).content_size
        if not 0 < size <= MAX_INDEX:
            raise ValueError(f"declares {size} bytes")
        index = msgspec.msgpack.decode(decompress(data, size), type=_Index)
        _check(index, pack_bytes)
    except (msgspec.DecodeError, ValueError, zstandard.ZstdError, OverflowError, RecursionError) as error:
        raise CheckpointDamaged(f"{where}: index is malformed: {error}", part="index") from None
    return index.entries


def _check(index: _Index, pack_bytes: int) -> None:
    """Every leaf once, blobs back to back from the start of the pack to its end, sizes that add up."""
    if index.version != 1:
        raise ValueError(f"version {index.version}")
    offset, paths = 0, set()
    for entry in index.entries:
        if entry.path in paths or not entry.path or entry.kind not in KINDS or entry.dtype not in ITEM_SIZES:
            raise ValueError(f"leaf {entry.path!r:.200} is twice there, or of unknown kind or type {entry.dtype!r:.40}")
        paths.add(entry.path)
        size = math.prod(entry.shape) * ITEM_SIZES[entry.dtype]
        if (
            any(extent < 0 for extent in entry.shape)
            or size != entry.nbytes
            or (entry.kind == "plain") != (entry.dtype == "plain")
        ):
            raise ValueError(f"leaf {entry.path!r:.200} has a shape that does not fit its {entry.nbytes} bytes")
        left = entry.nbytes
        for blob in entry.blobs:
            whole = (blob.offset, blob.raw) == (offset, min(left, BLOB_BYTES))
            lengths = [length for _, length in blob.layout[1]]
            fits = 1 <= blob.stored <= blob.raw + _STORED_SLACK and min(lengths, default=0) >= 1 and sum(lengths) == blob.stored
            if not whole or left <= 0 or not fits:
                raise ValueError(f"a blob of leaf {entry.path!r:.200} is out of place")
            offset, left = offset + blob.stored, left - blob.raw
        if left or leaf_digest(blob.digest for blob in entry.blobs) != entry.digest:
            raise ValueError(f"leaf {entry.path!r:.200} does not match its blobs")
    if offset != pack_bytes:
        raise ValueError(f"covers {offset} bytes of a pack of {pack_bytes}")
