"""How long does a step wait for a snapshot, against a bare `copy_` of the same state into preallocated tensors?"""

import gc
import statistics
import time
from collections.abc import Callable, Iterator
from functools import partial

import torch

from benchmarks import state
from benchmarks.measure import Values, Window, in_child
from benchmarks.ours import Slots
from benchmarks.report import Section, Setting, Target
from benchmarks.saves import SIZES, loaded
from benchmarks.state import Tracked

ROUNDS = 15
MOST = 1.2
_TENSORS, _ELEMENTS = 200_000, 256


def _many(count: int) -> Tracked:
    """So many tensors in all: small parameters, each with its moments and its step."""
    model = torch.nn.ParameterList([torch.randn(_ELEMENTS) for _ in range(count // 4)])
    optimizer = torch.optim.AdamW(model.parameters())
    for parameter in model:
        moments = {name: torch.rand(_ELEMENTS) for name in ("exp_avg", "exp_avg_sq")}
        optimizer.state[parameter] = {"step": torch.tensor(1.0), **moments}
    return {"model": model, "optimizer": optimizer}


def _seconds(call: Callable[[], object]) -> float:
    start = time.perf_counter()
    call()
    return time.perf_counter() - start


def _compare(tracked: Tracked) -> Values:
    """Interleaved, in one process: the bare copies and the snapshots. Python's collector rests, as in the product."""
    gc.disable()
    slots = Slots(tracked)
    sources = [value.detach() for _, value in state.tensors(tracked)]
    targets = [source.clone() for source in sources]

    def bare() -> None:
        for source, target in zip(sources, targets, strict=True):
            target.copy_(source)

    found: dict[str, list[float]] = {"copy": [], "snapshot": []}
    for number in range(ROUNDS):
        found["copy"].append(_seconds(bare))
        found["snapshot"].append(_seconds(partial(slots.snapshot, tracked, number % 2)))
    return dict(found)


def _states(setting: Setting) -> Iterator[tuple[str, Tracked]]:
    for gigabytes in SIZES:
        tracked = loaded(setting, gigabytes)
        yield f"{state.nbytes(tracked) / 1e9:.2f} GB", tracked
    count = 2000 if setting.quick else _TENSORS
    tracked = _many(count)
    yield f"{count:,} tensors, {state.nbytes(tracked) / 1e9:.2f} GB", tracked


def measure(setting: Setting) -> Iterator[Section]:
    section = Section("Stall of a snapshot", header=("state", "bare copy_", "snapshot", "ratio"), data={})
    section.notes = [f"Medians of {ROUNDS} interleaved rounds in one process; buffers and slots were touched before."]
    for size, tracked in _states(setting):

        def work(_: Window, tracked: Tracked = tracked) -> Values:
            return _compare(tracked)

        found = section.data[size] = in_child(work)
        if "failed" in found:
            section.rows.append((size, "-", "-", f"not measured: {found['failed']}"))
        else:
            copy, snapshot = statistics.median(found["copy"]), statistics.median(found["snapshot"])
            ratio = f"{snapshot / copy:.2f} x"
            section.rows.append((size, f"{copy * 1e3:.1f} ms", f"{snapshot * 1e3:.1f} ms", ratio))
            section.targets.append(
                Target(f"stall against a bare copy_, {size}", ratio, f"at most {MOST} x", snapshot <= MOST * copy)
            )
        yield section
