"""The one restart decision: class decides the reaction, progress protects, a crash loop stops and says why.

Pure over what the run directory tells; used by the flow itself, its hooks, and the parent of `perdure run`."""

from collections.abc import Sequence
from dataclasses import dataclass

from perdure.training.checkpoint import lineage
from perdure.training.checkpoint.lineage import LaunchEnd, LaunchRecord
from perdure.training.run_dir import CheckpointName, RunDir

MAX_WITHOUT_PROGRESS = 5
"""Launches in a row that committed nothing new, whatever ended them."""
FIRST_DELAY_SECS = 1.0
LONGEST_DELAY_SECS = 60.0
_RETRIES = {"user": 0, "config": 0, "oom": 1, "nan": 1}
"""How often a class is tried again without progress in between; others up to MAX_WITHOUT_PROGRESS."""
_SAYS = {
    "user": "an error in the training code would only repeat itself",
    "config": "a setting has to be changed first",
    "oom": "it ran out of memory again",
    "nan": "the replay from a verified checkpoint became non-finite again",
}


@dataclass(frozen=True, kw_only=True)
class Attempt:
    """One ended launch (or one flow process that died before launching)."""

    error_class: str
    progress: bool
    """It committed at least one checkpoint newer than the one it started from."""


@dataclass(frozen=True, kw_only=True)
class Decision:
    restart: bool
    delay: float
    """Seconds to wait before it."""
    reason: str
    """One clause for people: what happens next and why."""


def decide(attempts: Sequence[Attempt]) -> Decision:
    """What to do after the last of `attempts` (oldest first)."""
    if not attempts:
        return Decision(restart=True, delay=0.0, reason="starting")
    stuck = 0
    for attempt in reversed(attempts):
        stuck += 1
        if attempt.progress:
            stuck -= 1
            break
    last = attempts[-1]
    same = 0
    for attempt in reversed(attempts):
        if attempt.error_class != last.error_class:
            break
        same += 1
        if attempt.progress:
            break
    allowed = _RETRIES.get(last.error_class, MAX_WITHOUT_PROGRESS)
    if same > allowed and last.error_class in _RETRIES:
        return Decision(restart=False, delay=0.0, reason=f"not restarting: {_SAYS[last.error_class]}")
    if stuck >= MAX_WITHOUT_PROGRESS:
        return Decision(restart=False, delay=0.0, reason=f"not restarting: {stuck} launches in a row made no progress")
    delay = 0.0 if last.progress else min(FIRST_DELAY_SECS * 2 ** (stuck - 1), LONGEST_DELAY_SECS)
    return Decision(restart=True, delay=delay, reason=f"restarting in {delay:g} s from the newest checkpoint that verifies")


def attempts_of(run: RunDir, since: int) -> list[Attempt]:
    """The failed launches with tokens from `since` on, oldest first: those of the present budget. A person who starts the run
    again begins a new budget; an automatic restart carries `since` along."""
    newest: dict[int, int] = {}
    for folder in run.checkpoints.iterdir() if run.checkpoints.is_dir() else ():
        name = CheckpointName.parse(folder.name)
        if name and run.manifest(name).exists():
            newest[name.token] = max(newest.get(name.token, 0), name.step)
    attempts = []
    for token, record in sorted(lineage.read_launches(run).items()):
        end = lineage.read_end(run, token)
        if token >= since and (end is None or end.reason == "failed"):
            attempts.append(Attempt(error_class=_class_of(end), progress=_progress(record, newest.get(token, 0))))
    return attempts


def _class_of(end: LaunchEnd | None) -> str:
    return end.error_class if end else "infrastructure"


def _progress(record: LaunchRecord, newest_step: int) -> bool:
    start = CheckpointName.parse(record.resumed_from or "")
    return newest_step > (start.step if start else 0)
