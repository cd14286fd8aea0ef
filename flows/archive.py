"""The archive flow, by default nightly: each tier gets what its settings choose; says so when there is nothing to do."""

from typing import Any

from prefect import flow

from perdure.tasks.archive import archive as archive_run
from perdure.tasks.blocks import load_secrets
from perdure.training.config import load_config
from perdure.training.errors import StoreError


@flow(name="archive", retries=0)
def archive(config: str, overrides: list[str] | None = None, dry_run: bool = False) -> dict[str, Any]:  # Any: JSON values
    """Copy to the [tiers] of the run.toml at `config` what they lack. `dry_run`: only say what would be copied.

    Fails when a tier could not be filled; the others are."""
    checked = load_config(config, overrides or [])
    load_secrets(checked)
    done: dict[str, Any] = archive_run(checked, dry_run)
    if done["problems"]:
        told = "; ".join(f"{place}: {why}" for place, why in done["problems"].items())
        raise StoreError(f"{checked.run_dir}: not archived: {told}"[:2000], hint="the next schedule goes on")
    return done
