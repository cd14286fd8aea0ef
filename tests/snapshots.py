"""Snapshots made in memory, leaf by leaf, and how to commit one: what the checkpoint tests stand on."""

import random
from collections.abc import Sequence
from typing import Any

import numpy as np

from perdure.training import files
from perdure.training.checkpoint.layout import ITEM_SIZES
from perdure.training.checkpoint.manifest import Manifest
from perdure.training.checkpoint.plain import pack_plain
from perdure.training.checkpoint.writer import write_checkpoint
from perdure.training.run_dir import CheckpointName, RunDir
from perdure.training.slots import About, Entry

FIRST = CheckpointName(2, 1)
RUN_ID = "gpt-1234"


class Source:
    """A snapshot in memory: `tensor(...)`, `array(...)`, `plain(...)` add leaves."""

    def __init__(self, step: int = 2, **about: Any) -> None:
        told: dict[str, Any] = {"world": {"size": 1}, "data": {"samples": 7}}
        told |= {"environment": {}, "code": {}, "config": {}, "loss": {}}
        self.about = About(step=step, **{**told, **about})
        self.entries: list[Entry] = []
        self.bytes: dict[str, bytes] = {}

    def tensor(self, path: str, dtype: str, shape: Sequence[int], data: bytes, kind: str = "tensor") -> "Source":
        self.entries.append(Entry(path=path, kind=kind, dtype=dtype, shape=tuple(shape), offset=0, nbytes=len(data)))
        self.bytes[path] = data
        return self

    def array(self, path: str, value: np.ndarray[Any, Any]) -> "Source":
        return self.tensor(path, str(value.dtype), value.shape, value.tobytes())

    def plain(self, path: str, value: Any) -> "Source":
        data = pack_plain(value, path)
        return self.tensor(path, "plain", (len(data),), data, kind="plain")

    def data(self, entry: Entry) -> memoryview:
        return memoryview(self.bytes[entry.path])


def random_bytes(seed: object, size: int) -> bytes:
    return random.Random(f"{seed}").randbytes(size)


def small_source(step: int = 2, seed: int = 0) -> Source:
    """About 60 kB with a leaf of every way of storing: planes, one repeated byte, zstd, raw, tiny, empty, plain."""
    rng = np.random.default_rng(seed)
    source = Source(step)
    source.plain("model", {"names": ["a", "b"], "step": step})
    source.array("model/weight", rng.normal(0, 0.02, (60, 100)).astype(np.float32))
    source.array("model/zeros", np.zeros(2000, np.float32))
    source.array("optimizer/step", np.array(float(step), np.float32))
    source.array("optimizer/none", np.zeros((0, 4), np.int64))
    source.array("data/order", np.arange(2000, dtype=np.int64))
    source.tensor("rng/cpu", "uint8", (5056,), random_bytes(seed, 5056))
    return source


def ranks(step: int, seed: int) -> list[Source]:
    """Two ranks; the first has enough noise for several writes."""
    large = small_source(step, seed).tensor("noise", "uint8", (9 << 20,), random_bytes(seed, 9 << 20))
    return [large, small_source(step, seed + 1)]


def item_bytes(dtype: str) -> int:
    return ITEM_SIZES[dtype]


def write(
    run: RunDir,
    source: Source,
    *more: Source,
    name: CheckpointName | None = None,
    threads: int = 2,
    base: CheckpointName | None = None,
    encoding: str = "auto",
) -> Manifest:
    """Commit a checkpoint of that step, launch 1, one rank per source."""
    files.make_dirs(run.checkpoints)
    name = name or CheckpointName(source.about.step, 1)
    return write_checkpoint(run, RUN_ID, name, [source, *more], encoding=encoding, threads=threads, base=base)
