"""Write one checkpoint: digests from the snapshot, then encoding, pack, index, and the manifest last. There, or not there."""

import contextlib
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any, NamedTuple, Protocol

import blake3

from perdure.training import files
from perdure.training.checkpoint import derive
from perdure.training.checkpoint import manifest as manifests
from perdure.training.checkpoint.audit import snapshots_digest
from perdure.training.checkpoint.blobs import Encoder, Leaf
from perdure.training.checkpoint.increment import opened_base
from perdure.training.checkpoint.layout import DELTA
from perdure.training.checkpoint.manifest import FORMAT, VERSION, Base, FileRecord, Manifest
from perdure.training.checkpoint.pack import (
    REFERENCE,
    Blob,
    IndexEntry,
    blobs_digest,
    decode_index,
    encode_index,
    state_digest,
)
from perdure.training.checkpoint.reader import CheckpointReader
from perdure.training.errors import CheckpointDamaged
from perdure.training.run_dir import CheckpointName, RunDir, rank_index, rank_pack
from perdure.training.slots import About, Entry


class SnapshotSource(Protocol):
    """One rank's snapshot; `slots.Snapshot` is one."""

    @property
    def about(self) -> About: ...
    @property
    def entries(self) -> Sequence[Entry]: ...
    def data(self, entry: Entry) -> memoryview: ...


def write_checkpoint(
    run: RunDir,
    run_id: str,
    name: CheckpointName,
    snapshots: Sequence[SnapshotSource],
    *,
    encoding: str,
    threads: int,
    base: CheckpointName | None = None,
) -> Manifest:
    """Write and commit checkpoint `name`; rank r is the r-th snapshot. Whatever fails leaves nothing behind; a committed one of
    the same state is returned as it is. Raises OSError (no room, say), CheckpointDamaged where another state has the name.

    With a `base`, an increment against that full; a full where the base is missing, damaged or of no use."""
    folder = run.checkpoint(name)
    if manifests.is_committed(run, name):
        return _same_or_refuse(folder, snapshots)
    with opened_base(run, run_id, name, base) as opened:
        try:
            _make_folder(folder)
            records: list[FileRecord] = []
            entries: list[IndexEntry] = []
            for rank, snapshot in enumerate(snapshots):
                part = write_part(folder, rank, snapshot, Way(encoding, threads, opened))
                records += part.files
                entries += part.entries
            manifest = make_manifest(run_id, name, snapshots[0].about, records, entries, opened)
            files.write_atomically(run.manifest(name), manifests.seal(manifest))
        except BaseException:
            _clean_up(run, name)
            raise
    return manifest


class Way(NamedTuple):
    """How blobs are to be encoded."""

    encoding: str
    threads: int
    base: CheckpointReader | None = None


class Written(NamedTuple):
    """A rank's part: its pack and index, and what they hold."""

    files: tuple[FileRecord, FileRecord]
    entries: list[IndexEntry]


def write_part(folder: Path, rank: int, snapshot: derive.Leaves, way: Way) -> Written:
    """Write a rank's pack and index, each there whole or not at all, over what has their names. Raises OSError."""
    pack, entries = _write_pack(folder, rank, snapshot, way)
    return Written((pack, _write_index(folder, rank, entries, pack)), entries)


def _make_folder(folder: Path) -> None:
    """The folder, empty: what a writer that was killed left in it gives its room back first. A name is one launch's, and a
    launch has one saver, so nobody is writing here now."""
    files.make_dirs(folder)
    for path in folder.iterdir():
        files.remove(path)


def _write_pack(folder: Path, rank: int, snapshot: derive.Leaves, way: Way) -> tuple[FileRecord, list[IndexEntry]]:
    leaves = _leaves(snapshot, rank, way)
    offset = 0
    with files.PackFile(folder / rank_pack(rank)) as new:
        for job, done in Encoder(way.encoding, way.base, rank).run(leaves, way.threads):
            job.leaf.blobs.append(Blob(offset, done.size, len(job.raw), done.xxh, done.digest, done.layout))
            for part in done.parts:
                new.write(part)
            offset += done.size
        new.commit()
    index = [leaf.index_entry() for leaf in leaves]
    return FileRecord(name=rank_pack(rank), bytes=offset, digest=blobs_digest(index)), index


def _leaves(snapshot: derive.Leaves, rank: int, way: Way) -> list[Leaf]:
    known = way.base.rank_entries(rank) if way.base is not None and rank < way.base.ranks else {}
    leaves = [Leaf(entry, snapshot.data(entry), None, known.get(entry.path)) for entry in snapshot.entries]
    derived = derive.find(snapshot, way.threads)
    for leaf in leaves if derived else ():
        leaf.derived = derived.get(leaf.entry.path)
    return leaves


def _write_index(folder: Path, rank: int, index: list[IndexEntry], pack: FileRecord) -> FileRecord:
    path, data = folder / rank_index(rank), encode_index(index)
    decode_index(data, pack.bytes, str(path), increment=True)  # a reader would refuse it: so does the writer
    files.write_atomically(path, data)
    return FileRecord(name=path.name, bytes=len(data), digest=f"blake3:{blake3.blake3(data).hexdigest()}")


def make_manifest(
    run_id: str,
    name: CheckpointName,
    about: About,
    records: Sequence[FileRecord],
    entries: Sequence[IndexEntry],
    base: CheckpointReader | None = None,
) -> Manifest:
    """The manifest of a checkpoint that is written: of these files, which hold these leaves."""
    told: dict[str, Any] = {field: getattr(about, field) for field in About.__struct_fields__ if field != "step"}  # Any: JSON
    bare = Manifest(
        format=FORMAT,
        version=VERSION,
        run=run_id,
        step=name.step,
        token=name.token,
        created=round(time.time(), 3),
        state_digest=state_digest(entries),
        raw_bytes=sum(entry.nbytes for entry in entries),
        stored_bytes=sum(record.bytes for record in records),
        leaves=len(entries),
        files=tuple(records),
        base=_used_base(entries, base),
        **told,
    )
    return manifests.parse(manifests.seal(bare), str(name))


def _used_base(entries: Sequence[IndexEntry], base: CheckpointReader | None) -> Base | None:
    """None also where nothing of the base was of use: such a checkpoint is a full."""
    transforms = {blob.layout[0] for entry in entries for blob in entry.blobs} if base is not None else set()
    if base is None or not transforms & {REFERENCE, DELTA}:
        return None
    return Base(name=str(base.manifest.name), digest=base.manifest.digest)


def _same_or_refuse(folder: Path, snapshots: Sequence[SnapshotSource]) -> Manifest:
    """A saver killed after its commit is asked again: compare states, never overwrite."""
    found = manifests.read(folder)
    if snapshots_digest(snapshots) != found.state_digest:
        raise CheckpointDamaged(f"{folder} is committed already, with another state; it is left as it is", part="manifest")
    files.fsync_dir(folder)  # the first try may have failed at just that
    return found


def _clean_up(run: RunDir, name: CheckpointName) -> None:
    """Give back the room of an attempt that failed; what cannot be removed is a leftover that the next attempt overwrites."""
    if manifests.is_committed(run, name):
        return
    with contextlib.suppress(OSError):
        for path in run.checkpoint(name).iterdir():
            files.remove(path)
        run.checkpoint(name).rmdir()
