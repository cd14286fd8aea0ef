"""The flow fills the tiers and tells Slack once; a dry run copies nothing; a tier that is away fails the flow run alone."""

import shutil
import time
from pathlib import Path
from typing import Any

import msgspec
import pytest
from harness import copy_tiny
from slack_server import CHANNEL, SlackServer
from snapshots import RUN_ID
from upkeep_runs import launch, name, save

from perdure.flows.archive import archive
from perdure.flows.start import open_run
from perdure.training import events
from perdure.training.checkpoint import facts
from perdure.training.checkpoint.run_info import RunInfo
from perdure.training.config import load_config
from perdure.training.errors import StoreError
from perdure.training.run_dir import RunDir

CANARY = "xoxb-canary-0123456789-abcdefABCDEF"
SHARE = ["store.url=", "tiers.share.url=share", "tiers.share.every=20"]
SETTINGS = [*SHARE, "tiers.far.url=far"]


@pytest.mark.usefixtures("patient_slack")
def test_tiers_are_filled_and_told_once(tmp_path: Path, prefect_api: str, monkeypatch: pytest.MonkeyPatch) -> None:
    toml = copy_tiny(tmp_path / "tiny")
    assert archive(str(toml), SETTINGS)["planned"] == [], "a run that has not started"
    config = load_config(toml, SETTINGS)
    run = RunDir(config.run_dir)
    run.root.mkdir(parents=True)
    info = RunInfo(id=RUN_ID, name="tiny", created=time.time(), steps=config.run.steps, chunk=config.run.chunk)
    run.run_json.write_bytes(msgspec.json.encode(info))
    launch(run, 1)
    for step in (10, 20):
        save(run, step)
    (toml.parent / "far").write_text("no folder")
    monkeypatch.setenv("SLACK_BOT_TOKEN", CANARY)
    with SlackServer(CANARY) as slack:
        told = [f"notify.slack_channel='{CHANNEL}'", f"notify.slack_api='{slack.url}'"]
        planned: dict[str, Any] = archive(str(toml), [*SHARE, *told], dry_run=True)
        assert (planned["planned"], planned["copied"]) == ([f"share:{name(20)}"], [])
        assert slack.replies == []
        with pytest.raises(StoreError, match="far: "):
            archive(str(toml), [*SETTINGS, *told])
        assert facts.trust(run, name(20)) == "archived"
        (toml.parent / "far").unlink()
        done = archive(str(toml), [*SETTINGS, *told])
        assert (done["copied"], done["problems"]) == ([f"far:{name(10)}", f"far:{name(20)}"], {})
        assert archive(str(toml), [*SETTINGS, *told])["planned"] == []
        notices = [event.data["text"] for event in events.read(run) if event.kind == "notice"]
        assert [text.split(" (")[0] for text in notices] == ["archived: 1 checkpoint", "archived: 2 checkpoints"]
        assert len(slack.replies) == 2
    shutil.rmtree(run.root)
    assert open_run(load_config(toml, SETTINGS), None, replan=True).resume == name(20), "a lost node, and no store"
    assert facts.is_in(run, name(20), "share")
    assert CANARY not in run.events.read_text()
