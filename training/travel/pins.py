"""Milestones given by hand travel as small objects: up before the checkpoints of a push, down with those of a pull. Of two
places the later word about a name counts."""

from collections.abc import Iterable, Mapping

import msgspec

from perdure.training import files
from perdure.training.checkpoint.catalog import Listed
from perdure.training.checkpoint.pins import MAX_PIN, ByHand, Pin, Pins, milestones, parse_pin, pins_by_hand, read_pin
from perdure.training.errors import ObjectNotFound, ObjectTooLarge, StoreConflict
from perdure.training.run_dir import RunDir, is_label
from perdure.training.storage.parallel import in_order
from perdure.training.storage.store import ObjectStore
from perdure.training.travel.fence import claim_run

MAX_PINS = 100_000
WIDTH = 4


def remote_pins(store: ObjectStore) -> ByHand:
    """What a place holds."""
    stems = (item.key.removeprefix(RunDir.PINS_KEY).removesuffix(".json") for item in store.list(RunDir.PINS_KEY))
    labels = sorted({stem for stem in stems if is_label(stem)})
    if len(labels) > MAX_PINS:
        raise StoreConflict(f"{store.url} holds {len(labels)} milestones: that is no run of ours", "correct store.url")
    found = dict(zip(labels, in_order(lambda label: _read(store, label), iter(labels), width=WIDTH), strict=True))
    problems = [one for one in found.values() if isinstance(one, str)]
    return {label: one for label, one in found.items() if isinstance(one, Pin)}, next(filter(None, problems), "")


def _read(store: ObjectStore, label: str) -> Pin | str:
    """Empty where it is no pin of ours: another name, or gone."""
    key = RunDir.pin_key(label)
    try:
        return parse_pin(store.get(key, limit=MAX_PIN))
    except ObjectNotFound:
        return ""
    except (ObjectTooLarge, ValueError):
        return f"{store.url}/{key} cannot be read: which checkpoint it pins is not known"


def all_pins(run: RunDir, listed: Iterable[Listed], there: Iterable[ByHand]) -> Pins:
    """All milestones of the checkpoints `listed`, and those given by hand here or at the places that hold `there`."""
    known = [pins_by_hand(run), *there]
    problem = next((problem for _, problem in known if problem), "")
    return Pins(names=milestones(_latest(pins for pins, _ in known), listed), problem=problem)


def _latest(places: Iterable[Mapping[str, Pin]]) -> dict[str, Pin]:
    """Name -> the latest word about it; of words of the same moment the first."""
    found: dict[str, Pin] = {}
    for pins in places:
        found |= {label: one for label, one in pins.items() if label not in found or one.created > found[label].created}
    return found


def push_pins(run: RunDir, store: ObjectStore) -> None:
    """What is said here later than there, or there not at all. Raises StoreError, StoreConflict where it is another run's."""
    ours, _ = pins_by_hand(run)
    if not ours:
        return
    claim_run(run, store)
    theirs, _ = remote_pins(store)
    for label, one in _latest([theirs, ours]).items():
        if one is not theirs.get(label):
            store.put(RunDir.pin_key(label), msgspec.json.encode(one))


def adopt_pins(run: RunDir, theirs: Mapping[str, Pin]) -> None:
    """What is said there later than here, or can only be read there."""
    if theirs:
        files.make_dirs(run.pins)
    for label, one in theirs.items():
        ours = read_pin(run, label)
        if ours is None or one.created > ours.created:
            files.write_atomically(run.pin(label), msgspec.json.encode(one))
