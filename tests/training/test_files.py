"""The door to the disk: a file is there whole, or not at all; a fail point before every call; torn lines are passed over."""

import errno
import fcntl
import json
import os
import random
import signal
import subprocess
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path

import pytest

from perdure.training import events, files
from perdure.training.run_dir import RunDir

OLD, NEW = b"old" * 1000, b"new" * 5000
CALLS = 5
"""open, write, fsync, rename, fsync of the folder."""


@pytest.fixture(autouse=True)
def disarmed() -> Iterator[None]:
    yield
    files.plan_failure("")


def failing(plan: str) -> None:
    files.plan_failure(plan)
    files.set_role("test")


def write_twice(path: Path, plan: str) -> int:
    """Write NEW over OLD in another process under that plan; its status."""
    path.write_bytes(OLD)
    code = (
        "import sys; from pathlib import Path; from perdure.training import files;"
        f"files.set_role('test'); files.write_atomically(Path(sys.argv[1]), {NEW!r})"
    )
    return subprocess.run(
        [sys.executable, "-c", code, str(path)], env={**os.environ, "PERDURE_FAIL": plan}, stderr=subprocess.PIPE, check=False
    ).returncode


@pytest.mark.parametrize("call", range(1, CALLS + 1))
def test_file_is_old_or_new_after_a_kill_before_any_call(call: int, tmp_path: Path) -> None:
    path = tmp_path / "f"
    assert write_twice(path, f"test:kill:{call}") == -signal.SIGKILL
    assert path.read_bytes() == (OLD if call <= 4 else NEW)
    assert all(files.is_temporary(other.name) for other in tmp_path.iterdir() if other != path)


def test_there_is_no_call_without_a_fail_point(tmp_path: Path) -> None:
    assert write_twice(tmp_path / "f", f"test:kill:{CALLS + 1}") == 0
    assert (tmp_path / "f").read_bytes() == NEW


@pytest.mark.parametrize("call", range(1, CALLS + 1))
@pytest.mark.parametrize("name", ["ENOSPC", "EIO"])
def test_error_at_any_call_leaves_the_old_or_the_new_file_and_nothing_else(call: int, name: str, tmp_path: Path) -> None:
    path = tmp_path / "f"
    path.write_bytes(OLD)
    failing(f"test:{name}:{call}")
    with pytest.raises(OSError, match="fail point") as caught:
        files.write_atomically(path, NEW)
    assert caught.value.errno == getattr(errno, name)
    assert path.read_bytes() == (OLD if call < CALLS else NEW)
    assert [other.name for other in tmp_path.iterdir()] == ["f"]


def test_plan_for_another_role_does_nothing(tmp_path: Path) -> None:
    files.plan_failure("saver:EIO:1:repeat")
    files.set_role("agent")
    files.write_atomically(tmp_path / "f", NEW)
    assert (tmp_path / "f").read_bytes() == NEW


def test_failure_repeats_only_when_asked(tmp_path: Path) -> None:
    failing("test:EIO:1")
    with pytest.raises(OSError, match="fail point 1"):
        files.write_atomically(tmp_path / "f", NEW)
    files.write_atomically(tmp_path / "f", NEW)
    failing("test:EIO:1:repeat")
    for number in (1, 2, 3):
        with pytest.raises(OSError, match=f"fail point {number}"):
            files.write_atomically(tmp_path / "f", NEW)


def test_parts_are_written_in_order_and_only_the_owner_may_read(tmp_path: Path) -> None:
    files.write_atomically(tmp_path / "f", [b"a", memoryview(b"bc"), bytearray(b"d")])
    assert (tmp_path / "f").read_bytes() == b"abcd"
    assert (tmp_path / "f").stat().st_mode & 0o777 == 0o600
    files.make_dirs(tmp_path / "x/y")
    assert (tmp_path / "x/y").stat().st_mode & 0o777 == 0o700


def together(code: str, *arguments: Sequence[object]) -> list[bytes]:
    """Run `code` in one process per entry of `arguments`, all let go at the same moment; what each printed."""
    gate, opener = os.pipe()
    command = [sys.executable, "-c", f"import sys; from perdure.training import events, files\nsys.stdin.read()\n{code}"]
    started = [subprocess.Popen([*command, *map(str, own)], stdin=gate, stdout=subprocess.PIPE) for own in arguments]
    os.close(gate)
    os.close(opener)
    answers = [process.communicate(timeout=60)[0] for process in started]
    assert [process.returncode for process in started] == [0] * len(started)
    return answers


@pytest.mark.parametrize("size", [0, 1, 4095, 4096, 4097, 8 << 20, (8 << 20) + 5, (17 << 20) + 4096])
@pytest.mark.parametrize("refused", ["", "open", "write"])
def test_a_pack_is_its_parts_back_to_back_whatever_the_file_system_takes(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, size: int, refused: str
) -> None:
    really_open, really_write, direct = os.open, os.write, []

    def opening(path: Path, flags: int, mode: int = 0o777) -> int:
        if refused == "open" and flags & os.O_DIRECT:
            raise OSError(errno.EINVAL, "no direct writes here", str(path))
        return really_open(path, flags, mode)

    def writing(fd: int, data: memoryview) -> int:
        direct.append(bool(fcntl.fcntl(fd, fcntl.F_GETFL) & os.O_DIRECT))
        if refused == "write" and direct[-1]:
            raise OSError(errno.EINVAL, "blocks of this disk are larger")
        return really_write(fd, data)

    monkeypatch.setattr(os, "open", opening)
    monkeypatch.setattr(os, "write", writing)
    content = random.Random(0).randbytes(size)
    with files.PackFile(tmp_path / "f") as new:
        for start in range(0, size, 3_000_001):
            new.write(memoryview(content)[start : start + 3_000_001])
            new.write(b"")
        assert new.size == size
        new.commit()
    assert (tmp_path / "f").read_bytes() == content
    assert any(direct) is (size >= 4096 and refused != "open")


@pytest.mark.parametrize("most", [1, 4096, 5000])
def test_a_pack_is_whole_however_few_bytes_the_kernel_takes_at_a_time(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, most: int
) -> None:
    really = os.write
    monkeypatch.setattr(os, "write", lambda fd, data: really(fd, data[:most] if len(data) > 1 << 14 else data))
    content = os.urandom(60_000)
    with files.PackFile(tmp_path / "f") as new:
        new.write(content)
        new.commit()
    assert (tmp_path / "f").read_bytes() == content


def test_of_eight_racing_processes_exactly_one_creates_the_file(tmp_path: Path) -> None:
    code = """
from pathlib import Path
for number in range(5):
    print(int(files.create_exclusively(Path(sys.argv[1], str(number)), sys.argv[2].encode() * 1000)))"""
    answers = [answer.split() for answer in together(code, *((tmp_path, racer) for racer in range(8)))]
    for number in range(5):
        winners = [racer for racer in range(8) if answers[racer][number] == b"1"]
        assert len(winners) == 1
        assert (tmp_path / str(number)).read_bytes() == f"{winners[0]}".encode() * 1000
    assert len(list(tmp_path.iterdir())) == 5, "losers leave nothing"


def test_exclusive_creation_never_replaces(tmp_path: Path) -> None:
    assert files.create_exclusively(tmp_path / "f", OLD)
    assert not files.create_exclusively(tmp_path / "f", NEW)
    assert (tmp_path / "f").read_bytes() == OLD


def test_file_larger_than_its_limit_is_not_read(tmp_path: Path) -> None:
    (tmp_path / "f").write_bytes(b"x" * 101)
    assert len(files.read_limited(tmp_path / "f", 101)) == 101
    with pytest.raises(ValueError, match="larger than 100"):
        files.read_limited(tmp_path / "f", 100)


def kinds(run: RunDir, cursor: int = 0) -> list[str]:
    return [event.kind for event in events.read(run, cursor)]


@pytest.mark.parametrize("cut", [1, 5, 20])
def test_torn_line_is_passed_over_and_closed_off_by_the_next_event(cut: int, tmp_path: Path) -> None:
    run = RunDir(tmp_path)
    events.record(run, "one")
    events.record(run, "two", text="x" * 50)
    whole = run.events.read_bytes()
    run.events.write_bytes(whole[:-cut])
    assert kinds(run) == ["one"], "a torn tail waits"
    events.record(run, "three")
    assert [kind for kind in kinds(run) if kind != "two"] == ["one", "three"]
    assert ("two" in kinds(run)) == (cut == 1), "a line that only lacks its end is whole"


@pytest.mark.parametrize(
    "junk", [b"\x00\xff\n", b"[]\n", b'"text"\n', b"{}\n", b'{"kind": "x"}\n', b'{"kind":"x","time":null}\n']
)
def test_foreign_line_is_passed_over(junk: bytes, tmp_path: Path) -> None:
    run = RunDir(tmp_path)
    events.record(run, "one")
    files.append(run.events, junk)
    events.record(run, "two")
    assert kinds(run) == ["one", "two"]


def test_cursor_goes_on_exactly_after_the_last_event(tmp_path: Path) -> None:
    run = RunDir(tmp_path)
    assert kinds(run) == []
    for number in range(3):
        events.record(run, f"e{number}", text="\u2603\n")
    first, second, _ = events.read(run)
    assert kinds(run, first.end) == ["e1", "e2"]
    assert second.data == {"text": "\u2603\n"}
    assert kinds(run, run.events.stat().st_size) == []


def test_writers_side_by_side_never_tear_a_line(tmp_path: Path) -> None:
    code = """
from pathlib import Path
from perdure.training.run_dir import RunDir
for number in range(50):
    events.record(RunDir(Path(sys.argv[1])), "noted", writer=int(sys.argv[2]), number=number, text="x" * 500)"""
    together(code, *((tmp_path, writer) for writer in range(4)))
    lines = [json.loads(line) for line in (tmp_path / "events.jsonl").read_bytes().splitlines()]
    assert sorted((line["writer"], line["number"]) for line in lines) == [(w, n) for w in range(4) for n in range(50)]
