"""Session: the one object a user's training code meets. It restores, hands out steps, and cuts checkpoints between them."""

import contextlib
import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch

from perdure.training.checkpoint.pins import check_label
from perdure.training.config import RunConfig, load_config
from perdure.training.engine import signals
from perdure.training.engine.link import Link
from perdure.training.engine.metrics import Metrics
from perdure.training.engine.pace import Pace
from perdure.training.engine.rng import is_generator, preserving
from perdure.training.engine.snapshot import Snapshots
from perdure.training.engine.state import check_trackable, unwrapped
from perdure.training.engine.together import Alone, together
from perdure.training.engine.topology import topology
from perdure.training.errors import ConfigError, TrainingFailed
from perdure.training.run_dir import RunDir


class Session:
    """Perdure hands one to the entry function; `Session.by_hand("run.toml")` makes one that just trains, without saving."""

    def __init__(self, link: Link | None, *, total_steps: int, params: dict[str, Any]) -> None:  # Any: TOML values
        self.params = params
        """The [params] table of run.toml."""
        self.total_steps = total_steps
        """Optimizer steps of the whole run."""
        self.rank, self.world_size, self.local_rank = _place(link)
        """Number of this process among all, how many there are, its number on this machine."""
        self.step = 0
        """Optimizer steps made so far, by this and all earlier launches."""
        self._link = link
        self._tracked: dict[str, Any] = {}  # Any: whatever has state_dict and load_state_dict
        self._generators: dict[str, Any] = {}  # Any: torch.Generator, random.Random, numpy Generator
        self._begun = False
        self._iterating = False
        self._milestone = ""
        run = RunDir(Path(link.welcome["run_dir"])) if link else None
        self._metrics = Metrics(run.metrics(int(link.welcome["token"])) if link and run and self.rank == 0 else None)
        self._snapshots = Snapshots(link, run, self._metrics) if link and run else None
        self._together: Alone | None = None
        self._pace: Pace | None = None
        self._schedule = (int(link.welcome["chunk"]), int(link.welcome["every"])) if link else (0, 0)
        self._keep_every = int(link.welcome["snapshot_every"]) if link else 0

    @classmethod
    def by_hand(cls, run_toml: str | Path, *settings: str) -> "Session":
        """For running a script without Perdure: same steps and params, nothing saved, nothing resumed."""
        config: RunConfig = load_config(run_toml, settings)
        return cls(None, total_steps=config.run.steps, params=dict(config.params))

    # what a user calls

    @property
    def device(self) -> torch.device:
        """The CUDA device of this rank, or the CPU where there is none."""
        return torch.device("cuda", self.local_rank) if torch.cuda.is_available() else torch.device("cpu")

    def track(self, **objects: Any) -> None:  # Any: whatever has state_dict and load_state_dict
        """Register everything that has state, your own random generators (torch, NumPy, Python) included; the global ones
        are always saved. On resume all is loaded at the first step, by these names."""
        if self._begun:
            raise ConfigError("session.track was called after the first step", "track everything before session.steps()")
        for name, given in objects.items():
            thing = unwrapped(given)
            if name in self._tracked or name in self._generators:
                raise ConfigError(f"session.track({name}=...): the name is taken", "give it another name")
            if is_generator(thing):
                self._generators[name] = thing
            else:
                check_trackable(name, thing)
                self._tracked[name] = thing

    def steps(self) -> Iterator[int]:
        """The steps still to be made, each by its number from 0. A checkpoint is cut after the whole loop body."""
        self.resume()
        self._iterating = True
        while self._may_go_on():
            yield self.step
            self._end_step()

    def resume(self) -> int:
        """Restore and return the step to go on from; `steps()` does it by itself. For loops that call `end_step`."""
        if not self._begun:
            if self._link and not self._tracked:
                raise ConfigError("nothing is tracked, so nothing could be resumed", "call session.track(model=..., ...) first")
            self._begun = True
            if self._link:
                signals.install()  # again: a framework may have put its own handlers
            if self._snapshots is not None and self._link:
                self._together = together(self._link, self.world_size)
                self._pace = Pace(self._link, self._together, self._tracked)
                world = topology(self._tracked, self._together)
                self.step = self._snapshots.begin(self._tracked, self._generators, world, self._pace)
                self._together.agree()
                self._link.phase("training")
                self._pace.begin()
        return self.step

    def end_step(self) -> bool:
        """Mark the end of one optimizer step and everything that belongs to it. False: leave the loop."""
        if not self._begun:
            raise ConfigError("session.end_step() came before session.resume()", "call resume() once after track()")
        if self._iterating:
            raise ConfigError("session.end_step() was called inside session.steps(), which does it by itself", "leave it out")
        return self._end_step()

    def _end_step(self) -> bool:
        self.step += 1
        if self._snapshots is not None and self._link and self._together and self._pace:
            self._snapshots.finished_step(self.step)
            self._metrics.flush(force=False)
            self._link.finished_step(self.step)
            self._link.poll()
            self._pace.agree(self.step)
            if self._save_due(self._link):
                self._snapshots.cut(self.step, self._milestone)
                self._milestone = ""
            elif self._keep_every and self.step % self._keep_every == 0:
                self._snapshots.keep(self.step)
            if self.step < self.total_steps:
                self._wait_for_lease(self._link, self._snapshots, self._together)
            self._pace.begin()
        return self._may_go_on()

    def _wait_for_lease(self, link: Link, snapshots: Snapshots, together: Alone) -> None:
        if link.must_wait(self.step):
            snapshots.settle()  # its checkpoint may be what the lease waits for
            link.wait_for_lease(self.step)
            together.agree()
        self._save_before_stop(link)

    def log(self, **values: Any) -> None:  # Any: numbers or 0-d tensors
        """Record numbers of the current step: `loss`, `tokens`, and what you like. Tensors are not waited for."""
        self._metrics.log(self.step + 1, values)

    def save(self, name: str = "") -> None:
        """Have a checkpoint cut at the end of the step under way, in all ranks, whichever asks. `name` makes it a milestone,
        which is never deleted; of two names for one step the later counts, of several ranks' that of the lowest. Raises
        ConfigError where it is no plain name, or no step is under way."""
        if name:
            check_label(name)
        if not self._begun or self.step >= self.total_steps:
            raise ConfigError("session.save() was called outside the training steps", "call it within the step to be saved")
        if self._link:
            self._link.ask_to_save()
        self._milestone = name or self._milestone

    @contextlib.contextmanager
    def evaluation(self) -> Iterator[None]:
        """Whatever happens inside cannot change the trajectory: all random number generators are put back after it."""
        if self._snapshots is not None:
            self._snapshots.settle()  # averaged weights may be put in the place of the model's
        if self._link:
            self._link.phase("evaluation")
        with preserving(self._generators):
            yield
        if self._link:
            self._link.phase("training")

    @property
    def stopped(self) -> bool:
        """Whether the loop ended early because somebody asked for it; the run goes on with the next launch."""
        return self._link is not None and bool(self._link.stop_reason) and self.step < self.total_steps

    # inside

    def _may_go_on(self) -> bool:
        if self._link and self.world_size == 1:
            self._link.agree(self._link.wishes())  # a SIGTERM since the end of the step
            self._save_before_stop(self._link)
        going = self.step < self.total_steps and not self.stopped
        if not going and self._snapshots is not None:
            self._snapshots.settle()
        return going

    def _save_due(self, link: Link) -> bool:
        chunk, every = self._schedule
        wanted = link.save_requested or bool(link.stop_reason)
        link.save_requested = False
        return wanted or self.step % chunk == 0 or self.step % every == 0 or self.step >= self.total_steps

    def _save_before_stop(self, link: Link) -> None:
        if link.stop_reason and self._snapshots is not None and self._snapshots.last_step != self.step and self.step > 0:
            self._snapshots.cut(self.step)

    def close(self) -> None:
        """Called by Perdure when the user's function has returned."""
        self._metrics.flush()
        if self._link is None:
            return
        if not self._begun:
            raise TrainingFailed("the entry function returned without iterating session.steps()")
        if self.step < self.total_steps and not self.stopped:
            raise TrainingFailed(
                f"the entry function returned after step {self.step} of {self.total_steps}", "see `session.steps()`"
            )
        self._link.say(finished=self.step >= self.total_steps, stopped=self.stopped, step=self.step, phase="leaving")


def _place(link: Link | None) -> tuple[int, int, int]:
    """Rank, world size and local rank: as launched, or by hand as torchrun says."""
    if link is not None:
        return link.rank, int(link.welcome["world"]), link.rank - int(link.welcome["first_rank"])
    told = os.environ
    return int(told.get("RANK", 0)), int(told.get("WORLD_SIZE", 1)), int(told.get("LOCAL_RANK", 0))
