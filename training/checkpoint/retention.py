"""Which checkpoints may go: a pure decision with a reason for every one. Nothing here touches a disk; prune.py executes it.

Whatever the policies say, four things stay: what does not count (unverified, damaged, not yet in the store), the newest
verified one, milestones, and every base that something kept needs."""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace

from perdure.training.checkpoint.catalog import Listed
from perdure.training.checkpoint.facts import GOOD
from perdure.training.checkpoint.pins import Pins
from perdure.training.checkpoint.policies import KEEP_ALL, Policy, policies_of
from perdure.training.retention_settings import RetentionSection
from perdure.training.run_dir import CheckpointName

NO_PINS = Pins()
Reasons = dict[CheckpointName, tuple[str, ...]]


@dataclass(frozen=True, kw_only=True)
class Verdict:
    name: CheckpointName
    keep: bool
    reasons: tuple[str, ...]
    """Why it is kept, or why it may go; never empty."""
    bytes: int
    """On disk: what removing it frees."""
    base: CheckpointName | None = None
    roll_up: bool = False
    """A milestone that is made a full first: then its base can go."""


@dataclass(frozen=True, kw_only=True)
class Plan:
    verdicts: tuple[Verdict, ...]
    """One for every committed checkpoint, by step and token."""
    anchor: CheckpointName | None
    """The newest verified one: nothing goes once it is found damaged, until a new plan is made."""

    @property
    def keep(self) -> tuple[Verdict, ...]:
        return tuple(verdict for verdict in self.verdicts if verdict.keep)

    @property
    def remove(self) -> tuple[Verdict, ...]:
        """In the order of removal: oldest first, but a base after everything that needs it."""
        going = [verdict for verdict in self.verdicts if not verdict.keep]
        newest: dict[CheckpointName, CheckpointName] = {}
        for verdict in going:
            if verdict.base is not None:
                newest[verdict.base] = max(newest.get(verdict.base, verdict.name), verdict.name)
        return tuple(sorted(going, key=lambda one: (max(one.name, newest.get(one.name, one.name)), one.base is None)))

    @property
    def roll_ups(self) -> tuple[Verdict, ...]:
        """Before any removal."""
        return tuple(verdict for verdict in self.verdicts if verdict.roll_up)

    @property
    def freed(self) -> int:
        """Of what goes; a roll-up takes some of it."""
        return sum(verdict.bytes for verdict in self.verdicts if not verdict.keep)


def plan(
    listed: Iterable[Listed],
    settings: RetentionSection,
    stored: bool,
    *,
    pins: Pins = NO_PINS,
    history_known: bool = True,
    roll_up: bool = False,
) -> Plan:
    """`stored`: the run has a store, so that only what got there counts, and only that may go. Unless `history_known` (every
    launch record could be read), what lies outside the lineage may belong to it after all, and stays. `roll_up`: a milestone
    may be made a full, so that its base can go."""
    stays = "" if history_known else "outside the present history, of which launch records are missing"
    abandoned = KEEP_ALL if settings.keeps_all else stays
    return decide(listed, policies_of(settings), stored, pins=pins, abandoned_stay=abandoned, roll_up=roll_up)


def decide(
    listed: Iterable[Listed],
    policies: Sequence[Policy],
    stored: bool,
    *,
    pins: Pins = NO_PINS,
    abandoned_stay: str = "",
    roll_up: bool = False,
) -> Plan:
    """The union of what the policies keep, and what is never deleted. `abandoned_stay`: why what lies outside the lineage is
    kept too; it goes when there is no reason."""
    every = _judged(sorted(listed, key=lambda one: one.name))
    reasons: Reasons = {}
    counted = [one for one in reversed(every) if one.in_lineage and (one.was_in_store if stored else one.trust in GOOD)]
    counts = {one.name for one in counted}
    _add(reasons, {one.name: _milestone(pins.names[one.name]) for one in every if one.name in pins.names})
    for policy in policies:
        _add(reasons, policy(counted))
    newest = next((one for one in reversed(every) if one.in_lineage and one.trust in GOOD), None)
    if newest is not None:
        _add(reasons, {newest.name: "the newest verified"})
    _add(reasons, {one.name: _uncounted(one) for one in every if one.in_lineage and one.name not in counts})
    if abandoned_stay:
        _add(reasons, {one.name: abandoned_stay for one in every if not one.in_lineage})
    if pins.problem:
        _add(reasons, {one.name: pins.problem for one in every})
    freeing = _roll_ups(every, reasons, pins) if roll_up else {}
    _add(reasons, {one: f"rolled up first, then its base {base} can go" for one, base in freeing.items()})
    _add(reasons, _needed([one for one in every if one.name not in freeing], reasons))
    verdicts = tuple(_verdict(one, reasons.get(one.name, ()), freeing) for one in every)
    return Plan(verdicts=verdicts, anchor=newest.name if newest is not None else None)


def _judged(every: Sequence[Listed]) -> list[Listed]:
    """Whatever was once found: what has a manifest that cannot be read is damaged, and so is what has lost its base."""
    sound = {one.name for one in every if not one.problem and one.trust != "quarantined"}
    return [
        one if one.name in sound and (one.base is None or one.base in sound) else replace(one, trust="quarantined")
        for one in every
    ]


def _milestone(labels: Sequence[str]) -> str:
    return f"milestone {', '.join(labels)}"


def _roll_ups(every: Sequence[Listed], kept: Reasons, pins: Pins) -> dict[CheckpointName, CheckpointName]:
    """Milestone -> its base, where nothing else keeps that. The newest full stays: increments are written against it."""
    dependents: dict[CheckpointName, list[Listed]] = {}
    for one in every:
        if one.base is not None and one.name in kept:
            dependents.setdefault(one.base, []).append(one)
    fulls = {one.name: one for one in every if one.base is None and one.trust in GOOD}
    newest = max((name for name, one in fulls.items() if one.in_lineage), default=None)
    return {
        ones[0].name: base
        for base, ones in dependents.items()
        if len(ones) == 1 and ones[0].name in pins.names and ones[0].trust in GOOD
        and base in fulls and base not in kept and base != newest
    }  # fmt: skip


def _add(reasons: Reasons, more: Mapping[CheckpointName, str]) -> None:
    for name, reason in more.items():
        reasons[name] = (*reasons.get(name, ()), reason)


def _uncounted(one: Listed) -> str:
    if one.trust == "quarantined":
        return "damaged: not counted, kept to be looked at"
    return "not verified yet" if one.trust == "written" else "not in the store yet"


def _needed(every: Sequence[Listed], kept: Reasons) -> Mapping[CheckpointName, str]:
    """Bases of what is kept. One pass is the closure: a base is a full."""
    dependents: dict[CheckpointName, list[CheckpointName]] = {}
    for one in every:
        if one.base is not None and one.name in kept:
            dependents.setdefault(one.base, []).append(one.name)
    return {base: f"base of {_some(names)}" for base, names in dependents.items()}


def _some(names: Sequence[CheckpointName]) -> str:
    return f"{names[-1]}" + (f" and {len(names) - 1} more" if len(names) > 1 else "")


def _verdict(one: Listed, kept: tuple[str, ...], freeing: Mapping[CheckpointName, CheckpointName]) -> Verdict:
    goes = "older than what is kept" if one.in_lineage else "outside the present history"
    return Verdict(
        name=one.name, keep=bool(kept), reasons=kept or (goes,), bytes=one.bytes_on_disk, base=one.base,
        roll_up=one.name in freeing,
    )  # fmt: skip
