"""Pull: bring a run back from nothing but the places of its copies: run.json, launch records, the newest good checkpoint.

run.json is written last, so a pull that dies leaves no run that looks as if it had never been saved."""

import logging
from collections.abc import Sequence
from typing import NamedTuple

import msgspec

from perdure.training import events, files
from perdure.training.checkpoint import facts
from perdure.training.checkpoint.lineage import LaunchRecord, create_launch, follow, read_launches
from perdure.training.checkpoint.run_info import RunInfo, read_run_info
from perdure.training.errors import CheckpointDamaged, CheckpointNotFound, StoreConflict, StoreError
from perdure.training.run_dir import MANIFEST, CheckpointName, RunDir
from perdure.training.storage.store import ObjectStore
from perdure.training.travel.contents import Contents, contents
from perdure.training.travel.copies import Stored
from perdure.training.travel.copy_in import CopyIn, PullProgress
from perdure.training.travel.fence import check_same_run

logger = logging.getLogger(__name__)
_LOOKS = 10
"""How often a pull looks anew because what it was fetching was deleted by a prune; each time something newer is there."""


class Pulled(NamedTuple):
    name: CheckpointName
    place: Stored
    """Where it was read."""


def pull(
    store: ObjectStore,
    run: RunDir,
    *,
    name: CheckpointName | None = None,
    place: str = facts.STORE,
    progress: PullProgress | None = None,
) -> CheckpointName:
    """As `pull_from`, of one place; `place` is what the store is to the run, `store` or the name of a tier."""
    return pull_from([Stored(store, place)], run, name=name, progress=progress).name


def pull_from(
    places: Sequence[Stored],
    run: RunDir,
    *,
    name: CheckpointName | None = None,
    called: str = "",
    progress: PullProgress | None = None,
) -> Pulled:
    """Bring `name`, or the newest good checkpoint of the lineage, into `run`; each is read at the first of `places` that has a
    good copy. Damaged ones are reported and the one before is used. `called`: the run must have this name.

    A tier that cannot be looked at is reported and left out; the store is not, for what it holds may be newer than all else.
    Raises CheckpointNotFound when no place has a run, or the run no checkpoint yet (run.json and launch records are then in
    place), CheckpointDamaged when none is good, NeedsThaw when the one that is wanted lies frozen wherever it is, StoreConflict
    when `run` is another run, DiskFull before anything is fetched, StoreError."""
    return _Pull(places, run, called, progress).run(name)


class _Pull:
    def __init__(self, places: Sequence[Stored], run: RunDir, called: str, progress: PullProgress | None) -> None:
        self._places, self._run, self._called, self._progress = places, run, called, progress
        self._launches: dict[int, LaunchRecord] = {}
        self._there: list[tuple[Stored, Contents]] = []
        self._deleted = False
        """Something was, while we were fetching it."""
        self._where = ", ".join(place.store.url for place in places)

    def run(self, name: CheckpointName | None) -> Pulled:
        for _ in range(_LOOKS):
            found = self._newest_good(name)
            if found is not None:
                return found
        raise StoreError(f"{self._where}: what was being fetched was deleted, {_LOOKS} times", hint="pull again")

    def _newest_good(self, name: CheckpointName | None) -> Pulled | None:
        """None where one was deleted meanwhile: then the older ones may be gone as well, and newer ones there."""
        self._launches, self._there, self._deleted = {}, [], False
        info = self._look()
        by_weight = sorted(self._there, key=lambda one: one[0].word != facts.STORE)
        kept = [one for one in by_weight if self._adopt_launches(*one)]
        self._there = [one for one in self._there if one in kept]
        committed = sorted({found for _, there in self._there for found in there.checkpoints})
        candidates = follow(self._launches, committed) if name is None else [one for one in committed if one == name]
        if not candidates:
            self._nothing(info, name)
        from_places = [(there, CopyIn(place, self._run, info.id, self._progress), place) for place, there in self._there]
        for candidate in candidates:
            place = self._bring(
                candidate, [(copy, where) for there, copy, where in from_places if candidate in there.checkpoints]
            )
            if place is not None:
                self._write_run(info)
                return Pulled(candidate, place)
            if self._deleted:
                return None
        tried = ", ".join(str(candidate) for candidate in candidates[:10])
        raise CheckpointDamaged(
            f"{self._where}: no checkpoint is good (tried {tried})",
            part="pack",
            hint="run `perdure push` where the run directory still exists",
        )

    def _look(self) -> RunInfo:
        """What each place holds; all of them the same run."""
        failure: StoreError | None = None
        for place in self._places:
            try:
                found = contents(place.store)
            except StoreError as error:
                if isinstance(error, StoreConflict) or place.word == facts.STORE or len(self._places) == 1:
                    raise
                failure = failure or error
                self._report(f"the tier {place.word} is left out: {error}")
                continue
            if found.info is not None:
                self._there.append((place, found))
        if not self._there and failure is not None:
            raise failure
        if not self._there:
            raise CheckpointNotFound(
                f"{self._where} holds no run (no {RunDir.RUN_KEY})", "check the URL; nothing was pushed there yet"
            )
        infos = [(place, found.info) for place, found in self._there if found.info is not None]
        ours = read_run_info(self._run).id if self._run.run_json.exists() else infos[0][1].id
        for place, info in infos:
            check_same_run(place.store, ours, info.id)
            if self._called and info.name != self._called:
                raise StoreConflict(
                    f"{place.store.url} holds run {info.id}, whose name is {info.name!r}, not {self._called!r}",
                    "give this run a place of its own, or set run.name to go on with that one",
                )
        return infos[0][1]

    def _adopt_launches(self, place: Stored, found: Contents) -> bool:
        """False for a place whose launches contradict those of a place before it."""
        for token in found.unreadable:
            self._report(f"launch record {token} in {place.store.url} is damaged and was passed over")
        if any(self._launches.get(token, record).owner != record.owner for token, record in found.launches.items()):
            self._report(f"{place.store.url} is left out: another machine's launches are recorded there")
            return False
        self._launches |= found.launches
        return True

    def _bring(self, name: CheckpointName, copies: Sequence[tuple[CopyIn, Stored]]) -> Stored | None:
        """Where it was good; None where all copies are damaged. One that cannot be read now is no damage."""
        failure: StoreError | None = None
        for number, (copy, place) in enumerate(copies, start=1):
            try:
                problem = copy.bring(name)
            except StoreConflict:
                raise
            except StoreError as error:
                failure = failure or error
                continue
            if not problem:
                return place
            if place.store.size(RunDir.checkpoint_key(name, MANIFEST)) is None:
                self._deleted = True
                self._report(f"checkpoint {name} was deleted from {place.store.url} meanwhile; looking anew")
                continue
            following = "another copy" if number < len(copies) else "the one before it"
            self._report(f"checkpoint {name} in {place.store.url} is damaged: {problem}; using {following}")
        if failure is not None:
            raise failure
        return None

    def _nothing(self, info: RunInfo, name: CheckpointName | None) -> None:
        if name is not None:
            raise CheckpointNotFound(f"{self._where} holds no checkpoint {name}", "see `perdure ls`")
        unreadable = sorted({token for _, found in self._there for token in found.unreadable})
        if unreadable:
            raise CheckpointDamaged(f"{self._where}: launch records {unreadable[:10]} are damaged", part="launches")
        self._write_run(info)
        raise CheckpointNotFound(f"{self._where} holds run {info.id}, but no checkpoint of it yet")

    def _write_run(self, info: RunInfo) -> None:
        """Launch records, then run.json; from here on this is the run."""
        files.make_dirs(self._run.checkpoints)
        ours = read_launches(self._run)
        for token, record in self._launches.items():
            if token not in ours:
                create_launch(self._run, record)
            elif ours[token].owner != record.owner:
                raise StoreConflict(
                    f"{self._run.root}: launch {token} is {ours[token].host}'s here and {record.host}'s in {self._where}",
                    "pull into a new directory",
                )
        files.create_exclusively(self._run.run_json, msgspec.json.encode(info))

    def _report(self, text: str) -> None:
        logger.warning("%s", text)
        files.make_dirs(self._run.root)
        events.record(self._run, "notice", text=text[:2000])
