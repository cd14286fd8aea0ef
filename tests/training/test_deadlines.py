"""Deadlines of a launch: time spent waiting for the disk counts for none of them."""

import time
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from perdure.training.agent.watch import Deadlines
from perdure.training.config import load_config

TINY = Path(__file__).parent.parent / "crash/tiny/run.toml"


def rank(**more: Any) -> Any:  # Any: what Deadlines looks at of a rank
    told = {"made_a_step": False, "phase": "setup", "longest_step": 0.0, "last_news": time.monotonic(), "step": 0}
    return SimpleNamespace(**{**told, **more})


@pytest.mark.parametrize(
    ("about", "says"), [({}, "startup_timeout"), ({"made_a_step": True, "phase": "training", "step": 3}, "after step 3")]
)
def test_waiting_for_the_disk_is_no_hang_and_training_that_stands_still_is(about: dict[str, Any], says: str) -> None:
    deadlines = Deadlines(load_config(TINY, ["launch.startup_timeout=1", "launch.step_timeout=1"]))
    waiting = rank(**about)
    end = time.monotonic() + 1.5
    while time.monotonic() < end:
        assert deadlines.problem(waiting, paused=True) == ""
        time.sleep(0.05)
    while not (problem := deadlines.problem(waiting, paused=False)):
        assert time.monotonic() < end + 30
        time.sleep(0.05)
    assert says in problem


@pytest.mark.parametrize(
    ("about", "limit"),
    [({}, "launch.startup_timeout=10"), ({"made_a_step": True, "phase": "training"}, "launch.step_timeout=10")],
)
def test_time_in_which_the_agent_stood_still_itself_is_no_hang(
    about: dict[str, Any], limit: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    began = time.monotonic()
    monkeypatch.setattr(time, "monotonic", lambda: began)
    deadlines, silent = Deadlines(load_config(TINY, [limit])), rank(**about)
    for seconds, hangs in ((1, False), (301, False), (305, False), (309, False), (312, True)):
        monkeypatch.setattr(time, "monotonic", lambda seconds=seconds: began + seconds)
        assert bool(deadlines.problem(silent, paused=False)) == hangs, seconds


@pytest.mark.parametrize(("longest", "limit"), [(0.1, 120), (40.0, 200)])
def test_a_minute_without_a_step_is_no_hang_unless_that_is_said(
    longest: float, limit: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    began = time.monotonic()
    monkeypatch.setattr(time, "monotonic", lambda: began)
    deadlines = Deadlines(load_config(TINY))
    training = rank(made_a_step=True, phase="training", step=3, longest_step=longest, last_news=began)
    for seconds in range(limit):
        monkeypatch.setattr(time, "monotonic", lambda seconds=seconds: began + seconds)
        assert deadlines.problem(training, paused=False) == ""
    monkeypatch.setattr(time, "monotonic", lambda: began + limit + 1)
    assert f"limit {limit} s" in deadlines.problem(training, paused=False)
