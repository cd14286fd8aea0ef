"""The prune flow, by default hourly: deletes what retention lets go, beside training too; says so when there is nothing."""

from typing import Any

from prefect import flow

from perdure.tasks.blocks import load_secrets
from perdure.tasks.prune import prune as prune_run
from perdure.training.config import load_config
from perdure.training.errors import StoreError


@flow(name="prune", retries=0)
def prune(config: str, overrides: list[str] | None = None, dry_run: bool = False) -> dict[str, Any]:  # Any: JSON values
    """Delete what the [retention] of the run.toml at `config` lets go, and what crashes left; first milestones are rolled up
    whose base nothing else needs. Then the same in the store and in each tier that has a retention. `dry_run`: only say what
    would go.

    Fails when a place could not be pruned; all others are."""
    checked = load_config(config, overrides or [])
    load_secrets(checked)
    done: dict[str, Any] = prune_run(checked, dry_run)
    if problems := [f"{word}: {one['problem']}" for word, one in done["places"].items() if one["problem"]]:
        raise StoreError(f"{checked.run_dir}: not pruned: {'; '.join(problems)}"[:2000], hint="the next schedule goes on")
    return done
