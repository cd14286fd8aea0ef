"""The prune flow, by default hourly: deletes what retention lets go, beside training too; says so when there is nothing."""

from typing import Any

from prefect import flow

from perdure.tasks.prune import prune as prune_run
from perdure.training.config import load_config


@flow(name="prune", retries=0)
def prune(config: str, overrides: list[str] | None = None, dry_run: bool = False) -> dict[str, Any]:  # Any: JSON values
    """Delete what the [retention] of the run.toml at `config` lets go, and what crashes left; first milestones are rolled up
    whose base nothing else needs. `dry_run`: only say what would go."""
    done: dict[str, Any] = prune_run(load_config(config, overrides or []), dry_run)
    return done
