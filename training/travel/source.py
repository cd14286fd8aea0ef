"""A checkpoint of a run that is read where it is stored, and the base of an increment."""

from perdure.training.checkpoint.indexes import check_is_base
from perdure.training.checkpoint.manifest import Manifest
from perdure.training.checkpoint.reader import CheckpointReader
from perdure.training.checkpoint.store_source import StoreSource
from perdure.training.errors import CheckpointDamaged
from perdure.training.run_dir import CheckpointName, RunDir
from perdure.training.storage.store import ObjectStore
from perdure.training.travel.copies import Count, Stored, read_manifest


def open_stored(store: ObjectStore, name: CheckpointName, run_id: str, count: Count = lambda _: None) -> CheckpointReader:
    """A checkpoint of that run in the store, and the base of an increment. `count` is called by several threads. Raises
    CheckpointDamaged, StoreError."""
    found, base = read_manifest(Stored(store), name, run_id), None
    if found.base_name is not None:
        try:
            there = read_manifest(Stored(store), found.base_name, run_id)
        except CheckpointDamaged as error:
            raise CheckpointDamaged(f"{store.url}: the base of {name} is damaged: {error}", part="base") from None
        if problem := check_is_base(found, there):
            raise CheckpointDamaged(f"{store.url}: the base of {name} {problem}", part="base")
        base = _reader(store, there, None, count)
    return _reader(store, found, base, count)


def _reader(store: ObjectStore, found: Manifest, base: CheckpointReader | None, count: Count) -> CheckpointReader:
    where = f"{store.url}/{RunDir.checkpoint_key(found.name, '')}".rstrip("/")
    return CheckpointReader(found, StoreSource(store, RunDir.checkpoint_key(found.name, ""), count), where, base)
