"""What a check of `perdure doctor` finds: one line, with the fix in it. Never a secret."""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Literal

from perdure.training.config import RunConfig
from perdure.training.errors import PerdureError

Level = Literal["ok", "warn", "fail", "skip"]


@dataclass(frozen=True, kw_only=True)
class Finding:
    check: str
    level: Level
    """skip: it could not be looked at, and `text` says why; that is no failure."""
    text: str
    fix: str = ""


@dataclass(frozen=True, kw_only=True)
class Subject:
    """What is examined."""

    config: RunConfig | None = None
    """None: only the machine and the server, not a run."""
    pool: str = ""
    """Empty: the one the run is deployed to."""


Check = Callable[[Subject], Iterator[Finding]]


def ok(check: str, text: str) -> Finding:
    return Finding(check=check, level="ok", text=text)


def warn(check: str, text: str, fix: str) -> Finding:
    return Finding(check=check, level="warn", text=text, fix=fix)


def fail(check: str, text: str, fix: str) -> Finding:
    return Finding(check=check, level="fail", text=text, fix=fix)


def skip(check: str, why: str) -> Finding:
    return Finding(check=check, level="skip", text=why)


def failed(check: str, error: PerdureError) -> Finding:
    return fail(check, str(error), error.hint or "see the message")


def skip_all(checks: Sequence[str], why: str) -> Iterator[Finding]:
    """The same reason for each."""
    for check in checks:
        yield skip(check, why)


def clock(check: str, whose: str, skew_secs: float, limit_secs: float) -> Finding:
    """Of a clock that differs by so much from ours (positive: ours is ahead); Date headers count whole seconds."""
    said = f"this machine's clock is {abs(skew_secs):.0f} s {'ahead of' if skew_secs > 0 else 'behind'} {whose}'s"
    if abs(skew_secs) > limit_secs:
        return fail(check, said, "set the clock (NTP) on both")
    if abs(skew_secs) > 5:
        return warn(check, said, "set the clock (NTP) on both")
    return ok(check, f"within a few seconds of {whose}'s")
