"""The flow's side of a launch: start the agent, lease steps to it, see checkpoints appear, end it. All that is known about the
launch's result is read from the run directory."""

import contextlib
import json
import os
import subprocess
import sys
import time
from collections.abc import Callable, Mapping, Sequence

import msgspec

from perdure.training import files
from perdure.training.agent.commands import refuse_what_cannot_start
from perdure.training.agent.lock import LOCK_FD_VARIABLE, RunLock, end_agent
from perdure.training.checkpoint.lineage import LaunchEnd, read_end
from perdure.training.config import RunConfig
from perdure.training.process import end_session
from perdure.training.run_dir import CheckpointName

POLL_SECS = 0.02
END_MARGIN_SECS = 5.0
_SECRET_PREFIXES = ("SLACK_", "PREFECT_")
"""Variables of ours that a trainer has no use for and must not be able to print."""


def for_trainers(environment: Mapping[str, str]) -> dict[str, str]:
    """Without what a trainer must not see."""
    return {k: v for k, v in environment.items() if not k.startswith(_SECRET_PREFIXES) and k != LOCK_FD_VARIABLE}


class _Beat(msgspec.Struct, frozen=True, kw_only=True):
    token: int
    step: int


class Trainer:
    """One launch. Use `start`; always `end` it."""

    def __init__(self, config: RunConfig, token: int, began: int, process: subprocess.Popen[bytes]) -> None:
        self.config, self.token, self.began, self.process = config, token, began, process
        self.run = config.directory

    @classmethod
    def start(
        cls,
        config: RunConfig,
        overrides: Sequence[str],
        lock: RunLock,
        *,
        run_id: str,
        token: int,
        resume: CheckpointName | None,
        replan: bool,
        environment: Mapping[str, str] = os.environ,
    ) -> "Trainer":
        """Launch an agent once every earlier one on this host is gone. It inherits the run's lock, and `environment` without
        what a trainer must not see. Raises ConfigError when the launch command cannot be started here."""
        refuse_what_cannot_start(config, environment)
        run = config.directory
        end_agent(run, grace=config.launch.stop_grace + END_MARGIN_SECS)
        files.make_dirs(run.logs(token))
        command = [sys.executable, "-m", "perdure.training.agent.main", "--config", str(config.path)]
        command += [part for text in overrides for part in ("--set", text)]
        command += ["--run-id", run_id, "--token", str(token), "--resume", str(resume or "")] + ["--replan"] * replan
        with files.open_private(run.logs(token) / "agent.log") as log:
            process = subprocess.Popen(
                command,
                stdin=subprocess.PIPE,
                stdout=log,
                stderr=log,
                start_new_session=True,
                pass_fds=(lock.fd,),
                env=for_trainers(environment),
            )
        return cls(config, token, resume.step if resume else 0, process)

    def _order(self, **order: object) -> None:
        assert self.process.stdin is not None
        try:
            self.process.stdin.write(json.dumps(order).encode() + b"\n")
            self.process.stdin.flush()
        except BrokenPipeError:
            return  # the agent is gone; whoever waits for it finds out

    def lease(self, step: int) -> None:
        """Allow training up to and including `step`."""
        self._order(lease=step)

    def stop(self, reason: str) -> None:
        self._order(stop=reason)

    def is_alive(self) -> bool:
        return self.process.poll() is None

    def wait_for_checkpoint(self, step: int, each_poll: Callable[[], None]) -> bool:
        """True when this launch's checkpoint of `step` is committed, False when the launch has ended without it."""
        manifest = self.run.manifest(CheckpointName(step, self.token))
        while not manifest.exists():
            if not self.is_alive():
                return manifest.exists()
            each_poll()
            time.sleep(POLL_SECS)
        return True

    def end(self, timeout: float) -> LaunchEnd:
        """Close the lifeline, wait for the agent (which saves), kill it if it takes longer; say how the launch ended."""
        assert self.process.stdin is not None
        with contextlib.suppress(BrokenPipeError):
            self.process.stdin.close()
        try:
            self.process.wait(timeout)
        except subprocess.TimeoutExpired:
            self.process.kill()
            self.process.wait()
        return self.read_end()

    def end_after_training(self, timeout: float) -> LaunchEnd:
        """After the last step: let the user's own code run to its end, at most `timeout` seconds."""
        try:
            self.process.wait(timeout)
        except subprocess.TimeoutExpired:
            return self.end(END_MARGIN_SECS)
        return self.read_end()

    def kill(self) -> None:
        """Nothing of this launch runs on (the rank goes with its agent)."""
        if self.process.poll() is None:
            self.process.kill()
            self.process.wait()
        end_session(self.process.pid)
        if self.process.stdin is not None:
            with contextlib.suppress(BrokenPipeError):
                self.process.stdin.close()

    def read_end(self) -> LaunchEnd:
        """The agent's own words, or, when it died without any, what its exit status says."""
        found = read_end(self.run, self.token)
        if found is not None:
            return found
        return LaunchEnd(
            token=self.token,
            reason="failed",
            error_class="infrastructure",
            step=self._last_step(),
            detail=f"agent ended with status {self.process.poll()}",
            log_tail="",
            ended=time.time(),
        )

    def _last_step(self) -> int:
        """What the agent's last heartbeat told."""
        try:
            beat = msgspec.json.decode(files.read_limited(self.run.progress_json, 4096), type=_Beat)
        except (OSError, ValueError):
            return self.began
        return max(beat.step, self.began) if beat.token == self.token else self.began
