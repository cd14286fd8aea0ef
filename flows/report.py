"""The report flow, by default on Monday mornings: one digest of a run's week, in Prefect and in Slack."""

from typing import Any

from prefect import flow

from perdure.tasks.blocks import load_secrets
from perdure.tasks.report import report as report_run
from perdure.training.config import load_config


@flow(name="report", retries=0)
def report(
    config: str, overrides: list[str] | None = None, days: float = 7.0, dry_run: bool = False
) -> dict[str, Any]:  # Any: JSON values
    """Tell what the run of the run.toml at `config` made and lost in the last `days`; of an empty time nobody is told."""
    checked = load_config(config, overrides or [])
    load_secrets(checked)
    told: dict[str, Any] = report_run(checked, days, dry_run)
    return told
