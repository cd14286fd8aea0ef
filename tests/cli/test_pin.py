"""`pin` names a milestone, `ls` shows it, `prune` keeps it, `--remove` lets it go again."""

import time
from collections.abc import Callable
from typing import Any

import pytest

from perdure.training.checkpoint.facts import Fact, write_fact
from perdure.training.config import load_config
from perdure.training.run_dir import CheckpointName

Command = Callable[..., Any]


@pytest.fixture
def stored(made: Any) -> Any:
    """Both checkpoints are proven, here and in the store."""
    for step in (20, 40):
        for copy, place in (("local", ""), ("store", load_config(made.toml).store_url)):
            fact = Fact(copy=copy, checked_at=time.time(), result="good", location=place)
            write_fact(made.run, CheckpointName(step, 1), fact)
    return made


def test_a_milestone_is_shown_kept_and_let_go_again(stored: Any, command: Command) -> None:
    assert command("pin", f"{stored.toml}@20", "before").out == "pinned 000000000020-0001 as before\n"
    assert command("pin", f"{stored.run.root}@000000000020-0001", "before").out.startswith("already pinned: ")
    shown = command("ls", stored.run.root)
    assert shown.out.splitlines()[1].endswith("milestone before")
    assert [one.get("milestones") for one in command("ls", stored.run.root, "--json").json["checkpoints"]] == [["before"], None]
    assert "nothing to prune" in command("prune", stored.run.root, "--keep-last", "1").out
    removed = command("pin", stored.run.root, "before", "--remove", "--json").json
    assert (removed["milestone"], removed["removed"]) == ("before", True)
    assert command("prune", stored.run.root, "--keep-last", "1", "--json").json["removed"] == ["000000000020-0001"]


def test_without_a_step_it_is_the_newest_verified(stored: Any, command: Command) -> None:
    stored.write(60)
    assert command("pin", stored.run.root, "now", "--json").json["step"] == 40


def test_what_cannot_be_pinned_is_said_with_what_to_do(made: Any, command: Command) -> None:
    assert command("pin", made.run.root, "now").code == 4, "nothing is verified"
    assert command("pin", f"{made.run.root}@30", "x").code == 4
    assert command("pin", f"{made.run.root}@000000000030-0001", "x").code == 4
    assert command("pin", f"{made.run.root}@soon", "x").code == 2
    assert command("pin", f"{made.run.root}@20", "../x").code == 2
    assert command("pin", made.run.root, "x", "--remove").code == 4
    assert command("pin", f"{made.run.root}@20", "x").code == 0
    taken = command("pin", f"{made.run.root}@40", "x")
    assert (taken.code, "--remove" in taken.err) == (2, True)
