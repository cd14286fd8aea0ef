"""The agent's side of one rank process: its start, its socket, what it last said, its end."""

import contextlib
import os
import signal
import socket
import subprocess
import sys
import tempfile
import time
from pathlib import Path

from perdure.training import files
from perdure.training.config import RunConfig
from perdure.training.run_dir import CheckpointName, RunDir
from perdure.training.wire import Message, Wire

STACK_DUMP_SECS = 2.0
SOCKET_VARIABLE = "PERDURE_AGENT_SOCKET"
PARENT_VARIABLE = "PERDURE_AGENT_PID"


class Rank:
    def __init__(
        self, run: RunDir, config: RunConfig, token: int, resume: CheckpointName | None, replan: bool, slots: list[int]
    ) -> None:
        self._slots = tuple(slots)
        self._welcome = {
            "run_dir": str(run.root),
            "token": token,
            "resume": str(resume) if resume else "",
            "replan": replan,
            "steps": config.run.steps,
            "chunk": config.run.chunk,
            "every": config.save_every,
            "snapshot_every": config.checkpoint.snapshot_every,
            "lazy": config.checkpoint.lazy,
            "audit": config.checkpoint.audit,
            "exact": config.run.exact,
            "params": config.params,
            "trajectory": config.trajectory(),
            "entry_file": str(config.entry_file),
            "entry_function": config.entry_function,
            "config_dir": str(config.path.resolve().parent),
        }
        self._folder = tempfile.TemporaryDirectory(prefix="perdure-")  # 0700, and short: a socket path has 107 bytes
        self._listener = socket.socket(socket.AF_UNIX)
        self._listener.bind(f"{self._folder.name}/agent")
        self._listener.listen(1)
        self._wire: Wire | None = None
        self.phase = "starting"
        """starting, setup, training, evaluation, waiting for lease, waiting for slot, leaving."""
        self.step = int(resume.step) if resume else 0
        self.leased = 0
        self.made_a_step = False
        """In this launch; the first one may compile, import and warm up for long."""
        self.longest_step = 0.0
        self.last_news = time.monotonic()
        self.finished = False
        self.stopped = False
        self.failure: tuple[str, str] = ("", "")
        self.status = 0
        self.killed = False
        """By us, not by somebody else."""
        self.log_path: Path = run.logs(token) / "rank-00000.log"
        self._process = self._spawn(config)

    def _spawn(self, config: RunConfig) -> subprocess.Popen[bytes]:
        environment = {
            **os.environ,
            **config.launch.env,
            SOCKET_VARIABLE: f"{self._folder.name}/agent",
            PARENT_VARIABLE: str(os.getpid()),
            "PYTHONUNBUFFERED": "1",
        }
        with files.open_private(self.log_path) as log:
            return subprocess.Popen(
                [sys.executable, "-m", "perdure.training.engine.main"],
                env=environment,
                cwd=config.path.resolve().parent,
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=log,
            )

    @property
    def listener_or_wire(self) -> socket.socket:
        return self._wire.socket if self._wire and not self._wire.closed else self._listener

    def is_alive(self) -> bool:
        status = self._process.poll()
        if status is not None:
            self.status = status
        return status is None

    def receive(self) -> list[Message]:
        """New messages; what they say of progress is taken in here."""
        if self._wire is None:
            self._listener.setblocking(False)
            with contextlib.suppress(BlockingIOError):
                connection, _ = self._listener.accept()
                self._wire = Wire(connection)
                self._wire.send({**self._welcome, "lease": self.leased}, self._slots)
            return []
        messages: list[Message] = []
        while news := self._wire.receive():
            messages += news
        for message in messages:
            self._take_in(message)
        return messages

    def _take_in(self, message: Message) -> None:
        if "phase" in message:
            self.phase = str(message["phase"])
        if "step" in message:
            self.step = int(message["step"])
            self.last_news = time.monotonic()
        if "longest" in message:
            self.made_a_step = True
            self.longest_step = max(self.longest_step, float(message["longest"]))
        self.finished |= bool(message.get("finished"))
        self.stopped |= bool(message.get("stopped"))
        if "failed" in message:
            self.failure = (str(message["failed"]), str(message.get("detail", "")))

    def send(self, message: Message) -> None:
        if self._wire and not self._wire.closed:
            self._wire.send(message)

    def lease(self, step: int) -> None:
        self.leased = max(self.leased, step)
        self.send({"lease": self.leased})

    def dump_stacks(self) -> None:
        """Have the rank write all its Python stacks to its log (faulthandler on SIGUSR2), and give it a moment to do so."""
        self._process.send_signal(signal.SIGUSR2)
        with contextlib.suppress(subprocess.TimeoutExpired):
            self._process.wait(STACK_DUMP_SECS)

    def kill(self) -> None:
        if self._process.poll() is None:
            self.killed = True
            self._process.kill()
            self._process.wait()
        self.status = self._process.returncode

    def close(self) -> None:
        self._listener.close()
        self._folder.cleanup()
