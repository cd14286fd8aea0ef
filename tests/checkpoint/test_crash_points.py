"""Killed before each disk call, or each failing, or the disk really full: the old one stays, the new one is there or not."""

import errno
import os
import subprocess
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from snapshots import FIRST, Source, random_bytes, ranks, small_source, write

from perdure.training import files
from perdure.training.checkpoint import catalog, facts, manifest
from perdure.training.checkpoint.hold import try_hold_alone
from perdure.training.checkpoint.lineage import committed, read_launches
from perdure.training.checkpoint.verify import check, verify_folder
from perdure.training.run_dir import CheckpointName, RunDir

SECOND = CheckpointName(4, 1)
Order = Callable[..., int]


@pytest.fixture
def plan_failure() -> Iterator[Callable[[str], None]]:
    """Arm a fail plan in this process; gone at the end of the test."""

    def arm(text: str) -> None:
        files.plan_failure(text)
        files.set_role("saver")

    yield arm
    files.plan_failure("")


@pytest.fixture
def first(run: RunDir) -> RunDir:
    """A run with one good checkpoint."""
    write(run, small_source())
    assert check(run, FIRST).result == "good"
    return run


def everything(run: RunDir) -> dict[Path, int]:
    return {path: path.lstat().st_size for path in run.root.rglob("*") if path.is_file()} | {
        path: 0 for path in run.root.rglob("*") if path.is_dir()
    }


def assert_there_or_not_there(run: RunDir, name: CheckpointName = SECOND) -> bool:
    """The first is good, and the second good or uncommitted; which."""
    assert verify_folder(run.checkpoint(FIRST)) == []
    there = name in committed(run)
    if there:
        assert verify_folder(run.checkpoint(name)) == []
    elif run.checkpoint(name).exists():
        assert run.checkpoint(name) in catalog.leftovers(run)
    return there


def test_killed_before_each_disk_call_of_a_save_it_is_there_or_not_and_the_next_save_succeeds(
    first: RunDir, order: Order
) -> None:
    killed, outcomes = 0, []
    while True:
        status = order(first, f"saver:kill:{killed + 1}")
        outcomes.append(assert_there_or_not_there(first))
        if status == 0:
            break
        assert status == -9
        killed += 1
        if not outcomes[-1]:
            assert order(first, f"saver:kill:{killed}") in (-9, 0)  # and once more, on what the first left
            assert_there_or_not_there(first)
        assert order(first) == 0
        assert assert_there_or_not_there(first)
        names = {path.name for path in first.checkpoint(SECOND).iterdir()}
        assert names == {"manifest.json"} | {f"rank-0000{rank}.{kind}" for rank in (0, 1) for kind in ("pack", "index")}
        files.remove_tree(first.checkpoint(SECOND))
    assert killed > 25
    assert outcomes == [False] * (len(outcomes) - 2) + [True, True]  # there from the rename of the manifest on, not before


def test_killed_before_each_disk_call_of_an_increment_it_is_there_or_not_and_the_base_is_free_again(
    run: RunDir, order: Order
) -> None:
    write(run, *ranks(FIRST.step, 4))
    before = everything(run)
    for number in range(1, 100):
        status = order(run, f"saver:kill:{number}", base=FIRST)
        there = assert_there_or_not_there(run)
        with try_hold_alone(run.checkpoint(FIRST)) as alone:
            assert alone
        if status == 0:
            break
        assert order(run, base=FIRST) == 0
        assert assert_there_or_not_there(run)
        assert there or manifest.read(run.checkpoint(SECOND)).base_name == FIRST
        files.remove_tree(run.checkpoint(SECOND))
        assert everything(run) == before
    assert 20 < number < 99
    assert manifest.read(run.checkpoint(SECOND)).base_name == FIRST


@pytest.mark.parametrize("code", ["ENOSPC", "EIO", "EROFS"])
def test_each_disk_call_that_fails_leaves_the_disk_as_it_was(
    first: RunDir, plan_failure: Callable[[str], None], code: str
) -> None:
    before, sources = everything(first), ranks(SECOND.step, 4)
    for number in range(1, 100):
        plan_failure(f"saver:{code}:{number}")
        failure = None
        try:
            write(first, *sources)
        except OSError as error:
            failure = error.errno
        if failure is None:
            break
        assert failure == getattr(errno, code)
        if not assert_there_or_not_there(first):
            assert everything(first) == before
        else:
            files.remove_tree(first.checkpoint(SECOND))
    assert 25 < number < 99
    assert assert_there_or_not_there(first)


def test_while_every_disk_call_fails_nothing_is_committed_and_afterwards_all_is_well(
    first: RunDir, plan_failure: Callable[[str], None]
) -> None:
    sources = ranks(SECOND.step, 4)
    for number in range(1, 27, 3):
        plan_failure(f"saver:EIO:{number}:repeat")
        with pytest.raises(OSError, match="fail point"):
            write(first, *sources)
        plan_failure("")
        assert not assert_there_or_not_there(first)
    write(first, *sources)
    assert assert_there_or_not_there(first)
    assert catalog.leftovers(first) == [first.checkpoint(FIRST), first.checkpoint(SECOND)]  # no launch record: all lie outside


def test_a_snapshot_that_fails_half_way_leaves_the_disk_as_it_was(first: RunDir) -> None:
    before, sources = everything(first), ranks(SECOND.step, 4)
    del sources[1].bytes["data/order"]
    with pytest.raises(KeyError):
        write(first, *sources)
    assert everything(first) == before


def test_a_check_killed_at_each_call_leaves_the_fact_of_before_or_after(run: RunDir, order: Order) -> None:
    write(run, small_source())
    for number in range(1, 20):
        status = order(run, f"saver:kill:{number}", act="check", step=FIRST.step)
        assert facts.trust(run, FIRST) in ("written", "verified")
        assert verify_folder(run.checkpoint(FIRST)) == []
        if status == 0:
            break
        run.fact(FIRST, "local").unlink(missing_ok=True)
    assert 3 < number < 19
    assert facts.trust(run, FIRST) == "verified"


def test_a_launch_killed_at_each_call_leaves_a_whole_record_or_none(run: RunDir, order: Order) -> None:
    files.make_dirs(run.root)
    for number in range(1, 20):
        status = order(run, f"saver:kill:{number}", act="launch", step=1)
        whole = 1 in read_launches(run)
        assert whole == run.launch_record(1).exists()
        if status == 0:
            assert whole
            break
        run.launch_record(1).unlink(missing_ok=True)
    assert 3 < number < 19


def test_each_file_is_durable_before_it_has_its_name_and_the_manifest_comes_last(
    first: RunDir, monkeypatch: pytest.MonkeyPatch
) -> None:
    done: list[tuple[str, str]] = []
    fsync, replace = os.fsync, os.replace

    def recorded_fsync(fd: int) -> None:
        fsync(fd)
        done.append(("fsync", os.readlink(f"/proc/self/fd/{fd}")))

    def recorded_replace(source: Path, target: Path) -> None:
        replace(source, target)
        done.append((str(source), str(target)))

    monkeypatch.setattr(os, "fsync", recorded_fsync)
    monkeypatch.setattr(os, "replace", recorded_replace)
    write(first, *ranks(SECOND.step, 4))
    folder = first.checkpoint(SECOND)
    expected = ["rank-00000.pack", "rank-00000.index", "rank-00001.pack", "rank-00001.index", "manifest.json"]
    renames = [number for number, (_, target) in enumerate(done) if target in [str(folder / name) for name in expected]]
    assert [done[number][1] for number in renames] == [str(folder / name) for name in expected]
    for number in renames:
        temporary = done[number][0]
        assert Path(temporary).parent == folder
        assert done[number - 1] == ("fsync", temporary)
        assert done[number + 1] == ("fsync", str(folder))
    assert ("fsync", str(folder.parent)) in done[: renames[0]]  # the folder's own name is durable too


def test_what_a_run_writes_is_for_its_owner_only(first: RunDir) -> None:
    for path in first.root.rglob("*"):
        assert path.stat().st_mode & 0o077 == 0, path


@pytest.fixture(params=["size=6m", "size=64m,nr_inodes=12"])
def full_disk(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[Path]:
    """A small file system of its own: few bytes, or few inodes."""
    place = tmp_path / "disk"
    place.mkdir()
    mounted = subprocess.run(["mount", "-t", "tmpfs", "-o", request.param, "tmpfs", place], capture_output=True, text=True)
    if mounted.returncode:
        pytest.skip(f"mount is not permitted here: {mounted.stderr.strip()}")
    yield place
    subprocess.run(["umount", place], check=True)


def test_on_a_disk_that_is_really_full_the_save_fails_whole_and_a_smaller_one_succeeds(full_disk: Path) -> None:
    run = RunDir(full_disk / "run")
    write(run, small_source())
    before = everything(run)
    large = [Source(SECOND.step).tensor("noise", "uint8", (9 << 20,), random_bytes(1, 9 << 20)), *ranks(SECOND.step, 5)[1:] * 4]
    for _ in range(3):
        with pytest.raises(OSError) as error:
            write(run, *large)
        assert error.value.errno == errno.ENOSPC
        assert everything(run) == before
        assert verify_folder(run.checkpoint(FIRST)) == []
    assert write(run, small_source(SECOND.step)) == manifest.read(run.checkpoint(SECOND))
    assert verify_folder(run.checkpoint(SECOND)) == []
