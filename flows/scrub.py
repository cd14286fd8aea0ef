"""The scrub flow, by default nightly: within a week everything stored is read again, and rot repaired from another copy."""

from typing import Any

from prefect import flow

from perdure.tasks.blocks import load_secrets
from perdure.tasks.scrub import scrub as scrub_run
from perdure.training.amounts import counted
from perdure.training.config import load_config
from perdure.training.errors import CheckpointDamaged, StoreError


@flow(name="scrub", retries=0)
def scrub(
    config: str, overrides: list[str] | None = None, budget: str = "15%", dry_run: bool = False
) -> dict[str, Any]:  # Any: JSON values
    """Read a share of everything the run of the run.toml at `config` has stored, longest-unchecked first.

    `budget`: bytes (20GB) or a share (15%). Fails when damage cannot be repaired, or a place is away."""
    checked = load_config(config, overrides or [])
    load_secrets(checked)
    done: dict[str, Any] = scrub_run(checked, budget, dry_run)
    if done["damaged"]:
        raise CheckpointDamaged(
            f"{checked.run_dir}: quarantined, as damaged beyond repair: {counted(done['damaged'], 'copy', 'copies')}",
            hint="see `perdure ls`; the newest good checkpoint is used to go on",
        )
    if done["problems"]:
        told = "; ".join(f"{place}: {why}" for place, why in done["problems"].items())
        raise StoreError(f"{checked.run_dir}: not all was scrubbed: {told}"[:2000], hint="the next schedule reads on")
    return done
