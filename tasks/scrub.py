"""Scrub one run: read a share of its copies again, repair what is rotten, tell Slack. A dry run reads nothing."""

from typing import Any

from prefect import get_run_logger, task
from prefect.cache_policies import NO_CACHE

from perdure.tasks import background
from perdure.tasks.notify import deliver
from perdure.training.amounts import counted, size
from perdure.training.config import RunConfig
from perdure.training.travel import scrub as scrubbing
from perdure.training.travel.places import reading_order
from perdure.training.travel.scrub_plan import choose, parse_budget, survey


@task(name="scrub", cache_policy=NO_CACHE, persist_result=False)
def scrub(config: RunConfig, budget: str, dry_run: bool) -> dict[str, Any]:  # Any: JSON values, shown in the UI
    """What was chosen and what became of it, and which places could not be looked at: the next schedule reads on."""
    background.yield_to_training()
    run, places, log = config.directory, reading_order(config), get_run_logger()
    if not run.run_json.exists():
        log.info("Nothing to scrub: run %s has not started.", config.run.name)
        return {"copies": 0, "chosen": [], "damaged": 0, "problems": {}}
    found = survey(run, places)
    copies, problems = found.copies, dict(found.problems)
    chosen = choose(copies, parse_budget(budget, found.readable_bytes))
    names = [f"{copy.place}:{copy.name}" for copy in chosen]
    total = counted(len(copies), "copy", "copies")
    if found.frozen:
        log.info("Left out until thawed: %s.", counted(found.frozen, "copy", "copies"))
    if not chosen:
        log.info("Nothing to scrub: run %s has %s, budget %s.", config.run.name, total, budget)
    elif dry_run:
        log.info("Would read %d of %s.", len(chosen), total)
    if dry_run or not chosen:
        return {"copies": len(copies), "chosen": names, "damaged": 0, "problems": problems}
    done = scrubbing.scrub(run, [place for place in places if place.word not in problems], copies, chosen)
    for one in done.found:
        if one.outcome != "good":
            log.warning("The %s copy of %s is %s: %s.", one.copy.place, one.copy.name, one.outcome, one.reason)
    log.info("Read %d of %s, %s.", len(chosen), total, size(done.bytes_read))
    deliver(run, config.notify, logger=log)
    counts = {word: done.count(word) for word in ("good", "repaired", "damaged", "skipped")}
    return {
        "copies": len(copies),
        "chosen": names,
        "bytes_read": done.bytes_read,
        "problems": problems | done.problems,
        **counts,
    }
