"""Scrub: read what was chosen of all copies (scrub_plan.py); repair rot from another copy, quarantine the rest.

Plan and execution are apart: a dry run is the plan without the second call."""

import contextlib
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field, replace

from perdure.training import events
from perdure.training.checkpoint import verify
from perdure.training.checkpoint.facts import LOCAL
from perdure.training.checkpoint.hold import hold
from perdure.training.checkpoint.run_info import read_run_info
from perdure.training.errors import CheckpointDamaged, CheckpointNotFound, NeedsThaw, StoreError
from perdure.training.run_dir import MANIFEST, CheckpointName, RunDir
from perdure.training.travel import heal
from perdure.training.travel.copies import Local, Place, State, Stored, check
from perdure.training.travel.scrub_plan import Copy, Key

Progress = Callable[[int, int], None]


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
    problems: dict[str, str] = field(default_factory=dict)
    """Place -> why its part was cut short."""

    def count(self, outcome: str) -> int:
        return sum(one.outcome == outcome for one in self.found)


def scrub(
    run: RunDir, places: Sequence[Stored], copies: Iterable[Copy], chosen: Iterable[Copy], progress: Progress | None = None
) -> Done:
    """Read the chosen ones, heal what can be healed, record facts and events. `places` in the order in which they are asked for
    a good copy. `copies` is all of the survey: what depends on a base that is lost is quarantined with it."""
    return _Scrub(run, places, copies, list(chosen), progress or (lambda _done, _total: None)).go()


class _Scrub:
    def __init__(
        self, run: RunDir, places: Sequence[Stored], copies: Iterable[Copy], chosen: list[Copy], progress: Progress
    ) -> None:
        self.run, self.remotes, self.chosen, self.progress = run, {one.word: one for one in places}, chosen, progress
        self.copies = {copy.key: copy for copy in copies}
        self.id = read_run_info(run).id
        self.total = sum(copy.bytes for copy in chosen)
        self.places: dict[str, Place] = {LOCAL: Local(run), **self.remotes}
        self.states: dict[Key, State] = {}
        self.done = Done()

    def go(self) -> Done:
        for copy in self.chosen:
            if copy.place in self.done.problems:
                self.say(copy, "skipped", self.done.problems[copy.place])
                continue
            try:
                self.one(copy)
            except NeedsThaw as error:
                self.say(copy, "skipped", str(error))
            except StoreError as error:
                self.done.problems[copy.place] = str(error)
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
            self.mend(copy)
        else:
            self.confirm(copy)

    # reading

    def look(self, place: str, name: CheckpointName) -> State:
        """Each copy is read once; a repair forgets what was seen."""
        if (place, name) not in self.states:
            self.states[place, name] = self.read(place, name)
        return self.states[place, name]

    def read(self, place: str, name: CheckpointName) -> State:
        """Held while it is read: a copy that is deleted meanwhile is not a damaged one."""
        with contextlib.ExitStack() as held:
            if place == LOCAL:
                try:
                    held.enter_context(hold(self.run.checkpoint(name)))
                except CheckpointNotFound:
                    return State(exists=False)
                except CheckpointDamaged as error:
                    return State(bad={MANIFEST: str(error)})
            state = check(self.places[place], self.lender(place, name), name, self.id, self.count)
        return state if not state.bad or self.places[place].exists(name) else State(exists=False)

    def lender(self, place: str, name: CheckpointName) -> Place | None:
        """Another copy, whose index proves a pack where that of the place itself is damaged."""
        held = (self.copies.get((word, name)) for word in self.places if word != place)
        return next((self.places[copy.place] for copy in held if copy is not None and not copy.is_frozen), None)

    def count(self, size: int) -> None:
        self.done.bytes_read += size
        self.progress(min(self.done.bytes_read, self.total), self.total)

    # what becomes of it

    def confirm(self, copy: Copy) -> None:
        """Stored bytes are right. A local copy nobody has decoded yet, or that was damaged before, is proven in full."""
        if copy.place != LOCAL or copy.result == "good":
            self.record(copy, [])
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

    def mend(self, copy: Copy) -> None:
        """From another copy, when there is one. Before one elsewhere is overwritten, that which is here, if any, is whole."""
        name, away = copy.name, dict[str, str]()
        if self.look(LOCAL, name).bad and (why := self.mend_local(copy, away)):
            self.give_up(copy, why, away)
            return
        for word in self.remotes:
            state = self.states.get((word, name))
            if state is None or not state.bad:
                continue
            one = self.copies[word, name]
            try:
                if why := self.mend_remote(one, state, away):
                    self.give_up(one, why, away)
            except StoreError as error:
                self.done.problems[word] = str(error)
                self.say(one, "skipped", str(error))

    def mend_local(self, copy: Copy, away: dict[str, str]) -> str:
        """ "" when it is good now, else why it is not. `away`: places that could not be asked."""
        local, why = self.look(LOCAL, copy.name), self.alone(copy.name)
        for place, stored in self.others(copy.name, LOCAL, away):
            try:
                why = heal.mend_local(self.run, place, copy.name, local, stored)
            except NeedsThaw as error:  # of its base
                why = str(error)
            except StoreError as error:
                away[place.word] = str(error)
                continue
            if not why:
                self.repaired(LOCAL, copy, heal.told(local))
                break
        return why

    def mend_remote(self, copy: Copy, state: State, away: dict[str, str]) -> str:
        target, local, why = self.remotes[copy.place], self.look(LOCAL, copy.name), self.alone(copy.name)
        if local.good:
            why = heal.mend_stored(self.run, target, copy.name, local, state)
        else:
            for source, other in self.others(copy.name, copy.place, away):
                if other.good and not (why := heal.mend_through(self.run, source, target, copy.name, state, away)):
                    break
        if not why:
            self.repaired(copy.place, copy, heal.told(state))
        return why

    def others(self, name: CheckpointName, but: str, away: dict[str, str]) -> Iterator[tuple[Stored, State]]:
        """Copies at other places, in their order."""
        for word, place in self.remotes.items():
            copy = self.copies.get((word, name))
            if word == but or copy is None or copy.is_frozen:
                continue
            try:
                state = self.look(word, name)
            except NeedsThaw:  # a rule of the bucket, say
                self.copies[word, name] = replace(copy, is_frozen=True)
                continue
            except StoreError as error:
                away[word] = str(error)
                continue
            if state.exists:
                yield place, state

    def alone(self, name: CheckpointName) -> str:
        frozen = [word for word in self.remotes if (copy := self.copies.get((word, name))) and copy.is_frozen]
        return f"its copy in {', '.join(frozen)} has to be thawed first" if frozen else "there is no other copy"

    def give_up(self, copy: Copy, why: str, away: dict[str, str]) -> None:
        """For now, where a place could not be asked."""
        if away:
            self.done.problems |= away
            self.say(copy, "skipped", f"{why}; left for later: {'; '.join(away.values())}")
        else:
            self.lose(copy, [*heal.told(self.states[copy.key]), why])

    def repaired(self, place: str, copy: Copy, problems: list[str]) -> None:
        self.states.pop((place, copy.name), None)
        mended = replace(self.copies.get((place, copy.name), copy), place=place, result="good")
        self.copies[mended.key] = mended
        told = {"name": str(copy.name), "step": copy.name.step, "copy": place, "reason": "; ".join(problems)[:2000]}
        events.record(self.run, "repaired", **told)
        self.say(mended, "repaired", "; ".join(problems))

    def lose(self, copy: Copy, problems: list[str]) -> None:
        """Nothing can repair it now: record that, say it once, and take its increments with it."""
        seen = [key[0] for key, state in self.states.items() if key[1] == copy.name and state.bad and key in self.copies]
        lost = [self.copies[place, copy.name] for place in dict.fromkeys([copy.place, *seen])]
        known = all(one.result == "damaged" for one in lost)
        for one in lost:
            self.record_damage(one, problems)
            self.copies[one.key] = replace(one, result="damaged")
        if not known:
            self.quarantined(copy, problems)
        self.say(copy, "damaged", "; ".join(problems))
        places = [one.place for one in lost]
        for other in list(self.copies.values()):
            if other.base == copy.name and other.place in places and other.result != "damaged":
                self.record_damage(other, [f"base: {copy.name} is damaged"])

    def quarantined(self, copy: Copy, problems: list[str]) -> None:
        following = (
            {} if copy.place == LOCAL else {"next": "the local copy, if there is one, is used; push again when it can be"}
        )
        reason = f"{copy.place} copy: {'; '.join(problems)}"[:2000]
        events.record(self.run, "quarantined", step=copy.name.step, name=str(copy.name), reason=reason, **following)

    def record(self, copy: Copy, problems: list[str]) -> None:
        if copy.place == LOCAL:
            heal.record_local(self.run, copy.name, problems)
        else:
            heal.record_stored(self.run, self.remotes[copy.place], copy.name, problems, copy.storage_class)

    def record_damage(self, copy: Copy, problems: list[str]) -> None:
        """A place that cannot be told is not that of the copy at hand, perhaps."""
        try:
            self.record(copy, problems)
        except StoreError as error:
            self.done.problems[copy.place] = str(error)

    def say(self, copy: Copy, outcome: str, reason: str = "") -> None:
        if all(one.copy.key != copy.key for one in self.done.found):
            self.done.found.append(Found(copy=copy, outcome=outcome, reason=reason))
