"""Read leaves of a checkpoint; every byte handed out was checked against its digests. Nothing here trusts what it reads.

An open reader holds its checkpoint, and the base of an increment: neither is deleted meanwhile. Threads may share one."""

import contextlib
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path
from types import TracebackType

import blake3
import numpy as np
import xxhash

from perdure.training.checkpoint.codec import decode_blob
from perdure.training.checkpoint.derive import cast
from perdure.training.checkpoint.indexes import check_is_base, check_state, read_index
from perdure.training.checkpoint.layout import DELTA, RAW, WHOLE
from perdure.training.checkpoint.manifest import FileRecord, Manifest
from perdure.training.checkpoint.pack import (
    MAX_STORED_INDEX,
    REFERENCE,
    Blob,
    Derived,
    IndexEntry,
    base_blob,
    derived_from,
)
from perdure.training.checkpoint.parted import PartedSource, completed
from perdure.training.checkpoint.room import Rooms, scratch
from perdure.training.checkpoint.source import ByteSource, Extent, open_folder
from perdure.training.errors import CheckpointDamaged, CheckpointNotFound


def check_blob(entry: IndexEntry, blob: Blob, stored: bytes | memoryview, where: str) -> None:
    """Stored bytes against their digest. Raises CheckpointDamaged naming the leaf."""
    if len(stored) != blob.stored or xxhash.xxh3_128_digest(stored) != blob.xxh:
        raise CheckpointDamaged(f"{where}: stored bytes of {entry.path} are damaged at offset {blob.offset}", part=entry.path)


class CheckpointReader:
    """An open checkpoint. `entries` are those of rank 0; other ranks' by `rank_entries`. `base` is that of an increment.

    What several ranks have in common is in the index of one of them: `find` says in whose."""

    def __init__(self, manifest: Manifest, source: ByteSource, where: str, base: "CheckpointReader | None" = None) -> None:
        self.manifest, self.source, self.where, self.base = manifest, source, where, base
        self._ranks: dict[int, Mapping[str, IndexEntry]] = {}

    @property
    def ranks(self) -> int:
        return len(self.manifest.files) // 2

    @property
    def entries(self) -> Mapping[str, IndexEntry]:
        return self.rank_entries(0)

    def _record(self, rank: int, part: str) -> FileRecord:
        """The pack or index of a rank, which must be there and have its size."""
        number = 2 * rank + (part == "index")
        if not 0 <= number < len(self.manifest.files):
            raise CheckpointDamaged(f"{self.where}: manifest names no {part} of rank {rank}", part="manifest")
        record = self.manifest.files[number]
        size = self.source.size(record.name)
        if size != record.bytes:
            found = "is missing" if size is None else f"has {size} bytes"
            raise CheckpointDamaged(f"{self.where}: {record.name} {found}, the manifest says {record.bytes}", part=part)
        return record

    def rank_entries(self, rank: int) -> Mapping[str, IndexEntry]:
        """Every leaf of a rank by path. Raises CheckpointDamaged (part "index" or "pack")."""
        if rank not in self._ranks:
            record = self._record(rank, "index")
            if record.bytes > MAX_STORED_INDEX:
                raise CheckpointDamaged(f"{self.where}: {record.name} has {record.bytes} bytes, too many", part="index")
            base = self.base_entries(rank) if self.base is not None else None
            found = self._read_index(record, rank, base)
            self._record(rank, "pack")
            self._ranks[rank] = found
        return self._ranks[rank]

    def _read_index(self, record: FileRecord, rank: int, base: Mapping[str, IndexEntry] | None) -> Mapping[str, IndexEntry]:
        data = self.source.read(record.name, 0, record.bytes)
        try:
            return read_index(self.manifest, rank, data, self.where, base)
        except CheckpointDamaged:
            if not self.source.distrust(record.name):
                raise
            return self._read_index(record, rank, base)

    def find(self, path: str, rank: int = 0) -> int:
        """The rank in whose pack this leaf of `rank` is: its own, or the first that has it. Raises KeyError where none has."""
        owners: list[int] = [rank, *range(self.ranks)]
        for owner in owners:
            if path in self.rank_entries(owner):
                return owner
        raise KeyError(path)

    def state(self, rank: int = 0) -> dict[str, tuple[int, IndexEntry]]:
        """All leaves of a rank by path, each with the rank in whose pack it is."""
        order = [other for other in reversed(range(self.ranks)) if other != rank]
        return {path: (owner, entry) for owner in (*order, rank) for path, entry in self.rank_entries(owner).items()}

    def base_entries(self, rank: int) -> Mapping[str, IndexEntry]:
        """Of an increment: the leaves of that rank in its base; none where the base has fewer ranks."""
        assert self.base is not None
        return self.base.rank_entries(rank) if rank < self.base.ranks else {}

    def check_state_digest(self) -> None:
        """The indexes together are the state the manifest names. Raises CheckpointDamaged (part "index")."""
        check_state(self.manifest, [self.rank_entries(rank) for rank in range(self.ranks)], self.where)

    # reading

    def read(self, path: str, rank: int = 0) -> memoryview:
        """All bytes of a leaf. Raises KeyError where there is none, CheckpointDamaged naming it where it is damaged."""
        out = self.room(self.rank_entries(rank)[path])
        self.read_into(path, out, rank)
        return out

    def room(self, entry: IndexEntry, rooms: Rooms | None = None) -> memoryview:
        """Memory for a whole leaf. Raises CheckpointDamaged where it claims more than there is."""
        try:
            return rooms.take(entry.nbytes) if rooms else np.empty(entry.nbytes, np.uint8).data
        except MemoryError:
            text = f"{self.where}: {entry.path} claims {entry.nbytes} bytes, more than there is memory"
            raise CheckpointDamaged(text, part=entry.path) from None

    def read_into(self, path: str, out: memoryview, rank: int = 0) -> None:
        """As `read`, into `out`, which must have the leaf's size."""
        entry, at = self.rank_entries(rank)[path], 0
        for number, blob in enumerate(entry.blobs):
            self.blob(entry, number, rank, out[at : at + blob.raw])
            at += blob.raw

    def blob(self, entry: IndexEntry, number: int, rank: int = 0, out: memoryview | None = None) -> memoryview:
        """The bytes of one blob, wherever they come from, checked; in `out`, which has as many, or in memory of their own.
        Raises CheckpointDamaged naming the leaf."""
        blob = entry.blobs[number]
        raw = self._raw(entry, number, rank, np.empty(blob.raw, np.uint8).data if out is None else out)
        if blake3.blake3(raw).digest() != blob.digest:
            raise CheckpointDamaged(f"{self.where}: content of {entry.path} does not match its digest", part=entry.path)
        return raw

    def expect(self, leaves: Iterable[tuple[int, IndexEntry]]) -> None:
        """These will be read, each with the rank in whose pack it is, about in the order of the packs."""
        self.expect_blobs((rank, entry, number) for rank, entry in leaves for number in range(len(entry.blobs)))

    def expect_blobs(self, blobs: Iterable[tuple[int, IndexEntry, int]]) -> None:
        """As `expect`, of single blobs."""
        needed: dict[CheckpointReader, list[Extent]] = {self: []}
        for rank, entry, number in blobs:
            for reader, blob in self._needs(entry, number, rank):
                needed.setdefault(reader, []).append(Extent(reader.manifest.files[2 * rank].name, blob.offset, blob.stored))
        for reader, extents in needed.items():
            reader.source.expect(extents)

    def _needs(self, entry: IndexEntry, number: int, rank: int) -> "Iterator[tuple[CheckpointReader, Blob]]":
        """The stored blobs that `_raw` reads, here and in the base."""
        blob = entry.blobs[number]
        if blob.stored:
            yield self, blob
        if blob.layout[0] in (REFERENCE, DELTA):
            found = base_blob(entry, number, self.base_entries(rank))
            assert found is not None  # check_base
            assert self.base is not None
            yield self.base, found[1]
        if entry.derived is not None:
            source = self.rank_entries(rank)[entry.derived.source]
            for one in derived_from(entry.derived, number, len(source.blobs)):
                yield from self._needs(source, one, rank)

    def stored(self, blob: Blob, rank: int = 0) -> bytes:
        """The bytes of a blob as they lie in the pack, unchecked."""
        return self.source.read(self.manifest.files[2 * rank].name, blob.offset, blob.stored)

    def _raw(self, entry: IndexEntry, number: int, rank: int, out: memoryview) -> memoryview:
        """The bytes of one blob in `out`, which the caller compares with its digest: that proves those of the base as well."""
        blob = entry.blobs[number]
        if blob.layout[0] == REFERENCE:
            return self._of_base(entry, number, rank, out)
        if entry.derived is not None:
            return self._derived(entry, entry.derived, number, rank, out)
        base = self._of_base(entry, number, rank, scratch(len(out), "base")) if blob.layout[0] == DELTA else None
        is_plain = blob.layout == (WHOLE, ((RAW, len(out)),))
        stored = out if is_plain else scratch(blob.stored, "stored")
        self._read_stored(entry, blob, rank, stored)
        try:
            if not is_plain:
                decode_blob(stored, blob.layout, entry.dtype, out, base)
        except ValueError as error:
            raise CheckpointDamaged(f"{self.where}: {entry.path} cannot be decoded: {error}", part=entry.path) from None
        return out

    def _read_stored(self, entry: IndexEntry, blob: Blob, rank: int, out: memoryview) -> None:
        pack = self.manifest.files[2 * rank].name
        count = self.source.read_into(pack, blob.offset, out)
        try:
            check_blob(entry, blob, out[:count], self.where)
        except CheckpointDamaged:
            if not self.source.distrust(pack):
                raise
            self._read_stored(entry, blob, rank, out)

    def _of_base(self, entry: IndexEntry, number: int, rank: int, out: memoryview) -> memoryview:
        found = base_blob(entry, number, self.base_entries(rank))
        assert found is not None  # check_base
        assert self.base is not None
        return self.base._raw(found[0], number, rank, out)

    def _derived(self, entry: IndexEntry, derived: Derived, number: int, rank: int, out: memoryview) -> memoryview:
        source, at = self.rank_entries(rank)[derived.source], 0
        try:
            if derived.how == "same":
                return self._raw(source, number, rank, out)
            for one in derived_from(derived, number, len(source.blobs)):
                wide = self._raw(source, one, rank, scratch(source.blobs[one].raw, "source"))
                out[at : at + len(wide) // 2] = cast(wide, entry.dtype)
                at += len(wide) // 2
        except CheckpointDamaged as error:
            raise CheckpointDamaged(f"{entry.path} is made from a damaged leaf: {error}", part=entry.path) from None
        return out

    @property
    def fetched(self) -> int:
        """Bytes that were read from the store, of a checkpoint that is here only in part."""
        own = self.source.fetched if isinstance(self.source, PartedSource) else 0
        return own + (self.base.fetched if self.base is not None else 0)

    def close(self) -> None:
        self.source.close()
        if self.base is not None:
            self.base.close()

    def __enter__(self) -> "CheckpointReader":
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        with contextlib.suppress(OSError):
            self.close()


def open_checkpoint(folder: Path) -> CheckpointReader:
    """A local checkpoint, and its base beside it. Raises CheckpointNotFound, CheckpointDamaged (part "base" for the base)."""
    manifest, source = open_folder(folder)
    try:
        base = _open_base(manifest, folder)
    except BaseException:
        source.close()
        raise
    return CheckpointReader(manifest, completed(manifest, source, folder), str(folder), base)


def _open_base(manifest: Manifest, folder: Path) -> CheckpointReader | None:
    """The base of an increment must be the very full that was differed from."""
    if manifest.base is None:
        return None
    place = folder.parent / manifest.base.name
    try:
        found, source = open_folder(place)
    except CheckpointNotFound:
        raise CheckpointDamaged(f"{folder}: its base {manifest.base.name} is missing", part="base") from None
    except CheckpointDamaged as error:
        raise CheckpointDamaged(f"{folder}: its base is damaged: {error}", part="base", hint=error.hint) from None
    problem = check_is_base(manifest, found)
    if problem:
        source.close()
        raise CheckpointDamaged(f"{folder}: its base {place} {problem}", part="base")
    return CheckpointReader(found, completed(found, source, place), str(place))
