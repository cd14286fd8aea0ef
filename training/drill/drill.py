"""A rehearsal of the disaster: in a bare folder, from the store alone, a run comes back and goes on, undisturbed and killed.

The store is only read: no token is taken in it and nothing is written. The run directory is asked how far the run has trained,
and is neither used for the recovery nor written; a live run notices nothing."""

import os
import socket
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import msgspec

from perdure.training import events, files
from perdure.training.amounts import counted
from perdure.training.checkpoint import lineage, manifest, verify
from perdure.training.checkpoint.diff import diff
from perdure.training.checkpoint.manifest import Manifest
from perdure.training.checkpoint.reader import open_checkpoint
from perdure.training.config import RunConfig, changed_settings
from perdure.training.drill.continuation import Continuation
from perdure.training.drill.folder import BareFolder, sweep
from perdure.training.drill.plan import Plan, history, kills_between
from perdure.training.drill.record import Drill
from perdure.training.drill_settings import parse_time
from perdure.training.errors import CheckpointDamaged, CheckpointNotFound, DiskFull, DrillFailed
from perdure.training.run_dir import CheckpointName, RunDir
from perdure.training.storage.store import ObjectStore
from perdure.training.travel.pull import pull

_MOST = 20
"""Notes and leaves that are kept."""
Say = Callable[[str], None]


class _Progress(msgspec.Struct, frozen=True, kw_only=True):
    step: int
    time: float


def drill(
    config: RunConfig, overrides: Sequence[str], store: ObjectStore, wanted: CheckpointName | None, planned: Plan, say: Say
) -> Drill:
    """Hold the drill that was planned. What does not come out as it must is in its `problems`.

    Raises DiskFull before anything is fetched when there is no room, StoreError when the store is away: none was held then."""
    for path in sweep():
        say(f"removed {path}, which a killed drill left")
    if planned.needed > planned.free:
        raise DiskFull(
            f"{planned.folder}: a drill needs room for {planned.needed} bytes, {planned.free} are free",
            "point TMPDIR at a larger disk",
        )
    with BareFolder() as folder:
        rehearsal = _Rehearsal(config, overrides, store, folder, planned, say)
        try:
            rehearsal.go(wanted)
        except (DrillFailed, CheckpointDamaged, CheckpointNotFound) as error:
            rehearsal.problems.append(str(error)[:2000])
        return rehearsal.result()


@dataclass
class _Rehearsal:
    config: RunConfig
    overrides: Sequence[str]
    store: ObjectStore
    folder: BareFolder
    planned: Plan
    say: Say
    problems: list[str] = field(default_factory=list)
    found: dict[str, Any] = field(default_factory=dict)  # Any: fields of the record

    def __post_init__(self) -> None:
        self.began = time.time()
        self.run = self.folder.run
        self.trained = _trained(self.config.directory)

    def go(self, wanted: CheckpointName | None) -> None:
        newest = self.pull(wanted)
        self.prove(newest)
        start = self.earlier(newest) if newest.step >= self.config.run.steps else newest
        end = min(start.step + self.planned.steps, self.config.run.steps)
        self.found |= {"resumed": str(start), "steps": end - start.step}
        self.check_settings(start)
        self.compare(self.undisturbed(start, end), self.killed(start, end))

    # what the store gives back

    def pull(self, wanted: CheckpointName | None) -> CheckpointName:
        self.say(f"pulling from {self.store.url} into {self.folder.path}")
        began = time.monotonic()
        try:
            name = pull(self.store, self.run, name=wanted)
        finally:
            self.found |= {"skipped": self.notices(), "pull_secs": time.monotonic() - began}
        found = manifest.read(self.run.checkpoint(name))
        base = [manifest.read(self.run.checkpoint(found.base_name))] if found.base_name else []
        size = sum(one.stored_bytes for one in (found, *base))
        self.found |= {"newest": str(name), "asked": wanted is not None, "bytes": size, **self.point(found)}
        return name

    def point(self, found: Manifest) -> dict[str, float | None]:
        """What would be lost, were the machine lost now: steps that were trained beyond it, and their time."""
        if self.trained is None:
            age = 0.0 if found.step >= self.config.run.steps else self.began - found.created
            return {"point_steps": None, "point_secs": max(0.0, age)}
        steps = max(0, self.trained.step - found.step)
        return {"point_steps": steps, "point_secs": max(0.0, self.trained.time - found.created) if steps else 0.0}

    def prove(self, name: CheckpointName) -> None:
        began = time.monotonic()
        fact = verify.check(self.run, name, threads=len(os.sched_getaffinity(0)))
        self.found["prove_secs"] = time.monotonic() - began
        if fact.result != "good":
            raise DrillFailed(f"checkpoint {name} was pulled and is damaged: {'; '.join(fact.damage[:5])}")

    def earlier(self, newest: CheckpointName) -> CheckpointName:
        """The run is complete, and its last checkpoint good: an earlier one has steps left to train."""
        for name in history(self.store, self.planned.run_id):
            if name.step < self.config.run.steps:
                try:
                    return pull(self.store, self.run, name=name)
                except CheckpointDamaged:
                    continue
        raise DrillFailed(f"{newest} is of the last step, and {self.store.url} has no good checkpoint before it")

    def check_settings(self, start: CheckpointName) -> None:
        """As a resume does: with other settings `perdure run` would refuse to go on."""
        old = manifest.read(self.run.checkpoint(start)).config
        if changed := changed_settings(old, self.config.trajectory()):
            raise DrillFailed(
                f"{self.config.path}: settings that decide the weights differ from checkpoint {start}: {'; '.join(changed)}"
            )

    # going on from it

    def undisturbed(self, start: CheckpointName, end: int) -> CheckpointName:
        self.say(f"going on from {start} to step {end}, undisturbed")
        going = Continuation(self.config, self.overrides, self.folder, start, save_every=0)
        reached = going.train(end)
        noted = self.notices()[len(self.found["skipped"]) :]
        self.found |= {"start_secs": going.first_step_secs, "notes": noted[:_MOST]}
        return reached

    def killed(self, start: CheckpointName, end: int) -> CheckpointName:
        self.say(f"going on from {start} to step {end}, with kills in between")
        every = max(1, (end - start.step) // 2)
        going = Continuation(self.config, self.overrides, self.folder, start, save_every=every)
        try:
            return going.train(end, kills_between(start.step, end))
        finally:
            self.found["kills"] = tuple(going.kills)

    def compare(self, undisturbed: CheckpointName, killed: CheckpointName) -> None:
        one, other = self.run.checkpoint(undisturbed), self.run.checkpoint(killed)
        digest = manifest.read(one).state_digest
        same = digest == manifest.read(other).state_digest
        self.found |= {"identical": same, "digest": digest}
        if not same:
            with open_checkpoint(one) as a, open_checkpoint(other) as b:
                leaves = [leaf.path for leaf in diff(a, b)]
            self.found["differing"] = tuple(leaves[:_MOST])
            more = f" and {len(leaves) - _MOST} more" if len(leaves) > _MOST else ""
            self.problems.append(
                f"not reproducible: unlike the undisturbed continuation in {counted(len(leaves), 'leaf', 'leaves')}: "
                f"{', '.join(leaves[:_MOST])}{more}"
            )

    # what is told

    def notices(self) -> tuple[str, ...]:
        """What pull and the launches have said in the folder."""
        return tuple(str(event.data.get("text", "")) for event in events.read(self.run) if event.kind == "notice")

    def result(self) -> Drill:
        targets = self.config.drill
        held = Drill(
            time=self.began, host=socket.gethostname(), run=self.planned.run_id, store=self.store.url, passed=False,
            target_point_secs=parse_time(targets.recovery_point), target_time_secs=parse_time(targets.recovery_time),
            **self.found,
        )  # fmt: skip
        if held.point_secs is not None and held.point_secs > held.target_point_secs and not held.asked:
            self.problems.append(f"recovery point: {held.point_secs:.0f} s are lost, the target is {targets.recovery_point}")
        if held.recovery_secs is not None and held.recovery_secs > held.target_time_secs:
            self.problems.append(f"recovery time: it took {held.recovery_secs:.0f} s, the target is {targets.recovery_time}")
        return msgspec.structs.replace(held, passed=not self.problems, problems=tuple(self.problems))


def _trained(run: RunDir) -> _Progress | None:
    """The last step that the run has trained, and when; None where it is not here. What a launch trained that is neither saved
    nor going on is lost already."""
    newest = next(iter(lineage.lineage(run)), None)
    saved = None
    if newest is not None:
        try:
            saved = _Progress(step=newest.step, time=manifest.read(run.checkpoint(newest)).created)
        except (CheckpointDamaged, CheckpointNotFound):
            saved = None
    try:
        going = msgspec.json.decode(files.read_limited(run.progress_json, 4096), type=_Progress)
    except (OSError, ValueError):
        return saved
    return going if saved is None or going.step > saved.step else saved
