"""Keeps one saver process alive and feeds it full slots, oldest first, those of all ranks together; a full disk pauses, never
drops. What dead ranks left in memory is saved too."""

import errno
import os
import socket
import subprocess
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass

import msgspec

from perdure.training.config import RunConfig
from perdure.training.run_dir import CheckpointName, RunDir
from perdure.training.slots import Snapshot
from perdure.training.wire import Message, Wire

MAX_ATTEMPTS = 3
RETRY_SECS = 1.0
DISK_FULL_RETRY_SECS = 2.0
AWAY_RETRY_SECS = 5.0
_NO_ROOM = (errno.ENOSPC, errno.EDQUOT)
Record = Callable[..., None]
"""A kind of event and its data, token apart."""


@dataclass(kw_only=True)
class _Pending:
    slots: tuple[int, ...]
    """One of each rank."""
    step: int
    full: bool
    attempts: int = 0
    not_before: float = 0.0
    running: bool = False


class Savers:
    """`take_in` queues full slots once every rank's of that step is there; `take_freed` gives slots, one of each rank, whose
    snapshot is committed (or given up)."""

    def __init__(
        self,
        run: RunDir,
        config: RunConfig,
        run_id: str,
        token: int,
        start: int,
        slots: list[list[int]],
        node: int,
        record: Record,
    ) -> None:
        """`slots`: descriptors of each rank's. `record`: where events go."""
        self._start_step = self._newest = start
        """Newest step that is committed or was given to the saver; at first the step this launch resumed from."""
        self._run, self._config, self._run_id, self._token, self._slots = run, config, run_id, token, slots
        self._log = open(run.logs(token, node) / "saver.log", "ab")
        self._record, self._launch = record, config.launch
        self._settings: Message = {
            "token": token,
            "encoding": config.checkpoint.encoding,
            "threads": config.checkpoint.threads,
            "retention": msgspec.to_builtins(config.retention),
            "stored": bool(config.store_url),
            "node": node,
            "nodes": config.launch.nodes,
            "shared_disk": config.launch.shared_disk,
        }
        self._queue: list[_Pending] = []
        self._freed: list[tuple[int, ...]] = []
        self._arrived: dict[int, dict[int, int]] = {}
        """Step -> rank -> slot, of checkpoints that wait for the snapshots of other ranks."""
        self.committed_step = 0
        self.disk_full = False
        self.lost: str = ""
        """Why a checkpoint that a chunk waits for could not be written."""
        self._start()

    def _start(self) -> None:
        ours, theirs = socket.socketpair()
        command = [sys.executable, "-m", "perdure.training.agent.saver", str(self._run.root), self._run_id]
        command += [str(theirs.fileno()), str(os.getpid())]
        self.process = subprocess.Popen(
            command, pass_fds=(theirs.fileno(),), stdin=subprocess.DEVNULL, stdout=self._log, stderr=self._log
        )
        theirs.close()
        self.wire = Wire(ours)

    @property
    def busy(self) -> bool:
        return bool(self._queue)

    @property
    def saving(self) -> CheckpointName | None:
        """What the saver is at."""
        return CheckpointName(self._queue[0].step, self._token) if self._queue else None

    def take_in(self, rank: int, slot: int, step: int) -> None:
        """That rank's snapshot of a checkpoint is whole."""
        arrived = self._arrived.setdefault(step, {})
        arrived[rank] = slot
        if len(arrived) == len(self._slots):
            self._submit(step, self._arrived.pop(step))

    def _submit(self, step: int, slots: dict[int, int]) -> None:
        self._newest = max(self._newest, step)
        chosen = tuple(slots[rank] for rank in range(len(self._slots)))
        self._queue.append(_Pending(slots=chosen, step=step, full=self._config.is_full_step(step)))
        self.work()

    def held(self) -> set[int]:
        """After the ranks' death: steps of which each has a whole snapshot in memory, and the newest written. One torn by the
        death is none; the other slot's is. None of all where an earlier one is lost, which other nodes still wait for."""
        if self.lost and self._launch.nodes > 1:
            return set()
        found = self._in_memory()
        return set(found[0]).intersection(*found) | {max(self._start_step, self.committed_step)}

    def _in_memory(self) -> list[dict[int, int]]:
        """Step -> slot of each rank's whole snapshots."""
        steps = [[(_step_in(fd), slot) for slot, fd in enumerate(slots)] for slots in self._slots]
        return [{step: slot for step, slot in own if step >= 0} for own in steps]

    def salvage(self, step: int) -> None:
        """Save that step, which is held, if it is newer than all that was given to the saver."""
        if step > self._newest:
            who = "the rank is gone; its" if self._launch.world == 1 else "a rank is gone; the"
            self._record("notice", text=f"{who} newest snapshot in memory, of step {step}, is saved")
            self._submit(step, {rank: slots[step] for rank, slots in enumerate(self._in_memory())})

    def give_up_after(self, step: int) -> None:
        """What was given to the saver of later steps: another node has not its part, so they cannot be committed."""
        self.on_messages()
        later = [pending for pending in self._queue if pending.step > step]
        if later and later[0].running:
            self._restart()
        self._queue = [pending for pending in self._queue if pending.step <= step]
        self._newest = max([self._start_step, self.committed_step, *(pending.step for pending in self._queue)])

    def take_freed(self) -> list[tuple[int, ...]]:
        freed, self._freed = self._freed, []
        return freed

    def work(self) -> None:
        """Hand the oldest waiting snapshot to the saver, if it is idle and the retry time has come."""
        head = self._queue[0] if self._queue else None
        if head is None or head.running or time.monotonic() < head.not_before:
            return
        head.running, head.attempts = True, head.attempts + 1
        fds = tuple(slots[slot] for slots, slot in zip(self._slots, head.slots, strict=True))
        self.wire.send({"step": head.step, "full": head.full, "ranks": len(fds), **self._settings}, fds)

    def on_messages(self) -> None:
        for message in self.wire.receive():
            if "failed" not in message:
                self._on_saved(message)
            else:
                away = bool(message.get("away"))
                self._on_failed(str(message["failed"]), int(message["errno"]), str(message["path"]), away=away)
        self.work()

    def on_death(self) -> None:
        """The saver is gone: say so, start another, write the same snapshot again."""
        self.on_messages()  # what it committed before it died
        status = self._restart()
        self._record("notice", text=f"saver ended with status {status}; started another")
        if self._queue and self._queue[0].running:
            self._on_failed(f"saver ended with status {status}", 0, "")
        self.work()

    def _restart(self) -> int:
        """Another saver; the status of the one that was."""
        self.process.kill()
        status = self.process.wait()
        self.wire.close()
        self._start()
        return status

    def _on_saved(self, message: Message) -> None:
        done = self._queue.pop(0)
        self._freed.append(done.slots)
        self.committed_step = max(self.committed_step, done.step)
        if self.disk_full:
            self.disk_full = False
            self._record("notice", text="there is room on the disk again; saving goes on")
        if "committed" in message:
            self._record("checkpoint_committed", name=message.pop("committed"), **message)

    def _on_failed(self, problem: str, number: int, path: str, *, away: bool = False) -> None:
        """`away`: the store cannot be reached, of which others speak."""
        head = self._queue[0]
        head.running = False
        if away:
            head.attempts, head.not_before = 0, time.monotonic() + AWAY_RETRY_SECS
            return
        if number in _NO_ROOM:
            head.attempts = 0
            head.not_before = time.monotonic() + DISK_FULL_RETRY_SECS
            if not self.disk_full:
                self.disk_full = True
                self._say_disk_full(head.step, path, problem)
            return
        head.not_before = time.monotonic() + RETRY_SECS
        self._record("save_failed", step=head.step, error=problem, path=path, attempt=head.attempts)
        if head.attempts >= MAX_ATTEMPTS:
            self._queue.pop(0)
            self._freed.append(head.slots)
            awaited = head.step % self._config.run.chunk == 0 or head.step >= self._config.run.steps
            if awaited or self._launch.nodes > 1:  # other nodes wait for ours
                self.lost = f"checkpoint of step {head.step} could not be written: {problem}"

    def _say_disk_full(self, step: int, path: str, problem: str) -> None:
        usage = os.statvfs(self._run.root)
        free, inodes = usage.f_bavail * usage.f_frsize, usage.f_favail
        text = f"disk full: {path or self._run.root} has {free} bytes and {inodes} inodes free; step {step} waits"
        self._record(
            "disk_full",
            step=step,
            path=path,
            free_bytes=free,
            free_inodes=inodes,
            error=problem,
            text=f"{text} in memory, training pauses when both slots are full, and goes on by itself when there is room",
        )

    def end(self) -> None:
        self.process.kill()
        self.process.wait()
        self.wire.close()
        self._log.close()


def _step_in(slot: int) -> int:
    """Step of the whole snapshot in this memory; -1 when there is none."""
    snapshot = Snapshot(slot)
    try:
        return snapshot.step if snapshot.whole else -1
    finally:
        snapshot.close()
