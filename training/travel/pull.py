"""Pull: bring a run back from nothing but the places of its copies: run.json, launch records, the newest good checkpoint.

run.json is written last, so a pull that dies leaves no run that looks as if it had never been saved."""

import logging
from collections.abc import Sequence
from typing import NamedTuple

import msgspec

from perdure.training import events, files
from perdure.training.checkpoint import facts
from perdure.training.checkpoint.lineage import create_launch, read_launches
from perdure.training.checkpoint.run_info import RunInfo, read_run_info, with_store
from perdure.training.errors import CheckpointDamaged, CheckpointNotFound, StoreConflict, StoreError
from perdure.training.run_dir import MANIFEST, CheckpointName, RunDir
from perdure.training.storage.store import ObjectStore, StoreSettings
from perdure.training.travel.copies import Stored
from perdure.training.travel.copy_in import CopyIn, PullProgress
from perdure.training.travel.pins import adopt_pins
from perdure.training.travel.sources import Sources, look

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
        self._deleted = False
        ours = read_run_info(self._run).id if self._run.run_json.exists() else ""
        found = look(self._places, self._report, ours=ours, called=self._called)
        candidates = found.history if name is None else [one for one in found.committed if one == name]
        if not candidates:
            self._nothing(found, name)
        copies = {place.word: CopyIn(place, self._run, found.info.id, self._progress) for place, _ in found.there}
        for candidate in candidates:
            place = self._bring(candidate, [(copies[place.word], place) for place in found.holding(candidate)])
            if place is not None:
                self._write_run(found)
                return Pulled(candidate, place)
            if self._deleted:
                return None
        tried = ", ".join(str(candidate) for candidate in candidates[:10])
        raise CheckpointDamaged(
            f"{self._where}: no checkpoint is good (tried {tried})",
            part="pack",
            hint="run `perdure push` where the run directory still exists",
        )

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

    def _nothing(self, found: Sources, name: CheckpointName | None) -> None:
        if name is not None:
            raise CheckpointNotFound(f"{self._where} holds no checkpoint {name}", "see `perdure ls`")
        if found.unreadable:
            raise CheckpointDamaged(f"{self._where}: launch records {found.unreadable[:10]} are damaged", part="launches")
        self._write_run(found)
        raise CheckpointNotFound(f"{self._where} holds run {found.info.id}, but no checkpoint of it yet")

    def _write_run(self, found: Sources) -> None:
        """Launch records and milestones, then run.json; from here on this is the run."""
        files.make_dirs(self._run.checkpoints)
        ours = read_launches(self._run)
        for token, record in found.launches.items():
            if token not in ours:
                create_launch(self._run, record)
            elif ours[token].owner != record.owner:
                raise StoreConflict(
                    f"{self._run.root}: launch {token} is {ours[token].host}'s here and {record.host}'s in {self._where}",
                    "pull into a new directory",
                )
        for _, there in found.there:
            pins, problem = there.pins
            adopt_pins(self._run, pins)
            if problem:
                self._report(f"{problem}; it was passed over")
        files.create_exclusively(self._run.run_json, msgspec.json.encode(self._as_reached(found.info)))

    def _as_reached(self, info: RunInfo) -> RunInfo:
        """run.json as found, but its copies go to the store that was named to us: nobody else gets our signed requests."""
        store = next((place.store for place in self._places if place.word == facts.STORE), None)
        whole = msgspec.structs.replace(info, in_parts=False)
        return with_store(whole, store.url, store.settings) if store else with_store(whole, "", StoreSettings())

    def _report(self, text: str) -> None:
        logger.warning("%s", text)
        files.make_dirs(self._run.root)
        events.record(self._run, "notice", text=text[:2000])
