"""Milestones: a checkpoint pinned under a name is never deleted. A small file in the run directory per name; the name is taken
once, and stays with its checkpoint through prune and roll-up until it is removed."""

import re
import time
from collections.abc import Mapping
from dataclasses import dataclass, field

import msgspec

from perdure.training import files
from perdure.training.checkpoint.hold import hold
from perdure.training.errors import CheckpointNotFound, ConfigError
from perdure.training.run_dir import CheckpointName, RunDir

MAX_PIN = 1 << 16
_LABEL = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]{0,99}")
_SUFFIX = ".json"


class Pin(msgspec.Struct, frozen=True, kw_only=True):
    checkpoint: str
    created: float


@dataclass(frozen=True, kw_only=True)
class Pins:
    names: Mapping[CheckpointName, tuple[str, ...]] = field(default_factory=dict)
    """Pinned checkpoint -> its milestones, sorted."""
    problem: str = ""
    """A pin that cannot be read: it may be of any checkpoint, so nothing may go."""


def pin(run: RunDir, label: str, name: CheckpointName) -> bool:
    """Pin a checkpoint; False when it was pinned under this name already. A deletion under way is waited for: afterwards it is
    pinned for good, or gone. Raises CheckpointNotFound, CheckpointDamaged, ConfigError (the name is no name, or is taken)."""
    path, new = run.pin(check_label(label)), Pin(checkpoint=str(name), created=time.time())
    with hold(run.checkpoint(name)):
        files.make_dirs(run.pins)
        if files.create_exclusively(path, msgspec.json.encode(new)):
            return True
    there = _read(run, label)
    if there == name:
        return False
    problem = f"{path}: {label} is pinned to {there or 'what cannot be read'} already"
    raise ConfigError(problem, "use another name, or `perdure pin --remove` it first")


def unpin(run: RunDir, label: str) -> None:
    """Raises CheckpointNotFound where there is no such milestone."""
    path = run.pin(check_label(label))
    if not path.exists():
        known = ", ".join(sorted(label for labels in read_pins(run).names.values() for label in labels))
        raise CheckpointNotFound(
            f"{run.root} has no milestone {label}", f"it has: {', '.join(known)}" if known else "it has none"
        )
    files.remove(path)


def check_label(label: str) -> str:
    """Raises ConfigError where it cannot be a milestone's name."""
    if not _LABEL.fullmatch(label):
        raise ConfigError(f"milestone {label!r:.120} is not a plain name", "use letters, digits, dot, dash; at most 100")
    return label


def read_pins(run: RunDir) -> Pins:
    """All milestones. One that is being removed while we look counts or not."""
    found: dict[CheckpointName, tuple[str, ...]] = {}
    problem = ""
    paths = sorted(run.pins.iterdir()) if run.pins.is_dir() else []
    for path in paths:
        label = path.name.removesuffix(_SUFFIX)
        if path.name == label or not _LABEL.fullmatch(label):
            continue
        name = _read(run, label)
        if name is not None:
            found[name] = (*found.get(name, ()), label)
        elif path.exists():
            problem = f"{path} cannot be read: which checkpoint it pins is not known"
    return Pins(names=found, problem=problem)


def _read(run: RunDir, label: str) -> CheckpointName | None:
    try:
        return CheckpointName.parse(msgspec.json.decode(files.read_limited(run.pin(label), MAX_PIN), type=Pin).checkpoint)
    except (OSError, ValueError, RecursionError):
        return None
