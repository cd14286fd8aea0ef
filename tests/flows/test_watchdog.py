"""A dead run goes on by one watchdog, however many look; a frozen one is killed first."""

import contextvars
import json
import os
import signal
import uuid
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest
from harness import Direct, Run, copy_tiny, wait_until
from prefect import get_client
from prefect.client.schemas.actions import WorkPoolCreate
from prefect.client.schemas.filters import FlowRunFilter, FlowRunFilterDeploymentId

from perdure.cli.main import main
from perdure.flows import attend
from perdure.flows.attend import Means
from perdure.tasks import watchdog

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


@pytest.fixture
def dead(tmp_path: Path) -> Run:
    """Killed in the middle, with all that drove it."""
    run = slow(tmp_path / "tiny")
    direct = Direct(run)
    direct.launch(["store.url="])
    wait_until(lambda: run.step() >= 7, "step 7")
    assert direct.trainer is not None
    direct.trainer.kill()
    direct.lock.close()
    wait_until(lambda: not run.processes(), "nothing left")
    return run


def test_two_watchdogs_at_once_start_one_flow_run_by_its_deployment(
    prefect_api: str, dead: Run, monkeypatch: pytest.MonkeyPatch
) -> None:
    """That it goes on to the same bits, and is left alone while it lives, is in test_newcomer.py."""
    monkeypatch.setattr(watchdog, "_PAGE", 1)  # more deployments than one answer of the API holds
    pool = f"pool-{uuid.uuid4().hex[:8]}"
    with get_client(sync_client=True) as client:
        client.create_work_pool(WorkPoolCreate(name=pool, type="process"))
        train = client.create_flow_from_name("train")
        for other in ("0-before", "zz-after"):
            client.create_deployment(flow_id=train, name=other, parameters={"config": "/another/run.toml"})
        deployed = client.create_deployment(
            flow_id=train,
            name=dead.config.run.name,
            entrypoint="perdure.flows.train.train",
            work_pool_name=pool,
            parameters={"config": str(dead.toml)},
        )
        with ThreadPoolExecutor(2) as two:
            contexts = [contextvars.copy_context() for _ in range(2)]  # the server's address is in it
            done = list(two.map(lambda context: context.run(attended, dead), contexts))
        ours = FlowRunFilter(deployment_id=FlowRunFilterDeploymentId(any_=[deployed]))
        [started] = client.read_flow_runs(flow_run_filter=ours)
    assert {one.flow_run for one in done if one.flow_run} == {str(started.id)}
    assert dead.kinds().count("restarted") == 1


def attended(run: Run) -> Any:
    with get_client(sync_client=True) as client:
        [done] = attend.watch([run.dir], PATIENCE, Means(client=client))
    return done


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
    direct.trainer.process.wait(60)
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
