"""The catalog of a run: its checkpoints with what is known of each, the candidates for a resume, and the leftovers."""

import contextlib
import os
import re
from collections.abc import Collection, Mapping
from dataclasses import dataclass
from pathlib import Path

from perdure.training import files
from perdure.training.checkpoint import facts, manifest
from perdure.training.checkpoint.lineage import follow, lineage, read_launches
from perdure.training.checkpoint.manifest import Manifest
from perdure.training.checkpoint.parted import holds_parts
from perdure.training.errors import CheckpointDamaged, CheckpointNotFound
from perdure.training.run_dir import MANIFEST, REPLACED_MANIFEST, CheckpointName, RunDir

_OF_A_RANK = re.compile(r"rank-[0-9]{5,}(\.full)?\.(pack|index)|" + re.escape(REPLACED_MANIFEST))


@dataclass(frozen=True, kw_only=True)
class Listed:
    name: CheckpointName
    in_lineage: bool
    trust: str
    manifest: Manifest | None
    problem: str
    """Why there is no manifest."""
    bytes_on_disk: int
    base: CheckpointName | None = None
    """The full it needs, when it is an increment."""
    places: tuple[str, ...] = ()
    """Where a good copy of it is: local, store, and the names of tiers."""
    pruned: tuple[str, ...] = ()
    """Places whose retention let their copy go."""
    cold: tuple[str, ...] = ()
    """Those of `places` where it has to be thawed before it is read."""
    is_here: bool = True
    """All of it is in the run directory; else only at `places`."""

    @property
    def in_store(self) -> bool:
        return self.trust == "replicated" or (self.trust == "archived" and facts.STORE in self.places)

    @property
    def was_in_store(self) -> bool:
        """It is there, or the store's own retention let it go."""
        return self.in_store or (self.trust in facts.GOOD and facts.STORE in self.pruned)


@dataclass(frozen=True)
class Catalog:
    listed: tuple[Listed, ...]
    """Every committed checkpoint by step and token."""
    leftovers: tuple[Path, ...]


def read_catalog(run: RunDir) -> Catalog:
    """All that is known of a run's checkpoints, from one look at each folder and file."""
    found = _look(run.checkpoints)
    launches = read_launches(run)
    names = {name: path for path, sizes in found.items() if MANIFEST in sizes and (name := CheckpointName.parse(path.name))}
    ours = set(follow(launches, list(names)))
    listed = {name: _describe(run, name, name in ours, found[path]) for name, path in sorted(names.items())}
    left = [path for path in found if CheckpointName.parse(path.name) not in ours]
    for name in ours:
        left += [names[name] / file for file in strays(found[names[name]], listed[name].manifest)]
    left += [path for place in (run.launches, run.pins) for path in _children(place) if files.is_temporary(path.name)]
    return Catalog(tuple(listed.values()), tuple(sorted(left)))


def _look(checkpoints: Path) -> dict[Path, dict[str, int]]:
    """What is in each folder, in the order of `lineage.committed`: a newer one is not missed where an older one goes for it."""
    while True:
        found = {path: sizes_in(path) for path in sorted(_children(checkpoints))}
        if set(_children(checkpoints)) <= set(found):
            return found


def list_checkpoints(run: RunDir) -> list[Listed]:
    """Every committed checkpoint by step and token."""
    return list(read_catalog(run).listed)


def leftovers(run: RunDir) -> list[Path]:
    """What a crash left: temporary files, folders without a manifest, checkpoints outside the lineage, packs no manifest
    names."""
    return list(read_catalog(run).leftovers)


def _describe(run: RunDir, name: CheckpointName, in_lineage: bool, sizes: Mapping[str, int]) -> Listed:
    found, problem = None, ""
    try:
        found = manifest_of(run, name)
    except (CheckpointDamaged, CheckpointNotFound) as error:
        problem = str(error)
    known = facts.read_facts(run, name, sizes)
    return Listed(
        name=name,
        in_lineage=in_lineage,
        trust=facts.trust_of(known),
        manifest=found,
        problem=problem,
        bytes_on_disk=sum(sizes.values()),
        base=found.base_name if found else None,
        places=facts.places_of(known),
        pruned=tuple(place for place, fact in known.items() if fact.result == facts.PRUNED),
        cold=tuple(place for place in facts.places_of(known) if known[place].storage_class),
        is_here=found is None or all(sizes.get(one.name) == one.bytes for one in found.files) or not holds_parts(run),
    )


def strays(sizes: Mapping[str, int], found: Manifest | None) -> list[str]:
    """Temporary files, and what a roll-up has not removed yet; under a manifest nobody can read nothing is one."""
    named = {record.name for record in found.files} if found else set(sizes)
    return [
        file for file in sizes if files.is_temporary(file) or (_OF_A_RANK.fullmatch(file) is not None and file not in named)
    ]


def sizes_in(folder: Path) -> dict[str, int]:
    """Bytes of each file in a folder; nothing when it is none, or is being removed while we look."""
    sizes = {}
    with contextlib.suppress(FileNotFoundError, NotADirectoryError), os.scandir(folder) as children:
        for child in children:
            with contextlib.suppress(FileNotFoundError):  # a checker's temporary file, renamed while we look
                sizes[child.name] = child.stat(follow_symlinks=False).st_size
    return sizes


def _children(folder: Path) -> list[Path]:
    """What is in a folder; nothing when there is none."""
    try:
        return list(folder.iterdir())
    except (FileNotFoundError, NotADirectoryError):
        return []


def manifest_of(run: RunDir, name: CheckpointName) -> Manifest:
    return manifest.read(run.checkpoint(name))


def has_checkpoints(run: RunDir) -> bool:
    """Whether anything was ever committed in this history, good or not."""
    return bool(lineage(run))


def candidates(run: RunDir) -> list[CheckpointName]:
    """What a resume may use, newest first; each is verified before use."""
    return [name for name in lineage(run) if facts.trust(run, name) != "quarantined"]


def newest_with(run: RunDir, trusts: Collection[str]) -> CheckpointName | None:
    return next((name for name in lineage(run) if facts.trust(run, name) in trusts), None)


def newest_in(run: RunDir, place: str) -> CheckpointName | None:
    """The newest one here of which that place has a good copy."""
    return next((name for name in lineage(run) if facts.is_in(run, name, place)), None)
