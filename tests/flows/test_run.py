"""`perdure run` end to end on a real Prefect server: killed, stopped, started twice, and always the same final bits."""

import contextlib
import hashlib
import json
import signal
import subprocess
import time
from pathlib import Path

import pytest
from harness import Direct, Run, copy_tiny, kill, wait_until

from perdure.training.process import identify

pytestmark = pytest.mark.usefixtures("prefect_api")
SLOW = "params.sleep=0.1"


@pytest.fixture(scope="module")
def reference(tmp_path_factory: pytest.TempPathFactory) -> str:
    run = Run(copy_tiny(tmp_path_factory.mktemp("reference") / "tiny"), "store.url=''")
    assert Direct(run).train_to_end().reason == "complete"
    return run.digest()


@pytest.fixture
def run(tmp_path: Path) -> Run:
    return Run(copy_tiny(tmp_path / "tiny"), SLOW)


def has_started(run: Run) -> bool:
    return run.dir.events.exists()


def told(run: Run, kind: str, step: int) -> list[bool]:
    return [step in (event.get("step"), event.get("end")) for event in run.events() if event["kind"] == kind]


def tree_digest(folder: Path) -> str:
    """Names and contents of everything but logs."""
    whole = hashlib.sha256()
    for path in sorted(folder.rglob("*")):
        if path.is_file() and "logs" not in path.parts and path.name != "lock":
            whole.update(f"{path.relative_to(folder)}:{hashlib.sha256(path.read_bytes()).hexdigest()}".encode())
    return whole.hexdigest()


def test_undisturbed_run_completes_replicates_and_is_then_finished(run: Run, reference: str) -> None:
    parent = run.start("--set", "launch.env.TINY_wait_at=17")
    wait_until(lambda: has_started(run) and any(told(run, "pushed", 15)), "a checkpoint inside a chunk in the store")
    assert not any(told(run, "chunk_finished", 20)), "proven and copied while its chunk trains on"
    (run.toml.parent / "go-on").touch()
    assert parent.wait(120) == 0, run.log()
    assert run.digest() == reference
    assert run.kinds().count("chunk_finished") == 4
    assert run.kinds().count("completed") == 1
    assert {"verified", "pushed"} <= set(run.kinds())
    before = tree_digest(run.dir.root)
    for settings in ([], ["--set", "run.steps=20"]):
        again = subprocess.run(run.command(*settings, "--json"), capture_output=True, text=True, timeout=60, check=False)
        assert again.returncode == 0, again.stderr
        assert json.loads(again.stdout)["already"] is True
    assert tree_digest(run.dir.root) == before, "a finished run is not touched"


def test_flow_process_killed_is_replaced_and_nothing_is_lost(run: Run, reference: str) -> None:
    parent = run.start()
    wait_until(lambda: run.step() >= 12, "step 12")
    kill(run.flow())
    assert parent.wait(120) == 0, run.log()
    assert run.digest() == reference
    assert run.processes() == []


def test_everything_killed_at_once_goes_on_with_the_same_command(run: Run, reference: str) -> None:
    parent = run.start()
    wait_until(lambda: run.step() >= 17, "step 17")
    victims = [run.flow(), run.agent(), run.rank(), run.saver()]
    parent.kill()
    for victim in victims:
        kill(victim)
    parent.wait()
    wait_until(lambda: run.processes() == [], "no process left", 20)
    assert run.committed()[-1].step >= 10
    assert run.finish() == 0, run.log()
    assert run.digest() == reference


def test_parent_killed_lets_the_flow_save_and_leave(run: Run, reference: str) -> None:
    parent = run.start()
    wait_until(lambda: run.step() >= 12, "step 12")
    parent.kill()
    parent.wait()
    wait_until(lambda: run.processes() == [], "no process left", 40)
    assert run.committed()[-1].step >= 12
    assert run.finish() == 0, run.log()
    assert run.digest() == reference


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
def test_signal_to_the_parent_saves_and_exits_75(run: Run, reference: str, number: int) -> None:
    parent = run.start()
    wait_until(lambda: run.step() >= 12, "step 12")
    flow = run.flow()
    assert flow is not None
    told = [identify(pid) for pid in {*run.processes(), flow.pid}] if number == signal.SIGTERM else []  # as systemd does
    for _ in range(2):
        parent.send_signal(number)
        for process in told:
            process.send(number)
        time.sleep(0.1)
    assert parent.wait(60) == 75, run.log()
    assert run.processes() == []
    assert run.committed()[-1].step >= 12
    assert "failed" not in run.kinds(), "a stop that was asked for is no failure"
    assert run.kinds().count("stopped") == 1
    assert run.finish() == 0, run.log()
    assert run.digest() == reference


def test_node_loss_resumes_from_the_store_alone(run: Run, reference: str) -> None:
    parent = run.start()
    wait_until(lambda: "pushed" in (run.kinds() if run.dir.events.exists() else []), "a pushed checkpoint")
    victims = [run.flow(), run.agent()]
    parent.kill()
    for victim in victims:
        kill(victim)
    parent.wait()
    wait_until(lambda: run.processes() == [], "no process left", 20)
    subprocess.run(["rm", "-rf", str(run.dir.root)], check=True)
    assert run.finish() == 0, run.log()
    assert run.digest() == reference
    assert any("brought back" in str(event.get("text")) for event in run.events())


def test_failed_chunk_goes_on_from_the_newest_checkpoint(tmp_path: Path) -> None:
    run = Run(copy_tiny(tmp_path / "tiny"), "params.fail_at=17")
    assert run.finish() == 0, run.log()
    assert run.kinds().count("failed") == 1
    failed = next(event for event in run.events() if event["kind"] == "failed")
    assert (failed["error_class"], failed["last_good"]) == ("infrastructure", 15)
    assert "restarting" in str(failed["next"])
    assert "made up by the test" in str(failed["log_tail"])


def test_bug_in_user_code_stops_at_once_and_names_it_however_much_it_says(tmp_path: Path) -> None:
    toml = copy_tiny(tmp_path / "tiny")
    script = toml.parent / "train.py"
    text, bug = script.read_text(), 'raise ValueError("a bug in the training code (made up by the test)'
    loud = f"for number in range(20_000):\n                print(number)\n            {bug}"
    script.write_text(text.replace(f'{bug}")', f'{loud} " + "x" * 2_000_000)'))
    run = Run(toml, "params.bug_at=7")
    assert run.finish() == 7
    assert run.kinds().count("failed") == 1
    assert "a bug in the training code (made up by the test)" in run.log()
    assert len(run.log()) < 100_000, "and neither Prefect nor the terminal gets all of it"
    whole = (run.dir.root / "logs" / "launch-0001" / "rank-00000.log").read_text()
    assert "19999\n" in whole
    assert "x" * 2_000_000 in whole


def test_second_start_exits_at_once_names_the_holder_and_changes_nothing(run: Run, reference: str) -> None:
    first = run.start()
    wait_until(run.dir.lock.exists, "the lock")
    for _ in range(5):
        second = subprocess.run(run.command(), capture_output=True, text=True, timeout=30, check=False)
        assert second.returncode == 3
        assert f"process {first.pid}" in second.stderr
    assert first.wait(120) == 0, run.log()
    assert run.digest() == reference
    assert len(list(run.dir.launches.glob("????.json"))) == 1


def test_changed_trajectory_settings_are_refused_with_both_values(run: Run) -> None:
    parent = run.start()
    wait_until(lambda: len(run.committed()) >= 2, "two checkpoints")
    parent.send_signal(signal.SIGTERM)
    assert parent.wait(60) == 75
    before = run.committed()
    changed = Run(run.toml, SLOW, "run.steps=60", "params.width=33")
    assert changed.finish() == 2
    assert "steps: 40 -> 60" in run.log()
    assert "params.width: (absent) -> 33" in run.log()
    assert "--replan" in run.log()
    assert run.committed() == before, "no step was made"


def test_prefect_server_stuck_and_then_killed_does_not_stop_training(tmp_path: Path, reference: str) -> None:
    """With a server of its own, whose database somebody holds: training and saving go on, the run completes."""
    import os
    import sqlite3

    from perdure.deployments import server

    run = Run(copy_tiny(tmp_path / "tiny"), SLOW)
    own = {name: value for name, value in os.environ.items() if not name.startswith("PREFECT_")}
    log = open(run.toml.parent / "parent.log", "ab")
    with log:
        parent = subprocess.Popen(run.command(), stdout=log, stderr=log, env=own, start_new_session=True)
    wait_until(lambda: run.step() >= 12, "step 12")
    home = server.ServerHome.beside(run.dir)
    with contextlib.closing(sqlite3.connect(home.database, isolation_level=None, timeout=30)) as other:
        other.execute("BEGIN EXCLUSIVE")
        wait_until(lambda: run.committed()[-1].step >= 25, "checkpoints while the database is locked")
    record = server.read_record(home)
    assert record is not None
    kill(record.server)
    assert parent.wait(180) == 0, run.log()
    assert run.digest() == reference
    assert len(list(run.dir.launches.glob("????.json"))) == 1, "the launch was not disturbed"
