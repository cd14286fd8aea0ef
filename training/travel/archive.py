"""Archive: fill the tiers. What goes where is decided and shown first; then each copy is pushed as to any store: files, proof,
manifest last. A checkpoint is read from here if it is here, else from another place, through a spool in the run directory."""

import time
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, field

import msgspec

from perdure.training import events
from perdure.training.checkpoint import catalog, facts, lineage, retention
from perdure.training.checkpoint.catalog import Listed
from perdure.training.checkpoint.pins import Pins
from perdure.training.checkpoint.run_info import read_run_info
from perdure.training.checkpoint.selection import selection
from perdure.training.checkpoint.thaws import Thaw
from perdure.training.checkpoint.upkeep import try_lock
from perdure.training.errors import (
    CheckpointDamaged,
    CheckpointNotFound,
    NeedsThaw,
    PerdureError,
    RunBusy,
    StoreConflict,
    StoreError,
)
from perdure.training.run_dir import CheckpointName, RunDir
from perdure.training.store_settings import NEED_THAW
from perdure.training.tier_settings import TierSection
from perdure.training.travel.contents import Contents, contents, list_remote, read_remote_fact
from perdure.training.travel.fence import check_same_run
from perdure.training.travel.pins import all_pins, push_pins
from perdure.training.travel.places import Remote, Tier
from perdure.training.travel.pull import pull
from perdure.training.travel.push import push
from perdure.training.travel.spool import clear, spooled
from perdure.training.travel.thaw import refresh

Progress = Callable[["Step", int, int], None]


@dataclass(frozen=True, kw_only=True)
class Step:
    """One copy that is to be made."""

    name: CheckpointName
    tier: str
    bytes: int
    reasons: tuple[str, ...]
    source: str
    """`local`, or the place it is read from."""


@dataclass(frozen=True, kw_only=True)
class Survey:
    steps: tuple[Step, ...]
    """Oldest first, a base before what needs it."""
    known: tuple[tuple[str, CheckpointName], ...]
    """Copies that a tier has and the run directory has no fact of."""
    unproven: tuple[CheckpointName, ...]
    """Not verified yet: they do not count."""
    problems: Mapping[str, str]
    """Place -> why it could not be looked at."""


@dataclass(kw_only=True)
class Done:
    copied: list[Step] = field(default_factory=list)
    skipped: dict[Step, PerdureError] = field(default_factory=dict)
    problems: dict[str, str] = field(default_factory=dict)
    """Tier -> why its part was cut short."""
    thawed: list[Thaw] = field(default_factory=list)
    """What was asked for and can be read now."""


def survey(run: RunDir, remotes: Sequence[Remote]) -> Survey:
    """What the tiers among `remotes` lack. Raises StoreConflict where a place holds another run."""
    there, problems = _look(run, remotes)
    here = catalog.list_checkpoints(run)
    listed = {one.name: one for one in here if one.trust in facts.GOOD}
    history = _history(run, there)
    for one in _elsewhere(run, [remote for remote in remotes if remote.word in there], there, listed, history):
        listed.setdefault(one.name, one)
    tiers = [remote for remote in remotes if isinstance(remote, Tier) and remote.word in there]
    said = {tier.word: {one.name: facts.read_fact(run, one.name, tier.word) for one in here} for tier in tiers}
    pinned = all_pins(run, listed.values(), [found.pins for found in there.values()])
    steps: list[Step] = []
    for tier in tiers:
        rotten = {name for name, fact in said[tier.word].items() if fact is not None and fact.result == "damaged"}
        held = set(there[tier.word].checkpoints) - rotten
        steps += plan(listed.values(), tier.word, tier.section, held, pinned, _only_there(run, tier, held, listed, history))
    return Survey(
        steps=tuple(sorted(steps, key=lambda step: (step.name, step.tier))),
        known=tuple(
            (word, name) for word, ours in said.items() for name in there[word].checkpoints if name in ours and not ours[name]
        ),
        unproven=tuple(one.name for one in here if one.in_lineage and one.trust == "written"),
        problems=problems,
    )


def plan(
    listed: Collection[Listed],
    word: str,
    section: TierSection,
    held: Collection[CheckpointName],
    pinned: Pins,
    only_there: Collection[Listed] = (),
) -> list[Step]:
    """The copies that the tier `word`, which has `held` (some of it nobody else), still lacks. What its retention would let go
    once it is there, or has let go already, is not copied."""
    by_name = {one.name: one for one in listed}
    chosen = selection(listed, section, pinned)
    among = [*only_there, *(one for one in listed if one.name in chosen or one.name in held)]
    stays = {one.name for one in retention.plan(among, section.retention, stored=False, pins=pinned).keep}
    return [
        Step(
            name=name,
            tier=word,
            bytes=manifest.stored_bytes,
            reasons=reasons,
            source=facts.LOCAL if by_name[name].is_here else by_name[name].places[0],
        )
        for name, reasons in chosen.items()
        if name in stays and name not in held and name in by_name and (manifest := by_name[name].manifest) is not None
    ]


def _only_there(
    run: RunDir,
    tier: Tier,
    held: Collection[CheckpointName],
    listed: Collection[CheckpointName],
    history: Collection[CheckpointName],
) -> list[Listed]:
    """What the tier has and is not listed yet, where it matters."""
    if tier.section.retention.keeps_all:
        return []
    names = sorted(name for name in held if name not in listed)
    return list_remote(tier.store, tier.word, names, history, read_run_info(run).id)


def _look(run: RunDir, remotes: Sequence[Remote]) -> tuple[dict[str, Contents], dict[str, str]]:
    """Of each place what it has, or why nobody knows."""
    there, problems, ours = {}, {}, read_run_info(run).id
    for remote in remotes:
        try:
            found = contents(remote.store)
        except StoreConflict:
            raise
        except StoreError as error:
            problems[remote.word] = str(error)
            continue
        if found.info is not None:
            check_same_run(remote.store, ours, found.info.id)
        there[remote.word] = found
    return there, problems


def _history(run: RunDir, there: Mapping[str, Contents]) -> set[CheckpointName]:
    """What of all that is here or at a place belongs to the present history."""
    launches = lineage.read_launches(run)
    for found in there.values():
        launches = {**found.launches, **launches}
    every = {name for found in there.values() for name in found.checkpoints} | set(lineage.committed(run))
    return set(lineage.follow(launches, list(every)))


def _elsewhere(
    run: RunDir,
    remotes: Sequence[Remote],
    there: Mapping[str, Contents],
    here: Collection[CheckpointName],
    history: Collection[CheckpointName],
) -> Iterator[Listed]:
    """What is good at another place only, and lacks in a tier. What has to be thawed first is not taken from there."""
    tiers = [set(there[remote.word].checkpoints) for remote in remotes if isinstance(remote, Tier)]
    if not tiers:
        return
    complete = set[CheckpointName].intersection(*tiers)
    for remote in remotes:
        if remote.section.storage_class not in NEED_THAW:
            names = [name for name in there[remote.word].checkpoints if name not in here and name not in complete]
            yield from list_remote(remote.store, remote.word, names, history, read_run_info(run).id)


def execute(run: RunDir, remotes: Sequence[Remote], found: Survey, progress: Progress | None = None) -> Done:
    """Make the copies. A tier that cannot be reached is left, the others are filled. Raises RunBusy when another archive of
    this run is under way, DiskFull."""
    with try_lock(run.archive_lock) as ours:
        if not ours:
            raise RunBusy(f"{run.root}: another archive of this run is under way", "wait until it is done")
        with spooled(run) as spool:
            return _Archive(run, remotes, found, spool, progress or (lambda _step, _done, _total: None)).go()


class _Archive:
    def __init__(self, run: RunDir, remotes: Sequence[Remote], found: Survey, spool: RunDir, progress: Progress) -> None:
        self.run, self.found, self.spool, self.progress = run, found, spool, progress
        self.remotes = {remote.word: remote for remote in remotes}
        self.done = Done(problems=dict(found.problems))

    def go(self) -> Done:
        for word, name in self.found.known:
            self.adopt(self.remotes[word], name)
        for remote in self.remotes.values():
            if isinstance(remote, Tier) and remote.word not in self.done.problems:
                self.push_pins(remote)
        for step in self.found.steps:
            if step.tier in self.done.problems:
                continue
            try:
                self.copy(step)
            except (CheckpointDamaged, CheckpointNotFound, NeedsThaw) as error:
                self.done.skipped[step] = error
            except StoreConflict:
                raise
            except StoreError as error:
                self.done.problems[step.tier] = str(error)
                told = {"name": str(step.name), "step": step.name.step, "place": step.tier, "retryable": error.retryable}
                events.record(self.run, "archive_failed", **told, error=str(error)[:1000])
        self.done.thawed = refresh(self.run, [remote.copies for remote in self.remotes.values()])
        return self.done

    def push_pins(self, tier: Tier) -> None:
        """Also where nothing is to be copied."""
        try:
            push_pins(self.run, tier.store)
        except StoreConflict:
            raise
        except StoreError as error:
            self.done.problems[tier.word] = str(error)

    def adopt(self, tier: Remote, name: CheckpointName) -> None:
        """Another machine archived it: the fact beside that copy is the checker's."""
        fact = read_remote_fact(tier.store, name)
        if fact is not None and self.run.manifest(name).exists():
            facts.write_fact(self.run, name, msgspec.structs.replace(fact, copy=tier.word, location=tier.store.url))

    def copy(self, step: Step) -> None:
        began = time.monotonic()
        tier, source = self.remotes[step.tier], self.run if step.source == facts.LOCAL else self.spooled(step)

        def progress(done: int, total: int) -> None:
            self.progress(step, done, total)

        push(source, tier.store, step.name, place=tier.word, progress=progress)
        self.done.copied.append(step)
        seconds = round(time.monotonic() - began, 3)
        told = {"name": str(step.name), "step": step.name.step, "place": tier.word, "url": tier.store.url}
        events.record(self.run, "archived", **told, bytes=step.bytes, seconds=seconds)

    def spooled(self, step: Step) -> RunDir:
        """The checkpoint, brought from another place; it stays for the next tier that wants it."""
        source = self.remotes[step.source]
        if not self.spool.manifest(step.name).exists():
            clear(self.run)
            pull(source.store, self.spool, name=step.name, place=source.word)
        return self.spool
