"""Runs whose one checkpoint is to travel: noise, which nothing compresses on the way."""

import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import msgspec
import numpy

from perdure.training import files
from perdure.training.checkpoint.lineage import LaunchRecord, create_launch
from perdure.training.checkpoint.run_info import RunInfo
from perdure.training.checkpoint.writer import write_checkpoint
from perdure.training.run_dir import CheckpointName, RunDir
from perdure.training.slots import About, Entry

NAME = CheckpointName(100, 1)


@dataclass(frozen=True)
class Shape:
    ranks: int
    bytes: int
    """Of each rank's pack."""
    said: str


SHAPES = {
    "large": Shape(4, 256 << 20, "1 GiB in the packs of 4 ranks"),
    "small": Shape(1000, 200_000, "200 MB in 2,000 files, the packs and indexes of 1,000 ranks"),
}


class _Noise:
    """One rank's snapshot."""

    def __init__(self, rank: int, size: int) -> None:
        self.about = About(step=NAME.step, world={}, data={}, environment={}, code={}, config={}, loss={})
        path = f"rank-{rank}/noise"
        self._data = memoryview(numpy.random.default_rng(rank).bytes(size))
        self._entry = Entry(path=path, kind="tensor", dtype="uint8", shape=(size,), offset=0, nbytes=size)

    @property
    def entries(self) -> Sequence[Entry]:
        return [self._entry]

    def data(self, entry: Entry) -> memoryview:
        return self._data


def make(folder: Path, shape: str, quick: bool) -> int:
    """Write the run; the bytes that travel."""
    run, wanted = RunDir(folder), SHAPES[shape]
    files.make_dirs(run.checkpoints)
    info = RunInfo(id=f"travel-{shape}", name=shape, created=time.time(), steps=1000, chunk=100)
    files.create_exclusively(run.run_json, msgspec.json.encode(info))
    # A pull looks for what the launches left: without a record of its launch the checkpoint would belong to no history.
    launch = LaunchRecord(
        token=NAME.token, resumed_from=None, created=time.time(), host="bench", pid=1, run=info.id, owner="bench"
    )
    create_launch(run, launch)
    size, ranks = (wanted.bytes // 100, min(wanted.ranks, 20)) if quick else (wanted.bytes, wanted.ranks)
    snapshots = [_Noise(rank, size) for rank in range(ranks)]
    return write_checkpoint(run, info.id, NAME, snapshots, encoding="raw", threads=2).stored_bytes
