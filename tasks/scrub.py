"""Scrub one run: read a share of its copies again, repair what is rotten, tell Slack. A dry run reads nothing."""

from typing import Any

from prefect import get_run_logger, task
from prefect.cache_policies import NO_CACHE

from perdure.tasks import background
from perdure.tasks.notify import deliver
from perdure.tasks.push import store_of
from perdure.training.config import RunConfig
from perdure.training.run_dir import RunDir
from perdure.training.travel import scrub as scrubbing


@task(name="scrub", cache_policy=NO_CACHE, persist_result=False)
def scrub(config: RunConfig, budget: str, dry_run: bool) -> dict[str, Any]:  # Any: JSON values, shown in the UI
    """What was chosen and what became of it. Raises StoreError when the store cannot be reached: the next schedule reads on."""
    background.yield_to_training()
    run, store, log = RunDir(config.run_dir), store_of(config), get_run_logger()
    if not run.run_json.exists():
        log.info("Nothing to scrub: run %s has not started.", config.run.name)
        return {"copies": 0, "chosen": [], "damaged": 0}
    copies = scrubbing.survey(run, store)
    chosen = scrubbing.choose(copies, scrubbing.parse_budget(budget, sum(copy.bytes for copy in copies)))
    names = [f"{copy.place}:{copy.name}" for copy in chosen]
    if not chosen:
        log.info("Nothing to scrub: run %s has %d copies, budget %s.", config.run.name, len(copies), budget)
    if dry_run or not chosen:
        log.info("Would read %d of %d copies.", len(chosen), len(copies)) if chosen else None
        return {"copies": len(copies), "chosen": names, "damaged": 0}
    done = scrubbing.scrub(run, store, copies, chosen)
    for one in done.found:
        if one.outcome != "good":
            log.warning("The %s copy of %s is %s: %s.", one.copy.place, one.copy.name, one.outcome, one.reason)
    log.info("Read %d of %d copies, %d bytes.", len(chosen), len(copies), done.bytes_read)
    deliver(run, config.notify, logger=log)
    counts = {word: done.count(word) for word in ("good", "repaired", "damaged", "skipped")}
    return {
        "copies": len(copies),
        "chosen": names,
        "bytes_read": done.bytes_read,
        "store_problem": done.store_problem,
        **counts,
    }
