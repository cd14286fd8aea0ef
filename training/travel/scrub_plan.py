"""What a scrub would read: every copy of a run, here and at its other places, and of these as many as a budget lets."""

import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace

from perdure.training.checkpoint import catalog, facts
from perdure.training.checkpoint.catalog import Listed
from perdure.training.checkpoint.facts import LOCAL, Fact
from perdure.training.checkpoint.run_info import read_run_info
from perdure.training.checkpoint.thaws import read_thaws
from perdure.training.errors import CheckpointDamaged, ConfigError, ObjectNotFound, StoreConflict, StoreError
from perdure.training.run_dir import CheckpointName, RunDir
from perdure.training.storage.parallel import in_order
from perdure.training.store_settings import NEED_THAW
from perdure.training.travel.contents import WIDTH, committed_among, read_remote_fact
from perdure.training.travel.copies import Stored, read_manifest
from perdure.training.travel.fence import check_same_run, remote_run_info

_UNITS = {"": 1, "k": 10**3, "m": 10**6, "g": 10**9, "t": 10**12, "ki": 2**10, "mi": 2**20, "gi": 2**30, "ti": 2**40}
Key = tuple[str, CheckpointName]
"""Place and name of a copy."""


@dataclass(frozen=True, kw_only=True)
class Copy:
    """One copy of one checkpoint, and when it was last checked (0: never)."""

    name: CheckpointName
    place: str
    bytes: int
    checked_at: float = 0.0
    result: str = ""
    base: CheckpointName | None = None
    storage_class: str = ""
    """Where it has to be thawed before it is read; empty: it can be read."""
    is_frozen: bool = False
    """It is not thawed at present."""

    @property
    def key(self) -> Key:
        return self.place, self.name


@dataclass(frozen=True, kw_only=True)
class Survey:
    copies: tuple[Copy, ...]
    problems: Mapping[str, str] = field(default_factory=dict)
    """Place -> why it could not be looked at."""

    @property
    def readable_bytes(self) -> int:
        return sum(copy.bytes for copy in self.copies if not copy.is_frozen)

    @property
    def frozen(self) -> int:
        return sum(copy.is_frozen for copy in self.copies)


def parse_budget(text: str, total: int) -> int:
    """Bytes out of "15%", "0.15" (a share of `total`) or "20GB", "512MiB", "1000000". Raises ConfigError."""
    match = re.fullmatch(r"\s*([0-9]+(?:\.[0-9]+)?)\s*(%|[kmgt]?i?b?)\s*", text.lower())
    unit = match[2] if match else ""
    if match and unit == "%" and float(match[1]) <= 100:
        return round(total * float(match[1]) / 100)
    if match and not unit and "." in match[1] and float(match[1]) <= 1:
        return round(total * float(match[1]))
    size = _UNITS.get(unit.removesuffix("b"))
    if match is None or size is None or unit == "%" or (not unit and "." in match[1]):
        raise ConfigError(f"budget {text!r} is neither a number of bytes nor a share", "write 20GB, 512MiB, 15% or 0.15")
    return round(float(match[1]) * size)


def survey(run: RunDir, places: Iterable[Stored]) -> Survey:
    """Every copy there is. A place that cannot be looked at is left out, and said. Raises StoreConflict where one is another
    run's."""
    here = {one.name: one for one in catalog.list_checkpoints(run)}
    copies = [
        _copy(name, LOCAL, one.bytes_on_disk, facts.read_fact(run, name, LOCAL), one.base)
        for name, one in here.items()
        if one.is_here
    ]
    thawed = {(thaw.place, thaw.checkpoint) for thaw in read_thaws(run) if thaw.state == "thawed"}
    problems = {}
    for place in places:
        try:
            copies += _of_place(run, place, here, thawed)
        except StoreConflict:
            raise
        except StoreError as error:
            problems[place.word] = str(error)
    return Survey(copies=tuple(copies), problems=problems)


def _of_place(run: RunDir, place: Stored, here: Mapping[CheckpointName, Listed], thawed: set[tuple[str, str]]) -> list[Copy]:
    run_id = read_run_info(run).id
    try:
        check_same_run(place.store, run_id, remote_run_info(place.store).id)
    except ObjectNotFound:
        return []
    objects = list(place.store.list(RunDir.CHECKPOINTS_KEY))
    sizes, classes = dict[str, int](), dict[str, str]()
    for item in objects:
        folder = item.key.split("/")[1]
        sizes[folder] = sizes.get(folder, 0) + item.size
        if item.storage_class in NEED_THAW:  # also where a rule of the bucket moved it
            classes[folder] = item.storage_class

    def copy(name: CheckpointName) -> Copy:
        listed = here.get(name)
        known = facts.read_fact(run, name, place.word) if listed else None
        if known is None or known.result == facts.PRUNED:
            known = read_remote_fact(place.store, name)
        base = listed.base if listed and listed.manifest else _stored_base(place, name, run_id)
        cold = classes.get(str(name), "")
        is_frozen = bool(cold) and (place.word, str(name)) not in thawed
        return replace(_copy(name, place.word, sizes[str(name)], known, base), storage_class=cold, is_frozen=is_frozen)

    return list(in_order(copy, committed_among(objects), width=WIDTH))


def _copy(name: CheckpointName, place: str, size: int, fact: Fact | None, base: CheckpointName | None) -> Copy:
    checked, result = (fact.checked_at, fact.result) if fact else (0.0, "")
    return Copy(name=name, place=place, bytes=size, checked_at=checked, result=result, base=base)


def _stored_base(place: Stored, name: CheckpointName, run_id: str) -> CheckpointName | None:
    try:
        return read_manifest(place, name, run_id).base_name
    except CheckpointDamaged:
        return None


def choose(copies: Sequence[Copy], budget: int) -> list[Copy]:
    """What to read with `budget` bytes: what may be cured first, then by the last check, an increment's base with it. What is
    frozen is left.

    The first is chosen whatever its size (while there is a budget): one larger than every budget would never be read."""
    readable = [copy for copy in copies if not copy.is_frozen]
    by_key = {copy.key: copy for copy in readable}
    sound = {copy.name for copy in readable if copy.result != "damaged"}
    chosen: dict[Key, Copy] = {}
    left = budget

    def rank(one: Copy) -> tuple[bool, float, CheckpointName, str]:
        is_curable = one.result == "damaged" and one.name in sound
        return not is_curable, one.checked_at, one.name, one.place

    for copy in sorted(readable, key=rank):
        base = by_key.get((copy.place, copy.base)) if copy.base else None
        group = [one for one in (base, copy) if one is not None and one.key not in chosen]
        cost = sum(one.bytes for one in group)
        if budget <= 0 or (chosen and cost > left):
            break
        left -= cost
        chosen |= {one.key: one for one in group}
    return list(chosen.values())
