"""`scrub` shows what it reads, heals it, says so when there is nothing to do, and ends with 5 where damage stays."""

import shutil
from collections.abc import Callable
from typing import Any

from perdure.training.run_dir import CheckpointName

Command = Callable[..., Any]


def test_a_dry_run_reads_nothing_and_a_scrub_heals(made: Any, command: Command) -> None:
    assert command("verify", made.run.root).code == 0
    assert command("push", made.toml).code == 0
    made.damage(20, "model/weight")
    shown = command("scrub", made.toml, "--budget", "100%", "--dry-run")
    assert shown.code == 0
    assert shown.out.count("would be read") == 4
    assert shown.out.splitlines()[-1].startswith("would read 4 of 4 copies, ")
    assert command("verify", made.run.root, "--step", "20", "--quick").code == 5
    answer = command("scrub", made.toml, "--budget", "100%", "--json")
    assert answer.code == 0
    results = {(row["step"], row["copy"]): row["result"] for row in answer.json["chosen"]}
    assert results == {(20, "local"): "repaired", (20, "store"): "good", (40, "local"): "good", (40, "store"): "good"}
    assert command("verify", made.run.root).code == 0


def test_what_nothing_can_repair_is_exit_code_5(made: Any, command: Command) -> None:
    made.damage(20, "model/weight")
    answer = command("scrub", made.run.root, "--budget", "100%", "--set", "store.url=")
    assert answer.code == 2  # --set needs a run.toml
    shutil.rmtree(made.run.checkpoint(CheckpointName(40, 1)))
    answer = command("scrub", made.run.root, "--budget", "100%")
    assert answer.code == 5
    assert "there is no other copy" in answer.out
    assert command("ls", made.run.root, "--json").json["checkpoints"][0]["trust"] == "quarantined"


def test_nothing_to_scrub_is_said(made: Any, command: Command) -> None:
    none = command("scrub", made.run.root, "--budget", "0")
    assert (none.code, none.out) == (0, f"nothing to scrub: {made.run.root} has 2 copies of checkpoints\n")
    shutil.rmtree(made.run.checkpoints)
    empty = command("scrub", made.run.root)
    assert (empty.code, empty.out) == (0, f"nothing to scrub: {made.run.root} has no checkpoint yet\n")


def test_a_budget_that_is_none_is_refused(made: Any, command: Command) -> None:
    answer = command("scrub", made.run.root, "--budget", "much")
    assert answer.code == 2
    assert "20GB" in answer.err
