"""Write one checkpoint: digests from the snapshot, then encoding, pack, index, and the manifest last. There, or not there."""

import contextlib
import time
from collections import deque
from collections.abc import Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path
from typing import Any, Protocol

import blake3
import xxhash

from perdure.training import files
from perdure.training.checkpoint import manifest as manifests
from perdure.training.checkpoint.codec import EncodedBlob, encode_blob
from perdure.training.checkpoint.manifest import FORMAT, VERSION, FileRecord, Manifest
from perdure.training.checkpoint.pack import BLOB_BYTES, Blob, IndexEntry, decode_index, encode_index, leaf_digest, state_digest
from perdure.training.errors import CheckpointDamaged
from perdure.training.run_dir import CheckpointName, RunDir, rank_index, rank_pack
from perdure.training.slots import About, Entry

_INLINE = 1 << 16
"""Raw bytes up to which a blob is encoded on the spot: handing it to a thread would cost more."""
_GATHER = 4 << 20
"""Stored bytes gathered before they are written."""


class SnapshotSource(Protocol):
    """One rank's snapshot; `slots.Snapshot` is one."""

    @property
    def about(self) -> About: ...
    @property
    def entries(self) -> Sequence[Entry]: ...
    def data(self, entry: Entry) -> memoryview: ...


class _Encoded:
    """A finished blob: digest of its raw bytes, taken first, and what is to be stored."""

    def __init__(self, raw: memoryview, dtype: str, encoding: str) -> None:
        self.digest = blake3.blake3(raw).digest()
        self.blob: EncodedBlob = encode_blob(raw, dtype, encoding)
        stored = xxhash.xxh3_128()
        for part in self.blob.parts:
            stored.update(part)
        self.xxh = stored.digest()


def write_checkpoint(
    run: RunDir, run_id: str, name: CheckpointName, snapshots: Sequence[SnapshotSource], *, encoding: str, threads: int
) -> Manifest:
    """Write and commit checkpoint `name`; rank r is the r-th snapshot. Whatever fails leaves nothing behind; a committed one of
    the same state is returned as it is. Raises OSError (no room, say), CheckpointDamaged where another state has the name."""
    folder = run.checkpoint(name)
    if manifests.is_committed(run, name):
        return _same_or_refuse(folder, snapshots)
    try:
        _make_folder(folder)
        records, entries = [], []
        for rank, snapshot in enumerate(snapshots):
            pack, index = _write_pack(folder / rank_pack(rank), snapshot, encoding, threads)
            data = encode_index(index)
            decode_index(data, pack.bytes, str(folder / rank_index(rank)))  # a reader would refuse it: so does the writer
            files.write_atomically(folder / rank_index(rank), data)
            record = FileRecord(name=rank_index(rank), bytes=len(data), digest=f"blake3:{blake3.blake3(data).hexdigest()}")
            records += [pack, record]
            entries += index
        manifest = _manifest(run_id, name, snapshots[0].about, records, entries)
        files.write_atomically(run.manifest(name), manifests.seal(manifest))
    except BaseException:
        _clean_up(run, name)
        raise
    return manifest


def _make_folder(folder: Path) -> None:
    """The folder, empty: what a writer that was killed left in it gives its room back first. A name is one launch's, and a
    launch has one saver, so nobody is writing here now."""
    files.make_dirs(folder)
    for path in folder.iterdir():
        files.remove(path)


def _write_pack(path: Path, snapshot: SnapshotSource, encoding: str, threads: int) -> tuple[FileRecord, list[IndexEntry]]:
    whole, size = xxhash.xxh3_128(), 0
    waiting: list[Any] = []  # Any: bytes or uint8 arrays
    index: list[IndexEntry] = []
    with files.NewFile(path) as new:

        def flush() -> None:
            data = b"".join(waiting) if len(waiting) > 1 else waiting[0] if waiting else b""
            whole.update(data)
            before = new.size
            new.write(data)
            new.start_writeback(before, new.size - before)
            waiting.clear()

        gathered = 0
        for entry, encoded in _encode_all(snapshot, encoding, threads):
            blobs = []
            for raw, item in encoded:
                blobs.append(Blob(size, item.blob.stored, raw, item.xxh, item.digest, item.blob.layout))
                waiting += item.blob.parts
                size, gathered = size + item.blob.stored, gathered + item.blob.stored
                if gathered >= _GATHER:
                    flush()
                    gathered = 0
            digest = leaf_digest(blob.digest for blob in blobs)
            index.append(IndexEntry(entry.path, entry.kind, entry.dtype, entry.shape, entry.nbytes, digest, tuple(blobs)))
        flush()
        new.commit()
    return FileRecord(name=path.name, bytes=size, digest=f"xxh3-128:{whole.hexdigest()}"), index


def _encode_all(
    snapshot: SnapshotSource, encoding: str, threads: int
) -> Iterator[tuple[Entry, Iterator[tuple[int, _Encoded]]]]:
    """Every leaf with its encoded blobs, in order; a bounded number of blobs is encoded ahead by `threads` threads."""
    work = ((entry, raw) for entry in snapshot.entries for raw in _split(snapshot, entry))
    ahead: deque[_Encoded | Future[_Encoded]] = deque()
    with ThreadPoolExecutor(threads, thread_name_prefix="encode") as pool:

        def fill() -> None:
            while len(ahead) < 2 * threads + 2:
                entry, raw = next(work, (None, None))
                if entry is None or raw is None:
                    return
                small = len(raw) <= _INLINE
                ahead.append(
                    _Encoded(raw, entry.dtype, encoding) if small else pool.submit(_Encoded, raw, entry.dtype, encoding)
                )

        def blobs_of(entry: Entry) -> Iterator[tuple[int, _Encoded]]:
            for start in range(0, entry.nbytes, BLOB_BYTES):
                fill()
                item = ahead.popleft()
                yield min(BLOB_BYTES, entry.nbytes - start), item.result() if isinstance(item, Future) else item

        for entry in snapshot.entries:
            yield entry, blobs_of(entry)


def _split(snapshot: SnapshotSource, entry: Entry) -> Iterator[memoryview]:
    data = snapshot.data(entry)
    if len(data) != entry.nbytes:
        raise CheckpointDamaged(f"snapshot has {len(data)} bytes of {entry.path}, not {entry.nbytes}", part=entry.path)
    for start in range(0, len(data), BLOB_BYTES):
        yield data[start : start + BLOB_BYTES]


def _manifest(
    run_id: str, name: CheckpointName, about: About, records: list[FileRecord], entries: list[IndexEntry]
) -> Manifest:
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
        **told,
    )
    return manifests.parse(manifests.seal(bare), str(name))


def _same_or_refuse(folder: Path, snapshots: Sequence[SnapshotSource]) -> Manifest:
    """A saver killed after its commit is asked again: compare states, never overwrite."""
    found = manifests.read(folder)
    entries = []
    for snapshot in snapshots:
        for entry in snapshot.entries:
            digest = leaf_digest(blake3.blake3(raw).digest() for raw in _split(snapshot, entry))
            entries.append(IndexEntry(entry.path, entry.kind, entry.dtype, entry.shape, entry.nbytes, digest, ()))
    if state_digest(entries) != found.state_digest:
        raise CheckpointDamaged(f"{folder} is committed already, with another state; it is left as it is", part="manifest")
    return found


def _clean_up(run: RunDir, name: CheckpointName) -> None:
    """Give back the room of an attempt that failed; what cannot be removed is a leftover that the next attempt overwrites."""
    if manifests.is_committed(run, name):
        return
    with contextlib.suppress(OSError):
        for path in run.checkpoint(name).iterdir():
            files.remove(path)
        run.checkpoint(name).rmdir()
