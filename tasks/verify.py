"""Prove one checkpoint: read every stored byte back, decode it, compare digests, record the fact."""

import time
from typing import Any

from prefect import task
from prefect.cache_policies import NO_CACHE

from perdure.tasks import background
from perdure.training import events
from perdure.training.checkpoint import verify as checker
from perdure.training.checkpoint.parted import is_part
from perdure.training.errors import CheckpointNotFound
from perdure.training.run_dir import CheckpointName, RunDir


def prove(run: RunDir, name: CheckpointName, *, threads: int = 1, whole: bool = False) -> bool:
    """True when it is good; a damaged one is quarantined by the recorded fact, and the run's log says why. Of one that is here
    in part, good is that it can be read, unless the `whole` is to be."""
    began, part = time.monotonic(), is_part(run, name)
    try:
        fact = checker.check(run, name, threads=threads, whole=whole)
    except CheckpointNotFound:
        return False  # pruned meanwhile
    if fact.result == "good" and part:
        return True
    if fact.result == "good":
        events.record(run, "verified", step=name.step, name=str(name), seconds=round(time.monotonic() - began, 3))
        return True
    events.record(run, "quarantined", step=name.step, name=str(name), reason="; ".join(fact.damage[:5])[:2000])
    return False


@task(name="verify", task_run_name="verify {name}", cache_policy=NO_CACHE, persist_result=False)
def verify(root: str, name: str) -> dict[str, Any]:  # Any: JSON values, shown in the UI
    background.yield_to_training()
    from pathlib import Path

    parsed = CheckpointName.parse(name)
    assert parsed is not None
    return {"checkpoint": name, "good": prove(RunDir(Path(root)), parsed)}
