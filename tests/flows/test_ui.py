"""What Prefect's database holds of a run: artifacts patched in place, tags, links, no row left open, and no secret."""

import json
import logging
import os
import signal
import socket
import subprocess
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any
from uuid import UUID

import pytest
from conftest import copy_database
from harness import Direct, Run, copy_tiny, kill, wait_until
from prefect import get_client
from prefect.client.orchestration import SyncPrefectClient
from prefect.client.schemas.filters import FlowRunFilter, FlowRunFilterId
from prefect.client.schemas.objects import StateType
from prefect.settings import PREFECT_API_URL, temporary_settings
from prefect.states import Running
from prefect_rows import flow_runs_of

from perdure.deployments import server
from perdure.flows.train import train
from perdure.tasks import artifacts
from perdure.tasks.artifacts import Board
from perdure.training import events
from perdure.training.checkpoint.run_info import create_run_info
from perdure.training.run_dir import RunDir

OPEN = {StateType.RUNNING, StateType.PENDING, StateType.CANCELLING}


@pytest.fixture
def client(prefect_api: str) -> Iterator[SyncPrefectClient]:
    with get_client(sync_client=True) as client:
        yield client


@pytest.fixture
def run(tmp_path: Path, prefect_api: str) -> Run:
    return Run(copy_tiny(tmp_path / "tiny"))


@pytest.fixture(scope="module")
def trained(tmp_path_factory: pytest.TempPathFactory) -> Run:
    """To the end, with nothing that disturbed it."""
    run = Run(copy_tiny(tmp_path_factory.mktemp("trained") / "tiny"), "store.url=''")
    assert Direct(run).train_to_end().reason == "complete"
    return run


def open_tasks_of(client: SyncPrefectClient, flow_run: Any) -> list[str]:
    """To be waited for: a server writes down the states of task runs some time after it took them."""
    found = client.read_task_runs(flow_run_filter=FlowRunFilter(id=FlowRunFilterId(any_=[flow_run.id])))
    return [one.name for one in found if one.state is not None and one.state.type in OPEN]


def artifacts_of(client: SyncPrefectClient, flow_run: Any) -> dict[str, Any]:
    found = client.read_artifacts(flow_run_filter=FlowRunFilter(id=FlowRunFilterId(any_=[flow_run.id])))
    assert len({one.type for one in found}) == len(found), "one row a kind, patched"
    return {one.type: one for one in found}


def shows_launch(client: SyncPrefectClient, flow_run: Any) -> bool:
    """Its first update may come just before its first launch, and the next one only at its distance."""
    shown = artifacts_of(client, flow_run)
    return "launch:1" in flow_run.tags and "table" in shown and "](data:image/svg+xml;base64," in shown["markdown"].data


def test_killed_flow_run_is_closed_linked_and_followed_to_the_same_bits(
    run: Run, client: SyncPrefectClient, trained: Run
) -> None:
    parent = run.start_held_at(12)
    wait_until(lambda: shows_launch(client, flow_runs_of(run)[0]), "its first launch in its artifacts")
    kill(run.flow())
    run.go_on(told_to_stop=True)
    assert parent.wait(120) == 0, run.log()
    assert run.digest() == trained.digest()
    assert run.processes() == []
    first, second = flow_runs_of(run)
    assert [first.state.type, second.state.type] == [StateType.CRASHED, StateType.COMPLETED]
    assert "died without a word" in first.state.message
    assert str(second.id) in first.state.message
    wait_until(lambda: open_tasks_of(client, first) + open_tasks_of(client, second) == [], "no task run left open")
    records = [json.loads(path.read_text()) for path in run.dir.flow_runs.glob("*.json")]
    assert {one["page"].rpartition("/v2/")[2] for one in records} == {f"runs/flow-run/{one.id}" for one in (first, second)}
    assert {"run:tiny", "launch:1"} <= set(first.tags)
    assert {"run:tiny", "launch:2"} <= set(second.tags)
    shown = artifacts_of(client, second)
    assert set(shown) == {"progress", "markdown", "table"}
    assert shown["progress"].data == 100.0
    assert "step 40 of 40" in shown["markdown"].data
    assert shown["markdown"].data.count("](data:image/svg+xml;base64,") == 2
    assert f"[1](/v2/runs/flow-run/{first.id}), **2**" in shown["markdown"].data
    before = artifacts_of(client, first)["markdown"].data
    assert before.startswith(f"Flow runs of this run: **1**, [2](/v2/runs/flow-run/{second.id}) (this one is over")
    assert "](data:image/svg+xml;base64," in before


def test_flow_killed_while_the_run_is_stopped_is_closed_by_the_parent(run: Run, client: SyncPrefectClient) -> None:
    parent = run.start_held_at(12)
    flow = run.flow()
    parent.send_signal(signal.SIGTERM)
    kill(flow)
    run.go_on(told_to_stop=True)
    assert parent.wait(60) == 75, run.log()
    (only,) = flow_runs_of(run)
    assert only.state.type == StateType.CRASHED
    wait_until(lambda: open_tasks_of(client, only) == [], "no task run left open")


def board(run: Run, flow_run_id: str) -> Board:
    logger = logging.getLogger("board")
    return Board(run.config, [], flow_run_id, [], logger)


@pytest.fixture
def patient(monkeypatch: pytest.MonkeyPatch) -> None:
    """A request that takes long is no failure, and no update comes by time alone."""
    monkeypatch.setattr(artifacts, "TIMEOUT_SECS", 100.0)
    monkeypatch.setattr(artifacts, "MIN_SECS", 100.0)


@pytest.mark.usefixtures("patient")
def test_many_chunks_are_three_rows_and_few_events(trained: Run, client: SyncPrefectClient) -> None:
    flow_run = client.create_flow_run(train, parameters={"config": str(trained.toml)}, state=Running())
    shown = board(trained, str(flow_run.id))
    shown.min_secs = 0.0
    for step in range(10):
        events.record(trained.dir, "chunk_finished", start=step, end=step, loss=float(step), seconds=1.0)
        shown.ask()
        wait_until(
            lambda loss=f"loss {step}": loss in artifacts_of(client, flow_run).get("markdown", _Nothing).data, "an update"
        )
    shown.close(100.0)
    rows = artifacts_of(client, flow_run)
    assert len(rows) == 3
    assert [row["step"] for row in rows["table"].data][:2] == [40, 35]
    assert {"kind", "trust", "size", "where", "age"} <= set(rows["table"].data[0])
    assert all(len(str(row.data)) < 100_000 for row in rows.values())


class _Nothing:
    data = ""


@pytest.mark.usefixtures("patient")
def test_updates_keep_their_distance(run: Run, client: SyncPrefectClient, monkeypatch: pytest.MonkeyPatch) -> None:
    """A hundred chunks in a moment are the first update and the one at the end."""
    create_run_info(run.dir, run.config)
    flow_run = client.create_flow_run(train, parameters={"config": str(run.toml)}, state=Running())
    drawn = []
    real = artifacts.page.render
    monkeypatch.setattr(artifacts.page, "render", lambda *args, **more: drawn.append(1) or real(*args, **more))
    shown = board(run, str(flow_run.id))
    shown.ask()
    wait_until(lambda: artifacts_of(client, flow_run).get("table"), "the first update")
    for _ in range(100):
        shown.ask()
    shown.close(100.0)
    assert len(drawn) == 2


@pytest.mark.usefixtures("patient")
def test_end_of_a_complete_run_is_waited_for(run: Run, client: SyncPrefectClient, monkeypatch: pytest.MonkeyPatch) -> None:
    create_run_info(run.dir, run.config)
    flow_run = client.create_flow_run(train, parameters={"config": str(run.toml)}, state=Running())
    slow, real = threading.Event(), artifacts.page.render
    monkeypatch.setattr(artifacts.page, "render", lambda *args, **more: slow.wait(100) and real(*args, **more))
    shown = board(run, str(flow_run.id))
    shown.close(0.0)  # in a hurry
    assert artifacts_of(client, flow_run) == {}
    ending = threading.Thread(target=shown.close, args=(100.0,))
    ending.start()
    slow.set()
    ending.join()
    assert set(artifacts_of(client, flow_run)) == {"progress", "markdown", "table"}


@pytest.mark.parametrize("kind", ["refuses", "is silent"])
def test_server_that_fails_is_said_once_and_holds_nobody_up(
    run: Run, kind: str, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    create_run_info(run.dir, run.config)
    monkeypatch.setattr(artifacts, "TIMEOUT_SECS", 60.0)
    caplog.set_level(logging.INFO)

    def said() -> list[str]:
        return [record.getMessage() for record in caplog.records if record.name == "board"]

    with socket.socket() as listener:
        listener.bind(("127.0.0.1", 0))
        if kind == "is silent":
            listener.listen()
        with temporary_settings({PREFECT_API_URL: f"http://127.0.0.1:{listener.getsockname()[1]}/api"}):
            shown = board(run, str(UUID(int=7)))
            shown.min_secs = 0.0
            shown.ask()
            if kind == "is silent":
                assert not said(), "nobody waited for the answer"
                listener.accept()[0].close()
            wait_until(said, "the warning")
            monkeypatch.setattr(artifacts, "TIMEOUT_SECS", 0.3)
            shown.ask()
            shown.close(artifacts.HURRIED_SECS)
    [warning] = said()
    assert "training goes on" in warning


SECRETS = {
    "PREFECT_SERVER_API_AUTH_STRING": "admin:planted-auth-4f1c",
    "SLACK_BOT_TOKEN": "xoxb-planted-123456-abcdef",
    "AWS_SECRET_ACCESS_KEY": "planted-aws-77aa55cc",
    "PREFECT_API_KEY": "pnu_planted-key-0f0f",
}


def test_password_reaches_what_talks_to_prefect_and_is_written_nowhere(tmp_path: Path, prefect_api: str) -> None:
    """The embedded server asks for a password; a flow process is killed, and the training code prints what it sees."""
    toml = copy_tiny(tmp_path / "tiny")
    script = toml.parent / "train.py"
    script.write_text(
        script.read_text().replace(
            "    torch.manual_seed(1)\n",
            "    torch.manual_seed(1)\n    print({k: v for k, v in os.environ.items() if not k.startswith('AWS_')})\n",
            1,
        )
    )
    run = Run(toml, *Run.held_at(12))
    home = server.ServerHome.beside(run.dir)
    copy_database(home)
    own = {name: value for name, value in os.environ.items() if not name.startswith("PREFECT_")} | SECRETS
    with open(toml.parent / "parent.log", "ab") as log:
        parent = subprocess.Popen(run.command(), stdout=log, stderr=log, env=own, start_new_session=True)
    run.wait_until_held()
    record = server.read_record(home)
    assert record is not None
    assert refuses_without_password(record.port)
    kill(run.flow())
    run.go_on(told_to_stop=True)
    assert parent.wait(180) == 0, run.log()
    assert "OMP_NUM_THREADS" in (run.dir.logs(1) / "rank-00000.log").read_text(), "what it printed is kept"
    assert b"report-tiny" in b"".join(path.read_bytes() for path in home.root.glob("prefect.db*")), "it was let in"
    for name, secret in SECRETS.items():
        for text in {secret, secret.partition(":")[2] or secret}:
            held = [path for path in tmp_path.rglob("*") if path.is_file() and text.encode() in path.read_bytes()]
            assert held == [], name


def refuses_without_password(port: int) -> bool:
    import httpx

    return httpx.post(f"http://127.0.0.1:{port}/api/flow_runs/filter", json={}, trust_env=False).status_code == 401


def test_pages_of_the_local_server_ask_that_server(prefect_api: str) -> None:
    import httpx

    settings = httpx.get(prefect_api.removesuffix("/api") + "/ui-settings", trust_env=False).json()
    assert settings["api_url"] == prefect_api


def test_run_dir_remembers_its_flow_runs_within_bounds(tmp_path: Path) -> None:
    from perdure.tasks import flow_runs as records

    run = RunDir(tmp_path)
    for number in range(records.KEPT + 5):
        records.enter(run, str(UUID(int=number)))
    (run.flow_runs / "torn.json").write_text('{"id": ')
    kept = records.read(run)
    assert len(kept) == records.KEPT
    assert kept[-1].id == str(UUID(int=records.KEPT + 4))
    assert records.over(run) == [], "this process lives"
