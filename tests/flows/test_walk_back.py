"""A damaged newest checkpoint is set aside by a fact, the one before it is used, and nothing is deleted."""

import random
import shutil
import tempfile
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from harness import Direct, Run, copy_tiny

from perdure.flows.start import open_run
from perdure.training.checkpoint import facts
from perdure.training.errors import CheckpointDamaged
from perdure.training.run_dir import CheckpointName

SETTINGS = ("store.url=''", "run.steps=20")


@pytest.fixture(scope="module")
def trained(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Checkpoints 5, 10, 15 of a run of 20 steps whose last one is lost."""
    folder = tmp_path_factory.mktemp("trained") / "tiny"
    run = Run(copy_tiny(folder), *SETTINGS)
    assert Direct(run).train_to_end().reason == "complete"
    (folder / "digest").write_text(run.digest())
    shutil.rmtree(run.dir.checkpoint(CheckpointName(20, 1)))
    return folder


@pytest.fixture
def run(trained: Path, tmp_path: Path) -> Run:
    shutil.copytree(trained, tmp_path / "tiny")
    return Run(tmp_path / "tiny" / "run.toml", *SETTINGS)


@pytest.fixture
def other_disk(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """TMPDIR, where nothing can be renamed into the run directory."""
    with tempfile.TemporaryDirectory(dir="/dev/shm") as folder:
        if Path(folder).stat().st_dev == tmp_path.stat().st_dev:
            pytest.skip("/dev/shm is no file system of its own here")
        monkeypatch.setenv("TMPDIR", folder)
        yield Path(folder)


def flip(path: Path) -> None:
    data = bytearray(path.read_bytes())
    data[random.Random(7).randrange(len(data))] ^= 1
    path.write_bytes(data)


DAMAGE: dict[str, Callable[[Path], None]] = {
    "pack removed": lambda folder: (folder / "rank-00000.pack").unlink(),
    "pack one byte short": lambda folder: (folder / "rank-00000.pack").write_bytes(
        (folder / "rank-00000.pack").read_bytes()[:-1]
    ),
    "manifest empty": lambda folder: (folder / "manifest.json").write_bytes(b""),
    "bit flipped in pack": lambda folder: flip(folder / "rank-00000.pack"),
    "bit flipped in index": lambda folder: flip(folder / "rank-00000.index"),
    "bit flipped in manifest": lambda folder: flip(folder / "manifest.json"),
    "all files of length zero": lambda folder: [path.write_bytes(b"") for path in folder.iterdir()] and None,
}


@pytest.mark.parametrize("damage", DAMAGE)
def test_damaged_newest_is_quarantined_and_the_one_before_it_used(run: Run, damage: str) -> None:
    newest = CheckpointName(15, 1)
    DAMAGE[damage](run.dir.checkpoint(newest))
    files_before = sorted(path.name for path in run.dir.checkpoint(newest).iterdir())
    assert open_run(run.config, None, replan=False).resume == CheckpointName(10, 1)
    assert facts.trust(run.dir, newest) == "quarantined"
    assert run.kinds().count("quarantined") == 1
    assert set(files_before) <= {path.name for path in run.dir.checkpoint(newest).iterdir()}, "kept as it was found"
    assert open_run(run.config, None, replan=False).resume == CheckpointName(10, 1)
    assert run.kinds().count("quarantined") == 1, "said once"


def test_manifest_removed_is_no_checkpoint_at_all(run: Run) -> None:
    run.dir.manifest(CheckpointName(15, 1)).unlink()
    assert open_run(run.config, None, replan=False).resume == CheckpointName(10, 1)


def test_two_damaged_walk_back_two(run: Run) -> None:
    for step in (15, 10):
        flip(run.dir.checkpoint(CheckpointName(step, 1)) / "rank-00000.pack")
    assert open_run(run.config, None, replan=False).resume == CheckpointName(5, 1)


def test_all_damaged_is_refused_and_never_a_fresh_start(run: Run) -> None:
    for name in run.committed():
        flip(run.dir.checkpoint(name) / "rank-00000.pack")
    with pytest.raises(CheckpointDamaged, match="no checkpoint of this run verifies"):
        open_run(run.config, None, replan=False)


def test_late_commit_of_a_cut_off_launch_is_not_used(run: Run) -> None:
    """A zombie of launch 1 commits step 15 after launch 2 has gone on from step 10: outside the lineage."""
    hidden = run.dir.root / "hidden"
    run.dir.checkpoint(CheckpointName(15, 1)).rename(hidden)
    direct = Direct(run)
    direct.launch(lease=10)  # nothing to do before a lease: launch 2 stays at step 10
    direct.end()
    hidden.rename(run.dir.checkpoint(CheckpointName(15, 1)))
    assert open_run(run.config, None, replan=False).resume == CheckpointName(10, 1)


def test_checkpoint_of_another_run_is_not_used(run: Run, tmp_path: Path) -> None:
    """Whole, newer and of the right name, but copied from another run's directory."""
    other = Run(copy_tiny(tmp_path / "other"), *SETTINGS)
    Direct(other).train_to_end()
    newest = CheckpointName(20, 1)
    shutil.copytree(other.dir.checkpoint(newest), run.dir.checkpoint(newest))
    assert open_run(run.config, None, replan=False).resume == CheckpointName(15, 1)
    assert any("belongs to run" in str(event.get("reason")) for event in run.events())


def test_moved_run_directory_resumes(run: Run, tmp_path: Path) -> None:
    moved = tmp_path / "another place"
    run.toml.parent.rename(moved)
    again = Run(moved / "run.toml", *SETTINGS)
    assert Direct(again).train_to_end().reason == "complete"
    assert again.digest() == (moved / "digest").read_text()
    for path in again.dir.checkpoints.rglob("*.json"):
        assert str(tmp_path) not in path.read_text(), path


@pytest.mark.parametrize("name", ["a b/тест 日本/run.v1.2", "-dash", "100%", "a+b", "a#b", "it's", "trailing."])
def test_odd_paths_cut_and_resume(trained: Path, tmp_path: Path, other_disk: Path, name: str) -> None:
    """Also where the code changes its working directory, and where TMPDIR is on another file system."""
    folder = tmp_path / name / "tiny"
    shutil.copytree(trained, folder)
    again = Run(folder / "run.toml", "run.steps=20", "store.url='store here'", f"launch.env.TINY_work_in={other_disk}")
    assert Direct(again).train_to_end().reason == "complete"
    assert again.digest() == (folder / "digest").read_text()
    assert [path for path in other_disk.rglob("*") if path.is_file()] == []
    assert [path.name for path in tmp_path.iterdir()] == [name.split("/")[0]]
