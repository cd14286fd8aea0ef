"""Roll up: a full made of an increment and its base, in the increment's own folder, without the trainer; then the base can go.

Packs and indexes of the full are written beside the old ones and proven; then the manifest is replaced, which is the moment it
is a full; then the old files go, once nobody reads by the old manifest. Killed anywhere, it is the one or the other, whole."""

import contextlib
import time
from collections.abc import Callable, Iterator

import blake3
import msgspec
import xxhash

from perdure.training import events, files
from perdure.training.checkpoint import manifest as manifests
from perdure.training.checkpoint.codec import encode_blob
from perdure.training.checkpoint.facts import Fact, write_fact
from perdure.training.checkpoint.layout import DELTA, ROTATED, Layout
from perdure.training.checkpoint.manifest import FileRecord, Manifest
from perdure.training.checkpoint.pack import REFERENCE, Blob, IndexEntry, base_blob, blobs_digest, decode_index, encode_index
from perdure.training.checkpoint.reader import CheckpointReader, check_blob, open_checkpoint
from perdure.training.checkpoint.source import FolderSource
from perdure.training.checkpoint.space import shortage
from perdure.training.checkpoint.tidy import tidy
from perdure.training.errors import CheckpointDamaged, DiskFull
from perdure.training.run_dir import MANIFEST, REPLACED_MANIFEST, CheckpointName, RunDir, rank_index, rank_pack

Progress = Callable[[int, int], None]
"""Raw bytes done, and in all; each counts twice, once written and once proven."""


def roll_up(run: RunDir, name: CheckpointName, *, encoding: str = "auto", progress: Progress | None = None) -> Manifest:
    """Make a full of an increment; the manifest that is there now. One that is a full already is only tidied up. The caller has
    the upkeep lock. Raises CheckpointNotFound, CheckpointDamaged where it or its base is damaged, DiskFull, OSError."""
    folder = run.checkpoint(name)
    with open_checkpoint(folder) as reader:
        found = reader.manifest
        if reader.base is not None:
            if problem := shortage(run, found.raw_bytes):
                raise DiskFull(f"{problem}; {name} stays an increment", "make room, then roll it up again")
            found = _Rollup(run, name, reader, encoding, progress).go()
    tidy(run, name)
    return found


class _Rollup:
    def __init__(
        self, run: RunDir, name: CheckpointName, reader: CheckpointReader, encoding: str, progress: Progress | None
    ) -> None:
        self._run, self._name, self._folder = run, name, run.checkpoint(name)
        self._reader, self._encoding, self._progress = reader, encoding, progress
        self._done = 0

    def go(self) -> Manifest:
        try:
            records = [record for rank in range(self._reader.ranks) for record in self._write_rank(rank)]
            full = self._manifest(records)
            self._prove(full)
        except BaseException:
            with contextlib.suppress(OSError, CheckpointDamaged):
                tidy(self._run, self._name)
            raise
        files.link(self._folder / MANIFEST, self._folder / REPLACED_MANIFEST)
        files.write_atomically(self._folder / MANIFEST, manifests.seal(full))
        write_fact(self._run, self._name, Fact(copy="local", checked_at=time.time(), result="good", location=str(self._name)))
        with contextlib.suppress(OSError):  # on a full disk: the log is only told
            events.record(self._run, "rolled_up", step=self._name.step, name=str(self._name), stored_bytes=full.stored_bytes)
        return full

    def _write_rank(self, rank: int) -> tuple[FileRecord, FileRecord]:
        path, index, offset = self._folder / rank_pack(rank, rolled_up=True), [], 0
        with files.PackFile(path) as new:
            for entry in self._reader.rank_entries(rank).values():
                blobs = []
                for blob, stored in self._blobs(entry, rank):
                    blobs.append(msgspec.structs.replace(blob, offset=offset))
                    offset += blob.stored
                    if blob.stored:
                        new.write(stored)
                    self._count(blob.raw)
                index.append(msgspec.structs.replace(entry, blobs=tuple(blobs)))
            new.commit()
        pack = FileRecord(name=path.name, bytes=offset, digest=blobs_digest(index))
        return pack, self._write_index(rank, index, pack)

    def _write_index(self, rank: int, index: list[IndexEntry], pack: FileRecord) -> FileRecord:
        path, data = self._folder / rank_index(rank, rolled_up=True), encode_index(index)
        decode_index(data, pack.bytes, str(path))  # a reader would refuse it: so do we
        files.write_atomically(path, data)
        return FileRecord(name=path.name, bytes=len(data), digest=f"blake3:{blake3.blake3(data).hexdigest()}")

    def _blobs(self, entry: IndexEntry, rank: int) -> Iterator[tuple[Blob, files.Buffer]]:
        """Each blob as it will be stored. Bytes that need no base are taken over as they are; a delta is encoded anew."""
        for number, blob in enumerate(entry.blobs):
            owner, at, one = self._reader, entry, blob
            if blob.layout[0] == REFERENCE:
                owner, (at, one) = self._of_base(entry, number, rank)
            if one.layout[0] in (DELTA, ROTATED):
                yield self._anew(entry, number, rank)
            elif one.stored:
                stored = owner.stored(one, rank)
                check_blob(at, one, stored, owner.where)
                yield one, stored
            else:
                yield one, b""  # derived from another leaf of this checkpoint

    def _of_base(self, entry: IndexEntry, number: int, rank: int) -> tuple[CheckpointReader, tuple[IndexEntry, Blob]]:
        assert self._reader.base is not None
        found = base_blob(entry, number, self._reader.base_entries(rank))
        assert found is not None  # checked with the index
        return self._reader.base, found

    def _anew(self, entry: IndexEntry, number: int, rank: int) -> tuple[Blob, bytes]:
        encoded = encode_blob(self._reader.blob(entry, number, rank), entry.dtype, self._encoding)
        stored, layout = b"".join(encoded.parts), _layout(encoded.layout)
        told = entry.blobs[number]
        return Blob(0, len(stored), told.raw, xxhash.xxh3_128_digest(stored), told.digest, layout), stored

    def _manifest(self, records: list[FileRecord]) -> Manifest:
        stored = sum(record.bytes for record in records)
        full = msgspec.structs.replace(self._reader.manifest, base=None, files=tuple(records), stored_bytes=stored)
        return manifests.parse(manifests.seal(full), str(self._folder))

    def _prove(self, full: Manifest) -> None:
        """Read it all back from the disk: the same state as before, or it never takes the place of what is there."""
        with CheckpointReader(full, FolderSource(self._folder), str(self._folder)) as reader:
            for rank in range(reader.ranks):
                for entry in reader.rank_entries(rank).values():
                    for number, blob in enumerate(entry.blobs):
                        reader.blob(entry, number, rank)
                        self._count(blob.raw)
            reader.check_state_digest()

    def _count(self, count: int) -> None:
        self._done += count
        if self._progress is not None:
            self._progress(self._done, 2 * self._reader.manifest.raw_bytes)


def _layout(layout: Layout) -> Layout:
    return layout[0], tuple(layout[1])
