"""All ranks of a launch: started as one process, by a launcher of ours or by a command; heard, watched by pid, ended together.
A rank that is gone before its time ends the launch at once."""

import contextlib
import os
import signal
import socket
import struct
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import NamedTuple

from perdure.training import files
from perdure.training.agent import commands
from perdure.training.agent.descendants import children
from perdure.training.agent.join import RANKS, UNKNOWN_RANK
from perdure.training.agent.rank import Rank
from perdure.training.config import RunConfig
from perdure.training.process import SESSION_VARIABLE, die_with_parent, start_time
from perdure.training.run_dir import CheckpointName, RunDir, rank_log
from perdure.training.wire import Message, Wire

STACK_DUMP_SECS = 5.0
"""A rank that has not written its stacks by then, cannot."""
_QUIET_SECS = 0.5
"""A log that has grown, and then not for so long, has all of them."""
COMMAND_END_SECS = 5.0
"""For a launch command to clean up and end, once its ranks are gone."""
SOCKET_VARIABLE = "PERDURE_AGENT_SOCKET"
PARENT_VARIABLE = "PERDURE_AGENT_PID"
LOGS_VARIABLE = "PERDURE_LOGS"
"""Set where a launcher starts the ranks: each then opens a log of its own in this folder."""
_MODULES = {"": "main", "torchrun": "torchrun", "deepspeed": "deepspeed_launch"}
"""Of perdure.training.engine, by `launch.started_by`."""
_PHASES = ("starting", "setup", "waiting for slot", "waiting for lease", "evaluation", "training", "leaving")
"""What is true of all ranks if one of them is in it."""
_CREDENTIALS = struct.Struct("3i")


class Meeting(NamedTuple):
    """Where the ranks of several nodes meet; `listener`: on node 0 the descriptor of a socket that listens there, else -1."""

    host: str
    port: int
    listener: int = -1


class Ranks:
    def __init__(
        self,
        run: RunDir,
        config: RunConfig,
        token: int,
        resume: CheckpointName | None,
        replan: bool,
        slots: list[list[int]],
        node: int = 0,
    ) -> None:
        """`slots`: the descriptors of each rank's own."""
        self._config, self._node, self._slots = config, node, slots
        self._first = node * len(slots)
        self._welcome = {
            "run_dir": str(run.root),
            "token": token,
            "resume": str(resume) if resume else "",
            "replan": replan,
            "world": config.launch.world,
            "first_rank": self._first,
            "steps": config.run.steps,
            "chunk": config.run.chunk,
            "every": config.save_every,
            "snapshot_every": config.checkpoint.snapshot_every,
            "lazy": config.checkpoint.lazy,
            "audit": config.checkpoint.audit,
            "exact": config.run.exact,
            "scale_lr": config.run.scale_lr,
            "params": config.params,
            "trajectory": config.trajectory(),
            "entry_file": str(config.entry_file),
            "entry_function": config.entry_function,
            "config_dir": str(config.path.resolve().parent),
        }
        self._folder = tempfile.TemporaryDirectory(prefix="perdure-")  # 0700, and short: a socket path has 107 bytes
        self._listener = socket.socket(socket.AF_UNIX)
        self._listener.bind(f"{self._folder.name}/agent")
        self._listener.listen(len(slots))
        self._listener.setblocking(False)
        self._strangers: list[Wire] = []
        """Connections that have not said yet whose they are."""
        self._unread: list[tuple[int, Message]] = []
        self.ranks = [Rank(self._first + at, resume.step if resume else 0) for at in range(len(slots))]
        self.leased = 0
        self.verdict: tuple[str, str] = ("", "")
        """Error class and words of the agent's own, where it ended the launch."""
        self.killed = False
        """By us, not by somebody else."""
        self._logs: Path = run.logs(token, node)
        self._own_end = 0
        """Status with which the process we started ended by itself."""
        self._launcher = config.launch.started_by
        self._command = self._launcher in commands.COMMANDS
        self._process: subprocess.Popen[bytes] | None = None

    @property
    def started(self) -> bool:
        return self._process is not None

    def start(self, meeting: Meeting | None = None) -> None:
        """`meeting`: where the ranks of several nodes meet."""
        self._process = self._spawn(meeting)
        if not self._launcher:
            self.ranks[0].is_process(self._process.pid)

    def _spawn(self, meeting: Meeting | None) -> subprocess.Popen[bytes]:
        launch = self._config.launch
        environment = {
            **os.environ,
            **launch.env,
            SOCKET_VARIABLE: f"{self._folder.name}/agent",
            PARENT_VARIABLE: str(os.getpid()),
            SESSION_VARIABLE: str(os.getpid()),
            "PYTHONUNBUFFERED": "1",
        }
        if self._launcher:
            environment[LOGS_VARIABLE] = str(self._logs)
        if self._command:
            environment, command = commands.environment(environment, len(self.ranks)), commands.words(launch)
        else:
            command = [sys.executable, "-m", f"perdure.training.engine.{_MODULES[self._launcher]}"]
            command += [str(len(self.ranks))] if self._launcher else []
            command += map(str, (self._node, launch.nodes, *meeting)) if meeting else []
        agent = os.getpid()
        with files.open_private(self._own_log) as log:
            return subprocess.Popen(
                command,
                preexec_fn=(lambda: die_with_parent(agent)) if self._command else None,
                pass_fds=(meeting.listener,) if meeting and meeting.listener >= 0 else (),
                env=environment,
                cwd=self._config.path.resolve().parent,
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=log,
            )

    @property
    def _own_log(self) -> Path:
        """Of the process that we start."""
        return self._logs / (f"{self._launcher}.log" if self._launcher else rank_log(0))

    # what they say

    @property
    def sources(self) -> list[int]:
        """What becomes readable when there is news of them."""
        new = [self._listener.fileno(), *(wire.socket.fileno() for wire in self._strangers)]
        return new + [source for rank in self.ranks for source in rank.sources]

    def receive(self) -> list[tuple[int, Message]]:
        """New messages, each with the place of its rank among ours."""
        self._read()
        news, self._unread = self._unread, []
        return news

    def _read(self) -> None:
        self._accept()
        for at, rank in enumerate(self.ranks):
            self._unread += [(at, message) for message in rank.receive()]

    def _accept(self) -> None:
        with contextlib.suppress(BlockingIOError):
            while True:
                connection, _ = self._listener.accept()
                self._strangers.append(Wire(connection))
        for wire in list(self._strangers):
            for message in wire.receive():
                self._strangers.remove(wire)
                self._meet(int(message["rank"]), wire)
            if wire.closed and wire in self._strangers:
                self._strangers.remove(wire)

    def _meet(self, number: int, wire: Wire) -> None:
        wrong = self._wrong_rank(number)
        if wrong:
            self.verdict = ("config", wrong)
            wire.close()
            return
        rank = self.ranks[number - self._first]
        told = wire.socket.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, _CREDENTIALS.size)
        with contextlib.suppress(ProcessLookupError):  # dead already: its socket says so
            rank.is_process(_CREDENTIALS.unpack(told)[0])
        rank.wire = wire
        wire.send({**self._welcome, "lease": self.leased}, tuple(self._slots[number - self._first]))

    def _wrong_rank(self, number: int) -> str:
        if number == UNKNOWN_RANK:
            return f"the launch command gives a process no rank: it must set one of {', '.join(RANKS)}"
        if not 0 <= number - self._first < len(self.ranks):
            return f"the launch command started a rank {number}, but launch.processes = {len(self.ranks)}"
        return f"the launch command started two processes of rank {number}" if self.ranks[number - self._first].wire else ""

    @property
    def phase(self) -> str:
        return min((rank.phase for rank in self.ranks), key=_PHASES.index)

    @property
    def step(self) -> int:
        """Finished by all."""
        return min(rank.step for rank in self.ranks)

    @property
    def made_a_step(self) -> bool:
        return all(rank.made_a_step for rank in self.ranks)

    @property
    def longest_step(self) -> float:
        return max(rank.longest_step for rank in self.ranks)

    @property
    def last_news(self) -> float:
        return min(rank.last_news for rank in self.ranks)

    @property
    def finished(self) -> bool:
        return all(rank.finished for rank in self.ranks)

    @property
    def stopped(self) -> bool:
        return all(rank.stopped for rank in self.ranks)

    @property
    def left(self) -> bool:
        """All have ended as they should."""
        return self.finished or self.stopped

    # what they are told

    def send(self, message: Message) -> None:
        for rank in self.ranks:
            rank.send(message)

    def lease(self, step: int) -> None:
        self.leased = max(self.leased, step)
        self.send({"lease": self.leased})

    def free(self, slots: tuple[int, ...]) -> None:
        """The saver needs these no more, one of each rank."""
        for rank, slot in zip(self.ranks, slots, strict=True):
            rank.send({"freed": slot})

    # how they end

    def is_alive(self) -> bool:
        """Whether the launch goes on: all ranks are there, or have said that they are leaving."""
        if not self._is_over():
            return True
        self._reap()
        return False

    def _is_over(self) -> bool:
        if self._process is None or self._process.poll() is not None or self.verdict[0]:
            return True
        if not self._command:
            self._look_for_unheard(self._process.pid)
        gone = [rank for rank in self.ranks if rank.gone]
        if gone:
            self._read()
        return len(gone) == len(self.ranks) or any(rank.phase != "leaving" for rank in gone)

    def _look_for_unheard(self, launcher: int) -> None:
        """Ranks that the launcher has started and that ended before they could connect."""
        unheard = [rank for rank in self.ranks if not rank.pid]
        known = {rank.pid for rank in self.ranks}
        dead = [pid for pid in children(launcher) if pid not in known and start_time(pid) == 0] if unheard else []
        for rank, pid in zip(unheard, dead, strict=False):
            rank.is_process(pid)

    def _reap(self) -> None:
        """End what is left, and learn how those ended that were gone before: as orphans of the launcher they are ours."""
        if self._process is None:
            return
        gone = [rank for rank in self.ranks if rank.gone]
        self._own_end = self._process.poll() or 0
        if self._command:
            self._reap_command(self._process, gone)
            return
        self._process.kill()
        self._process.wait()
        if not self._launcher:
            self.ranks[0].status = self._process.returncode
            return
        for rank in self.ranks:
            if rank.pid:
                status = self._end_of(rank.pid)
                rank.status = status if rank in gone else 0

    def _reap_command(self, command: subprocess.Popen[bytes], gone: list[Rank]) -> None:
        """End the ranks first, for the command to notice. How those ended that were gone before, it alone has learned."""
        self._read()
        for rank in self.ranks:
            if rank in gone:
                rank.vanished = rank.phase != "leaving" and not rank.failure[0]
            elif rank.pid:
                self._end_of(rank.pid)
        if not all(rank.pid for rank in self.ranks):
            command.terminate()
        with contextlib.suppress(subprocess.TimeoutExpired):
            command.wait(COMMAND_END_SECS)
        command.kill()
        command.wait()

    @staticmethod
    def _end_of(pid: int) -> int:
        with contextlib.suppress(ProcessLookupError):
            os.kill(pid, signal.SIGKILL)
        with contextlib.suppress(ChildProcessError):
            return os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])
        return 0

    def kill(self) -> None:
        if self._process is None or self._process.poll() is None:
            self.killed = True
            self._reap()

    def dump_stacks(self) -> None:
        """Have all ranks write their Python stacks to their logs (faulthandler on SIGUSR2), and wait until they have."""
        before = self._log_sizes()
        for rank in self.ranks:
            if rank.pid and not rank.gone:
                with contextlib.suppress(ProcessLookupError):  # its parent, a launcher, has just reaped it
                    os.kill(rank.pid, signal.SIGUSR2)
        deadline, written = time.monotonic() + STACK_DUMP_SECS, False
        while time.monotonic() < deadline and not written and not any(rank.gone for rank in self.ranks):
            seen = self._log_sizes()
            time.sleep(_QUIET_SECS)
            written = seen == self._log_sizes() and all(old < new for old, new in zip(before, seen, strict=True))

    def _log_sizes(self) -> list[int]:
        paths = [self._logs / rank_log(rank.number) for rank in self.ranks]
        return [path.stat().st_size if path.exists() else 0 for path in paths]

    @property
    def status(self) -> int:
        """Of the rank to blame; of another that ended badly by itself, or of the launcher; else 0."""
        return self.blamed.status or min((rank.status for rank in self.ranks if rank.status), default=self._own_end)

    @property
    def blamed(self) -> Rank:
        """The rank whose end explains those of the others: an error of its own, then a signal, then a lost connection."""

        def place(rank: Rank) -> tuple[bool, bool, bool]:
            said = rank.failure[0]
            return (said in ("", "infrastructure"), rank.status >= 0 and not rank.vanished, not said)

        return min(self.ranks, key=place)

    @property
    def failure(self) -> tuple[str, str]:
        """Error class and words, as far as anybody has said any."""
        error_class, detail = self.blamed.failure
        if self.verdict[0]:
            return self.verdict
        return error_class, f"{self.name}: {detail}" if error_class and self._config.launch.world > 1 else detail

    @property
    def silent_end(self) -> tuple[str, str]:
        """Error class and words where nobody has said any."""
        if self._command:
            ended = f"; the launch command ended with status {self._own_end}" if self._own_end else ""
            return "infrastructure", f"{self.name} ended without a word{ended}"
        if self.status < 0:
            return "infrastructure", f"{self.name} was killed by {signal.Signals(-self.status).name}"
        if self._config.launch.nodes > 1 and not any(rank.pid for rank in self.ranks):
            return "infrastructure", f"no rank could be started here; the launcher ended with status {self.status}"
        return "user", f"{self.name} exited with status {self.status} before its last step"

    @property
    def name(self) -> str:
        """Of the rank to blame."""
        return f"rank {self.blamed.number}" if self._config.launch.world > 1 else "rank"

    @property
    def log_path(self) -> Path:
        """Of the rank to blame, or what the launcher wrote when no rank got far enough to have one."""
        path = self._logs / rank_log(self.blamed.number)
        return path if path.exists() else self._own_log

    def close(self) -> None:
        for rank in self.ranks:
            rank.close()
        self._listener.close()
        self._folder.cleanup()
