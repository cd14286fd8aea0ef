"""`perdure doctor` finds each planted problem, names the fix, shows no secret, and leaves nothing behind."""

import json
import os
import secrets
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from email.utils import formatdate
from pathlib import Path

import pytest
from conftest import BUCKET, S3Server
from harness import copy_tiny
from prefect import get_client
from prefect.client.schemas.actions import WorkPoolCreate, WorkPoolUpdate
from prefect.settings import PREFECT_API_URL, Settings, temporary_settings
from slack_server import CHANNEL, CHANNEL_ID, SlackServer, answering, refused_port
from snapshots import Source, random_bytes, write
from storage.proxy import Reply, Seen, proxy_to

from perdure.cli.main import main
from perdure.deployments.checks import server as server_checks
from perdure.deployments.checks import slack as slack_checks
from perdure.deployments.checks.finding import Finding, Subject, ok
from perdure.deployments.doctor import examine
from perdure.tasks.blocks import AWS
from perdure.training.agent.lock import RunLock
from perdure.training.checkpoint.run_info import create_run_info
from perdure.training.config import load_config
from perdure.training.run_dir import RunDir

Findings = dict[str, dict[str, str]]
Doctor = Callable[..., tuple[int, Findings]]
CANARY = "xoxb-canary-0123456789-abcdefABCDEF"


@pytest.fixture
def toml(tmp_path: Path) -> Path:
    return copy_tiny(tmp_path / "tiny")


@pytest.fixture
def doctor(toml: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Doctor:
    """Runs it on the tiny run with these settings; its exit code and what it found. No server unless a test has one."""
    monkeypatch.setenv("TORCH_EXTENSIONS_DIR", str(tmp_path / "extensions"))
    monkeypatch.delenv("SLACK_BOT_TOKEN", raising=False)
    monkeypatch.setattr(slack_checks, "_TIMEOUT_SECS", 60.0)  # this process is both ends of that line

    def doctor(*settings: str) -> tuple[int, Findings]:
        capsys.readouterr()
        code = main(["doctor", str(toml), *(part for text in settings for part in ("--set", text)), "--json"])
        answer = json.loads(capsys.readouterr().out)
        assert answer["ok"] == (code == 0)
        assert all(one["fix"] for one in answer["checks"] if one["level"] in ("warn", "fail"))
        return code, {one["check"]: one for one in answer["checks"]}

    return doctor


@pytest.fixture
def serverless() -> Iterator[None]:
    with temporary_settings({PREFECT_API_URL: None}):
        yield


def levels(found: Findings, word: str) -> set[str]:
    return {name for name, one in found.items() if one["level"] == word}


# the run and the machine


def test_healthy_run_has_no_failure_and_no_server_is_no_failure(doctor: Doctor, toml: Path, serverless: None) -> None:
    code, found = doctor()
    assert code == 0
    assert not levels(found, "fail") | levels(found, "warn")
    assert "PREFECT_API_URL" in found["Prefect API"]["text"]
    assert {"Python", "packages", "memory", "run directory", "run room", "store delete"} <= levels(found, "ok")
    assert not (toml.parent / "store").exists(), "the probe and its folders are gone"
    assert not (toml.parent / "runs").exists()


def test_without_a_run_only_machine_and_server_are_examined(capsys: pytest.CaptureFixture[str], serverless: None) -> None:
    assert main(["doctor"]) == 0
    out = capsys.readouterr().out
    assert out.count("no RUN.toml was named") == 7
    assert "Traceback" not in out


def test_stale_torch_lock_is_found_and_one_that_is_held_is_not(doctor: Doctor, tmp_path: Path, serverless: None) -> None:
    folder = tmp_path / "extensions" / "py311_cpu" / "deepspeed_shm_comm"
    folder.mkdir(parents=True)
    with open(folder / "lock", "w"):
        assert doctor()[1]["torch extensions"]["level"] == "ok", "this process holds it"
    code, found = doctor()
    assert code == 1
    assert found["torch extensions"]["fix"] == f"rm {folder / 'lock'}"


def test_directory_that_others_may_read_and_a_held_run_are_pointed_out(doctor: Doctor, toml: Path, serverless: None) -> None:
    run = RunDir(load_config(toml).run_dir)
    with RunLock.acquire(run, orphan_wait=0):
        run.root.chmod(0o755)
        code, found = doctor()
    assert code == 0
    assert levels(found, "warn") == {"run directory", "run holder"}
    assert f"process {os.getpid()}" in found["run holder"]["text"]
    assert found["run directory"]["fix"].startswith(f"chmod 700 {run.root}")


def test_disk_without_room_for_two_more_checkpoints_fails(doctor: Doctor, toml: Path, tmp_path: Path, serverless: None) -> None:
    place = tmp_path / "small"
    place.mkdir()
    mounted = subprocess.run(["mount", "-t", "tmpfs", "-o", "size=3m", "tmpfs", place], capture_output=True, check=False)
    if mounted.returncode:
        pytest.skip("mount is not permitted here")
    try:
        write(RunDir(place / "run"), Source(2).tensor("noise", "uint8", (1_400_000,), random_bytes(1, 1_400_000)))
        code, found = doctor(f"run.dir={place / 'run'}")
    finally:
        subprocess.run(["umount", place], check=True)
    assert code == 1
    assert "the next 2 checkpoints need" in found["run room"]["text"]


def test_check_that_hangs_is_cut_off_and_hides_no_other() -> None:
    def hangs(subject: Subject) -> Iterator[Finding]:
        yield ok("early", "came before")
        time.sleep(600)  # a daemon thread: it ends with the tests

    def well(subject: Subject) -> Iterator[Finding]:
        yield ok("well", "fine")

    found = list(examine(Subject(), 1.0, {"slow": hangs, "quick": well}))
    assert [(one.check, one.level) for one in found] == [("early", "ok"), ("slow", "fail"), ("well", "ok")]


# the store


@pytest.fixture
def bucket(s3_server: S3Server) -> Iterator[str]:
    """A prefix of the shared bucket; nothing of it stays."""
    prefix = f"doctor/{secrets.token_hex(6)}"
    yield prefix
    client = s3_server.client()
    for item in client.list_objects_v2(Bucket=BUCKET, Prefix=prefix).get("Contents", ()):
        client.delete_object(Bucket=BUCKET, Key=item["Key"])


def in_bucket(prefix: str, endpoint: str) -> list[str]:
    return [f"store.url=s3://{BUCKET}/{prefix}", f"store.endpoint_url={endpoint}", "store.region=us-east-1"]


def test_bucket_with_all_rights_passes_and_keeps_nothing(
    doctor: Doctor, s3_keys: S3Server, bucket: str, serverless: None
) -> None:
    code, found = doctor(*in_bucket(bucket, s3_keys.endpoint))
    assert code == 0
    wanted = {f"store {step}" for step in ("put", "get", "conditional put", "list", "multipart", "delete", "clock", "owner")}
    assert wanted <= levels(found, "ok")
    assert not s3_keys.client().list_objects_v2(Bucket=BUCKET, Prefix=bucket).get("Contents")


def test_key_that_may_not_delete_is_a_warning_and_piles_nothing_up(
    doctor: Doctor, s3_keys: S3Server, bucket: str, monkeypatch: pytest.MonkeyPatch, serverless: None
) -> None:
    for name, value in s3_keys.no_delete.environment().items():
        monkeypatch.setenv(name, value)
    for _ in range(2):
        code, found = doctor(*in_bucket(bucket, s3_keys.endpoint))
        assert code == 0
        assert levels(found, "warn") == {"store delete"}
        assert "prune and archive cannot free room" in found["store delete"]["text"]
    assert len(s3_keys.client().list_objects_v2(Bucket=BUCKET, Prefix=bucket)["Contents"]) == 2


def test_key_that_may_only_read_fails_at_put_and_the_rest_says_why_it_was_not_tried(
    doctor: Doctor, s3_keys: S3Server, bucket: str, monkeypatch: pytest.MonkeyPatch, serverless: None
) -> None:
    for name, value in s3_keys.read_only.environment().items():
        monkeypatch.setenv(name, value)
    code, found = doctor(*in_bucket(bucket, s3_keys.endpoint))
    assert code == 1
    assert levels(found, "fail") == {"store put"}
    assert "AccessDenied" in found["store put"]["text"]
    assert found["store multipart"]["level"] == "skip"


def overwrites(seen: Seen) -> Reply | None:
    return Reply(status=200) if "if-none-match" in seen.headers else None


def lives_in_the_past(seen: Seen) -> Reply | None:
    return Reply(answer_headers={"Date": formatdate(time.time() - 3600, usegmt=True)})


def test_store_that_ignores_if_none_match_and_one_with_another_clock_fail(
    doctor: Doctor, s3_keys: S3Server, bucket: str, serverless: None
) -> None:
    with proxy_to(s3_keys.endpoint, overwrites) as proxy:
        _, found = doctor(*in_bucket(bucket, proxy.endpoint))
    assert levels(found, "fail") == {"store conditional put"}
    with proxy_to(s3_keys.endpoint, lives_in_the_past) as proxy:
        _, found = doctor(*in_bucket(bucket, proxy.endpoint))
    assert levels(found, "fail") == {"store clock"}
    assert "ahead of the store's" in found["store clock"]["text"]


def test_wrong_key_and_missing_bucket_fail_and_the_secret_is_not_shown(
    doctor: Doctor, s3_keys: S3Server, monkeypatch: pytest.MonkeyPatch, serverless: None
) -> None:
    _, found = doctor("store.url=s3://no-such-bucket-here/x", f"store.endpoint_url={s3_keys.endpoint}")
    assert "NoSuchBucket" in found["store put"]["text"]
    monkeypatch.setenv("AWS_SECRET_ACCESS_KEY", "canary-secret-of-the-doctor")
    code, found = doctor(*in_bucket("x", s3_keys.endpoint))
    assert code == 1
    assert "SignatureDoesNotMatch" in found["store put"]["text"]
    assert "canary" not in json.dumps(found)


def test_store_of_another_run_fails(doctor: Doctor, toml: Path, tmp_path: Path, serverless: None) -> None:
    other = load_config(copy_tiny(tmp_path / "other"), ["run.name=other"])
    create_run_info(RunDir(other.run_dir), other)
    (toml.parent / "store").mkdir()
    (toml.parent / "store" / "run.json").write_bytes(RunDir(other.run_dir).run_json.read_bytes())
    code, found = doctor()
    assert code == 1
    assert "holds run 'other', not 'tiny'" in found["store owner"]["text"]


def test_store_folder_that_cannot_be_made_fails(doctor: Doctor, toml: Path, serverless: None) -> None:
    (toml.parent / "store").write_text("a file")
    code, found = doctor()
    assert code == 1
    assert levels(found, "fail") == {"store put"}


# Slack


def test_token_that_only_a_block_has_is_used_and_not_shown(
    doctor: Doctor, secret_block: Callable[[str, str], None], monkeypatch: pytest.MonkeyPatch
) -> None:
    for variable in ("SLACK_BOT_TOKEN", *AWS):  # what the doctor sets goes after the test
        monkeypatch.setenv(variable, "x")
        monkeypatch.delenv(variable)
    secret_block("SLACK_BOT_TOKEN", CANARY)
    with SlackServer(CANARY) as server:
        to_slack = (f"notify.slack_channel={CHANNEL}", f"notify.slack_api={server.url}")
        _, found = doctor(*to_slack)
        assert found["secret blocks"]["text"] == "SLACK_BOT_TOKEN from perdure-slack-bot-token"
        assert found["Slack token"]["level"] == "ok"
        monkeypatch.setenv("SLACK_BOT_TOKEN", "xoxb-the-environment-wins")
        assert "invalid_auth" in doctor(*to_slack)[1]["Slack token"]["text"]
    assert CANARY not in json.dumps(found)
    secret_block("AWS_ACCESS_KEY_ID", "AKIA")
    _, found = doctor("tiers.far.url=s3://bucket/far")
    assert "perdure-aws-secret-access-key is missing" in found["secret blocks"]["text"]


@pytest.fixture
def slack(monkeypatch: pytest.MonkeyPatch, doctor: Doctor, serverless: None) -> Iterator[SlackServer]:
    monkeypatch.setenv("SLACK_BOT_TOKEN", CANARY)
    with SlackServer(CANARY) as server:
        yield server
    assert not server.messages, "the doctor posts nothing"


def ask(doctor: Doctor, slack: SlackServer, channel: str = CHANNEL) -> Findings:
    _, found = doctor(f"notify.slack_channel={channel}", f"notify.slack_api={slack.url}")
    assert CANARY not in json.dumps(found)
    return {name: one for name, one in found.items() if name.startswith("Slack")}


@pytest.mark.parametrize("channel", [CHANNEL, CHANNEL_ID])
def test_bot_with_its_scopes_in_the_channel_passes(doctor: Doctor, slack: SlackServer, channel: str) -> None:
    slack.scopes = ["chat:write", "channels:read"]
    assert levels(ask(doctor, slack, channel), "ok") == {"Slack token", "Slack scope", "Slack channel"}


def test_channel_that_may_not_be_looked_up_is_skipped(doctor: Doctor, slack: SlackServer) -> None:
    found = ask(doctor, slack)
    assert found["Slack channel"]["level"] == "skip"
    assert "channels:read" in found["Slack channel"]["text"]


def test_missing_scope_wrong_token_and_absent_bot_are_found(
    doctor: Doctor, slack: SlackServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    slack.scopes = ["channels:read"]
    slack.channels[1]["is_member"] = False
    found = ask(doctor, slack)
    assert levels(found, "fail") == {"Slack scope", "Slack channel"}
    assert "chat:write" in found["Slack scope"]["fix"]
    assert "invite" in found["Slack channel"]["fix"]
    assert "is not there" in ask(doctor, slack, "#nowhere")["Slack channel"]["text"]
    slack.token = "xoxb-another"
    assert "invalid_auth" in ask(doctor, slack)["Slack token"]["text"]
    monkeypatch.delenv("SLACK_BOT_TOKEN")
    assert levels(ask(doctor, slack), "warn") == {"Slack token"}


def test_slack_that_answers_nonsense_or_redirects_fails_without_handing_the_token_on(
    doctor: Doctor, slack: SlackServer
) -> None:
    with SlackServer("xoxb-thief") as thief:
        slack.misbehave = answering(302, b"", Location=f"{thief.url}auth.test")
        assert ask(doctor, slack)["Slack token"]["level"] == "fail"
        assert thief.requests == 0
    slack.misbehave = answering(200, b"<html>")
    assert ask(doctor, slack)["Slack token"]["level"] == "fail"


# Prefect


def test_server_that_does_not_answer_fails_with_its_address(doctor: Doctor) -> None:
    url = f"http://127.0.0.1:{refused_port()}/api"
    with temporary_settings({PREFECT_API_URL: url}):
        code, found = doctor()
    assert code == 1
    assert levels(found, "fail") == {"Prefect API"}
    assert url in found["Prefect API"]["text"]
    assert found["worker"]["level"] == "skip"


def test_unregistered_run_missing_pool_paused_pool_and_absent_worker_are_told_apart(prefect_api: str, doctor: Doctor) -> None:
    pool = f"doctor-{secrets.token_hex(4)}"
    subject = Subject(config=load_config(Path(__file__).parent.parent / "crash/tiny/run.toml"), pool=pool)

    def work() -> Findings:
        return {one.check: vars(one) for one in server_checks.check_server(subject)}

    found = work()
    assert {"Prefect API", "Prefect version", "Prefect clock", "Prefect leases", "Prefect vacuum"} <= levels(found, "ok")
    assert "perdure deploy" in found["deployment"]["fix"]
    assert found["work pool"]["level"] == "fail"
    with get_client(sync_client=True) as client:
        client.create_work_pool(WorkPoolCreate(name=pool, type="process"))
        found = work()
        assert (found["work pool"]["level"], found["worker"]["level"]) == ("ok", "fail")
        assert found["worker"]["fix"] == f"prefect worker start --pool {pool}"
        client.update_work_pool(pool, WorkPoolUpdate(is_paused=True))
        assert "paused" in work()["work pool"]["text"]


def test_leases_in_memory_and_an_unvacuumed_database_are_warned_of() -> None:
    """By the settings that a Prefect server has when nobody sets any."""
    settings = Settings().model_dump(mode="json")
    found = {one.check: one for one in server_checks._settings(settings)}
    assert "LEASE_STORAGE=prefect.server.concurrency.lease_storage.filesystem" in found["Prefect leases"].fix
    assert "VACUUM_ENABLED=events,flow_runs" in found["Prefect vacuum"].fix
    assert {one.level for one in found.values()} == {"warn"}


@pytest.mark.parametrize(("theirs", "level"), [("3.9.1", "ok"), ("3.99.0", "ok"), ("3.1.0", "warn"), ("2.20.1", "fail")])
def test_version_of_the_server_counts(theirs: str, level: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("prefect.__version__", "3.9.1")
    assert server_checks._version(theirs).level == level


def test_real_command_prints_a_line_a_check_and_no_traceback(toml: Path, tmp_path: Path) -> None:
    environment = {**os.environ, "PREFECT_API_URL": "http://127.0.0.1:9/api", "TORCH_EXTENSIONS_DIR": str(tmp_path / "none")}
    command = [sys.executable, "-m", "perdure.cli", "doctor", str(toml)]
    done = subprocess.run(command, capture_output=True, text=True, env=environment, check=False, timeout=120)
    assert done.returncode == 1
    assert done.stderr == ""
    lines = done.stdout.splitlines()
    assert all(line.split()[0] in ("ok", "warn", "fail", "skip") for line in lines[:-1])
    assert next(line for line in lines if line.startswith("fail")).count("fix: ") == 1
