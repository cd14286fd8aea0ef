"""The mark of a prune under way at a place: what is going from there. One prune works at a place at a time, and whoever pushes
what is going is told to come again. docs/crash-safety.md says why that loses nothing."""

import contextlib

import msgspec

from perdure.training.errors import ObjectNotFound, ObjectTooLarge, RunBusy
from perdure.training.process import ProcessId, identify
from perdure.training.run_dir import CheckpointName, RunDir
from perdure.training.storage.store import ObjectStore

WORK_SECS = 600.0
"""So long a prune deletes under one mark, by its own clock."""
DEAD_SECS = 900.0
"""By the store's clock: whoever made an older mark is dead, or has stopped."""
MAX_TEXT = 16 << 20
"""Bytes of manifests under one mark, or the one larger manifest."""
_MAX_MARK = 4 * MAX_TEXT  # a string in JSON may take twice its bytes


class Mark(msgspec.Struct, frozen=True, kw_only=True):
    owner: ProcessId
    going: dict[str, str]
    """Name of a checkpoint -> its manifest, by which it can be put back; empty where it has none."""


def find_mark(store: ObjectStore) -> tuple[Mark, bool] | None:
    """The mark there, and whether its prune is dead. One that cannot be read is nobody's: marks are put whole."""
    if store.size(RunDir.PRUNING_KEY) is None:
        return None
    ages = [item.age_secs for item in store.list(RunDir.PRUNING_KEY) if item.key == RunDir.PRUNING_KEY]
    with contextlib.suppress(ObjectNotFound, ObjectTooLarge, ValueError, RecursionError):
        mark = msgspec.json.decode(store.get(RunDir.PRUNING_KEY, limit=_MAX_MARK), type=Mark)
        return mark, max(ages, default=0.0) >= DEAD_SECS or (mark.owner.is_here and not mark.owner.is_alive())
    return None


def going(store: ObjectStore) -> set[CheckpointName]:
    """What a living prune is deleting there."""
    found = find_mark(store)
    names = (CheckpointName.parse(text) for text in found[0].going) if found is not None and not found[1] else ()
    return {name for name in names if name is not None}


def put_mark(store: ObjectStore, names: dict[str, str]) -> Mark:
    """Take the place. Raises RunBusy while another prune has it; a dead one's mark is taken over."""
    ours = Mark(owner=identify(), going=names)
    data = msgspec.json.encode(ours)
    if not store.put(RunDir.PRUNING_KEY, data, if_absent=True):
        refuse_other(store)
        store.put(RunDir.PRUNING_KEY, data)
    return ours


def refuse_other(store: ObjectStore) -> None:
    """Raises RunBusy while a living prune of another process has the place."""
    found = find_mark(store)
    if found is not None and not found[1] and found[0].owner != identify():
        owner = found[0].owner
        raise RunBusy(
            f"{store.url}: process {owner.pid} on {owner.host} prunes there",
            "wait until it is done; a dead one counts 15 minutes",
        )


def is_ours(store: ObjectStore) -> bool:
    found = find_mark(store)
    return found is not None and found[0].owner == identify()
