"""Attending to runs whose processes died without a word (their node with them): closed, cleared away, restarted.

Two looks some seconds apart decide what is dead; the one restart decision says what follows. What lives is not touched."""

import contextlib
import fcntl
import os
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING

from perdure.flows.restart import Attempt, Decision, attempts_of, decide
from perdure.training import events, files
from perdure.training.agent.lock import RunLock, end_agent, is_held
from perdure.training.amounts import counted
from perdure.training.config import load_config
from perdure.training.errors import PerdureError, RunBusy
from perdure.training.run_dir import RunDir
from perdure.training.watchdog import Look, Verdict, budget_start, judge, look

if TYPE_CHECKING:
    from prefect.client.orchestration import SyncPrefectClient

PATIENCE_SECS = 30.0
"""Between the two looks; an agent beats about once a second."""
_FREE_SECS = 10.0


@dataclass(frozen=True, kw_only=True)
class Attended:
    """One run, what it was found to be, and what was done or would be."""

    run: RunDir
    verdict: Verdict
    action: str = ""
    flow_run: str = ""


@dataclass(frozen=True, kw_only=True)
class Means:
    """How a watchdog may act. `client`: a Prefect server it can ask; `detach`: starts `perdure run` where no deployment is."""

    client: "SyncPrefectClient | None" = None
    detach: Callable[[Path], int] | None = None
    dry_run: bool = False
    say: Callable[[str], None] = lambda _text: None


def watch(runs: Sequence[RunDir], patience: float, means: Means) -> list[Attended]:
    """Look at all runs twice, `patience` seconds apart, and help those that need it."""
    first = {run: look(run) for run in runs}
    if any(one.token or one.held for one in first.values()):
        time.sleep(patience)
    return [_attend(run, judge(before, look(run)), means) for run, before in first.items()]


def _attend(run: RunDir, verdict: Verdict, means: Means) -> Attended:
    if not verdict.needs_help:
        return Attended(run=run, verdict=verdict)
    if means.dry_run:
        return Attended(run=run, verdict=verdict, action=f"would act: {_decision(run, look(run)).reason}")
    with _alone(run) as alone:
        if not alone:
            return Attended(run=run, verdict=verdict, action="left alone: another watchdog helps it")
        return _help(run, verdict, means)


@contextlib.contextmanager
def _alone(run: RunDir) -> Iterator[bool]:
    """True for one watchdog at a time."""
    fd = os.open(run.watchdog_lock, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, files.FILE_MODE)
    try:
        fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        yield False
    else:
        yield True
    finally:
        os.close(fd)


def _help(run: RunDir, verdict: Verdict, means: Means) -> Attended:
    if verdict.state == "frozen":
        end_agent(run, grace=0.0)
        if not _wait_free(run):
            text = "its agent was killed; the flow that drives it goes on by itself"
            return Attended(run=run, verdict=verdict, action=text)
    try:
        return _restart(run, verdict, means)
    except RunBusy as busy:
        return Attended(run=run, verdict=verdict, action=f"left alone: {busy}")


def _wait_free(run: RunDir) -> bool:
    """Whether nobody drives the run once its agent is dead."""
    deadline = time.monotonic() + _FREE_SECS
    while is_held(run):
        holder = look(run).driver
        if (holder is not None and holder.is_alive()) or time.monotonic() > deadline:
            return False
        time.sleep(0.1)
    return True


def _restart(run: RunDir, verdict: Verdict, means: Means) -> Attended:
    """Under the run's lock nobody else acts on it: judge again, clear away, decide. The lock is let go of before the successor
    starts, which takes it."""
    with RunLock.acquire(run, orphan_wait=0.0):
        now = replace(look(run), held=False)
        again = judge(now, now)
        if again.state != "dead":
            return Attended(run=run, verdict=again, action="left alone: it changed meanwhile")
        end_agent(run, grace=0.0)
        config = config_of(run)
        decision = _decision(run, now)
        if means.client is not None:
            from perdure.tasks import watchdog as tasks

            closed = tasks.close_rows(means.client, run, config)
            means.say(
                f"closed in Prefect: {counted(closed, 'row')} of the dead flow run" if closed else "no open rows in Prefect"
            )
    if not decision.restart:
        _tell(run, now, decision.reason)
        return Attended(run=run, verdict=verdict, action=decision.reason)
    return _successor(run, verdict, now, config, means)


def _successor(run: RunDir, verdict: Verdict, now: Look, config: Path | None, means: Means) -> Attended:
    if means.client is not None:
        from perdure.tasks import watchdog as tasks

        found = tasks.route(means.client, run, config)
        if found is not None:
            if (open_one := tasks.waiting(means.client, found)) is not None:
                return Attended(run=run, verdict=verdict, action=f"flow run {open_one.id} goes on", flow_run=str(open_one.id))
            following = tasks.start_successor(found, since=budget_start(run), deaths=now.restarts)
            text = f"flow run {following.id} goes on from step {now.newest_step}"
            events.record(run, "restarted", by="watchdog", step=now.newest_step, reason=verdict.reason, next=text)
            return Attended(run=run, verdict=verdict, action=text, flow_run=str(following.id))
    if means.detach is not None and config is not None:
        pid = means.detach(config)
        text = f"`perdure run` (process {pid}) goes on from step {now.newest_step}"
        events.record(run, "restarted", by="watchdog", step=now.newest_step, reason=verdict.reason, next=text)
        return Attended(run=run, verdict=verdict, action=text)
    return Attended(run=run, verdict=verdict, action=f"to go on: perdure run {config or 'RUN.TOML'}")


def _decision(run: RunDir, now: Look) -> Decision:
    """The one restart decision; a restart that led to no launch counts as an attempt without progress."""
    lost = [Attempt(error_class="infrastructure", progress=False)] * now.restarts
    return decide([*attempts_of(run, budget_start(run)), *lost])


def _tell(run: RunDir, now: Look, following: str) -> None:
    """Once: the next look finds this word and leaves the run alone."""
    detail = "found dead by the watchdog"
    events.record(run, "failed", error_class="infrastructure", step=now.newest_step, detail=detail, next=following, page=True)


def config_of(run: RunDir) -> Path | None:
    """The run.toml that writes to this directory, where it lies in one of the usual places."""
    for folder in (run.root.parent.parent, run.root.parent, run.root):
        path = folder / "run.toml"
        with contextlib.suppress(PerdureError, OSError):
            if path.is_file() and load_config(path).run_dir == run.root:
                return path
    return None
