"""What the places of a run hold together: one history of all their launch records, and where each checkpoint can be read."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

from perdure.training.checkpoint import facts
from perdure.training.checkpoint.lineage import LaunchRecord, follow
from perdure.training.checkpoint.run_info import RunInfo
from perdure.training.errors import CheckpointNotFound, StoreConflict, StoreError
from perdure.training.run_dir import CheckpointName, RunDir
from perdure.training.travel.contents import Contents, contents, read_remote_fact
from perdure.training.travel.copies import Stored
from perdure.training.travel.fence import check_same_run

Report = Callable[[str], None]


@dataclass(kw_only=True)
class Sources:
    info: RunInfo
    launches: dict[int, LaunchRecord] = field(default_factory=dict)
    there: list[tuple[Stored, Contents]] = field(default_factory=list)
    """In the order in which they are read."""

    @property
    def committed(self) -> list[CheckpointName]:
        return sorted({name for _, found in self.there for name in found.checkpoints})

    @property
    def history(self) -> list[CheckpointName]:
        """The present one, newest first."""
        return follow(self.launches, self.committed)

    @property
    def unreadable(self) -> list[int]:
        """Tokens whose launch records are damaged."""
        return sorted({token for _, found in self.there for token in found.unreadable})

    def holding(self, name: CheckpointName) -> list[Stored]:
        return [place for place, found in self.there if name in found.checkpoints]

    def good(self, name: CheckpointName) -> list[Stored]:
        """Those of `holding` whose copy is not known to be damaged."""
        known = ((place, read_remote_fact(place.store, name)) for place in self.holding(name))
        return [place for place, fact in known if fact is None or fact.result == "good"]


def look(places: Sequence[Stored], report: Report, *, ours: str = "", called: str = "") -> Sources:
    """A tier that cannot be looked at is reported and left out; the store is not, for what it holds may be newer than all else.
    `ours`: the id that the run must have; `called`: its name.

    Raises CheckpointNotFound when no place has a run, StoreConflict when one has another, StoreError."""
    there = _reached(places, report)
    if not there:
        where = ", ".join(place.store.url for place in places)
        raise CheckpointNotFound(f"{where} holds no run (no {RunDir.RUN_KEY})", "check the URL; nothing was pushed there yet")
    _check_one_run(there, ours, called)
    found = Sources(info=there[0][1])
    kept = [
        place
        for place, _, held in sorted(there, key=lambda one: one[0].word != facts.STORE)
        if _adopt(found, place, held, report)
    ]
    found.there = [(place, held) for place, _, held in there if place in kept]
    return found


def _reached(places: Sequence[Stored], report: Report) -> list[tuple[Stored, RunInfo, Contents]]:
    there, failure = [], None
    for place in places:
        try:
            found = contents(place.store)
        except StoreError as error:
            if isinstance(error, StoreConflict) or place.word == facts.STORE or len(places) == 1:
                raise
            failure = failure or error
            report(f"the tier {place.word} is left out: {error}")
            continue
        if found.info is not None:
            there.append((place, found.info, found))
    if not there and failure is not None:
        raise failure
    return there


def _check_one_run(there: Sequence[tuple[Stored, RunInfo, Contents]], ours: str, called: str) -> None:
    for place, info, _ in there:
        check_same_run(place.store, ours or there[0][1].id, info.id)
        if called and info.name != called:
            raise StoreConflict(
                f"{place.store.url} holds run {info.id}, whose name is {info.name!r}, not {called!r}",
                "give this run a place of its own, or set run.name to go on with that one",
            )


def _adopt(sources: Sources, place: Stored, found: Contents, report: Report) -> bool:
    """False for a place whose launches contradict those of a place before it."""
    for token in found.unreadable:
        report(f"launch record {token} in {place.store.url} is damaged and was passed over")
    if any(sources.launches.get(token, record).owner != record.owner for token, record in found.launches.items()):
        report(f"{place.store.url} is left out: another machine's launches are recorded there")
        return False
    sources.launches |= found.launches
    return True
