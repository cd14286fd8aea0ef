"""Digests of stored bytes, of a local file or of an object read in ranges: the only proof of a copy.

A pack is proven blob by blob, as its index says; an index, and a pack of format 1, by a digest of the whole file."""

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Protocol

import blake3
import xxhash

from perdure.training.checkpoint.manifest import FileRecord
from perdure.training.checkpoint.pack import Blob, IndexEntry
from perdure.training.errors import CheckpointDamaged
from perdure.training.storage.parallel import in_order, ranges
from perdure.training.storage.store import ObjectStore

READ_BYTES = 8 << 20
WIDTH = 4


class _Hasher(Protocol):
    def update(self, data: bytes, /) -> object: ...
    def hexdigest(self) -> str: ...


_KINDS: dict[str, Callable[[], _Hasher]] = {"xxh3-128": xxhash.xxh3_128, "blake3": blake3.blake3}


class Proof:
    """What a file must hold: `entries` are the leaves of a pack's index, which says what its blobs are."""

    def __init__(self, record: FileRecord, entries: Mapping[str, IndexEntry] | None = None) -> None:
        self.record = record
        self._blobs = [blob for entry in (entries or {}).values() for blob in entry.blobs if blob.stored]
        self._kind = record.digest.partition(":")[0]
        if self._kind not in _KINDS and (self._kind != "blobs" or entries is None):
            raise CheckpointDamaged(f"{record.name}: digest {record.digest[:80]!r} is of no known kind", part="manifest")

    def local(self, path: Path, poll: Callable[[], None] = lambda: None) -> bool:
        """The file holds it; False also where it is missing."""

        def parts() -> Iterable[bytes]:
            with open(path, "rb") as file:
                while data := file.read(READ_BYTES):
                    poll()
                    yield data

        try:
            return path.stat().st_size == self.record.bytes and self._holds(parts())
        except FileNotFoundError:
            return False

    def stored(self, store: ObjectStore, key: str, progress: Callable[[int], None] = lambda _: None) -> bool:
        """The object holds it; False also where it is missing. Read back whole, in ranges."""
        if store.size(key) != self.record.bytes:
            return False

        def parts() -> Iterable[bytes]:
            spans = ranges(self.record.bytes, READ_BYTES)
            for data in in_order(lambda span: store.get_range(key, *span), spans, width=WIDTH):
                progress(len(data))
                yield data

        return self._holds(parts())

    def _holds(self, parts: Iterable[bytes]) -> bool:
        if self._kind == "blobs":
            return all(good for good in _compare(self._blobs, parts))
        hasher = _KINDS[self._kind]()
        for part in parts:
            hasher.update(part)
        return f"{self._kind}:{hasher.hexdigest()}" == self.record.digest


def _compare(blobs: Sequence[Blob], parts: Iterable[bytes]) -> Iterator[bool]:
    """Whether each blob is what it should be, and nothing comes after the last. All parts are read, for their progress."""
    waiting = iter(blobs)
    blob, left, hasher = next(waiting, None), 0, xxhash.xxh3_128()
    left = blob.stored if blob else 0
    for part in parts:
        rest = memoryview(part)
        while len(rest):
            if blob is None:
                yield False
                return
            hasher.update(rest[:left])
            taken = min(left, len(rest))
            rest, left = rest[taken:], left - taken
            if left == 0:
                yield hasher.digest() == blob.xxh
                blob, hasher = next(waiting, None), xxhash.xxh3_128()
                left = blob.stored if blob else 0
    yield blob is None
