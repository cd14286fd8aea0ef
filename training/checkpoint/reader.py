"""Read leaves of a checkpoint; every byte handed out was checked against its digests. Nothing here trusts what it reads."""

import contextlib
import errno
import os
import stat
from collections.abc import Mapping
from pathlib import Path
from types import TracebackType
from typing import Protocol

import blake3
import xxhash

from perdure.training.checkpoint import manifest as manifests
from perdure.training.checkpoint.codec import decode_blob
from perdure.training.checkpoint.manifest import FileRecord, Manifest
from perdure.training.checkpoint.pack import MAX_STORED_INDEX, Blob, IndexEntry, decode_index, state_digest
from perdure.training.errors import CheckpointDamaged
from perdure.training.run_dir import rank_index, rank_pack

_OPEN_FILES = 32
"""Of one checkpoint at a time: with thousands of ranks, all of them would be more than a process may have."""


class ByteSource(Protocol):
    """Where packs and indexes lie: a folder, or a store."""

    def size(self, file: str) -> int | None: ...
    def read(self, file: str, offset: int, length: int) -> bytes: ...
    def close(self) -> None: ...


class FolderSource:
    """The files of one checkpoint folder; links are not followed."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._open: dict[str, int] = {}

    def _fd(self, file: str) -> int:
        if file not in self._open:
            fd = os.open(self._folder / file, os.O_RDONLY | os.O_CLOEXEC | os.O_NOFOLLOW | os.O_NONBLOCK)
            if not stat.S_ISREG(os.fstat(fd).st_mode):
                os.close(fd)
                raise FileNotFoundError(errno.ENOENT, "not a regular file", str(self._folder / file))
            while len(self._open) >= _OPEN_FILES:
                os.close(self._open.pop(next(iter(self._open))))
            self._open[file] = fd
        return self._open[file]

    def size(self, file: str) -> int | None:
        try:
            return os.fstat(self._fd(file)).st_size
        except OSError as error:
            if error.errno in (errno.ENOENT, errno.ENOTDIR, errno.ELOOP, errno.ENXIO):
                return None
            raise  # no right to read, say: says nothing about the copy

    def read(self, file: str, offset: int, length: int) -> bytes:
        try:
            return os.pread(self._fd(file), length, offset)
        except OSError as error:
            if error.errno == errno.EIO:
                return b""  # a bad sector is damage of what lies there; the digests say of what
            raise

    def close(self) -> None:
        for fd in self._open.values():
            os.close(fd)
        self._open.clear()


def check_blob(entry: IndexEntry, blob: Blob, stored: bytes, where: str) -> None:
    """Stored bytes against their digest. Raises CheckpointDamaged naming the leaf."""
    if len(stored) != blob.stored or xxhash.xxh3_128(stored).digest() != blob.xxh:
        raise CheckpointDamaged(f"{where}: stored bytes of {entry.path} are damaged at offset {blob.offset}", part=entry.path)


def decode_checked(entry: IndexEntry, blob: Blob, stored: bytes, where: str) -> memoryview:
    """Raw bytes of a blob, checked before and after decoding. Raises CheckpointDamaged naming the leaf."""
    check_blob(entry, blob, stored, where)
    try:
        raw = decode_blob(memoryview(stored), blob.layout, entry.dtype, blob.raw)
    except ValueError as error:
        raise CheckpointDamaged(f"{where}: {entry.path} cannot be decoded: {error}", part=entry.path) from None
    if blake3.blake3(raw).digest() != blob.digest:
        raise CheckpointDamaged(f"{where}: content of {entry.path} does not match its digest", part=entry.path)
    return raw


class CheckpointReader:
    """An open checkpoint. `entries` are those of rank 0; other ranks' by `rank_entries`."""

    def __init__(self, manifest: Manifest, source: ByteSource, where: str) -> None:
        self.manifest, self.source, self.where = manifest, source, where
        self._records = {record.name: record for record in manifest.files}
        self._ranks: dict[int, Mapping[str, IndexEntry]] = {}

    @property
    def ranks(self) -> int:
        return len(self._records) // 2

    @property
    def entries(self) -> Mapping[str, IndexEntry]:
        return self.rank_entries(0)

    def _record(self, file: str, part: str) -> FileRecord:
        record = self._records.get(file)
        if record is None:
            raise CheckpointDamaged(f"{self.where}: manifest names no {file}", part="manifest")
        size = self.source.size(file)
        if size != record.bytes:
            found = "is missing" if size is None else f"has {size} bytes"
            raise CheckpointDamaged(f"{self.where}: {file} {found}, the manifest says {record.bytes}", part=part)
        return record

    def rank_entries(self, rank: int) -> Mapping[str, IndexEntry]:
        """Every leaf of a rank by path. Raises CheckpointDamaged (part "index" or "pack")."""
        if rank not in self._ranks:
            record = self._record(rank_index(rank), "index")
            if record.bytes > MAX_STORED_INDEX:
                raise CheckpointDamaged(f"{self.where}: {record.name} has {record.bytes} bytes, too many", part="index")
            data = self.source.read(record.name, 0, record.bytes)
            if f"blake3:{blake3.blake3(data).hexdigest()}" != record.digest:
                raise CheckpointDamaged(f"{self.where}: {record.name} does not match its digest", part="index")
            pack = self._record(rank_pack(rank), "pack")
            entries = decode_index(data, pack.bytes, f"{self.where}/{record.name}")
            self._ranks[rank] = {entry.path: entry for entry in entries}
        return self._ranks[rank]

    def check_state_digest(self) -> None:
        """The indexes together are the state the manifest names. Raises CheckpointDamaged (part "index")."""
        entries = [entry for rank in range(self.ranks) for entry in self.rank_entries(rank).values()]
        found = (state_digest(entries), len(entries), sum(entry.nbytes for entry in entries))
        if found != (self.manifest.state_digest, self.manifest.leaves, self.manifest.raw_bytes):
            raise CheckpointDamaged(f"{self.where}: indexes do not add up to the manifest's state digest", part="index")

    def read(self, path: str, rank: int = 0) -> memoryview:
        """All bytes of a leaf. Raises KeyError where there is none, CheckpointDamaged naming it where it is damaged."""
        entry = self.rank_entries(rank)[path]
        if len(entry.blobs) == 1:
            return self._blob(entry, entry.blobs[0], rank)
        try:
            out = memoryview(bytearray(entry.nbytes))
        except MemoryError:
            raise CheckpointDamaged(
                f"{self.where}: {path} claims {entry.nbytes} bytes, more than there is memory", part=path
            ) from None
        self.read_into(path, out, rank)
        return out

    def read_into(self, path: str, out: memoryview, rank: int = 0) -> None:
        """As `read`, into `out`, which must have the leaf's size."""
        entry, at = self.rank_entries(rank)[path], 0
        for blob in entry.blobs:
            out[at : at + blob.raw] = self._blob(entry, blob, rank)
            at += blob.raw

    def _blob(self, entry: IndexEntry, blob: Blob, rank: int) -> memoryview:
        return decode_checked(entry, blob, self.source.read(rank_pack(rank), blob.offset, blob.stored), self.where)

    def close(self) -> None:
        self.source.close()

    def __enter__(self) -> "CheckpointReader":
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        with contextlib.suppress(OSError):
            self.close()


def open_checkpoint(folder: Path) -> CheckpointReader:
    """A local checkpoint. Raises CheckpointNotFound, CheckpointDamaged."""
    return CheckpointReader(manifests.read(folder), FolderSource(folder), str(folder))
