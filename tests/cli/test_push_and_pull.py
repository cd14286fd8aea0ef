"""`push` and `pull` move a run to a store and back, and say what they would do first."""

import json
import shutil
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from perdure.training import events
from perdure.training.agent.lock import RunLock
from perdure.training.checkpoint import lineage, pins
from perdure.training.checkpoint.upkeep import upkeep
from perdure.training.run_dir import CheckpointName, RunDir

Command = Callable[..., Any]


def store_of(made: Any) -> Path:
    return Path(made.toml.parent / "store")


def test_push_verifies_copies_and_then_has_nothing_to_do(made: Any, command: Command) -> None:
    dry = command("push", made.run.root, "--dry-run")
    assert dry.out.count("would push") == 2
    assert not store_of(made).exists()
    answer = command("push", made.run.root, "--json")
    assert answer.code == 0, answer.err
    assert answer.json["pushed"] == ["000000000020-0001", "000000000040-0001"]
    assert answer.json["store_url"] == store_of(made).as_uri()
    listed = command("ls", made.run.root, "--json").json["checkpoints"]
    assert [one["trust"] for one in listed] == ["replicated", "replicated"]
    assert [event.kind for event in events.read(made.run)] == ["pushed", "pushed"]
    assert "nothing to push" in command("push", made.run.root).out


def test_one_step_can_be_pushed(made: Any, command: Command) -> None:
    assert command("push", made.run.root, "--step", "40", "--json").json["pushed"] == ["000000000040-0001"]
    assert not (store_of(made) / "checkpoints/000000000020-0001").exists()


def test_damaged_checkpoint_is_not_copied(made: Any, command: Command) -> None:
    made.damage(40, "model/weight")
    answer = command("push", made.run.root)
    assert answer.code == 5
    assert "is damaged and was not copied" in answer.err
    assert not (store_of(made) / "checkpoints/000000000040-0001").exists()
    assert command("push", made.run.root).code == 0, "what is known to be damaged is not tried again"


def test_run_without_a_store_says_what_to_set(made: Any, command: Command) -> None:
    made.toml.write_text(made.toml.read_text().replace('url = "store"', ""))
    answer = command("push", made.toml)
    assert answer.code == 2
    assert "has no store" in answer.err
    assert "store.url" in answer.err


def test_pulled_run_is_pushed_where_it_was_found_whatever_its_run_json_says(
    made: Any, command: Command, tmp_path: Path
) -> None:
    assert command("push", made.run.root).code == 0
    told = json.loads((store_of(made) / "run.json").read_bytes())
    told |= {"store_url": "s3://elsewhere/x", "endpoint_url": "http://127.0.0.1:9", "region": "nowhere"}
    (store_of(made) / "run.json").write_text(json.dumps(told))
    assert command("pull", store_of(made).as_uri(), tmp_path / "pulled").code == 0
    known = json.loads((tmp_path / "pulled" / "run.json").read_bytes())
    assert known == told | {"store_url": store_of(made).as_uri(), "endpoint_url": "", "region": ""}
    assert "nothing to push" in command("push", tmp_path / "pulled").out


def test_store_of_another_run_is_refused(made: Any, command: Command) -> None:
    store_of(made).mkdir()
    (store_of(made) / "run.json").write_bytes(made.run.run_json.read_bytes().replace(b"tiny-", b"other-"))
    answer = command("push", made.run.root)
    assert answer.code == 6
    assert "perdure: " in answer.err
    assert "Traceback" not in answer.err


def test_pull_brings_a_lost_run_back(made: Any, command: Command, tmp_path: Path) -> None:
    command("push", made.run.root)
    pins.pin(made.run, "first", CheckpointName(20, 1))
    assert command("push", made.run.root, "--json").json["pushed"] == [], "a milestone goes there all the same"
    before = command("ls", made.run.root, "--json").json["checkpoints"]
    shutil.rmtree(made.run.root)
    dry = command("pull", store_of(made).as_uri(), made.run.root, "--dry-run", "--json")
    assert dry.json["checkpoints"] == ["000000000020-0001", "000000000040-0001"]
    assert not made.run.root.exists()
    answer = command("pull", store_of(made).as_uri(), made.run.root, "--json")
    assert answer.code == 0, answer.err
    assert (answer.json["step"], answer.json["run_dir"]) == (40, str(made.run.root))
    (after,) = command("ls", made.run.root, "--json").json["checkpoints"]
    assert after["state_digest"] == before[1]["state_digest"]
    assert command("verify", made.run.root).code == 0
    older = command("pull", store_of(made).as_uri(), tmp_path / "older", "--name", "000000000020-0001", "--json")
    assert older.json["step"] == 20
    assert list(pins.pins_by_hand(RunDir(tmp_path / "older"))[0]) == ["first"]


def test_pull_waits_for_a_prune_of_the_same_run(made: Any, command: Command) -> None:
    command("push", made.run.root)
    shutil.rmtree(made.run.checkpoint(CheckpointName(20, 1)))
    arguments = ["pull", store_of(made).as_uri(), str(made.run.root), "--name", "000000000020-0001"]
    with upkeep(made.run):
        pulling = subprocess.Popen([sys.executable, "-m", "perdure.cli", *arguments])
        while not any("->" in line and f" {pulling.pid} " in line for line in Path("/proc/locks").read_text().splitlines()):
            assert pulling.poll() is None
            time.sleep(0.05)
        assert lineage.committed(made.run) == [CheckpointName(40, 1)]
    assert pulling.wait() == 0
    assert lineage.committed(made.run) == [CheckpointName(20, 1), CheckpointName(40, 1)]


def test_pull_is_refused_where_it_would_harm(made: Any, command: Command, tmp_path: Path) -> None:
    url = store_of(made).as_uri()
    nothing = command("pull", url, tmp_path / "new")
    assert nothing.code == 4
    assert "holds no run" in nothing.err
    command("push", made.run.root)
    assert command("pull", url, tmp_path / "new").code == 0, "a failed pull is no obstacle"
    (tmp_path / "full").mkdir()
    (tmp_path / "full/thesis.txt").write_text("mine")
    assert command("pull", url, tmp_path / "full").code == 4
    assert command("pull", url, made.toml).code == 2
    assert command("pull", "ftp://host/x", tmp_path / "new").code == 2
    assert command("pull", url, tmp_path / "new", "--name", "newest").code == 2
    with RunLock.acquire(RunDir(tmp_path / "new"), 0):
        assert command("pull", url, tmp_path / "new").code == 3


def test_store_taken_for_a_run_directory_is_not_pushed_to_itself(made: Any, command: Command) -> None:
    command("push", made.run.root)
    answer = command("push", store_of(made))
    assert answer.code == 2
    assert "is the store of run tiny" in answer.err
    assert "perdure pull" in answer.err


def test_empty_names_are_not_the_folder_one_stands_in(made: Any, command: Command, tmp_path: Path) -> None:
    """`perdure pull "$URL" "$DIR"` with a variable that is not set."""
    command("push", made.run.root)
    for arguments in (("pull", "", tmp_path / "new"), ("pull", store_of(made), ""), ("restore", made.run.root, "")):
        answer = command(*arguments)
        assert answer.code == 2
        assert " is empty" in answer.err
    assert not (tmp_path / "new").exists()
