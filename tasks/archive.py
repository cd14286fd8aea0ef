"""Fill the tiers of one run beside training, tell Slack once. A tier that is away is left for later."""

from typing import Any

from prefect import get_run_logger, task
from prefect.cache_policies import NO_CACHE

from perdure.tasks import background
from perdure.tasks.notify import deliver
from perdure.training import events
from perdure.training.amounts import counted, size
from perdure.training.config import RunConfig
from perdure.training.errors import RunBusy
from perdure.training.travel import archive as archiving
from perdure.training.travel.archive import Done, Step, Survey
from perdure.training.travel.places import remotes_of


@task(name="archive", cache_policy=NO_CACHE, persist_result=False)
def archive(config: RunConfig, dry_run: bool) -> dict[str, Any]:  # Any: JSON values, shown in the UI
    """What was planned, and what became of it."""
    background.yield_to_training()
    run, log = config.directory, get_run_logger()
    if not config.tiers or not run.run_json.exists():
        why = f"run {config.run.name} has not started" if config.tiers else f"{config.path} has no tiers"
        log.info("Nothing to archive: %s.", why)
        return told(Survey(steps=(), known=(), unproven=(), problems={}), None)
    remotes = remotes_of(config)
    found = archiving.survey(run, remotes)
    for step in found.steps:
        log.info("%s to %s: %s.", step.name, step.tier, "; ".join(step.reasons))
    if not found.steps:
        log.info("Nothing to archive: the tiers have what they are to have.")
    if dry_run:
        return told(found, None)
    try:
        done = archiving.execute(run, remotes, found)
    except RunBusy:
        log.info("Left for later: another archive of run %s is under way.", config.run.name)
        return told(found, None)
    for step, error in done.skipped.items():
        log.warning("Not archived: %s to %s: %s.", step.name, step.tier, error)
    for thaw in done.thawed:
        log.info("Checkpoint %s in %s can be read now.", thaw.checkpoint, thaw.place)
    if done.copied or done.problems:
        log.info("Archived: %s.", said(done))
        events.record(run, "notice", text=f"archived: {said(done)}"[:2000])
    if done.copied or done.problems or done.thawed:
        deliver(run, config.notify, logger=log)
    return told(found, done)


def said(done: Done) -> str:
    """What an archive did, in one sentence."""
    counts: dict[str, list[Step]] = {}
    for step in done.copied:
        counts.setdefault(step.tier, []).append(step)
    parts = [
        f"{counted(len(steps), 'checkpoint')} ({size(sum(step.bytes for step in steps))}) to {tier}"
        for tier, steps in counts.items()
    ]
    parts += [f"{tier} was left: {why}" for tier, why in done.problems.items()]
    return "; ".join(parts)


def told(found: Survey, done: Done | None) -> dict[str, Any]:  # Any: JSON values
    return {
        "planned": [f"{step.tier}:{step.name}" for step in found.steps],
        "copied": [f"{step.tier}:{step.name}" for step in done.copied] if done else [],
        "skipped": {f"{step.tier}:{step.name}": str(why) for step, why in done.skipped.items()} if done else {},
        "problems": dict(done.problems if done else found.problems),
        "bytes": sum(step.bytes for step in done.copied) if done else sum(step.bytes for step in found.steps),
    }
