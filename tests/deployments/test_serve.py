"""`perdure serve`: a run started through the API is executed by a process worker; whatever ends serve leaves nothing."""

import contextlib
import os
import signal
import subprocess
import uuid
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

import pytest
from harness import PERDURE, Run, children, command_line, copy_tiny, kill, wait_until
from prefect import get_client
from prefect.client.schemas.filters import FlowRunFilter, FlowRunFilterDeploymentId
from prefect.deployments import run_deployment
from prefect.settings import PREFECT_API_AUTH_STRING, PREFECT_API_SSL_CERT_FILE, PREFECT_API_URL, temporary_settings
from tls_proxy import tls_proxy

from perdure.cli.main import main
from perdure.deployments.checks.finding import Finding, Subject
from perdure.deployments.checks.server import check_server
from perdure.deployments.server import ServerHome, read_record
from perdure.training.process import ProcessId, identify
from perdure.training.run_dir import RunDir

SLOW = "params.sleep=0.6"
HEARD = {"perdure.launched", "perdure.chunk"}
"""A server writes events down some seconds after it took them."""
PASSWORD = "planted-password-7d1e"
USER = f"me:{PASSWORD}"


@pytest.fixture
def toml(tmp_path: Path) -> Path:
    """The tiny run under a name that no other test uses."""
    toml = copy_tiny(tmp_path / "tiny")
    toml.write_text(toml.read_text().replace('"tiny"', f'"tiny-{uuid.uuid4().hex[:8]}"'))
    return toml


def start(run: Run) -> Any:
    return run_deployment(f"train/{run.config.run.name}", timeout=0, as_subflow=False)


def states(run: Run) -> list[str]:
    with get_client(sync_client=True) as client:
        made = client.read_deployment_by_name(f"train/{run.config.run.name}")
        ours = FlowRunFilter(deployment_id=FlowRunFilterDeploymentId(any_=[made.id]))
        found = client.read_flow_runs(flow_run_filter=ours)
    return [one.state.type.value for one in sorted(found, key=lambda one: one.created) if one.state is not None]


def descendants(pid: int) -> list[ProcessId]:
    below = [child for one in children(pid) for child in (identify(one), *descendants(one))]
    return [one for one in below if one.start]


def events_of_deployment(run: Run) -> set[str]:
    """Names of the events whose related resources name the run's deployment."""
    with get_client(sync_client=True) as client:
        made = client.read_deployment_by_name(f"train/{run.config.run.name}")
        wanted = {
            "event": {"prefix": ["perdure."]},
            "related": {"id": [f"prefect.deployment.{made.id}"], "role": ["deployment"]},
        }
        answer = client.request("POST", "/events/filter", json={"filter": wanted, "limit": 50})
    return {event["event"] for event in answer.json()["events"]}


class Serve:
    """`perdure serve` of a run, its processes, and what it printed."""

    def __init__(self, run: Run, environment: dict[str, str]) -> None:
        self.run, self.log = run, run.toml.parent / "serve.log"
        with open(self.log, "ab") as log:
            self.process = subprocess.Popen(
                [*PERDURE, "serve", str(run.toml), *(part for text in run.settings for part in ("--set", text))],
                stdout=log,
                stderr=log,
                stdin=subprocess.DEVNULL,
                env=environment,
                start_new_session=True,
            )

    def wait_until_serving(self) -> None:
        def serving() -> bool:
            assert self.process.poll() is None, self.log.read_text()
            return any("prefect worker start" in command_line(one.pid) for one in descendants(self.process.pid))

        wait_until(serving, "a worker")

    def train(self) -> list[ProcessId]:
        """Start a flow run and let it train until it is held; every process there is then, beside the server's."""
        start(self.run)
        self.run.wait_until_held()
        return descendants(self.process.pid)


@contextlib.contextmanager
def serving(run: Run, environment: dict[str, str]) -> Iterator[Serve]:
    serve = Serve(run, environment)
    try:
        serve.wait_until_serving()
        yield serve
    finally:
        if serve.process.poll() is None:
            serve.process.kill()
        serve.process.wait()


@dataclass
class Guarded:
    """The Prefect server behind TLS with an authority of our own and a password."""

    url: str
    authority: str

    def environment(self) -> dict[str, str]:
        """As a user would have it, the password in the URL."""
        url = self.url.replace("://", f"://{USER}@")
        hasty = {"PREFECT_WORKER_QUERY_SECONDS": "1"}
        return {**os.environ, **hasty, "PREFECT_API_URL": url, "PREFECT_API_SSL_CERT_FILE": self.authority}

    def examined(self, run: Run, *, user: str, authority: str) -> dict[str, Finding]:
        """What the doctor says of it, with these settings."""
        chosen = {PREFECT_API_URL: self.url, PREFECT_API_AUTH_STRING: user, PREFECT_API_SSL_CERT_FILE: authority}
        with temporary_settings(chosen):
            return {one.check: one for one in check_server(Subject(config=run.config))}


@pytest.fixture
def guarded(prefect_api: str, tmp_path: Path) -> Iterator[Guarded]:
    with tls_proxy(tmp_path, urlsplit(prefect_api).port or 0, USER) as (port, authority):
        yield Guarded(f"https://127.0.0.1:{port}/api", str(authority))


def test_through_tls_ctrl_c_saves_and_ends_all(guarded: Guarded, toml: Path) -> None:
    """All that `perdure serve` starts, and the doctor, go through TLS and give the password, which nothing shows."""
    run = Run(toml, *Run.held_at(12))
    with serving(run, guarded.environment()) as serve:
        seen = serve.train()
        found = guarded.examined(run, user=USER, authority=guarded.authority)
        assert [found[name].level for name in ("Prefect API", "deployment", "work pool", "worker")] == ["ok"] * 4, found
        assert "AUTH_STRING" in guarded.examined(run, user="me:wrong", authority=guarded.authority)["Prefect API"].fix
        assert "SSL_CERT_FILE" in guarded.examined(run, user=USER, authority="")["Prefect API"].fix
        missing = guarded.examined(run, user=USER, authority="/none.pem")["Prefect API"]
        assert missing.text.startswith("PREFECT_API_SSL_CERT_FILE = '/none.pem' cannot be used")
        serve.process.send_signal(signal.SIGINT)
        run.go_on(told_to_stop=True)
        assert serve.process.wait(60) == 0
        assert not [one for one in seen if one.is_alive()]
    assert states(run) == ["CANCELLED"]
    assert run.committed()[-1].step >= 12
    assert not run.dir.stop_request.exists()
    assert guarded.url in serve.log.read_text()
    assert not [path for path in toml.parent.rglob("*") if path.is_file() and PASSWORD.encode() in path.read_bytes()]
    wait_until(lambda: events_of_deployment(run) == HEARD, "what the stall automation waits for")


@pytest.mark.chaos  # more than a minute; that a killed flow process is followed is in test_worker.py too
def test_flow_process_killed_is_followed_at_once_and_nothing_follows_ctrl_c(prefect_api: str, toml: Path) -> None:
    """The limit of one flow run per training run gives its place to the restart."""
    run = Run(toml, SLOW, *Run.held_at(12))
    with serving(run, dict(os.environ)) as serve:
        serve.train()
        kill(flow_process(run))
        run.go_on(told_to_stop=True)
        wait_until(lambda: states(run) == ["CRASHED", "RUNNING"] and run.step() >= 21, "a second flow run trains")
        seen = descendants(serve.process.pid)
        serve.process.send_signal(signal.SIGINT)
        assert serve.process.wait(60) == 0
        assert not [one for one in seen if one.is_alive()]
    assert states(run) == ["CRASHED", "CANCELLED"]
    assert run.committed()[-1].step >= 21
    wait_until(lambda: events_of_deployment(run) == HEARD, "what the stall automation waits for")


def flow_process(run: Run) -> ProcessId:
    """The agent's parent."""
    agent = run.agent()
    assert agent is not None
    return identify(int(Path(f"/proc/{agent.pid}/stat").read_text().rpartition(")")[2].split()[1]))


@pytest.mark.chaos  # a minute of starts and grace; the Ctrl-C test above is in every run
def test_serve_killed_outright_leaves_no_process_and_no_server(toml: Path) -> None:
    """With a server of its own, which goes with it."""
    run = Run(toml, *Run.held_at(12))
    environment = {key: value for key, value in os.environ.items() if not key.startswith("PREFECT_")}
    with serving(run, environment) as serve:
        record = read_record(ServerHome.beside(RunDir(run.config.run_dir)))
        assert record is not None
        with temporary_settings({PREFECT_API_URL: f"http://127.0.0.1:{record.port}/api"}):
            seen = serve.train()
        assert f"http://127.0.0.1:{record.port}/" in serve.log.read_text()
        serve.process.kill()
        run.go_on(told_to_stop=True)
        wait_until(lambda: not any(one.is_alive() for one in seen), "nothing alive", 60)
        wait_until(lambda: not record.server.is_alive(), "the server is gone", 60)
    assert run.committed()[-1].step >= 12


def test_run_that_is_deployed_elsewhere_is_not_taken_over(prefect_api: str, toml: Path) -> None:
    assert main(["deploy", str(toml), "--work-pool", "gpus"]) == 0
    command = [*PERDURE, "serve", str(toml)]
    done = subprocess.run(command, capture_output=True, text=True, check=False, timeout=60)
    assert done.returncode == 2
    assert "deployed to work pool gpus" in done.stderr
