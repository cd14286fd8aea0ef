"""`perdure run run.toml`: train to the last step, whatever happens. Parent of one flow process, replaced when it dies."""

import argparse
import contextlib
import json
import os
import signal
import subprocess
import sys
import time
from typing import Any

from perdure.cli import watch
from perdure.deployments import api, server
from perdure.flows.restart import Attempt, attempts_of, decide
from perdure.tasks import flow_runs
from perdure.training import events, files
from perdure.training.agent.launch import END_MARGIN_SECS
from perdure.training.agent.lock import LOCK_FD_VARIABLE, RunLock, end_agent
from perdure.training.checkpoint import catalog, facts, lineage
from perdure.training.config import RunConfig, load_config
from perdure.training.errors import PerdureError, Stopped, TrainingFailed
from perdure.training.run_dir import RunDir

POLL_SECS = 0.2
CLOSE_SECS = 30.0
"""For closing a dead flow run's rows, where no other flow run follows that would."""
FLOW_MARGIN_SECS = 15.0
"""What a stopping flow needs beyond the trainer's grace: pushing the last checkpoint, closing its rows in Prefect."""
_Outcome = dict[str, Any]  # Any: JSON values


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("config", metavar="RUN.TOML", help="describes the run; see docs/configuration.md")
    parser.add_argument(
        "--set", action="append", default=[], metavar="KEY=VALUE", help="override a setting, e.g. run.steps=1000"
    )
    parser.add_argument(
        "--replan", action="store_true", help="accept changed settings that decide the weights, and record them"
    )
    parser.add_argument("--keep-server", action="store_true", help="leave the local Prefect server running at the end")


def run(args: argparse.Namespace) -> int:
    config = load_config(args.config, args.set)
    run_dir = config.directory
    with RunLock.acquire(run_dir, orphan_wait=config.launch.stop_grace + END_MARGIN_SECS) as lock:
        done = _already_finished(config, run_dir)
        if done is not None:
            return _report(args, run_dir, done)
        with contextlib.ExitStack() as stack:
            local = None
            if not api.chosen():
                home = server.ServerHome.beside(run_dir)
                print(f"starting a local Prefect server in {home.root} ...", file=sys.stderr, flush=True)
                local = stack.enter_context(server.acquire(home, keep=args.keep_server))
            outcome = _Parent(args, config, lock, local).go()
    return _report(args, run_dir, outcome)


def _already_finished(config: RunConfig, run_dir: RunDir) -> _Outcome | None:
    """The answer without starting anything, when the last step is committed, proven, and copied where it should be."""
    names = catalog.candidates(run_dir)
    if flow_runs.died(run_dir):
        return None  # a flow run that still says Running in Prefect is closed by the next one
    if not names or names[0].step < config.run.steps or facts.trust(run_dir, names[0]) not in facts.GOOD:
        return None
    if config.store_url and not facts.is_in(run_dir, names[0], facts.STORE):
        return None
    manifest = catalog.manifest_of(run_dir, names[0])
    result = {"step": names[0].step, "state_digest": manifest.state_digest, "checkpoint": str(names[0]), "already": True}
    return {"exit_code": 0, "message": "", "hint": "", "result": result}


class _Parent:
    """Starts flow processes, one at a time, until one ends by its own decision."""

    def __init__(self, args: argparse.Namespace, config: RunConfig, lock: RunLock, local: server.LocalServer | None) -> None:
        self.args, self.config, self.lock, self.local = args, config, lock, local
        self.run = config.directory
        self.watcher = watch.Watcher(
            self.run, config, local.ui_url if local else server.api_url_from_environment(), quiet=args.json
        )
        self.since = max(lineage.read_launches(self.run), default=0) + 1
        self.signalled = 0
        self.deaths = 0

    def go(self) -> _Outcome:
        before = {number: signal.signal(number, self._on_signal) for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)}
        try:
            while True:
                outcome = self._one_flow()
                if outcome is not None:
                    return outcome
        finally:
            self.watcher.close()
            self._close_rows()
            for number, handler in before.items():
                signal.signal(number, handler)

    def _on_signal(self, number: int, _: object) -> None:
        self.signalled = self.signalled or number

    def _one_flow(self) -> _Outcome | None:
        """The outcome of one flow process; None when it died and another shall be started."""
        newest = self._newest_step()
        flow = self._spawn()
        outcome = self._follow(flow)
        if outcome is not None and outcome["exit_code"] not in (70,):
            return outcome
        end_agent(self.run, grace=self.config.launch.stop_grace + END_MARGIN_SECS)
        if self.signalled:
            name = signal.Signals(self.signalled).name
            message = f"stopped by {name} at step {self._newest_step()}"
            return {"exit_code": Stopped.exit_code, "message": message, "hint": "the same command goes on"}
        self.deaths = 1 if self._newest_step() > newest else self.deaths + 1
        return self._after_death(flow.returncode, (outcome or {}).get("message", ""))

    def _newest_step(self) -> int:
        names = lineage.lineage(self.run)
        return names[0].step if names else 0

    def _after_death(self, status: int, message: str) -> _Outcome | None:
        lost = [Attempt(error_class="infrastructure", progress=False)] * self.deaths
        decision = decide([*attempts_of(self.run, self.since), *lost])
        detail = message or f"flow process ended with status {status}"
        events.record(
            self.run, "failed", error_class="infrastructure", step=self._newest_step(), detail=detail, next=decision.reason
        )
        if not decision.restart:
            hint = f"see {self.run.root}/logs/flow.log"
            return {"exit_code": TrainingFailed.exit_code, "message": f"{detail}; {decision.reason}", "hint": hint}
        until = time.monotonic() + decision.delay
        while time.monotonic() < until and not self.signalled:
            self.watcher.look()
            time.sleep(POLL_SECS)
        return None

    def _spawn(self) -> subprocess.Popen[bytes]:
        command = [sys.executable, "-m", "perdure.flows.main", "--config", str(self.config.path), "--since", str(self.since)]
        command += [part for text in self.args.set for part in ("--set", text)] + ["--replan"] * self.args.replan
        command += ["--parent", str(os.getpid())]
        held = (self.lock.fd,) if self.local is None else (self.lock.fd, self.local.fd)
        files.make_dirs(self.run.flow_log.parent)
        with files.open_private(self.run.flow_log) as log:
            return subprocess.Popen(
                command,
                stdin=subprocess.DEVNULL,
                stdout=subprocess.PIPE,
                stderr=log,
                env={**self._environment(), LOCK_FD_VARIABLE: str(self.lock.fd)},
                pass_fds=held,
                start_new_session=True,
            )

    def _environment(self) -> dict[str, str]:
        url, home = (self.local.url, self.local.home) if self.local else (server.api_url_from_environment(), None)
        return {**os.environ, **server.client_environment(url, home)}

    def _close_rows(self) -> None:
        """The last flow process died, and no other follows that would close what it left Running in Prefect."""
        if not flow_runs.died(self.run):
            return
        command = [sys.executable, "-m", "perdure.flows.close", "--config", str(self.config.path)]
        command += [part for text in self.args.set for part in ("--set", text)]
        with files.open_private(self.run.flow_log) as log, contextlib.suppress(subprocess.TimeoutExpired):
            subprocess.run(
                command,
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=log,
                env=self._environment(),
                timeout=CLOSE_SECS,
                check=False,
            )

    def _follow(self, flow: subprocess.Popen[bytes]) -> _Outcome | None:
        """Show what happens until the flow process has ended; pass a stop on to it, once, and kill it after its grace."""
        deadline = float("inf")
        while flow.poll() is None:
            self.watcher.look()
            if self.signalled and deadline == float("inf"):
                self.watcher.say("stopping: saving the current step first")
                flow.send_signal(signal.SIGTERM)
                deadline = time.monotonic() + self.config.launch.stop_grace + END_MARGIN_SECS + FLOW_MARGIN_SECS
            if time.monotonic() > deadline:
                flow.kill()
            time.sleep(POLL_SECS)
        self.watcher.look()
        assert flow.stdout is not None
        with flow.stdout as answer:
            lines = answer.read().splitlines()
        try:
            return dict(json.loads(lines[-1]))
        except (IndexError, ValueError):
            return None


def _report(args: argparse.Namespace, run_dir: RunDir, outcome: _Outcome) -> int:
    code = int(outcome["exit_code"])
    if code:
        error = PerdureError(str(outcome["message"]), str(outcome.get("hint", "")))
        error.exit_code = code
        raise error
    result = outcome["result"]
    if args.json:
        print(json.dumps({"run_dir": str(run_dir.root), **result}))
    else:
        verb = "was already finished" if result.get("already") else "is finished"
        digest = f"state digest {result['state_digest'][:16]}..."
        print(f"Run {run_dir.root} {verb}: step {result['step']}, {digest}, checkpoint {result['checkpoint']}.")
    return 0
