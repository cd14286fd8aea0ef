"""`verify` names what is damaged, per checkpoint and tensor, and what it finds is remembered."""

import json
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from perdure.training import events
from perdure.training.checkpoint.facts import read_fact, trust
from perdure.training.checkpoint.hold import try_hold_alone
from perdure.training.files import remove_tree
from perdure.training.run_dir import CheckpointName, rank_index, rank_pack

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


def test_damage_of_very_many_leaves_still_quarantines(made: Any, command: Command) -> None:
    leaves = {f"{number:03d}" + "x" * 3000: ("tensor", "uint8", (4,), bytes([number] * 4)) for number in range(250)}
    made.write(60, leaves=leaves)
    name = CheckpointName(60, 1)
    pack = made.run.checkpoint(name) / rank_pack(0)
    pack.write_bytes(bytes([251]) * pack.stat().st_size)
    assert command("verify", made.run.root, "--step", "60").code == 5
    assert trust(made.run, name) == "quarantined"


def test_what_is_pruned_while_others_are_verified_is_left_out(made: Any) -> None:
    oldest = CheckpointName(20, 1)
    with try_hold_alone(made.run.checkpoint(oldest)) as alone:
        assert alone
        command = [sys.executable, "-m", "perdure.cli", "verify", str(made.run.root), "--json"]
        asked = subprocess.Popen(command, stdout=subprocess.PIPE, stdin=subprocess.DEVNULL)
        try:
            while not waits_for_a_lock(asked.pid):
                assert asked.poll() is None, "it waits for the first one, everything is listed"
                time.sleep(0.01)
            remove_tree(made.run.checkpoint(NEWEST))
        except BaseException:
            asked.kill()
            raise
    out, _ = asked.communicate()
    assert asked.returncode == 0
    assert [one["name"] for one in json.loads(out)["checkpoints"]] == [str(oldest)]


def waits_for_a_lock(pid: int) -> bool:
    """By the kernel's table, where an arrow stands before those who wait."""
    lines = [line.split() for line in Path("/proc/locks").read_text().splitlines()]
    return any("->" in line and str(pid) in line for line in lines)
