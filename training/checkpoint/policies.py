"""What to keep: small pure policies in restic's words. Each names some of the checkpoints that count, with its reason; they
add up. Nothing here knows of bases, trust or disks: retention.py does."""

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Literal, Protocol

from perdure.training.checkpoint.catalog import Listed
from perdure.training.retention_settings import RetentionSection, parse_age
from perdure.training.run_dir import CheckpointName

Kept = Mapping[CheckpointName, str]
KEEP_ALL = "no limit is set: nothing may go"
_HOUR, _DAY, _WEEK = 3600, 86400, 7 * 86400
_MONDAY = 3 * _DAY
"""Unix time began on a Thursday, three days into its week."""
_OF_LOSS = {"loss": "smoothed", "last": "last", "least": "least"}
"""A word of `best` -> its key in the manifest's `loss`; every other one is a key of its `metrics`."""


class Policy(Protocol):
    """Names what to keep of the counted checkpoints (newest first), each with its reason. Policies add up."""

    def __call__(self, counted: Sequence[Listed]) -> Kept: ...


@dataclass(frozen=True)
class KeepAll:
    def __call__(self, counted: Sequence[Listed]) -> Kept:
        return {one.name: KEEP_ALL for one in counted}


@dataclass(frozen=True)
class KeepLast:
    """The newest `number`, or all."""

    number: int | Literal["all"]

    def __call__(self, counted: Sequence[Listed]) -> Kept:
        if self.number == "all":
            return {one.name: "all are kept" for one in counted}
        return {one.name: f"one of the newest {self.number}" for one in counted[: self.number]}


@dataclass(frozen=True)
class KeepEvery:
    """Those whose step is a multiple of `steps`."""

    steps: int

    def __call__(self, counted: Sequence[Listed]) -> Kept:
        return {one.name: f"step is a multiple of {self.steps}" for one in counted if one.name.step % self.steps == 0}


@dataclass(frozen=True)
class KeepPer:
    """The newest of each of the last `number` periods that have one; the clock says the period, the history what is newest."""

    number: int
    word: str
    """hour, day or week (from Monday), of UTC."""

    def __call__(self, counted: Sequence[Listed]) -> Kept:
        seconds, shift = {"hour": (_HOUR, 0), "day": (_DAY, 0), "week": (_WEEK, _MONDAY)}[self.word]
        found: dict[int, CheckpointName] = {}
        for one in counted:
            if one.manifest is None:
                continue
            period = int((one.manifest.created + shift) // seconds)
            if period not in found and len(found) < self.number:
                found[period] = one.name
        return dict.fromkeys(found.values(), f"newest of its {self.word}, one of {self.number}")


@dataclass(frozen=True)
class KeepWithin:
    """Those at most so much older than the newest one: a run that stands still loses nothing, whatever the clock says."""

    seconds: float
    said: str

    def __call__(self, counted: Sequence[Listed]) -> Kept:
        made = {one.name: one.manifest.created for one in counted if one.manifest is not None}
        if not made:
            return {}
        since = next(iter(made.values())) - self.seconds
        return {name: f"within {self.said} of the newest" for name, created in made.items() if created >= since}


@dataclass(frozen=True)
class KeepBest:
    """The best `number` by a value in the manifest; of equals the newest. One without a finite value is none."""

    number: int
    metric: str
    mode: str = "min"
    unknown_stay: bool = False
    """All stay while none has a value: it was not measured yet, or the name is misspelt."""

    def __call__(self, counted: Sequence[Listed]) -> Kept:
        values = {one.name: value for one in counted if (value := self._value(one)) is not None}
        if not values and self.unknown_stay:
            return {one.name: f"no checkpoint has a value of {self.metric} yet" for one in counted}
        sign = 1 if self.mode == "min" else -1
        best = sorted(values, key=lambda name: sign * values[name])[: self.number]  # stable: newest first among equals
        return {name: f"one of the best {self.number} by {self.metric}: {values[name]:.6g}" for name in best}

    def _value(self, one: Listed) -> float | None:
        if one.manifest is None:
            return None
        if self.metric in _OF_LOSS:
            value = one.manifest.loss.get(_OF_LOSS[self.metric])
        else:
            value = one.manifest.metrics.get(self.metric) if one.manifest.metrics else None
        known = isinstance(value, (int, float)) and not isinstance(value, bool) and math.isfinite(value)
        return float(value) if known else None  # type: ignore[arg-type]  # known says that it is a number


def policies_of(section: RetentionSection) -> list[Policy]:
    """What the settings say; nothing set keeps all."""
    makers: list[tuple[int | None, Callable[[int], Policy]]] = [
        (section.keep_every, KeepEvery),
        (section.keep_hourly, lambda number: KeepPer(number, "hour")),
        (section.keep_daily, lambda number: KeepPer(number, "day")),
        (section.keep_weekly, lambda number: KeepPer(number, "week")),
        (section.keep_best, lambda number: KeepBest(number, section.best, section.best_mode, unknown_stay=True)),
    ]
    found: list[Policy] = [KeepLast(section.keep_last)] if section.keep_last is not None else []
    found += [make(number) for number, make in makers if number is not None]
    if section.keep_within:
        found.append(KeepWithin(parse_age(section.keep_within), section.keep_within))
    return found or [KeepAll()]
