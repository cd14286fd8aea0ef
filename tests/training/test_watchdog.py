"""What two looks at a run say: only what is certainly dead or frozen asks for help; everything in doubt is left alone."""

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from perdure.training import events, files, watchdog
from perdure.training.checkpoint.lineage import LaunchEnd
from perdure.training.process import ProcessId, identify
from perdure.training.run_dir import RunDir
from perdure.training.watchdog import LOST_LIFELINE, Look, find_runs, judge

HERE = identify()
GONE = ProcessId(pid=HERE.pid, start=HERE.start + 1, host=HERE.host)
FOREIGN = ProcessId(pid=1, start=1, host="another-host")


def beat(counter: int, token: int = 2, step: int = 40, state: str = "training") -> Any:
    return watchdog._Beat(counter=counter, token=token, step=step, state=state)


def end(reason: str, detail: str = "") -> LaunchEnd:
    return LaunchEnd(token=2, reason=reason, error_class="", step=40, detail=detail, log_tail="", ended=0.0)


DEAD = Look(steps=100, newest_step=40, token=2, end=None, beat=beat(7), held=False, driver=GONE, agent=GONE, stop_asked=False)
HELD = replace(DEAD, held=True, driver=HERE, agent=HERE)


@pytest.mark.parametrize(
    ("now", "state"),
    [
        (DEAD, "dead"),
        (replace(DEAD, end=end("failed")), "dead"),
        (replace(DEAD, end=end("stopped", LOST_LIFELINE)), "dead"),
        (replace(DEAD, newest_step=100), "complete"),
        (replace(DEAD, end=end("complete")), "complete"),
        (replace(DEAD, end=end("stopped", "asked to stop")), "stopped"),
        (replace(DEAD, end=end("stopped", "SIGTERM")), "stopped"),
        (replace(DEAD, stopped="cancelled in Prefect"), "stopped"),
        (replace(DEAD, stop_asked=True), "stopped"),
        (replace(DEAD, end=end("failed"), refused="not restarting: an error in the training code"), "refused"),
        (replace(DEAD, token=0), "new"),
    ],
)
def test_of_a_run_that_nobody_holds(now: Look, state: str) -> None:
    assert judge(now, now).state == state


@pytest.mark.parametrize(
    ("before", "now", "state"),
    [
        (HELD, replace(HELD, beat=beat(8)), "alive"),
        (HELD, HELD, "frozen"),
        (replace(HELD, driver=GONE), replace(HELD, driver=GONE), "frozen"),
        (replace(HELD, driver=GONE), replace(HELD, driver=GONE, beat=beat(8)), "draining"),
        (HELD, replace(HELD, stop_asked=True), "draining"),
        (replace(HELD, agent=GONE), replace(HELD, agent=GONE), "alive"),  # between two launches, or pushing at the end
        (replace(HELD, end=end("complete")), replace(HELD, end=end("complete")), "alive"),
        (HELD, replace(HELD, token=3), "alive"),  # starting up: the new agent has not beaten yet
        (replace(HELD, token=3), replace(HELD, token=3), "alive"),
        (replace(HELD, agent=FOREIGN, driver=FOREIGN), replace(HELD, agent=FOREIGN, driver=FOREIGN), "alive"),
        (DEAD, HELD, "alive"),
        (HELD, replace(HELD, beat=beat(8), quiet=1000.0), "stalled"),
        (HELD, replace(HELD, beat=beat(8, step=41), quiet=1000.0), "alive"),
        (HELD, replace(HELD, beat=beat(8, state="evaluation"), quiet=1000.0), "alive"),
        (HELD, DEAD, "alive"),  # it has just ended: the next look tells
        (replace(DEAD, token=1), DEAD, "alive"),
    ],
)
def test_of_two_looks_at_a_run_that_is_held_or_was(before: Look, now: Look, state: str) -> None:
    assert judge(before, now).state == state


def test_only_dead_and_frozen_need_help() -> None:
    words = ("new", "alive", "stalled", "frozen", "draining", "stopped", "complete", "refused", "dead")
    helped = [word for word in words if watchdog.Verdict(state=word, reason="").needs_help]
    assert helped == ["frozen", "dead"]


def a_run(root: Path) -> RunDir:
    run = RunDir(root)
    files.make_dirs(run.launches)
    run.run_json.write_text('{"id":"r","name":"r","created":1.0,"steps":100,"chunk":10}')
    return run


def test_a_stop_counts_until_somebody_launches_again_or_it_was_only_the_lost_driver(tmp_path: Path) -> None:
    run = a_run(tmp_path)
    events.record(run, "launch_started", token=1, step=0)
    events.record(run, "stopped", token=1, reason=LOST_LIFELINE)
    assert watchdog.look(run).stopped == ""
    events.record(run, "stopped", token=1, reason="asked to stop")
    assert watchdog.look(run).stopped == "asked to stop"
    events.record(run, "launch_started", token=2, step=0)
    assert watchdog.look(run).stopped == ""
    events.record(run, "failed", error_class="user", next="not restarting: it would only repeat itself")
    assert watchdog.look(run).refused == "not restarting: it would only repeat itself"
    events.record(run, "restarted", by="watchdog")
    assert watchdog.look(run).restarts == 1


def test_runs_are_found_some_folders_deep_and_not_inside_each_other(tmp_path: Path) -> None:
    runs = [a_run(tmp_path / "a"), a_run(tmp_path / "more" / "runs" / "b")]
    for run in runs:
        events.record(run, "run_created", id="r")
    a_run(tmp_path / "store")  # it has a run.json and launch records as well
    a_run(tmp_path / "a" / "checkpoints" / "copy")
    a_run(tmp_path / ".hidden" / "c")
    assert find_runs(tmp_path) == runs
    assert find_runs(runs[0].root) == runs[:1]
    assert find_runs(tmp_path / "absent") == []
