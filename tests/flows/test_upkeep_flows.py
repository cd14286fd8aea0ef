"""The scheduled flows on a real server: what they find is in their result, in an artifact and in Slack, once; a dry run tells
nobody; and a run that has not started is nothing to do."""

from pathlib import Path

import pytest
from harness import Direct, Run, copy_tiny
from prefect import get_client
from prefect.client.schemas.sorting import ArtifactSort
from slack_server import CHANNEL, SlackServer

from perdure.flows.report import report
from perdure.flows.scrub import scrub
from perdure.flows.watchdog import watchdog
from perdure.tasks.verify import prove
from perdure.training.checkpoint import lineage
from perdure.training.errors import CheckpointDamaged
from perdure.training.run_dir import RunDir, rank_pack
from perdure.training.storage.folder import FolderStore
from perdure.training.travel.push import push

CANARY = "xoxb-canary-0123456789-abcdefABCDEF"


@pytest.fixture
def run(tmp_path: Path) -> Run:
    """A complete run, its last two checkpoints proven and in the store."""
    run = Run(copy_tiny(tmp_path / "tiny"))
    Direct(run).train_to_end()
    for name in lineage.lineage(run.dir)[:2]:
        assert prove(run.dir, name)
        push(run.dir, store(run), name)
    return run


def store(run: Run) -> FolderStore:
    return FolderStore(run.toml.parent / "store")


def rot(path: Path) -> None:
    data = bytearray(path.read_bytes())
    data[100] ^= 1
    path.write_bytes(data)


@pytest.mark.usefixtures("patient_slack")
def test_scrub_and_report_tell_what_they_found_once(prefect_api: str, run: Run, monkeypatch: pytest.MonkeyPatch) -> None:
    newest, second = lineage.lineage(run.dir)[:2]
    rot(run.dir.checkpoint(newest) / rank_pack(0))
    rot(store(run).root / RunDir.checkpoint_key(second, rank_pack(0)))
    monkeypatch.setenv("SLACK_BOT_TOKEN", CANARY)
    with SlackServer(CANARY) as slack:
        settings = [f"notify.slack_channel={CHANNEL}", f"notify.slack_api={slack.url}"]
        shown = scrub(str(run.toml), settings, budget="100%", dry_run=True)
        assert len(shown["chosen"]) == len(lineage.lineage(run.dir)) + 2
        assert slack.roots == []
        done = scrub(str(run.toml), settings, budget="100%")
        assert (done["repaired"], done["damaged"], done["problems"]) == (2, 0, {})
        assert slack.everything_said().count("copy was rotten and is repaired") >= 2
        assert scrub(str(run.toml), settings, budget="100%")["repaired"] == 0
        made = report(str(run.toml), settings, dry_run=True)
        assert (made["steps_made"], made["state"], made["next_action"]) == (40, "complete", "")
        assert "Report of the last" not in slack.everything_said()
        report(str(run.toml), settings)
        assert "Report of the last 7.0 days" in slack.everything_said()
        assert watchdog(str(run.toml), settings, patience=2.0)["state"] == "complete"
    with get_client(sync_client=True) as client:
        newest = client.read_artifacts(sort=ArtifactSort.CREATED_DESC)  # of all tests' artifacts, 200
        pages = [one.data for one in newest if isinstance(one.data, str)]
    assert sum("## tiny: the last 7 days" in page for page in pages) == 1


def test_what_nothing_can_repair_fails_the_flow_run(prefect_api: str, run: Run) -> None:
    rot(run.dir.checkpoint(lineage.lineage(run.dir)[2]) / rank_pack(0))
    with pytest.raises(CheckpointDamaged, match="damaged beyond repair: 1 copy"):
        scrub(str(run.toml), budget="100%")


def test_a_run_that_has_not_started_is_nothing_to_do(prefect_api: str, tmp_path: Path) -> None:
    toml = str(copy_tiny(tmp_path / "tiny"))
    assert scrub(toml)["copies"] == 0
    assert report(toml) == {}
    assert watchdog(toml) == {"state": "new", "action": ""}
