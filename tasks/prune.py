"""Prune one run and its places beside training: delete what each retention lets go, tell Slack once. What is busy is left for
later."""

from typing import Any

from prefect import get_run_logger, task
from prefect.cache_policies import NO_CACHE

from perdure.tasks import background
from perdure.tasks.notify import deliver
from perdure.training import events
from perdure.training.agent import lock
from perdure.training.amounts import counted, size
from perdure.training.checkpoint import prune as pruning
from perdure.training.checkpoint.prune import Done, Survey
from perdure.training.checkpoint.retention import Plan
from perdure.training.checkpoint.rollup import roll_up
from perdure.training.checkpoint.upkeep import try_upkeep
from perdure.training.config import RunConfig
from perdure.training.errors import RunBusy, StoreError
from perdure.training.run_dir import RunDir
from perdure.training.travel import prune as places
from perdure.training.travel import sweep
from perdure.training.travel.places import Remote, remotes_of


@task(name="prune", cache_policy=NO_CACHE, persist_result=False)
def prune(config: RunConfig, dry_run: bool) -> dict[str, Any]:  # Any: JSON values, shown in the UI
    """What was decided, and what became of it; of each place with a retention of its own too."""
    background.yield_to_training()
    run, log = config.directory, get_run_logger()
    if not run.run_json.exists():
        log.info("Nothing to prune: run %s has not started.", config.run.name)
        return {**_told(None, None, busy=False), "places": {}}
    here, texts = _prune_here(run, config, dry_run)
    there: dict[str, Any] = {}  # Any: JSON values
    for remote in remotes_of(config):
        if not remote.section.retention.keeps_all:
            there[remote.word], text = _prune_there(run, remote, dry_run)
            texts += [f"{remote.word}: {text}"] if text else []
    if texts:
        text = "; ".join(texts)
        log.info("Pruned: %s.", text)
        removed = [*here["removed"], *(f"{word}:{name}" for word, one in there.items() for name in one["removed"])]
        events.record(run, "notice", text=f"pruned: {text}"[:2000], removed=removed[:100])
        deliver(run, config.notify, logger=log)
    return {**here, "places": there}


def _prune_here(run: RunDir, config: RunConfig, dry_run: bool) -> tuple[dict[str, Any], list[str]]:  # Any: JSON values
    """The result, and what is to be said of it."""
    if dry_run:
        found = _survey(run, config)
        _log(found.plan, found.empty)
        return _told(found, None, busy=False), []
    with try_upkeep(run) as ours:
        if not ours:
            get_run_logger().info("Left for later: another process prunes or rolls up checkpoints of run %s.", config.run.name)
            return _told(None, None, busy=True), []
        found = _survey(run, config)
        _log(found.plan, found.empty)
        done = pruning.execute(run, found, roll_up=roll_up)
    return _told(found, done, busy=False), [said(done)] if done.removed or done.swept else []


def _prune_there(run: RunDir, remote: Remote, dry_run: bool) -> tuple[dict[str, Any], str]:  # Any: JSON values
    found, done, problem, log = None, None, "", get_run_logger()
    try:
        if not dry_run:
            sweep.recover(run, remote.store, remote.word)
        found = places.survey(run, remote.store, remote.word, remote.section.retention)
        _log(found.plan, found.empty, f" from {remote.word}")
        done = None if dry_run else sweep.execute(run, remote.store, remote.word, found)
    except RunBusy as error:
        log.info("Left for later: %s.", error)
    except StoreError as error:
        problem = str(error)
        log.warning("Not pruned: %s: %s.", remote.word, problem)
    told = _told(found, done, busy=not problem and not dry_run and done is None)
    return {**told, "problem": problem}, said(done) if done is not None and (done.removed or done.swept) else ""


def _survey(run: RunDir, config: RunConfig) -> Survey:
    def is_idle() -> bool:
        return not lock.is_held(run)

    return pruning.survey(run, config.retention, stored=bool(config.store_url), is_idle=is_idle, may_roll_up=True)


def _log(plan: Plan, empty: bool, where: str = "") -> None:
    log = get_run_logger()
    for verdict in (*plan.roll_ups, *plan.remove):
        log.info("%s %s%s: %s.", "Roll up" if verdict.roll_up else "Remove", verdict.name, where, "; ".join(verdict.reasons))
    if empty:
        log.info("Nothing to prune%s: kept %s.", where, counted(len(plan.keep), "checkpoint"))


def said(done: Done | sweep.Done) -> str:
    """What a prune did, in one sentence."""
    counts = [(len(done.removed), "checkpoint"), (len(done.swept), "leftover")]
    parts = [f"{counted(count, word)} deleted" for count, word in counts if count]
    rolled_up = len(done.rolled_up) if isinstance(done, Done) else 0
    parts += [f"{counted(rolled_up, 'milestone')} rolled up"] if rolled_up else []
    parts += [f"{len(done.spared)} left for later"] if done.spared else []
    return f"{', '.join(parts)}; {size(done.freed)} freed"


def _told(
    found: Survey | places.Survey | None, done: Done | sweep.Done | None, *, busy: bool
) -> dict[str, Any]:  # Any: JSON values
    plan = found.plan if found else None
    return {
        "busy": busy,
        "kept": len(plan.keep) if plan else 0,
        "planned": [str(verdict.name) for verdict in plan.remove] if plan else [],
        "removed": [str(verdict.name) for verdict in done.removed] if done else [],
        "rolled_up": [str(verdict.name) for verdict in done.rolled_up] if isinstance(done, Done) else [],
        "spared": {str(name): why for name, why in done.spared.items()} if done else {},
        "freed_bytes": done.freed if done else found.freed if found else 0,
    }
