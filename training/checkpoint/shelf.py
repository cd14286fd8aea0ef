"""The store's side of a checkpoint whose nodes share no disk: each node stores its own files and reads them back, node 0
commits the manifest there, and the others take manifests in."""

import contextlib
import logging
import time
from collections.abc import Callable, Sequence
from typing import TypeVar

import blake3
import msgspec

from perdure.training import files
from perdure.training.checkpoint import facts
from perdure.training.checkpoint import manifest as manifests
from perdure.training.checkpoint.digest import Proof
from perdure.training.checkpoint.facts import MAX_FACT, Fact
from perdure.training.checkpoint.manifest import MAX_MANIFEST, FileRecord, Manifest
from perdure.training.checkpoint.pack import MAX_STORED_INDEX, decode_index
from perdure.training.errors import CheckpointDamaged, ObjectNotFound, ObjectTooLarge, StoreConflict, StoreError
from perdure.training.run_dir import MANIFEST, CheckpointName, RunDir
from perdure.training.storage.parallel import by_size
from perdure.training.storage.store import ObjectStore

CHECK_KEY = "check.json"
RETRY_SECS = 2.0
logger = logging.getLogger(__name__)
_Result = TypeVar("_Result")


def patiently(call: Callable[[], _Result]) -> _Result:
    """Again until the store can be reached: what waits is durable here. Whoever waits for us ends us."""
    said = False
    while True:
        try:
            return call()
        except StoreError as error:
            if not error.retryable:
                raise
            if not said:
                logger.warning("waits for the store: %s", error)
            said = True
            time.sleep(RETRY_SECS)


def lost_file(store: ObjectStore, wanted: Manifest) -> str:
    """One of its files, or its manifest, that is not there (any more); "" when all are."""
    there = {item.key: item.size for item in store.list(RunDir.checkpoint_key(wanted.name, ""))}
    sizes = {record.name: record.bytes for record in wanted.files} | {MANIFEST: len(manifests.seal(wanted))}
    missing = (file for file, size in sizes.items() if there.get(RunDir.checkpoint_key(wanted.name, file)) != size)
    return next(missing, "")


class Shelf:
    """Where one checkpoint of this run comes to lie."""

    def __init__(self, run: RunDir, store: ObjectStore, name: CheckpointName) -> None:
        self._run, self._store, self._name = run, store, name

    def send(self, records: Sequence[FileRecord]) -> None:
        """Store packs and indexes that lie here, and read them back. Raises StoreError, CheckpointDamaged."""
        proofs: list[Proof] = []
        for pack, index in zip(records[::2], records[1::2], strict=True):
            place = self._run.checkpoint(self._name) / index.name
            entries = decode_index(files.read_limited(place, MAX_STORED_INDEX), pack.bytes, str(place), increment=True)
            proofs += [Proof(pack, {entry.path: entry for entry in entries}), Proof(index)]
        by_size(self._send, proofs, lambda proof: proof.record.bytes)

    def _send(self, proof: Proof) -> None:
        key = self._key(proof.record.name)
        self._store.put_file(key, self._run.checkpoint(self._name) / proof.record.name)
        if not proof.stored(self._store, key):
            raise CheckpointDamaged(f"{self._store.url}/{key} was stored, but other bytes are read back", part="pack")

    def fetch_index(self, pack: FileRecord, index: FileRecord) -> None:
        """Bring the index of another node here; its pack must be there. Raises CheckpointDamaged where one is not as told."""
        try:
            data = self._store.get(self._key(index.name), limit=min(index.bytes, MAX_STORED_INDEX))
        except (ObjectNotFound, ObjectTooLarge) as error:
            raise CheckpointDamaged(f"{self._name}: {error}", part="index") from None
        good = f"blake3:{blake3.blake3(data).hexdigest()}" == index.digest
        if not good or self._store.size(self._key(pack.name)) != pack.bytes:
            raise CheckpointDamaged(f"{self._store.url}/{self._key(pack.name)} is not what its node has stored", part="pack")
        files.write_atomically(self._run.checkpoint(self._name) / index.name, data)

    def commit(self, ours: Manifest) -> Manifest:
        """Put the manifest, which makes it a checkpoint, and the fact that it is good. An earlier try of ours may have come
        through: then that one counts. Raises StoreConflict where another has the name, CheckpointDamaged, StoreError."""
        key, data = self._key(MANIFEST), manifests.seal(ours)
        if not self._store.put(key, data, if_absent=True):
            there = manifests.parse(self._store.get(key, limit=MAX_MANIFEST), f"{self._store.url}/{key}")
            if (there.run, there.state_digest, there.files) != (ours.run, ours.state_digest, ours.files):
                raise StoreConflict(
                    f"{self._store.url}/{key} holds another checkpoint", "another machine committed under our token"
                )
            ours = there
        base = [manifests.read(self._run.checkpoint(ours.base_name))] if ours.base_name else []
        for one in (ours, *base):
            if file := lost_file(self._store, one):
                raise CheckpointDamaged(f"{self._store.url}: {file} of {one.name} was deleted meanwhile", part="pack")
        fact = Fact(copy=facts.STORE, checked_at=time.time(), result="good", location=self._store.url)
        self._store.put(self._key(CHECK_KEY), msgspec.json.encode(fact))
        facts.write_fact(self._run, self._name, fact)
        return ours

    def adopt(self, run_id: str) -> None:
        """Take in a committed checkpoint: its manifest and what is known of that copy, no pack. Raises ObjectNotFound,
        CheckpointDamaged, StoreError."""
        key = self._key(MANIFEST)
        data = self._store.get(key, limit=MAX_MANIFEST)
        found = manifests.parse(data, f"{self._store.url}/{key}")
        if found.name != self._name or found.run != run_id:
            text = f"{self._store.url}/{key} is of checkpoint {found.name} of run {found.run:.100}"
            raise CheckpointDamaged(text, part="manifest")
        fact = Fact(copy=facts.STORE, checked_at=found.created, result="good")  # each node had read its files back
        with contextlib.suppress(ObjectNotFound, ObjectTooLarge, ValueError, RecursionError):
            fact = msgspec.json.decode(self._store.get(self._key(CHECK_KEY), limit=MAX_FACT), type=Fact)
        files.make_dirs(self._run.checkpoint(self._name))
        told = msgspec.structs.replace(fact, copy=facts.STORE, location=self._store.url)
        facts.write_fact(self._run, self._name, told)
        files.write_atomically(self._run.manifest(self._name), data)

    def _key(self, file: str) -> str:
        return RunDir.checkpoint_key(self._name, file)
