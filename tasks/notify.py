"""The notify task: tells Slack what has happened since the last time, from the run's event log. Never fails or waits long."""

from pathlib import Path

from prefect import get_run_logger, task
from prefect.cache_policies import NO_CACHE
from prefect.runtime import flow_run

from perdure.tasks.slack import deliver
from perdure.tasks.ui import page_of
from perdure.training.config import NotifySection
from perdure.training.run_dir import RunDir

__all__ = ["deliver", "notify"]


@task(name="notify", cache_policy=NO_CACHE, persist_result=False)
def notify(root: str, settings: NotifySection) -> None:
    deliver(RunDir(Path(root)), settings, logger=get_run_logger(), flow_url=page_of(flow_run.id))
