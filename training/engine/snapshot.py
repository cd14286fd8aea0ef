"""Cuts of the state: what is collected at a step boundary, staged into a slot and announced, and how it is loaded again."""

import contextlib
import gc
import os
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import msgspec
import torch

from perdure.training.checkpoint.pieces import is_piece
from perdure.training.checkpoint.plain import unpack_plain
from perdure.training.checkpoint.reader import CheckpointReader, open_checkpoint
from perdure.training.config import changed_settings
from perdure.training.engine import audit, environment, invariants
from perdure.training.engine.batches import Batches, Rebatched
from perdure.training.engine.leaves import Leaf, plain_leaf
from perdure.training.engine.link import Link
from perdure.training.engine.loading import Loading, check_can_spread
from perdure.training.engine.metrics import Metrics
from perdure.training.engine.overlap import Overlap
from perdure.training.engine.pace import Pace
from perdure.training.engine.remembered import Memory
from perdure.training.engine.restore import restore
from perdure.training.engine.rng import RNG, Generators, load_rng, rng_leaves, seed_rng
from perdure.training.engine.stage import Stager
from perdure.training.engine.state import Tracked, collect, note_built
from perdure.training.engine.topology import Move
from perdure.training.engine.zero import ZeroEngine, check_not_twice
from perdure.training.errors import ConfigError, NonFinite
from perdure.training.run_dir import CheckpointName, RunDir
from perdure.training.slots import About

SESSION = "perdure.session"
"""Path of the session's own plain leaf: step, loss baseline, tokens."""
_READERS = 4
"""Threads that decode a checkpoint, at most: training has not begun yet."""


class Snapshots:
    """Everything between a live training process and its slots."""

    def __init__(self, link: Link, run: RunDir, metrics: Metrics) -> None:
        self._link, self._run, self._metrics = link, run, metrics
        self._stager = Stager(link.slots)
        self._tracked: Tracked = {}
        self._memory = Memory()
        self._generators: Generators = {}
        self._skipped = 0
        """Optimizer steps that a GradScaler left out, in earlier launches."""
        self._size: tuple[int, ...] = ()
        """Changes when the state may have grown."""
        self._overlap: Overlap | None = None
        self._watch: invariants.StepWatch | None = None
        self._exact_reasons: list[str] = []
        self._environment: dict[str, Any] = {}  # Any: plain JSON values
        self._code: dict[str, Any] = {}
        self._world: dict[str, Any] = {}
        self._pace: Pace | None = None
        self._move: Move | None = None
        self._batches = Batches({})
        self._rebatched: Rebatched | None = None
        self.last_step = 0
        """Newest step of which a checkpoint exists or is on its way."""

    # resume

    def begin(self, tracked: Tracked, generators: Generators, world: dict[str, Any], pace: Pace) -> int:  # Any: JSON values
        """Load the checkpoint the agent names, if any, check it, and return the step to go on from."""
        self._tracked, self._generators, self._world, self._pace = tracked, generators, world, pace
        for label, thing in tracked.items():
            if type(thing).__name__ == "StatefulDataLoader" and getattr(thing, "_iterator", None) is not None:
                raise ConfigError(
                    f"an iterator of {label!r} was made before the first step: on resume it would start the epoch again",
                    "call iter() after session.resume(), or inside the loop over session.steps()",
                )
        check_not_twice(tracked)
        note_built(tracked)
        self._batches = Batches(tracked)
        self._environment = environment.environment()
        self._code = environment.code_state(Path(self._link.welcome["config_dir"]))
        name = CheckpointName.parse(str(self._link.welcome["resume"]))
        step = self._load(name) if name else 0
        self._watch = invariants.StepWatch(tracked)
        if self._link.welcome["lazy"]:
            self._overlap = Overlap(tracked)
        self.last_step = step
        return step

    def _load(self, name: CheckpointName) -> int:
        threads, rank = min(_READERS, len(os.sched_getaffinity(0))), self._link.rank
        ranks = int(self._link.welcome["world"])
        with open_checkpoint(self._run.checkpoint(name)) as reader, Loading(reader, threads, rank, ranks) as loading:
            others = reader.ranks != ranks
            if others:
                check_can_spread(reader, self._tracked)
            self._note_exactness(reader)
            replan = bool(self._link.welcome["replan"])
            planned = restore(self._tracked, loading.read, loading.read_part, loading.shape_of, replan=replan)
            self._exact_reasons += planned
            if replan:
                scale = bool(self._link.welcome["scale_lr"])
                self._rebatched = Rebatched(
                    self._tracked, self._batches, reader.manifest.data, scale=scale, planned=bool(planned), others=others
                )
                self._rebatched.watch(self._say_rebatched)
            own = unpack_plain(loading.read(SESSION).data)
            self._skipped = int(own["skipped"])
            self._metrics.load_state_dict(own["metrics"])
            self._metrics.newest = dict(reader.manifest.metrics or {})
            if others:
                self._metrics.tokens = int(reader.manifest.data["tokens"]) if rank == 0 else 0
            invariants.check_after_load(self._tracked, name.step, loading.digest, threads=threads, replan=replan)
            tolerant = others or (self._link.welcome["exact"] == "prefer" and bool(self._exact_reasons))
            if loading.is_new:
                seed_rng(loading.read(RNG).data, rank, self._generators)
            else:
                self._exact_reasons += load_rng(loading.read, self._generators, tolerant=tolerant)
            if reader.fetched:
                stored = reader.manifest.stored_bytes + (reader.base.manifest.stored_bytes if reader.base else 0)
                told = f"rank {rank} read {reader.fetched} bytes of checkpoint {name} from the store, which has {stored} of it"
                self._link.say(notice=told)
        return int(own["step"])

    def _note_exactness(self, reader: CheckpointReader) -> None:
        old = reader.manifest
        self._move = Move(old.world, self._world)
        before, now = self._move.with_hosts(old.environment, self._environment)
        if self._link.welcome["exact"] == "require":
            environment.require_same(before, now)
        found = environment.differences(before, now)
        if self._link.welcome["replan"]:
            changed = changed_settings(old.config, self._link.welcome["trajectory"])
            found += [f"re-planned at step {old.step}: {change}" for change in changed]
        self._exact_reasons = [*old.exact_reasons, *found]
        if found:
            self._link.say(notice="resumed, but not bit for bit: " + "; ".join(found))
        if self._move.changes and self._link.rank == 0:
            self._link.say(notice=self._move.notice)

    def _say_rebatched(self, text: str, changed: bool) -> None:
        self._exact_reasons += [text] if changed else []
        self._link.say(notice=f"re-planned: {text}")

    # steps

    def finished_step(self, step: int) -> None:
        """After every optimizer step. Where the state has grown (Adam's moments appear at a parameter's first step), the slots
        grow now, not in the next save, and the disk is asked for room."""
        assert self._watch is not None
        self._watch.finished_step(step)
        if self._rebatched is not None:
            self._rebatched.decide(self._say_rebatched)
        self._batches.finished_step()
        if self._size != (size := _size(self._tracked)):
            self._size = size
            leaves = self._leaves(step)
            tensors = ((leaf.path, leaf.value) for leaf in leaves if isinstance(leaf.value, torch.Tensor))
            pieces = sum(tensor.nbytes for path, tensor in tensors if self._is_own(path))
            self._link.wait_for_room(self._stager.prepare(leaves), pieces)

    def _is_own(self, path: str) -> bool:
        """Whether no other rank can have it."""
        return is_piece(path) or isinstance(self._tracked.get(path.partition("/")[0]), ZeroEngine)

    def cut(self, step: int, milestone: str = "") -> None:
        """Stage a snapshot of this very moment and hand it to the agent, to be written. The step waits for one memory copy."""
        self._check(step)
        if self._move and self._pace and self._link.rank == 0 and (notice := self._move.after(self._pace)):
            self._link.say(notice=notice)
        slot = self._link.take_slot(step)
        self._stage(slot, step, lambda: self._link.submit(slot, step), milestone)
        self.last_step = step

    def keep(self, step: int) -> None:
        """Stage a snapshot that stays in memory; none where the saver needs every slot."""
        self._check(step)
        slot = self._link.spare_slot()
        if slot is not None:
            self._stage(slot, step, lambda: self._link.hold(slot, step))

    def settle(self) -> None:
        """Wait for a copy that runs beside the training."""
        if self._overlap is not None:
            self._overlap.settle()

    def _check(self, step: int) -> None:
        assert self._watch is not None
        self.settle()
        self._metrics.flush()
        if not self._metrics.finite:
            raise NonFinite(f"the loss is not finite at step {step}: nothing is saved, the newest checkpoint stays good")
        self._watch.check_before_save(step)

    def _stage(self, slot: int, step: int, announce: Callable[[], None], milestone: str = "") -> None:
        leaves = self._leaves(step)
        digest = audit.state_digest(leaves) if self._link.welcome["audit"] else ""
        staging = self._stager.begin(slot, leaves, self._about(step, milestone), digest)
        if self._overlap is not None and not self._link.holds_newest(slot):  # else no step may pass without a snapshot
            self._overlap.start(staging, announce)
            return
        staging.copy().wait()
        staging.finish()
        announce()

    def _leaves(self, step: int) -> list[Leaf]:
        with _no_garbage_collection():
            return self._collect(step)

    def _collect(self, step: int) -> list[Leaf]:
        skipped = self._skipped + (self._watch.skipped if self._watch else 0)
        own = plain_leaf(SESSION, {"step": step, "skipped": skipped, "metrics": self._metrics.state_dict()})
        return [*collect(self._tracked, self._memory), *rng_leaves(self._generators), own]

    def _about(self, step: int, milestone: str) -> About:
        return About(
            step=step,
            world=self._world | ({"step_secs": round(secs, 6)} if self._pace and (secs := self._pace.step_secs) else {}),
            data={**self._position(), "tokens": self._metrics.tokens},
            environment=self._environment,
            code=self._code,
            config=dict(self._link.welcome["trajectory"]),
            loss=dict(self._metrics.loss),
            exact=not self._exact_reasons,
            exact_reasons=tuple(self._exact_reasons),
            milestone=milestone or msgspec.UNSET,
            metrics=dict(self._metrics.newest) or msgspec.UNSET,
        )

    def _position(self) -> dict[str, Any]:  # Any: plain JSON values
        found, samples = invariants.data_position(self._tracked), self._batches.of_step
        return {name: {**one, "step_samples": samples[name]} if samples.get(name) else one for name, one in found.items()}


@contextlib.contextmanager
def _no_garbage_collection() -> Iterator[None]:
    """Lists of a hundred thousand tensors set it off, and it takes longer than the copy."""
    enabled = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if enabled:
            gc.enable()


def _size(tracked: Tracked) -> tuple[int, ...]:
    """Parameters that each optimizer has state for: cheap to ask after every step."""
    engines = [obj for obj in tracked.values() if isinstance(obj, ZeroEngine)]
    optimizers = [*tracked.values(), *(one for engine in engines for one in engine.optimizers)]
    return tuple(len(one.state) for one in optimizers if isinstance(one, torch.optim.Optimizer)) or (1,)
