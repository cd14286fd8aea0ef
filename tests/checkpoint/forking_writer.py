"""Writes checkpoint after checkpoint, each in a forked process of its own that a fail plan may kill: one start for all kills.

A line of JSON in (plan, act, run, step, seed), the exit status of the process that did it out (negative: the signal)."""

import json
import os
import sys
import time
from pathlib import Path

from snapshots import RUN_ID, Source, ranks, write
from two_nodes import share

from perdure.training import files
from perdure.training.checkpoint.lineage import LaunchRecord, create_launch
from perdure.training.checkpoint.verify import check
from perdure.training.run_dir import CheckpointName, RunDir


def act(order: dict[str, str | int], sources: list[Source]) -> None:
    run, step = RunDir(Path(str(order["run"]))), int(order["step"])
    files.plan_failure(str(order["plan"]))
    files.set_role("saver")
    if order["act"] == "write":
        write(run, *sources, base=CheckpointName.parse(str(order.get("base"))))
    elif order["act"] == "share":
        share(run, int(order["seed"]), CheckpointName(step, 1))
    elif order["act"] == "check":
        check(run, CheckpointName(step, 1))
    else:
        record = LaunchRecord(
            token=step, resumed_from=None, created=time.time(), host="h", pid=1, run=RUN_ID, owner="o" * 32, notes={}
        )
        create_launch(run, record)


def main() -> None:
    made: dict[tuple[int, int], list[Source]] = {}
    for line in sys.stdin:
        order = json.loads(line)
        key = (order["step"], order["seed"])
        sources = made.setdefault(key, ranks(*key))
        child = os.fork()
        if child == 0:
            act(order, sources)
            os._exit(0)
        print(os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]), flush=True)


if __name__ == "__main__":
    main()
