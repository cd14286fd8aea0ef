"""One lock decides who may touch a run: inherited by what the holder starts, free when all of it is gone, never stolen."""

import contextlib
import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import msgspec
import pytest

from perdure.training import files
from perdure.training.agent import lock
from perdure.training.agent.lock import LOCK_FD_VARIABLE, Holder, RunLock
from perdure.training.errors import RunBusy
from perdure.training.process import ProcessId, identify, start_time
from perdure.training.run_dir import RunDir

HOLD = """
import sys, time
from pathlib import Path
from perdure.training.agent.lock import RunLock
from perdure.training.run_dir import RunDir
RunLock.acquire(RunDir(Path(sys.argv[1])), orphan_wait=0.0)
print("held", flush=True)
sys.stdin.read()
"""
Child = subprocess.Popen[bytes]


@pytest.fixture
def run(tmp_path: Path) -> RunDir:
    return RunDir(tmp_path / "run")


@pytest.fixture
def started() -> Iterator[list[Child]]:
    """Every process a test starts; ended with it."""
    children: list[Child] = []
    yield children
    for child in children:
        child.kill()
        child.wait()
        for stream in (child.stdin, child.stdout, child.stderr):
            assert stream is not None
            with contextlib.suppress(BrokenPipeError):
                stream.close()


def python(code: str, *arguments: object, fds: tuple[int, ...] = (), env: dict[str, str] | None = None) -> Child:
    return subprocess.Popen(
        [sys.executable, "-c", code, *map(str, arguments)],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        pass_fds=fds,
        env={**os.environ, **(env or {})},
    )


def hold(run: RunDir, started: list[Child]) -> Child:
    child = python(HOLD, run.root)
    started.append(child)
    assert child.stdout is not None
    assert child.stdout.readline() == b"held\n"
    return child


def sleeper(started: list[Child], *fds: int) -> ProcessId:
    child = python("import sys; sys.stdin.read()", fds=fds)
    started.append(child)
    return identify(child.pid)


def claim(run: RunDir, process: ProcessId, since: float = 0.0) -> None:
    run.lock.write_bytes(msgspec.json.encode(Holder(process=process, since=since)))


# the lock


def test_second_start_exits_at_once_and_names_the_holder(run: RunDir, started: list[Child]) -> None:
    holder = hold(run, started)
    before = run.lock.read_bytes()
    with pytest.raises(RunBusy, match=rf"held by process {holder.pid} on \S+ since \d\d:\d\d:\d\d") as caught:
        RunLock.acquire(run, orphan_wait=60.0)
    assert caught.value.exit_code == 3
    assert str(run.root) in str(caught.value)
    assert run.lock.read_bytes() == before


@pytest.mark.parametrize("round_number", range(3))
def test_of_five_starts_at_the_same_moment_exactly_one_holds(round_number: int, run: RunDir, started: list[Child]) -> None:
    """Q4."""
    started += [python(HOLD, run.root) for _ in range(5)]
    answers = []
    for child in started:
        assert child.stdout is not None
        answers.append(child.stdout.readline())
    assert answers.count(b"held\n") == 1
    winner = started[answers.index(b"held\n")]
    for child in started:
        if child is not winner:
            assert b"RunBusy" in child.communicate(timeout=30)[1]
    assert winner.poll() is None
    assert lock.read_holder(run) is not None
    assert lock.read_holder(run).process.pid == winner.pid  # type: ignore[union-attr]


def test_killed_holder_blocks_nobody(run: RunDir, started: list[Child]) -> None:
    """Q6: nothing has to be removed by hand."""
    holder = hold(run, started)
    assert lock.is_held(run)
    holder.kill()
    holder.wait()
    assert not lock.is_held(run)
    with RunLock.acquire(run, orphan_wait=0.0):
        assert lock.read_holder(run).process == identify()  # type: ignore[union-attr]
    assert not lock.is_held(run)


def test_lock_passed_on_stays_held_until_the_last_process_is_gone(run: RunDir, started: list[Child]) -> None:
    with RunLock.acquire(run, orphan_wait=0.0) as held:
        heir = sleeper(started, held.fd)
    assert lock.is_held(run), "the heir has it"
    started[0].kill()
    started[0].wait()
    assert not heir.is_alive()
    assert not lock.is_held(run)


def test_child_takes_over_the_inherited_lock_instead_of_asking_for_it(run: RunDir, started: list[Child]) -> None:
    with RunLock.acquire(run, orphan_wait=0.0) as held:
        child = python(HOLD, run.root, fds=(held.fd,), env={LOCK_FD_VARIABLE: str(held.fd)})
        started.append(child)
        assert child.stdout is not None
        assert child.stdout.readline() == b"held\n"
    assert lock.is_held(run)
    child.communicate(timeout=30)
    assert child.returncode == 0
    assert not lock.is_held(run)


@pytest.mark.parametrize("since", [-86_400.0, 86_400.0, 1e12])
def test_live_holder_is_never_stolen_from_whatever_its_clock_says(since: float, run: RunDir, started: list[Child]) -> None:
    """Q6."""
    holder = hold(run, started)
    claim(run, identify(holder.pid), since=time.time() + since)
    with pytest.raises(RunBusy, match=str(holder.pid)):
        RunLock.acquire(run, orphan_wait=0.0)
    assert holder.poll() is None


def test_lock_named_by_a_reused_pid_is_free_when_the_kernel_says_so(run: RunDir, started: list[Child]) -> None:
    """Q6: the pid in the file lives, but is another process; no flock, no holder."""
    stranger = sleeper(started)
    run.root.mkdir()
    claim(run, ProcessId(pid=stranger.pid, start=stranger.start - 1, host=stranger.host))
    assert not lock.is_held(run)
    RunLock.acquire(run, orphan_wait=0.0).close()
    assert stranger.is_alive()


def test_orphan_is_recognised_behind_a_reused_pid_and_ended_but_the_stranger_is_not(run: RunDir, started: list[Child]) -> None:
    """The driver is dead, its pid is somebody else's by now, and its agent still holds the lock."""
    with RunLock.acquire(run, orphan_wait=0.0) as held:
        agent = sleeper(started, held.fd)
        stranger = sleeper(started)
    files.write_atomically(run.agent_json, msgspec.json.encode(agent))
    claim(run, ProcessId(pid=stranger.pid, start=stranger.start - 1, host=stranger.host))
    RunLock.acquire(run, orphan_wait=0.2).close()
    assert not agent.is_alive()
    assert stranger.is_alive()


def test_agent_record_with_a_reused_pid_kills_nobody(run: RunDir, started: list[Child]) -> None:
    stranger = sleeper(started)
    run.root.mkdir()
    files.write_atomically(run.agent_json, msgspec.json.encode(ProcessId(pid=stranger.pid, start=1, host=stranger.host)))
    lock.end_agent(run, grace=0.0)
    assert stranger.is_alive()


def test_holder_on_another_host_is_not_judged_by_a_pid_of_ours(run: RunDir, started: list[Child]) -> None:
    hold(run, started)
    claim(run, ProcessId(pid=1, start=1, host="elsewhere"), since=time.time())
    with pytest.raises(RunBusy, match="process 1 on elsewhere"):
        RunLock.acquire(run, orphan_wait=0.2)


@pytest.mark.parametrize("text", [b"", b"\x00" * 80, b"{}", b"[" * 2000], ids=["empty", "zeros", "object", "deep"])
def test_unreadable_lock_text_hinders_nobody_and_hides_no_holder(text: bytes, run: RunDir, started: list[Child]) -> None:
    run.root.mkdir()
    run.lock.write_bytes(text)
    with RunLock.acquire(run, orphan_wait=0.0):
        pass
    hold(run, started)
    run.lock.write_bytes(text)
    with pytest.raises(RunBusy, match="held by another process"):
        RunLock.acquire(run, orphan_wait=60.0)


def test_looking_does_not_hold_and_a_run_without_a_lock_is_not_held(run: RunDir) -> None:
    assert not lock.is_held(run)
    assert not run.root.exists(), "looking leaves nothing"
    RunLock.acquire(run, orphan_wait=0.0).close()
    assert not lock.is_held(run)


# processes


def test_zombie_and_gone_processes_are_not_alive(started: list[Child]) -> None:
    process = sleeper(started)
    assert process.is_alive()
    started[0].kill()
    os.waitid(os.P_PID, process.pid, os.WEXITED | os.WNOWAIT)  # a zombie now
    assert not process.is_alive()
    assert start_time(process.pid) == 0
    started[0].wait()
    assert not process.is_alive()
    assert process.wait(0.0)
    assert not process.send(signal.SIGTERM)


def test_signal_reaches_the_named_process_only(started: list[Child]) -> None:
    process = sleeper(started)
    other = ProcessId(pid=process.pid, start=process.start + 1, host=process.host)
    assert not other.send(signal.SIGKILL)
    assert not process.wait(0.0)
    assert process.send(signal.SIGKILL)
    assert process.wait(30.0)
    assert started[0].wait() == -signal.SIGKILL


def test_command_name_with_parentheses_and_spaces_does_not_hide_the_start_time(started: list[Child]) -> None:
    code = "import sys; open('/proc/self/comm', 'w').write('a) R 1 (b'); print('named', flush=True); sys.stdin.read()"
    child = python(code)
    started.append(child)
    assert child.stdout is not None
    assert child.stdout.readline() == b"named\n"
    odd = identify(child.pid)
    assert Path(f"/proc/{child.pid}/stat").read_bytes().startswith(f"{child.pid} (a) R 1 (b) ".encode())
    assert odd.start >= identify().start > 0
    assert odd.is_alive()


MIDDLE = """
import os, subprocess, sys
code = '''
import os, sys
from perdure.training.process import die_with_parent
die_with_parent(int(sys.argv[1]))
print(os.getpid(), flush=True)
sys.stdin.read()
'''
read, write = os.pipe()
child = subprocess.Popen([sys.executable, "-c", code, str(os.getpid())], stdin=read)
sys.stdin.read()
"""


def test_child_dies_with_its_killed_parent(started: list[Child]) -> None:
    middle = python(MIDDLE)
    started.append(middle)
    assert middle.stdout is not None
    inner = identify(int(middle.stdout.readline()))
    assert inner.is_alive()
    middle.kill()
    assert inner.wait(30.0)


def test_child_whose_parent_is_already_gone_ends_at_once() -> None:
    code = "from perdure.training.process import die_with_parent; die_with_parent(1 << 22); print('lives')"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, check=False, timeout=60)
    assert done.returncode == -signal.SIGKILL
    assert done.stdout == b""


def test_wait_ends_when_the_process_does(started: list[Child]) -> None:
    process = sleeper(started)
    assert started[0].stdin is not None
    started[0].stdin.close()
    assert process.wait(30.0)
