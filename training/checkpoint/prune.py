"""Delete what retention lets go, and sweep what crashes left. Killed anywhere, the next prune finishes the work.

The manifest goes first (from then on there is no such checkpoint), packs after it, the folder last. Nothing goes that somebody
reads, writes against, or needs as a base at the moment of deletion, whatever the plan said when it was made."""

import contextlib
import os
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from perdure.training import events, files
from perdure.training.checkpoint import facts
from perdure.training.checkpoint import manifest as manifests
from perdure.training.checkpoint import pins as milestones
from perdure.training.checkpoint.catalog import Catalog, manifest_of, read_catalog
from perdure.training.checkpoint.hold import try_hold_alone
from perdure.training.checkpoint.lineage import read_launches
from perdure.training.checkpoint.retention import Plan, Verdict, plan
from perdure.training.checkpoint.tidy import nobody_reads_replaced, tidy
from perdure.training.errors import CheckpointDamaged, CheckpointNotFound, DiskFull
from perdure.training.retention_settings import RetentionSection
from perdure.training.run_dir import MANIFEST, REPLACED_MANIFEST, CheckpointName, RunDir

QUIET_SECS = 3600.0
"""A temporary file that nobody touched for so long is nobody's."""
_FACT = "check-"
RollUp = Callable[[RunDir, CheckpointName], object]


@dataclass(frozen=True, kw_only=True)
class Leftover:
    path: Path
    bytes: int
    goes: bool
    reason: str


@dataclass(frozen=True, kw_only=True)
class Survey:
    """What is there, and what may go."""

    plan: Plan
    leftovers: tuple[Leftover, ...]

    @property
    def freed(self) -> int:
        return self.plan.freed + sum(one.bytes for one in self.leftovers if one.goes)

    @property
    def empty(self) -> bool:
        return not self.plan.remove and not any(one.goes for one in self.leftovers)


@dataclass
class Done:
    rolled_up: list[Verdict] = field(default_factory=list)
    removed: list[Verdict] = field(default_factory=list)
    swept: list[Leftover] = field(default_factory=list)
    spared: dict[CheckpointName, str] = field(default_factory=dict)
    """What the plan let go and the moment did not, with why."""

    @property
    def freed(self) -> int:
        return sum(one.bytes for one in self.removed) + sum(one.bytes for one in self.swept)


def survey(
    run: RunDir, settings: RetentionSection, *, stored: bool, is_idle: Callable[[], bool], may_roll_up: bool = False
) -> Survey:
    """Look, decide, delete nothing. `is_idle`: whether nobody drives or trains this run; asked after everything was listed, so
    that whatever was listed and is being written belongs to somebody who is still there. `may_roll_up`: `execute` will be given
    a way to."""
    launches = read_launches(run)
    found = read_catalog(run)
    idle = is_idle()
    newest = max(launches, default=0)
    tokens = {*range(1, newest + 1), *(one.name.token for one in found.listed)}
    known, pins = tokens <= set(launches), milestones.read_pins(run, found.listed)
    decided = plan(found.listed, settings, stored, pins=pins, history_known=known, roll_up=may_roll_up)
    judged = tuple(_judge(run, path, newest, idle) for path in _uncommitted(run, found))
    return Survey(plan=decided, leftovers=judged)


def _uncommitted(run: RunDir, found: Catalog) -> list[Path]:
    """Leftovers that are no checkpoint outside the lineage: those are in the plan."""
    planned = {one.name for one in found.listed}
    there = run.checkpoints
    return [one for one in found.leftovers if one.parent != there or CheckpointName.parse(one.name) not in planned]


def _judge(run: RunDir, path: Path, token: int, idle: bool) -> Leftover:
    name = CheckpointName.parse(path.name)
    if path.parent == run.checkpoints and name is None and not files.is_temporary(path.name):
        goes, reason = False, "not Perdure's"
    elif path.parent == run.checkpoints and name is not None:
        goes, reason = _judge_folder(run, name, token, idle)
    elif files.is_temporary(path.name):
        goes = idle or _modified(path) < time.time() - QUIET_SECS
        reason = "temporary file of a crash" if goes else "temporary file, perhaps still being written"
    else:
        goes, reason = True, "left by a roll-up that was killed"
    return Leftover(path=path, bytes=_bytes_of(path), goes=goes, reason=reason)


def _judge_folder(run: RunDir, name: CheckpointName, token: int, idle: bool) -> tuple[bool, str]:
    """A folder without a manifest. A live saver fills one of its own launch, a pull (before any launch of its own) one of any
    launch; both hold the run's lock. So it may go when nobody does, or when it was last touched before the newest launch began.
    Facts in it say that it was a checkpoint once, which a prune was deleting: only its end is missing, whoever runs."""
    if any(run.fact(name, copy).exists() for copy in ("local", "store")):
        return True, "left by a prune that was killed"
    if idle:
        return True, "never committed"
    began = _modified(run.launch_record(token))
    if name.token < token and _modified(run.checkpoint(name)) < began:
        return True, "never committed by an older launch"
    return False, "perhaps still being written"


def _modified(path: Path) -> float:
    try:
        return path.lstat().st_mtime
    except FileNotFoundError:
        return 0.0


def _bytes_of(path: Path) -> int:
    """A live writer's temporary files come and go while we look."""
    if path.is_symlink() or not path.is_dir():
        return _size(path)
    return sum(_size(Path(folder, name)) for folder, _, names in os.walk(path) for name in names)


def _size(path: Path) -> int:
    try:
        return path.lstat().st_size
    except FileNotFoundError:
        return 0


def execute(run: RunDir, found: Survey, *, enough: Callable[[], bool] = lambda: False, roll_up: RollUp | None = None) -> Done:
    """Delete what `found` lets go, leftovers first, until there is `enough` room. The caller has the upkeep lock. `roll_up`:
    makes a full of a milestone where the plan says so; without it the base stays."""
    return _Prune(run, found.plan).go(found.leftovers, enough, roll_up)


class _Prune:
    def __init__(self, run: RunDir, decided: Plan) -> None:
        self._run, self._plan = run, decided
        self._known = {str(verdict.name): verdict.base for verdict in decided.verdicts}
        self._opening: set[CheckpointName | None] = set()
        """Bases of increments that were rolled up and are still read as such: a reader holds the increment first, and may not
        have come to its base yet."""
        self._done = Done()

    def go(self, leftovers: Sequence[Leftover], enough: Callable[[], bool], roll_up: RollUp | None) -> Done:
        for leftover in leftovers:
            if enough():
                return self._done
            if leftover.goes and _sweep(self._run, leftover.path):
                self._done.swept.append(leftover)
            elif leftover.path.name == REPLACED_MANIFEST:
                self._opening.add(_base_by(leftover.path))
        for verdict in self._plan.roll_ups if roll_up is not None else ():
            assert roll_up is not None
            self._roll_up(verdict, roll_up)
        for verdict in self._plan.remove:
            if enough():
                break
            spared = self._remove(verdict.name)
            if spared:
                self._done.spared[verdict.name] = spared
            else:
                self._tell(verdict)
        return self._done

    def _roll_up(self, verdict: Verdict, roll_up: RollUp) -> None:
        """One that cannot be is no reason to stop: its base stays as well."""
        try:
            roll_up(self._run, verdict.name)
        except (CheckpointDamaged, CheckpointNotFound, DiskFull, OSError) as error:
            self._done.spared[verdict.name] = f"not rolled up: {error}"
            return
        self._known[str(verdict.name)] = None
        self._done.rolled_up.append(verdict)
        if (self._run.checkpoint(verdict.name) / REPLACED_MANIFEST).exists():  # somebody still reads it as an increment
            self._opening.add(verdict.base)

    def _remove(self, name: CheckpointName) -> str:
        """Delete one checkpoint; why not, if not. Held alone: from here on nobody begins to read it or to write against it,
        and whatever was committed against it before is found now."""
        folder = self._run.checkpoint(name)
        with try_hold_alone(folder) as alone:
            if not alone or name in self._opening or not nobody_reads_replaced(folder):
                return "being read or written against" if (folder / MANIFEST).exists() else "gone already"
            if problem := self._anchor_problem():
                return problem
            pins = milestones.read_pins(self._run, ())  # one pinned since waits for us, or held it first and is found now
            if pins.problem or name in pins.names:
                return pins.problem or f"milestone {', '.join(pins.names[name])}"
            if dependents := self._dependents(name):
                return f"base of {dependents[-1]}"
            files.remove(folder / MANIFEST)
        _remove_folder(folder)
        return ""

    def _anchor_problem(self) -> str:
        """The newest verified one, and the base it may need, are found good by now or nothing goes."""
        anchor = self._plan.anchor
        if anchor is None:
            return ""
        if facts.trust(self._run, anchor) not in facts.GOOD:
            return f"{anchor} is no longer known to be good: plan anew"
        base = self._known.get(str(anchor))
        if base is not None and facts.trust(self._run, base) == "quarantined":
            return f"{base}, which {anchor} needs, is no longer good: plan anew"
        return ""

    def _dependents(self, base: CheckpointName) -> list[str]:
        """Committed increments that need it: those of the plan that are still there, and those written since."""
        for name in os.listdir(self._run.checkpoints):
            parsed = None if name in self._known else CheckpointName.parse(name)
            if parsed is not None:
                with contextlib.suppress(CheckpointNotFound, CheckpointDamaged):
                    self._known[name] = manifest_of(self._run, parsed).base_name
        names = sorted(name for name, needed in self._known.items() if needed == base)
        return [name for name in names if (self._run.checkpoints / name / MANIFEST).exists()]

    def _tell(self, verdict: Verdict) -> None:
        self._done.removed.append(verdict)
        name = verdict.name
        with contextlib.suppress(OSError):  # on a full disk even this line may find no room: the deletion counts, not the log
            events.record(self._run, "pruned", step=name.step, name=str(name), bytes=verdict.bytes, reason=verdict.reasons[0])


def _sweep(run: RunDir, path: Path) -> bool:
    """False when it became a checkpoint meanwhile, or is still read."""
    name = CheckpointName.parse(path.parent.name)
    if name is not None and not files.is_temporary(path.name):
        with contextlib.suppress(CheckpointNotFound, CheckpointDamaged):
            return tidy(run, name)
        return False
    if path.parent == run.checkpoints and path.is_dir() and not path.is_symlink():
        return _remove_folder(path)
    files.remove(path)
    return True


def _base_by(replaced: Path) -> CheckpointName | None:
    """The base by a manifest that a roll-up replaced."""
    try:
        return manifests.parse(files.read_limited(replaced, manifests.MAX_MANIFEST), str(replaced)).base_name
    except (OSError, ValueError, CheckpointDamaged):
        return None


def _remove_folder(folder: Path) -> bool:
    """What is left of a checkpoint, facts last: they tell one being deleted from one being filled. Durable at the end only:
    the manifest is gone already, and what a power cut brings back is a leftover."""
    if (folder / MANIFEST).exists():
        return False
    for path in sorted(folder.iterdir()):
        if not path.name.startswith(_FACT) and not path.is_dir():
            files.remove(path, durable=False)
    files.remove_tree(folder)
    return True
