"""What a team sees and what it must never see: Slack's messages of a run that fails and recovers, and no secret anywhere."""

import os
import shutil
import sqlite3
import subprocess
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from harness import PERDURE, Direct, Run, all_pids, command_line, copy_tiny, kill, wait_until
from slack_server import CHANNEL, SlackServer, rate_limited, refused_port
from storage.proxy import Reply, proxy_to

from perdure.training.run_dir import RunDir

pytestmark = pytest.mark.usefixtures("prefect_api")
TOKEN = "xoxb-canary-9876543210-fedcbaFEDCBA"
INHERITED, IN_TOML, PASSWORD = "canary-inherited-31f0", "canary-in-run-toml-55ab", "canary-prefect-80cd"


@pytest.fixture
def run(tmp_path: Path) -> Run:
    return Run(copy_tiny(tmp_path / "tiny"), "params.fail_at=17", f"notify.slack_channel='{CHANNEL}'")


def told(run: Run, slack_url: str) -> Run:
    return Run(run.toml, *run.settings, f"notify.slack_api='{slack_url}'")


def test_failed_chunk_goes_on_and_slack_has_one_message_per_run_with_the_failure_in_its_thread(run: Run) -> None:
    with SlackServer(TOKEN) as slack:
        run = told(run, slack.url)
        assert run.finish(env={"SLACK_BOT_TOKEN": TOKEN}) == 0, run.log()
    assert slack.problems == []
    (root,) = slack.roots
    assert root["edits"] >= 1
    assert "complete" in str(root).lower()
    replies = [str(reply) for reply in slack.replies]
    failure = next(text for text in replies if "infrastructure" in text)
    assert "17" in failure
    assert "15" in failure
    assert "restarting" in failure
    assert "made up by the test" in failure
    assert any("Recovered" in text for text in replies)
    assert run.kinds().count("failed") == 1
    failed = next(event for event in run.events() if event["kind"] == "failed")
    assert (failed["error_class"], failed["last_good"]) == ("infrastructure", 15)
    assert "made up by the test" in str(failed["log_tail"])


@pytest.mark.parametrize("kind", ["rate limited", pytest.param("dead", marks=pytest.mark.chaos)])
def test_slack_that_does_not_work_neither_fails_nor_delays_the_run(run: Run, kind: str) -> None:
    with SlackServer(TOKEN) as slack:
        slack.misbehave = rate_limited(3600)
        url = slack.url if kind == "rate limited" else f"http://127.0.0.1:{refused_port()}/api/"
        run = told(run, url)
        assert run.finish(env={"SLACK_BOT_TOKEN": TOKEN}) == 0, run.log()
    assert slack.requests <= 3, "it is left alone until the time it named"


def everything_written(folder: Path) -> Callable[[str], list[Path]]:
    return lambda secret: [path for path in folder.rglob("*") if path.is_file() and secret.encode() in path.read_bytes()]


def test_secrets_are_nowhere_after_a_run_with_failures(
    tmp_path: Path, s3_server: Any, prefect_api: str, secret_block: Callable[[str, str], None]
) -> None:
    """Slack token (from a block), S3 keys, Prefect's password, and variables that the training code puts into its exception;
    with failing Slack and failing uploads: greps files, database and output."""
    secret_block("SLACK_BOT_TOKEN", TOKEN)
    bucket = s3_server.make_bucket()
    toml = copy_tiny(tmp_path / "tiny")
    toml.write_text(toml.read_text().replace("env = {", f'env = {{ DB_PASSWORD = "{IN_TOML}",'))
    script = toml.parent / "train.py"
    said = "f\"{os.environ['DB_PASSWORD']}, {os.environ['HF_TOKEN']}: a bug in the training code (made up by the test)\""
    script.write_text(script.read_text().replace('"a bug in the training code (made up by the test)"', said))
    run = Run(
        toml,
        "params.bug_at=17",
        f"notify.slack_channel='{CHANNEL}'",
        f"notify.slack_api='http://127.0.0.1:{refused_port()}/api/'",
        f"store.url='s3://{bucket}/secret-run'",
        f"store.endpoint_url='{s3_server.endpoint}'",
        "store.region='us-east-1'",
    )
    read_only = s3_server.read_only.environment()
    ours = {
        "HF_TOKEN": INHERITED,
        "PREFECT_API_URL": prefect_api.replace("://", f"://me:{PASSWORD}@"),
    }
    keys = s3_server.admin.environment()
    assert run.finish(env={**ours, **read_only}) == 6, run.log()
    with proxy_to(s3_server.endpoint, lambda seen: Reply(403, "AccessDenied") if ".pack" in seen.path else None) as s3:
        first = Run(toml, *run.settings, f"store.endpoint_url='{s3.endpoint}'").start(env={**ours, **keys})
        seen = command_lines_until_end(first)
    assert first.returncode in (6, 7), run.log()
    assert "push_failed" in run.kinds(), "a rank has trained meanwhile"
    with SlackServer(TOKEN) as slack:
        code = told(run, slack.url).finish(env={**ours, **keys})
    assert code == 7, run.log()
    assert "[redacted], [redacted]: a bug in" in str(slack.messages)
    assert "ValueError: [redacted], [redacted]: a bug in" in run.log()
    assert "[redacted], [redacted]: a bug in" in database_dump()
    toml.unlink()  # the user's own, with a secret in it
    find = everything_written(tmp_path)
    for secret in (TOKEN, INHERITED, IN_TOML, PASSWORD, *(key["AWS_SECRET_ACCESS_KEY"] for key in (read_only, keys))):
        assert find(secret) == []
        assert [line for line in seen if secret in line] == []
        assert secret not in database_dump()
        assert secret not in str(slack.calls)


def command_lines_until_end(process: "subprocess.Popen[bytes]") -> set[str]:
    """What anyone on the machine could read of its processes."""
    seen = set[str]()
    while process.poll() is None:
        seen |= {command_line(pid) for pid in all_pids()}
        time.sleep(0.05)
    return seen


def database_dump() -> str:
    database = Path(os.environ["PREFECT_HOME"]) / "prefect.db"
    with sqlite3.connect(f"file:{database}?mode=ro", uri=True) as connection:
        return "\n".join(connection.iterdump())


def test_s3_run_of_an_odd_name_survives_the_loss_of_its_directory(tmp_path: Path, s3_server: Any) -> None:
    """Pushed to a real S3 server, killed and its directory deleted, in the middle and at the end, gone on from the bucket,
    pruned, pulled and restored by a machine that has only the URL; named as no shell, URL or signature takes it as it is."""
    bucket, odd = s3_server.make_bucket(), "-a b/тест 日本/100%41+#'=&~@(v1.2)"
    env, place = s3_server.admin.environment(), {"endpoint_url": s3_server.endpoint, "region": "us-east-1"}
    reference = Run(copy_tiny(tmp_path / "reference"), "store.url=''")
    Direct(reference).train_to_end()
    toml, url = copy_tiny(tmp_path / odd / "tiny"), f"s3://{bucket}/{odd.replace('%', '%25').replace('#', '%23')}"
    store = "\n".join(f'{key} = "{value}"' for key, value in {"url": url, **place}.items())
    toml.write_text(toml.read_text().replace('url = "store"', store).replace('"tiny"', '"v1.2-_."'))
    run = Run(toml)

    def perdure(*arguments: object) -> None:
        command = [*PERDURE, *map(str, arguments)]
        done = subprocess.run(command, env={**os.environ, **env}, capture_output=True, text=True, timeout=60, check=False)
        assert done.returncode == 0, done.stderr

    parent = run.start_held_at(12, env=env)
    wait_until(lambda: "pushed" in run.kinds(), "a pushed checkpoint")
    victims = [run.flow(), run.agent()]
    parent.kill()
    for victim in victims:
        kill(victim)
    parent.wait()
    wait_until(lambda: run.processes() == [], "no process left")
    shutil.rmtree(run.dir.root)
    assert run.finish(env=env) == 0, run.log()
    assert any("brought back" in str(event.get("text")) for event in run.events())
    assert run.digest() == reference.digest()
    perdure("prune", toml, "--tier", "store", "--keep-last", "2")
    stored = {item["Key"] for item in s3_server.client().list_objects_v2(Bucket=bucket)["Contents"]}
    assert all(key.startswith(f"{odd}/") for key in stored)
    kept = {f"{odd}/checkpoints/{name}/manifest.json" for name in run.committed()[-2:]}
    assert {key for key in stored if key.endswith("/manifest.json")} == kept
    shutil.rmtree(run.dir.root)
    assert run.finish(env=env) == 0, run.log()
    assert "launch_started" not in run.kinds(), "complete in the store: not a step is trained again"
    options = [part for key, value in place.items() for part in (f"--{key.replace('_', '-')}", value)]
    pulled, weights = RunDir(tmp_path / "else where" / odd), tmp_path / "w e i%ghts#.safetensors"
    perdure("pull", url, pulled.root, *options)
    perdure("restore", url, weights, *options)
    assert pulled.manifest(run.committed()[-1]).exists()
    assert weights.stat().st_size > 1000
    assert {path.name for path in tmp_path.iterdir()} == {"reference", "-a b", "else where", weights.name}
