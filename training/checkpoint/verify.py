"""Prove a checkpoint: read every stored byte back, decode it, compare every digest; all damage is named, not just the first.

Of an increment, also what it needs of its base."""

import contextlib
import time
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import NamedTuple

import xxhash

from perdure.training.checkpoint import manifest as manifests
from perdure.training.checkpoint.facts import STORE, Fact, read_fact, write_fact
from perdure.training.checkpoint.hold import hold
from perdure.training.checkpoint.layout import DELTA
from perdure.training.checkpoint.manifest import FileRecord
from perdure.training.checkpoint.ordered import INLINE, in_order
from perdure.training.checkpoint.pack import REFERENCE, IndexEntry, base_blob
from perdure.training.checkpoint.parted import is_part
from perdure.training.checkpoint.reader import CheckpointReader, check_blob, open_checkpoint
from perdure.training.checkpoint.run_info import read_run_info
from perdure.training.errors import CheckpointDamaged, CheckpointNotFound
from perdure.training.process import keep_freed_memory
from perdure.training.run_dir import CheckpointName, RunDir

Progress = Callable[[int, int], None]
"""Called with stored bytes done and in all."""
_LINES, _LINE = 100, 500
"""Damages a fact tells, and characters of each."""
_READ = 8 << 20


@dataclass(frozen=True)
class Damage:
    """`part` is "manifest", "base", "index", "pack", or the path of a leaf."""

    part: str
    detail: str


def verify_folder(folder: Path, *, deep: bool = True, progress: Progress | None = None, threads: int = 1) -> list[Damage]:
    """All damage of a local checkpoint; empty when it is good. Not deep: stored bytes against their digests, undecoded.

    Raises CheckpointNotFound where there is no manifest, OSError where a file cannot be read at all."""
    keep_freed_memory()
    try:
        reader = open_checkpoint(folder)
    except CheckpointDamaged as error:
        return [Damage(error.part, str(error))]
    with reader:
        return _Verifier(reader, deep, progress or (lambda _done, _total: None), threads).run()


class _Job(NamedTuple):
    entry: IndexEntry
    number: int
    rank: int


class _Verifier:
    """One pass over a checkpoint; what is wrong gathers in `found`."""

    def __init__(self, reader: CheckpointReader, deep: bool, progress: Progress, threads: int) -> None:
        self._reader, self._progress, self._threads = reader, progress, threads
        self._check = self._deep if deep else self._shallow
        self.found: list[Damage] = []

    def run(self) -> list[Damage]:
        done = 0
        for rank in range(self._reader.ranks):
            pack, index = self._reader.manifest.files[2 * rank : 2 * rank + 2]
            try:
                entries = self._reader.rank_entries(rank)
            except CheckpointDamaged as error:
                self.found.append(Damage(error.part, str(error)))
            else:
                self._pack(entries.values(), rank, pack, done)
            done += pack.bytes + index.bytes
            self._progress(done, self._reader.manifest.stored_bytes)
        if not self.found:
            try:
                self._reader.check_state_digest()
            except CheckpointDamaged as error:
                self.found.append(Damage(error.part, str(error)))
        return self.found

    def _pack(self, entries: Iterable[IndexEntry], rank: int, pack: FileRecord, done: int) -> None:
        before = len(self.found)
        jobs = (_Job(entry, number, rank) for entry in entries for number in range(len(entry.blobs)))
        told = in_order(self._check, jobs, threads=self._threads, nbytes=lambda job: job.entry.blobs[job.number].raw)
        last: IndexEntry | None = None
        for job, problem in told:
            if problem and job.entry is not last:  # one for each leaf
                self.found.append(Damage(job.entry.path, problem))
                last = job.entry
            blob = job.entry.blobs[job.number]
            if job.number % 16 == 15 or blob.stored > INLINE:
                self._progress(done + blob.offset + blob.stored, self._reader.manifest.stored_bytes)
        if len(self.found) == before and self._reader.manifest.version == 1 and not self._is_whole(pack):
            self.found.append(Damage("pack", f"{self._reader.where}: {pack.name} does not match the manifest's digest"))

    def _deep(self, job: _Job) -> str:
        """What is wrong with a blob; "" for nothing."""
        try:
            self._reader.blob(*job)
        except CheckpointDamaged as error:
            return str(error)
        return ""

    def _shallow(self, job: _Job) -> str:
        entry, blob = job.entry, job.entry.blobs[job.number]
        try:
            if blob.stored:
                check_blob(entry, blob, self._reader.stored(blob, job.rank), self._reader.where)
            if blob.layout[0] in (REFERENCE, DELTA) and self._reader.base is not None:
                base, found = self._reader.base, base_blob(entry, job.number, self._reader.base_entries(job.rank))
                assert found is not None  # checked with the index
                check_blob(*found, base.stored(found[1], job.rank), base.where)
        except CheckpointDamaged as error:
            return str(error)
        return ""

    def _is_whole(self, pack: FileRecord) -> bool:
        """Of version 1, whose manifest has a digest of the whole file."""
        whole = xxhash.xxh3_128()
        for offset in range(0, pack.bytes, _READ):
            whole.update(self._reader.source.read(pack.name, offset, min(_READ, pack.bytes - offset)))
        return f"xxh3-128:{whole.hexdigest()}" == pack.digest


def verify_in_run(
    run: RunDir, name: CheckpointName, *, deep: bool = True, progress: Progress | None = None, threads: int = 1
) -> list[Damage]:
    """As `verify_folder`, and the checkpoint must be this run's own: another run's, copied here, is whole but not ours."""
    folder = run.checkpoint(name)
    damage = verify_folder(folder, deep=deep, progress=progress, threads=threads)
    return damage or _other_run(run, manifests.read(folder).run)


def look_through(run: RunDir, name: CheckpointName) -> list[Damage]:
    """As `verify_in_run` of one that is here in part: its indexes and the sizes of its packs. Each node has proven the bytes of
    its own in the store, and a reader proves what it reads; more would be fetched for nobody."""
    fact = read_fact(run, name, STORE)
    if fact is not None and fact.result == "damaged":
        return [Damage("pack", detail) for detail in fact.damage]
    try:
        with open_checkpoint(run.checkpoint(name)) as reader:
            reader.check_state_digest()
            return _other_run(run, reader.manifest.run)
    except CheckpointDamaged as error:
        return [Damage(error.part, str(error))]


def _other_run(run: RunDir, theirs: str) -> list[Damage]:
    if run.run_json.exists() and (ours := read_run_info(run).id) != theirs:
        return [Damage("manifest", f"{run.root}: this checkpoint belongs to run {theirs}, not to {ours}")]
    return []


def check(run: RunDir, name: CheckpointName, *, deep: bool = True, threads: int = 1, whole: bool = False) -> Fact:
    """Verify the local copy and record the fact beside it; of one that is here in part, look through it, or read the `whole`,
    and record damage only. Raises CheckpointNotFound when it is gone."""
    folder = run.checkpoint(name)
    part = is_part(run, name)
    with contextlib.ExitStack() as until_written:
        with contextlib.suppress(CheckpointDamaged):  # whose manifest is no file: nobody deletes it, and the proof tells
            until_written.enter_context(hold(folder))  # else a prune could delete it between the proof and the fact
        damage = look_through(run, name) if part and not whole else verify_in_run(run, name, deep=deep, threads=threads)
        fact = Fact(
            copy="local",
            checked_at=time.time(),
            result="damaged" if damage else "good",
            damage=told(damage),
            location=folder.name,
        )
        if not folder.is_dir():
            raise CheckpointNotFound(f"{folder} was removed while it was checked")
        if damage or not part:
            write_fact(run, name, fact)
    return fact


def told(damage: list[Damage]) -> tuple[str, ...]:
    """For the fact, which has to stay small enough to be read again."""
    lines = [f"{item.part}: {item.detail}"[:_LINE] for item in damage[:_LINES]]
    return (*lines, *([f"and {len(damage) - _LINES} more"] if len(damage) > _LINES else []))
