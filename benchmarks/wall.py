"""How much wall time does a save cost in all? A training loop with one save in it, against the same loop without.

Both cores train, so what the saver needs it takes from them; the loop ends when its steps are done and the save is durable."""

import itertools
import statistics
import time
from collections.abc import Iterator
from pathlib import Path

import torch

from benchmarks import state
from benchmarks.measure import Values, Window, in_child, scratch
from benchmarks.ours import DEFAULT, LAZY, Lazy
from benchmarks.report import Section, Setting, Target
from benchmarks.saves import BASELINE, BEST_RAW, Make, interleaved, loaded, medians, rows
from benchmarks.state import Tracked
from examples.gpt.train import loss_of

SIZE = 0.4
BARE = "no save"
COMPARED = (BASELINE, "DCP async, thread", "DCP async, process", "torch_checkpointing + fsync", BEST_RAW, DEFAULT, LAZY)
_SECONDS = 3.0
_FIRST = 3
"""The step before which the save is made."""


class _Loop:
    """Forward, backward and optimizer step of the first tile; what is saved is all of the state."""

    def __init__(self, setting: Setting, tracked: Tracked) -> None:
        draw, shape = torch.Generator().manual_seed(1), setting.shape
        part = tracked["model"][0]
        self._model, self._text = part, torch.randint(256, (1, shape.block + 1), generator=draw)
        self._optimizer = tracked["optimizer"]  # steps what has gradients

    def step(self) -> None:
        loss_of(self._model, self._text[:, :-1], self._text[:, 1:]).backward()  # type: ignore[no-untyped-call]  # torch's stub
        self._optimizer.step()
        self._optimizer.zero_grad()


def _timed(setting: Setting, tracked: Tracked, make: Make | None, folder: Path, steps: int) -> Values:
    """Wall time of `steps` steps, with a save made by `make` before the `_FIRST`th; the median step without one."""

    def work(_: Window) -> Values:
        loop, peer = _Loop(setting, tracked), make() if make else None
        if peer is not None:
            (folder / "first").mkdir()
            (folder / "save").mkdir()
            peer.prepare(tracked, folder / "first")
        for _warm in range(3):
            loop.step()
        ends = [time.perf_counter()]
        for number in range(steps):
            if peer is not None and number == _FIRST:
                peer.save(tracked, folder / "save")
            loop.step()
            ends.append(time.perf_counter())
        if peer is not None:
            peer.wait(folder / "save")
        each = statistics.median(after - before for before, after in itertools.pairwise(ends))
        longer = ends[_FIRST + 1] - ends[_FIRST] - each
        return {"seconds": time.perf_counter() - ends[0], "step": each, "steps": steps, "longer": longer}

    return in_child(work)


def _section(size: int, tries: dict[str, list[Values]]) -> Section:
    found = {name: medians(values) for name, values in tries.items()}
    section = Section(
        "Wall time lost per save", header=("row", "loop s", "lost s", "of that in the step of the save", "lost in all")
    )
    section.notes = [
        f"A loop that trains on both cores, with one save of {size / 1e9:.2f} GB; lost: beyond the same loop without a save in "
        "the same round. This counts the stall and what the saver takes from the loop until the save is durable. With lazy the "
        "copy runs beside forward and backward, and the optimizer's step waits for what is left of it."
    ]
    lost = {}
    for name in COMPARED:
        pairs = zip(tries[name], tries[BARE], strict=False)
        each = [ours["seconds"] - bare["seconds"] for ours, bare in pairs if "seconds" in ours and "seconds" in bare]
        lost[name] = statistics.median(each) if each else None
    best = min((value for value in lost.values() if value is not None), default=None)
    for name, figures in found.items():
        if "seconds" not in figures:
            section.rows.append((name, "-", "-", "-", f"not measured: {figures.get('failed', 'not reached')}"))
            continue
        value = lost.get(name)
        told = "-" if value is None else f"{value:.2f}"
        behind = name == DEFAULT and value is not None and best is not None and value > best
        share = "-" if value is None else f"{value / (figures['seconds'] - value):.1%}"
        longer = "-" if value is None else f"{figures['longer']:.2f}"
        note = "; **Perdure is not first**" if behind else ""
        section.rows.append((name, f"{figures['seconds']:.2f}", told, longer, share + note))
    if lost[DEFAULT] is not None and lost[BASELINE] is not None:
        shown = f"{lost[DEFAULT]:.2f} s; torch.save + fsync {lost[BASELINE]:.2f} s"
        section.targets = [Target(f"wall time lost to a save, saver running, {size / 1e9:.2f} GB", shown, "to be told", None)]
    section.data = {"rounds": tries, "medians": found, "lost": lost}
    return section


def measure(setting: Setting) -> Iterator[Section]:
    tracked = loaded(setting, SIZE)
    size, makers = state.nbytes(tracked), {**rows(), LAZY: lambda: Lazy("auto", 2)}
    with scratch(setting.folder, "wall") as folder:
        trial = _timed(setting, tracked, None, folder, 5)
    if "failed" in trial:
        yield Section("Wall time lost per save", notes=[f"Not measured: {trial['failed']}."], data=trial)
        return
    steps = 6 if setting.quick else max(12, round(_SECONDS / trial["step"]))
    tries: dict[str, list[Values]] = {name: [] for name in (BARE, *COMPARED)}
    for name in interleaved(list(tries), setting.rounds):
        with scratch(setting.folder, "wall") as folder:
            tries[name].append(_timed(setting, tracked, makers.get(name), folder, steps))
        yield _section(size, tries)
