"""Is a run alive? Judged from two looks at its directory: by the heartbeat counter and the lock, never by the clock alone.

Looking changes nothing. Only `dead` and `frozen` ask for anything to be done; whatever is in doubt is left alone."""

import time
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path

import msgspec

from perdure.training import events, files
from perdure.training.agent import lock
from perdure.training.checkpoint import lineage
from perdure.training.checkpoint.lineage import LaunchEnd
from perdure.training.checkpoint.run_info import read_run_info
from perdure.training.process import ProcessId
from perdure.training.run_dir import RunDir

STALLED_SECS = 900.0
LOST_LIFELINE = "the flow process is gone"
"""What an agent gives as the reason when it saved and left because nobody drove it any more."""
_DEPTH = 4


class _Beat(msgspec.Struct, frozen=True, kw_only=True):
    counter: int = -1
    token: int = -1
    step: int = 0
    state: str = ""


@dataclass(frozen=True, kw_only=True)
class Look:
    """What a run directory said at one moment."""

    steps: int
    newest_step: int
    token: int
    """Of the newest launch; 0 where there is none."""
    end: LaunchEnd | None
    beat: _Beat
    held: bool
    driver: ProcessId | None
    agent: ProcessId | None
    stop_asked: bool
    stopped: str = ""
    """Why somebody stopped it after the newest launch began."""
    refused: str = ""
    """What the decision said when it was decided not to restart."""
    restarts: int = 0
    """By watchdogs, since the newest launch began."""
    quiet: float = 0.0
    """Seconds since anything was logged, committed or launched."""


@dataclass(frozen=True, kw_only=True)
class Verdict:
    state: str
    """new, alive, stalled, frozen, draining, stopped, complete, refused or dead."""
    reason: str

    @property
    def needs_help(self) -> bool:
        return self.state in ("dead", "frozen")


def look(run: RunDir) -> Look:
    """Raises CheckpointNotFound where there is no run."""
    info, launches, names = read_run_info(run), lineage.read_launches(run), lineage.lineage(run)
    token = max(launches, default=0)
    began = launches[token].created if token else info.created
    stopped, refused, restarts = "", "", 0
    for event in events.read(run):
        if event.kind in ("launch_started", "recovered"):
            stopped, refused, restarts = "", "", 0
        elif event.kind == "stopped" and event.data.get("reason") != LOST_LIFELINE:
            stopped = str(event.data.get("reason") or "stopped")
        elif event.kind == "failed" and str(event.data.get("next", "")).startswith("not restarting"):
            refused = str(event.data["next"])
        elif event.kind == "restarted":
            stopped, restarts = "", restarts + 1
    holder = lock.read_holder(run)
    return Look(
        steps=info.steps,
        newest_step=names[0].step if names else 0,
        token=token,
        end=lineage.read_end(run, token) if token else None,
        beat=_read_beat(run),
        held=lock.is_held(run),
        driver=holder.process if holder else None,
        agent=lock.read_agent(run),
        stop_asked=run.stop_request.exists(),
        stopped=stopped,
        refused=refused,
        restarts=restarts,
        quiet=time.time() - max([began, *_signs(run, token)]),
    )


def _read_beat(run: RunDir) -> _Beat:
    try:
        return msgspec.json.decode(files.read_limited(run.progress_json, 4096), type=_Beat)
    except (OSError, ValueError):
        return _Beat()


def _signs(run: RunDir, token: int) -> Iterable[float]:
    paths = [run.metrics(token), *(run.manifest(name) for name in lineage.lineage(run)[:1])]
    return [path.stat().st_mtime for path in paths if path.exists()]


def judge(before: Look, now: Look) -> Verdict:
    """Of two looks at one run, some seconds apart."""
    if now.held:
        return _judge_held(before, now)
    if before.held or before.token != now.token:
        return Verdict(state="alive", reason="it changed hands while we looked")
    if now.newest_step >= now.steps:
        return Verdict(state="complete", reason=f"all {now.steps} steps are saved")
    if not now.token:
        return Verdict(state="new", reason="it was never launched")
    if now.stop_asked or now.stopped:
        return Verdict(state="stopped", reason=now.stopped or "somebody asked it to stop")
    if now.end is not None and now.end.reason == "stopped" and now.end.detail != LOST_LIFELINE:
        return Verdict(state="stopped", reason=now.end.detail)
    if now.end is not None and now.end.reason == "complete":
        return Verdict(state="complete", reason=f"launch {now.token} completed; its steps or checkpoints changed since")
    if now.refused:
        return Verdict(state="refused", reason=now.refused)
    return Verdict(state="dead", reason=f"no process holds it, and step {now.newest_step} of {now.steps} is its last")


def _judge_held(before: Look, now: Look) -> Verdict:
    """Somebody holds the lock. Between two launches only a driver does, which beats no counter: that is no sign of death."""
    launching = now.token != before.token or now.beat.token != now.token
    beats = now.beat.counter != before.beat.counter or now.beat.token != before.beat.token
    driven = now.driver is not None and (not now.driver.is_here or now.driver.is_alive())
    if now.stop_asked or (beats and not driven):
        return Verdict(state="draining", reason="it saves and stops")
    standing = now.agent is not None and now.agent.is_alive() and before.agent == now.agent
    if not beats and not launching and now.end is None and standing and before.held:
        reason = f"the heartbeat of launch {now.token} stands still at {now.beat.counter}, though its agent exists"
        return Verdict(state="frozen", reason=reason)
    if now.beat.state == "training" and now.beat.step == before.beat.step and now.quiet > STALLED_SECS and now.end is None:
        reason = f"no step for {now.quiet:.0f} s after step {now.beat.step}; its own hang detection acts on that"
        return Verdict(state="stalled", reason=reason)
    return Verdict(state="alive", reason=f"step {max(now.beat.step, now.newest_step)} of {now.steps}")


def budget_start(run: RunDir) -> int:
    """The first launch of the present restart budget: after the last one that ended well or was stopped by somebody."""
    ends = (lineage.read_end(run, token) for token in lineage.read_launches(run))
    ended = [end.token for end in ends if end and end.reason != "failed" and end.detail != LOST_LIFELINE]
    return max(ended, default=0) + 1


def find_runs(place: Path) -> list[RunDir]:
    """The run directory `place`, or all that lie in that folder, a few levels deep. A store or a tier has a run.json too, but
    nothing ever happened there."""
    found, level = [], [place]
    for _ in range(_DEPTH):
        found += [folder for folder in level if RunDir(folder).run_json.is_file() and RunDir(folder).events.exists()]
        below = [folder for folder in level if not RunDir(folder).run_json.is_file()]
        level = sorted(child for folder in below for child in _folders(folder))
    return [RunDir(folder) for folder in found]


def _folders(folder: Path) -> list[Path]:
    try:
        return [child for child in folder.iterdir() if child.is_dir() and not child.is_symlink() and child.name[0] != "."]
    except (FileNotFoundError, PermissionError):
        return []
