"""Processes named by pid and start time (a pid alone may be reused), waited for by pidfd, tied to their parent by PDEATHSIG."""

import contextlib
import ctypes
import os
import select
import signal
import socket
import time

import msgspec

SESSION_VARIABLE = "PERDURE_SESSION"
"""Pid of the agent, for all that descends from its ranks."""
_PR_SET_PDEATHSIG = 1
_M_TRIM_THRESHOLD, _M_MMAP_THRESHOLD = -1, -3
_libc = ctypes.CDLL(None, use_errno=True)


class ProcessId(msgspec.Struct, frozen=True, kw_only=True):
    """A process of one boot of one host; `start` is field 22 of /proc/PID/stat (clock ticks since boot)."""

    pid: int
    start: int
    host: str

    @property
    def is_here(self) -> bool:
        return self.host == socket.gethostname()

    def is_alive(self) -> bool:
        """Running on this host and not a zombie; False for another host's."""
        return self.is_here and start_time(self.pid) == self.start and self.start > 0

    def send(self, number: int) -> bool:
        """Signal exactly this process; False when it is gone."""
        try:
            fd = os.pidfd_open(self.pid)
        except ProcessLookupError:
            return False
        try:
            if not self.is_alive():
                return False
            signal.pidfd_send_signal(fd, number)
            return True
        except ProcessLookupError:
            return False
        finally:
            os.close(fd)

    def wait(self, timeout: float) -> bool:
        """True once it is gone."""
        deadline = time.monotonic() + timeout
        with contextlib.suppress(ProcessLookupError):
            fd = os.pidfd_open(self.pid)
            try:
                while self.is_alive():
                    left = deadline - time.monotonic()
                    if left <= 0:
                        return False
                    select.select([fd], [], [], min(left, 0.5))
            finally:
                os.close(fd)
        return True


def start_time(pid: int) -> int:
    """Clock ticks since boot at which `pid` started; 0 when there is none or it is a zombie."""
    try:
        with open(f"/proc/{pid}/stat", "rb") as file:
            fields = file.read().rpartition(b")")[2].split()
    except (FileNotFoundError, ProcessLookupError):
        return 0
    return 0 if fields[0] in (b"Z", b"X") else int(fields[19])


def identify(pid: int = 0) -> ProcessId:
    """The identity of `pid` (this process by default) as of now."""
    pid = pid or os.getpid()
    return ProcessId(pid=pid, start=start_time(pid), host=socket.gethostname())


def end_session(leader: int) -> int:
    """Kill what is left of a session whose leader is gone; how many there were. The kernel does not reuse a pid while it still
    names a session, so these processes are the dead leader's descendants and nobody else's."""
    if start_time(leader):
        return 0
    killed = 0
    for entry in os.scandir("/proc"):
        if not entry.name.isdigit():
            continue
        with contextlib.suppress(FileNotFoundError, ProcessLookupError, PermissionError):
            if _descends_from(int(entry.name), leader):
                os.kill(int(entry.name), signal.SIGKILL)
                killed += 1
    return killed


def _descends_from(pid: int, leader: int) -> bool:
    """By its session, or by the mark in its environment: torchrun gives each rank a session of its own."""
    if os.getsid(pid) == leader:
        return True
    with open(f"/proc/{pid}/environ", "rb") as file:
        return f"{SESSION_VARIABLE}={leader}".encode() in file.read().split(b"\0")


def die_with_parent(parent: int, number: int = signal.SIGKILL) -> None:
    """Get signal `number` when the parent dies; exits at once if `parent` is already not it. The parent must have started
    this process from a thread that lives on (its main thread)."""
    if _libc.prctl(_PR_SET_PDEATHSIG, int(number), 0, 0, 0) != 0:
        raise OSError(ctypes.get_errno(), "prctl(PR_SET_PDEATHSIG) failed")
    if os.getppid() != parent:
        os.kill(os.getpid(), number)


def keep_freed_memory() -> None:
    """Have the C library keep what is freed instead of returning every large buffer to the system: a process that works on blob
    after blob otherwise spends half its time on page faults. Not for the rank, whose memory is the user's."""
    if hasattr(_libc, "mallopt"):  # glibc
        _libc.mallopt(_M_MMAP_THRESHOLD, 32 << 20)
        _libc.mallopt(_M_TRIM_THRESHOLD, 256 << 20)
