"""Which checkpoints may go: a pure decision with a reason for every one. Nothing here touches a disk; prune.py executes it.

Whatever the policies say, three things stay: what does not count (unverified, damaged, not yet in the store), the newest
verified one, and every base that something kept needs."""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Protocol

from perdure.training.checkpoint.catalog import Listed
from perdure.training.run_dir import CheckpointName

VERIFIED = ("verified", "replicated")
_IN_STORE = ("replicated",)
KEEP_ALL = "keep_last is 0: nothing may go"
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
    def freed(self) -> int:
        return sum(verdict.bytes for verdict in self.verdicts if not verdict.keep)


class Policy(Protocol):
    """Names what to keep of the counted checkpoints (newest first), each with its reason. Policies add up."""

    def __call__(self, counted: Sequence[Listed]) -> Mapping[CheckpointName, str]: ...


@dataclass(frozen=True)
class KeepLast:
    """The newest `number`; 0 is all of them."""

    number: int

    def __call__(self, counted: Sequence[Listed]) -> Mapping[CheckpointName, str]:
        if not self.number:
            return {one.name: KEEP_ALL for one in counted}
        return {one.name: f"one of the newest {self.number}" for one in counted[: self.number]}


def plan(listed: Iterable[Listed], keep_last: int, stored: bool, *, history_known: bool = True) -> Plan:
    """`stored`: the run has a store, so that only what is in it counts, and only that may go. Unless `history_known` (every
    launch record could be read), what lies outside the lineage may belong to it after all, and stays."""
    stays = "" if history_known else "outside the present history, of which launch records are missing"
    return decide(listed, [KeepLast(keep_last)], stored, abandoned_stay=stays if keep_last else KEEP_ALL)


def decide(listed: Iterable[Listed], policies: Sequence[Policy], stored: bool, *, abandoned_stay: str = "") -> Plan:
    """The union of what the policies keep, and what is never deleted. `abandoned_stay`: why what lies outside the lineage is
    kept too; it goes when there is no reason."""
    every = sorted(listed, key=lambda one: one.name)
    reasons: Reasons = {}
    counts = _IN_STORE if stored else VERIFIED
    counted = [one for one in reversed(every) if one.in_lineage and one.trust in counts]
    for policy in policies:
        _add(reasons, policy(counted))
    newest = next((one for one in reversed(every) if one.in_lineage and one.trust in VERIFIED), None)
    if newest is not None:
        _add(reasons, {newest.name: "the newest verified"})
    _add(reasons, {one.name: _uncounted(one) for one in every if one.in_lineage and one.trust not in counts})
    if abandoned_stay:
        _add(reasons, {one.name: abandoned_stay for one in every if not one.in_lineage})
    _add(reasons, _needed(every, reasons))
    verdicts = tuple(_verdict(one, reasons.get(one.name, ())) for one in every)
    return Plan(verdicts=verdicts, anchor=newest.name if newest is not None else None)


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


def _verdict(one: Listed, kept: tuple[str, ...]) -> Verdict:
    goes = "older than what is kept" if one.in_lineage else "outside the present history"
    return Verdict(name=one.name, keep=bool(kept), reasons=kept or (goes,), bytes=one.bytes_on_disk, base=one.base)
