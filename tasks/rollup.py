"""Roll up one increment beside training: a full of it and its base, so that the base may go. A busy run is left for later."""

from pathlib import Path
from typing import Any

from prefect import task
from prefect.cache_policies import NO_CACHE

from perdure.tasks import background
from perdure.training.checkpoint.rollup import roll_up
from perdure.training.checkpoint.upkeep import try_upkeep
from perdure.training.run_dir import CheckpointName, RunDir


@task(name="rollup", task_run_name="rollup {name}", cache_policy=NO_CACHE, persist_result=False)
def rollup(root: str, name: str) -> dict[str, Any]:  # Any: JSON values, shown in the UI
    background.yield_to_training()
    run, parsed = RunDir(Path(root)), CheckpointName.parse(name)
    assert parsed is not None
    with try_upkeep(run) as ours:
        if not ours:
            return {"checkpoint": name, "rolled_up": False}
        found = roll_up(run, parsed)
    return {"checkpoint": name, "rolled_up": True, "stored_bytes": found.stored_bytes}
