"""[drill] of run.toml: what a rehearsal of the disaster has to reach, and how many steps it trains."""

import re
from collections.abc import Iterator

import msgspec

_TIME = re.compile(r"(?:[0-9]{1,6}[smhd])+")
_UNITS = {"s": 1.0, "m": 60.0, "h": 3600.0, "d": 86400.0}


class DrillSection(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    recovery_point: str = "1h"
    """Training that may be lost with the machine, by time: `90s`, `30m`, `1h`, `1h30m`, `1d`."""
    recovery_time: str = "30m"
    """From a bare folder to the first finished step."""
    steps: int = 10
    """Trained twice: once undisturbed, once with kills in between."""


def parse_time(text: str) -> float:
    """Seconds of `90s`, `30m`, `1h30m`, `1d`. Raises ValueError."""
    if not _TIME.fullmatch(text):
        raise ValueError(f"{text!r} is not a length of time")
    return sum(int(number) * _UNITS[unit] for number, unit in re.findall(r"([0-9]+)([smhd])", text))


def wrong_drill(section: DrillSection) -> Iterator[tuple[str, str]]:
    """Each setting that cannot be, with what to do."""
    for key in ("recovery_point", "recovery_time"):
        text = getattr(section, key)
        if not _TIME.fullmatch(text) or not parse_time(text):
            yield f"drill.{key} = {text!r} is not a length of time", "write for example 90s, 30m, 1h or 1h30m"
    if not 1 <= section.steps < 10**6:
        yield f"drill.steps = {section.steps} is out of range", "use a few steps, 10 say"
