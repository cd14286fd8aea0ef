"""`make chaos`: runs killed at random moments, whichever process it hits, end with the bits of a run nobody killed."""

import os
import random
import signal
import subprocess
import time
from pathlib import Path

import pytest
from harness import Direct, Run, copy_tiny, kill, wait_until

from perdure.deployments import server
from perdure.training.checkpoint.lineage import read_launches
from perdure.training.process import ProcessId, identify
from perdure.training.run_dir import CheckpointName

RUNS = int(os.environ.get("PERDURE_CHAOS_RUNS", "10"))
KILLS = 3
SEED = int(os.environ.get("PERDURE_CHAOS_SEED", str(time.time_ns() % 1_000_000)))
VICTIMS = ("rank", "saver", "agent", "flow", "parent", "all")
SLOW = "params.sleep=0.2"
pytestmark = pytest.mark.chaos


@pytest.fixture(scope="module")
def reference(tmp_path_factory: pytest.TempPathFactory) -> str:
    run = Run(copy_tiny(tmp_path_factory.mktemp("reference") / "tiny"), "store.url=''")
    assert Direct(run).train_to_end().reason == "complete"
    return run.digest()


@pytest.fixture(scope="module", autouse=True)
def prefect(tmp_path_factory: pytest.TempPathFactory) -> None:
    home = server.ServerHome(tmp_path_factory.mktemp("prefect") / "home")
    with server.acquire(home) as local:
        os.environ.update(server.client_environment(local.url, home))
        yield
        del os.environ["PREFECT_API_URL"]


class Campaign:
    """One run under fire."""

    def __init__(self, run: Run, dice: random.Random) -> None:
        self.run, self.dice = run, dice
        self.parent = run.start()
        self.kills: list[tuple[float, str, int]] = []
        """When, whom, and the newest committed step just before."""

    def ensure_parent(self) -> None:
        if self.parent.poll() is not None:
            assert self.parent.returncode != 7, self.run.log()
            self.parent = self.run.start()

    def strike(self) -> None:
        """Kill a random victim at a random moment of its life."""
        self.ensure_parent()
        victim = self.dice.choice(VICTIMS)
        step = self.run.step()
        if self.dice.random() < 0.75:  # most of them while it trains, the others while it starts
            wait_until(lambda: self.run.step() > step or self.parent.poll() is not None, "a step")
        time.sleep(self.dice.uniform(0.0, 2.5))
        if self.parent.poll() is not None:
            return
        found = self.find(victim)
        newest = max((name.step for name in self.run.committed()), default=0)
        if not found:
            return
        self.kills.append((time.time(), victim, newest))
        for process in found:
            kill(process)
        if victim in ("parent", "all"):
            self.parent.wait()

    def find(self, victim: str) -> list[ProcessId]:
        parts = {
            "rank": self.run.rank,
            "saver": self.run.saver,
            "agent": self.run.agent,
            "flow": self.run.flow,
            "parent": lambda: identify(self.parent.pid),
        }
        wanted = parts.values() if victim == "all" else [parts[victim]]
        return [process for look in wanted if (process := look()) is not None]

    def finish(self) -> int:
        self.ensure_parent()
        return self.parent.wait(240)


@pytest.mark.timeout(900)
@pytest.mark.parametrize("number", range(RUNS))
def test_killed_run_ends_bit_identical(number: int, tmp_path: Path, reference: str) -> None:
    dice = random.Random(SEED * 1000 + number)
    run = Run(copy_tiny(tmp_path / "tiny"), SLOW)
    campaign = Campaign(run, dice)
    deadline = time.monotonic() + 240
    while len(campaign.kills) < KILLS and time.monotonic() < deadline and "completed" not in kinds(run):
        campaign.strike()
    code = campaign.finish()
    print(f"seed {SEED} run {number}: kills {[(who, step) for _, who, step in campaign.kills]}, exit {code}")
    assert code == 0, run.log()
    assert run.digest() == reference
    assert run.processes() == []
    assert_nothing_committed_was_lost(run, campaign)


def kinds(run: Run) -> list[str]:
    return run.kinds() if run.dir.events.exists() else []


def assert_nothing_committed_was_lost(run: Run, campaign: Campaign) -> None:
    """Every launch began at or after the newest checkpoint that was committed when its predecessor was shot."""
    for record in read_launches(run.dir).values():
        before = [step for at, _, step in campaign.kills if at < record.created]
        start = CheckpointName.parse(record.resumed_from or "")
        assert (start.step if start else 0) >= max(before, default=0), (record, campaign.kills)


def test_node_lost_again_and_again_ends_bit_identical_from_the_store(tmp_path: Path, reference: str) -> None:
    """The run directory is deleted with everything that runs; what was pushed is enough."""
    run = Run(copy_tiny(tmp_path / "tiny"), SLOW)
    for wanted in (1, 2):
        parent = run.start()
        wait_until(lambda wanted=wanted: kinds(run).count("pushed") >= wanted, f"{wanted} pushed")
        victims = [run.flow(), run.agent()]
        parent.send_signal(signal.SIGKILL)
        parent.wait()
        for victim in victims:
            if victim:
                kill(victim)
        wait_until(lambda: run.processes() == [], "no process left", 20)
        subprocess.run(["rm", "-rf", str(run.dir.root)], check=True)
    assert run.finish() == 0, run.log()
    assert run.digest() == reference
