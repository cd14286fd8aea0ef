"""`perdure drill` as typed: what a dry run shows, what there is to configure, what is refused before anything is fetched."""

import shutil
from collections.abc import Callable
from typing import Any

import msgspec

from perdure.training.checkpoint.run_info import read_run_info
from perdure.training.run_dir import CheckpointName

Command = Callable[..., Any]


def test_a_dry_run_says_what_would_be_pulled_trained_and_killed(made: Any, command: Command) -> None:
    assert command("verify", made.run.root).code == 0
    assert command("push", made.toml).code == 0
    shown = command("drill", made.toml, "--dry-run", "--json")
    assert shown.code == 0
    expected = {"newest": "000000000040-0001", "resumed": "000000000040-0001", "steps": 10, "nothing": None}
    assert {key: shown.json[key] for key in expected} == expected
    assert shown.json["kills"] == ["rank at step 43", "agent at step 46"]
    assert shown.json["needed_bytes"] > 5 * 4096 + shown.json["bytes"]
    older = command("drill", made.run.root, "--dry-run", "--from", "000000000020-0001", "--steps", "3")
    assert "would train 3 steps from 000000000020-0001, twice" in older.out, "a run directory finds its run.toml"
    complete = command("drill", made.toml, "--dry-run", "--set", "run.steps=40", "--json")
    assert (complete.json["newest"], complete.json["resumed"]) == ("000000000040-0001", "000000000020-0001")
    last = command("drill", made.toml, "--set", "run.steps=20")
    assert (last.code, last.out.startswith("nothing to drill: 000000000040-0001 is of the last step")) == (0, True)
    assert command("drill", made.toml, "--from", "000000000033-0001").code == 4
    assert not made.run.drills.exists()
    other = command("drill", made.toml)  # these checkpoints were written without any settings
    assert (other.code, "settings that decide the weights differ from checkpoint 000000000040-0001" in other.out) == (11, True)


def test_without_a_store_it_says_what_to_configure(made: Any, command: Command) -> None:
    answer = command("drill", made.toml, "--set", "store.url=")
    assert answer.code == 2
    assert "set store.url in its run.toml" in answer.err


def test_a_store_that_lost_everything_is_a_failed_drill_and_an_unborn_run_is_none(made: Any, command: Command) -> None:
    answer = command("drill", made.toml, "--json")
    assert (answer.code, answer.json["passed"], answer.json["newest"]) == (11, False, "")
    assert "holds no run" in answer.json["problems"][0]
    assert "nothing came back" in made.run.events.read_text()
    shutil.rmtree(made.run.checkpoints)
    assert command("drill", made.toml).out.startswith("nothing to drill: ")
    assert command("drill", made.toml, "--from", "newest").code == 2
    assert command("drill", made.toml, "--steps", "0").code == 2


def test_a_store_of_another_run_is_refused(made: Any, command: Command) -> None:
    assert command("verify", made.run.root).code == 0
    assert command("push", made.toml).code == 0
    other = msgspec.structs.replace(read_run_info(made.run), id="another")
    made.run.run_json.write_bytes(msgspec.json.encode(other))
    answer = command("drill", made.toml)
    assert (answer.code, "not this run another" in answer.err) == (6, True)
    assert made.run.manifest(CheckpointName(40, 1)).exists()
