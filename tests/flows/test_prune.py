"""The flow deletes what retention lets go, tells Slack once, shows a dry run, and leaves a busy run for later."""

import time
from pathlib import Path
from typing import Any

import msgspec
import pytest
from harness import copy_tiny
from slack_server import CHANNEL, SlackServer
from snapshots import RUN_ID
from upkeep_runs import launch, left, name, save

from perdure.flows.prune import prune
from perdure.training import events
from perdure.training.amounts import size
from perdure.training.checkpoint.pins import pin
from perdure.training.checkpoint.run_info import RunInfo
from perdure.training.checkpoint.upkeep import upkeep
from perdure.training.config import load_config
from perdure.training.errors import StoreError
from perdure.training.run_dir import RunDir
from perdure.training.storage.folder import FolderStore
from perdure.training.travel.contents import remote_checkpoints
from perdure.training.travel.push import push

CANARY = "xoxb-canary-0123456789-abcdefABCDEF"
SETTINGS = ["store.url=", "retention.keep_last=1", "retention.keep_every=20"]
TIERS = [
    "tiers.share.url=share",
    "tiers.share.retention.keep_last=2",
    "tiers.other.url=other",
    "tiers.other.retention.keep_last=1",
]


@pytest.fixture
def toml(tmp_path: Path, prefect_api: str) -> Path:
    """A run with four good fulls: steps 10, 20, 30, 40; 10 is a milestone."""
    toml = copy_tiny(tmp_path / "tiny")
    config = load_config(toml, SETTINGS)
    run = RunDir(config.run_dir)
    run.root.mkdir(parents=True)
    info = RunInfo(id=RUN_ID, name="tiny", created=time.time(), steps=config.run.steps, chunk=config.run.chunk)
    run.run_json.write_bytes(msgspec.json.encode(info))
    launch(run, 1)
    for step in (10, 20, 30, 40):
        save(run, step)
    pin(run, "first", name(10))
    return toml


def flow(toml: Path, *more: str, dry_run: bool = False) -> dict[str, Any]:
    found: dict[str, Any] = prune(str(toml), [*SETTINGS, *more], dry_run)
    return found


def run_of(toml: Path) -> RunDir:
    return RunDir(load_config(toml, SETTINGS).run_dir)


def notices(toml: Path) -> list[str]:
    return [event.data["text"] for event in events.read(run_of(toml)) if event.kind == "notice"]


@pytest.mark.usefixtures("patient_slack")
def test_what_was_planned_is_deleted_and_said_once(toml: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("SLACK_BOT_TOKEN", CANARY)
    with SlackServer(CANARY) as slack:
        told = [f"notify.slack_channel='{CHANNEL}'", f"notify.slack_api='{slack.url}'"]
        planned = flow(toml, *told, dry_run=True)
        assert (planned["planned"], planned["removed"], left(run_of(toml))) == ([str(name(30))], [], [10, 20, 30, 40])
        assert slack.messages == {}
        done = flow(toml, *told)
        assert done["removed"] == planned["planned"]
        assert done["freed_bytes"] == planned["freed_bytes"] > 0
        assert left(run_of(toml)) == [10, 20, 40]
        assert flow(toml, *told)["removed"] == []
        assert notices(toml) == [f"pruned: 1 checkpoint deleted; {size(done['freed_bytes'])} freed"]
        assert [reply["text"] for reply in slack.replies] == [f"Note: {notices(toml)[0]}"]
    assert CANARY not in run_of(toml).events.read_text()


def test_a_run_somebody_else_works_on_is_left_for_later(toml: Path) -> None:
    with upkeep(run_of(toml)):
        assert flow(toml)["busy"]
        assert left(run_of(toml)) == [10, 20, 30, 40]
    assert not flow(toml)["busy"]
    assert left(run_of(toml)) == [10, 20, 40]


def test_each_place_is_pruned_by_its_own_retention_and_one_of_another_run_stops_no_other(toml: Path) -> None:
    run, share = run_of(toml), FolderStore(toml.parent / "share")
    for step in (20, 30, 40):
        push(run, share, name(step), place="share")
    FolderStore(toml.parent / "other").put(RunDir.RUN_KEY, run.run_json.read_bytes().replace(RUN_ID.encode(), b"another"))
    planned = flow(toml, "tiers.share.url=share", "tiers.share.retention.keep_last=2", dry_run=True)["places"]
    assert (planned["share"]["planned"], planned["share"]["removed"]) == ([str(name(20))], [])
    with pytest.raises(StoreError, match="not pruned: other"):
        flow(toml, *TIERS)
    assert [one.step for one in remote_checkpoints(share)] == [30, 40]
    assert left(run) == [10, 20, 40], "the run directory goes by its own"
    assert any("share: 1 checkpoint deleted" in text for text in notices(toml))


def test_a_run_that_has_not_started_is_nothing_to_do(tmp_path: Path, prefect_api: str) -> None:
    done = flow(copy_tiny(tmp_path / "tiny"))
    assert (done["kept"], done["removed"], done["busy"]) == (0, [], False)
