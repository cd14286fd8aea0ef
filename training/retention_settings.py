"""[retention] of run.toml: which checkpoints stay when others may be deleted. What is set adds up; nothing set keeps all."""

import re
from collections.abc import Iterator
from typing import Literal

import msgspec

_AGE = re.compile(r"(?:[0-9]{1,6}[hdw])+")
_UNITS = {"h": 3600.0, "d": 86400.0, "w": 7 * 86400.0}


class RetentionSection(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    keep_last: int | Literal["all"] | None = None
    """The newest so many."""
    keep_every: int | None = None
    """Those whose step is a multiple of this."""
    keep_hourly: int | None = None
    """The newest of each of the last so many hours (of UTC) that have one."""
    keep_daily: int | None = None
    keep_weekly: int | None = None
    keep_within: str = ""
    """Those at most so much older than the newest: `36h`, `7d`, `2w`, `1d12h`."""
    keep_best: int | None = None
    """The best so many by `best`; while no checkpoint has a value of it, all."""
    best: str = "loss"
    """When the checkpoint was cut: `loss` (smoothed), `last` (that of the step), `least` (until then), or the newest value of
    what the training code logged under this name."""
    best_mode: Literal["min", "max"] = "min"

    @property
    def keeps_all(self) -> bool:
        """No policy is set: nothing may go."""
        return not (any(getattr(self, key) for key in COUNTS) or self.keep_within)

    def said(self) -> str:
        """What is set, on one line."""
        limits = [f"{key} = {getattr(self, key)}" for key in COUNTS if getattr(self, key)]
        limits += [f"keep_within = {self.keep_within}"] if self.keep_within else []
        return ", ".join(limits) or "no limit is set"


COUNTS = ("keep_last", "keep_every", "keep_hourly", "keep_daily", "keep_weekly", "keep_best")


def parse_age(text: str) -> float:
    """Seconds of `36h`, `7d`, `2w`, `1d12h`. Raises ValueError."""
    if not _AGE.fullmatch(text):
        raise ValueError(f"{text!r} is not an age")
    return sum(int(number) * _UNITS[unit] for number, unit in re.findall(r"([0-9]+)([hdw])", text))


def wrong_retention(section: RetentionSection, name: str = "retention") -> Iterator[tuple[str, str]]:
    """Each setting of the table `name` that cannot be, with what to do."""
    for key in COUNTS:
        number = getattr(section, key)
        if isinstance(number, int) and number < 1:
            yield f"{name}.{key} = {number} would keep none", 'set 1 or more, or leave it out; keep_last = "all" keeps all'
    if not section.best or not section.best.isprintable():
        yield f"{name}.best = {section.best!r} is no name", "write loss, last, least, or the name of what session.log was given"
    try:
        if section.keep_within and not parse_age(section.keep_within):
            yield f"{name}.keep_within = {section.keep_within!r} is no time at all", "leave it out"
    except ValueError:
        yield f"{name}.keep_within = {section.keep_within!r} is not an age", "write for example 36h, 7d, 2w or 1d12h"
