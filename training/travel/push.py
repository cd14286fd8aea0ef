"""Push: one checkpoint into the store. Files first, each read back and compared, the manifest last; then the fact.

The base of an increment goes before it. A reader of the store sees a checkpoint whole or not at all, wherever push dies; the
next push goes on."""

import contextlib
import threading
import time
from collections.abc import Callable, Mapping
from typing import NamedTuple

import msgspec

from perdure.training import files
from perdure.training.checkpoint import facts, manifest
from perdure.training.checkpoint.digest import Check, Proof
from perdure.training.checkpoint.facts import Fact
from perdure.training.checkpoint.lineage import lineage, read_launches
from perdure.training.checkpoint.manifest import MAX_MANIFEST, FileRecord, Manifest
from perdure.training.checkpoint.reader import CheckpointReader, open_checkpoint
from perdure.training.checkpoint.run_info import read_run_info
from perdure.training.checkpoint.shelf import CHECK_KEY, lost_file
from perdure.training.errors import CheckpointDamaged, NeedsThaw, ObjectNotFound, ObjectTooLarge, StoreConflict, StoreError
from perdure.training.run_dir import MANIFEST, CheckpointName, RunDir
from perdure.training.storage.parallel import by_size
from perdure.training.storage.store import ObjectStore, ShouldStop, TransferStopped
from perdure.training.travel import copies
from perdure.training.travel.fence import claim_run, record_launch
from perdure.training.travel.mark import going
from perdure.training.travel.pins import push_pins

ABANDONED_SECS = 7 * 86400
"""Age at which an unfinished upload is dropped: nobody came back to go on with it."""
PushProgress = Callable[[int, int], None]
"""Bytes done and bytes in all; every byte counts twice, once sent and once read back."""


def pending(run: RunDir) -> list[CheckpointName]:
    """Verified checkpoints of the lineage that the store is not known to hold or to have let go, newest first."""
    here = (name for name in lineage(run) if facts.trust(run, name) in facts.GOOD)
    return [name for name in here if not facts.is_in(run, name, facts.STORE) and not facts.is_pruned(run, name, facts.STORE)]


def push(
    run: RunDir,
    store: ObjectStore,
    name: CheckpointName,
    *,
    place: str = facts.STORE,
    progress: PushProgress | None = None,
    should_stop: ShouldStop | None = None,
) -> Fact:
    """Copy a checkpoint; returns the fact that the store's copy was read back and is good. Doing it twice is fine. `place`:
    what the store is to the run, `store` or the name of a tier.

    Raises CheckpointDamaged when the local copy is not what its manifest says, StoreConflict when the store holds
    another run or another checkpoint of this name, StoreError otherwise."""
    try:
        return _Push(run, store, name, place, progress, should_stop).run()
    except ObjectNotFound as error:  # what was there a moment ago
        raise StoreError(f"deleted meanwhile: {error}", hint="push again") from error


class _File(NamedTuple):
    """A pack (`part` 0) or index (1) on its way."""

    record: FileRecord
    rank: int
    part: int


class _Push:
    def __init__(
        self,
        run: RunDir,
        store: ObjectStore,
        name: CheckpointName,
        place: str,
        progress: PushProgress | None,
        should_stop: ShouldStop | None,
    ) -> None:
        self._run, self._store, self._name, self._place = run, store, name, place
        self._progress, self._should_stop = progress, should_stop
        self._class = ""
        """Where the files of the checkpoint under way were moved."""
        self._done = self._total = 0
        self._counting = threading.Lock()

    def run(self) -> Fact:
        with self._opened() as reader:
            claim_run(self._run, self._store)
            self._put_launches()
            push_pins(self._run, self._store)
            base = reader.base
            wanted = [reader] if base is None or self._is_pushed(base) else [base, reader]
            self._total = 2 * sum(record.bytes for one in wanted for record in one.manifest.files)
            for one in wanted:
                fact = self._put(one)
        with contextlib.suppress(StoreError):  # a key that may not list or abort them leaves them
            self._store.abort_uploads(RunDir.CHECKPOINTS_KEY, ABANDONED_SECS)
        return fact

    def _put(self, reader: CheckpointReader) -> Fact:
        self._class = ""
        there = self._stored_manifest(reader)
        if there is not None and manifest.is_rolled_up(there, reader.manifest):
            self._prove_rolled_up(there)
            self._check_stays(there)
        else:
            self._put_files(reader)
            self._refuse_going(reader.manifest.name)
            self._put_manifest(reader.manifest)
            self._check_stays(reader.manifest, *([reader.base.manifest] if reader.base is not None else []))
        return self._record(reader.manifest.name)

    def _refuse_going(self, *names: CheckpointName) -> None:
        if gone := going(self._store).intersection(names):
            raise StoreError(f"{self._store.url}: a prune is deleting {min(gone)} there", hint="push again when it is done")

    def _check_stays(self, *wanted: Manifest) -> None:
        """Now that the manifest is there, a prune that begins sees it. One that began before is seen by its mark; one that is
        done, by what is missing: in this order."""
        self._refuse_going(*(one.name for one in wanted))
        for one in wanted:
            if file := lost_file(self._store, one):
                raise self._lost(one.name, file)

    def _prove_rolled_up(self, there: Manifest) -> None:
        """The store has a full that was made of our increment: nothing to send, all of it to be read."""
        state = copies.check(copies.Stored(self._store), None, there.name, there.run, self._count_read)
        if not state.good:
            told = "; ".join(state.bad.values())[:300]
            raise StoreError(
                f"{self._store.url}: the full {there.name} there is damaged ({told})",
                hint="run `perdure rollup` on the local one, then push again",
            )

    def _opened(self) -> CheckpointReader:
        """The local copy, held while it is sent. What is known to be damaged, or has a base that is, is not sent."""
        folder = self._run.checkpoint(self._name)
        self._check_trust(self._name)
        reader = open_checkpoint(folder)
        try:
            found, info = reader.manifest, read_run_info(self._run)
            if found.run != info.id or found.name != self._name:
                text = f"{folder}: manifest is that of {found.name} of run {found.run}"
                raise CheckpointDamaged(text, part="manifest")
            if reader.base is not None:
                self._check_trust(reader.base.manifest.name)
        except BaseException:
            reader.close()
            raise
        return reader

    def _check_trust(self, name: CheckpointName) -> None:
        fact = facts.read_fact(self._run, name, "local")
        if fact is not None and fact.result != "good":
            told = "; ".join(fact.damage)[:300]
            raise CheckpointDamaged(f"{self._run.checkpoint(name)} is quarantined ({told}): not pushed", part="pack")

    def _is_pushed(self, base: CheckpointReader) -> bool:
        """It was read back from the store once, and is there still."""
        return facts.is_in(self._run, base.manifest.name, self._place) and self._stored_manifest(base) == base.manifest

    def _stored_manifest(self, reader: CheckpointReader) -> Manifest | None:
        """What the store has under this name; None for nothing, or nothing that can be read."""
        key = RunDir.checkpoint_key(reader.manifest.name, MANIFEST)
        with contextlib.suppress(ObjectNotFound, ObjectTooLarge, CheckpointDamaged):
            return manifest.parse(self._store.get(key, limit=MAX_MANIFEST), f"{self._store.url}/{key}")
        return None

    def _put_launches(self) -> None:
        """The lineage is read from these; without them a checkpoint in the store belongs to nothing."""
        for token, record in sorted(read_launches(self._run).items()):
            self._poll()
            if not record_launch(self._store, record):
                raise StoreConflict(
                    f"{self._store.url}: launch {token} is taken by another machine; this one's is {record.host}'s",
                    "another machine went on with this run: stop it or this one, then pull into a new directory",
                )

    def _put_files(self, reader: CheckpointReader) -> None:
        """In any order, for nobody looks at them before the manifest is there: while one is read back, others are sent."""
        there = {item.key: item.size for item in self._store.list(RunDir.checkpoint_key(reader.manifest.name, ""))}
        wanted = [_File(record, number // 2, number % 2) for number, record in enumerate(reader.manifest.files)]
        by_size(lambda file: self._put_file(reader, file, there), wanted, lambda file: file.record.bytes)

    def _put_file(self, reader: CheckpointReader, file: _File, there: Mapping[str, int]) -> None:
        record = file.record
        key = RunDir.checkpoint_key(reader.manifest.name, record.name)
        proof = Proof(record, None if file.part else reader.rank_entries(file.rank))
        if there.get(key) == record.bytes and (settled := self._settled_in(reader, record, key)):
            self._class = settled
            self._count(2 * record.bytes)
            return
        if there.get(key) == record.bytes and self._is_proven(proof, key):
            self._count(record.bytes)
        else:
            self._send_and_prove(reader, file, proof, key)
        if self._store.cold is not None:
            self._class = self._store.cold.settle(key, record.digest)

    def _is_proven(self, proof: Proof, key: str) -> bool:
        """An earlier push got this far. What cannot be read, and is not known to be proven, is sent again."""
        try:
            return proof.stored(self._store, key, self._count_read)
        except NeedsThaw:
            return False

    def _settled_in(self, reader: CheckpointReader, record: FileRecord, key: str) -> str:
        """The class it was moved to by an earlier push that proved it; "" also where it was found damaged since."""
        fact = facts.read_fact(self._run, reader.manifest.name, self._place)
        if self._store.cold is None or (fact is not None and fact.result == "damaged"):
            return ""
        return self._store.cold.settled_in(key, record.digest)

    def _send_and_prove(self, reader: CheckpointReader, file: _File, proof: Proof, key: str) -> None:
        self._send(reader, file, proof, key)
        if not proof.stored(self._store, key, self._count_read):
            raise StoreError(
                f"{self._store.url}/{key} was stored, but other bytes are read back; no manifest was written",
                hint="push again; if it repeats, the store or the way to it damages data",
            )

    def _send(self, reader: CheckpointReader, file: _File, proof: Proof, key: str) -> None:
        """The file is read once, and each of its bytes compared with the manifest before it is sent."""
        self._poll()
        path, check = self._run.checkpoint(reader.manifest.name) / file.record.name, Check(proof.hasher, proof.pieces)
        kind = "index" if file.part else "pack"

        def damaged() -> CheckpointDamaged:
            return CheckpointDamaged(
                f"{path} is not what the manifest says: not pushed", part=kind, hint="run `perdure verify`"
            )

        def watch(data: bytes) -> None:
            if not check.update(data):
                raise damaged()

        try:
            if path.stat().st_size != file.record.bytes:
                raise damaged()
        except FileNotFoundError:
            raise damaged() from None
        self._store.put_file(key, path, watch=watch, progress=self._count, should_stop=self._should_stop)
        if not check.complete:
            raise damaged()

    def _put_manifest(self, ours: Manifest) -> None:
        self._poll()
        key, data = RunDir.checkpoint_key(ours.name, MANIFEST), manifest.seal(ours)
        if not self._store.put(key, data, if_absent=True) and not self._holds(key, data):
            self._replace_manifest(key, data, ours)
        if not self._holds(key, data):
            raise StoreError(f"{self._store.url}/{key} was stored, but other bytes are read back", hint="push again")

    def _replace_manifest(self, key: str, data: bytes, ours: Manifest) -> None:
        """All that ours names was just proven. It takes the place of a rotten one, or of the increment it was made from."""
        try:
            other = manifest.parse(self._store.get(key, limit=MAX_MANIFEST), f"{self._store.url}/{key}")
        except (CheckpointDamaged, ObjectTooLarge):
            self._store.put(key, data)
            return
        if not manifest.is_rolled_up(ours, other):
            raise StoreConflict(
                f"{self._store.url}/{key} holds another checkpoint (state {other.state_digest[:16]}, run {other.run})",
                "another machine committed under the same token: pull into a new directory and go on from there",
            )
        self._store.put(key, data)  # the files of the increment are left to a prune: they may be read just now

    def _holds(self, key: str, data: bytes) -> bool:
        if self._store.size(key) != len(data):
            return False
        return self._store.get(key, limit=len(data)) == data

    def _record(self, name: CheckpointName) -> Fact:
        fact = Fact(
            copy=self._place, checked_at=time.time(), result="good", location=self._store.url, storage_class=self._class
        )
        self._store.put(RunDir.checkpoint_key(name, CHECK_KEY), msgspec.json.encode(fact))
        facts.write_fact(self._run, name, fact)
        if self._store.size(RunDir.checkpoint_key(name, MANIFEST)) is None:  # a prune that had not got so far speaks last
            files.remove(self._run.fact(name, self._place))
            raise self._lost(name, MANIFEST)
        return fact

    def _lost(self, name: CheckpointName, file: str) -> StoreError:
        return StoreError(f"{self._store.url}: {file} of {name} was deleted meanwhile", hint="push again")

    def _poll(self) -> None:
        if self._should_stop and self._should_stop():
            raise TransferStopped(f"push of {self._name} to {self._store.url} stopped on request; the next push goes on")

    def _count_read(self, count: int) -> None:
        self._poll()
        self._count(count)

    def _count(self, count: int) -> None:
        with self._counting:
            self._done += count
            if self._progress:
                self._progress(min(self._done, self._total), self._total)
