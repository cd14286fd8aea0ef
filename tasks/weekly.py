"""The digest of a run over some days: what it made, what it lost, what it cost, and what to do next.

Read from its directory alone; the weekly report and the `report` verb show the same numbers."""

import itertools
import time
from collections import Counter
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from typing import Any

from perdure.tasks.curve import Curve, Trace
from perdure.tasks.ledger import PARTS, TRAINING, Ledger, account
from perdure.training import events, watchdog
from perdure.training.amounts import counted, size, span
from perdure.training.checkpoint import catalog, lineage
from perdure.training.checkpoint.catalog import Listed
from perdure.training.checkpoint.facts import GOOD
from perdure.training.checkpoint.lineage import LaunchEnd, LaunchRecord
from perdure.training.checkpoint.run_info import RunInfo, read_run_info
from perdure.training.events import Event
from perdure.training.redact import redact
from perdure.training.run_dir import CheckpointName, RunDir


@dataclass(frozen=True, kw_only=True)
class Digest:
    """Counts are those of the last `days`; ages, space and state are those of now."""

    name: str
    run_dir: str
    days: float
    state: str
    step: int
    total_steps: int
    steps_made: int
    chunks: int
    launches: int
    failures: dict[str, int]
    """By class."""
    lost_steps: int
    """Trained, not saved, and trained again."""
    verified_step: int | None
    verified_age: float | None
    """Seconds since that state was the newest in memory."""
    replicated_step: int | None
    replicated_age: float | None
    quarantined: int
    bytes_on_disk: int
    bytes_in_store: int
    """Of what is here too; what is only in the store is not counted."""
    times: dict[str, float]
    """Seconds of each part; they add up to the time looked at."""
    next_action: str

    @property
    def training_share(self) -> float | None:
        total = sum(self.times.values())
        return self.times[TRAINING] / total if total else None

    @property
    def empty(self) -> bool:
        """Whether nothing at all happened."""
        return not (self.steps_made or self.launches or self.failures)

    def json(self) -> dict[str, Any]:  # Any: JSON values
        return {**asdict(self), "training_share": self.training_share}


def digest(run: RunDir, days: float, *, now: float | None = None) -> Digest:
    """Raises CheckpointNotFound where there is no run."""
    now = time.time() if now is None else now
    since = now - days * 86400
    info = read_run_info(run)
    run = RunDir(run.root, run.store or info.store_url)
    look, listed = watchdog.look(run), catalog.list_checkpoints(run)
    curve = Curve(run, info.steps)
    curve.read()
    launches = lineage.read_launches(run)
    ends = {token: end for token in launches if (end := lineage.read_end(run, token)) is not None}
    log = list(events.read(run))
    recent = [event for event in log if event.time >= since]
    state = "running" if look.held else watchdog.judge(look, look).state
    verified, replicated = _newest(listed), _newest([one for one in listed if one.in_store])
    return Digest(
        name=info.name,
        run_dir=str(run.root),
        days=days,
        state=state,
        step=look.newest_step,
        total_steps=info.steps,
        steps_made=max(0, _reached(log) - _reached([event for event in log if event.time < since])),
        chunks=sum(event.kind == "chunk_finished" for event in recent),
        launches=sum(record.created >= since for record in launches.values()),
        failures=dict(Counter(str(event.data.get("error_class", "?")) for event in recent if event.kind == "failed")),
        lost_steps=_lost(launches, ends, curve.traces, since),
        verified_step=verified.name.step if verified else None,
        verified_age=_age(verified, now),
        replicated_step=replicated.name.step if replicated else None,
        replicated_age=_age(replicated, now),
        quarantined=sum(one.trust == "quarantined" for one in listed),
        bytes_on_disk=sum(one.bytes_on_disk for one in listed),
        bytes_in_store=sum(one.manifest.stored_bytes for one in listed if one.in_store and one.manifest),
        times=_times(launches, ends, curve.traces, log, since, now, live=look.held),
        next_action=_next(info, state, look, listed, replicated),
    )


def _newest(listed: Sequence[Listed]) -> Listed | None:
    return next((one for one in reversed(listed) if one.in_lineage and one.trust in GOOD), None)


def _age(one: Listed | None, now: float) -> float | None:
    return max(0.0, now - one.manifest.created) if one and one.manifest else None


def _reached(log: Sequence[Event]) -> int:
    """The highest step that was committed."""
    steps = [event.data.get("step", 0) for event in log if event.kind in ("checkpoint_committed", "verified", "completed")]
    return max((step for step in steps if isinstance(step, int)), default=0)


def _lost(launches: dict[int, LaunchRecord], ends: dict[int, LaunchEnd], traces: dict[int, Trace], since: float) -> int:
    """What each launch trained beyond the step the next one began at; told in the days of the next one."""
    tokens, lost = sorted(launches), 0
    for token, following in itertools.pairwise(tokens):
        start = CheckpointName.parse(launches[following].resumed_from or "")
        reached = max(traces[token].last_step if token in traces else 0, ends[token].step if token in ends else 0)
        if launches[following].created >= since:
            lost += max(0, reached - (start.step if start else 0))
    return lost


def _times(
    launches: dict[int, LaunchRecord],
    ends: dict[int, LaunchEnd],
    traces: dict[int, Trace],
    log: list[Event],
    since: float,
    now: float,
    *,
    live: bool,
) -> dict[str, float]:
    """The whole ledger less that of the days before."""
    whole = account(launches, ends, traces, log, now=now, live=live)
    if whole.began >= since:
        return _rounded(whole, {})
    # All launches, so that what was lost is the same in both; those that began later have no length yet.
    before = account(launches, ends, traces, [event for event in log if event.time < since], now=since, live=False)
    return _rounded(whole, before.parts)


def _rounded(whole: Ledger, before: dict[str, float]) -> dict[str, float]:
    return {part: round(max(0.0, whole.parts[part] - before.get(part, 0.0)), 3) for part in PARTS}


def _next(info: RunInfo, state: str, look: watchdog.Look, listed: Sequence[Listed], replicated: Listed | None) -> str:
    if state == "dead":
        return "it is dead: `perdure watchdog`, or `perdure run` goes on"
    if state == "refused":
        return f"{look.refused}; cure that, then `perdure run`"
    if any(one.trust == "quarantined" for one in listed):
        return "a checkpoint is damaged: `perdure scrub`"
    if info.store_url and state == "complete" and (replicated is None or replicated.name.step < look.newest_step):
        return "not everything is in the store: `perdure run` only pushes"
    return "`perdure run` goes on" if state == "stopped" else ""


def markdown(found: Digest) -> str:
    """For the artifact and for Slack: short lines, no table that a telephone cannot show."""
    share = f"{found.training_share:.0%}" if found.training_share is not None else "-"
    failures = ", ".join(f"{count} x {kind}" for kind, count in sorted(found.failures.items())) or "none"
    other = sorted(((secs, part) for part, secs in found.times.items() if part != TRAINING and secs >= 1), reverse=True)
    lines = [
        f"- state: {found.state}, step {found.step:,} of {found.total_steps:,}",
        f"- made: {counted(found.steps_made, 'step')} in {counted(found.chunks, 'chunk')}, "
        f"{counted(found.launches, 'launch', 'launches')}",
        f"- failures: {failures}; lost steps: {found.lost_steps:,}",
        f"- newest verified: {_said(found.verified_step, found.verified_age)}",
        f"- newest in the store: {_said(found.replicated_step, found.replicated_age)}",
        f"- space: {size(found.bytes_on_disk)} here, {size(found.bytes_in_store)} of it in the store too",
        f"- training: {share} of the time; rest: {', '.join(f'{part} {span(secs)}' for secs, part in other) or 'none'}",
        f"- next: {found.next_action or 'nothing to do'}",
    ]
    return redact("\n".join(lines))


def _said(step: int | None, age: float | None) -> str:
    if step is None:
        return "none yet"
    return f"step {step:,}" + (f", {span(age)} old" if age is not None else "")
