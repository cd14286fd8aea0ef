"""The catalog of a run: its checkpoints with what is known of each, the candidates for a resume, and the leftovers."""

import contextlib
from collections.abc import Collection
from dataclasses import dataclass
from pathlib import Path

from perdure.training import files
from perdure.training.checkpoint import facts, manifest
from perdure.training.checkpoint.lineage import committed, lineage
from perdure.training.checkpoint.manifest import Manifest
from perdure.training.errors import CheckpointDamaged, CheckpointNotFound
from perdure.training.run_dir import CheckpointName, RunDir


@dataclass(frozen=True, kw_only=True)
class Listed:
    name: CheckpointName
    in_lineage: bool
    trust: str
    manifest: Manifest | None
    problem: str
    """Why there is no manifest."""
    bytes_on_disk: int


def list_checkpoints(run: RunDir) -> list[Listed]:
    """Every committed checkpoint by step and token."""
    ours = set(lineage(run))
    return [_describe(run, name, name in ours) for name in committed(run)]


def _describe(run: RunDir, name: CheckpointName, in_lineage: bool) -> Listed:
    found, problem = None, ""
    try:
        found = manifest_of(run, name)
    except (CheckpointDamaged, CheckpointNotFound) as error:
        problem = str(error)
    return Listed(
        name=name,
        in_lineage=in_lineage,
        trust=facts.trust(run, name),
        manifest=found,
        problem=problem,
        bytes_on_disk=_bytes_in(run.checkpoint(name)),
    )


def _bytes_in(folder: Path) -> int:
    total = 0
    for path in _children(folder):
        with contextlib.suppress(FileNotFoundError):  # a checker's temporary file, renamed while we look
            total += path.lstat().st_size
    return total


def _children(folder: Path) -> list[Path]:
    """What is in a folder; nothing when there is none, or it is being removed while we look."""
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


def leftovers(run: RunDir) -> list[Path]:
    """What a crash left: temporary files, folders without a manifest, checkpoints outside the lineage."""
    ours = set(lineage(run))
    found = []
    for folder in _children(run.checkpoints):
        name = CheckpointName.parse(folder.name)
        if name not in ours or not run.manifest(name).exists():
            found.append(folder)
        else:
            found += [path for path in _children(folder) if files.is_temporary(path.name)]
    found += [path for path in _children(run.launches) if files.is_temporary(path.name)]
    return sorted(found)
