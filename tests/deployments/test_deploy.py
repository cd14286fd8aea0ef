"""`perdure deploy` against a real Prefect server: what it registers, that twice is as once, what a dry run shows."""

import contextlib
import json
import os
import subprocess
import sys
import threading
import uuid
from collections.abc import Callable, Iterator
from http.server import BaseHTTPRequestHandler, HTTPServer
from pathlib import Path
from typing import Any

import pytest
import yaml
from harness import Run, copy_tiny, wait_until
from prefect import get_client
from prefect.blocks.notifications import CustomWebhookNotificationBlock
from prefect.client.orchestration import SyncPrefectClient
from prefect.client.schemas.actions import DeploymentUpdate
from prefect.client.schemas.filters import DeploymentFilter, DeploymentFilterName, FlowRunFilter, FlowRunFilterId
from prefect.deployments import run_deployment
from prefect.events import emit_event
from prefect.settings import PREFECT_API_URL, temporary_settings
from prefect.states import Completed, Running

from perdure.cli.main import main
from perdure.deployments import api, automations, table
from perdure.flows.hooks import on_cancellation, on_crashed, on_failure
from perdure.tasks.pulse import CHUNK

AWS_KEYS = ("access-key-id", "secret-access-key", "session-token")
PREFECT = str(Path(sys.executable).parent / "prefect")


@pytest.fixture
def client(prefect_api: str) -> Iterator[SyncPrefectClient]:
    with get_client(sync_client=True) as client:
        yield client


@pytest.fixture
def toml(tmp_path: Path) -> Path:
    """The tiny run under a name that no other test uses."""
    toml = copy_tiny(tmp_path / "tiny")
    name = f"tiny-{uuid.uuid4().hex[:8]}"
    toml.write_text(toml.read_text().replace('"tiny"', f'"{name}"'))
    return toml


@pytest.fixture
def deploy(prefect_api: str, capsys: pytest.CaptureFixture[str]) -> Callable[..., dict[str, Any]]:
    def deploy(*arguments: object) -> dict[str, Any]:
        capsys.readouterr()
        code = main(["deploy", *map(str, arguments), "--json"])
        return {"code": code, **json.loads(capsys.readouterr().out)}

    return deploy


def actions(answer: dict[str, Any]) -> dict[str, str]:
    return {item["name"]: item["action"] for item in answer["items"]}


def changes(answer: dict[str, Any]) -> dict[str, tuple[Any, Any]]:
    return {one["field"]: (one["old"], one["new"]) for item in answer["items"] for one in item["changes"]}


def name_of(toml: Path) -> str:
    return Run(toml).config.run.name


def test_second_deploy_changes_nothing(toml: Path, deploy: Callable[..., Any], client: SyncPrefectClient) -> None:
    name = name_of(toml)
    pool = f"pool-{name}"
    first = deploy(toml, "--work-pool", pool)
    assert set(actions(first).values()) == {"created"}
    assert {pool, f"train/{name}", f"perdure {name}: stale heartbeat", f"perdure {name}: no progress"} <= set(actions(first))
    before = client.read_deployment_by_name(f"train/{name}")
    armed = [one.model_dump() for one in client.read_automations_by_name(f"perdure {name}: no progress")]
    second = deploy(toml, "--work-pool", pool)
    assert set(actions(second).values()) == {"unchanged"}
    assert name not in second["not_here"]
    assert client.read_deployment_by_name(f"train/{name}") == before
    assert [one.model_dump() for one in client.read_automations_by_name(f"perdure {name}: no progress")] == armed


def test_retired_run_is_said_and_taken_off_the_server_with_all_that_was_made_for_it(
    toml: Path, tmp_path: Path, deploy: Callable[..., Any], client: SyncPrefectClient
) -> None:
    name, made, other = name_of(toml), deploy(toml), copy_tiny(tmp_path / "other")
    under_way = run_deployment(f"train/{name}", timeout=0, as_subflow=False)
    client.set_flow_run_state(under_way.id, Running(), force=True)
    assert deploy("--remove", name)["code"] == 3, "not while it trains"
    client.set_flow_run_state(under_way.id, Completed(), force=True)
    waiting = run_deployment(f"train/{name}", timeout=0, as_subflow=False)
    toml.unlink()
    assert deploy(other, "--dry-run")["not_here"][name] == str(toml)
    for dry_run in (["--dry-run"], []):
        gone = deploy("--remove", name, *dry_run)
        assert set(actions(gone)) == {one for one in actions(made) if name in one}
        assert set(actions(gone).values()) == {"removed"}
    assert name not in [one.name for one in client.read_deployments()]
    assert not any(name in one.name for one in client.read_automations())
    assert client.read_flow_runs(flow_run_filter=FlowRunFilter(id=FlowRunFilterId(any_=[waiting.id]))) == []
    assert deploy("--remove", name)["items"] == []


def test_deployment_names_the_config_by_its_absolute_path_and_waits_for_its_turn(
    toml: Path, deploy: Callable[..., Any], client: SyncPrefectClient, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(toml.parent)
    deploy("run.toml")
    made = client.read_deployment_by_name(f"train/{name_of(toml)}")
    assert made.parameters == {"config": str(toml)}
    assert made.entrypoint == "perdure.flows.train:train"
    assert made.pull_steps == []
    assert made.global_concurrency_limit is not None
    assert made.global_concurrency_limit.limit == 1
    assert made.concurrency_options is not None
    assert made.concurrency_options.collision_strategy == "ENQUEUE"
    assert set(made.tags) == {"perdure", "train", f"run:{name_of(toml)}"}


def test_dry_run_shows_each_difference_and_changes_nothing(
    toml: Path, deploy: Callable[..., Any], client: SyncPrefectClient
) -> None:
    fresh = deploy(toml, "--dry-run")
    assert actions(fresh)[f"train/{name_of(toml)}"] == "created"
    deploy(toml)
    before = client.read_deployment_by_name(f"train/{name_of(toml)}")
    shown = deploy(toml, "--dry-run", "--set", "run.steps=80", "--stall-after", "2")
    assert changes(shown) == {
        "parameters.overrides": (None, ["run.steps=80"]), "trigger.within": (21600.0, 7200.0)
    }  # fmt: skip
    assert client.read_deployment_by_name(f"train/{name_of(toml)}") == before
    assert changes(deploy(toml, "--set", "run.steps=80", "--stall-after", "2")) == changes(shown)
    assert changes(deploy(toml, "--set", "run.steps=80", "--stall-after", "2")) == {}


def test_what_somebody_changed_by_hand_is_put_back(toml: Path, deploy: Callable[..., Any], client: SyncPrefectClient) -> None:
    deploy(toml)
    made = client.read_deployment_by_name(f"train/{name_of(toml)}")
    by_hand = DeploymentUpdate(tags=["mine"], description="mine", concurrency_limit=4)
    client.update_deployment(made.id, by_hand)
    assert set(changes(deploy(toml))) == {"tags", "description", "concurrency.limit"}
    again = client.read_deployment_by_name(f"train/{name_of(toml)}")
    assert (again.tags, again.description) == (made.tags, made.description)
    assert again.global_concurrency_limit is not None
    assert again.global_concurrency_limit.limit == 1


def test_schedule_is_registered_with_its_slug_and_stays_off_when_a_person_switched_it_off(
    toml: Path, deploy: Callable[..., Any], client: SyncPrefectClient, monkeypatch: pytest.MonkeyPatch
) -> None:
    entry = table.table()["train"]
    monkeypatch.setitem(entry, "schedules", [{"slug": "often", "cron": "0 * * * *", "timezone": "UTC", "active": True}])
    deploy(toml)
    made = client.read_deployment_by_name(f"train/{name_of(toml)}")
    assert [(one.slug, one.active) for one in made.schedules] == [("often", True)]
    client.update_deployment_schedule(made.id, made.schedules[0].id, active=False)
    assert "unchanged" in actions(deploy(toml))[f"train/{name_of(toml)}"]
    monkeypatch.setitem(entry, "schedules", [{"slug": "often", "cron": "5 * * * *", "timezone": "UTC", "active": True}])
    assert set(changes(deploy(toml))) == {"schedules"}
    later = client.read_deployment_by_name(f"train/{name_of(toml)}").schedules
    assert [(one.slug, one.active, getattr(one.schedule, "cron", "")) for one in later] == [("often", False, "5 * * * *")]


def test_automation_that_a_person_switched_off_stays_off(
    toml: Path, deploy: Callable[..., Any], client: SyncPrefectClient
) -> None:
    deploy(toml)
    title = f"perdure {name_of(toml)}: no progress"
    client.pause_automation(client.read_automations_by_name(title)[0].id)
    assert actions(deploy(toml))[title] == "unchanged"
    assert actions(deploy(toml, "--stall-after", "1"))[title] == "changed"
    assert client.read_automations_by_name(title)[0].enabled is False


def test_no_secret_of_the_environment_or_a_block_reaches_a_deployment(
    toml: Path,
    deploy: Callable[..., Any],
    client: SyncPrefectClient,
    monkeypatch: pytest.MonkeyPatch,
    secret_block: Callable[[str, str], None],
) -> None:
    canaries = {"SLACK_BOT_TOKEN": "xoxb-canary-1", "AWS_SECRET_ACCESS_KEY": "canary-aws-2", "AWS_ACCESS_KEY_ID": "AKCANARY3"}
    for name, value in canaries.items():
        monkeypatch.setenv(name, value)
    monkeypatch.delenv("SLACK_BOT_TOKEN")
    secret_block("SLACK_BOT_TOKEN", canaries["SLACK_BOT_TOKEN"])
    answer = deploy(toml, "--set", "notify.slack_channel=#ops", "--set", "tiers.far.url=s3://bucket/far")
    assert [(name, word) for name, word in actions(answer).items() if name.startswith("perdure-")] == [
        ("perdure-slack-bot-token", "found"), *((f"perdure-aws-{key}", "not there") for key in AWS_KEYS),
    ]  # fmt: skip
    made = client.read_deployment_by_name(f"train/{name_of(toml)}").model_dump_json()
    watchers = [one.model_dump_json() for one in client.read_automations()]
    assert not [value for value in canaries.values() if value in made + json.dumps(answer) + "".join(watchers)]


@pytest.mark.parametrize(
    ("arguments", "code", "words"),
    [
        (["--work-pool", " "], 2, "--work-pool is empty"),
        (["--stall-after", "0"], 2, "--stall-after 0.0"),
        (["--notify-block", "slack-webhook"], 2, "TYPE/NAME"),
        (["--notify-block", "slack-webhook/none"], 2, "no such block"),
        (["--set", "run.stepz=1"], 2, "run.stepz"),
    ],
)
def test_wrong_argument_is_refused_and_nothing_is_registered(
    toml: Path, deploy: Callable[..., Any], client: SyncPrefectClient, arguments: list[str], code: int, words: str
) -> None:
    answer = deploy(toml, *arguments)
    assert (answer["code"], answer["exit_code"]) == (code, code)
    assert words in answer["error"]
    assert name_of(toml) not in [one.name for one in client.read_deployments()]


def test_two_runs_of_one_name_are_refused(toml: Path, tmp_path: Path, deploy: Callable[..., Any]) -> None:
    other = copy_tiny(tmp_path / "other")
    other.write_text(toml.read_text())
    answer = deploy(toml, other)
    assert answer["code"] == 2
    assert str(toml) in answer["error"]
    assert str(other) in answer["error"]


@pytest.mark.parametrize(("url", "hint"), [("http://127.0.0.1:9/api", "a Prefect server"), ("http://127.0.0.1:9", ":9/api")])
def test_server_that_does_not_answer_is_exit_10_with_its_address(toml: Path, url: str, hint: str) -> None:
    environment = {**os.environ, "PREFECT_API_URL": url}
    command = [sys.executable, "-m", "perdure.cli", "deploy", str(toml)]
    done = subprocess.run(command, capture_output=True, text=True, env=environment, check=False, timeout=60)
    assert done.returncode == 10
    said, what_to_do = done.stderr.splitlines()
    assert f"{url} does not answer" in said
    assert hint in what_to_do
    assert "Traceback" not in done.stderr


# prefect.yaml


def test_prefect_deploy_all_accepts_the_yaml_from_any_folder(
    toml: Path, tmp_path: Path, deploy: Callable[..., Any], client: SyncPrefectClient
) -> None:
    deploy(toml)  # makes the pool
    command = [PREFECT, "--no-prompt", "deploy", "--all", "--prefect-file", str(table.PREFECT_YAML)]
    environment = {**os.environ, "PERDURE_RUN_TOML": str(toml)}
    subprocess.run(command, cwd=tmp_path, env=environment, check=True, capture_output=True, timeout=120)
    for verb in listed_verbs():
        made = client.read_deployment_by_name(f"{table.load_flow(verb).name}/run")
        assert made.pull_steps == []
        assert made.entrypoint == table.table()[verb]["entrypoint"]
        assert [one.slug for one in made.schedules] == [one["slug"] for one in table.table()[verb].get("schedules", [])]
        assert verb == "train" or str(toml) in made.parameters.values()


def listed_verbs() -> list[str]:
    """What the yaml's `deployments` hold, by the table's names."""
    verbs = {entry["entrypoint"]: verb for verb, entry in table.table().items()}
    return [verbs[one["entrypoint"]] for one in yaml.safe_load(table.PREFECT_YAML.read_text())["deployments"]]


def test_yaml_lists_exactly_the_flows_that_exist() -> None:
    """A new flow of the table needs its line under `deployments`, or `prefect deploy --all` forgets it."""
    assert listed_verbs() == table.existing_verbs()


def test_every_schedule_has_a_slug_of_its_own_and_upkeep_never_queues_up() -> None:
    slugs = [one["slug"] for entry in table.table().values() for one in entry.get("schedules", [])]
    assert len(slugs) == len(set(slugs))
    assert set(slugs) == set(table.table()) - {"train"}
    strategies = {verb: entry["concurrency_limit"]["collision_strategy"] for verb, entry in table.table().items()}
    assert strategies.pop("train") == "ENQUEUE", "CANCEL_NEW would cancel the restart after a death"
    assert set(strategies.values()) == {"CANCEL_NEW"}


# automations, with the shortest time Prefect takes


def flow_run_of(client: SyncPrefectClient, toml: Path) -> Any:
    """A flow run that claims to run and has no process, as after the loss of its machine."""
    made = run_deployment(f"train/{name_of(toml)}", timeout=0, as_subflow=False)
    client.set_flow_run_state(made.id, Running(), force=True)
    return made


def beat(flow_run: Any, event: str) -> None:
    resource = {"prefect.resource.id": f"prefect.flow-run.{flow_run.id}"}
    related = {"prefect.resource.id": f"prefect.deployment.{flow_run.deployment_id}", "prefect.resource.role": "deployment"}
    emit_event(event, resource=resource, related=[related])


def after_silence(speak: Callable[[], None], happened: Callable[[], bool], what: str) -> None:
    """The server takes up a new automation on its own time, and an event before that does not arm it: say it again, with
    pauses longer than the automation's patience."""
    for _ in range(4):
        speak()
        with contextlib.suppress(AssertionError):
            return wait_until(happened, what, 20)
    raise AssertionError(f"never happened: {what}")


class _Hook(BaseHTTPRequestHandler):
    def do_POST(self) -> None:
        self.server.bodies.append(self.rfile.read(int(self.headers["Content-Length"])).decode())  # type: ignore[attr-defined]
        self.send_response(200)
        self.send_header("Content-Length", "0")
        self.end_headers()

    def log_message(self, format: str, *args: object) -> None: ...


@pytest.fixture
def hook() -> Iterator[HTTPServer]:
    """A chat's incoming webhook; `bodies` is what it was told."""
    with HTTPServer(("127.0.0.1", 0), _Hook) as server:
        server.bodies = []  # type: ignore[attr-defined]
        thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.05})
        thread.start()
        yield server
        server.shutdown()
        thread.join()


def test_silence_closes_the_row_and_tells_the_block_and_leaves_other_runs_alone(
    toml: Path, tmp_path: Path, deploy: Callable[..., Any], client: SyncPrefectClient, hook: HTTPServer
) -> None:
    other = copy_tiny(tmp_path / "other")
    other.write_text(toml.read_text().replace("tiny-", "other-"))
    CustomWebhookNotificationBlock(
        name="ops", url=f"http://127.0.0.1:{hook.server_port}/", json_data={"text": "{{body}}"}
    ).save("ops", overwrite=True)
    deploy(toml, other, "--stall-after", "0.003", "--notify-block", "custom-webhook/ops")
    dead, stalled, stranger = flow_run_of(client, toml), flow_run_of(client, toml), flow_run_of(client, other)
    done = flow_run_of(client, toml)
    client.set_flow_run_state(done.id, Completed())
    wanted = automations.stale_heartbeat(name_of(toml), [dead.deployment_id], [], within=10)
    automations.put(client, wanted, client.read_automations_by_name(wanted.name))

    def speak() -> None:
        beat(stalled, CHUNK)
        for one in (done, dead, stranger):  # of `done` a heartbeat that comes late
            beat(one, "prefect.flow-run.heartbeat")

    def states() -> list[str]:
        return [client.read_flow_run(one.id).state.type.value for one in (dead, stalled, stranger, done)]

    told: list[str] = hook.bodies  # type: ignore[attr-defined]
    after_silence(speak, lambda: bool(told) and states()[0] == "CRASHED", "the row is closed, the block told")
    assert states() == ["CRASHED", "RUNNING", "RUNNING", "COMPLETED"]
    assert stalled.name in told[0]


def test_stale_heartbeat_also_starts_the_watchdog_of_that_run(
    toml: Path, deploy: Callable[..., Any], client: SyncPrefectClient, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Under the verb's name in the table, whatever flow it has."""
    monkeypatch.setitem(table.table()["watchdog"], "entrypoint", "perdure.flows.scrub:scrub")
    deploy(toml)
    watchdog = client.read_deployment_by_name(f"scrub/{name_of(toml)}")
    [automation] = client.read_automations_by_name(f"perdure {name_of(toml)}: stale heartbeat")
    assert [one.type for one in automation.actions] == ["change-flow-run-state", "run-deployment"]
    assert getattr(automation.actions[1], "deployment_id", None) == watchdog.id
    assert watchdog.parameters == {"config": str(toml)}
    named = DeploymentFilter(name=DeploymentFilterName(any_=[name_of(toml)]))
    mine = [one.id for one in client.read_deployments(deployment_filter=named)]
    watched = automation.trigger.match_related["prefect.resource.id"]
    assert set(watched) == {f"prefect.deployment.{one}" for one in mine}, "a dead flow run of upkeep is closed too"
    assert len(mine) > 2


def test_address_is_shown_without_its_password(prefect_api: str) -> None:
    with temporary_settings({PREFECT_API_URL: "https://user:canary@prefect.example/api"}):
        assert api.api_url() == "https://prefect.example/api"


def test_hooks_are_called_by_their_parameter_names() -> None:
    """Prefect's runner passes keywords; another name would fail exactly on SIGKILL."""
    import inspect

    for hook in (on_crashed, on_failure, on_cancellation):
        assert list(inspect.signature(hook).parameters) == ["flow", "flow_run", "state"]
