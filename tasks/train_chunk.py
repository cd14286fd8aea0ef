"""One chunk of a run: lease it (and the one after it, so ranks never idle at the boundary), wait until its last checkpoint is
committed. Called directly in the flow's main thread, so that SIGTERM reaches it."""

import json
import os
import time
from collections.abc import Callable
from typing import Any

from prefect import task
from prefect.cache_policies import NO_CACHE

from perdure.tasks.pulse import CHUNK, pulse
from perdure.training import events
from perdure.training.agent.launch import Trainer
from perdure.training.checkpoint import lineage
from perdure.training.errors import PerdureError, Stopped
from perdure.training.run_dir import CheckpointName, RunDir

_TAIL_BYTES = 1 << 20
_LOOK_SECS = 1.0
"""Between two looks for checkpoints inside the chunk: one asked for by `session.save()` may come at any step."""


class LaunchEnded(PerdureError):
    """The launch ended before the chunk's checkpoint was committed; the restart decision comes next."""


@task(name="train_chunk", task_run_name="train {start}-{end}", cache_policy=NO_CACHE, persist_result=False)
def train_chunk(
    trainer: Trainer, start: int, end: int, committed: Callable[[CheckpointName], None]
) -> dict[str, Any]:  # Any: JSON values, shown in the UI
    """Train steps `start`..`end`; `committed` hears of each checkpoint before `end`, within a second. Raises LaunchEnded, or
    Stopped when somebody asked the run to stop."""
    told: set[CheckpointName] = set()
    look = 0.0

    def each_poll() -> None:
        nonlocal look
        if trainer.run.stop_request.exists():
            raise Stopped(_reason(trainer.run))
        if time.monotonic() >= look:
            look = time.monotonic() + _LOOK_SECS
            for name in lineage.committed(trainer.run):
                if name.token == trainer.token and start <= name.step < end and name not in told:
                    told.add(name)
                    committed(name)

    began = time.monotonic()
    trainer.lease(min(end + trainer.config.run.chunk, trainer.config.run.steps))

    if not trainer.wait_for_checkpoint(end, each_poll):
        raise LaunchEnded(f"launch {trainer.token} ended before step {end} was committed")
    figures = chunk_figures(trainer.run, trainer.token, start, end)
    seconds = figures.pop("seconds", time.monotonic() - began)
    result = {"start": start, "end": end, "token": trainer.token, "seconds": round(seconds, 3), "loss": figures.get("loss")}
    events.record(trainer.run, "chunk_finished", **result)
    pulse(CHUNK, end)
    return result


def _reason(run: RunDir) -> str:
    try:
        return run.stop_request.read_text()[:200].strip() or "asked to stop"
    except OSError:
        return "asked to stop"


def chunk_figures(run: RunDir, token: int, start: int, end: int) -> dict[str, float]:
    """Mean loss of the chunk's steps and the seconds they took, as far as the tail of the metrics file tells."""
    try:
        with open(run.metrics(token), "rb") as file:
            file.seek(max(0, file.seek(0, os.SEEK_END) - _TAIL_BYTES))
            lines = file.read().splitlines()
    except FileNotFoundError:
        return {}
    rows = [row for row in map(_parse, lines) if start <= row.get("step", -1) <= end]
    losses = [row["loss"] for row in rows if isinstance(row.get("loss"), (int, float))]
    figures = {"loss": sum(losses) / len(losses)} if losses else {}
    if len(rows) > 1:  # the first row has no beginning: scale the time between the rows up to all steps
        figures["seconds"] = (rows[-1]["time"] - rows[0]["time"]) * len(rows) / (len(rows) - 1)
    return figures


def _parse(line: bytes) -> dict[str, float]:
    """A metrics line; empty for one torn by a crash or by the cut at the beginning."""
    try:
        row = json.loads(line)
    except ValueError:
        return {}
    return row if isinstance(row, dict) else {}
