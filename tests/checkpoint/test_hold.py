"""Any number of processes hold a checkpoint, one alone deletes it, and a killed holder holds nothing."""

import contextlib
import os
import shutil
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
from snapshots import FIRST, small_source, write

from perdure.training.checkpoint import verify
from perdure.training.checkpoint.facts import Fact, trust, write_fact
from perdure.training.checkpoint.hold import hold, try_hold_alone
from perdure.training.errors import CheckpointDamaged, CheckpointNotFound
from perdure.training.run_dir import CheckpointName, RunDir


@pytest.fixture
def folder(run: RunDir) -> Path:
    write(run, small_source())
    return run.checkpoint(FIRST)


class Holder:
    """Another process; `says()` its next line."""

    def __init__(self, how: str, folder: Path) -> None:
        script = Path(__file__).with_name("holder.py")
        self.process = subprocess.Popen(
            [sys.executable, script, how, folder], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
        )
        assert self.says() == "ready"

    def says(self) -> str:
        assert self.process.stdout
        return self.process.stdout.readline().strip()

    def finish(self, order: str = "") -> int:
        self.process.communicate(order + "\n", timeout=60)
        return self.process.returncode


@contextlib.contextmanager
def other(how: str, folder: Path) -> Iterator[Holder]:
    holder = Holder(how, folder)
    try:
        yield holder
    finally:
        holder.process.kill()
        holder.process.communicate()


def alone(folder: Path) -> bool:
    with try_hold_alone(folder) as held:
        return held


def test_several_hold_at_once_and_nobody_deletes_meanwhile(folder: Path) -> None:
    with other("shared", folder) as first, other("shared", folder) as second, hold(folder):
        assert (first.says(), second.says()) == ("held", "held")
        assert not alone(folder)
        assert first.finish() == second.finish() == 0
        assert not alone(folder)  # this process still holds it
    assert alone(folder)


def test_who_proves_it_holds_it_until_that_is_written_down(run: RunDir, folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Else whoever deletes could come between, and the fact into a folder that is being removed."""
    found = []

    def written(run: RunDir, name: CheckpointName, fact: Fact) -> None:
        found.append(alone(folder))
        write_fact(run, name, fact)

    monkeypatch.setattr(verify, "write_fact", written)
    assert verify.check(run, FIRST).result == "good"
    assert found == [False]
    assert trust(run, FIRST) == "verified"
    assert alone(folder)


def test_a_killed_holder_holds_nothing(folder: Path) -> None:
    with other("shared", folder) as holder:
        assert holder.says() == "held"
        assert not alone(folder)
        os.kill(holder.process.pid, signal.SIGKILL)
        holder.process.wait()
        assert alone(folder)


def test_a_child_forked_meanwhile_does_not_keep_it_held(folder: Path) -> None:
    with hold(folder):
        pid = os.fork()
        if pid == 0:
            signal.pause()
            os._exit(0)
    try:
        assert alone(folder)
    finally:
        os.kill(pid, signal.SIGKILL)
        os.waitpid(pid, 0)


def test_two_do_not_delete_at_once(folder: Path) -> None:
    with other("alone", folder) as first:
        assert first.says() == "held"
        assert not alone(folder)
        with other("alone", folder) as second:
            assert second.says() == "busy"
    assert alone(folder)


def test_who_waits_for_a_deletion_is_told_that_it_is_gone(folder: Path) -> None:
    with other("alone", folder) as deleter:
        assert deleter.says() == "held"
        with other("shared", folder) as reader:
            assert deleter.finish("remove") == 0
            assert reader.says() == "gone"


def test_a_deletion_that_was_called_off_lets_the_reader_in(folder: Path) -> None:
    with other("alone", folder) as deleter:
        assert deleter.says() == "held"
        with other("shared", folder) as reader:
            assert deleter.finish("kept") == 0
            assert reader.says() == "held"


def test_a_manifest_that_was_replaced_is_held_as_it_is_now(folder: Path) -> None:
    with other("alone", folder) as replacing:
        assert replacing.says() == "held"
        with other("shared", folder) as reader:
            shutil.copy(folder / "manifest.json", folder / "new")
            os.replace(folder / "new", folder / "manifest.json")
            assert replacing.finish() == 0
            assert reader.says() == "held"
            assert not alone(folder)


def test_nothing_to_hold_is_said(run: RunDir, folder: Path) -> None:
    (folder / "manifest.json").unlink()
    for missing in (folder, folder.parent / "nowhere", folder / "rank-00000.pack"):
        with pytest.raises(CheckpointNotFound), hold(missing):
            pass
        assert not alone(missing)


@pytest.mark.parametrize("what", ["folder", "pipe", "dangling link", "link to itself"])
def test_a_manifest_that_is_no_file_is_damage_and_not_waited_for(folder: Path, what: str) -> None:
    path = folder / "manifest.json"
    path.unlink()
    if what == "folder":
        path.mkdir()
    elif what == "pipe":
        os.mkfifo(path)
    else:
        path.symlink_to(path if what == "link to itself" else folder / "nowhere")
    with pytest.raises(CheckpointDamaged) as error, hold(folder):
        pass
    assert error.value.part == "manifest"
    assert not alone(folder)
