"""`verify` names what is damaged, per checkpoint and tensor, and what it finds is remembered."""

from collections.abc import Callable
from typing import Any

import pytest

from perdure.training import events
from perdure.training.checkpoint.facts import read_fact
from perdure.training.run_dir import CheckpointName, rank_index

Command = Callable[..., Any]
NEWEST = CheckpointName(40, 1)


def test_good_checkpoints_are_recorded_as_verified(made: Any, command: Command) -> None:
    answer = command("verify", made.run.root)
    assert answer.code == 0
    assert answer.out.splitlines()[-1] == "2 checked, 0 damaged"
    assert "\x1b" not in answer.out + answer.err
    assert [one["trust"] for one in command("ls", made.run.root, "--json").json["checkpoints"]] == ["verified", "verified"]


def test_damaged_tensor_is_named_and_quarantines_its_checkpoint(made: Any, command: Command) -> None:
    made.damage(40, "model/weight")
    answer = command("verify", made.toml, "--json")
    assert answer.code == 5
    good, bad = answer.json["checkpoints"]
    assert (good["result"], bad["result"]) == ("good", "damaged")
    assert "model/weight" in {damage["part"] for damage in bad["damage"]}
    assert "model/step" not in {damage["part"] for damage in bad["damage"]}
    assert command("verify", made.toml, "--step", "20").code == 0
    told = command("verify", made.toml, "--name", str(NEWEST))
    assert told.code == 5
    assert f"{NEWEST}  DAMAGED" in told.out
    assert "model/weight: " in told.out
    assert [one["trust"] for one in command("ls", made.run.root, "--json").json["checkpoints"]] == ["verified", "quarantined"]
    kinds = [event.kind for event in events.read(made.run)]
    assert kinds == ["quarantined"], "said once, not each time it is looked at"


@pytest.mark.parametrize(("file", "part"), [("manifest.json", "manifest"), (rank_index(0), "index")])
def test_damage_outside_tensors_is_named(file: str, part: str, made: Any, command: Command) -> None:
    path = made.run.checkpoint(NEWEST) / file
    path.write_bytes(path.read_bytes()[:-9] + b"!" + path.read_bytes()[-8:])
    answer = command("verify", made.run.root, "--json")
    assert answer.code == 5
    assert part in {damage["part"] for damage in answer.json["checkpoints"][1]["damage"]}


def test_quick_look_finds_stored_damage_and_proves_nothing(made: Any, command: Command) -> None:
    assert command("verify", made.run.root, "--quick").code == 0
    assert read_fact(made.run, NEWEST, "local") is None
    made.damage(40, "model/weight")
    assert command("verify", made.run.root, "--quick").code == 5
    fact = read_fact(made.run, NEWEST, "local")
    assert fact is not None
    assert fact.result == "damaged"


def test_missing_checkpoint_is_answered_with_those_there_are(made: Any, command: Command) -> None:
    answer = command("verify", made.run.root, "--step", "30")
    assert answer.code == 4
    assert "has no checkpoint of step 30" in answer.err
    assert "20, 40" in answer.err
