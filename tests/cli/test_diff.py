"""`diff` finds the two checkpoints it is pointed at, shows what differs most first, and says by its exit code if any does."""

import shutil
from collections.abc import Callable
from typing import Any

import pytest

from perdure.training.run_dir import CheckpointName

Command = Callable[..., Any]


def test_two_checkpoints_of_a_run(made: Any, command: Command) -> None:
    answer = command("diff", f"{made.run.root}@20", "@40")
    assert answer.code == 1
    head, row, last = answer.out.splitlines()
    assert head.split() == ["leaf", "what", "type", "differ", "max", "rms"]
    assert row.split() == ["model/step", "changed", "int64[]", "100.00%", "20", "20"]
    assert last.startswith("different between step 20 of tiny-")
    assert last.endswith(": 1 leaf")
    assert "\x1b" not in answer.out


@pytest.mark.parametrize("names", [("{run}@40", "{run}@40"), ("{run}", "{toml}@000000000040-0001"), ("{run}", "{folder}")])
def test_equal_is_exit_code_0_however_they_are_named(made: Any, command: Command, names: tuple[str, str]) -> None:
    places = {"run": made.run.root, "toml": made.toml, "folder": made.run.checkpoint(CheckpointName(40, 1))}
    answer = command("diff", *(name.format(**places) for name in names))
    assert (answer.code, answer.err) == (0, "")
    assert "are equal, bit for bit" in answer.out


def test_json_is_complete(made: Any, command: Command) -> None:
    answer = command("diff", f"{made.run.root}@20", f"{made.run.root}@40", "--json")
    assert answer.code == 1
    assert (answer.json["a"]["step"], answer.json["b"]["step"], answer.json["equal"]) == (20, 40, False)
    assert answer.json["leaves"] == [
        {
            "path": "model/step", "rank": 0, "what": "changed", "old": "int64[]", "new": "int64[]", "elements": 1,
            "differing": 1, "share": 1.0, "max_abs": 20.0, "rms": 20.0, "not_finite": 0,
        }
    ]  # fmt: skip
    assert command("diff", made.run.root, "@40", "--json").json["leaves"] == []


def test_only_compares_what_matches(made: Any, command: Command) -> None:
    answer = command("diff", f"{made.run.root}@20", "@40", "--only", "model.w*")
    assert answer.code == 0
    assert "equal in what matches model.w*" in answer.out


def many(made: Any, step: int) -> None:
    leaves = {f"w/{n:03}": ("tensor", "uint8", (1,), bytes([n * step % 251])) for n in range(50)}
    made.write(step, leaves={"p": ("plain", "plain", (1,), bytes([step])), **leaves})


def test_the_most_changed_come_first_and_all_are_shown_when_asked_for(made: Any, command: Command) -> None:
    many(made, 50)
    many(made, 60)
    short = command("diff", f"{made.run.root}@50", "@60").out.splitlines()
    assert sum(line.startswith("w/") for line in short) == 30
    largest = [float(line.split()[4]) for line in short if line.startswith("w/")]
    assert largest == sorted(largest, reverse=True)
    assert short[-2] == "and 20 more; --all shows them"
    full = command("diff", f"{made.run.root}@50", "@60", "--all").out
    assert sum(line.startswith("w/") for line in full.splitlines()) == 49, "w/000 is 0 in both"
    assert "  p: 50 -> 60" in full


def test_damage_in_what_is_compared_is_named(made: Any, command: Command) -> None:
    made.damage(40, "model/step")
    answer = command("diff", f"{made.run.root}@20", "@40")
    assert answer.code == 5
    assert "model/step" in answer.err


@pytest.mark.parametrize(
    ("a", "b", "code", "word"),
    [
        ("{run}@30", "@40", 4, "no checkpoint 30"),
        ("{run}@20", "@000000000030-0001", 4, "no checkpoint 000000000030-0001"),
        ("{run}@x", "@40", 2, "neither a step nor the name"),
        ("nowhere", "@40", 4, "does not exist"),
        ("", "@40", 2, "RUN is empty"),
    ],
)
def test_what_is_not_there_is_refused_with_a_sentence(
    made: Any, command: Command, a: str, b: str, code: int, word: str
) -> None:
    answer = command("diff", a.format(run=made.run.root), b)
    assert answer.code == code
    assert word in answer.err


def test_runs_in_places_with_an_at_sign_are_found(made: Any, command: Command) -> None:
    place = made.run.root.parent / "a@20"
    shutil.copytree(made.run.root, place)
    assert command("diff", place, f"{made.run.root}@40").code == 0
    assert command("diff", f"{place}@20", "@40").code == 1
