"""Scrub: read a budgeted share of all copies, longest-unchecked first; repair rot from the other copy, quarantine the rest.

Plan (survey, choose) and execution (scrub) are apart: a dry run is the plan without the second call."""

import contextlib
import re
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field, replace

from perdure.training import events
from perdure.training.checkpoint import catalog, facts, verify
from perdure.training.checkpoint.facts import Fact
from perdure.training.checkpoint.hold import hold
from perdure.training.checkpoint.run_info import read_run_info
from perdure.training.errors import CheckpointDamaged, CheckpointNotFound, ConfigError, StoreError
from perdure.training.run_dir import MANIFEST, CheckpointName, RunDir
from perdure.training.storage.store import ObjectStore
from perdure.training.travel import heal
from perdure.training.travel.contents import read_remote_fact, remote_checkpoints
from perdure.training.travel.copies import Local, Place, State, Stored, check, read_manifest
from perdure.training.travel.fence import check_same_run, remote_run_info

DEFAULT_BUDGET = "15%"
"""Once a day, everything is read within a week."""
LOCAL, STORE = "local", "store"
_UNITS = {"": 1, "k": 10**3, "m": 10**6, "g": 10**9, "t": 10**12, "ki": 2**10, "mi": 2**20, "gi": 2**30, "ti": 2**40}
Progress = Callable[[int, int], None]


@dataclass(frozen=True, kw_only=True)
class Copy:
    """One copy of one checkpoint, and when it was last checked (0: never)."""

    name: CheckpointName
    place: str
    bytes: int
    checked_at: float = 0.0
    result: str = ""
    base: CheckpointName | None = None

    @property
    def key(self) -> tuple[str, CheckpointName]:
        return self.place, self.name


@dataclass(frozen=True, kw_only=True)
class Found:
    """What became of one copy: good, repaired, damaged, or skipped."""

    copy: Copy
    outcome: str
    reason: str = ""


@dataclass(kw_only=True)
class Done:
    found: list[Found] = field(default_factory=list)
    bytes_read: int = 0
    store_problem: str = ""
    """Why the store's part was cut short."""

    def count(self, outcome: str) -> int:
        return sum(one.outcome == outcome for one in self.found)


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


def survey(run: RunDir, store: ObjectStore | None) -> list[Copy]:
    """Every copy there is, here and in the store. Raises StoreError, StoreConflict when the store is another run's."""
    here = {one.name: one for one in catalog.list_checkpoints(run)}
    copies = [_copy(name, LOCAL, one.bytes_on_disk, facts.read_fact(run, name, LOCAL), one.base) for name, one in here.items()]
    if store is None or store.size(RunDir.RUN_KEY) is None:
        return copies
    run_id = read_run_info(run).id
    check_same_run(store, run_id, remote_run_info(store).id)
    sizes: dict[str, int] = {}
    for item in store.list(RunDir.CHECKPOINTS_KEY):
        folder = item.key.split("/")[1]
        sizes[folder] = sizes.get(folder, 0) + item.size
    for name in remote_checkpoints(store):
        listed = here.get(name)
        known = facts.read_fact(run, name, STORE) if listed else None
        base = listed.base if listed and listed.manifest else _stored_base(store, name, run_id)
        copies.append(_copy(name, STORE, sizes[str(name)], known or read_remote_fact(store, name), base))
    return copies


def _copy(name: CheckpointName, place: str, size: int, fact: Fact | None, base: CheckpointName | None) -> Copy:
    checked, result = (fact.checked_at, fact.result) if fact else (0.0, "")
    return Copy(name=name, place=place, bytes=size, checked_at=checked, result=result, base=base)


def _stored_base(store: ObjectStore, name: CheckpointName, run_id: str) -> CheckpointName | None:
    try:
        return read_manifest(Stored(store), name, run_id).base_name
    except CheckpointDamaged:
        return None


def choose(copies: Sequence[Copy], budget: int) -> list[Copy]:
    """What to read with `budget` bytes: what may be cured first, then by the last check, an increment's base with it.

    The first is chosen whatever its size (while there is a budget): one larger than every budget would never be read."""
    by_key = {copy.key: copy for copy in copies}
    chosen: dict[tuple[str, CheckpointName], Copy] = {}
    left = budget
    for copy in sorted(copies, key=lambda one: (not _curable(one, by_key), one.checked_at, one.name, one.place)):
        base = by_key.get((copy.place, copy.base)) if copy.base else None
        group = [one for one in (base, copy) if one is not None and one.key not in chosen]
        cost = sum(one.bytes for one in group)
        if budget <= 0 or (chosen and cost > left):
            break
        left -= cost
        chosen |= {one.key: one for one in group}
    return list(chosen.values())


def _curable(copy: Copy, by_key: dict[tuple[str, CheckpointName], Copy]) -> bool:
    other = by_key.get((STORE if copy.place == LOCAL else LOCAL, copy.name))
    return copy.result == "damaged" and other is not None and other.result != "damaged"


def scrub(
    run: RunDir, store: ObjectStore | None, copies: Sequence[Copy], chosen: Iterable[Copy], progress: Progress | None = None
) -> Done:
    """Read the chosen ones, heal what can be healed, record facts and events. `copies` is all of the survey: what depends on a
    base that is lost is quarantined with it."""
    return _Scrub(run, store, copies, list(chosen), progress or (lambda _done, _total: None)).go()


class _Scrub:
    def __init__(
        self, run: RunDir, store: ObjectStore | None, copies: Sequence[Copy], chosen: list[Copy], progress: Progress
    ) -> None:
        self.run, self.store, self.chosen, self.progress = run, store, chosen, progress
        self.copies = {copy.key: copy for copy in copies}
        self.id = read_run_info(run).id
        self.total = sum(copy.bytes for copy in chosen)
        self.places: dict[str, Place] = {LOCAL: Local(run)} | ({STORE: Stored(store)} if store is not None else {})
        self.states: dict[tuple[str, CheckpointName], State] = {}
        self.done = Done()

    def go(self) -> Done:
        for copy in self.chosen:
            if copy.place == STORE and self.done.store_problem:
                self.say(copy, "skipped", self.done.store_problem)
                continue
            try:
                self.one(copy)
            except StoreError as error:
                self.done.store_problem = str(error)
                self.say(copy, "skipped", str(error))
        bytes_read, counts = self.done.bytes_read, {word: self.done.count(word) for word in ("good", "repaired", "damaged")}
        if self.chosen:
            events.record(self.run, "scrubbed", bytes=bytes_read, **counts)
        return self.done

    def one(self, copy: Copy) -> None:
        state = self.look(copy.place, copy.name)
        base = next((one for one in self.done.found if copy.base and one.copy.key == (copy.place, copy.base)), None)
        if not state.exists:
            self.say(copy, "skipped", "deleted meanwhile")
        elif base is not None and base.outcome == "damaged":
            self.lose(copy, [f"base: {base.copy.name} is damaged", *heal.told(state)])
        elif state.bad:
            self.mend(copy, state)
        else:
            self.confirm(copy)

    def look(self, place: str, name: CheckpointName) -> State:
        """Each copy is read once; a repair forgets what was seen."""
        if place not in self.places:
            return State(exists=False)
        if (place, name) not in self.states:
            self.states[place, name] = self.read(place, name)
        return self.states[place, name]

    def read(self, place: str, name: CheckpointName) -> State:
        """Held while it is read: a copy that is deleted meanwhile is not a damaged one."""
        other = self.places.get(STORE if place == LOCAL else LOCAL)
        with contextlib.ExitStack() as held:
            if place == LOCAL:
                try:
                    held.enter_context(hold(self.run.checkpoint(name)))
                except CheckpointNotFound:
                    return State(exists=False)
                except CheckpointDamaged as error:
                    return State(bad={MANIFEST: str(error)})
            state = check(self.places[place], other, name, self.id, self.count)
        return state if not state.bad or self.places[place].exists(name) else State(exists=False)

    def count(self, size: int) -> None:
        self.done.bytes_read += size
        self.progress(min(self.done.bytes_read, self.total), self.total)

    def confirm(self, copy: Copy) -> None:
        """Stored bytes are right. A local copy nobody has decoded yet, or that was damaged before, is proven in full."""
        if copy.place == STORE:
            assert self.store is not None
            heal.record_stored(self.run, self.store, copy.name, [])
        elif copy.result == "good":
            heal.record_local(self.run, copy.name, [])
        else:
            try:
                fact = verify.check(self.run, copy.name)
            except CheckpointNotFound:
                self.say(copy, "skipped", "deleted meanwhile")
                return
            if fact.result != "good":
                self.lose(copy, list(fact.damage))
                return
        self.say(copy, "good")

    def mend(self, copy: Copy, state: State) -> None:
        """From the other copy, when there is one. Before a store's copy is overwritten, the local one must be whole."""
        local, stored = self.look(LOCAL, copy.name), self.look(STORE, copy.name)
        problems = heal.told(state)
        if self.store is None or not (local.exists and stored.exists):
            self.lose(copy, [*problems, "there is no other copy"])
            return
        if local.bad:
            why = heal.mend_local(self.run, self.store, copy.name, local, stored)
            if why:
                self.lose(copy, [*problems, why], both=not stored.good)
                return
            self.repaired(LOCAL, copy, heal.told(local))
            local = self.look(LOCAL, copy.name)
        if stored.bad:
            why = heal.mend_stored(self.run, self.store, copy.name, local, stored)
            if why:
                self.lose(copy, [*problems, why])
                return
            self.repaired(STORE, copy, heal.told(stored))

    def repaired(self, place: str, copy: Copy, problems: list[str]) -> None:
        self.states.pop((place, copy.name), None)
        mended = replace(self.copies.get((place, copy.name), copy), place=place, result="good")
        self.copies[place, copy.name] = mended
        told = {"name": str(copy.name), "step": copy.name.step, "copy": place, "reason": "; ".join(problems)[:2000]}
        events.record(self.run, "repaired", **told)
        self.say(mended, "repaired", "; ".join(problems))

    def lose(self, copy: Copy, problems: list[str], *, both: bool = False) -> None:
        """Nothing can repair it now: record that, say it once, and take its increments with it."""
        places = [LOCAL, STORE] if both else [copy.place]
        known = all(self.copies[place, copy.name].result == "damaged" for place in places if (place, copy.name) in self.copies)
        for place in places:
            self.record(place, copy.name, problems)
            self.copies[place, copy.name] = replace(self.copies.get((place, copy.name), copy), place=place, result="damaged")
        if not known:
            self.quarantined(copy, problems)
        self.say(copy, "damaged", "; ".join(problems))
        for other in list(self.copies.values()):
            if other.base == copy.name and other.place in places and other.result != "damaged":
                self.record(other.place, other.name, [f"base: {copy.name} is damaged"])

    def quarantined(self, copy: Copy, problems: list[str]) -> None:
        following = (
            {} if copy.place == LOCAL else {"next": "the local copy, if there is one, is used; push again when it can be"}
        )
        reason = f"{copy.place} copy: {'; '.join(problems)}"[:2000]
        events.record(self.run, "quarantined", step=copy.name.step, name=str(copy.name), reason=reason, **following)

    def record(self, place: str, name: CheckpointName, problems: list[str]) -> None:
        if place == LOCAL:
            heal.record_local(self.run, name, problems)
        elif self.store is not None:
            heal.record_stored(self.run, self.store, name, problems)

    def say(self, copy: Copy, outcome: str, reason: str = "") -> None:
        if all(one.copy.key != copy.key for one in self.done.found):
            self.done.found.append(Found(copy=copy, outcome=outcome, reason=reason))
