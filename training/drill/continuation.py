"""Goes on from a pulled checkpoint in the bare folder with the run's own code: launches as `perdure run` makes them, and kills.

The code runs where it lies; the live run's directory, store, Slack, ports and environment are not given to it."""

import contextlib
import os
import signal
import socket
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

import msgspec

from perdure.training import files
from perdure.training.agent.descendants import children
from perdure.training.agent.launch import END_MARGIN_SECS, POLL_SECS, Trainer
from perdure.training.agent.lock import RunLock
from perdure.training.checkpoint import catalog, facts, verify
from perdure.training.checkpoint.lineage import LaunchEnd
from perdure.training.checkpoint.run_info import read_run_info
from perdure.training.config import RunConfig, load_config
from perdure.training.drill.folder import BareFolder
from perdure.training.drill.plan import Kill
from perdure.training.errors import CheckpointDamaged, DiskFull, DrillFailed
from perdure.training.process import ProcessId, identify
from perdure.training.run_dir import CheckpointName
from perdure.training.travel.fence import take_token

SAVE_SECS = 600.0
"""How long the last checkpoint of a launch may take, and the user's own code after the last step."""
_RANK = b"perdure.training.engine.main"
_OF_LIVE_RUNS = ("PERDURE_", "TORCHELASTIC_")
_RENDEZVOUS = ("RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE", "GROUP_RANK", "MASTER_ADDR", "MASTER_PORT")
DRILL_VARIABLE = "PERDURE_DRILL"
"""Set to 1 in the launches of a drill, for code that tells other services what it does."""


class _Beat(msgspec.Struct, frozen=True, kw_only=True):
    token: int = -1
    step: int = 0
    state: str = ""


@dataclass
class Continuation:
    """`train` to a step; then `end`, `kills` and `first_step_secs` say how it went."""

    config: RunConfig
    overrides: Sequence[str]
    folder: BareFolder
    start: CheckpointName
    save_every: int
    """Steps between its checkpoints; 0: at its end only."""
    kills: list[str] = field(default_factory=list)
    first_step_secs: float | None = None
    """From the first launch to its first finished step."""

    def train(self, end: int, kills: Sequence[Kill] = ()) -> CheckpointName:
        """The checkpoint of step `end`. Raises DrillFailed saying why there is none."""
        settings = self.settings()
        config = load_config(self.config.path, settings)
        newest = self.start
        with RunLock.acquire(self.folder.run, orphan_wait=0.0) as lock:
            for kill in [*kills, None]:
                if newest.step < end:
                    launch = _Launch(self, config, settings, lock, newest)
                    self._go(launch, kill, end)
                    newest = self._newest(launch.token, newest)
        if newest.step != end:
            raise DrillFailed(f"the continuation left no checkpoint of step {end}; its newest is {newest}")
        return newest

    def settings(self) -> list[str]:
        """The run's own, except where it lies, how often it saves, and that all ranks are here, which decides no bit of it."""
        return [
            *self.overrides,
            f"run.dir={self.folder.run.root}",
            f"run.chunk={self.save_every or self.config.run.steps}",
            f"checkpoint.every={self.save_every}",
            "checkpoint.full_every=0",
            "checkpoint.snapshot_every=0",
            "store.url=",
            "launch.nodes=1",
            f"launch.processes={self.config.launch.world}",
            "launch.shared_disk=true",
            "notify.slack_channel=",
            f"launch.stop_grace={max(self.config.launch.stop_grace, SAVE_SECS)}",
            f"launch.env.MASTER_PORT={_free_port()}",
        ]

    def _go(self, launch: "_Launch", kill: Kill | None, end: int) -> None:
        with launch.started() as trainer:
            trainer.lease(kill.step if kill else end)
            first = launch.follow(kill.step if kill else end)
            if self.first_step_secs is None:
                self.first_step_secs = first
            if kill is None:
                launch.leave(end)
                return
            trainer.lease(end - 1)  # killed while it trains on, and before there is nothing left to do
            self.kills += launch.kill(kill.victim)

    def _newest(self, token: int, before: CheckpointName) -> CheckpointName:
        """The newest checkpoint that is good, proven as a resume would."""
        for name in catalog.candidates(self.folder.run):
            known = facts.read_fact(self.folder.run, name, "local")
            if (known or verify.check(self.folder.run, name, threads=len(os.sched_getaffinity(0)))).result == "good":
                return name
        raise CheckpointDamaged(f"no checkpoint is good after launch {token}, which went on from {before}", part="pack")


class _Launch:
    """One life of the trainer in the bare folder."""

    def __init__(
        self, whole: Continuation, config: RunConfig, settings: list[str], lock: RunLock, resume: CheckpointName
    ) -> None:
        self.whole, self.config, self.settings, self.lock, self.resume = whole, config, settings, lock, resume
        self.run = whole.folder.run
        run_id = read_run_info(self.run).id
        record = take_token(
            self.run, None, run_id=run_id, resumed_from=str(resume), created=time.time(), host=socket.gethostname(),
            pid=os.getpid(),
        )  # fmt: skip
        self.token, self.run_id = record.token, run_id

    @contextlib.contextmanager
    def started(self) -> Iterator[Trainer]:
        self.began = time.monotonic()
        self.trainer = Trainer.start(
            self.config, self.settings, self.lock, run_id=self.run_id, token=self.token, resume=self.resume, replan=False,
            environment=_environment(os.environ) | self.whole.folder.environment(),
        )  # fmt: skip
        try:
            yield self.trainer
        finally:
            self.trainer.kill()

    def follow(self, step: int) -> float:
        """Until `step` is made or the launch is over; the seconds to its first finished step."""
        first: float | None = None
        while self.trainer.is_alive():
            beat = self._beat()
            if beat.token == self.token:
                if beat.state == "waiting for disk":
                    raise DiskFull(f"{self.run.root}: no room for the drill's checkpoints", "point TMPDIR at a larger disk")
                if first is None and beat.step > self.resume.step:
                    first = time.monotonic() - self.began
                if beat.step >= step and beat.state not in ("starting", "setup"):
                    break
            time.sleep(POLL_SECS)
        return first if first is not None else time.monotonic() - self.began

    def _beat(self) -> _Beat:
        try:
            return msgspec.json.decode(files.read_limited(self.run.progress_json, 4096), type=_Beat)
        except (OSError, ValueError):
            return _Beat()

    def leave(self, end: int) -> None:
        """Have it save at `end` and go; at the run's last step it does so by itself."""
        if end >= self.config.run.steps:
            self._check(self.trainer.end_after_training(SAVE_SECS))
        else:
            self.trainer.stop("the drill is over")
            self._check(self.trainer.end(SAVE_SECS + END_MARGIN_SECS))

    def _check(self, end: LaunchEnd) -> None:
        if end.reason == "failed":
            raise DrillFailed(f"training failed at step {end.step}, {end.error_class} error: {end.detail[:1500]}")

    def kill(self, victim: str) -> list[str]:
        """SIGKILL; what was killed, nothing where it had come to its end before."""
        target = identify(self.trainer.process.pid) if victim == "agent" else _rank_of(self.trainer.process.pid)
        if target is None or not target.send(signal.SIGKILL):
            self._check(self.trainer.end_after_training(SAVE_SECS))
            return []
        if victim == "rank":
            self.trainer.end_after_training(SAVE_SECS)  # its agent saves what is whole in memory, and goes
        return [f"{victim} after step {self._beat().step}"]


def _rank_of(agent: int) -> ProcessId | None:
    """The first rank itself, which torchrun may have started; not a worker that it forked."""
    waiting = children(agent)
    while waiting:
        pid = waiting.pop(0)
        with contextlib.suppress(FileNotFoundError, ProcessLookupError):
            words = Path(f"/proc/{pid}/cmdline").read_bytes().split(b"\0")
            if _RANK in words:
                return identify(pid)
        waiting += children(pid)
    return None


def _environment(ours: Mapping[str, str]) -> dict[str, str]:
    kept = {name: value for name, value in ours.items() if not name.startswith(_OF_LIVE_RUNS) and name not in _RENDEZVOUS}
    return {**kept, DRILL_VARIABLE: "1"}


def _free_port() -> int:
    with contextlib.closing(socket.socket()) as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])
