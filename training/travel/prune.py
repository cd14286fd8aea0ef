"""Prune of a place: which copies its own retention lets go, and what crashes left there. Only looked at here; sweep.py deletes.
What a copy is worth is judged by its place alone: by the manifests there, whatever lies in the run directory."""

import contextlib
import re
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace

from perdure.training.checkpoint.catalog import Listed, strays
from perdure.training.checkpoint.facts import Fact
from perdure.training.checkpoint.lineage import LaunchRecord, follow, read_launches
from perdure.training.checkpoint.manifest import Manifest
from perdure.training.checkpoint.retention import Plan, plan
from perdure.training.checkpoint.run_info import read_run_info
from perdure.training.checkpoint.shelf import CHECK_KEY
from perdure.training.errors import StoreConflict, StoreError
from perdure.training.retention_settings import RetentionSection
from perdure.training.run_dir import MANIFEST, CheckpointName, RunDir
from perdure.training.storage.parallel import in_order
from perdure.training.storage.store import ObjectInfo, ObjectStore
from perdure.training.travel.contents import WIDTH, Contents, contents, list_remote, read_remote_fact
from perdure.training.travel.fence import check_same_run
from perdure.training.travel.pins import all_pins
from perdure.training.travel.push import ABANDONED_SECS

ORPHAN_SECS = 86400.0
"""Age of the youngest of some files that no manifest names from which on they are nobody's: no push takes so long."""
_OURS = re.compile(r"rank-[0-9]{5,}(\.full)?\.(pack|index)|" + re.escape(CHECK_KEY))
Files = Mapping[str, ObjectInfo]
"""What lies in the folder of a checkpoint, without its manifest."""


@dataclass(frozen=True, kw_only=True)
class Leftover:
    """Files in the folder of a checkpoint that no manifest names."""

    name: CheckpointName
    files: tuple[str, ...]
    bytes: int
    goes: bool
    reason: str


@dataclass(frozen=True, kw_only=True)
class Survey:
    """What is at a place, and what may go from there."""

    plan: Plan
    leftovers: tuple[Leftover, ...]
    manifests: Mapping[CheckpointName, Manifest | None]
    """Of every committed one; None where it cannot be read."""
    files: Mapping[CheckpointName, tuple[str, ...]]
    """Of every committed one, what goes with it; the manifest is not among them."""
    uploads: int
    """Unfinished ones that nobody goes on with."""

    @property
    def freed(self) -> int:
        return self.plan.freed + sum(one.bytes for one in self.leftovers if one.goes)

    @property
    def empty(self) -> bool:
        return not self.plan.remove and not any(one.goes for one in self.leftovers) and not self.uploads


def survey(run: RunDir, store: ObjectStore, place: str, settings: RetentionSection) -> Survey:
    """Look, decide, delete nothing. Raises StoreError, StoreConflict where the place is another run's."""
    there, ours = contents(store), read_run_info(run)
    if there.info is not None:
        check_same_run(store, ours.id, there.info.id)
    launches = _launches(run, store, there)
    folders = folders_of(there.objects)
    listed = _listed(store, place, there.checkpoints, folders, launches, ours.id)
    tokens = {*range(1, max(launches, default=0) + 1), *(name.token for name in there.checkpoints)}
    pins = all_pins(run, listed, [there.pins])
    decided = plan(listed, settings, stored=False, pins=pins, history_known=tokens <= set(launches))
    manifests = {one.name: one.manifest for one in listed}
    return Survey(
        plan=decided,
        leftovers=tuple(_leftovers(folders, manifests, {one.name for one in decided.remove})),
        manifests=manifests,
        files={name: ours_among(folders.get(name, {})) for name in manifests},
        uploads=_abandoned(store),
    )


def _abandoned(store: ObjectStore) -> int:
    with contextlib.suppress(StoreError):  # a key that may not list them, or a server that cannot
        return sum(one.age_secs >= ABANDONED_SECS for one in store.list_uploads(RunDir.CHECKPOINTS_KEY))
    return 0


def _launches(run: RunDir, store: ObjectStore, there: Contents) -> dict[int, LaunchRecord]:
    """What the place knows and what we know: either may have gone on."""
    ours = read_launches(run)
    for token, record in there.launches.items():
        if token in ours and ours[token].owner != record.owner:
            raise StoreConflict(
                f"{store.url}: launch {token} is {record.host}'s there and {ours[token].host}'s here: two histories",
                "find out which one is to stay; prune from its run directory",
            )
    return {**there.launches, **ours}


def folders_of(objects: Iterable[ObjectInfo]) -> dict[CheckpointName, dict[str, ObjectInfo]]:
    """Checkpoint -> what lies in its folder, without its manifest."""
    found: dict[CheckpointName, dict[str, ObjectInfo]] = {}
    for item in objects:
        folder, _, file = item.key.removeprefix(RunDir.CHECKPOINTS_KEY).partition("/")
        name = CheckpointName.parse(folder)
        if name is not None and file != MANIFEST:
            found.setdefault(name, {})[file] = item
    return found


def ours_among(files: Iterable[str]) -> tuple[str, ...]:
    """What Perdure puts beside a manifest; anything else is left alone."""
    return tuple(sorted(file for file in files if _OURS.fullmatch(file)))


def _listed(
    store: ObjectStore,
    place: str,
    names: Sequence[CheckpointName],
    folders: Mapping[CheckpointName, Files],
    launches: dict[int, LaunchRecord],
    run_id: str,
) -> list[Listed]:
    history = set(follow(launches, list(names)))
    every = list_remote(store, place, names, history, run_id)

    def fact(name: CheckpointName) -> Fact | None:
        return read_remote_fact(store, name) if CHECK_KEY in folders.get(name, {}) else None

    known = in_order(fact, iter(names), width=WIDTH)
    return [_judged(one, folders.get(one.name, {}), said) for one, said in zip(every, known, strict=True)]


def _judged(one: Listed, files: Files, said: Fact | None) -> Listed:
    """What was found damaged, or is not whole, counts for nothing there."""
    size = sum(item.size for item in files.values())
    records = one.manifest.files if one.manifest is not None else ()
    whole = all(record.name in files and files[record.name].size == record.bytes for record in records)
    if one.manifest is None or not whole or (said is not None and said.result == "damaged"):
        return replace(one, trust="quarantined", places=(), bytes_on_disk=size)
    return replace(one, bytes_on_disk=size)


def _leftovers(
    folders: Mapping[CheckpointName, Files],
    manifests: Mapping[CheckpointName, Manifest | None],
    going: Collection[CheckpointName],
) -> Iterable[Leftover]:
    for name, files in sorted(folders.items()):
        if name in going:
            continue
        sizes = {file: item.size for file, item in files.items()}
        unnamed = strays(sizes, manifests[name]) if name in manifests else list(files)
        left = ours_among(unnamed)
        if left:
            goes = min(files[file].age_secs for file in left) >= ORPHAN_SECS
            kind = "no manifest names them" if name in manifests else "never committed"
            yield Leftover(
                name=name,
                files=left,
                bytes=sum(sizes[file] for file in left),
                goes=goes,
                reason=f"{kind}, older than a day" if goes else "perhaps still being pushed",
            )
