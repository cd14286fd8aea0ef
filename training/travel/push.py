"""Push: one checkpoint into the store. Files first, each read back and compared, the manifest last; then the fact.

A reader of the store sees this checkpoint whole or not at all, wherever push dies; the next push goes on."""

import time
from collections.abc import Callable
from pathlib import Path

import msgspec

from perdure.training.checkpoint import facts, manifest
from perdure.training.checkpoint.facts import Fact
from perdure.training.checkpoint.lineage import lineage, read_launches
from perdure.training.checkpoint.manifest import MAX_MANIFEST, FileRecord, Manifest
from perdure.training.checkpoint.run_info import read_run_info
from perdure.training.errors import CheckpointDamaged, StoreConflict, StoreError
from perdure.training.run_dir import MANIFEST, CheckpointName, RunDir
from perdure.training.storage.store import ObjectStore, ShouldStop, TransferStopped
from perdure.training.travel import digest
from perdure.training.travel.fence import claim_run, record_launch

CHECK_KEY = "check.json"
PushProgress = Callable[[int, int], None]
"""Bytes done and bytes in all; every byte counts twice, once sent and once read back."""


def pending(run: RunDir) -> list[CheckpointName]:
    """Verified checkpoints of the lineage that the store is not known to hold, newest first."""
    return [name for name in lineage(run) if facts.trust(run, name) == "verified"]


def push(
    run: RunDir,
    store: ObjectStore,
    name: CheckpointName,
    *,
    progress: PushProgress | None = None,
    should_stop: ShouldStop | None = None,
) -> Fact:
    """Copy a checkpoint; returns the fact that the store's copy was read back and is good. Doing it twice is fine.

    Raises CheckpointDamaged when the local copy is not what its manifest says, StoreConflict when the store holds
    another run or another checkpoint of this name, StoreError otherwise."""
    return _Push(run, store, name, progress, should_stop).run()


class _Push:
    def __init__(
        self,
        run: RunDir,
        store: ObjectStore,
        name: CheckpointName,
        progress: PushProgress | None,
        should_stop: ShouldStop | None,
    ) -> None:
        self._run, self._store, self._name = run, store, name
        self._folder = run.checkpoint(name)
        self._progress, self._should_stop = progress, should_stop
        self._done = self._total = 0

    def run(self) -> Fact:
        found = self._local_manifest()
        self._total = 2 * sum(record.bytes for record in found.files)
        claim_run(self._run, self._store)
        self._put_launches()
        for record in sorted(found.files, key=lambda record: record.name.endswith(".index")):  # packs first
            self._put_file(record)
        self._put_manifest(manifest.seal(found))
        return self._record()

    def _local_manifest(self) -> Manifest:
        fact = facts.read_fact(self._run, self._name, "local")
        if fact is not None and fact.result != "good":
            raise CheckpointDamaged(f"{self._folder} is quarantined ({'; '.join(fact.damage)[:300]}): not pushed", part="pack")
        found = manifest.read(self._folder)
        info = read_run_info(self._run)
        if found.run != info.id or found.name != self._name:
            raise CheckpointDamaged(f"{self._folder}: manifest is that of {found.name} of run {found.run}", part="manifest")
        return found

    def _put_launches(self) -> None:
        """The lineage is read from these; without them a checkpoint in the store belongs to nothing."""
        for token, record in sorted(read_launches(self._run).items()):
            self._poll()
            if not record_launch(self._store, record):
                raise StoreConflict(
                    f"{self._store.url}: launch {token} is taken by another machine; this one's is {record.host}'s",
                    "another machine went on with this run: stop it or this one, then pull into a new directory",
                )

    def _put_file(self, record: FileRecord) -> None:
        path, key = self._folder / record.name, RunDir.checkpoint_key(self._name, record.name)
        if not digest.local_is(record, path, self._poll):
            part = "pack" if record.name.endswith(".pack") else "index"
            raise CheckpointDamaged(f"{path} is not what the manifest says: not pushed", part=part, hint="run `perdure verify`")
        if digest.stored_is(record, self._store, key, self._count_read):  # an earlier push got this far
            self._count(record.bytes)
            return
        self._send(path, key)
        if not digest.stored_is(record, self._store, key, self._count_read):
            raise StoreError(
                f"{self._store.url}/{key} was stored, but other bytes are read back; no manifest was written",
                hint="push again; if it repeats, the store or the way to it damages data",
            )

    def _send(self, path: Path, key: str) -> None:
        self._poll()
        self._store.put_file(key, path, progress=self._count, should_stop=self._should_stop)

    def _put_manifest(self, data: bytes) -> None:
        self._poll()
        key = RunDir.checkpoint_key(self._name, MANIFEST)
        if not self._store.put(key, data, if_absent=True) and not self._holds(key, data):
            there = self._store.get(key, limit=MAX_MANIFEST)
            try:
                other = manifest.parse(there, f"{self._store.url}/{key}")
            except CheckpointDamaged:  # rotten in the store: ours is good, and all it names was just proven
                self._store.put(key, data)
            else:
                raise StoreConflict(
                    f"{self._store.url}/{key} holds another checkpoint (state {other.state_digest[:16]}, run {other.run})",
                    "another machine committed under the same token: pull into a new directory and go on from there",
                )
        if not self._holds(key, data):
            raise StoreError(f"{self._store.url}/{key} was stored, but other bytes are read back", hint="push again")

    def _holds(self, key: str, data: bytes) -> bool:
        if self._store.size(key) != len(data):
            return False
        return self._store.get(key, limit=len(data)) == data

    def _record(self) -> Fact:
        fact = Fact(copy="store", checked_at=time.time(), result="good", location=self._store.url)
        self._store.put(RunDir.checkpoint_key(self._name, CHECK_KEY), msgspec.json.encode(fact))
        facts.write_fact(self._run, self._name, fact)
        return fact

    def _poll(self) -> None:
        if self._should_stop and self._should_stop():
            raise TransferStopped(f"push of {self._name} to {self._store.url} stopped on request; the next push goes on")

    def _count_read(self, count: int) -> None:
        self._poll()
        self._count(count)

    def _count(self, count: int) -> None:
        self._done += count
        if self._progress:
            self._progress(min(self._done, self._total), self._total)
