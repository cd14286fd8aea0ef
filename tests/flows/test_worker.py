"""The same flow under a real process worker: a killed flow process is followed by a new flow run, a cancelled one by none."""

import signal
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from harness import Run, copy_tiny, kill, wait_until
from prefect import get_client
from prefect.client.schemas.filters import FlowRunFilter, FlowRunFilterId
from prefect.client.schemas.objects import StateType
from prefect.deployments import run_deployment
from prefect.states import Cancelling
from prefect_worker import flow_process, flow_runs, serving_pool, states

from perdure.training.process import ProcessId


@pytest.fixture(scope="module")
def worker(prefect_api: str, tmp_path_factory: pytest.TempPathFactory) -> Iterator[None]:
    with serving_pool(tmp_path_factory.mktemp("worker")):
        yield


@pytest.fixture
def run(tmp_path: Path, worker: None) -> Run:
    return Run(copy_tiny(tmp_path / "tiny"), "params.sleep=0.1")


def start(run: Run) -> Any:
    return run_deployment("train/tests", parameters={"config": str(run.toml), "overrides": run.settings}, timeout=0)


def open_tasks(run: Run) -> list[str]:
    """Task runs of this run's flow runs that are in no end state."""
    ours = FlowRunFilter(id=FlowRunFilterId(any_=[one.id for one in flow_runs(run)]))
    with get_client(sync_client=True) as client:
        found = client.read_task_runs(flow_run_filter=ours)
    return [one.name for one in found if one.state is None or not one.state.is_final()]


def is_held_again(run: Run, before: ProcessId | None) -> bool:
    """By a rank after that one, which may have come as far."""
    rank, held = run.rank(), run.toml.parent / "held"
    return rank is not None and rank != before and held.exists() and held.read_text() == str(rank.pid)


def test_flow_process_killed_or_told_to_end_is_followed_by_a_new_flow_run_that_completes(run: Run) -> None:
    """Told by SIGTERM, as on a drained or preempted machine, the trainer saves, and the next goes on from that very step."""
    run.settings += run.held_at(30)
    start(run)
    wait_until(lambda: run.step() >= 12, "step 12")
    first = run.rank()
    kill(flow_process(run))
    wait_until(lambda: states(run) == ["CRASHED", "RUNNING"], "a second flow run")
    wait_until(lambda: is_held_again(run, first), "the second launch at step 30")
    flow_process(run).send(signal.SIGTERM)
    run.go_on(told_to_stop=True)
    wait_until(lambda: states(run) == ["CRASHED", "CRASHED", "COMPLETED"], "two crashed flow runs and a completed one")
    assert run.committed()[-1].step == 40
    assert run.kinds().count("completed") == 1
    assert "train tiny" in {one.name for one in flow_runs(run)}
    wait_until(lambda: open_tasks(run) == [], "nor does a task run say Running for ever")
    third, stopped = run.dir.launch_record(3).read_text(), [one for one in run.events() if one["kind"] == "stopped"]
    assert f'"{int(str(stopped[-1]["step"])):012d}-0002"' in third


def test_cancelled_flow_run_saves_stops_and_is_not_restarted(run: Run) -> None:
    run.settings.append("run.steps=2000")  # it is not done before the worker hears of it
    flow_run = start(run)
    wait_until(lambda: run.step() >= 12, "step 12")
    seen = [run.agent(), run.rank(), run.saver()]
    with get_client(sync_client=True) as client:
        client.set_flow_run_state(flow_run.id, Cancelling())
    wait_until(lambda: states(run) == [StateType.CANCELLED.value], "the state Cancelled")
    wait_until(lambda: not any(process.is_alive() for process in seen if process), "nothing alive")
    assert run.committed()[-1].step >= 12
    assert len(list(run.dir.launches.glob("????.json"))) == 1
    assert len(flow_runs(run)) == 1
