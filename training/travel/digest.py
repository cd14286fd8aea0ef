"""Digests of stored bytes (`FileRecord.digest`), of a local file or of an object read in ranges: the only proof of a copy."""

from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Protocol

import blake3
import xxhash

from perdure.training.checkpoint.manifest import FileRecord
from perdure.training.errors import CheckpointDamaged
from perdure.training.storage.parallel import in_order, ranges
from perdure.training.storage.store import ObjectStore

READ_BYTES = 8 << 20
WIDTH = 4


class _Hasher(Protocol):
    def update(self, data: bytes, /) -> object: ...
    def hexdigest(self) -> str: ...


_KINDS: dict[str, Callable[[], _Hasher]] = {"xxh3-128": xxhash.xxh3_128, "blake3": blake3.blake3}


def _digest(kind: str, parts: Iterable[bytes]) -> str:
    hasher = _KINDS[kind]()
    for part in parts:
        hasher.update(part)
    return f"{kind}:{hasher.hexdigest()}"


def _kind(record: FileRecord) -> str:
    kind = record.digest.partition(":")[0]
    if kind not in _KINDS:
        raise CheckpointDamaged(f"{record.name}: digest {record.digest[:80]!r} is of no known kind", part="manifest")
    return kind


def local_is(record: FileRecord, path: Path, poll: Callable[[], None] = lambda: None) -> bool:
    """The file holds what the manifest says; False also where it is missing."""

    def parts() -> Iterable[bytes]:
        with open(path, "rb") as file:
            while data := file.read(READ_BYTES):
                poll()
                yield data

    try:
        return path.stat().st_size == record.bytes and _digest(_kind(record), parts()) == record.digest
    except FileNotFoundError:
        return False


def stored_is(record: FileRecord, store: ObjectStore, key: str, progress: Callable[[int], None] = lambda _: None) -> bool:
    """The object holds what the manifest says; False also where it is missing. Read back whole, in ranges."""
    if store.size(key) != record.bytes:
        return False

    def parts() -> Iterable[bytes]:
        spans = ranges(record.bytes, READ_BYTES)
        for data in in_order(lambda span: store.get_range(key, *span), spans, width=WIDTH):
            progress(len(data))
            yield data

    return _digest(_kind(record), parts()) == record.digest
