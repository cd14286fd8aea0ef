"""Perdure as a peer: the product's own staging, writer, reader and proof; the saver is a process of its own, as in a run."""

import subprocess
import sys
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import partial
from pathlib import Path

from torch import Tensor

from benchmarks.measure import THREADS
from benchmarks.peers import Peer
from benchmarks.saver import NAME
from benchmarks.state import Tracked
from perdure.training.checkpoint.readahead import ReadAhead
from perdure.training.checkpoint.reader import open_checkpoint
from perdure.training.checkpoint.writer import write_checkpoint
from perdure.training.engine.leaves import Leaf, LoadedLeaf
from perdure.training.engine.overlap import Overlap
from perdure.training.engine.remembered import Memory
from perdure.training.engine.rng import rng_leaves
from perdure.training.engine.stage import Stager, Staging
from perdure.training.engine.state import collect
from perdure.training.run_dir import CheckpointName, RunDir
from perdure.training.slots import About, SlotWriter, Snapshot, create_slot

ABOUT = About(step=1, world={"size": 1}, data={}, environment={}, code={}, config={}, loss={})
DEFAULT = "Perdure, auto, 2 threads"
LAZY = "Perdure, auto, 2 threads, lazy"


@dataclass(frozen=True)
class Written:
    """Bytes of a checkpoint; `base` is set for an increment."""

    raw: int
    stored: int
    base: str | None


def write(root: Path, name: CheckpointName, tracked: Tracked, encoding: str, base: CheckpointName | None = None) -> Written:
    """Stage this state and write it as a checkpoint of the run at `root`, in this process."""
    snapshot = Snapshot(Slots(tracked, 1).descriptors[0])
    manifest = write_checkpoint(RunDir(root), "bench", name, [snapshot], encoding=encoding, threads=THREADS, base=base)
    return Written(manifest.raw_bytes, manifest.stored_bytes, manifest.base.name if manifest.base else None)


class Slots:
    """Two slots and the stager that fills them, both filled once."""

    def __init__(self, tracked: Tracked, count: int = 2) -> None:
        self.descriptors = [create_slot(f"bench-{number}") for number in range(count)]
        self._stager = Stager([SlotWriter(descriptor) for descriptor in self.descriptors])
        self._memory = Memory()
        self._stager.prepare(self._leaves(tracked))
        for number in range(count):
            self.snapshot(tracked, number)

    def snapshot(self, tracked: Tracked, number: int = 0) -> None:
        """All the training step waits for."""
        self._stager.copy(number, self._leaves(tracked), ABOUT)

    def begin(self, tracked: Tracked) -> Staging:
        """A snapshot in the first slot of which all but the tensors is there."""
        return self._stager.begin(0, self._leaves(tracked), ABOUT)

    def _leaves(self, tracked: Tracked) -> list[Leaf]:
        return [*collect(tracked, self._memory), *rng_leaves()]


def read_tensors(folder: Path) -> dict[str, Tensor]:
    """All tensors of a checkpoint, proven against their digests, in memory of their own."""
    with open_checkpoint(folder) as reader, ReadAhead(reader, THREADS) as ahead:
        return {
            path: LoadedLeaf(entry.kind, entry.dtype, tuple(entry.shape), ahead.read(path)).tensor(path)
            for path, entry in reader.entries.items()
            if entry.kind == "tensor"
        }


class Perdure:
    """One encoding, and the threads that the saver encodes with."""

    def __init__(self, encoding: str, threads: int) -> None:
        self.encoding, self.threads = encoding, threads

    def prepare(self, tracked: Tracked, folder: Path) -> None:
        self._slots = Slots(tracked)
        slot = self._slots.descriptors[0]
        command = [sys.executable, "-m", "benchmarks.saver", str(slot), self.encoding, str(self.threads)]
        self._saver = subprocess.Popen(
            command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, pass_fds=[slot], text=True, bufsize=1
        )
        self._expect("ready")
        self.save(tracked, folder)  # as the peers with helpers: a save that does not count
        self.wait(folder)

    def save(self, tracked: Tracked, folder: Path) -> None:
        self._slots.snapshot(tracked)
        self._announce(folder)

    def wait(self, folder: Path) -> None:
        self._expect("committed")

    def _announce(self, folder: Path) -> None:
        assert self._saver.stdin is not None
        self._saver.stdin.write(f"{folder}\n")

    def _expect(self, word: str) -> None:
        assert self._saver.stdout is not None
        if self._saver.stdout.readline() != f"{word}\n":
            raise RuntimeError("the saver ended")

    def load(self, tracked: Tracked, folder: Path) -> Mapping[str, Tensor]:
        return read_tensors(RunDir(folder).checkpoint(NAME))


class Lazy(Perdure):
    """With `checkpoint.lazy`: the copy runs beside the training until the optimizer's next step."""

    def prepare(self, tracked: Tracked, folder: Path) -> None:
        self._overlap = Overlap(tracked)
        super().prepare(tracked, folder)

    def save(self, tracked: Tracked, folder: Path) -> None:
        self._overlap.start(self._slots.begin(tracked), partial(self._announce, folder))

    def wait(self, folder: Path) -> None:
        self._overlap.settle()
        super().wait(folder)


def perdure() -> dict[str, Callable[[], Peer]]:
    """Perdure's rows; the default is `DEFAULT`."""
    return {
        "Perdure, raw, 2 threads": lambda: Perdure("raw", 2),
        "Perdure, auto, 1 thread": lambda: Perdure("auto", 1),
        DEFAULT: lambda: Perdure("auto", 2),
        "Perdure, small, 2 threads": lambda: Perdure("small", 2),
    }
