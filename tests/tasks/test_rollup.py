"""The task rolls up beside training, and leaves a run alone whose checkpoints somebody else works on."""

import threading
from pathlib import Path
from typing import Any

import pytest
from snapshots import small_source, write
from upkeep_runs import launch, name

from perdure.tasks.rollup import rollup
from perdure.training.checkpoint import manifest as manifests
from perdure.training.checkpoint.upkeep import upkeep
from perdure.training.checkpoint.verify import verify_folder
from perdure.training.run_dir import RunDir


@pytest.fixture
def increment(tmp_path: Path) -> RunDir:
    """A full of step 10 and an increment of it, step 20."""
    run = RunDir(tmp_path / "run")
    launch(run, 1)
    write(run, small_source(10))
    assert write(run, small_source(20), base=name(10)).base_name == name(10)
    return run


def work(run: RunDir) -> dict[str, Any]:
    """In a thread of its own, as in the flow: the task lowers its thread's priority for good."""
    answers: list[dict[str, Any]] = []
    thread = threading.Thread(target=lambda: answers.append(rollup.fn(str(run.root), str(name(20)))))
    thread.start()
    thread.join()
    return answers[0]


def test_an_increment_becomes_a_full(increment: RunDir) -> None:
    answer = work(increment)
    found = manifests.read(increment.checkpoint(name(20)))
    assert answer == {"checkpoint": str(name(20)), "rolled_up": True, "stored_bytes": found.stored_bytes}
    assert found.base is None
    assert verify_folder(increment.checkpoint(name(20))) == []


def test_while_somebody_prunes_it_is_left_for_later(increment: RunDir) -> None:
    with upkeep(increment):
        assert work(increment) == {"checkpoint": str(name(20)), "rolled_up": False}
    assert manifests.read(increment.checkpoint(name(20))).base is not None
