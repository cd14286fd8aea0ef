"""Prune one run beside training: delete what retention lets go, tell Slack once. A run that is busy is left for later."""

from typing import Any

from prefect import get_run_logger, task
from prefect.cache_policies import NO_CACHE

from perdure.tasks import background
from perdure.tasks.notify import deliver
from perdure.training import events
from perdure.training.agent import lock
from perdure.training.checkpoint import prune as pruning
from perdure.training.checkpoint.prune import Done, Survey
from perdure.training.checkpoint.rollup import roll_up
from perdure.training.checkpoint.upkeep import try_upkeep
from perdure.training.config import RunConfig
from perdure.training.run_dir import RunDir


@task(name="prune", cache_policy=NO_CACHE, persist_result=False)
def prune(config: RunConfig, dry_run: bool) -> dict[str, Any]:  # Any: JSON values, shown in the UI
    """What was decided, and what became of it."""
    background.yield_to_training()
    run, log = RunDir(config.run_dir), get_run_logger()
    if not run.run_json.exists():
        log.info("Nothing to prune: run %s has not started.", config.run.name)
        return _told(None, None, busy=False)
    if dry_run:
        found = _survey(run, config)
        _log(found)
        return _told(found, None, busy=False)
    with try_upkeep(run) as ours:
        if not ours:
            log.info("Left for later: another process prunes or rolls up checkpoints of run %s.", config.run.name)
            return _told(None, None, busy=True)
        found = _survey(run, config)
        _log(found)
        done = pruning.execute(run, found, roll_up=roll_up)
    if done.removed or done.swept:
        text = said(done)
        log.info("Pruned: %s.", text)
        events.record(run, "notice", text=f"pruned: {text}", removed=[str(one.name) for one in done.removed][:100])
        deliver(run, config.notify, logger=log)
    return _told(found, done, busy=False)


def _survey(run: RunDir, config: RunConfig) -> Survey:
    def is_idle() -> bool:
        return not lock.is_held(run)

    return pruning.survey(run, config.retention, stored=bool(config.store_url), is_idle=is_idle, may_roll_up=True)


def _log(found: Survey) -> None:
    log = get_run_logger()
    for verdict in (*found.plan.roll_ups, *found.plan.remove):
        log.info("%s %s: %s.", "Roll up" if verdict.roll_up else "Remove", verdict.name, "; ".join(verdict.reasons))
    if found.empty:
        log.info("Nothing to prune: %d checkpoints are kept.", len(found.plan.keep))


def said(done: Done) -> str:
    """What a prune did, in one sentence."""
    counts = [(len(done.removed), "checkpoints"), (len(done.swept), "leftovers")]
    parts = [f"{count} {word} deleted" for count, word in counts if count]
    parts += [f"{len(done.rolled_up)} milestones rolled up"] if done.rolled_up else []
    parts += [f"{len(done.spared)} left for later"] if done.spared else []
    return f"{', '.join(parts)}; {done.freed:,} bytes freed"


def _told(found: Survey | None, done: Done | None, *, busy: bool) -> dict[str, Any]:  # Any: JSON values
    plan = found.plan if found else None
    return {
        "busy": busy,
        "kept": len(plan.keep) if plan else 0,
        "planned": [str(verdict.name) for verdict in plan.remove] if plan else [],
        "removed": [str(verdict.name) for verdict in done.removed] if done else [],
        "rolled_up": [str(verdict.name) for verdict in done.rolled_up] if done else [],
        "spared": {str(name): why for name, why in done.spared.items()} if done else {},
        "freed_bytes": done.freed if done else found.freed if found else 0,
    }
