"""`ls` and `status` say what is on the disk, in stable JSON and in plain columns."""

import fcntl
import json
import os
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from typing import Any

import pytest

from perdure.tasks import flow_runs
from perdure.training import events
from perdure.training.checkpoint.facts import Fact, write_fact
from perdure.training.checkpoint.run_info import read_run_info
from perdure.training.run_dir import CheckpointName

Command = Callable[..., Any]


def fact(made: Any, step: int, copy: str, result: str = "good", token: int = 1) -> None:
    place = read_run_info(made.run).store_url if copy == "store" else ""
    write_fact(made.run, CheckpointName(step, token), Fact(copy=copy, checked_at=time.time(), result=result, location=place))


def test_ls_json_describes_each_checkpoint(made: Any, command: Command) -> None:
    fact(made, 20, "local")
    answer = command("ls", made.run.root, "--json").json
    assert answer["run"]["name"] == "tiny"
    assert answer["run"]["steps"] == 60
    first, second = answer["checkpoints"]
    assert set(first) == {
        "name", "step", "token", "trust", "in_lineage", "bytes_on_disk", "raw_bytes", "state_digest", "created",
        "places",
    }  # fmt: skip
    assert (first["places"], second["places"]) == (["local"], [])
    assert (first["name"], first["step"], first["token"], first["trust"]) == ("000000000020-0001", 20, 1, "verified")
    assert (second["step"], second["trust"], second["in_lineage"]) == (40, "written", True)
    assert first["bytes_on_disk"] == sum(path.stat().st_size for path in made.run.checkpoint(CheckpointName(20, 1)).iterdir())
    assert first["raw_bytes"] > 4096
    assert len(first["state_digest"]) == 64
    assert first["state_digest"] != second["state_digest"]
    assert abs(first["created"] - time.time()) < 3600


def test_ls_shows_plain_columns_and_what_is_outside_the_history(made: Any, command: Command) -> None:
    made.launch(2, "000000000020-0001")
    (made.run.checkpoints / "000000000050-0002").mkdir()
    made.run.manifest(CheckpointName(20, 1)).write_bytes(b"{")
    answer = command("ls", made.toml)
    head, first, second, left = answer.out.splitlines()
    assert head.split()[:3] == ["step", "launch", "trust"]
    assert first.split()[:3] == ["20", "1", "written"]
    assert "manifest" in first
    assert "not in the present history" in second
    assert left == "1 leftover of a crash, first checkpoints/000000000050-0002"
    assert "\x1b" not in answer.out
    assert command("ls", made.toml, "--json").json["checkpoints"][0]["problem"]


def test_ls_of_a_run_without_checkpoints_says_so(made: Any, command: Command) -> None:
    for path in sorted(made.run.checkpoints.rglob("*"), reverse=True):
        path.rmdir() if path.is_dir() else path.unlink()
    assert "has no checkpoint yet" in command("ls", made.run.root).out
    assert command("ls", made.run.root, "--json").json["checkpoints"] == []


def state_of(made: Any, command: Command) -> dict[str, Any]:
    return dict(command("status", made.toml, "--json").json)


def test_status_of_a_run_that_has_not_started_is_new(toml: Any, command: Command) -> None:
    status = command("status", toml, "--json").json
    assert (status["state"], status["step"], status["total_steps"], status["launches"]) == ("new", 0, 60, 0)
    assert status["run_id"] is None
    assert "not started" in command("status", toml).out
    refused = command("ls", toml)
    assert refused.code == 4
    assert "perdure run" in refused.err


def test_status_follows_facts_and_ends(made: Any, command: Command) -> None:
    status = state_of(made, command)
    assert (status["state"], status["step"]) == ("failed", 40)
    assert "left no word" in status["last_failure"]["detail"]
    made.end(1, "failed", 45, "user", "ValueError: no")
    status = state_of(made, command)
    assert status["last_failure"]["class"] == "user"
    assert status["last_failure"]["step"] == 45
    assert (status["newest_committed_step"], status["newest_verified_step"], status["newest_replicated_step"]) == (
        40,
        None,
        None,
    )
    fact(made, 20, "local")
    fact(made, 20, "store")
    fact(made, 40, "local")
    status = state_of(made, command)
    assert (status["newest_verified_step"], status["newest_replicated_step"]) == (40, 20)
    made.launch(2, "000000000040-0001")
    made.end(2, "stopped", 40)
    assert state_of(made, command)["state"] == "stopped"
    fact(made, 40, "local", "damaged")
    assert state_of(made, command)["newest_committed_step"] == 20


def test_status_tells_complete_from_not_replicated(made: Any, command: Command) -> None:
    made.write(60)
    fact(made, 60, "local")
    assert state_of(made, command)["state"] == "complete_not_replicated"
    fact(made, 60, "store")
    assert state_of(made, command)["state"] == "complete"
    assert state_of(made, command)["last_failure"] is None
    assert "state         complete" in command("status", made.run.root).out
    flow_runs.enter(made.run, "0123", "http://127.0.0.1:4200/v2/runs/flow-run/0123")
    assert state_of(made, command)["flow_run"] == {"id": "0123", "page": "http://127.0.0.1:4200/v2/runs/flow-run/0123"}
    assert "page          http://127.0.0.1:4200/v2/runs/flow-run/0123" in command("status", made.run.root).out


def test_status_counts_copies_in_the_present_store_only(made: Any, command: Command) -> None:
    made.write(60)
    for copy in ("local", "store"):
        fact(made, 60, copy)
    assert state_of(made, command)["state"] == "complete"
    elsewhere = command("status", made.toml, "--set", "store.url=other", "--json").json
    assert (elsewhere["state"], elsewhere["newest_replicated_step"]) == ("complete_not_replicated", None)
    pushed = command("push", made.toml, "--set", "store.url=other", "--dry-run", "--json").json["pushed"]
    assert pushed[-1] == "000000000060-0001", "what another store has is no copy in this one"


def test_last_failure_is_that_of_the_newest_launch_that_failed_with_or_without_a_word(made: Any, command: Command) -> None:
    made.end(1, "failed", 45, "user", "ValueError: no")
    for token in (2, 3):
        made.launch(token, "000000000040-0001")
    assert state_of(made, command)["last_failure"]["launch"] == 3
    made.write(60, token=3)
    silent = state_of(made, command)["last_failure"]
    assert (silent["launch"], silent["class"]) == (2, "infrastructure"), "launch 3 did what it had to"
    events.record(made.run, "failed", token=2, error_class="infrastructure", step=43, detail="agent ended with status -9")
    told = state_of(made, command)["last_failure"]
    assert (told["launch"], told["step"], told["detail"]) == (2, 43, "agent ended with status -9")
    assert "infrastructure at step 43, launch 2" in command("status", made.toml).out


HOLDER = """
import sys
from pathlib import Path
from perdure.training.agent.lock import RunLock
from perdure.training.run_dir import RunDir
run = RunDir(Path(sys.argv[1]))
with RunLock.acquire(run, 0.0):
    print("held", flush=True)
    while not run.stop_request.exists() and sys.argv[2] == "obeys":
        import time; time.sleep(0.02)
    if sys.argv[2] != "obeys":
        sys.stdin.read()
"""


@pytest.fixture
def holder(made: Any, request: pytest.FixtureRequest) -> Iterator["subprocess.Popen[bytes]"]:
    """A process that runs the run; `obeys` lets go when it is asked to stop."""
    command = [sys.executable, "-c", HOLDER, str(made.run.root), getattr(request, "param", "deaf")]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE) as process:
        assert process.stdout is not None
        assert process.stdout.readline() == b"held\n"
        yield process
        process.kill()


def test_status_of_a_running_run_names_holder_step_and_beat(made: Any, holder: Any, command: Command) -> None:
    progress = {"counter": 7, "time": time.time(), "token": 1, "state": "training", "step": 47, "slow": {"3": 0.52}}
    made.run.progress_json.write_text(json.dumps(progress))
    status = state_of(made, command)
    assert (status["state"], status["step"]) == ("running", 47)
    assert status["holder"]["pid"] == holder.pid
    assert status["holder"]["host"] == socket.gethostname()
    assert (status["trainer"]["counter"], status["trainer"]["slow_ranks"]) == (7, {"3": 0.52})
    assert "rank 3 (0.52 s of work in a step)" in command("status", made.toml).out
    made.run.stop_request.write_text("enough")
    assert state_of(made, command)["state"] == "stopping"
    made.run.progress_json.write_text(json.dumps({**progress, "token": 0}))
    assert state_of(made, command)["step"] == 40, "an older launch's progress is not this one's"
    holder.kill()
    holder.wait()
    assert state_of(made, command)["state"] == "failed"


@pytest.mark.parametrize("text", [b"", b"[]", b'{"step": "x"}', b"{" * 5000])
def test_foreign_progress_file_is_ignored(text: bytes, made: Any, holder: Any, command: Command) -> None:
    made.run.progress_json.write_bytes(text)
    assert state_of(made, command)["trainer"] is None


def test_looking_does_not_take_the_lock(made: Any, command: Command) -> None:
    command("status", made.run.root)
    fd = os.open(made.run.lock, os.O_RDWR | os.O_CREAT)
    fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
    os.close(fd)


@pytest.mark.parametrize("holder", ["obeys"], indirect=True)
def test_stop_waits_until_the_run_is_gone_and_leaves_no_request(made: Any, holder: Any, command: Command) -> None:
    answer = command("stop", made.run.root, "--reason", "enough", "--json")
    assert answer.code == 0
    assert answer.json == {"stopped": True, "step": 40, "reason": "enough"}
    assert holder.wait(60) == 0
    assert not made.run.stop_request.exists()


def test_stop_gives_up_after_its_timeout_and_the_request_stays(made: Any, holder: Any, command: Command) -> None:
    answer = command("stop", made.run.root, "--timeout", "0.3")
    assert answer.code == 3
    assert "still runs" in answer.err
    assert "asked to stop" in made.run.stop_request.read_text()
    assert command("stop", made.run.root, "--no-wait", "--json").json["stopped"] is False


def test_stop_of_what_does_not_run_is_refused(made: Any, command: Command) -> None:
    answer = command("stop", made.run.root)
    assert answer.code == 4
    assert "is not running" in answer.err
    assert not made.run.stop_request.exists()


def test_stop_waits_a_time_that_ends(made: Any, command: Command) -> None:
    for text in ("nan", "inf", "-1"):
        answer = command("stop", made.run.root, f"--timeout={text}")
        assert answer.code == 2
        assert "is no waiting time" in answer.err
