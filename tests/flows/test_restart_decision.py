"""The restart decision as a table: class decides, progress protects, a crash loop stops and says why."""

from itertools import product
from pathlib import Path

import pytest

from perdure.flows.restart import (
    FIRST_DELAY_SECS,
    LONGEST_DELAY_SECS,
    MAX_WITHOUT_PROGRESS,
    Attempt,
    attempts_of,
    decide,
)
from perdure.training import files
from perdure.training.checkpoint.lineage import LaunchEnd, LaunchRecord, create_launch, write_end
from perdure.training.run_dir import CheckpointName, RunDir

CLASSES = ["user", "config", "oom", "nan", "infrastructure", "hang", "corrupt", "something new"]


def ended(text: str) -> list[Attempt]:
    """`nan oom+`: two ended launches, the second committed something new."""
    return [Attempt(error_class=word.rstrip("+").replace("_", " "), progress=word.endswith("+")) for word in text.split()]


RESTARTS = {
    "": 0.0,
    "infrastructure": 1.0,
    "infrastructure infrastructure": 2.0,
    "infrastructure infrastructure infrastructure": 4.0,
    "infrastructure hang corrupt infrastructure": 8.0,
    "infrastructure infrastructure infrastructure infrastructure infrastructure+": 0.0,
    "infrastructure+ infrastructure": 1.0,
    "infrastructure infrastructure infrastructure infrastructure+ infrastructure": 1.0,
    "hang": 1.0,
    "corrupt": 1.0,
    "something_new": 1.0,
    "oom": 1.0,
    "oom+": 0.0,
    "nan": 1.0,
    "nan+ nan+": 0.0,
    "nan infrastructure nan": 4.0,
    "oom nan": 2.0,
}
STOPS = {
    "user": "training code",
    "user+": "training code",
    "infrastructure+ user": "training code",
    "config": "setting",
    "config+": "setting",
    "oom oom": "out of memory",
    "nan nan": "non-finite",
    "infrastructure nan nan": "non-finite",
    "infrastructure infrastructure infrastructure infrastructure infrastructure": "5 launches in a row made no progress",
    "infrastructure+ hang hang hang hang hang": "5 launches in a row made no progress",
    "nan infrastructure oom infrastructure nan": "5 launches in a row made no progress",
    "infrastructure infrastructure infrastructure infrastructure user": "training code",
}


@pytest.mark.parametrize("attempts", RESTARTS)
def test_goes_on_after(attempts: str) -> None:
    decision = decide(ended(attempts))
    assert decision.restart
    assert decision.delay == RESTARTS[attempts]
    assert decision.reason.startswith("restarting in " if attempts else "starting")


@pytest.mark.parametrize("attempts", STOPS)
def test_stops_and_says_why_after(attempts: str) -> None:
    decision = decide(ended(attempts))
    assert not decision.restart
    assert decision.reason.startswith("not restarting: ")
    assert STOPS[attempts] in decision.reason


@pytest.mark.parametrize("error_class", ["nan", "oom"])
def test_progress_of_the_last_launch_protects_it(error_class: str) -> None:
    assert decide(ended(f"{error_class} {error_class}+")).restart


@pytest.mark.parametrize("error_class", ["nan", "oom"])
def test_one_try_without_progress_is_all_there_is_also_after_progress(error_class: str) -> None:
    assert not decide(ended(f"{error_class}+ {error_class}")).restart


@pytest.mark.parametrize("error_class", ["infrastructure", "hang", "corrupt"])
def test_progress_every_time_is_never_a_crash_loop(error_class: str) -> None:
    for number in range(1, 200):
        assert decide(ended(f"{error_class}+ " * number)).restart


def test_every_history_ends_or_waits_within_bounds() -> None:
    for length in range(1, 5):
        for history in product(product(CLASSES, (False, True)), repeat=length):
            attempts = [Attempt(error_class=name, progress=progress) for name, progress in history]
            decision = decide(attempts)
            assert 0.0 <= decision.delay <= LONGEST_DELAY_SECS
            assert decision.delay == 0.0 or (decision.restart and decision.delay >= FIRST_DELAY_SECS)
            if attempts[-1].error_class in ("user", "config"):
                assert not decision.restart


@pytest.mark.parametrize("error_class", CLASSES)
def test_no_class_is_tried_for_ever(error_class: str) -> None:
    assert not decide(ended(f"{error_class.replace(' ', '_')} " * MAX_WITHOUT_PROGRESS)).restart


# what the run directory says


def launch(run: RunDir, token: int, resumed_from: str | None, ended: str | None, committed: int = 0) -> None:
    """A launch and how it ended: a class, `stopped`, or None when it left no word."""
    files.make_dirs(run.launches)
    record = LaunchRecord(
        token=token, resumed_from=resumed_from, created=0.0, host="h", pid=1, run="r", owner=f"{token}", notes={}
    )
    assert create_launch(run, record)
    if committed:
        files.make_dirs(run.checkpoint(CheckpointName(committed, token)))
        run.manifest(CheckpointName(committed, token)).write_text("{}")
    if ended is not None:
        reason = ended if ended == "stopped" else "failed"
        end = LaunchEnd(token=token, reason=reason, error_class=ended, step=0, detail="", log_tail="", ended=0.0)
        write_end(run, end)


def test_failed_and_silent_launches_of_this_budget_count(tmp_path: Path) -> None:
    run = RunDir(tmp_path)
    launch(run, 1, None, "user")
    launch(run, 2, None, "nan", committed=10)
    launch(run, 3, "000000000010-0002", None, committed=20)
    launch(run, 4, "000000000020-0003", "stopped", committed=25)
    launch(run, 5, "000000000025-0004", "oom")
    assert attempts_of(run, since=2) == ended("nan+ infrastructure+ oom")
    assert len(attempts_of(run, since=1)) == 4
    assert attempts_of(run, since=6) == []


def test_repeating_old_steps_is_no_progress(tmp_path: Path) -> None:
    run = RunDir(tmp_path)
    launch(run, 1, None, "infrastructure", committed=20)
    launch(run, 2, "000000000010-0001", "infrastructure", committed=10)
    assert [attempt.progress for attempt in attempts_of(run, since=1)] == [True, False]


def test_checkpoint_without_manifest_is_no_progress(tmp_path: Path) -> None:
    run = RunDir(tmp_path)
    launch(run, 1, None, "infrastructure")
    files.make_dirs(run.checkpoint(CheckpointName(10, 1)))
    assert attempts_of(run, since=1) == ended("infrastructure")
