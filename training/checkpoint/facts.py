"""Facts of the checker beside each copy of a checkpoint; trust is derived from them and never stored."""

import os
from collections.abc import Iterable, Mapping

import msgspec

from perdure.training import files
from perdure.training.run_dir import CheckpointName, RunDir

MAX_FACT = 1 << 20
LOCAL, STORE = "local", "store"
PRUNED = "pruned"
GOOD = ("verified", "replicated", "archived")
"""Words of trust of what may be resumed from without looking."""


class Fact(msgspec.Struct, frozen=True, kw_only=True):
    """What the checker found, once, about one copy."""

    copy: str
    """local, store, or the name of a tier."""
    checked_at: float
    result: str
    """good, damaged, or pruned: the retention of that place let it go."""
    damage: tuple[str, ...] = ()
    location: str = ""
    storage_class: str = ""
    """Where it was moved once it was proven; it has to be thawed before it is read again. Empty: it can be read."""


def read_fact(run: RunDir, name: CheckpointName, copy: str) -> Fact | None:
    """None also for a fact about the store that was the run's before this one."""
    try:
        fact = msgspec.json.decode(files.read_limited(run.fact(name, copy), MAX_FACT), type=Fact)
    except (OSError, ValueError, RecursionError):
        return None
    return None if copy == STORE and run.store and fact.location != run.store else fact


def write_fact(run: RunDir, name: CheckpointName, fact: Fact) -> None:
    files.write_atomically(run.fact(name, fact.copy), msgspec.json.encode(fact))


def read_facts(run: RunDir, name: CheckpointName, among: Iterable[str]) -> dict[str, Fact]:
    """Place -> its fact. `among`: names of the files in the checkpoint's folder."""
    places = sorted(place for file in among if (place := RunDir.place_of_fact(file)))
    found = ((place, read_fact(run, name, place)) for place in places)
    return {place: fact for place, fact in found if fact is not None}


def trust(run: RunDir, name: CheckpointName) -> str:
    """written, verified, replicated, archived or quarantined."""
    try:
        return trust_of(read_facts(run, name, os.listdir(run.checkpoint(name))))
    except (FileNotFoundError, NotADirectoryError):
        return "written"


def trust_of(known: Mapping[str, Fact]) -> str:
    """archived: a tier has a good copy of what is verified here or in the store."""
    local = known.get(LOCAL)
    if local is not None and local.result == "damaged":
        return "quarantined"
    good = places_of(known)
    if LOCAL not in good and STORE not in good:
        return "written"
    if any(place not in (LOCAL, STORE) for place in good):
        return "archived"
    return "replicated" if STORE in good else "verified"


def places_of(known: Mapping[str, Fact]) -> tuple[str, ...]:
    """Where a good copy is."""
    return tuple(place for place, fact in known.items() if fact.result == "good")


def is_pruned(run: RunDir, name: CheckpointName, place: str) -> bool:
    """It was there, and the retention of that place let it go: it is not to be sent again."""
    fact = read_fact(run, name, place)
    return fact is not None and fact.result == PRUNED


def is_in(run: RunDir, name: CheckpointName, place: str) -> bool:
    """Its copy there was read back and is good."""
    fact = read_fact(run, name, place)
    return fact is not None and fact.result == "good"
