"""Room is counted before it is needed, on small file systems of their own, and made by what may go, no more than that."""

import os
import subprocess
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from snapshots import RUN_ID, Source, random_bytes, write
from upkeep_runs import keep

from perdure.training import files
from perdure.training.checkpoint.lineage import LaunchRecord, committed, create_launch
from perdure.training.checkpoint.space import make_room, shortage
from perdure.training.checkpoint.upkeep import upkeep
from perdure.training.checkpoint.verify import check, verify_folder
from perdure.training.retention_settings import RetentionSection
from perdure.training.run_dir import CheckpointName, RunDir

MB = 1_000_000


def name(step: int) -> CheckpointName:
    return CheckpointName(step, 1)


@pytest.fixture
def disk(tmp_path: Path) -> Iterator[Callable[[str], RunDir]]:
    """A run on a small file system of its own, with one launch."""
    place = tmp_path / "disk"
    place.mkdir()
    mounted = []

    def make(options: str) -> RunDir:
        done = subprocess.run(["mount", "-t", "tmpfs", "-o", options, "tmpfs", place], capture_output=True, text=True)
        if done.returncode:
            pytest.skip(f"mount is not permitted here: {done.stderr.strip()}")
        mounted.append(place)
        run = RunDir(place / "run")
        record = LaunchRecord(token=1, resumed_from=None, created=time.time(), host="h", pid=1, run=RUN_ID, owner="o")
        assert create_launch(run, record)
        return run

    yield make
    for one in mounted:
        subprocess.run(["umount", one], check=True)


def save(run: RunDir, step: int, size: int = MB, *, proven: bool = True) -> None:
    """Noise: stored as large as it is."""
    write(run, Source(step).tensor("noise", "uint8", (size,), random_bytes(step, size)))
    if proven:
        assert check(run, name(step)).result == "good"


def test_where_there_is_nothing_yet_a_checkpoint_counts_as_large_as_the_state(disk: Callable[[str], RunDir]) -> None:
    run = disk("size=10m")
    assert shortage(run, 9 * MB) == ""
    problem = shortage(run, 9 * MB, saves=2)
    assert problem.startswith(f"{run.root}: the next 2 checkpoints need 18,")
    assert "bytes are" not in problem
    assert problem.endswith(" are free")
    assert shortage(run, 11 * MB).startswith(f"{run.root}: the next checkpoint needs 11,")


def test_a_run_that_is_not_there_yet_is_measured_where_it_will_be(disk: Callable[[str], RunDir]) -> None:
    run = RunDir(disk("size=4m").root.parent / "new" / "run")
    assert shortage(run, 3 * MB) == ""
    assert shortage(run, 5 * MB).startswith(str(run.root.parent.parent))
    assert not run.root.parent.exists()


def test_the_newest_checkpoint_tells_how_small_the_next_will_be(disk: Callable[[str], RunDir]) -> None:
    run = disk("size=10m")
    write(run, Source(2).tensor("zeros", "float32", (10 * MB // 4,), bytes(10 * MB)))
    assert shortage(run, 50 * MB, saves=2) == ""
    save(run, 4)
    assert "50," in shortage(run, 50 * MB), "noise as the newest: none will be small"
    assert shortage(run, 50 * MB, increment=True), "an increment has no full to learn from"
    run.manifest(name(4)).write_bytes(b"rotten")
    assert shortage(run, 50 * MB, saves=2) == "", "what cannot be read tells nothing"


def test_too_few_inodes_is_a_shortage_too(disk: Callable[[str], RunDir]) -> None:
    run = disk("size=64m,nr_inodes=20")
    assert shortage(run, MB) == ""
    assert "inodes" in shortage(run, MB, saves=2)
    assert " 20 inodes" in shortage(run, MB, saves=2)


def test_the_oldest_go_one_by_one_until_there_is_room_and_no_more(disk: Callable[[str], RunDir]) -> None:
    run = disk("size=7m")
    for step in (1, 2, 3, 4, 5):
        save(run, step)
    assert shortage(run, 2 * MB, saves=1) == ""
    assert make_room(run, keep(1), 2 * MB, stored=False) == []
    assert make_room(run, keep(1), 2 * MB, saves=2, stored=False) == [name(1), name(2)]
    assert shortage(run, 2 * MB, saves=2) == ""
    assert committed(run) == [name(3), name(4), name(5)]
    assert all(verify_folder(run.checkpoint(one)) == [] for one in committed(run))


def test_what_retention_keeps_stays_however_short_the_room(disk: Callable[[str], RunDir]) -> None:
    run = disk("size=7m")
    for step in (1, 2, 3):
        save(run, step)
    save(run, 4, proven=False)
    assert make_room(run, RetentionSection(), 9 * MB, stored=False) == []
    assert make_room(run, keep(1), 9 * MB, stored=True) == [], "nothing is in the store"
    with upkeep(run):
        assert make_room(run, keep(1), 9 * MB, stored=False) == [], "somebody else is deleting"
    assert make_room(run, keep(2), 9 * MB, stored=False) == [name(1)]
    assert make_room(run, keep(1), 9 * MB, stored=False) == [name(2)]
    assert committed(run) == [name(3), name(4)]
    assert shortage(run, 9 * MB)


def test_leftovers_go_before_any_checkpoint(disk: Callable[[str], RunDir]) -> None:
    run = disk("size=7m")
    for step in (1, 2):
        save(run, step)
    torn = files.temporary_name(run.checkpoint(name(2)) / "rank-00000.pack")
    torn.write_bytes(bytes(3 * MB))
    os.utime(torn, (0, 0))
    assert shortage(run, 3 * MB)
    assert make_room(run, keep(1), 3 * MB, stored=False) == []
    assert not torn.exists()
    assert committed(run) == [name(1), name(2)]
    assert shortage(run, 3 * MB) == ""
