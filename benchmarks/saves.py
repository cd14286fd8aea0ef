"""Who saves a training state best? Every peer and Perdure at 0.4 and 1.5 GB, in interleaved rounds; a table a size.

Stall: how long the training step waits. Durable: from the start of the save until it is committed and synced."""

import gc
import shutil
import statistics
import time
from collections import Counter
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import torch
import xxhash

from benchmarks import state
from benchmarks.measure import THREADS, Failed, Values, Window, forget, fsync_all, in_child, scratch, stored_bytes
from benchmarks.ours import DEFAULT, perdure
from benchmarks.peers import Peer, others
from benchmarks.report import Section, Setting, Target
from benchmarks.saver import NAME
from benchmarks.state import Tracked
from perdure.training.checkpoint.verify import verify_folder
from perdure.training.run_dir import RunDir

SIZES = (0.4, 1.5)
LARGE = 1.0
"""GB from which there are two rounds: the larger a save, the steadier its time."""
_ENOUGH = 15.0
"""Seconds: what takes longer is measured once."""
BEST_RAW = "Perdure, raw, 2 threads"
BASELINE = "torch.save + fsync"
UNSYNCED = "torch.save"
AGAIN = "again"
Make = Callable[[], Peer]
_LOWER = {
    "stall": "stall",
    "durable": "time to durable",
    "bytes": "bytes",
    "warm": "restore",
    AGAIN: "restoring again",
    "peak": "memory",
    "cpu": "CPU",
}
"""Figures of which less is better, by the words they are called in the table."""


def rows() -> dict[str, Make]:
    return {**others(), **perdure()}


def loaded(setting: Setting, gigabytes: float) -> Tracked:
    """The state nearest to this size; tiles that are not cached yet are trained in a process of their own."""
    count = state.needed(setting.shape, setting.bytes_of(gigabytes))

    def train(_: Window) -> Values:
        return {"paths": [str(path) for path in state.tiles(setting.shape, count)]}

    found = in_child(train, limit=3600)
    if "failed" in found:
        raise Failed(f"no state to measure with: {found['failed']}")
    gc.collect()
    return state.build(setting.shape, [Path(path) for path in found["paths"]])


def save_once(make: Make, tracked: Tracked, folder: Path) -> Values:
    """Save into `folder`, which then holds the checkpoint."""

    def work(window: Window) -> Values:
        peer = make()
        with scratch(folder.parent, "first") as first:
            peer.prepare(tracked, first)
        window.open()
        start = time.perf_counter()
        peer.save(tracked, folder)
        stall = time.perf_counter() - start
        peer.wait(folder)
        durable = time.perf_counter() - start
        return {"stall": stall, "durable": durable, "cpu": window.close(), "bytes": stored_bytes(folder)}

    return in_child(work)


def _sums(values: Any) -> Counter[bytes]:  # Any: an iterable of tensors
    """The tensors' contents, whatever they are called."""
    flat = (value.detach().contiguous().reshape(-1).view(torch.uint8).numpy() for value in values)
    return Counter(xxhash.xxh3_128_digest(value) for value in flat)


def load_once(make: Make, tracked: Tracked, folder: Path) -> Values:
    """Load in a new process, as every resume does: with the files' pages dropped before, then with them in memory. There load
    once more, into memory that the process has used before; and prove that all of the state came back."""

    def work(*names: str) -> Callable[[Window], Values]:
        def load(_: Window) -> Values:
            peer, found = make(), {}
            for name in names:
                start = time.perf_counter()
                restored = peer.load(tracked, folder)
                found[name] = time.perf_counter() - start
                if name == AGAIN and _sums(value for _, value in state.tensors(tracked)) - _sums(restored.values()):
                    raise Failed("what was restored differs from what was saved")
                del restored
            return found

        return load

    fsync_all(folder)
    forget(folder)
    cold = in_child(work("cold"))
    return cold if "failed" in cold else cold | in_child(work("warm", AGAIN))


def verify_once(folder: Path) -> Values:
    """GB of stored bytes per second of CPU, shallow and deep."""
    checkpoint = RunDir(folder).checkpoint(NAME)
    size = stored_bytes(folder)

    def work(_: Window) -> Values:
        found = {}
        for name, deep in (("shallow", False), ("deep", True)):
            start, wall = time.process_time(), time.perf_counter()
            if damage := verify_folder(checkpoint, deep=deep):
                raise Failed(damage[0].detail)
            found[name] = size / (time.process_time() - start) / 1e9
            found[f"{name} wall"] = size / (time.perf_counter() - wall) / 1e9
        return found

    return in_child(work)


def measure_row(name: str, make: Make, tracked: Tracked, folder: Path) -> Values:
    """Everything of one row in one round."""
    with scratch(folder, "save") as target:
        found = save_once(make, tracked, target)
        if "failed" not in found:
            found |= load_once(make, tracked, target)
        if "failed" not in found and name in perdure():
            found |= verify_once(target)
    if name == UNSYNCED:
        found.pop("durable", None)  # the page cache is not a disk
    return found


def interleaved(names: list[str], rounds: int) -> Iterator[str]:
    """Every name once a round, each round from another one on."""
    for number in range(rounds):
        first = number * len(names) // rounds
        yield from names[first:] + names[:first]


def medians(tries: list[Values]) -> Values:
    """The median of each figure; the reason instead where any try has failed."""
    for one in tries:
        if "failed" in one:
            return {"failed": one["failed"]}
    return {key: statistics.median(one[key] for one in tries) for key in tries[0]} if tries else {}


def _ahead(name: str, figures: Values, ours: Values) -> str:
    """In words, where a row beats Perdure as it is by default."""
    if not ours:
        return "Perdure's row was not reached"
    better = [word for key, word in _LOWER.items() if key in figures and key in ours and figures[key] < ours[key]]
    told = ", ".join(better)
    if name in perdure():
        return told or "nothing"
    return f"**Perdure is not first** in {told}" if better else "nothing: Perdure is first in all"


def _cells(name: str, figures: Values, ours: Values, size: int) -> tuple[str, ...]:
    if "failed" in figures or not figures:
        return (name, *["-"] * 9, f"not measured: {figures.get('failed', 'not reached')}")
    verify = f"{figures['shallow']:.1f} / {figures['deep']:.1f}" if "deep" in figures else "none"
    return (
        name,
        f"{figures['stall']:.3f}",
        f"{figures['durable']:.2f}" if "durable" in figures else "never",
        f"{figures['bytes'] / 1e6:.0f}",
        f"{size / figures['bytes']:.3f}",
        verify,
        f"{figures['warm']:.2f} / {figures[AGAIN]:.2f}",
        f"{figures['cold']:.2f}",
        f"{figures['peak'] / 1e6:.0f}",
        f"{figures['cpu']:.2f}",
        "-" if name == DEFAULT else _ahead(name, figures, ours),
    )


HEADER = (
    "row",
    "stall s",
    "durable s",
    "MB",
    "ratio",
    "verify GB/s a core, shallow / deep",
    "restore s, first / again",
    "restore, cold s",
    "peak extra MB",
    "CPU s",
    "where it beats Perdure (auto, 2 threads)",
)


def _section(size: int, leaves: int, tries: dict[str, list[Values]]) -> Section:
    found = {name: medians(values) for name, values in tries.items()}
    rounds = max(map(len, tries.values()))
    section = Section(f"Saving {size / 1e9:.2f} GB of AdamW state", header=HEADER)
    section.notes = [
        f"{leaves} tensors; medians of {rounds} interleaved rounds, of one for a row that takes over {_ENOUGH:.0f} s; "
        f"{THREADS} threads; every row in a process of its own, after a first save that does not count. Peak extra memory "
        "includes buffers kept between saves. Where a row says fsync, the benchmark syncs for a peer that does not. Verify is "
        "stored bytes over CPU seconds; only Perdure can. Restores are the first in their process, as in a resume; again: the "
        "second, into memory that the first has given back."
    ]
    section.rows = [_cells(name, figures, found[DEFAULT], size) for name, figures in found.items()]
    section.targets = _targets(found, size)
    section.data = {"state_bytes": size, "tensors": leaves, "rounds": tries, "medians": found}
    return section


def _targets(found: dict[str, Values], size: int) -> list[Target]:
    """The issue's targets that this table answers."""
    targets = []

    def compare(name: str, key: str, baseline: str, other: str, most: float, what: str) -> None:
        ours, theirs = found[name].get(key), found[baseline].get(other)
        if ours is not None and theirs is not None:
            shown = f"{ours / theirs:.2f} x ({ours:.2f} s against {theirs:.2f} s)"
            targets.append(Target(f"{what}, {size / 1e9:.2f} GB", shown, f"at most {most:.1f} x", ours <= most * theirs))

    compare(BEST_RAW, "durable", BASELINE, "durable", 1.1, "time to durable, raw, against torch.save + fsync")
    compare(DEFAULT, "durable", BASELINE, "durable", 1.3, "time to durable, encoded, against torch.save + fsync")
    compare(DEFAULT, "warm", BASELINE, "warm", 1.3, "restore, encoded, against torch.load")
    compare(DEFAULT, AGAIN, BASELINE, AGAIN, 1.3, "restore again in the same process, encoded, against torch.load")
    for depth in ("shallow", "deep"):
        if (rate := found[DEFAULT].get(depth)) is not None:
            question = f"verify, {depth}, stored bytes per core, {size / 1e9:.2f} GB"
            targets.append(Target(question, f"{rate:.2f} GB/s", "at least 1.5 GB/s", rate >= 1.5))
    return targets


def measure_size(setting: Setting, gigabytes: float) -> Iterator[Section]:
    tracked = loaded(setting, gigabytes)
    size, leaves = state.nbytes(tracked), sum(1 for _ in state.tensors(tracked))
    makers = rows()
    tries: dict[str, list[Values]] = {name: [] for name in makers}
    done: set[str] = set()
    shutil.rmtree(setting.folder / "save", ignore_errors=True)
    for name in interleaved(list(makers), setting.rounds if gigabytes < LARGE else min(setting.rounds, 2)):
        if name in done:
            continue
        start = time.monotonic()
        tries[name].append(measure_row(name, makers[name], tracked, setting.folder))
        if "failed" in tries[name][-1] or time.monotonic() - start > _ENOUGH:
            done.add(name)  # it said why, or the time is for those that are quicker
        yield _section(size, leaves, tries)


def small(setting: Setting) -> Iterator[Section]:
    yield from measure_size(setting, SIZES[0])


def large(setting: Setting) -> Iterator[Section]:
    yield from measure_size(setting, SIZES[1])
