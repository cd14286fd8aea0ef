"""`perdure run` end to end on a real Prefect server: killed, stopped, started twice, and always the same final bits."""

import contextlib
import hashlib
import json
import os
import signal
import sqlite3
import subprocess
import time
from pathlib import Path

import pytest
from conftest import S3Server, copy_database
from harness import Direct, Run, copy_tiny, kill, wait_until
from prefect import get_client
from prefect.client.schemas.filters import LogFilter
from prefect_rows import flow_runs_of
from storage.proxy import Seen, proxy_to

from perdure.deployments import server
from perdure.flows import train as flow_of_training
from perdure.training.checkpoint import facts
from perdure.training.checkpoint.run_info import read_run_info
from perdure.training.process import identify
from perdure.training.run_dir import CheckpointName, rank_pack

pytestmark = pytest.mark.usefixtures("prefect_api")


@pytest.fixture(scope="module")
def reference(tmp_path_factory: pytest.TempPathFactory) -> str:
    run = Run(copy_tiny(tmp_path_factory.mktemp("reference") / "tiny"), "store.url=''")
    assert Direct(run).train_to_end().reason == "complete"
    return run.digest()


@pytest.fixture
def run(tmp_path: Path) -> Run:
    return Run(copy_tiny(tmp_path / "tiny"))


def told(run: Run, kind: str, step: int) -> list[bool]:
    return [step in (event.get("step"), event.get("end")) for event in run.events() if event["kind"] == kind]


def tree_digest(folder: Path) -> str:
    """Names and contents of everything but logs."""
    whole = hashlib.sha256()
    for path in sorted(folder.rglob("*")):
        if path.is_file() and "logs" not in path.parts and path.name != "lock":
            whole.update(f"{path.relative_to(folder)}:{hashlib.sha256(path.read_bytes()).hexdigest()}".encode())
    return whole.hexdigest()


def test_undisturbed_run_turns_others_away_completes_replicates_and_is_then_finished(run: Run, reference: str) -> None:
    run.settings.append("params.name_at=16")
    first = run.start_held_at(17)
    for _ in range(5):
        second = subprocess.run(run.command(), capture_output=True, text=True, timeout=60, check=False)
        assert second.returncode == 3
        assert f"process {first.pid}" in second.stderr
    for step, why in ((15, "due"), (17, "asked for by session.save()")):
        wait_until(lambda: any(told(run, "pushed", step)), f"a checkpoint inside a chunk, {why}, in the store")  # noqa: B023
    assert not any(told(run, "chunk_finished", 20)), "proven and copied while its chunk trains on"
    run.go_on()
    assert first.wait(120) == 0, run.log()
    assert run.digest() == reference
    assert len(list(run.dir.launches.glob("????.json"))) == 1
    assert run.kinds().count("chunk_finished") == 4
    assert run.kinds().count("completed") == 1
    assert {"verified", "pushed"} <= set(run.kinds())
    before = tree_digest(run.dir.root)
    for settings in ([], ["--set", "run.steps=20"]):
        again = subprocess.run(run.command(*settings, "--json"), capture_output=True, text=True, timeout=60, check=False)
        assert again.returncode == 0, again.stderr
        assert json.loads(again.stdout)["already"] is True
    assert tree_digest(run.dir.root) == before, "a finished run is not touched"


def test_parent_and_then_everything_killed_goes_on_with_the_same_command(run: Run, reference: str) -> None:
    """That of a killed flow process is in test_ui.py."""
    parent = run.start_held_at(12)
    parent.kill()
    parent.wait()
    run.go_on(told_to_stop=True)
    wait_until(lambda: run.processes() == [], "the flow saved and left")
    assert run.committed()[-1].step >= 12
    parent = run.start_held_at(27)
    wait_until(lambda: run.committed()[-1].step == 25, "step 25 committed")
    victims = [run.flow(), run.agent(), run.rank(), run.saver()]
    parent.kill()
    for victim in victims:
        kill(victim)
    parent.wait()
    wait_until(lambda: run.processes() == [], "no process left")
    assert run.finish() == 0, run.log()
    assert run.digest() == reference


def test_signals_to_the_parent_save_and_exit_75_and_then_changed_settings_are_refused(run: Run, reference: str) -> None:
    for number, step in ((signal.SIGINT, 12), (signal.SIGTERM, 27)):
        stop(run, run.start_held_at(step), number)
        assert run.committed()[-1].step >= step
    assert "failed" not in run.kinds(), "a stop that was asked for is no failure"
    assert run.kinds().count("stopped") == 2
    before = run.committed()
    changed = Run(run.toml, "run.steps=60", "params.width=33")
    assert changed.finish() == 2
    assert "steps: 40 -> 60" in run.log()
    assert "params.width: (absent) -> 33" in run.log()
    assert "--replan" in run.log()
    assert run.committed() == before, "no step was made"
    assert run.finish() == 0, run.log()
    assert run.digest() == reference


def stop(run: Run, parent: "subprocess.Popen[bytes]", number: int) -> None:
    """Twice; SIGTERM as systemd does, to every process."""
    flow = run.flow()
    assert flow is not None
    told = [identify(pid) for pid in {*run.processes(), flow.pid}] if number == signal.SIGTERM else []
    for _ in range(2):
        parent.send_signal(number)
        for process in told:
            process.send(number)
        time.sleep(0.1)
    run.go_on(told_to_stop=True)
    assert parent.wait(60) == 75, run.log()
    assert run.processes() == []


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
    assert "xxx [...]; " in run.log()
    assert [text[-40:] for text in told_to_prefect(run) if "xxx [...]; " in text]
    assert max(map(len, told_to_prefect(run))) < 10_000
    whole = (run.dir.root / "logs" / "launch-0001" / "rank-00000.log").read_text()
    assert "19999\n" in whole
    assert "x" * 2_000_000 in whole


def test_last_checkpoint_damaged_before_its_proof_is_trained_again(run: Run, reference: str) -> None:
    parent = run.start_held_at(37)
    flow, last = run.flow(), CheckpointName(40, 1)
    kill(flow, signal.SIGSTOP)  # it proves nothing until the damage is done
    run.go_on()
    wait_until(lambda: run.committed()[-1] == last, "the last step")
    pack = run.dir.checkpoint(last) / rank_pack(0)
    data = pack.read_bytes()
    pack.write_bytes(bytes([data[0] ^ 1]) + data[1:])
    kill(flow, signal.SIGCONT)
    assert parent.wait(120) == 0, run.log()
    assert [event.get("name") for event in run.events() if event["kind"] == "quarantined"] == [str(last)]
    assert [event.get("name") for event in run.events() if event["kind"] == "completed"] == [str(CheckpointName(40, 2))]
    assert run.digest() == reference


def test_last_copy_may_take_as_long_as_it_takes(run: Run, s3_keys: S3Server, monkeypatch: pytest.MonkeyPatch) -> None:
    """Longer than the time that the training code has after its last step, here none."""
    monkeypatch.setattr(flow_of_training, "AFTER_TRAINING_SECS", 0.0)

    def slow(seen: Seen) -> None:
        if seen.method == "PUT" and ".pack" in seen.path:
            wait_until(run.dir.launch_end(1).exists, "the end of training")
            time.sleep(1.0)

    with proxy_to(s3_keys.endpoint, slow) as proxy:
        place = [f"store.url=s3://{s3_keys.make_bucket()}/x", f"store.endpoint_url={proxy.endpoint}", "store.region=here"]
        state = flow_of_training.train(str(run.toml), ["run.steps=10", *place], return_state=True)
    assert state.is_completed(), state.message
    assert facts.is_in(run.dir, CheckpointName(10, 1), "store")


def test_store_that_refuses_at_the_end_is_named_and_another_one_gets_all(run: Run, reference: str) -> None:
    parent = run.start_held_at(37)
    store = run.toml.parent / "store"
    due = [CheckpointName(step, 1) for step in range(5, 36, 5)]
    wait_until(lambda: all(facts.is_in(run.dir, name, "store") for name in due), "all that there are in the store")
    store.rename(run.toml.parent / "gone")
    store.write_text("no folder any more")
    run.go_on()
    assert parent.wait(120) == 9, run.log()
    assert told(run, "push_failed", 40) == [True], "what another try cannot cure is tried once"
    assert f"cannot write {store / 'run.json'}: Not a directory" in run.log().splitlines()[-2]
    before = run.committed()
    moved = Run(run.toml, "store.url=elsewhere")
    assert moved.finish() == 0, run.log()
    assert run.committed() == before, "only pushed"
    assert run.digest() == reference
    assert {path.parent.name for path in run.toml.parent.glob("elsewhere/*/*/manifest.json")} == set(map(str, before))
    assert read_run_info(run.dir).store_url == (run.toml.parent / "elsewhere").as_uri()


def told_to_prefect(run: Run) -> list[str]:
    [one] = flow_runs_of(run)
    with get_client(sync_client=True) as client:
        return [log.message for log in client.read_logs(LogFilter(flow_run_id={"any_": [one.id]}))]


def test_prefect_server_stuck_and_then_killed_does_not_stop_training(tmp_path: Path, reference: str) -> None:
    """With a server of its own, whose database somebody holds: training and saving go on, the run completes."""
    run = Run(copy_tiny(tmp_path / "tiny"), "params.sleep=0.1", *Run.held_at(12))
    home = server.ServerHome.beside(run.dir)
    copy_database(home)
    own = {name: value for name, value in os.environ.items() if not name.startswith("PREFECT_")}
    log = open(run.toml.parent / "parent.log", "ab")
    with log:
        parent = subprocess.Popen(run.command(), stdout=log, stderr=log, env=own, start_new_session=True)
    run.wait_until_held()
    with contextlib.closing(sqlite3.connect(home.database, isolation_level=None, timeout=60)) as other:
        other.execute("BEGIN EXCLUSIVE")
        run.go_on()
        wait_until(lambda: run.committed()[-1].step >= 25, "checkpoints while the database is locked")
    record = server.read_record(home)
    assert record is not None
    kill(record.server)
    assert parent.wait(180) == 0, run.log()
    assert run.digest() == reference
    assert len(list(run.dir.launches.glob("????.json"))) == 1, "the launch was not disturbed"
