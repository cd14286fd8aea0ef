"""How small is an increment against a full some steps before, and what does restoring it cost against the full?"""

import statistics
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path

from benchmarks import state
from benchmarks.measure import Failed, Values, Window, in_child, scratch
from benchmarks.ours import read_tensors, write
from benchmarks.ratios import FIRST, bf16, fp32, mixed, train
from benchmarks.report import Section, Setting, Target
from benchmarks.state import Tracked
from perdure.training.run_dir import CheckpointName, RunDir

SECOND = CheckpointName(2, 1)
_REPEATS = 7
Make = Callable[[list[Path], Setting], Tracked]


@dataclass(frozen=True)
class _Case:
    what: str
    make: Make
    path: Callable[[Setting], Path]
    """The state that the increment holds; its base is the first tile."""
    low: float = 0.0
    high: float = 0.0
    """The target, where there is one."""


def _fine(steps: int) -> Callable[[Setting], Path]:
    return lambda setting: state.fine_tuned(setting.shape, steps)


def _tile(number: int) -> Callable[[Setting], Path]:
    return lambda setting: state.tiles(setting.shape, number + 1)[number]


CASES = (
    _Case("bf16 weights, fine-tuning at 3e-6, 1 step", bf16, _fine(1), 5, 40),
    _Case("bf16 weights, fine-tuning at 3e-6, 10 steps", bf16, _fine(10), 5, 40),
    _Case("bf16 weights, fine-tuning at 3e-6, 20 steps", bf16, _fine(20), 5, 40),
    _Case("bf16 weights, pre-training at 6e-4, 5 steps", bf16, _tile(1)),
    _Case("fp32 state, fine-tuning at 3e-6, 10 steps", fp32, _fine(10)),
    _Case("fp32 state, pre-training at 6e-4, 5 steps", fp32, _tile(1)),
    _Case("fp32 state, pre-training at 6e-4, 50 steps", fp32, _tile(10)),
    _Case("14-byte state, fine-tuning at 3e-6, 10 steps", mixed, _fine(10)),
)


def _write(folder: Path, before: Tracked, after: Tracked) -> Values:
    """A full of each state, and an increment of the second against the first; in a process each, which keeps its slots."""

    def first(_: Window) -> Values:
        return vars(write(folder, FIRST, before, "auto"))

    def increment(_: Window) -> Values:
        written = write(folder, SECOND, after, "auto", FIRST)
        if written.base is None:
            raise Failed("a full was written where an increment was asked for")
        return vars(written)

    def full(_: Window) -> Values:
        return vars(write(folder / "full", SECOND, after, "auto"))

    found: Values = {}
    for name, work in (("base", first), ("increment", increment), ("full", full)):
        found[name] = in_child(work)
        if "failed" in found[name]:
            return {"failed": f"{name}: {found[name]['failed']}"}
    return found


def _restores(folder: Path) -> Values:
    """Seconds to restore the increment and the full of the same state, warm, interleaved."""

    def work(_: Window) -> Values:
        tries: dict[str, list[float]] = {"increment": [], "full": []}
        for _repeat in range(_REPEATS):
            for name, root in (("increment", folder), ("full", folder / "full")):
                start = time.perf_counter()
                read_tensors(RunDir(root).checkpoint(SECOND))
                tries[name].append(time.perf_counter() - start)
        return {name: statistics.median(seconds) for name, seconds in tries.items()}

    return in_child(work)


def _case(setting: Setting, case: _Case) -> Values:
    base, path = train(setting, lambda: [state.tiles(setting.shape, 1)[0], case.path(setting)])
    with scratch(setting.folder, "increment") as folder:
        found = _write(folder, case.make([base], setting), case.make([path], setting))
        if "failed" in found:
            return found
        seconds = _restores(folder)
        return {**found, "restore": seconds} if "failed" not in seconds else seconds


def _row(case: _Case, found: Values) -> tuple[str, ...]:
    if "failed" in found:
        return (case.what, "-", "-", "-", "-", f"not measured: {found['failed']}")
    full, increment, restore = found["full"], found["increment"], found["restore"]
    share = f"{restore['increment'] / restore['full']:.2f} x"
    ratios = (f"{one['raw'] / one['stored']:.3f}" for one in (increment, full))
    return (case.what, f"{increment['raw'] / 1e6:.0f}", *ratios, f"{restore['increment']:.3f}", share)


def _targets(case: _Case, found: Values) -> Iterator[Target]:
    if "failed" in found:
        return
    ratio = found["increment"]["raw"] / found["increment"]["stored"]
    if case.high:
        yield Target(f"increment, {case.what}", f"{ratio:.1f} x", f"{case.low:.0f} to {case.high:.0f} x", ratio >= case.low)
    slower = found["restore"]["increment"] / found["restore"]["full"]
    yield Target(f"restore against a full, {case.what}", f"{slower:.2f} x", "at most 2 x", slower <= 2)


def measure(setting: Setting) -> Iterator[Section]:
    header = ("increment", "raw MB", "ratio", "ratio of a full", "restore s", "against restoring a full")
    section = Section("Increments", header=header, data={})
    section.notes = [
        f"Depth one, encoding auto; the base is the state after {setting.shape.steps} steps. Ratio: raw bytes of the whole "
        "state over the stored bytes of the increment alone. Restores are warm and proven against every digest."
    ]
    for case in CASES:
        found = _case(setting, case)
        section.rows.append(_row(case, found))
        section.targets += _targets(case, found)
        section.data[case.what] = found
        yield section
