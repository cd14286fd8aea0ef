"""A newcomer's path, as docs/deploying.md and docs/maintenance.md tell it, seen as a user sees it: deployed, started by
the API, killed with its worker, gone on elsewhere to the same bits; archived, thawed, pruned, healed of rot, drilled."""

import contextlib
import json
import subprocess
import time
import uuid
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any
from uuid import UUID

import pytest
from conftest import BUCKET, S3Server, using_server
from harness import PATIENCE, PERDURE, Direct, Run, copy_tiny, kill, wait_until
from postgres import running_postgres, running_server
from prefect import get_client
from prefect.client.schemas.actions import DeploymentUpdate
from prefect.client.schemas.filters import (
    ArtifactFilter,
    ArtifactFilterFlowRunId,
    FlowRunFilter,
    FlowRunFilterDeploymentId,
    LogFilter,
    LogFilterFlowRunId,
)
from prefect.client.schemas.objects import FlowRun
from prefect.deployments import run_deployment
from prefect_worker import Worker, flow_process, flow_runs, states
from slack_server import CHANNEL, SlackServer
from storage.glacier import Glacier
from storage.proxy import proxy_to

from perdure.training.checkpoint import catalog
from perdure.training.run_dir import CheckpointName, RunDir, rank_pack

TOKEN = "xoxb-canary-4242424242-abcdefABCDEF"
NAMED, LAST = CheckpointName(20, 1), CheckpointName(40, 2)
SETTINGS = """
[run]
name = "{name}"
entry = "train.py:train"
steps = 40
chunk = 10

[checkpoint]
every = 5

[store]
{place}
url = "s3://{bucket}/{name}/store"

[tiers.archive]
{place}
url = "s3://{bucket}/{name}/archive"
every = 40

[tiers.cold]
{place}
url = "s3://{bucket}/{name}/cold"
storage_class = "DEEP_ARCHIVE"
milestones = true

[retention]
keep_last = 2

[notify]
slack_channel = "{channel}"
slack_api = "{slack}"

[launch]
stop_grace = 3
step_timeout = 200
env = {{ OMP_NUM_THREADS = "1", TINY_wait_at = "23", TINY_name_at = "19" }}
"""


@pytest.fixture(scope="module")
def undisturbed(tmp_path_factory: pytest.TempPathFactory) -> str:
    """State digest of the same run that nobody killed."""
    run = Run(copy_tiny(tmp_path_factory.mktemp("reference") / "tiny"))
    Direct(run).train_to_end(["store.url="])
    return run.digest()


@pytest.fixture(params=["sqlite", pytest.param("postgres", marks=pytest.mark.chaos)])  # more than a minute each
def api(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    if request.param == "sqlite":
        local = request.getfixturevalue("prefect_server")
        with using_server(local.url, local.home) as url:
            yield url
    else:
        home = tmp_path_factory.mktemp("home")
        with running_postgres() as database, running_server(database, home) as address, using_server(address) as url:
            yield url


def _begun(flow_run: FlowRun) -> bool:
    return flow_run.state is not None and not flow_run.state.is_scheduled() and not flow_run.state.is_pending()


@dataclass
class Newcomer:
    """Somebody with a shell, a run.toml and a browser."""

    run: Run
    pool: str

    @property
    def name(self) -> str:
        return self.run.config.run.name

    def types(self, verb: str, *arguments: object, code: int = 0) -> dict[str, Any]:
        command = [*PERDURE, verb, *map(str, arguments or [self.run.toml]), "--json"]
        done = subprocess.run(command, capture_output=True, text=True, check=False, timeout=PATIENCE)
        assert done.returncode == code, (done.stdout, done.stderr)
        return dict(json.loads(done.stdout))

    def switches_off_schedules(self) -> None:
        """As anyone may in the UI: what runs here is what the test starts, and nothing that was planned before."""
        with get_client(sync_client=True) as client:
            for verb in ("watchdog", "prune", "archive", "scrub", "drill", "report"):
                deployment = client.read_deployment_by_name(f"{verb}/{self.name}")
                client.update_deployment(deployment.id, DeploymentUpdate(schedules=[]))
                of_it = FlowRunFilter(deployment_id=FlowRunFilterDeploymentId(any_=[deployment.id]))
                while planned := client.read_flow_runs(flow_run_filter=of_it):
                    for one in planned:
                        client.delete_flow_run(one.id)

    def starts(self, verb: str, **parameters: object) -> UUID:
        """By the API, as the button in the UI does; again while one that its schedule had started before is still at work."""
        with get_client(sync_client=True) as client:
            while True:
                started = run_deployment(f"{verb}/{self.name}", parameters=parameters, timeout=0, as_subflow=False)
                assert isinstance(started, FlowRun)
                flow_run = started.id
                wait_until(lambda: _begun(client.read_flow_run(flow_run)), f"{verb} at work")  # noqa: B023
                state = client.read_flow_run(flow_run).state
                if state is None or not state.is_cancelled() or "concurrency limit" not in (state.message or ""):
                    return flow_run
                client.delete_flow_run(flow_run)  # it is none of those whose states are counted
                time.sleep(1.0)

    def sees(self, flow_run: UUID, words: str) -> None:
        """The flow run is completed, and its log says so."""
        with get_client(sync_client=True) as client:

            def state() -> Any:
                return client.read_flow_run(flow_run).state

            def logs() -> list[str]:
                return [one.message for one in client.read_logs(LogFilter(flow_run_id=LogFilterFlowRunId(any_=[flow_run])))]

            wait_until(lambda: state().is_final(), f"the end of {words}")
            assert state().is_completed(), (state(), logs())
            wait_until(lambda: any(words in message for message in logs()), words)

    def pages(self) -> str:
        """Every artifact of the run's flow runs."""
        ours = ArtifactFilterFlowRunId(any_=[one.id for one in flow_runs(self.run)])
        with get_client(sync_client=True) as client:
            return "\n".join(str(one.data) for one in client.read_artifacts(artifact_filter=ArtifactFilter(flow_run_id=ours)))

    def watches(self, *arguments: object) -> dict[str, Any]:
        return dict(self.types("watchdog", self.run.toml, "--patience", 2, *arguments)["runs"][0])

    def trust(self) -> dict[int, str]:
        return {one["step"]: one["trust"] for one in self.types("ls")["checkpoints"]}

    # what befalls the machine

    def loses_worker(self, worker: Worker) -> None:
        """Killed with its flow process: no hook runs, the trainer is left alone and leaves."""
        seen = [self.run.agent(), self.run.rank(), self.run.saver()]
        flow = flow_process(self.run)
        worker.kill()
        kill(flow)
        wait_until(lambda: not any(process.is_alive() for process in seen if process), "nothing of it is left")
        (self.run.toml.parent / "go-on").touch()

    def rots(self, s3: S3Server) -> None:
        """A bit of the last checkpoint here, and one of the milestone in the store."""
        here = self.run.dir.checkpoint(LAST) / rank_pack(0)
        here.write_bytes(flipped(here.read_bytes()))
        client, key = s3.client(), f"{self.name}/store/{RunDir.checkpoint_key(NAMED, rank_pack(0))}"
        with client.get_object(Bucket=BUCKET, Key=key)["Body"] as body:
            data = body.read()
        client.put_object(Bucket=BUCKET, Key=key, Body=flipped(data))


def flipped(data: bytes) -> bytes:
    return data[:100] + bytes([data[100] ^ 1]) + data[101:]


def run_at(endpoint: str, folder: Path, slack: SlackServer) -> Run:
    toml = copy_tiny(folder)
    place = f'endpoint_url = "{endpoint}"\nregion = "us-east-1"'
    name = f"newcomer-{uuid.uuid4().hex[:8]}"
    toml.write_text(SETTINGS.format(name=name, bucket=BUCKET, place=place, channel=CHANNEL, slack=slack.url))
    return Run(toml)


def test_a_newcomer_kills_everything_and_loses_nothing(
    api: str, s3_keys: S3Server, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, undisturbed: str
) -> None:
    monkeypatch.setenv("SLACK_BOT_TOKEN", TOKEN)
    with SlackServer(TOKEN) as slack, proxy_to(s3_keys.endpoint, Glacier(looks=2)) as s3, contextlib.ExitStack() as ending:
        run = run_at(s3.endpoint, tmp_path / "tiny", slack)
        newcomer = Newcomer(run, f"pool-{run.config.run.name}")

        newcomer.types("deploy", run.toml, "--work-pool", newcomer.pool)
        newcomer.switches_off_schedules()
        worker = Worker(newcomer.pool, tmp_path)
        ending.callback(lambda: worker.stop())
        newcomer.starts("train")
        wait_until(lambda: NAMED in run.committed(), "the milestone")
        wait_until(lambda: newcomer.trust().get(NAMED.step) == "replicated", "a copy in the store")
        found = {one["check"]: one["level"] for one in newcomer.types("doctor")["checks"]}
        looked = ("Prefect API", "Prefect leases", "deployment", "worker", "store put", "store delete", "Slack token")
        assert {check: found[check] for check in looked} == dict.fromkeys(looked, "ok")
        assert newcomer.watches("--patience", 10)["state"] == "alive"  # an agent that gets no processor beats late

        newcomer.loses_worker(worker)
        told = newcomer.watches("--dry-run")
        assert (told["state"], told["flow_run"]) == ("dead", None)
        assert states(run) == ["RUNNING"], "nobody was left to say otherwise"
        worker = Worker(newcomer.pool, tmp_path)
        newcomer.sees(newcomer.starts("watchdog", patience=2.0), "goes on from step 20")
        wait_until(lambda: states(run)[-1] == "COMPLETED", "the run completes")
        assert states(run) == ["CRASHED", "COMPLETED", "COMPLETED"], "train, watchdog, train"
        assert run.digest() == undisturbed

        drill = newcomer.starts("drill")  # it reads the store alone; the archive reads what is here
        newcomer.sees(newcomer.starts("archive"), "Archived: 1 checkpoint")
        thaw = [f"s3://{BUCKET}/{newcomer.name}/cold", tmp_path / "bare", "--endpoint-url", s3.endpoint, "--thaw"]
        newcomer.types("pull", *thaw, code=12)
        newcomer.types("pull", *thaw, "--wait")
        assert catalog.manifest_of(RunDir(tmp_path / "bare"), NAMED) == catalog.manifest_of(run.dir, NAMED)
        newcomer.sees(newcomer.starts("prune"), "Pruned: 5 checkpoints deleted")
        assert newcomer.trust() == {20: "archived", 35: "replicated", 40: "archived"}
        newcomer.rots(s3_keys)
        scrub, report = newcomer.starts("scrub", budget="100%"), newcomer.starts("report")
        newcomer.sees(scrub, "Left out until thawed: 1 copy.")
        assert run.kinds().count("repaired") == 2
        assert newcomer.trust() == {20: "archived", 35: "replicated", 40: "archived"}
        newcomer.sees(report, "Report of run")
        newcomer.sees(drill, "Drill passed")
        assert set(states(run)[1:]) == {"COMPLETED"}
        pages = newcomer.pages()
    assert "came back from the store" in pages
    assert slack.problems == []
    assert len(slack.roots) == 1
    assert "complete" in slack.roots[0]["text"]
    said = "\n".join(reply["text"] for reply in slack.replies)
    for words in (
        "restarted by the watchdog", "Recovered: launch 2 goes on from step 20", "archived: 1 checkpoint",
        "pruned: 5 checkpoints", "its local copy was rotten and is repaired",
        "its store copy was rotten and is repaired", "Drill passed",
    ):  # fmt: skip
        assert words in said
    for secret in (TOKEN, s3_keys.admin.secret):
        assert secret not in pages + slack.everything_said() + run.dir.events.read_text()
