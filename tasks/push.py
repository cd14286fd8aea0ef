"""Copy one verified checkpoint to the store, read it back, record the fact. An unreachable store never stops training."""

import time
from collections.abc import Callable
from typing import Any

from prefect import task
from prefect.cache_policies import NO_CACHE

from perdure.tasks import background
from perdure.training import events
from perdure.training.config import RunConfig
from perdure.training.errors import PerdureError, StoreError
from perdure.training.run_dir import CheckpointName, RunDir
from perdure.training.storage.store import ObjectStore, open_store
from perdure.training.travel.push import push as push_checkpoint


def store_of(config: RunConfig) -> ObjectStore | None:
    """The run's store, or None when it has none."""
    return open_store(config.store_url, config.store) if config.store_url else None


def copy_out(run: RunDir, store: ObjectStore, name: CheckpointName, should_stop: Callable[[], bool]) -> bool:
    """True when the store holds it, read back. What cannot be cured by waiting is raised."""
    began = time.monotonic()
    try:
        fact = push_checkpoint(run, store, name, should_stop=should_stop)
    except PerdureError as error:
        curable = isinstance(error, StoreError) and error.retryable
        told = error.in_one_line()[:1000]
        events.record(run, "push_failed", step=name.step, name=str(name), error=told, retryable=curable)
        if not curable:
            raise
        return False
    if fact.result == "good":
        seconds = round(time.monotonic() - began, 3)
        events.record(run, "pushed", step=name.step, name=str(name), url=store.url, seconds=seconds)
    return fact.result == "good"


@task(name="push", task_run_name="push {name}", cache_policy=NO_CACHE, persist_result=False)
def push(config: RunConfig, name: str, should_stop: Callable[[], bool]) -> dict[str, Any]:  # Any: JSON values, shown in the UI
    background.yield_to_training()
    parsed, store = CheckpointName.parse(name), store_of(config)
    assert parsed is not None
    assert store is not None
    return {"checkpoint": name, "replicated": copy_out(config.directory, store, parsed, should_stop)}
