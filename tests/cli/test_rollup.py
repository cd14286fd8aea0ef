"""`rollup` makes a full of the increment it is pointed at, of the newest by default; then `prune` lets the base go."""

from collections.abc import Callable
from typing import Any

import pytest

from perdure.training.run_dir import CheckpointName

Command = Callable[..., Any]


def names(made: Any) -> list[str]:
    return sorted(path.name for path in made.run.checkpoints.iterdir())


@pytest.fixture
def grown(made: Any) -> Any:
    """The run, with an increment of step 60 against the full of step 40."""
    assert made.write(60, base=40).base_name == CheckpointName(40, 1)
    return made


def test_the_newest_increment_is_rolled_up_and_its_base_pruned(grown: Any, command: Command) -> None:
    restored = command("diff", f"{grown.run.root}@40", "@60", "--json").json["b"]["state_digest"]
    before = grown.run.manifest(CheckpointName(60, 1)).read_bytes()
    shown = command("rollup", grown.run.root, "--dry-run")
    assert shown.out.startswith("would roll up 000000000060-0001: ")
    assert "base 000000000040-0001" in shown.out
    assert grown.run.manifest(CheckpointName(60, 1)).read_bytes() == before
    assert (
        command("rollup", grown.run.root, "--step", "40", "--dry-run").out
        == "nothing to roll up: 000000000040-0001 is a full already\n"
    )
    answer = command("rollup", grown.run.root)
    assert answer.code == 0
    assert answer.out.startswith("rolled up 000000000060-0001: ")
    assert answer.out.rstrip().endswith("it no longer needs 000000000040-0001")
    assert "perdure" not in answer.err
    assert command("verify", grown.run.root, "--json").code == 0
    assert command("prune", grown.toml, "--set", "store.url=", "--keep-last", "1").code == 0
    assert names(grown) == ["000000000060-0001"]
    assert command("ls", grown.run.root, "--json").json["checkpoints"][0]["state_digest"] == restored


def test_json_tells_the_sizes_and_the_base(grown: Any, command: Command) -> None:
    answer = command("rollup", grown.run.root, "--step", "60", "--json").json
    assert (answer["name"], answer["base"], answer["rolled_up"]) == ("000000000060-0001", "000000000040-0001", True)
    assert answer["stored_bytes"] > answer["stored_bytes_before"] > 0
    again = command("rollup", grown.run.root, "--step", "60", "--json").json
    assert (again["base"], again["rolled_up"], again["stored_bytes"]) == (None, False, answer["stored_bytes"])


def test_where_there_is_no_increment_nothing_happens(made: Any, command: Command) -> None:
    answer = command("rollup", made.run.root)
    assert (answer.code, answer.out) == (0, "000000000040-0001 is a full already\n")


def test_damage_is_refused_with_the_leaf_named(grown: Any, command: Command) -> None:
    grown.damage(40, "model/weight")
    answer = command("rollup", grown.run.root)
    assert answer.code == 5
    assert "model/weight" in answer.err
    assert names(grown) == ["000000000020-0001", "000000000040-0001", "000000000060-0001"]


def test_what_is_not_there_is_refused(made: Any, command: Command) -> None:
    assert command("rollup", made.run.root, "--step", "50").code == 4
