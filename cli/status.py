"""`perdure status`: where a run stands, read from its directory alone, whoever runs it."""

import argparse
import time
from typing import Any

import msgspec

from perdure.cli import render, thaw
from perdure.cli.target import Target, add_target, resolve
from perdure.tasks import flow_runs
from perdure.training import events, files
from perdure.training.agent import lock
from perdure.training.checkpoint import catalog, facts, lineage
from perdure.training.run_dir import RunDir

_Status = dict[str, Any]  # Any: JSON values


def add_arguments(parser: argparse.ArgumentParser) -> None:
    add_target(parser)


def read_progress(run: RunDir) -> _Status | None:
    """What the newest agent published last."""
    try:
        progress = msgspec.json.decode(files.read_limited(run.progress_json, 4096))
    except (OSError, ValueError):
        return None
    return progress if isinstance(progress, dict) and isinstance(progress.get("step"), int) else None


def collect(target: Target) -> _Status:
    """The JSON object of `status --json`."""
    run, launches = target.run, lineage.read_launches(target.run)
    names = catalog.candidates(run)
    held, progress = lock.is_held(run), read_progress(run)
    committed = names[0].step if names else 0
    live = progress if held and progress and progress.get("token") == max(launches, default=-1) else None
    state = _state(target, names, launches, held, live)
    status: _Status = {
        "run_id": target.info.id if target.info else None,
        "name": target.name,
        "run_dir": str(run.root),
        "state": state,
        "step": max(live["step"], committed) if live else committed,
        "total_steps": target.steps,
        "launches": len(launches),
        "newest_committed_step": names[0].step if names else None,
        "newest_verified_step": _step(catalog.newest_with(run, facts.GOOD)),
        "newest_replicated_step": _step(catalog.newest_in(run, facts.STORE)),
        "newest_archived_step": _step(catalog.newest_with(run, ("archived",))),
        "places": {place: _step(catalog.newest_in(run, place)) for place in target.places},
        "thaws": list(thaw.states(run).values()),
        "store_url": target.store_url or None,
        "holder": _holder(run) if held else None,
        "trainer": _trainer(live) if live else None,
        "flow_run": _flow_run(run),
        "last_failure": _last_failure(run, launches, state),
    }
    return status


def _step(name: Any) -> int | None:  # Any: a CheckpointName or None
    return name.step if name is not None else None


def _state(target: Target, names: list[Any], launches: dict[int, Any], held: bool, live: _Status | None) -> str:  # Any: records
    """new, running, stopping, stopped, failed, complete or complete_not_replicated."""
    if held:
        return "stopping" if target.run.stop_request.exists() or (live or {}).get("state") == "stopping" else "running"
    if names and names[0].step >= target.steps:
        newest = catalog.newest_in(target.run, facts.STORE)
        return "complete" if not target.store_url or newest == names[0] else "complete_not_replicated"
    if not launches:
        return "new"
    end = lineage.read_end(target.run, max(launches))
    return "stopped" if end is not None and end.reason == "stopped" else "failed"


def _holder(run: RunDir) -> _Status | None:
    holder = lock.read_holder(run)
    return {"pid": holder.process.pid, "host": holder.process.host, "since": holder.since} if holder else None


def _flow_run(run: RunDir) -> _Status | None:
    """The newest that drove it."""
    records = flow_runs.read(run)
    return {"id": records[-1].id, "page": records[-1].page or None} if records else None


def _trainer(live: _Status) -> _Status:
    quiet = round(max(0.0, time.time() - float(live.get("time", 0))), 1)
    return {
        "launch": live.get("token"),
        "state": live.get("state"),
        "counter": live.get("counter"),
        "seconds_since_beat": quiet,
        "slow_ranks": live.get("slow", {}),
    }


def _last_failure(run: RunDir, launches: dict[int, Any], state: str) -> _Status | None:  # Any: records
    """That of the newest launch that failed: in its own words, else in the flow's, else in ours."""
    going = max(launches, default=0) if state not in ("failed", "stopped") else 0
    told = {event.data.get("token"): event for event in events.read(run) if event.kind == "failed"}
    for token in sorted(launches, reverse=True):
        end, event = lineage.read_end(run, token), told.get(token)
        if end is not None and end.reason == "failed":
            words = {"class": end.error_class, "step": end.step, "detail": end.detail, "time": end.ended}
            return {"launch": token, **words, "log_tail": end.log_tail}
        if end is None and event is not None:
            words = {"class": event.data.get("error_class"), "step": event.data.get("step"), "detail": event.data.get("detail")}
            return {"launch": token, **words, "time": event.time, "log_tail": event.data.get("log_tail", "")}
        if end is None and token != going:
            detail = "left no word: killed, or its machine was lost"
            return {"launch": token, "class": "infrastructure", "step": None, "detail": detail, "time": None, "log_tail": ""}
    return None


def run(args: argparse.Namespace) -> int:
    status = collect(resolve(args.target, args.set))
    if args.json:
        render.print_json(status)
    else:
        for label, text in lines(status):
            print(f"{label:<14}{render.visible(text)}")
    return 0


def lines(status: _Status) -> list[tuple[str, str]]:
    """What people read."""
    total, step = status["total_steps"], status["step"]
    shown = [("run", f"{status['name']} ({status['run_id'] or 'not started'})"), ("directory", status["run_dir"])]
    shown += [
        ("state", status["state"].replace("_", " ")),
        ("step", f"{step} of {total} ({step / total:.0%}), {render.counted(status['launches'], 'launch', 'launches')}"),
    ]
    newest = [
        f"{word} {status[f'newest_{word}_step']}"
        for word in ("committed", "verified", "replicated", "archived")
        if status[f"newest_{word}_step"] is not None
    ]
    shown += [("newest", ", ".join(newest) or "no checkpoint yet"), ("store", status["store_url"] or "none")]
    if tiers := [f"{place} {_at(step)}" for place, step in status["places"].items() if place != facts.STORE]:
        shown.append(("tiers", ", ".join(tiers)))
    shown += [("thaw", thaw.line(one)) for one in status["thaws"]]
    if status["holder"]:
        holder = status["holder"]
        shown.append(("held by", f"process {holder['pid']} on {holder['host']} since {render.when(holder['since'])}"))
    if status["trainer"]:
        trainer = status["trainer"]
        beat = render.age(trainer["seconds_since_beat"])
        shown.append(("trainer", f"launch {trainer['launch']}, {trainer['state']}, last beat {beat} ago"))
        if slow := [f"rank {rank} ({secs:.3g} s of work in a step)" for rank, secs in trainer["slow_ranks"].items()]:
            shown.append(("slow", ", ".join(slow)))
    if status["flow_run"] and status["flow_run"]["page"]:
        shown.append(("page", status["flow_run"]["page"]))
    if status["last_failure"]:
        shown.append(("last failure", _describe(status["last_failure"])))
    return shown


def _at(step: int | None) -> str:
    return "holds none of these" if step is None else f"to step {step}"


def _describe(failure: _Status) -> str:
    where = f" at step {failure['step']}" if failure["step"] is not None else ""
    ago = f", {render.age(time.time() - failure['time'])} ago" if failure["time"] is not None else ""
    return f"{failure['class']}{where}, launch {failure['launch']}{ago}: {failure['detail']}"
