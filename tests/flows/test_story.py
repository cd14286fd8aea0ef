"""What a team sees and what it must never see: Slack's messages of a run that fails and recovers, and no secret anywhere."""

import os
import shutil
import sqlite3
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from harness import Direct, Run, copy_tiny
from slack_server import CHANNEL, SlackServer, rate_limited, refused_port

from perdure.training.run_dir import RunDir

pytestmark = pytest.mark.usefixtures("prefect_api")
TOKEN = "xoxb-canary-9876543210-fedcbaFEDCBA"
INHERITED, IN_TOML, PASSWORD = "canary-inherited-31f0", "canary-in-run-toml-55ab", "canary-prefect-80cd"


@pytest.fixture
def run(tmp_path: Path) -> Run:
    return Run(copy_tiny(tmp_path / "tiny"), "params.fail_at=17", f"notify.slack_channel='{CHANNEL}'")


def told(run: Run, slack_url: str) -> Run:
    return Run(run.toml, *run.settings, f"notify.slack_api='{slack_url}'")


def test_slack_has_one_message_per_run_and_the_failure_in_its_thread(run: Run) -> None:
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


@pytest.mark.parametrize("kind", ["dead", "rate limited"])
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
    code = run.finish(env={**ours, **read_only})
    assert code in (6, 7), run.log()
    keys = s3_server.admin.environment()
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
        assert secret not in database_dump()
        assert secret not in str(slack.calls)


def database_dump() -> str:
    database = Path(os.environ["PREFECT_HOME"]) / "prefect.db"
    with sqlite3.connect(f"file:{database}?mode=ro", uri=True) as connection:
        return "\n".join(connection.iterdump())


def test_s3_run_survives_the_loss_of_its_directory(tmp_path: Path, s3_server: Any) -> None:
    """Pushed to a real S3 server, the directory deleted, gone on from the bucket, pulled by a machine that has only the URL."""
    bucket = s3_server.make_bucket()
    settings = (
        f"store.url='s3://{bucket}/runs/tiny'",
        f"store.endpoint_url='{s3_server.endpoint}'",
        "store.region='us-east-1'",
    )
    env = s3_server.admin.environment()
    reference = Run(copy_tiny(tmp_path / "reference"), "store.url=''")
    Direct(reference).train_to_end()
    run = Run(copy_tiny(tmp_path / "tiny"), *settings)
    assert run.finish(env=env) == 0, run.log()
    assert run.digest() == reference.digest()
    shutil.rmtree(run.dir.root)
    assert run.finish(env=env) == 0, run.log()
    assert "launch_started" not in run.kinds(), "complete in the store: not a step is trained again"
    pulled = RunDir(tmp_path / "elsewhere")
    command = [sys.executable, "-m", "perdure.cli.main", "pull", f"s3://{bucket}/runs/tiny", str(pulled.root)]
    for text in settings[1:]:
        command += ["--" + text.partition("=")[0].split(".")[1].replace("_", "-"), text.partition("=")[2].strip("'")]
    done = subprocess.run(command, env={**os.environ, **env}, capture_output=True, text=True, timeout=60, check=False)
    assert done.returncode == 0, done.stderr
    assert (pulled.checkpoints / "000000000040-0001" / "manifest.json").exists()
