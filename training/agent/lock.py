"""The run's lock: one flock, taken by whoever drives the run and inherited by all it starts down to the agent. It is free
exactly when the whole tree is gone. Its text names the holder."""

import fcntl
import os
import signal
import time
from types import TracebackType

import msgspec

from perdure.training import files
from perdure.training.errors import RunBusy
from perdure.training.process import ProcessId, end_session, identify
from perdure.training.run_dir import RunDir

LOCK_FD_VARIABLE = "PERDURE_LOCK_FD"
_ORPHAN_PATIENCE = 1.0
"""Seconds in which a holder whose driver has just died is given time to notice."""


class Holder(msgspec.Struct, frozen=True, kw_only=True):
    process: ProcessId
    since: float


def read_holder(run: RunDir) -> Holder | None:
    try:
        return msgspec.json.decode(files.read_limited(run.lock, 4096), type=Holder)
    except (OSError, ValueError):
        return None


def is_held(run: RunDir) -> bool:
    """Whether anything drives or trains this run on a machine that shares the folder."""
    try:
        fd = os.open(run.lock, os.O_RDONLY | os.O_CLOEXEC)
    except FileNotFoundError:
        return False
    try:
        fcntl.flock(fd, fcntl.LOCK_SH | fcntl.LOCK_NB)
    except BlockingIOError:
        return True
    finally:
        os.close(fd)
    return False


class RunLock:
    """Held while open. `fd` is passed to children with `pass_fds` and named in PERDURE_LOCK_FD."""

    def __init__(self, fd: int) -> None:
        self.fd = fd

    @classmethod
    def acquire(cls, run: RunDir, orphan_wait: float) -> "RunLock":
        """Inherit the lock from the parent, or take it. A live driver's lock raises RunBusy at once; one whose driver is dead
        is waited for `orphan_wait` seconds (its agent saves and goes), then that agent is killed."""
        inherited = os.environ.pop(LOCK_FD_VARIABLE, "")
        if inherited:
            fd = int(inherited)
            os.set_inheritable(fd, False)
            return cls(fd)
        files.make_dirs(run.root)
        fd = os.open(run.lock, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, files.FILE_MODE)
        try:
            _wait_for(run, fd, orphan_wait)
        except BaseException:
            os.close(fd)
            raise
        text = msgspec.json.encode(Holder(process=identify(), since=time.time()))
        os.pwrite(fd, text.ljust(max(len(text), os.fstat(fd).st_size)), 0)
        return cls(fd)

    def close(self) -> None:
        os.close(self.fd)

    def __enter__(self) -> "RunLock":
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        self.close()


def _wait_for(run: RunDir, fd: int, orphan_wait: float) -> None:
    start = time.monotonic()
    while True:
        try:
            fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
            return
        except BlockingIOError:
            holder = read_holder(run)
        waited = time.monotonic() - start
        if holder is None:
            if waited > _ORPHAN_PATIENCE:  # held, and its first line not yet written
                raise RunBusy(f"{run.root} is held by another process")
        elif not holder.process.is_here or holder.process.is_alive():
            if waited > (0 if holder.process.is_here else orphan_wait):
                since = time.strftime("%H:%M:%S", time.localtime(holder.since))
                raise RunBusy(f"{run.root} is held by process {holder.process.pid} on {holder.process.host} since {since}")
        elif waited > orphan_wait:
            end_agent(run, grace=0.0)
            orphan_wait += 5.0
        time.sleep(0.05)


def read_agent(run: RunDir) -> ProcessId | None:
    """The newest agent of this run, dead or alive."""
    try:
        return msgspec.json.decode(files.read_limited(run.agent_json, 4096), type=ProcessId)
    except (OSError, ValueError):
        return None


def end_agent(run: RunDir, grace: float) -> None:
    """Wait for an agent left by an earlier launch on this host (it is saving), then kill it by pid and start time, and with it
    whatever its ranks started and left behind."""
    end_process(read_agent(run), grace)


def end_process(agent: ProcessId | None, grace: float) -> None:
    """As `end_agent`, for any agent."""
    if agent is None or not agent.is_here:
        return
    if agent.is_alive() and not agent.wait(grace):
        agent.send(signal.SIGKILL)
        agent.wait(10.0)
    end_session(agent.pid)
