"""The agent: one per node. Launches the ranks, leases chunks to them, gives their snapshots to the saver, watches all of them,
and writes down why the launch ended. Its standard input is its lifeline: end of file means save, stop, exit."""

import argparse
import json
import os
import select
import signal
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import msgspec

from perdure.training import events, files, slots
from perdure.training.agent import descendants, ending, extension_locks, roster
from perdure.training.agent.courier import Apart, Courier
from perdure.training.agent.ranks import Meeting, Ranks
from perdure.training.agent.room import Room
from perdure.training.agent.roster import Call, Held, Others
from perdure.training.agent.savers import Savers
from perdure.training.agent.watch import Deadlines
from perdure.training.checkpoint.lineage import LaunchEnd, write_end
from perdure.training.checkpoint.run_info import run_store
from perdure.training.config import RunConfig, load_config
from perdure.training.process import identify
from perdure.training.run_dir import CheckpointName
from perdure.training.wire import Message

TICK_SECS = 0.1
PROGRESS_SECS = 0.25
SLOTS = 2
"""Of each rank."""
NODES_PATIENCE = 2.0
"""Seconds after which it is said that other nodes are waited for."""
SETTLE_SECS = 5.0
"""A node that has not said which steps it has, and gives no sign of life for so long, is not waited for."""
SALVAGE_SECS = 3.0
"""What a rank killed at the end of its grace left in memory is given so long; launch.END_MARGIN_SECS is more."""
LAST_WORDS_SECS = 2.0
"""For other nodes to be told how this one ended, where no disk is shared."""
LEASE_NOTED_SECS = 1.0
"""Shorter waits between two chunks are the flow's turn."""
MAX_SLOW = 8
"""Slow ranks that are named, the slowest."""


@dataclass(frozen=True, kw_only=True)
class Launch:
    """What is to be launched; on every node the same."""

    config: RunConfig
    overrides: Sequence[str]
    run_id: str
    token: int
    resume: CheckpointName | None
    replan: bool


class Agent:
    def __init__(self, launch: Launch, node: int = 0) -> None:
        self.number = node
        config, token, resume = launch.config, launch.token, launch.resume
        self.launch, self.config, self.token, self.run = launch, config, token, config.directory
        files.make_dirs(self.run.logs(token, node))
        files.make_dirs(self.run.metrics(token).parent)
        self.slots = [
            [slots.create_slot(f"{token}-{rank}-{number}") for number in range(SLOTS)]
            for rank in range(config.launch.processes)
        ]
        start = resume.step if resume else 0
        self.savers = Savers(self.run, config, launch.run_id, token, start, self.slots, node, self.record)
        self.clear_locks()
        self.ranks = Ranks(self.run, config, token, resume, launch.replan, self.slots, node)
        self.room = Room(self.run, config, token)
        self.watch = Deadlines(config)
        self.courier = None if config.launch.shared_disk else Courier(self.run, token, node, run_store(self.run))
        self.clock = self.courier.listened if self.courier else time.monotonic
        """By which the silence of other nodes is measured."""
        self.others = Others(self.run, token, config.launch, self.clock)
        self._apart = Apart()
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
            self.record("notice", text=text)

    def record(self, kind: str, **data: object) -> None:
        events.record(self.run, kind, token=self.token, **data)

    def end_on_sigterm(self) -> None:
        def on_sigterm(*_: object) -> None:
            self.signalled = True

        signal.signal(signal.SIGTERM, on_sigterm)

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
                self.ask_for_room(rank, int(message["state_bytes"]), int(message["pieces"]))
            if "waiting_for_slot" in message and rank == 0:
                self.say_waiting(int(message["waiting_for_slot"]), message.get("waited"))
            if rank == 0 and "waited_for_lease" in message and float(message["waited"]) >= LEASE_NOTED_SECS:
                told = {"step": int(message["waited_for_lease"]), "seconds": float(message["waited"])}
                self.record("waiting_for_lease", **told)
            if "slow" in message:
                self.name_slow(message)
            if message.get("notice", "") not in self._said:
                self._said.add(message["notice"])
                self.record("notice", text=message["notice"])

    def ask_for_room(self, rank: int, state_bytes: int, pieces: int) -> None:
        self.room.ask(rank, state_bytes, pieces, self.ranks)

    def say_waiting(self, step: int, seconds: float | None) -> None:
        """A checkpoint is due and the saver has both slots: training waits, and nothing is lost."""
        if seconds is None:
            text = f"training waits at step {step}: the saver still writes both slots"
            self.record("waiting_for_slot", step=step, text=text)
        else:
            text = f"training waited {seconds:.1f} s at step {step} for the saver"
            self.record("waiting_for_slot", step=step, seconds=seconds, text=text)

    def name_slow(self, message: Message) -> None:
        """Each rank once a launch; `perdure status` has those of now."""
        self._slow = {int(rank): float(seconds) for rank, seconds in message["slow"][:MAX_SLOW]}
        if new := [rank for rank in self._slow if rank not in self._named]:
            self._named |= set(new)
            each = ", ".join(f"rank {rank} {self._slow[rank]:.3g} s" for rank in new)
            text = f"slow: {each} of work in a step, the median of {message['ranks']} ranks is {message['median']:.3g} s"
            self.record("slow_rank", step=message["at"], ranks=new, text=text)

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
        if not (self.stop_reason or self.ranks.started):
            state = "waiting for nodes"
        now = time.monotonic()
        if state == self._state and now - self._published < PROGRESS_SECS:
            return
        self._published, self._state, self._counter = now, state, self._counter + 1
        if self.courier and (text := self._apart.notice(self.courier.trouble)):
            self.record("notice", text=text)
        try:
            self.write_progress(state)
        except OSError:
            return  # a full disk: the next one may get through, and nothing depends on it

    def write_progress(self, state: str) -> None:
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
        files.publish(self.run.progress_json, json.dumps(progress).encode())

    def live(self) -> LaunchEnd:
        """Train until the ranks have ended and what they left in the slots is committed."""
        if self.courier:
            self.courier.start()
        self.gather()
        while self.ranks.is_alive():
            error_class, words = self.problem()  # of others, while ours are there
            if error_class:
                if error_class == "hang":
                    self.ranks.dump_stacks()
                self.ranks.kill()
                self.ranks.verdict = (error_class, words)
            elif time.monotonic() > self.stop_deadline:
                self.ranks.kill()
            self.turn()
        self.on_ranks()
        self.salvage()
        self.finish_saving()
        self.blame_others()
        return self.describe_end()

    def gather(self) -> None:
        """Start the ranks; those of several nodes once all nodes are there."""
        if not self.others.numbers:
            self.ranks.start()
            return
        with roster.listen(self.config.launch) as listener:
            host, port = listener.getsockname()
            meeting = Meeting(host, port, listener.fileno())
            self.wait_for_nodes(meeting)
            self.watch = Deadlines(self.config)
            if not self.stop_reason and not self.ranks.verdict[0]:
                self.ranks.start(meeting)

    def wait_for_nodes(self, meeting: Meeting) -> None:
        call = Call(
            token=self.token,
            run_id=self.launch.run_id,
            resume=str(self.launch.resume or ""),
            replan=self.launch.replan,
            overrides=tuple(self.launch.overrides),
            trajectory=self.config.trajectory(),
            address=meeting.host,
            port=meeting.port,
        )
        self.others.call(call)
        said, deadline = time.monotonic() + NODES_PATIENCE, time.monotonic() + self.config.launch.startup_timeout
        while not self.stop_reason and not self.ranks.verdict[0] and (missing := self.others.missing()):
            self.turn()
            self.ranks.verdict = self.others.failed()
            absent = f"node {', '.join(map(str, missing))}"
            if time.monotonic() > said:
                said = float("inf")
                self.record("notice", text=f"launch {self.token} waits for {absent}: `perdure node RUN.toml --node K` there")
            if time.monotonic() > deadline:
                limit = f"launch.startup_timeout = {self.config.launch.startup_timeout:g} s"
                self.ranks.verdict = ("infrastructure", f"{absent} did not join within {limit}")

    def problem(self) -> tuple[str, str]:
        """Error class and words of what ends the launch; "" while all is well."""
        if self.savers.lost:
            return "storage", self.savers.lost
        hang = self.watch.problem(self.ranks, paused=self.waits_for_disk)
        return ("hang", hang) if hang else self.others.failed()

    def salvage(self) -> None:
        """Save the newest step that all ranks have whole in memory."""
        if not self.others.numbers:
            self.savers.salvage(max(self.savers.held()))
        elif self.ranks.started:
            step = 0 if self.ranks.left else self.common_step()
            roster.settle(self.run, self.token, step)
            self.save_settled(step)

    def common_step(self) -> int:
        """The newest that all nodes hold; 0 for none, or where one does not say."""
        mine = self.tell_held()
        patience = SETTLE_SECS if self.config.launch.shared_disk else 2 * SETTLE_SECS  # a courier takes its time
        deadline = min(time.monotonic() + self.config.launch.node_timeout, self.stop_deadline + SALVAGE_SECS)
        while (theirs := self.others.held()) is None and time.monotonic() < deadline and not self.others.silent(patience):
            self.turn()
        if theirs is None:
            self.record("notice", text="not every node has said what it has in memory: none of that is saved")
            return 0
        return max(mine.intersection(*theirs), default=0)

    def tell_held(self) -> set[int]:
        steps, (error_class, detail) = self.savers.held(), self.why_gone()
        held = Held(steps=tuple(sorted(steps)), error_class=error_class, detail=detail)
        roster.tell_held(self.run, self.token, self.number, held)
        return steps

    def why_gone(self) -> tuple[str, str]:
        """Error class and words of why our ranks are gone."""
        end = self.describe_end()
        return end.error_class, end.detail

    def save_settled(self, step: int) -> None:
        if step:
            self.savers.give_up_after(step)
            self.savers.salvage(step)

    def finish_saving(self) -> None:
        """Give the saver what it needs, but not for ever where it waits for a node that is gone."""
        deadline = float("inf")
        while self.savers.busy and time.monotonic() < min(self.stop_deadline + SALVAGE_SECS, deadline):
            if self.others.numbers and self.savers.lost:
                return  # the others' savers wait for what we have given up
            self.turn()
            if deadline == float("inf") and (name := self.savers.saving) and self.others.gone_without(name):
                deadline = time.monotonic() + SALVAGE_SECS

    def blame_others(self) -> None:
        """Whose ranks lost their connection are not to blame where another node says more."""
        if self.ranks.failure[0] in ("", "infrastructure") and not (self.ranks.killed or self.ranks.left):
            said = self.others.look()
            if said[0] not in ("", "infrastructure") or (said[0] and self.ranks.status >= 0):
                self.ranks.verdict = said

    def describe_end(self) -> LaunchEnd:
        return ending.describe(self.config, self.token, self.ranks, self.stop_reason, saving=self.savers.busy)

    def end(self) -> None:
        self.ranks.kill()
        self.savers.end()
        descendants.end_all()
        self.ranks.close()
        if self.courier:
            self.courier.end(LAST_WORDS_SECS)


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
    run = config.directory
    files.write_atomically(run.agent_json, msgspec.json.encode(identify()))
    launch = Launch(
        config=config,
        overrides=options.set,
        run_id=options.run_id,
        token=options.token,
        resume=CheckpointName.parse(options.resume),
        replan=options.replan,
    )
    agent = Agent(launch)
    agent.end_on_sigterm()
    try:
        write_end(run, agent.live())
    finally:
        agent.end()


if __name__ == "__main__":
    main()
