"""The watchdog flow, by default every five minutes: finds out whether a run is dead, and has it go on."""

from typing import Any

from prefect import flow, get_run_logger
from prefect.client.orchestration import get_client

from perdure.flows.attend import PATIENCE_SECS, Means, watch
from perdure.tasks.blocks import load_secrets
from perdure.tasks.notify import deliver
from perdure.training.config import load_config


@flow(name="watchdog", retries=0)
def watchdog(
    config: str, overrides: list[str] | None = None, patience: float = PATIENCE_SECS, dry_run: bool = False
) -> dict[str, Any]:  # Any: JSON values
    """Look after the run of the run.toml at `config`: two looks `patience` seconds apart, then help if it is dead."""
    log, checked = get_run_logger(), load_config(config, overrides or [])
    load_secrets(checked)
    run = checked.directory
    if not run.run_json.exists():
        name = checked.run.name
        log.info("Nothing to watch: %s is not there. A run that is gone: `perdure deploy --remove %s`.", run.run_json, name)
        return {"state": "new", "action": ""}
    with get_client(sync_client=True) as client:
        [done] = watch([run], patience, Means(client=client, dry_run=dry_run, say=log.info))
    log.info("Run %s is %s: %s. %s", checked.run.name, done.verdict.state, done.verdict.reason, done.action or "Nothing to do.")
    if not dry_run:
        deliver(run, checked.notify, logger=log)
    return {"state": done.verdict.state, "reason": done.verdict.reason, "action": done.action, "flow_run": done.flow_run}
