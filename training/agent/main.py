"""The agent: one per node. Launches the ranks, leases chunks to them, gives their snapshots to the saver, watches all of them,
and writes down why the launch ended. Its standard input is its lifeline: end of file means save, stop, exit."""

import argparse
import json
import os
import select
import signal
import time
from collections.abc import Callable
from pathlib import Path

import msgspec

from perdure.training import events, files, slots
from perdure.training.agent import descendants, extension_locks
from perdure.training.agent.ranks import Ranks
from perdure.training.agent.room import Room
from perdure.training.agent.savers import Savers
from perdure.training.agent.watch import Deadlines
from perdure.training.checkpoint.lineage import LaunchEnd, write_end
from perdure.training.config import RunConfig, load_config
from perdure.training.process import identify
from perdure.training.redact import redact
from perdure.training.run_dir import CheckpointName, RunDir
from perdure.training.wire import Message

TICK_SECS = 0.1
PROGRESS_SECS = 0.25
SLOTS = 2
"""Of each rank."""
SALVAGE_SECS = 3.0
"""What a rank killed at the end of its grace left in memory is given so long; launch.END_MARGIN_SECS is more."""
LEASE_NOTED_SECS = 1.0
"""Shorter waits between two chunks are the flow's turn."""
MAX_SLOW = 8
"""Slow ranks that are named, the slowest."""
LOG_TAIL_LINES = 15
LOG_TAIL_BYTES = 8000


class Agent:
    def __init__(self, config: RunConfig, run_id: str, token: int, resume: CheckpointName | None, replan: bool) -> None:
        self.config, self.token, self.run = config, token, RunDir(config.run_dir)
        self.log_dir = self.run.logs(token)
        files.make_dirs(self.log_dir)
        files.make_dirs(self.run.metrics(token).parent)
        self.slots = [
            [slots.create_slot(f"{token}-{rank}-{number}") for number in range(SLOTS)]
            for rank in range(config.launch.processes)
        ]
        self.saver_log = open(self.log_dir / "saver.log", "ab")
        self.savers = Savers(self.run, config, run_id, token, resume.step if resume else 0, self.slots, self.saver_log)
        self.clear_locks()
        self.ranks = Ranks(self.run, config, token, resume, replan, self.slots)
        self.room = Room(self.run, config, token)
        self.watch = Deadlines(config)
        self.signalled = False
        self.stop_reason = ""
        self.stop_deadline = float("inf")
        self.lifeline = True
        self._said = {""}
        """Notices of the ranks: all come upon the same."""
        self._slow: dict[int, float] = {}
        """Ranks that are slow now, with the seconds they work in a step."""
        self._named: set[int] = set()
        self._line = b""
        self._counter = 0
        self._published = 0.0
        self._state = ""

    def clear_locks(self) -> None:
        """Of extension builds that were killed: the ranks would wait for them for ever."""
        removed, left = extension_locks.clear(extension_locks.cache_of({**os.environ, **self.config.launch.env}))
        texts = [f"removed {path}: a build that was killed had left it" for path in removed]
        texts += [f"the ranks may wait for {path} for ever, which nobody here holds: remove it" for path in left]
        for text in texts:
            events.record(self.run, "notice", text=text, token=self.token)

    # what comes in

    def on_lifeline(self) -> None:
        data = os.read(0, 1 << 16)
        if not data:
            self.lifeline = False
            self.stop("the flow process is gone")
            return
        *lines, self._line = (self._line + data).split(b"\n")
        for line in lines:
            self.on_order(json.loads(line))

    def on_order(self, order: Message) -> None:
        if "lease" in order:
            self.ranks.lease(int(order["lease"]))
        if order.get("save"):
            self.ranks.send({"save": True})
        if "stop" in order:
            self.stop(str(order["stop"]))

    def stop(self, reason: str) -> None:
        """Ask the ranks to save and leave at the next step boundary; before its first step there is nothing to save."""
        if self.stop_reason:
            return
        self.stop_reason = reason
        self.stop_deadline = time.monotonic() + self.config.launch.stop_grace
        if self.ranks.phase in ("starting", "setup"):
            self.ranks.kill()
        else:
            self.ranks.send({"stop": reason})

    def on_ranks(self) -> None:
        for rank, message in self.ranks.receive():
            if "snapshot" in message:
                self.savers.take_in(rank, int(message["snapshot"]), int(message["step"]))
            if "state_bytes" in message:
                self.room.ask(rank, int(message["state_bytes"]), int(message["pieces"]), self.ranks)
            if "waiting_for_slot" in message and rank == 0:
                self.say_waiting(int(message["waiting_for_slot"]), message.get("waited"))
            if rank == 0 and "waited_for_lease" in message and float(message["waited"]) >= LEASE_NOTED_SECS:
                told = {"step": int(message["waited_for_lease"]), "seconds": float(message["waited"])}
                events.record(self.run, "waiting_for_lease", token=self.token, **told)
            if "slow" in message:
                self.name_slow(message)
            if message.get("notice", "") not in self._said:
                self._said.add(message["notice"])
                events.record(self.run, "notice", text=message["notice"], token=self.token)

    def say_waiting(self, step: int, seconds: float | None) -> None:
        """A checkpoint is due and the saver has both slots: training waits, and nothing is lost."""
        if seconds is None:
            text = f"training waits at step {step}: the saver still writes both slots"
            events.record(self.run, "waiting_for_slot", token=self.token, step=step, text=text)
        else:
            text = f"training waited {seconds:.1f} s at step {step} for the saver"
            events.record(self.run, "waiting_for_slot", token=self.token, step=step, seconds=seconds, text=text)

    def name_slow(self, message: Message) -> None:
        """Each rank once a launch; `perdure status` has those of now."""
        self._slow = {int(rank): float(seconds) for rank, seconds in message["slow"][:MAX_SLOW]}
        if new := [rank for rank in self._slow if rank not in self._named]:
            self._named |= set(new)
            each = ", ".join(f"rank {rank} {self._slow[rank]:.3g} s" for rank in new)
            text = f"slow: {each} of work in a step, the median of {message['ranks']} ranks is {message['median']:.3g} s"
            events.record(self.run, "slow_rank", token=self.token, step=message["at"], ranks=new, text=text)

    # the loop

    def turn(self) -> None:
        """Wait for something to happen, at most a tick, and react."""
        watched: dict[int, Callable[[], None]] = dict.fromkeys(self.ranks.sources, self.on_ranks)
        watched[self.savers.wire.socket.fileno()] = self.savers.on_messages
        if self.lifeline:
            watched[0] = self.on_lifeline
        ready, _, _ = select.select(list(watched), [], [], TICK_SECS)
        for react in {watched[source]: None for source in ready}:
            react()
        if self.savers.process.poll() is not None:
            self.savers.on_death()
        if self.signalled:
            self.stop("SIGTERM")
        self.savers.work()
        self.room.work(self.ranks)
        for freed in self.savers.take_freed():
            self.ranks.free(freed)
        self.publish()

    @property
    def waits_for_disk(self) -> bool:
        return self.savers.disk_full or self.room.waiting

    def publish(self) -> None:
        state = "stopping" if self.stop_reason else "waiting for disk" if self.waits_for_disk else self.ranks.phase
        now = time.monotonic()
        if state == self._state and now - self._published < PROGRESS_SECS:
            return
        self._published, self._state, self._counter = now, state, self._counter + 1
        progress = {
            "counter": self._counter,
            "time": time.time(),
            "token": self.token,
            "state": state,
            "step": self.ranks.step,
            "committed_step": self.savers.committed_step,
            "lease": self.ranks.leased,
            "slow": self._slow,
        }
        try:
            files.publish(self.run.progress_json, json.dumps(progress).encode())
        except OSError:
            return  # a full disk: the next one may get through, and nothing depends on it

    def live(self) -> LaunchEnd:
        """Train until the ranks have ended and what they left in the slots is committed."""
        while self.ranks.is_alive():
            self.turn()
            problem = self.savers.lost or self.watch.problem(self.ranks, paused=self.waits_for_disk)
            if problem:
                if not self.savers.lost:
                    self.ranks.dump_stacks()
                self.ranks.kill()
                self.ranks.verdict = ("storage" if self.savers.lost else "hang", problem)
            elif time.monotonic() > self.stop_deadline:
                self.ranks.kill()
        self.on_ranks()
        self.savers.salvage()
        while self.savers.busy and time.monotonic() < self.stop_deadline + SALVAGE_SECS:
            self.turn()
        return self.describe_end()

    def describe_end(self) -> LaunchEnd:
        status = self.ranks.status
        error_class, detail = self.ranks.failure
        whole = status == 0 and not self.savers.busy
        if self.ranks.finished and whole:
            reason, error_class, detail = "complete", "", ""
        elif (self.ranks.stopped and whole) or (self.stop_reason and not error_class and self.ranks.killed):
            reason, detail = "stopped", self.stop_reason or f"{self.ranks.name} was asked to stop"
        else:
            reason = "failed"
            silent_class, silent_detail = self.ranks.silent_end
            error_class, detail = error_class or silent_class, detail or silent_detail
        seen = {**os.environ, **self.config.launch.env}  # by the ranks, which may have printed it
        return LaunchEnd(
            token=self.token,
            reason=reason,
            error_class=error_class,
            step=self.ranks.step,
            detail=redact(detail, seen),
            log_tail=redact(_tail(self.ranks.log_path), seen),
            ended=time.time(),
        )

    def end(self) -> None:
        self.ranks.kill()
        self.savers.end()
        descendants.end_all()
        self.ranks.close()


def _tail(path: Path) -> str:
    try:
        with open(path, "rb") as file:
            file.seek(max(0, path.stat().st_size - LOG_TAIL_BYTES))
            return "\n".join(file.read().decode(errors="replace").splitlines()[-LOG_TAIL_LINES:])
    except FileNotFoundError:
        return ""


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--config", required=True)
    parser.add_argument("--set", action="append", default=[])
    parser.add_argument("--run-id", required=True)
    parser.add_argument("--token", type=int, required=True)
    parser.add_argument("--resume", default="")
    parser.add_argument("--replan", action="store_true")
    options = parser.parse_args()
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    files.set_role("agent")
    descendants.adopt_orphans()
    config = load_config(options.config, options.set)
    run = RunDir(config.run_dir)
    files.write_atomically(run.agent_json, msgspec.json.encode(identify()))
    agent = Agent(config, options.run_id, options.token, CheckpointName.parse(options.resume), options.replan)

    def on_sigterm(*_: object) -> None:
        agent.signalled = True

    signal.signal(signal.SIGTERM, on_sigterm)
    try:
        write_end(run, agent.live())
    finally:
        agent.end()


if __name__ == "__main__":
    main()
