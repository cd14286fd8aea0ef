"""A Slack of our own, a run to talk about, and everything that was logged."""

import logging
from collections.abc import Iterator
from pathlib import Path

import pytest
from slack_server import CHANNEL, SlackServer

from perdure.training import events
from perdure.training.config import NotifySection
from perdure.training.run_dir import RunDir

CANARY = "xoxb-canary-0123456789-abcdefABCDEF"


@pytest.fixture
def slack(monkeypatch: pytest.MonkeyPatch, patient_slack: None) -> Iterator[SlackServer]:
    monkeypatch.setenv("SLACK_BOT_TOKEN", CANARY)
    with SlackServer(CANARY) as server:
        yield server
    assert server.problems == []
    assert CANARY not in server.everything_said()


@pytest.fixture
def settings(slack: SlackServer) -> NotifySection:
    return NotifySection(slack_channel=CHANNEL, slack_api=slack.url)


@pytest.fixture
def run(tmp_path: Path) -> RunDir:
    run = RunDir(tmp_path / "run")
    run.root.mkdir()
    events.record(run, "run_created", id="gpt-1a2b3c4d", name="gpt", steps=100, chunk=20)
    events.record(run, "launch_started", token=1, step=0, resumed_from=None)
    return run


@pytest.fixture
def logger(caplog: pytest.LogCaptureFixture) -> logging.Logger:
    caplog.set_level(logging.DEBUG)
    return logging.getLogger("test-run")
