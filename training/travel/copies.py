"""The copies of a checkpoint, here and at other places, looked at file by file: what of each is not what its manifest says.

Stored bytes are compared with their digests, nothing is decoded; a file of one copy can be proven by the other's index."""

import errno
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Protocol

from perdure.training import files
from perdure.training.checkpoint import manifest
from perdure.training.checkpoint.digest import Proof
from perdure.training.checkpoint.indexes import read_index
from perdure.training.checkpoint.manifest import MAX_MANIFEST, FileRecord, Manifest
from perdure.training.checkpoint.pack import MAX_STORED_INDEX, IndexEntry
from perdure.training.errors import CheckpointDamaged, ObjectNotFound, ObjectTooLarge, StoreError
from perdure.training.run_dir import MANIFEST, CheckpointName, RunDir
from perdure.training.storage.store import ObjectStore

Count = Callable[[int], None]
"""Called with the number of bytes that were just read."""


class Place(Protocol):
    """Where copies are: `local`, `store`, or the name of a tier."""

    @property
    def word(self) -> str: ...

    def exists(self, name: CheckpointName) -> bool: ...

    def read(self, name: CheckpointName, file: str, limit: int) -> bytes:
        """A small file. Raises CheckpointDamaged where it is missing, unreadable or too large."""
        ...

    def holds(self, name: CheckpointName, file: str, proof: Proof, count: Count) -> bool: ...


@dataclass(frozen=True)
class Local:
    run: RunDir
    word: str = "local"

    def exists(self, name: CheckpointName) -> bool:
        return self.run.manifest(name).exists()

    def read(self, name: CheckpointName, file: str, limit: int) -> bytes:
        path = self.run.checkpoint(name) / file
        try:
            return files.read_limited(path, limit)
        except FileNotFoundError:
            raise CheckpointDamaged(f"{path} is missing", part=file) from None
        except ValueError as error:
            raise CheckpointDamaged(str(error), part=file) from None
        except OSError as error:
            raise _rot(error, str(path), file) from None

    def holds(self, name: CheckpointName, file: str, proof: Proof, count: Count) -> bool:
        path = self.run.checkpoint(name) / file
        try:
            good = proof.local(path)
        except OSError as error:
            raise _rot(error, str(path), file) from None
        count(proof.record.bytes)
        return good


@dataclass(frozen=True)
class Stored:
    store: ObjectStore
    word: str = "store"

    def exists(self, name: CheckpointName) -> bool:
        return self.store.size(RunDir.checkpoint_key(name, MANIFEST)) is not None

    def read(self, name: CheckpointName, file: str, limit: int) -> bytes:
        key = RunDir.checkpoint_key(name, file)
        try:
            return self.store.get(key, limit=limit)
        except ObjectNotFound:
            raise CheckpointDamaged(f"{self.store.url}/{key} is missing", part=file) from None
        except ObjectTooLarge as error:
            raise CheckpointDamaged(str(error), part=file) from None

    def holds(self, name: CheckpointName, file: str, proof: Proof, count: Count) -> bool:
        return proof.stored(self.store, RunDir.checkpoint_key(name, file), count)


def _rot(error: OSError, where: str, file: str) -> Exception:
    """A sector that cannot be read is damage; no right to read says nothing about what lies there."""
    return CheckpointDamaged(f"{where}: {error.strerror}", part=file) if error.errno == errno.EIO else error


@dataclass(frozen=True, kw_only=True)
class State:
    """What one copy was found to be."""

    exists: bool = True
    manifest: Manifest | None = None
    bad: Mapping[str, str] = field(default_factory=dict)
    """File -> what is wrong with it."""

    @property
    def good(self) -> bool:
        return self.exists and not self.bad


def check(place: Place, other: Place | None, name: CheckpointName, run_id: str, count: Count = lambda _: None) -> State:
    """Read a whole copy. `other` lends an index that is damaged here, so that its pack can be judged all the same."""
    if not place.exists(name):
        return State(exists=False)
    try:
        found = read_manifest(place, name, run_id)
    except CheckpointDamaged as error:
        return State(bad={MANIFEST: str(error)})
    bad: dict[str, str] = {}
    leaves = size = 0
    for rank in range(len(found.files) // 2):
        problems, entries = _check_rank(place, other, found, rank, count)
        bad |= problems
        leaves, size = leaves + len(entries), size + sum(entry.nbytes for entry in entries.values())
    if not bad and (leaves, size) != (found.leaves, found.raw_bytes):
        bad[MANIFEST] = f"{place.word} copy of {name}: manifest counts {found.leaves} leaves, the indexes hold {leaves}"
    return State(manifest=found, bad=bad)


def read_manifest(place: Place, name: CheckpointName, run_id: str) -> Manifest:
    """Raises CheckpointDamaged, also where it is another checkpoint's or another run's."""
    found = manifest.parse(place.read(name, MANIFEST, MAX_MANIFEST), f"{place.word} copy of {name}")
    if found.name != name or found.run != run_id:
        text = f"{place.word} copy of {name}: manifest is that of {found.name} of run {found.run:.100}"
        raise CheckpointDamaged(text, part="manifest")
    return found


def _check_rank(
    place: Place, other: Place | None, found: Manifest, rank: int, count: Count
) -> tuple[dict[str, str], Mapping[str, IndexEntry]]:
    """What is wrong with its files; its leaves as far as they are known."""
    pack, index = found.files[2 * rank : 2 * rank + 2]
    bad: dict[str, str] = {}
    try:
        entries: Mapping[str, IndexEntry] | None = entries_of(place, found, rank)
    except CheckpointDamaged as error:
        bad[index.name] = str(error)
        entries = _lent(other, found, rank)
    count(index.bytes)
    if problem := _check_pack(place, found, pack, entries, count):
        bad[pack.name] = problem
    return bad, entries or {}


def _check_pack(place: Place, found: Manifest, pack: FileRecord, entries: Mapping[str, IndexEntry] | None, count: Count) -> str:
    if entries is None and found.version > 1:
        return f"{place.word} copy of {found.name}: {pack.name} cannot be judged without its index"
    try:
        good = place.holds(found.name, pack.name, Proof(pack, entries), count)
    except (CheckpointDamaged, ObjectNotFound) as error:
        return str(error)
    return "" if good else f"{place.word} copy of {found.name}: {pack.name} is not what the manifest says"


def entries_of(place: Place, found: Manifest, rank: int) -> Mapping[str, IndexEntry]:
    """The leaves of a rank, by its index there. Raises CheckpointDamaged."""
    record = found.files[2 * rank + 1]
    data = place.read(found.name, record.name, min(record.bytes, MAX_STORED_INDEX))
    return read_index(found, rank, data, f"{place.word} copy of {found.name}", None)


def _lent(other: Place | None, found: Manifest, rank: int) -> Mapping[str, IndexEntry] | None:
    try:
        return entries_of(other, found, rank) if other is not None else None
    except (CheckpointDamaged, StoreError):
        return None
