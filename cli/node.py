"""`perdure node`: runs on every node but node 0 of a run of several. Waits for a launch, takes part in it, waits for the next;
ends with the run."""

import argparse
import os
import signal
import subprocess
import sys
import time

from perdure.cli import render
from perdure.training import files
from perdure.training.agent import courier, roster
from perdure.training.agent.launch import for_trainers
from perdure.training.agent.lock import end_process
from perdure.training.checkpoint import lineage
from perdure.training.config import RunConfig, load_config
from perdure.training.errors import ConfigError, Stopped, StoreError
from perdure.training.process import identify
from perdure.training.storage.store import ObjectStore, open_store
from perdure.training.travel.catch_up import catch_up

POLL_SECS = 1.0


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("config", metavar="RUN.TOML", help="describes the run, as on node 0")
    parser.add_argument("--node", type=int, required=True, metavar="K", help="which node this is, from 1")
    parser.add_argument("--set", action="append", default=[], metavar="KEY=VALUE", help="override a setting that finds the run")


def run(args: argparse.Namespace) -> int:
    config = load_config(args.config, args.set)
    last = config.launch.nodes - 1
    if not 1 <= args.node <= last:
        fix = (
            f"give a number from 1 to {last}; node 0 is where `perdure run` runs"
            if last
            else "set it to the number of machines"
        )
        raise ConfigError(f"--node {args.node}: {config.path} has launch.nodes = {config.launch.nodes}", fix)
    step = _Member(config, args.node).go()
    if args.json:
        render.print_json({"run_dir": str(config.run_dir), "node": args.node, "step": step})
    else:
        print(f"Run {config.run_dir} is finished: step {step}.")
    return 0


class _Member:
    """One launch after another."""

    def __init__(self, config: RunConfig, number: int) -> None:
        self.config, self.number, self.run = config, number, config.directory
        self.token = 0
        """Of the newest launch that we were in."""
        self.agent: subprocess.Popen[bytes] | None = None
        self.signalled = 0
        self.store = None if config.launch.shared_disk else open_store(config.store_url, config.store)
        self.trouble = ""
        """Why the store cannot be reached."""

    def go(self) -> int:
        """The last step, once it is committed. Raises Stopped when the run is, or this process is asked to."""
        before = {number: signal.signal(number, self._on_signal) for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)}
        self._say("waits for a launch")
        try:
            self._catch_up()
            while not self._is_complete():
                self._follow()
            return self._newest_step()
        finally:
            for number, handler in before.items():
                signal.signal(number, handler)

    def _is_complete(self) -> bool:
        """By its run.toml, or, where node 0 was told another last step, by the launch that we were in."""
        end = lineage.read_end(self.run, self.token)
        return self._newest_step() >= self.config.run.steps or (end is not None and end.reason == "complete")

    def _newest_step(self) -> int:
        names = lineage.lineage(self.run)
        return names[0].step if names else 0

    def _on_signal(self, number: int, _: object) -> None:
        self.signalled = self.signalled or number
        if self.agent is not None:
            self.agent.send_signal(signal.SIGTERM)

    def _follow(self) -> None:
        """Take part in the next launch, if there is one."""
        token = self._find_call()
        if token and not self.signalled:
            self._clear_away(token)
            self._take_part(token)
            self._stop_with_the_run()
        if self.signalled:
            name = signal.Signals(self.signalled).name
            raise Stopped(f"node {self.number} was stopped by {name}", "the same command goes on")
        time.sleep(POLL_SECS)

    def _find_call(self) -> int:
        """Token of a launch that lacks this node; 0 for none."""
        if self.store is not None:
            return self._find_call_in(self.store)
        call = roster.read_call(self.run)
        return call.token if call and roster.read_node(self.run, call.token, self.number) is None else 0

    def _find_call_in(self, store: ObjectStore) -> int:
        """Without a shared disk: bring the call here, and take the place before any other machine does."""
        try:
            if self.token and not self.run.launch_end(self.token).exists() and courier.bring_end(self.run, self.token, store):
                self._catch_up()
            token = courier.open_call(store, self.number)
            if token and not (self._catch_up() and courier.take_place(store, token, self.number, identify())):
                token = 0
            if token:
                courier.Courier(self.run, token, self.number, store).exchange()
            self._hear("")
        except StoreError as error:
            if not error.retryable:
                raise
            self._hear(str(error))
            return 0
        return token

    def _catch_up(self) -> bool:
        """Without a shared disk: what the store knows of the run."""
        try:
            return self.store is not None and catch_up(self.config, self.store, self._say)
        except StoreError as error:
            if not error.retryable:
                raise
            self._hear(str(error))
            return False

    def _hear(self, trouble: str) -> None:
        if bool(trouble) != bool(self.trouble):
            self._say(f"waits for the store: {trouble}" if trouble else "reaches the store again")
        self.trouble = trouble

    def _clear_away(self, token: int) -> None:
        """What this node has left of an older launch, on this machine."""
        for older in sorted(lineage.read_launches(self.run), reverse=True):
            beat = roster.read_node(self.run, older, self.number) if older < token else None
            if beat is not None:
                end_process(beat.process, grace=0.0)
                return

    def _take_part(self, token: int) -> None:
        self.token, logs = token, self.run.logs(token, self.number)
        files.make_dirs(logs)
        self._say(f"joins launch {token}")
        command = [sys.executable, "-m", "perdure.training.agent.node", str(self.config.path), str(self.run.root)]
        command += [str(self.number), str(token), str(os.getpid())]
        with files.open_private(logs / "agent.log") as log:
            self.agent = subprocess.Popen(
                command, stdin=subprocess.DEVNULL, stdout=log, stderr=log, start_new_session=True, env=for_trainers(os.environ)
            )
        if self.signalled:
            self.agent.send_signal(signal.SIGTERM)
        self.agent.wait()
        end = lineage.read_end(self.run, token, self.number)
        self._say(f"left launch {token}: {end.reason + ' ' + end.detail if end else f'see {logs}/agent.log'}")

    def _stop_with_the_run(self) -> None:
        end = lineage.read_end(self.run, self.token, self.number)
        if end is not None and end.reason == "stopped":
            raise Stopped(f"the run was stopped at step {end.step}", "the same command goes on")

    def _say(self, text: str) -> None:
        print(f"{time.strftime('%H:%M:%S')} node {self.number} of {self.run.root} {text}", file=sys.stderr, flush=True)
