"""Prunes a place, each time in a forked process of its own that a fail plan may kill: one start for all kills.

A line of JSON in (plan, url, settings, run), the exit status of the process that did it out (negative: the signal)."""

import json
import os
import sys
from pathlib import Path

from perdure.training import files
from perdure.training.retention_settings import RetentionSection
from perdure.training.run_dir import RunDir
from perdure.training.storage import s3
from perdure.training.storage.store import StoreSettings, open_store
from perdure.training.travel import prune, sweep

assert s3, "imported before the forks"


def act(order: dict[str, str]) -> None:
    run, store = RunDir(Path(order["run"])), open_store(order["url"], StoreSettings(**json.loads(order["settings"])))
    files.plan_failure(order["plan"])
    files.set_role("prune")
    sweep.recover(run, store, "store")
    sweep.execute(run, store, "store", prune.survey(run, store, "store", RetentionSection(keep_last=1)))


def main() -> None:
    for line in sys.stdin:
        child = os.fork()
        if child == 0:
            act(json.loads(line))
            os._exit(0)
        print(os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]), flush=True)


if __name__ == "__main__":
    main()
