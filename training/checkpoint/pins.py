"""Milestones: a checkpoint with a name is never deleted. The training code names one in its manifest (`session.save(name)`), a
person in a small file; that file may also say that a name was taken away. Of manifests only those of the present history count:
a step that is trained again takes its name along."""

import time
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field

import msgspec

from perdure.training import files
from perdure.training.checkpoint.catalog import Listed, list_checkpoints
from perdure.training.checkpoint.hold import hold
from perdure.training.errors import CheckpointNotFound, ConfigError
from perdure.training.run_dir import CheckpointName, RunDir, is_label

MAX_PIN = 1 << 16
_SUFFIX = ".json"


class Pin(msgspec.Struct, frozen=True, kw_only=True):
    checkpoint: str
    """Empty: nobody gives the name to one now."""
    created: float
    """Unix seconds; of two places the later one counts."""
    taken: str = ""
    """From the manifests up to this checkpoint, in step and in launch, the name was taken away."""


ByHand = tuple[dict[str, Pin], str]
"""Name -> the word about it, names taken away included; and what is wrong with one that cannot be read."""


@dataclass(frozen=True, kw_only=True)
class Pins:
    names: Mapping[CheckpointName, tuple[str, ...]] = field(default_factory=dict)
    """Pinned checkpoint -> its milestones, sorted."""
    problem: str = ""
    """A pin that cannot be read: it may be of any checkpoint, so nothing may go."""


def pin(run: RunDir, label: str, name: CheckpointName) -> bool:
    """Pin a checkpoint; False when it was pinned under this name already. A deletion under way is waited for: afterwards it is
    pinned for good, or gone. Raises CheckpointNotFound, CheckpointDamaged, ConfigError (the name is no name, or is taken)."""
    path = run.pin(check_label(label))
    with hold(run.checkpoint(name)):
        there = _holders(label, read_pins(run, list_checkpoints(run)))
        if not there and _write(run, label, name):
            return True
    if there == [name]:
        return False
    problem = f"{path}: {label} is pinned to {there[-1] if there else 'what cannot be read'} already"
    raise ConfigError(problem, "use another name, or `perdure pin --remove` it first")


def _write(run: RunDir, label: str, name: CheckpointName) -> bool:
    files.make_dirs(run.pins)
    there = read_pin(run, label)
    new = Pin(checkpoint=str(name), created=time.time(), taken=there.taken if there else "")
    if there is not None and not there.checkpoint:
        files.write_atomically(run.pin(label), msgspec.json.encode(new))
        return True
    return files.create_exclusively(run.pin(label), msgspec.json.encode(new))


def unpin(run: RunDir, label: str) -> None:
    """Take the name away, whoever gave it. Raises CheckpointNotFound where there is no such milestone."""
    path, pins = run.pin(check_label(label)), read_pins(run, list_checkpoints(run))
    there, pinned = _holders(label, pins), read_pin(run, label)
    if not there and not (pinned is None and path.exists()):
        known = ", ".join(sorted({label for labels in pins.names.values() for label in labels}))
        raise CheckpointNotFound(f"{run.root} has no milestone {label}", f"it has: {known}" if known else "it has none")
    before = CheckpointName.parse(pinned.taken) if pinned is not None else None
    losing = [*there, *([before] if before else [])]
    newest = CheckpointName(max((one.step for one in losing), default=0), max((one.token for one in losing), default=0))
    files.make_dirs(run.pins)
    files.write_atomically(path, msgspec.json.encode(Pin(checkpoint="", created=time.time(), taken=str(newest))))


def _holders(label: str, pins: Pins) -> list[CheckpointName]:
    return sorted(name for name, labels in pins.names.items() if label in labels)


def check_label(label: str) -> str:
    """Raises ConfigError where it cannot be a milestone's name."""
    if not is_label(label):
        raise ConfigError(f"milestone {label!r:.120} is not a plain name", "use letters, digits, dot, dash; at most 100")
    return label


def read_pins(run: RunDir, listed: Iterable[Listed]) -> Pins:
    """All milestones of the checkpoints `listed`, and those given by hand. One removed meanwhile counts or not."""
    known, problem = pins_by_hand(run)
    return Pins(names=milestones(known, listed), problem=problem)


def milestones(by_hand: Mapping[str, Pin], listed: Iterable[Listed]) -> dict[CheckpointName, tuple[str, ...]]:
    """Checkpoint -> its names, of any place."""
    found: dict[CheckpointName, set[str]] = {}
    for label, one in by_hand.items():
        name = CheckpointName.parse(one.checkpoint)
        if name is not None:
            found.setdefault(name, set()).add(label)
    for each in listed:
        given = each.manifest.milestone if each.manifest is not None and each.in_lineage else msgspec.UNSET
        if given is not msgspec.UNSET and not _taken_away(by_hand.get(given), each.name):
            found.setdefault(each.name, set()).add(given)
    return {name: tuple(sorted(labels)) for name, labels in found.items()}


def _taken_away(pin: Pin | None, name: CheckpointName) -> bool:
    until = CheckpointName.parse(pin.taken) if pin is not None else None
    return until is not None and name.step <= until.step and name.token <= until.token


def pins_by_hand(run: RunDir) -> ByHand:
    found, problem = {}, ""
    for path in sorted(run.pins.iterdir()) if run.pins.is_dir() else ():
        label = path.name.removesuffix(_SUFFIX)
        if path.name == label or not is_label(label):
            continue
        one = read_pin(run, label)
        if one is not None:
            found[label] = one
        elif path.exists():
            problem = f"{path} cannot be read: which checkpoint it pins is not known"
    return found, problem


def read_pin(run: RunDir, label: str) -> Pin | None:
    try:
        return parse_pin(files.read_limited(run.pin(label), MAX_PIN))
    except (OSError, ValueError):
        return None


def parse_pin(data: bytes) -> Pin:
    """From anywhere. Raises ValueError."""
    try:
        pin = msgspec.json.decode(data, type=Pin)
    except RecursionError as error:
        raise ValueError(str(error)) from None
    for name in (pin.checkpoint, pin.taken):
        if name and CheckpointName.parse(name) is None:
            raise ValueError(f"{name!r:.80} is no checkpoint's name")
    return pin
