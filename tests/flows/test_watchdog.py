"""A run whose machine died (worker, flow process, agent, rank: all gone, no hook) goes on by the watchdog, to the same bits;
a run that lives, was stopped or is complete is not touched."""

import contextvars
import json
import os
import signal
import subprocess
import sys
import uuid
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
from harness import Direct, Run, all_pids, command_line, copy_tiny, wait_until
from prefect import get_client
from prefect.client.schemas.filters import FlowRunFilter
from prefect.client.schemas.objects import StateType
from prefect.deployments import run_deployment

from perdure.cli.main import main
from perdure.flows import attend
from perdure.flows.attend import Means
from perdure.flows.watchdog import watchdog
from perdure.training.process import ProcessId, identify

PREFECT = str(Path(sys.executable).parent / "prefect")
PATIENCE = 3.0


def slow(folder: Path) -> Run:
    """The tiny run, slow enough to be killed in the middle, without settings that only a command line knows."""
    toml = copy_tiny(folder)
    toml.write_text(toml.read_text() + "\n[params]\nsleep = 0.4\n")
    return Run(toml)


@pytest.fixture(scope="module")
def undisturbed(tmp_path_factory: pytest.TempPathFactory) -> str:
    """State digest of the same run that nobody killed."""
    run = slow(tmp_path_factory.mktemp("reference") / "tiny")
    Direct(run).train_to_end(["store.url=", "params.sleep=0"])
    return run.digest()


@dataclass
class Node:
    """A worker of its own on the test's server, and everything it started."""

    pool: str
    folder: Path

    def __post_init__(self) -> None:
        with open(self.folder / "worker.log", "ab") as log:
            command = [PREFECT, "worker", "start", "--pool", self.pool, "--type", "process"]
            self.worker = subprocess.Popen(command, stdout=log, stderr=log, cwd=self.folder)

    def lose(self, run: Run) -> None:
        """Everything at once, as a lost machine: nothing saves, no hook runs."""
        self.worker.kill()
        self.worker.wait()
        seen = [agent.pid] if (agent := run.agent()) else []
        found = [run.rank(), run.saver(), *(identify(pid) for pid in [*seen, *self.flow_processes()])]
        lose_all([one for one in found if one is not None])

    def flow_processes(self) -> list[int]:
        return [pid for pid in all_pids() if "prefect" in command_line(pid) and self.pool in environment(pid)]

    def stop(self) -> None:
        self.worker.terminate()
        try:
            self.worker.wait(30)
        except subprocess.TimeoutExpired:
            self.worker.kill()
            self.worker.wait()


def lose_all(processes: list[ProcessId]) -> None:
    for number in (signal.SIGSTOP, signal.SIGKILL):  # stopped first, so that none sees another die
        for process in processes:
            process.send(number)
    wait_until(lambda: not any(process.is_alive() for process in processes), "all dead")


def environment(pid: int) -> str:
    try:
        return Path(f"/proc/{pid}/environ").read_bytes().decode(errors="replace")
    except (FileNotFoundError, ProcessLookupError, PermissionError):
        return ""


def states(run: Run) -> list[str]:
    with get_client(sync_client=True) as client:
        found = client.read_flow_runs(flow_run_filter=FlowRunFilter())
    mine = [one for one in found if one.parameters.get("config") == str(run.toml) and one.deployment_id is not None]
    return [one.state.type.value for one in sorted(mine, key=lambda one: one.created) if one.state]


def test_a_lost_machine_is_noticed_and_the_run_goes_on_elsewhere_to_the_same_bits(
    prefect_api: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, undisturbed: str
) -> None:
    run, pool = slow(tmp_path / "tiny"), f"pool-{uuid.uuid4().hex[:8]}"
    monkeypatch.setenv("TEST_POOL", pool)
    node = Node(pool, tmp_path)
    try:
        deploy(pool)
        run_deployment(f"train/{pool}", parameters={"config": str(run.toml), "overrides": []}, timeout=0, as_subflow=False)
        wait_until(lambda: run.step() >= 12, "step 12")
        assert watchdog(str(run.toml), patience=PATIENCE)["state"] == "alive"
        assert len(states(run)) == 1
        node.lose(run)
        assert states(run) == [StateType.RUNNING.value]
        shown = watchdog(str(run.toml), patience=PATIENCE, dry_run=True)
        assert (shown["state"], shown["flow_run"]) == ("dead", "")
        assert states(run) == [StateType.RUNNING.value]
        with ThreadPoolExecutor(2) as two:
            contexts = [contextvars.copy_context() for _ in range(2)]  # the server's address is in it
            done = list(two.map(lambda context: context.run(attended, run), contexts))
        started = {one.flow_run for one in done if one.flow_run}
        assert len(started) == 1
        assert states(run)[0] == StateType.CRASHED.value
        assert len(states(run)) == 2
        node = Node(pool, tmp_path)
        wait_until(lambda: states(run) == ["CRASHED", "COMPLETED"], "a crashed flow run and a completed one")
        assert attended(run).verdict.state == "complete"
    finally:
        node.stop()
    assert run.digest() == undisturbed
    assert run.kinds().count("restarted") == 1


def attended(run: Run) -> Any:
    with get_client(sync_client=True) as client:
        [done] = attend.watch([run.dir], PATIENCE, Means(client=client))
    return done


def deploy(pool: str) -> None:
    with get_client(sync_client=True) as client:

        def has_pool() -> bool:
            return pool in [one.name for one in client.read_work_pools()]

        wait_until(has_pool, "the worker's pool")
        client.create_deployment(
            flow_id=client.create_flow_from_name("train"),
            name=pool,
            entrypoint="perdure.flows.train.train",
            work_pool_name=pool,
            pull_steps=[],
            job_variables={"env": {"TEST_POOL": pool}},
        )


@pytest.fixture
def command(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> Callable[..., dict[str, Any]]:
    """The verb, where no Prefect server is named."""
    monkeypatch.delenv("PREFECT_API_URL", raising=False)

    def perdure(*arguments: object) -> dict[str, Any]:
        capsys.readouterr()
        assert main(["watchdog", *map(str, arguments), "--patience", str(PATIENCE), "--json"]) == 0
        told: dict[str, Any] = json.loads(capsys.readouterr().out)["runs"][0]
        return told

    return perdure


@pytest.mark.chaos  # more than a minute of frozen heartbeats; the lost machine above is in every run
def test_a_frozen_agent_is_killed_and_a_dead_run_started_again_by_the_command(
    tmp_path: Path, command: Callable[..., dict[str, Any]], undisturbed: str
) -> None:
    run = slow(tmp_path / "tiny")
    direct = Direct(run)
    direct.launch(["store.url="])
    assert direct.trainer is not None
    wait_until(lambda: run.step() >= 7, "step 7")
    assert command(run.dir.root)["state"] == "alive"
    agent, rank = run.agent(), run.rank()
    assert agent is not None
    os.kill(agent.pid, signal.SIGSTOP)
    shown = command(run.dir.root, "--dry-run")
    assert shown["state"] == "frozen"
    assert agent.is_alive()
    told = command(run.dir.root)
    assert told["state"] == "frozen"
    assert "the flow that drives it goes on by itself" in told["action"]
    direct.trainer.process.wait(10)
    wait_until(lambda: rank is None or not rank.is_alive(), "no rank")
    direct.trainer.kill()
    direct.lock.close()
    told = command(run.dir.root)
    assert (told["state"], told["action"]) == ("dead", f"to go on: perdure run {run.toml}")
    told = command(tmp_path, "--restart")
    assert "goes on from step" in told["action"]
    again = command(run.dir.root, "--restart")
    assert (again["state"], again["action"]) == ("alive", "")
    wait_until(lambda: "completed" in run.kinds(), "the end")
    wait_until(lambda: not run.processes(), "nothing left")
    assert run.digest() == undisturbed
    assert command(run.toml)["state"] == "complete"
