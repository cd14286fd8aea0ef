"""The agent of a node other than node 0: joins one launch of the run and takes its share. Node 0 decides all else: when to save
and to stop reaches the ranks by their own agreement, and what of dead ranks is saved. When node 0 is gone nothing is saved."""

import argparse
import signal
import sys
import time
from pathlib import Path

import msgspec

from perdure.training import files
from perdure.training.agent import descendants, roster
from perdure.training.agent.main import SALVAGE_SECS, Agent, Launch
from perdure.training.agent.ranks import Meeting
from perdure.training.agent.roster import Beat, Call, Caller, join, read_call
from perdure.training.checkpoint.lineage import LaunchEnd, write_end
from perdure.training.config import RunConfig, changed_settings, load_config
from perdure.training.errors import ConfigError, PerdureError
from perdure.training.process import die_with_parent, identify
from perdure.training.run_dir import CheckpointName, RunDir

ALL_STEPS = 1 << 60
"""Lease of these ranks: how far the launch may train, node 0's are told."""


class NodeAgent(Agent):
    def __init__(self, launch: Launch, number: int, call: Call) -> None:
        super().__init__(launch, number)
        self._call = call
        self.lifeline = False
        self._gone_with_node_0 = False
        """Our ranks were ended because those of node 0 were gone."""
        self._caller = Caller(self.run, self.token, self.config.launch.node_timeout, self.clock)
        self._process = identify()
        self.ranks.lease(ALL_STEPS)

    def record(self, kind: str, **data: object) -> None:
        """Into our own log: the event log is node 0's."""
        print(kind, data, flush=True)

    def ask_for_room(self, rank: int, state_bytes: int, pieces: int) -> None:
        """Node 0 asks for all."""
        self.ranks.ranks[rank].send({"room": True})

    def write_progress(self, state: str) -> None:
        beat = Beat(process=self._process, counter=self._counter, step=self.ranks.step, state=state)
        files.publish(self.run.node(self.token, self.number), msgspec.json.encode(beat))

    def gather(self) -> None:
        self.ranks.start(Meeting(self._call.address, self._call.port))

    def problem(self) -> tuple[str, str]:
        if self.savers.lost:
            return "storage", self.savers.lost
        over, end, held = self._caller.over(), self._caller.end, self._caller.held
        if held is not None:
            self._gone_with_node_0 = not self.ranks.failure[0]
            gone = ("hang" if held.error_class == "hang" else "infrastructure", "the ranks of node 0 are gone")
            return gone if self._gone_with_node_0 else self.ranks.failure
        if end is None or end.reason == "failed":
            return ("hang" if end and end.error_class == "hang" else "infrastructure" if over else ""), over
        self.stop_deadline = min(self.stop_deadline, time.monotonic() + self.config.launch.stop_grace)
        if self.ranks.phase in ("starting", "setup"):
            self.ranks.kill()
        return "", ""

    def stop(self, reason: str) -> None:
        """The launch stops with its state saved, or, before its ranks have met, ends as one that lost a node."""
        if self.ranks.phase in ("starting", "setup"):
            self.ranks.verdict = ("infrastructure", f"ended by {reason} before its ranks had met the others")
        super().stop(reason)

    def salvage(self) -> None:
        """Save what node 0 settles on, once all have told it what they have."""
        if self.ranks.left:
            return
        self.tell_held()
        while (settled := roster.read_settled(self.run, self.token)) is None and not self._is_over():
            self.turn()
        self.save_settled(settled.step if settled else 0)

    def _is_over(self) -> bool:
        """Node 0 has said so, or is gone; or we were asked to stop and it cannot be heard."""
        return bool(self._caller.over()) or time.monotonic() > self.stop_deadline + SALVAGE_SECS

    def why_gone(self) -> tuple[str, str]:
        """Node 0 knows better where its own went first."""
        return ("", "") if self._gone_with_node_0 else super().why_gone()

    def finish_saving(self) -> None:
        while self.savers.busy and not self.savers.lost and not self._is_over():
            self.turn()

    def blame_others(self) -> None:
        pass


def refuse_another_run(config: RunConfig, call: Call) -> None:
    """Raises ConfigError where this node's run.toml decides the weights otherwise than node 0's."""
    if changed := changed_settings(call.trajectory, config.trajectory()):
        raise ConfigError(f"{config.path} decides the weights otherwise than on node 0: {'; '.join(changed)}", "use the same")


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("config")
    parser.add_argument("run_dir")
    for name in ("node", "token", "parent"):
        parser.add_argument(name, type=int)
    options = parser.parse_args()
    die_with_parent(options.parent)
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    files.set_role("agent")
    descendants.adopt_orphans()
    run = RunDir(Path(options.run_dir))
    call = read_call(run)
    if call is None or call.token != options.token or not join(run, call.token, options.node, identify()):
        sys.exit(f"launch {options.token} is over, or has a node {options.node}")
    try:
        config = load_config(options.config, [*call.overrides, f"run.dir={run.root}"])
        refuse_another_run(config, call)
    except PerdureError as error:
        problem = {"reason": "failed", "error_class": "config", "detail": str(error)}
        write_end(run, LaunchEnd(token=call.token, step=0, log_tail="", ended=time.time(), **problem), options.node)
        sys.exit(str(error))
    resume = CheckpointName.parse(call.resume)
    launch = Launch(
        config=config, overrides=call.overrides, run_id=call.run_id, token=call.token, resume=resume, replan=call.replan
    )
    agent = NodeAgent(launch, options.node, call)
    agent.end_on_sigterm()
    try:
        write_end(run, agent.live(), options.node)
    finally:
        agent.end()


if __name__ == "__main__":
    main()
