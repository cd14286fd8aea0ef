"""The drill flow, by default on Sunday mornings: the loss of the machine is rehearsed from the store alone, with kills."""

from typing import Any

from prefect import flow

from perdure.tasks.blocks import load_secrets
from perdure.tasks.drill import drill as drill_run
from perdure.training.config import load_config
from perdure.training.errors import DrillFailed
from perdure.training.redact import redact


@flow(name="drill", retries=0)
def drill(
    config: str, overrides: list[str] | None = None, checkpoint: str = "", steps: int = 0, dry_run: bool = False
) -> dict[str, Any]:  # Any: JSON values
    """Bring the run of the run.toml at `config` back in a bare folder and train `steps` twice, the second time with kills.

    `checkpoint`: its name instead of the newest good one. `steps`: 0 is drill.steps. Fails when the bits differ, when nothing
    comes back, or when the recovery point or time misses its target."""
    checked = load_config(config, overrides or [])
    load_secrets(checked)
    done: dict[str, Any] = drill_run(checked, overrides or [], checkpoint, steps, dry_run)
    if not done["passed"]:
        raise DrillFailed(redact(f"{checked.run_dir}: the drill failed: {'; '.join(done['problems'])}"[:2000]))
    return done
