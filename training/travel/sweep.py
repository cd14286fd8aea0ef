"""Delete at a place what its retention lets go: manifests first, a second look, then the rest. Killed anywhere, the next prune
finishes; a push or a pull at the same time loses nothing. docs/crash-safety.md has the order of calls and why."""

import contextlib
import time
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field

import msgspec

from perdure.training import events, files
from perdure.training.checkpoint import facts, manifest
from perdure.training.checkpoint.catalog import Listed
from perdure.training.checkpoint.facts import Fact
from perdure.training.checkpoint.hold import hold
from perdure.training.checkpoint.lineage import read_launches
from perdure.training.checkpoint.manifest import Manifest
from perdure.training.checkpoint.retention import Verdict
from perdure.training.checkpoint.run_info import read_run_info
from perdure.training.errors import CheckpointDamaged, CheckpointNotFound, StoreConflict, StoreError
from perdure.training.run_dir import MANIFEST, CheckpointName, RunDir
from perdure.training.storage.store import ObjectStore
from perdure.training.travel import mark
from perdure.training.travel.contents import committed_among, list_remote, read_remote_fact
from perdure.training.travel.fence import record_launch
from perdure.training.travel.pins import all_pins, remote_pins
from perdure.training.travel.prune import Files, Leftover, Survey, folders_of, ours_among
from perdure.training.travel.push import ABANDONED_SECS

_MOST, _MOST_FILES = 100, 20_000
"""Checkpoints and files that go under one mark, whose text is limited as well."""
_DELETE_BATCH = 1000


@dataclass
class Done:
    removed: list[Verdict] = field(default_factory=list)
    swept: list[Leftover] = field(default_factory=list)
    spared: dict[CheckpointName, str] = field(default_factory=dict)
    """What the plan let go and the second look did not, with why."""
    uploads: int = 0

    @property
    def freed(self) -> int:
        return sum(one.bytes for one in self.removed) + sum(one.bytes for one in self.swept)


@dataclass(frozen=True, kw_only=True)
class _Victim:
    name: CheckpointName
    files: tuple[str, ...]
    manifest: Manifest | None
    """By which it can be put back."""
    cause: Verdict | Leftover | None = None

    @property
    def is_whole(self) -> bool:
        """A checkpoint, or what was one; else only files that lie about."""
        return not isinstance(self.cause, Leftover)

    @property
    def text(self) -> str:
        return manifest.seal(self.manifest).decode() if self.manifest is not None else ""


def recover(run: RunDir, store: ObjectStore, place: str) -> None:
    """Finish what a killed prune of this place had begun; to be called before the survey that is executed. Raises RunBusy
    where another prune is at work there, StoreError."""
    mark.refuse_other(store)
    found = mark.find_mark(store)
    if found is not None:
        _Sweep(run, store, place).take_over(found[0])


def execute(run: RunDir, store: ObjectStore, place: str, found: Survey) -> Done:
    """Delete what `found` lets go. Raises RunBusy where another prune is at work there, StoreError: a key that may not delete
    is refused before anything is touched."""
    sweep = _Sweep(run, store, place)
    sweep.anchor, sweep.bases = found.plan.anchor, {name: base_of(one) for name, one in found.manifests.items()}
    return sweep.go(found)


class _Sweep:
    def __init__(self, run: RunDir, store: ObjectStore, place: str) -> None:
        self.run, self.store, self.place = run, store, place
        self.anchor: CheckpointName | None = None
        self.bases: dict[CheckpointName, CheckpointName | None] = {}
        """Of every checkpoint whose manifest was read."""
        self.began = 0.0
        self.done = Done()

    def go(self, found: Survey) -> Done:
        victims = list(_victims(found))
        if victims:
            self.store.delete([f"{RunDir.PRUNING_KEY}.none"])  # who may not delete is told so here
            self.put_launches()
        for batch in _batches(victims):
            self.batch(batch)
        for verdict in found.plan.keep:
            self.correct(verdict.name)
        if found.uploads:
            self.done.uploads = self.store.abort_uploads(RunDir.CHECKPOINTS_KEY, ABANDONED_SECS)
        return self.done

    def put_launches(self) -> None:
        """Whoever pulls from now on sees the history by which it was decided what goes."""
        for token, record in read_launches(self.run).items():
            if not record_launch(self.store, record):
                raise StoreConflict(f"{self.store.url}: launch {token} was taken by another machine meanwhile", "plan anew")

    def batch(self, victims: Sequence[_Victim]) -> None:
        self.began = time.monotonic()
        mark.put_mark(self.store, {str(victim.name): victim.text for victim in victims})
        try:
            self.delete(_key(victim.name, MANIFEST) for victim in victims if victim.is_whole)
        except StoreError:
            with contextlib.suppress(StoreError):  # else the next prune finds the mark, and decides anew
                self.put_back(victims)
                self.store.delete([RunDir.PRUNING_KEY])
            raise
        self.settle(victims)

    def take_over(self, dead: mark.Mark) -> None:
        objects = list(self.store.list(RunDir.CHECKPOINTS_KEY))
        there, folders = set(committed_among(objects)), folders_of(objects)
        names = (CheckpointName.parse(text) for text in dead.going)
        begun = [name for name in names if name is not None and name not in there]
        self.began = time.monotonic()
        mark.put_mark(self.store, {str(name): dead.going[str(name)] for name in begun})
        self.settle(
            [
                _Victim(name=name, files=ours_among(folders.get(name, {})), manifest=_parsed(dead.going[str(name)]))
                for name in begun
            ]
        )

    def settle(self, victims: Sequence[_Victim]) -> None:
        """The manifests are gone: what is still needed is put back, everything else deleted."""
        spared = self.second_look(victims)
        self.put_back([victim for victim in victims if victim.name in spared])
        going = [victim for victim in victims if victim.name not in spared]
        for victim in going:
            if victim.is_whole:
                self.record(victim.name)
        self.delete(_key(victim.name, file) for victim in going for file in victim.files)
        self.delete(_key(victim.name, MANIFEST) for victim in going if victim.is_whole or victim.name not in self.bases)
        self.store.delete([RunDir.PRUNING_KEY])
        self.done.spared |= spared
        for victim in going:
            self.tell(victim)

    def second_look(self, victims: Sequence[_Victim]) -> dict[CheckpointName, str]:
        """What came since the survey: increments of what goes, pins, manifests of what was lying about."""
        if not mark.is_ours(self.store):
            raise StoreError(f"{self.store.url}: another prune took this one for dead", hint="prune again")
        objects = list(self.store.list(RunDir.CHECKPOINTS_KEY))
        folders, whole = folders_of(objects), {victim.name for victim in victims if victim.is_whole}
        there = [name for name in committed_among(objects) if name not in whole]
        now = {one.name: one.manifest for one in self.read([name for name in there if name not in self.bases])}
        self.bases |= {name: base_of(found) for name, found in now.items()}
        needed = {base: name for name in there if (base := self.bases[name]) is not None}
        pins, spared = all_pins(self.run, (), [remote_pins(self.store)]), dict[CheckpointName, str]()
        for victim in victims:  # an increment comes before its base
            reason = pins.problem or _pinned(pins.names.get(victim.name, ())) or _needed(needed.get(victim.name))
            if self.anchor is not None and self.anchor not in there:
                reason = f"{self.anchor} is there no more: plan anew"
            if not victim.is_whole:
                reason = self.taken(victim)
            elif not _can_return(victim, folders.get(victim.name, {})):
                reason = ""
            if reason:
                spared[victim.name] = reason
                needed |= {base: victim.name for base in [base_of(victim.manifest)] if base is not None}
        return spared

    def read(self, names: Sequence[CheckpointName]) -> list[Listed]:
        return list_remote(self.store, self.place, names, names, read_run_info(self.run).id)

    def taken(self, victim: _Victim) -> str:
        """Files that lay about may have been named by a manifest since."""
        if self.store.size(_key(victim.name, MANIFEST)) is None:
            return ""
        found = self.read([victim.name])[0].manifest
        named = {record.name for record in found.files} if found is not None else set(victim.files)
        return "committed meanwhile" if named & set(victim.files) else ""

    def put_back(self, victims: Iterable[_Victim]) -> None:
        for victim in victims:
            if victim.is_whole and victim.text:
                self.store.put(_key(victim.name, MANIFEST), victim.text.encode(), if_absent=True)

    def delete(self, keys: Iterable[str]) -> None:
        every = list(keys)
        for some in (every[start : start + _DELETE_BATCH] for start in range(0, len(every), _DELETE_BATCH)):
            if time.monotonic() - self.began > mark.WORK_SECS:
                raise StoreError(f"{self.store.url}: deleting took too long; the next prune goes on", hint="prune again")
            self.store.delete(some)

    def record(self, name: CheckpointName) -> None:
        """So that nobody sends it again, and nobody counts on it."""
        with contextlib.suppress(CheckpointNotFound, CheckpointDamaged), hold(self.run.checkpoint(name)):
            fact = Fact(copy=self.place, checked_at=time.time(), result=facts.PRUNED, location=self.store.url)
            facts.write_fact(self.run, name, fact)

    def correct(self, name: CheckpointName) -> None:
        """It is there after all: another machine sent it again, or its deletion was undone."""
        if not facts.is_pruned(self.run, name, self.place):
            return
        found = read_remote_fact(self.store, name)
        with contextlib.suppress(CheckpointNotFound, CheckpointDamaged), hold(self.run.checkpoint(name)):
            if found is not None:
                facts.write_fact(self.run, name, msgspec.structs.replace(found, copy=self.place, location=self.store.url))
            else:
                files.remove(self.run.fact(name, self.place))

    def tell(self, victim: _Victim) -> None:
        cause, name = victim.cause, victim.name
        if isinstance(cause, Leftover):
            self.done.swept.append(cause)
        elif cause is not None:
            self.done.removed.append(cause)
            told = {"step": name.step, "name": str(name), "place": self.place, "bytes": cause.bytes}
            with contextlib.suppress(OSError):  # no room for a line: the deletion counts, not the log
                events.record(self.run, "copy_pruned", **told, reason=cause.reasons[0])


def _victims(found: Survey) -> Iterator[_Victim]:
    for one in found.leftovers:
        if one.goes:
            yield _Victim(name=one.name, files=one.files, manifest=None, cause=one)
    for verdict in found.plan.remove:
        name = verdict.name
        yield _Victim(name=name, files=found.files[name], manifest=found.manifests[name], cause=verdict)


def _batches(victims: Iterable[_Victim]) -> Iterator[list[_Victim]]:
    batch: list[_Victim] = []
    count = text = 0
    for victim in victims:
        size = len(victim.text.encode())
        if batch and (len(batch) == _MOST or count + len(victim.files) > _MOST_FILES or text + size > mark.MAX_TEXT):
            yield batch
            batch, count, text = [], 0, 0
        count, text = count + len(victim.files), text + size
        batch.append(victim)
    if batch:
        yield batch


def _key(name: CheckpointName, file: str) -> str:
    return RunDir.checkpoint_key(name, file)


def base_of(found: Manifest | None) -> CheckpointName | None:
    return found.base_name if found is not None else None


def _parsed(text: str) -> Manifest | None:
    try:
        return manifest.parse(text.encode(), "the mark of a prune")
    except CheckpointDamaged:
        return None


def _can_return(victim: _Victim, there: Files) -> bool:
    """Its manifest is known, and none of its files was deleted yet."""
    records = victim.manifest.files if victim.manifest is not None else ()
    return bool(records) and all(record.name in there and there[record.name].size == record.bytes for record in records)


def _pinned(labels: Sequence[str]) -> str:
    return f"milestone {', '.join(labels)}" if labels else ""


def _needed(name: CheckpointName | None) -> str:
    return f"base of {name}" if name is not None else ""
