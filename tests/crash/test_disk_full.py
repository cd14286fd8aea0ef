"""A full disk pauses the run with a clear event; it goes on by itself when there is room, and ends with the same bits."""

import contextlib
import subprocess
from collections.abc import Iterator
from pathlib import Path

import pytest
from harness import PATIENCE, Direct, Run, copy_tiny, wait_until

from perdure.training import files
from perdure.training.checkpoint import facts
from perdure.training.checkpoint.lineage import lineage
from perdure.training.checkpoint.verify import check, verify_folder
from perdure.training.errors import CheckpointNotFound

WIDE = "params.width=60000"
"""About 15 MiB of weights and moments."""


@pytest.fixture
def small_disk(tmp_path: Path) -> Iterator[Path]:
    folder = tmp_path / "small"
    folder.mkdir()
    mounted = subprocess.run(["mount", "-t", "tmpfs", "-o", "size=40m", "tmpfs", folder], capture_output=True, check=False)
    if mounted.returncode:
        pytest.skip("mounting a tmpfs needs root: " + mounted.stderr.decode())
    yield folder
    subprocess.run(["umount", "-l", folder], check=True)


def test_disk_full_pauses_then_goes_on_and_ends_bit_identical(small_disk: Path, tmp_path: Path) -> None:
    settings = ("store.url=''", WIDE, "checkpoint.every=10", "run.steps=100")
    reference = Run(copy_tiny(tmp_path / "reference"), *settings)
    assert Direct(reference).train_to_end().reason == "complete"
    toml = copy_tiny(tmp_path / "tiny")
    run = Run(toml, *settings, f"run.dir='{small_disk}/run'")
    direct = Direct(run)
    trainer = direct.launch()
    wait_until(lambda: "disk_full" in run.kinds(), "the event disk_full")
    wait_until(lambda: not trainer.is_alive() or run.step() >= run.committed()[-1].step + 20, "both slots full")
    step, committed = run.step(), run.committed()
    assert step < 100, "training pauses, it does not go on unsaved"
    assert all(verify_folder(run.dir.checkpoint(name)) == [] for name in committed), "what was committed stays good"
    temporary = [path for path in run.dir.checkpoints.rglob("*") if files.is_temporary(path.name)]
    assert len(temporary) <= 1, "at most the one attempt that is just being made"
    event = next(event for event in run.events() if event["kind"] == "disk_full")
    assert str(small_disk) in str(event["path"])
    assert run.kinds().count("disk_full") == 1, "said once"
    subprocess.run(["mount", "-o", "remount,size=400m", small_disk], check=True)
    trainer.process.wait(PATIENCE)
    assert direct.end().reason == "complete"
    assert run.digest() == reference.digest()


def remount(folder: Path, size: str) -> None:
    subprocess.run(["mount", "-o", f"remount,size={size}", folder], check=True)


def test_too_little_room_is_found_before_the_second_step_and_training_waits_for_it(small_disk: Path, tmp_path: Path) -> None:
    """Two checkpoints of 15 MB do not fit into 25."""
    remount(small_disk, "25m")
    settings = ("store.url=''", WIDE, "run.steps=20")
    reference = Run(copy_tiny(tmp_path / "reference"), *settings)
    assert Direct(reference).train_to_end().reason == "complete"
    run = Run(copy_tiny(tmp_path / "tiny"), *settings, f"run.dir='{small_disk}/run'")
    direct = Direct(run)
    trainer = direct.launch()
    wait_until(lambda: "disk_full" in run.kinds(), "the event disk_full")
    wait_until(lambda: run.state() == "waiting for disk", "its state")
    assert trainer.is_alive()
    assert run.step() <= 1
    assert run.committed() == []
    event = next(event for event in run.events() if event["kind"] == "disk_full")
    assert str(small_disk) in str(event["text"])
    remount(small_disk, "400m")
    trainer.process.wait(PATIENCE)
    assert direct.end().reason == "complete"
    assert run.kinds().count("disk_full") == 1, "said once"
    assert run.digest() == reference.digest()


@pytest.mark.parametrize("full_every", [0, 20])
def test_disk_for_three_checkpoints_is_enough_for_any_number_when_old_ones_may_go(
    small_disk: Path, tmp_path: Path, full_every: int
) -> None:
    remount(small_disk, "55m")
    settings = ("store.url=''", WIDE, "run.steps=60", "checkpoint.every=10", f"checkpoint.full_every={full_every}")
    reference = Run(copy_tiny(tmp_path / "reference"), *settings)
    assert Direct(reference).train_to_end().reason == "complete"
    run = Run(copy_tiny(tmp_path / "tiny"), *settings, "retention.keep_last=1", f"run.dir='{small_disk}/run'")
    direct = Direct(run)
    trainer = direct.launch()

    def prove_all() -> bool:
        """What the flow does after each chunk."""
        for name in lineage(run.dir):
            if facts.trust(run.dir, name) == "written":
                with contextlib.suppress(CheckpointNotFound):  # the saver has just let it go
                    check(run.dir, name)
        return not trainer.is_alive()

    wait_until(prove_all, "the end")
    assert direct.end().reason == "complete"
    assert "pruned" in run.kinds()
    assert all(verify_folder(run.dir.checkpoint(name)) == [] for name in run.committed())
    assert run.digest() == reference.digest()
