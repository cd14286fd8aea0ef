"""Keeps one process worker for `perdure serve` and leaves nothing behind: when whoever started it goes, however, the run it
serves is asked to save and stop, the worker drains, and what is then left of its descendants is killed.

Its own session, so that a terminal's Ctrl-C reaches `perdure serve` alone, which passes it on once."""

import argparse
import contextlib
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

from perdure.training import files
from perdure.training.agent import lock
from perdure.training.agent.descendants import adopt_orphans, end_all
from perdure.training.process import die_with_parent
from perdure.training.run_dir import RunDir

POLL_SECS = 0.2
WORKER_SECS = 5.0
"""For an idle worker to say goodbye to the server."""
REASON = "perdure serve was stopped"


class Keeper:
    def __init__(self, run: RunDir, pool: str, grace: float) -> None:
        self.run, self.grace = run, grace
        self.asked = self.hurried = False
        for number in (signal.SIGTERM, signal.SIGHUP, signal.SIGINT):
            signal.signal(number, self._on_signal)
        adopt_orphans()
        self.worker = _start(pool)

    def _on_signal(self, number: int, _: object) -> None:
        """SIGTERM may come once for each thread of a parent that dies: only SIGINT means at once."""
        self.asked = True
        self.hurried = self.hurried or number == signal.SIGINT

    def go(self) -> int:
        """Until the worker has ended by itself (its status) or was told to (0)."""
        while self.worker.poll() is None and not self.asked:
            time.sleep(POLL_SECS)
        status = 0 if self.asked else int(self.worker.returncode or 1)
        self.end()
        return status

    def end(self) -> None:
        """Save first; SIGINT, or the end of the grace, kills. The worker goes last: it kills what it runs."""
        deadline = time.monotonic() + self.grace
        wrote = False
        while time.monotonic() < deadline and not self.hurried and (self._works() or self._trains()):
            wrote = self._ask_to_stop() or wrote
            time.sleep(POLL_SECS)
        self.worker.terminate()
        with contextlib.suppress(subprocess.TimeoutExpired):
            self.worker.wait(0 if self.hurried else WORKER_SECS)
        self.worker.kill()
        self.worker.wait()
        end_all()
        if wrote:  # or it would stop the next start
            files.remove(self.run.stop_request)

    def _works(self) -> bool:
        """Whether the worker, or we after its death, have a flow process."""
        return any(pid != self.worker.pid for pid in (*_children(self.worker.pid), *_children(os.getpid())))

    def _trains(self) -> bool:
        """Whether the run is held by a process of ours, and not by somebody else's `perdure run`."""
        holder = lock.read_holder(self.run)
        return lock.is_held(self.run) and holder is not None and holder.process.is_here and _is_ours(holder.process.pid)

    def _ask_to_stop(self) -> bool:
        """Again each time: a flow that is just beginning takes away the request of before its time."""
        if self._trains() and not self.run.stop_request.exists():
            files.write_atomically(self.run.stop_request, REASON.encode())
            return True
        return False


def _start(pool: str) -> "subprocess.Popen[bytes]":
    parent = os.getpid()

    def prepare() -> None:
        die_with_parent(parent)
        signal.signal(signal.SIGINT, signal.SIG_DFL)  # a worker that ignores it never ends on one SIGTERM

    name = f"perdure-serve-{os.uname().nodename}-{parent}"
    command = [sys.executable, "-m", "prefect", "worker", "start", "--pool", pool, "--name", name]
    return subprocess.Popen(command, stdin=subprocess.DEVNULL, preexec_fn=prepare)


def _children(pid: int) -> list[int]:
    found: list[int] = []
    with contextlib.suppress(OSError):
        for task in Path(f"/proc/{pid}/task").iterdir():
            found += map(int, (task / "children").read_text().split())
    return found


def _is_ours(pid: int) -> bool:
    """Whether this process is an ancestor of `pid`."""
    us = os.getpid()
    with contextlib.suppress(OSError, ValueError, IndexError):
        while pid > 1 and pid != us:
            pid = int(Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[1])
    return pid == us


def main() -> int:
    parser = argparse.ArgumentParser()
    parser.add_argument("--parent", type=int, required=True)
    parser.add_argument("--pool", required=True)
    parser.add_argument("--run", required=True)
    parser.add_argument("--grace", type=float, required=True)
    options = parser.parse_args()
    die_with_parent(options.parent, signal.SIGTERM)
    return Keeper(RunDir(Path(options.run)), options.pool, options.grace).go()


if __name__ == "__main__":
    sys.exit(main())
