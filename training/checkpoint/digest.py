"""Digests of stored bytes, of a local file or of an object: the only proof of a copy.

A pack is proven blob by blob, as its index says; an index, and a pack of format 1, by a digest of the whole file."""

import os
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import NamedTuple, Protocol

import blake3
import xxhash

from perdure.training.checkpoint.manifest import FileRecord
from perdure.training.checkpoint.pack import IndexEntry
from perdure.training.errors import CheckpointDamaged, ObjectNotFound, StoreError
from perdure.training.files import Buffer
from perdure.training.storage.parallel import PARTS, SMALL, in_order
from perdure.training.storage.store import ObjectStore

READ_BYTES = 8 << 20
SPAN_BYTES = 16 << 20
"""Read at once; more of a piece that is larger."""
Take = Callable[[int, memoryview], object]
"""Called with an offset and the bytes that are there, which are gone when it returns."""


class _Hasher(Protocol):
    def update(self, data: Buffer, /) -> object: ...
    def hexdigest(self) -> str: ...


_KINDS: dict[str, Callable[[], _Hasher]] = {"xxh3-128": xxhash.xxh3_128, "blake3": blake3.blake3}


class Piece(NamedTuple):
    """Bytes of a file that have a digest of their own."""

    offset: int
    length: int
    digest: str


class Proof:
    """What a file must hold: `entries` are the leaves of a pack's index, which says what its blobs are."""

    def __init__(self, record: FileRecord, entries: Mapping[str, IndexEntry] | None = None) -> None:
        self.record = record
        kind, _, digest = record.digest.partition(":")
        if kind in _KINDS:
            self.hasher, self.pieces = _KINDS[kind], [Piece(0, record.bytes, digest)]
        elif kind == "blobs" and entries is not None:
            blobs = [blob for entry in entries.values() for blob in entry.blobs if blob.stored]
            self.hasher, self.pieces = _KINDS["xxh3-128"], [Piece(one.offset, one.stored, one.xxh.hex()) for one in blobs]
        else:
            raise CheckpointDamaged(f"{record.name}: digest {record.digest[:80]!r} is of no known kind", part="manifest")

    def local(self, path: Path) -> bool:
        """The file holds it; False also where it is missing."""
        try:
            with open(path, "rb") as file:
                size = os.fstat(file.fileno()).st_size
                return size == self.record.bytes and self._holds(iter(lambda: file.read(READ_BYTES), b""))
        except FileNotFoundError:
            return False

    def stored(self, store: ObjectStore, key: str, progress: Callable[[int], None] = lambda _: None) -> bool:
        """The object holds it; False also where it is missing. Read back whole: small ones at once, others in spans."""

        def right(span: list[Piece]) -> bool:
            return self.read(store, key, span, lambda _, data: progress(len(data)))

        if self.record.bytes > SMALL:
            return store.size(key) == self.record.bytes and all(in_order(right, spans(self.pieces), width=PARTS))
        try:
            data = store.get(key, limit=self.record.bytes)
        except ObjectNotFound:
            return False
        except StoreError:
            if store.size(key) != self.record.bytes:
                return False
            raise
        progress(len(data))
        return self._holds([data])

    def read(self, store: ObjectStore, key: str, span: list[Piece], take: Take) -> bool:
        """Hand over a span of the object; False as soon as it is not what it must be."""
        check, at = Check(self.hasher, span), span[0].offset
        for data in store.stream(key, at, sum(piece.length for piece in span)):
            if not check.update(data):
                return False
            take(at, data)
            at += len(data)
        return check.complete

    def _holds(self, parts: Iterable[bytes]) -> bool:
        check = Check(self.hasher, self.pieces)
        return all(check.update(part) for part in parts) and check.complete


def spans(pieces: Iterable[Piece]) -> Iterator[list[Piece]]:
    """Pieces that lie side by side, together."""
    span: list[Piece] = []
    size = 0
    for piece in pieces:
        if span and (span[-1].offset + span[-1].length != piece.offset or size + piece.length > SPAN_BYTES):
            yield span
            span, size = [], 0
        span.append(piece)
        size += piece.length
    if span:
        yield span


class Check:
    """Bytes that arrive in order, against pieces that follow one another."""

    def __init__(self, hasher: Callable[[], _Hasher], pieces: Sequence[Piece]) -> None:
        self._new, self._pieces = hasher, iter(pieces)
        self._piece = next(self._pieces, None)
        self._left, self._hasher = self._piece.length if self._piece else 0, hasher()
        self._good = True
        self._settle()

    @property
    def complete(self) -> bool:
        """All bytes have come, and they are the right ones."""
        return self._good and self._piece is None

    def update(self, data: Buffer) -> bool:
        """False as soon as these bytes, or any before them, are not what they should be."""
        rest = memoryview(data)
        while self._good and len(rest):
            self._good = self._piece is not None
            self._hasher.update(rest[: self._left])
            rest, self._left = rest[self._left :], self._left - min(self._left, len(rest))
            self._settle()
        return self._good

    def _settle(self) -> None:
        """The present piece, if all of it has come; then the next one's turn."""
        while self._good and self._piece is not None and self._left == 0:
            self._good = self._hasher.hexdigest() == self._piece.digest
            self._piece = next(self._pieces, None)
            self._left, self._hasher = self._piece.length if self._piece else 0, self._new()
