"""Repair of one copy of a checkpoint from another: file by file where both say the same, whole where they do not.

The good copy is only read. A damaged file is replaced whole, by bytes proven beforehand; a fact says good only after the
repaired copy was read back."""

import contextlib
import time
from collections.abc import Iterator

import msgspec

from perdure.training import files
from perdure.training.checkpoint import facts, verify
from perdure.training.checkpoint.digest import Proof
from perdure.training.checkpoint.facts import Fact
from perdure.training.checkpoint.hold import hold
from perdure.training.checkpoint.manifest import Manifest
from perdure.training.checkpoint.shelf import CHECK_KEY
from perdure.training.checkpoint.upkeep import try_lock, try_upkeep
from perdure.training.errors import CheckpointDamaged, CheckpointNotFound, ObjectNotFound, StoreConflict, StoreError
from perdure.training.run_dir import MANIFEST, CheckpointName, RunDir
from perdure.training.storage.store import ObjectStore
from perdure.training.travel.copies import Local, State, Stored, entries_of
from perdure.training.travel.fetch import fetch
from perdure.training.travel.pull import pull
from perdure.training.travel.push import push
from perdure.training.travel.spool import spooled

_MOST, _LONGEST = 20, 300
"""Damages a fact tells, and characters of each."""


def mend_local(run: RunDir, place: Stored, name: CheckpointName, local: State, stored: State) -> str:
    """Bring what is damaged here back from another place. "" when the copy proved good afterwards, else why it is not."""
    with _ours(run) as ours:
        if not ours:
            return "other upkeep works on this run's checkpoints: left for the next scrub"
        try:
            if local.manifest and stored.manifest and local.manifest.digest == stored.manifest.digest:
                if common := sorted(set(local.bad) & set(stored.bad)):
                    return f"both copies of {', '.join(common)} are damaged"
                _fetch(run, place.store, local.manifest, local)
            elif stored.good:
                pull(place.store, run, name=name, place=place.word)
            else:
                return f"the copy in {place.word} is damaged too"
            fact = verify.check(run, name)
        except (CheckpointDamaged, CheckpointNotFound, ObjectNotFound) as error:
            return str(error)
    return "" if fact.result == "good" else "; ".join(fact.damage)


@contextlib.contextmanager
def _ours(run: RunDir) -> Iterator[bool]:
    """No prune and no roll-up replaces the checkpoint while we do."""
    with try_upkeep(run) as ours:
        yield ours


def _fetch(run: RunDir, store: ObjectStore, found: Manifest, local: State) -> None:
    """Indexes first: they say what the packs must hold."""
    for part in (1, 0):
        for rank in range(len(found.files) // 2):
            record = found.files[2 * rank + part]
            if record.name not in local.bad:
                continue
            path = run.checkpoint(found.name) / record.name
            proof = Proof(record, None if part else entries_of(Local(run), found, rank))
            with hold(path.parent):
                fetch(store, RunDir.checkpoint_key(found.name, record.name), path, proof)
                files.fsync_dir(path.parent)


def mend_stored(run: RunDir, place: Stored, name: CheckpointName, local: State, stored: State) -> str:
    """Push the good local copy again, which reads everything back. "" when that went well, else why not."""
    if stored.manifest and local.manifest and stored.manifest.base is None and local.manifest.base is not None:
        return f"{place.word} holds a rolled-up {name}, here it is still an increment: `perdure rollup {run.root}`, then push"
    return _pushed(run, place, name, stored)


def _pushed(run: RunDir, place: Stored, name: CheckpointName, stored: State) -> str:
    """Said first, for a push believes what an earlier one proved of files that cannot be read."""
    try:
        with hold(run.checkpoint(name)):
            facts.write_fact(run, name, _fact(place.word, told(stored), place.store.url))
        push(run, place.store, name, place=place.word)
    except (CheckpointDamaged, CheckpointNotFound, StoreConflict) as error:
        return str(error)
    return ""


def mend_through(run: RunDir, source: Stored, target: Stored, name: CheckpointName, stored: State, away: dict[str, str]) -> str:
    """Copy from one place to another what is not here. "" when that went well, else why not; `away` gets a source that cannot
    be read now."""
    with try_lock(run.archive_lock) as ours:
        if not ours:
            return "an archive of this run is under way: left for the next scrub"
        with spooled(run) as spool:
            try:
                pull(source.store, spool, name=name, place=source.word)
            except (CheckpointDamaged, CheckpointNotFound, StoreError) as error:
                if isinstance(error, StoreError) and error.retryable:
                    away[source.word] = str(error)
                return str(error)
            return _pushed(spool, target, name, stored)


def record_local(run: RunDir, name: CheckpointName, problems: list[str]) -> None:
    """What was found of the copy here, unless it was deleted meanwhile."""
    with contextlib.suppress(CheckpointNotFound, CheckpointDamaged), hold(run.checkpoint(name)):
        facts.write_fact(run, name, _fact("local", problems, str(name)))


def record_stored(run: RunDir, place: Stored, name: CheckpointName, problems: list[str], storage_class: str) -> None:
    """At its place for whoever has nothing else, and here where there is a copy too."""
    fact = _fact(place.word, problems, place.store.url, storage_class)
    place.store.put(RunDir.checkpoint_key(name, CHECK_KEY), msgspec.json.encode(fact))
    with contextlib.suppress(CheckpointNotFound, CheckpointDamaged), hold(run.checkpoint(name)):
        facts.write_fact(run, name, fact)
        if not place.exists(name):  # a prune of that place had the word, and nobody may count on that copy
            files.remove(run.fact(name, place.word))


def _fact(copy: str, problems: list[str], location: str, storage_class: str = "") -> Fact:
    told = tuple(problem[:_LONGEST] for problem in problems[:_MOST])
    result = "damaged" if problems else "good"
    return Fact(copy=copy, checked_at=time.time(), result=result, damage=told, location=location, storage_class=storage_class)


def told(state: State) -> list[str]:
    """What is wrong with a copy, the manifest first."""
    return [problem for file, problem in sorted(state.bad.items(), key=lambda item: (item[0] != MANIFEST, item[0]))]
