"""Hold a drill of one run: the result beside the run, as an artifact with its trend in Prefect, and once in Slack."""

from typing import Any

import msgspec
from prefect import get_run_logger, task
from prefect.artifacts import create_markdown_artifact
from prefect.cache_policies import NO_CACHE

from perdure.tasks import background, drilled
from perdure.tasks.artifacts import slug
from perdure.tasks.notify import deliver
from perdure.tasks.push import store_of
from perdure.training.config import RunConfig
from perdure.training.drill.drill import drill as hold
from perdure.training.drill.plan import plan
from perdure.training.errors import ConfigError
from perdure.training.run_dir import CheckpointName


@task(name="drill", cache_policy=NO_CACHE, persist_result=False)
def drill(
    config: RunConfig, overrides: list[str], checkpoint: str, steps: int, dry_run: bool
) -> dict[str, Any]:  # Any: JSON values, shown in the UI
    """The record of the drill; `nothing` says why none was held. Raises StoreError, DiskFull: then none could be held."""
    background.yield_to_training()
    log, store, wanted = get_run_logger(), store_of(config), CheckpointName.parse(checkpoint)
    if store is None:
        raise ConfigError(f"{config.path}: a drill recovers the run from its store, and it has none", "set store.url")
    if checkpoint and wanted is None:
        raise ConfigError(f"checkpoint {checkpoint!r} is not the name of one", "names look like 000000000200-0001")
    planned = plan(config, store, wanted, steps or config.drill.steps)
    if planned.nothing or dry_run:
        said = planned.nothing or f"would pull {planned.newest} and train {planned.steps} steps from {planned.start}, twice"
        log.info("%s: %s.", "Nothing to drill" if planned.nothing else "Dry run", said)
        return {"nothing": said, "passed": True}
    held = hold(config, overrides, store, wanted, planned, lambda text: log.info("%s.", text[:1].upper() + text[1:]))
    drills = drilled.keep(config.directory, held)
    log.info("%s\n%s", drilled.title(held), "\n".join(drilled.lines(drills)))
    page = drilled.markdown(drills, config.run.name)
    create_markdown_artifact(page, key=f"drill-{slug(held.run)}", description=drilled.title(held))
    if config.directory.run_json.exists():
        deliver(config.directory, config.notify, logger=log)
    return {"nothing": "", "recovery_secs": held.recovery_secs, **msgspec.to_builtins(held)}
