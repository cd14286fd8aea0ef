"""Report one run: the digest as an artifact in Prefect and as one message in Slack. A dry run and an empty week tell nobody."""

from typing import Any

from prefect import get_run_logger, task
from prefect.artifacts import create_markdown_artifact
from prefect.cache_policies import NO_CACHE

from perdure.tasks.notify import deliver
from perdure.tasks.weekly import digest, markdown
from perdure.training import events
from perdure.training.config import RunConfig

MAX_TEXT = 2500


@task(name="report", cache_policy=NO_CACHE, persist_result=False)
def report(config: RunConfig, days: float, dry_run: bool) -> dict[str, Any]:  # Any: JSON values, shown in the UI
    run, log = config.directory, get_run_logger()
    if not run.run_json.exists():
        log.info("Nothing to report: run %s has not started.", config.run.name)
        return {}
    found = digest(run, days)
    text = markdown(found)
    log.info("Report of run %s over %g days:\n%s", found.name, days, text)
    if found.empty:
        log.info("Nothing to report: nothing happened in the last %g days.", days)
    elif not dry_run:
        create_markdown_artifact(f"## {found.name}: the last {days:g} days\n\n{text}\n", description="What it made and lost.")
        events.record(run, "reported", days=days, step=found.step, text=text[:MAX_TEXT])
        deliver(run, config.notify, logger=log)
    return found.json()
