"""One chunk of a run: lease it (and the one after it, so ranks never idle at the boundary), wait until its last checkpoint is
committed. Called directly in the flow's main thread, so that SIGTERM reaches it."""

import time
from typing import Any

from prefect import task
from prefect.cache_policies import NO_CACHE

from perdure.training import events
from perdure.training.agent.launch import Trainer
from perdure.training.errors import PerdureError, Stopped
from perdure.training.run_dir import RunDir


class LaunchEnded(PerdureError):
    """The launch ended before the chunk's checkpoint was committed; the restart decision comes next."""


@task(name="train_chunk", task_run_name="train {start}-{end}", cache_policy=NO_CACHE, persist_result=False)
def train_chunk(trainer: Trainer, start: int, end: int) -> dict[str, Any]:  # Any: JSON values, shown in the UI
    """Train steps `start`..`end`. Raises LaunchEnded, or Stopped when somebody asked the run to stop."""
    began = time.monotonic()
    trainer.lease(min(end + trainer.config.run.chunk, trainer.config.run.steps))

    def check_stop() -> None:
        if trainer.run.stop_request.exists():
            raise Stopped(_reason(trainer.run))

    if not trainer.wait_for_checkpoint(end, check_stop):
        raise LaunchEnded(f"launch {trainer.token} ended before step {end} was committed")
    seconds = round(time.monotonic() - began, 3)
    loss = latest_loss(trainer.run, trainer.token)
    events.record(trainer.run, "chunk_finished", token=trainer.token, start=start, end=end, seconds=seconds, loss=loss)
    return {"start": start, "end": end, "seconds": seconds, "loss": loss, "token": trainer.token}


def _reason(run: RunDir) -> str:
    try:
        return run.stop_request.read_text()[:200].strip() or "asked to stop"
    except OSError:
        return "asked to stop"


def latest_loss(run: RunDir, token: int) -> float | None:
    """The newest loss the launch has logged, from the tail of its metrics file."""
    import json

    try:
        with open(run.metrics(token), "rb") as file:
            file.seek(max(0, file.seek(0, 2) - 65536))
            lines = file.read().splitlines()[1:] or [b""]
    except FileNotFoundError:
        return None
    for line in reversed(lines):
        try:
            loss = json.loads(line).get("loss")
        except ValueError:
            continue
        if isinstance(loss, (int, float)):
            return float(loss)
    return None
