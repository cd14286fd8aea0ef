"""One blob of a snapshot: its digest first, then the least that has to be stored: nothing, a delta, or its own bytes.

Nothing, where the base of an increment has the same bytes, or another leaf gives them."""

from collections.abc import Iterator, Mapping
from typing import Any, NamedTuple, Protocol

import blake3
import xxhash

from perdure.training.checkpoint.codec import EncodedBlob, encode_blob, encode_delta
from perdure.training.checkpoint.layout import ITEM_SIZES, Layout
from perdure.training.checkpoint.ordered import in_order
from perdure.training.checkpoint.pack import (
    BLOB_BYTES,
    DERIVED,
    NOT_STORED,
    NOTHING,
    REFERENCE,
    Blob,
    Derived,
    IndexEntry,
    leaf_digest,
)
from perdure.training.errors import CheckpointDamaged
from perdure.training.slots import Entry

_CLEARLY = 0.9
"""A delta is kept if it has at most this share of the bytes that its own encoding has: reading it takes the base as well."""
_SMALLEST_DELTA = 4096
Base = Mapping[str, IndexEntry]


class BaseReader(Protocol):
    """What is read of the base, by any thread."""

    def blob(self, entry: IndexEntry, number: int, rank: int = 0) -> memoryview: ...


class Leaf:
    """A leaf on its way into the pack, and what its blobs have taught about it."""

    __slots__ = ("base", "blobs", "data", "deltas", "derived", "entry", "own_share")

    def __init__(self, entry: Entry, data: memoryview, derived: Derived | None, base: IndexEntry | None) -> None:
        if len(data) != entry.nbytes:
            raise CheckpointDamaged(f"snapshot has {len(data)} bytes of {entry.path}, not {entry.nbytes}", part=entry.path)
        if entry.dtype not in ITEM_SIZES:
            raise CheckpointDamaged(f"snapshot has {entry.path} of unknown type {entry.dtype}", part=entry.path)
        self.entry, self.data, self.derived = entry, data, derived
        self.base = base if base is not None and base.dtype == entry.dtype and base.derived is None else None
        self.deltas = entry.kind == "tensor" and derived is None and self.base is not None
        """Whether changed blobs are tried as deltas: what the first one shows holds for the others."""
        self.own_share = 0.0
        """Stored bytes per raw byte of the blob that was last encoded on its own; 0 before that."""
        self.blobs: list[Blob] = []

    def jobs(self) -> Iterator["Job"]:
        for number, start in enumerate(range(0, len(self.data), BLOB_BYTES)):
            yield Job(self, number, self.data[start : start + BLOB_BYTES])

    def index_entry(self) -> IndexEntry:
        told, digest = self.entry, leaf_digest([blob.digest for blob in self.blobs])
        return IndexEntry(told.path, told.kind, told.dtype, told.shape, told.nbytes, digest, tuple(self.blobs), self.derived)


class Job(NamedTuple):
    leaf: Leaf
    number: int
    raw: memoryview

    def base_blob(self) -> Blob | None:
        blobs = self.leaf.base.blobs if self.leaf.base is not None else ()
        return blobs[self.number] if self.number < len(blobs) and blobs[self.number].raw == len(self.raw) else None


class Stored(NamedTuple):
    """A finished blob: digest of its raw bytes, taken first, and what is to be stored."""

    digest: bytes
    xxh: bytes
    layout: Layout
    parts: list[Any]  # Any: bytes or uint8 arrays
    size: int


class Encoder:
    """Makes Stored of Jobs, in any thread."""

    def __init__(self, encoding: str, base: BaseReader | None, rank: int) -> None:
        self._encoding, self._base, self._rank = encoding, base, rank

    def run(self, leaves: list[Leaf], threads: int) -> Iterator[tuple[Job, Stored]]:
        """All blobs of these leaves, in order."""
        jobs = (job for leaf in leaves for job in leaf.jobs())
        return in_order(self._stored, jobs, threads=threads, nbytes=lambda job: len(job.raw))

    def _stored(self, job: Job) -> Stored:
        digest = blake3.blake3(job.raw).digest()
        if job.leaf.derived is not None:
            return Stored(digest, NOTHING, NOT_STORED[DERIVED], [], 0)
        known = job.base_blob()
        if known is not None and known.digest == digest:
            return Stored(digest, NOTHING, NOT_STORED[REFERENCE], [], 0)
        blob = self._changed(job) if known is not None else self._own(job)
        return Stored(digest, _xxh(blob.parts), blob.layout, blob.parts, blob.stored)

    def _own(self, job: Job) -> EncodedBlob:
        return encode_blob(job.raw, job.leaf.entry.dtype, self._encoding)

    def _changed(self, job: Job) -> EncodedBlob:
        """A delta against the base's blob, where that is clearly smaller."""
        base = self._base_bytes(job)
        if base is None:
            return self._own(job)
        delta = encode_delta(job.raw, base, job.leaf.entry.dtype, self._encoding)
        expected = job.leaf.own_share * len(job.raw)
        if delta.stored <= _CLEARLY * expected:
            return delta
        own = self._own(job)
        job.leaf.own_share = own.stored / len(job.raw)
        job.leaf.deltas = delta.stored <= _CLEARLY * own.stored
        return delta if job.leaf.deltas else own

    def _base_bytes(self, job: Job) -> memoryview | None:
        """None where no delta is to be tried, or the base cannot be read: then the blob stands on its own."""
        leaf = job.leaf
        if not leaf.deltas or self._encoding == "raw" or len(job.raw) < _SMALLEST_DELTA:
            return None
        assert self._base is not None
        assert leaf.base is not None
        try:
            return self._base.blob(leaf.base, job.number, self._rank)
        except (CheckpointDamaged, OSError):
            return None


def _xxh(parts: list[Any]) -> bytes:  # Any: bytes or uint8 arrays
    if len(parts) == 1:
        return xxhash.xxh3_128_digest(parts[0])
    stored = xxhash.xxh3_128()
    for part in parts:
        stored.update(part)
    return stored.digest()
