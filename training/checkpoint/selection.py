"""Which checkpoints go to a tier, each with its reason: a pure decision of its settings. What they say adds up."""

from collections.abc import Iterable, Mapping

from perdure.training.checkpoint.catalog import Listed
from perdure.training.checkpoint.facts import GOOD
from perdure.training.checkpoint.pins import Pins
from perdure.training.checkpoint.policies import KeepBest, KeepEvery, Policy
from perdure.training.run_dir import CheckpointName
from perdure.training.tier_settings import TierSection

Reasons = dict[CheckpointName, tuple[str, ...]]


def selection(listed: Iterable[Listed], tier: TierSection, pins: Pins) -> Reasons:
    """Of the present history and good somewhere. A base comes with what needs it: without it that is nothing."""
    every = sorted(listed, key=lambda one: one.name)
    counted = [one for one in reversed(every) if one.in_lineage and one.trust in GOOD and one.manifest is not None]
    found: Reasons = {}
    for policy in _policies(tier):
        _add(found, policy(counted))
    if tier.takes_all:
        _add(found, {one.name: "all that are kept" for one in counted})
    if tier.milestones:
        named = {one.name: f"milestone {', '.join(pins.names[one.name])}" for one in counted if one.name in pins.names}
        _add(found, named)
    _add(found, {one.base: f"base of {one.name}" for one in counted if one.base is not None and one.name in found})
    return found


def _policies(tier: TierSection) -> list[Policy]:
    by = tier.retention
    every: list[Policy] = [KeepEvery(tier.every)] if tier.every else []
    return every + ([KeepBest(tier.best, by.best, by.best_mode)] if tier.best else [])


def _add(found: Reasons, more: Mapping[CheckpointName, str]) -> None:
    for name, reason in more.items():
        found[name] = (*found.get(name, ()), reason)
