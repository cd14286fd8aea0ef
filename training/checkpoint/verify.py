"""Prove a checkpoint: read every stored byte back, decode it, compare every digest; all damage is named, not just the first."""

import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import xxhash

from perdure.training.checkpoint import manifest as manifests
from perdure.training.checkpoint.facts import Fact, write_fact
from perdure.training.checkpoint.manifest import FileRecord
from perdure.training.checkpoint.pack import IndexEntry
from perdure.training.checkpoint.reader import CheckpointReader, check_blob, decode_checked, open_checkpoint
from perdure.training.checkpoint.run_info import read_run_info
from perdure.training.errors import CheckpointDamaged, CheckpointNotFound
from perdure.training.run_dir import CheckpointName, RunDir

Progress = Callable[[int, int], None]
"""Called with stored bytes done and in all."""
_LINES, _LINE = 100, 500
"""Damages a fact tells, and characters of each."""


@dataclass(frozen=True)
class Damage:
    """`part` is "manifest", "index", "pack", or the path of a leaf."""

    part: str
    detail: str


def verify_folder(folder: Path, *, deep: bool = True, progress: Progress | None = None) -> list[Damage]:
    """All damage of a local checkpoint; empty when it is good. Not deep: stored bytes against their digests, undecoded.

    Raises CheckpointNotFound where there is no manifest, OSError where a file cannot be read at all."""
    try:
        reader = open_checkpoint(folder)
    except CheckpointDamaged as error:
        return [Damage(error.part, str(error))]
    with reader:
        return _Verifier(reader, deep, progress or (lambda _done, _total: None)).run()


class _Verifier:
    """One pass over a checkpoint; what is wrong gathers in `found`."""

    def __init__(self, reader: CheckpointReader, deep: bool, progress: Progress) -> None:
        self._reader, self._progress = reader, progress
        self._check = decode_checked if deep else check_blob
        self.found: list[Damage] = []

    def run(self) -> list[Damage]:
        done = 0
        for rank in range(self._reader.ranks):
            pack, index = self._reader.manifest.files[2 * rank : 2 * rank + 2]
            if self._passes(lambda rank=rank: self._reader.rank_entries(rank)):  # type: ignore[misc]  # a default binds the rank
                self._pack(rank, pack, done)
            done += pack.bytes + index.bytes
            self._progress(done, self._reader.manifest.stored_bytes)
        if not self.found:
            self._passes(self._reader.check_state_digest)
        return self.found

    def _passes(self, check: Callable[[], object]) -> bool:
        try:
            check()
        except CheckpointDamaged as error:
            self.found.append(Damage(error.part, str(error)))
            return False
        return True

    def _pack(self, rank: int, pack: FileRecord, done: int) -> None:
        whole, before = xxhash.xxh3_128(), len(self.found)
        for entry in self._reader.rank_entries(rank).values():
            self._passes(lambda entry=entry: self._leaf(entry, pack.name, whole, done))  # type: ignore[misc]  # as above
        if len(self.found) == before and f"xxh3-128:{whole.hexdigest()}" != pack.digest:
            self.found.append(Damage("pack", f"{self._reader.where}: {pack.name} does not match the manifest's digest"))

    def _leaf(self, entry: IndexEntry, pack: str, whole: xxhash.xxh3_128, done: int) -> None:
        for blob in entry.blobs:
            stored = self._reader.source.read(pack, blob.offset, blob.stored)
            whole.update(stored)
            self._check(entry, blob, stored, self._reader.where)
            self._progress(done + blob.offset + blob.stored, self._reader.manifest.stored_bytes)


def verify_in_run(run: RunDir, name: CheckpointName, *, deep: bool = True, progress: Progress | None = None) -> list[Damage]:
    """As `verify_folder`, and the checkpoint must be this run's own: another run's, copied here, is whole but not ours."""
    folder = run.checkpoint(name)
    damage = verify_folder(folder, deep=deep, progress=progress)
    if not damage and run.run_json.exists():
        ours, theirs = read_run_info(run).id, manifests.read(folder).run
        if ours != theirs:
            damage.append(Damage("manifest", f"{folder}: belongs to run {theirs}, not to {ours}"))
    return damage


def check(run: RunDir, name: CheckpointName, *, deep: bool = True) -> Fact:
    """Verify the local copy and record the fact beside it. Raises CheckpointNotFound when it is gone."""
    folder = run.checkpoint(name)
    damage = verify_in_run(run, name, deep=deep)
    fact = Fact(
        copy="local",
        checked_at=time.time(),
        result="damaged" if damage else "good",
        damage=_told(damage),
        location=folder.name,
    )
    if not folder.is_dir():
        raise CheckpointNotFound(f"{folder} was removed while it was checked")
    write_fact(run, name, fact)
    return fact


def _told(damage: list[Damage]) -> tuple[str, ...]:
    """For the fact, which has to stay small enough to be read again."""
    lines = [f"{item.part}: {item.detail}"[:_LINE] for item in damage[:_LINES]]
    return (*lines, *([f"and {len(damage) - _LINES} more"] if len(damage) > _LINES else []))
