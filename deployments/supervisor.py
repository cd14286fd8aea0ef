"""Holds the local Prefect server while somebody uses it: starts it again when it dies, ends it and itself when nobody is left.

The server dies with its supervisor (PDEATHSIG), so no death of anything leaves a process behind. Started by server.py only."""

import contextlib
import fcntl
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import msgspec

from perdure.deployments.server import HOST, ServerHome, ServerRecord, is_ready
from perdure.training import files
from perdure.training.process import die_with_parent, identify

POLL_SECS = 0.25
STOP_GRACE_SECS = 8.0
EARLY_DEATH_SECS = 60.0
MAX_EARLY_DEATHS = 3


class Supervisor:
    def __init__(self, home: ServerHome, port: int) -> None:
        self.home, self.port = home, port
        self.mutex = os.open(home.mutex, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, files.FILE_MODE)
        self.users = os.open(home.users, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, files.FILE_MODE)
        self.asked_to_stop = False
        self.was_ready = False
        self.early_deaths = 0
        self.start()

    def start(self) -> None:
        self.started = time.monotonic()
        parent = os.getpid()
        command = [sys.executable, "-m", "prefect", "server", "start", "--host", HOST, "--port", str(self.port)]
        self.server = subprocess.Popen(command, stdin=subprocess.DEVNULL, preexec_fn=lambda: die_with_parent(parent))
        record = ServerRecord(port=self.port, server=identify(self.server.pid))
        files.publish(self.home.record, msgspec.json.encode(record))

    def is_wanted(self) -> bool:
        """False only while the mutex is held (and then kept until exit), so nobody can begin to use what is about to stop."""
        if self.home.keep.exists() or not self._try(self.mutex):
            return True
        unused = self._try(self.users)
        fcntl.flock(self.users, fcntl.LOCK_UN)
        if not unused:
            fcntl.flock(self.mutex, fcntl.LOCK_UN)
        return not unused

    @staticmethod
    def _try(fd: int) -> bool:
        try:
            fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            return False
        return True

    def run(self) -> None:
        while not self.asked_to_stop and self.is_wanted():
            if self.server.poll() is not None and not self.revive():
                return
            self.was_ready = self.was_ready or is_ready(f"http://{HOST}:{self.port}/api")
            time.sleep(POLL_SECS)
        self.stop()

    def revive(self) -> bool:
        """Start a dead server again on its port (its clients are retrying); not one that never worked or keeps dying young."""
        early = time.monotonic() - self.started < EARLY_DEATH_SECS
        self.early_deaths = self.early_deaths + 1 if early else 0
        print(f"the server ended with status {self.server.returncode}", file=sys.stderr, flush=True)
        if not self.was_ready or self.early_deaths >= MAX_EARLY_DEATHS:
            return False
        self.start()
        return True

    def stop(self) -> None:
        self.server.terminate()
        try:
            self.server.wait(STOP_GRACE_SECS)
        except subprocess.TimeoutExpired:
            self.server.kill()
            self.server.wait()


def main() -> None:
    home, port = ServerHome(Path(sys.argv[1])), int(sys.argv[2])
    lock = os.open(home.supervisor, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, files.FILE_MODE)
    fcntl.flock(lock, fcntl.LOCK_EX)  # shared with the child below: held until that one ends
    if os.fork():
        os._exit(0)  # the starter goes on once the lock is held
    os.setsid()
    with contextlib.suppress(OSError):
        os.nice(5)
    supervisor = Supervisor(home, port)

    def on_sigterm(*_: object) -> None:
        supervisor.asked_to_stop = True

    signal.signal(signal.SIGTERM, on_sigterm)
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    supervisor.run()


if __name__ == "__main__":
    main()
