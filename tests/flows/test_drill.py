"""Drills of a run that trains meanwhile: the store alone gives it back, and its own code goes on, through kills, to the bits of
the live run. A killed drill leaves nothing that counts; rot and code that is not reproducible are told by name."""

import json
import os
import signal
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import msgspec
import pytest
from conftest import S3Server
from harness import PATIENCE, Direct, Run, all_pids, command_line, copy_tiny, wait_until
from prefect import get_client
from slack_server import CHANNEL, SlackServer

from perdure.flows.drill import drill
from perdure.tasks.verify import prove
from perdure.training.checkpoint import catalog, lineage
from perdure.training.drill.folder import sweep
from perdure.training.drill.record import read_drills
from perdure.training.process import ProcessId
from perdure.training.run_dir import CheckpointName, RunDir, rank_pack
from perdure.training.storage.s3 import S3Store
from perdure.training.travel.push import push

CANARY = "xoxb-canary-0123456789-abcdefABCDEF"
SECOND, NEWEST, END = CheckpointName(40, 1), CheckpointName(50, 1), CheckpointName(60, 1)


@dataclass
class Live:
    """A run in the midst of its 400 steps; checkpoints 40 and 50 are in its store."""

    run: Run
    direct: Direct
    store: S3Store

    def stored(self) -> dict[str, Any]:
        found = self.store.client.list_objects_v2(Bucket=self.store.bucket, Prefix=self.store._prefix)["Contents"]
        return {one["Key"].removeprefix(self.store._prefix): (one["ETag"], one["LastModified"]) for one in found}

    def rot(self, name: CheckpointName) -> str:
        key = RunDir.checkpoint_key(name, rank_pack(0))
        data = bytearray(self.store.get(key, limit=1 << 20))
        data[100] ^= 1
        self.store.put(key, bytes(data))
        return key

    def make_irreproducible(self) -> None:
        code = self.run.toml.parent / "train.py"
        code.write_text(code.read_text().replace("model(x)", "model(x * (1 + int.from_bytes(os.urandom(4)) / 2**32))"))


@pytest.fixture
def live(tmp_path: Path, open_s3: Callable[..., S3Store]) -> Iterator[Live]:
    store, toml = open_s3(), copy_tiny(tmp_path / "tiny")
    where = f'url = "{store.url}"\nendpoint_url = "{store.settings.endpoint_url}"\nregion = "us-east-1"'
    text = toml.read_text().replace('url = "store"', where).replace("steps = 40", "steps = 400")
    toml.write_text(text.replace("chunk = 10", "chunk = 100").replace("every = 5", "every = 10"))
    run = Run(toml)
    direct = Direct(run)
    trainer = direct.launch(["launch.env.TINY_sleep=0.05"], lease=NEWEST.step)
    try:
        assert trainer.wait_for_checkpoint(NEWEST.step, lambda: None)
        for name in (SECOND, NEWEST):
            assert prove(run.dir, name)
            push(run.dir, store, name)
        trainer.lease(400)
        yield Live(run, direct, store)
    finally:
        trainer.kill()


@pytest.fixture
def bare(live: Live, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """TMPDIR, with a short path and nothing else in it."""
    with tempfile.TemporaryDirectory(prefix="d") as folder:
        monkeypatch.setenv("TMPDIR", folder)
        monkeypatch.setattr(tempfile, "tempdir", folder)
        yield Path(folder)


def command(live: Live, *more: str) -> list[str]:
    return [sys.executable, "-m", "perdure.cli", "drill", str(live.run.toml), *more]


def killed_drill(live: Live, bare: Path) -> ProcessId:
    """A drill that dies while its first continuation starts; the agent it leaves."""

    def agents() -> list[Path]:
        return list(bare.glob("perdure-drill-*/run/agent.json"))

    process = subprocess.Popen(command(live), stderr=subprocess.DEVNULL)
    try:
        wait_until(agents, "the drill launches an agent")
        agent = msgspec.json.decode(agents()[0].read_bytes(), type=ProcessId)
    finally:
        process.send_signal(signal.SIGKILL)
        process.wait()
    return agent


@pytest.mark.chaos  # more than a minute; one that passes is in test_newcomer.py, others in tests/cli and tests/training
def test_drills_of_a_live_run(
    prefect_api: str, s3_server: S3Server, live: Live, bare: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name, value in s3_server.read_only.environment().items():  # a drill needs no more
        monkeypatch.setenv(name, value)
    before, run = live.stored(), live.run.dir
    agent = killed_drill(live, bare)
    assert [path.name.startswith("perdure-drill-") for path in bare.iterdir()] == [True]
    assert read_drills(run) == []

    monkeypatch.setenv("SLACK_BOT_TOKEN", CANARY)
    with SlackServer(CANARY) as slack:
        done = drill(str(live.run.toml), [f"notify.slack_channel={CHANNEL}", f"notify.slack_api={slack.url}"])
        assert [one["text"].splitlines()[0] for one in slack.replies if "Drill" in one["text"]] == ["Drill passed"]
        assert "recovery point: " in slack.everything_said()
        assert slack.problems == []
    assert not agent.is_alive()
    assert list(bare.iterdir()) == [], "its own folder and the killed one's are gone"
    assert (done["passed"], done["identical"], done["problems"]) == (True, True, ())
    assert (done["newest"], done["resumed"], done["steps"]) == (str(NEWEST), str(NEWEST), 10)
    assert [kill.split()[0] for kill in done["kills"]] == ["rank", "agent"]
    assert done["recovery_secs"] == pytest.approx(done["pull_secs"] + done["prove_secs"] + done["start_secs"])

    rotten = live.rot(NEWEST)
    live.make_irreproducible()
    answer = subprocess.run(
        command(live, "--json", "--steps", "1", "--set", "drill.recovery_time=1s"), capture_output=True, text=True
    )
    assert answer.returncode == 11
    failed = json.loads(answer.stdout)
    assert failed["newest"] == str(SECOND)
    assert failed["point_steps"] >= 10
    assert [str(NEWEST) in skipped for skipped in failed["skipped"]] == [True]
    assert [problem.split(":")[0] for problem in failed["problems"]] == ["not reproducible", "recovery time"]
    assert any(leaf.startswith("model/") for leaf in failed["differing"])
    assert list(bare.iterdir()) == []

    assert live.direct.trainer is not None
    live.direct.trainer.process.wait(PATIENCE)
    assert live.direct.end().reason == "complete"
    assert list(lineage.read_launches(run)) == [1]
    assert catalog.manifest_of(run, END).state_digest == done["digest"], "the live run trained the same bits"
    assert {key: value for key, value in live.stored().items() if key != rotten} == {
        key: value for key, value in before.items() if key != rotten
    }
    assert [one.passed for one in read_drills(run)] == [True, False]
    with get_client(sync_client=True) as client:
        pages = [one.data for one in client.read_artifacts() if one.key and one.key.startswith("drill-")]
    assert ["came back from the store" in str(page) for page in pages] == [True]
    assert os.environ["SLACK_BOT_TOKEN"] not in str(pages)


def test_a_run_that_has_not_started_is_nothing_to_do(prefect_api: str, tmp_path: Path) -> None:
    assert "this one has no checkpoint yet" in drill(str(copy_tiny(tmp_path / "tiny")))["nothing"]


@pytest.mark.chaos
@pytest.mark.parametrize("words", ["pulling from", "undisturbed", "with kills in between"])
def test_a_drill_killed_in_any_phase_leaves_nothing_that_counts(live: Live, bare: Path, words: str) -> None:
    before = live.stored()
    with subprocess.Popen(command(live), stderr=subprocess.PIPE, text=True) as process:
        assert process.stderr is not None
        said = next(line for line in process.stderr if words in line)
        process.kill()
    assert said
    assert len(sweep()) == 1
    assert list(bare.iterdir()) == []
    assert [pid for pid in all_pids() if str(bare) in command_line(pid)] == []
    assert read_drills(live.run.dir) == []
    assert live.stored() == before
