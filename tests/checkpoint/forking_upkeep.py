"""Prunes and rolls up, each time in a forked process of its own that a fail plan may kill: one start for all kills.

A line of JSON in (plan, act, run, keep_last or name), the exit status of the process that did it out (negative: the signal)."""

import json
import os
import sys
from pathlib import Path

from upkeep_runs import save

from perdure.training import files
from perdure.training.checkpoint import prune
from perdure.training.checkpoint.lineage import lineage
from perdure.training.checkpoint.pins import pin, unpin
from perdure.training.checkpoint.rollup import roll_up
from perdure.training.checkpoint.upkeep import upkeep
from perdure.training.retention_settings import RetentionSection
from perdure.training.run_dir import RunDir


def act(order: dict[str, str | int]) -> None:
    run = RunDir(Path(str(order["run"])))
    files.plan_failure(str(order["plan"]))
    files.set_role("prune")
    with upkeep(run):
        if order["act"] == "rollup":
            roll_up(run, lineage(run)[0])
            return
        if order["act"] == "pin":
            pin(run, "late", lineage(run)[0])
            return
        if order["act"] == "unpin":
            unpin(run, "late")
            return
        if order["act"] == "save_then_prune":
            save(run, 50)
        rolling = order["act"] == "prune_rolling"
        found = prune.survey(
            run, RetentionSection(keep_last=int(order["keep_last"])), stored=False, is_idle=lambda: True, may_roll_up=rolling
        )
        prune.execute(run, found, roll_up=roll_up if rolling else None)


def main() -> None:
    for line in sys.stdin:
        order = json.loads(line)
        child = os.fork()
        if child == 0:
            act(order)
            os._exit(0)
        print(os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]), flush=True)


if __name__ == "__main__":
    main()
