"""The training flow: resume from the newest checkpoint that verifies, train chunk after chunk, verify and push what is
committed, restart what fails. It may die at any line and be replaced; all it knows it reads from the run directory."""

import contextvars
import math
import signal
import time
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any, NoReturn, TypeVar

from prefect import flow, get_run_logger
from prefect.client.schemas.objects import State
from prefect.exceptions import TerminationSignal
from prefect.futures import PrefectFuture
from prefect.runtime import deployment, flow_run
from prefect.states import Cancelled
from prefect.task_runners import ThreadPoolTaskRunner

from perdure.flows import hooks
from perdure.flows.restart import attempts_of, decide
from perdure.flows.start import Start, next_token, open_run
from perdure.tasks.artifacts import CALM_SECS, HURRIED_SECS, Board
from perdure.tasks.blocks import load_secrets
from perdure.tasks.notify import notify
from perdure.tasks.pulse import LAUNCHED, pulse
from perdure.tasks.push import push, store_of
from perdure.tasks.train_chunk import LaunchEnded, train_chunk
from perdure.tasks.verify import prove, verify
from perdure.training import events
from perdure.training.agent.launch import END_MARGIN_SECS, Trainer
from perdure.training.agent.lock import RunLock
from perdure.training.checkpoint import catalog, facts, lineage
from perdure.training.checkpoint.lineage import LaunchEnd
from perdure.training.checkpoint.parted import is_part
from perdure.training.config import RunConfig, load_config
from perdure.training.errors import (
    CheckpointDamaged,
    ConfigError,
    NotReplicated,
    PerdureError,
    Stopped,
    StoreError,
    TrainingFailed,
)
from perdure.training.run_dir import CheckpointName

_Result = TypeVar("_Result")
FINAL_PUSH_TRIES = 3
LAST_TRIES = 3
"""How often the end is trained again where the last checkpoint turns out to be damaged."""
STORE_RETRY_SECS = 2.0
SAME_COMMAND = "the same command goes on"
AFTER_TRAINING_SECS = 600.0
"""How long the user's own code may run after the last step."""


class _Drive:
    """One flow run's work on one run, which it holds the lock of."""

    def __init__(self, config: RunConfig, overrides: list[str], replan: bool, since: int, lock: RunLock) -> None:
        self.config, self.overrides, self.replan, self.since, self.lock = config, overrides, replan, since, lock
        self.run = config.directory
        self.store = store_of(config)
        self.log = get_run_logger()
        self.jobs: dict[tuple[str, str], PrefectFuture[Any]] = {}  # Any: JSON values
        self.board = Board(config, overrides, flow_run.id or "", list(flow_run.tags or []), self.log)
        self.hurry = False
        """Set when the flow has to leave: transfers stop at their next part."""

    # the chain

    def go(self) -> dict[str, Any]:  # Any: JSON values
        for _ in range(LAST_TRIES):
            self.train_all()
            if done := self.finish():
                return done
        raise CheckpointDamaged(
            f"{self.run.root}: the last checkpoint was damaged {LAST_TRIES} times in a row as soon as it was written",
            hint="check disk and memory of this machine; the same command goes on from the newest good one",
        )

    def train_all(self) -> None:
        """Launch after launch, until the last step is committed."""
        while True:
            start = self.reached(lambda: open_run(self.config, self.store, replan=self.replan))
            self.tell()
            self.reconcile()
            if start.step >= self.config.run.steps:
                return
            end = self.launch(start)
            if end.reason == "complete":
                return
            if end.error_class == "corrupt" and start.resume and is_part(self.run, start.resume):
                prove(self.run, start.resume, whole=True)
            self.after(end)

    def reached(self, act: Callable[[], _Result]) -> _Result:
        """Where nodes share no disk nothing begins without the store: wait for it as long as for another node."""
        deadline, said = time.monotonic() + self.config.launch.startup_timeout, False
        while True:
            try:
                return act()
            except StoreError as error:
                if self.config.launch.shared_disk or not error.retryable or time.monotonic() > deadline:
                    raise
                if not said:
                    events.record(self.run, "notice", text=f"waits for the store: {error.in_one_line()}"[:2000])
                said = True
                self._pause(STORE_RETRY_SECS)

    def launch(self, start: Start) -> LaunchEnd:
        """One launch, from `start` to its end, however it ends."""
        record = self.reached(lambda: next_token(self.config, self.store, start))
        trainer = Trainer.start(
            self.config,
            self.overrides,
            self.lock,
            run_id=start.run_id,
            token=record.token,
            resume=start.resume,
            replan=self.replan,
        )
        kind = "recovered" if start.step and record.token > self.since else "launch_started"
        events.record(self.run, kind, token=record.token, step=start.step, resumed_from=record.resumed_from)
        self.log.info("Launch %d started from step %d.", record.token, start.step)
        pulse(LAUNCHED, start.step)
        self.board.live = True
        self.tell()
        grace = self.config.launch.stop_grace + END_MARGIN_SECS
        deadline = time.monotonic() + grace
        try:
            self.train(trainer, start.step)
            return trainer.end_after_training(AFTER_TRAINING_SECS)
        except LaunchEnded:
            return trainer.end(grace)
        except BaseException as error:  # a stop, SIGTERM, cancellation or a bug of ours: save, then let it through
            signal.signal(signal.SIGTERM, signal.SIG_IGN)  # systemd and Slurm tell every process, and so does our parent
            deadline = time.monotonic() + grace
            trainer.stop(str(error) or ("SIGTERM" if isinstance(error, TerminationSignal) else type(error).__name__))
            end = trainer.end(grace)
            goes_on = isinstance(error, TerminationSignal) and deployment.id
            self.leave(end, deadline, "a new flow run goes on, unless this one was cancelled" if goes_on else SAME_COMMAND)
            raise
        finally:
            trainer.kill()
            self.board.live = False

    def train(self, trainer: Trainer, step: int) -> None:
        outside = contextvars.copy_context()  # what is submitted while a chunk trains is the flow's, not a child of that task
        while step < self.config.run.steps:
            end = self.config.chunk_end(step)
            done = train_chunk(trainer, step + 1, end, lambda name: outside.run(self.reconcile, [name]))
            self.log.info("Chunk %d-%d took %.1f s, loss %s.", step + 1, end, done["seconds"], done["loss"])
            self.reconcile()
            self.tell()
            step = end

    # beside training

    def reconcile(self, names: Iterable[CheckpointName] | None = None) -> None:
        """Submit what is missing: a proof for each committed checkpoint (or of `names`), then its copy in the store."""
        for name in lineage.lineage(self.run) if names is None else names:
            unproven = facts.read_fact(self.run, name, "local") is None and not is_part(self.run, name)
            proof = self._job("verify", str(name)) if unproven else None
            if (
                self.store is not None
                and facts.read_fact(self.run, name, "store") is None
                and facts.trust(self.run, name) != "quarantined"
            ):
                self._job("push", str(name), after=proof)

    def _job(self, kind: str, name: str, after: PrefectFuture[Any] | None = None) -> PrefectFuture[Any]:
        known = self.jobs.get((kind, name))
        refused = known is not None and kind == "push" and known.state.is_failed()  # for good: another try cures nothing
        if known is not None and (refused or not known.state.is_final()):
            return known
        if kind == "verify":
            future = verify.submit(str(self.run.root), name)
        else:
            future = push.submit(self.config, name, lambda: self.hurry, wait_for=[after] if after else [], return_state=False)
        self.jobs[kind, name] = future
        return future

    def settle(self, deadline: float) -> None:
        """Wait for all submitted work; after `deadline` transfers are asked to stop. math.inf: a large copy takes hours."""
        for future in self.jobs.values():
            future.wait(timeout=None if deadline == math.inf else max(0.0, deadline - time.monotonic()))
        self.hurry = time.monotonic() > deadline
        for future in self.jobs.values():
            future.wait()

    def tell(self) -> None:
        notify.submit(str(self.run.root), self.config.notify)
        self.board.ask()

    # endings

    def after(self, end: LaunchEnd) -> None:
        """Decide what follows a launch that did not complete: return to restart, raise to end the flow."""
        if end.reason == "stopped":
            self.leave(end, time.monotonic() + self.config.launch.stop_grace)
            raise Stopped(f"stopped at step {end.step}: {end.detail}")
        decision = decide(attempts_of(self.run, self.since))
        good = catalog.newest_with(self.run, (*facts.GOOD, "written"))
        events.record(
            self.run,
            "failed",
            token=end.token,
            error_class=end.error_class,
            step=end.step,
            last_good=good.step if good else 0,
            detail=end.detail[:2000],
            next=decision.reason,
            log_tail=end.log_tail[-3000:],
        )
        self.log.warning(
            "Launch %d failed at step %d (%s): %s; %s.", end.token, end.step, end.error_class, end.detail, decision.reason
        )
        self.tell()
        if not decision.restart:
            self.settle(time.monotonic() + AFTER_TRAINING_SECS)
            self._refuse(end, decision.reason)
        self._pause(decision.delay)

    def _refuse(self, end: LaunchEnd, reason: str) -> NoReturn:
        message = f"{self.run.root}: {end.error_class} error at step {end.step}: {end.detail}; {reason}"
        if end.error_class == "config":
            raise ConfigError(message, f"the whole error is in {self.run.logs(end.token)}")
        raise TrainingFailed(message, f"see {self.run.logs(end.token)}; the same command starts again")

    def _pause(self, seconds: float) -> None:
        until = time.monotonic() + seconds
        while time.monotonic() < until:
            if self.run.stop_request.exists():
                raise Stopped("asked to stop between two launches")
            time.sleep(0.1)

    def leave(self, end: LaunchEnd, deadline: float, following: str = SAME_COMMAND) -> None:
        """The trainer has saved; use what is left of the grace to prove and push that checkpoint."""
        events.record(self.run, "stopped", token=end.token, step=end.step, reason=end.detail, next=following)
        self.reconcile()
        self.tell()
        self.settle(deadline)

    def finish(self) -> dict[str, Any] | None:  # Any: JSON values
        """Everything is trained: prove and copy the rest, say so once. None when the last checkpoint is damaged."""
        last = lineage.lineage(self.run)[0]
        self.jobs = {key: job for key, job in self.jobs.items() if key[1] == str(last) or not job.state.is_failed()}
        for _ in range(FINAL_PUSH_TRIES):
            self.reconcile()  # an earlier copy that was refused too: somebody may have mended the store since
            self.settle(math.inf)
            if self.store is None or facts.is_in(self.run, last, "store"):
                break
            problem, curable = self._not_pushed(last)
            if not curable:
                break
        if facts.trust(self.run, last) == "quarantined":
            return None
        manifest = catalog.manifest_of(self.run, last)
        if not any(
            event.kind == "completed" and event.data.get("digest") == manifest.state_digest for event in events.read(self.run)
        ):
            events.record(self.run, "completed", step=last.step, digest=manifest.state_digest, name=str(last))
        self.tell()
        self.settle(time.monotonic() + 10.0)
        if self.store is not None and not facts.is_in(self.run, last, "store"):
            text = f"all {last.step} steps are trained and proven, but {last} is not in {self.store.url}: {problem}"
            raise NotReplicated(f"{self.run.root}: {text}", "running the same command again only pushes")
        return {"step": last.step, "state_digest": manifest.state_digest, "checkpoint": str(last)}

    def _not_pushed(self, name: CheckpointName) -> tuple[str, bool]:
        """Why the newest push of it failed, and whether another try may help."""
        failed = [event.data for event in events.read(self.run) if event.kind == "push_failed"]
        newest = [data for data in failed if data.get("name") == str(name)][-1:]
        return next(((str(data["error"]), bool(data["retryable"])) for data in newest), ("see its page in Prefect", True))


_RUNNER: ThreadPoolTaskRunner[Any] = ThreadPoolTaskRunner(max_workers=3)  # Any: our tasks return different things


def _name() -> str:
    parameters = flow_run.parameters
    try:
        return f"train {load_config(parameters['config'], parameters.get('overrides') or []).run.name}"
    except PerdureError:
        return f"train {Path(str(parameters['config'])).parent.name}"


@flow(
    name="train",
    flow_run_name=_name,
    retries=0,
    task_runner=_RUNNER,  # type: ignore[arg-type]  # Prefect's own declaration is invariant in the future's type
    on_failure=[hooks.on_failure],
    on_crashed=[hooks.on_crashed],
    on_cancellation=[hooks.on_cancellation],
)
def train(
    config: str, overrides: list[str] | None = None, replan: bool = False, since: int | None = None, deaths: int = 0
) -> dict[str, Any] | State[Any]:  # Any: JSON values
    """Train the run described by the run.toml at `config` to its last step.

    `replan`: accept changed trajectory settings, and record them. `since` and `deaths` carry the restart budget along."""
    checked = load_config(config, overrides or [])
    load_secrets(checked)
    run = checked.directory
    with RunLock.acquire(run, orphan_wait=checked.launch.stop_grace + END_MARGIN_SECS) as lock:
        run.stop_request.unlink(missing_ok=True)
        first = since if since is not None else max(lineage.read_launches(run), default=0) + 1
        drive, ending = _Drive(checked, overrides or [], replan, first, lock), HURRIED_SECS
        try:
            done = drive.go()
            ending = CALM_SECS
            return done
        except Stopped as stopped:
            run.stop_request.unlink(missing_ok=True)
            return Cancelled(message=str(stopped))
        finally:
            drive.hurry = True  # where a signal ended it: a transfer goes on next time
            drive.board.close(ending)
