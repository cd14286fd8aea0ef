"""Two machines with a disk each, and a store between them in which they commit checkpoints of two ranks."""

from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import msgspec
import numpy as np
from snapshots import RUN_ID, Source, random_bytes

from perdure.training import files
from perdure.training.agent.courier import Courier
from perdure.training.checkpoint.lineage import LaunchRecord, create_launch
from perdure.training.checkpoint.manifest import Manifest
from perdure.training.checkpoint.nodes import Node, Share
from perdure.training.checkpoint.run_info import RunInfo
from perdure.training.checkpoint.shared import parts
from perdure.training.run_dir import CheckpointName, RunDir
from perdure.training.storage.store import ObjectStore
from perdure.training.travel.fence import claim_run, record_launch

NAME = CheckpointName(2, 1)


def rank(number: int, step: int) -> Source:
    """What both have in common, which changes a little, and a piece of each."""
    common = np.random.default_rng(7).normal(0, 1, 50_000).astype(np.float32)
    common[:step] = step
    source = Source(step).plain("model", {"layers": 3}).array("model/common", common)
    source.array("model/table", np.arange(50_000, dtype=np.int64))
    return source.tensor(f"piece%at/{number}", "uint8", (50_000,), random_bytes(number, 50_000))


class Machines:
    """Two, each with its own directory of one run, and their couriers at work."""

    def __init__(self, folder: Path, store: ObjectStore, called: str = "gpt") -> None:
        self.folder, self.store, self.called = folder, store, called
        self.runs = [self.bare(number) for number in (0, 1)]
        claim_run(self.runs[0], store)
        record_launch(store, self.launch)

    launch = LaunchRecord(token=1, resumed_from=None, created=0.0, host="a", pid=1, run=RUN_ID, owner="o")

    def bare(self, number: int) -> RunDir:
        run = RunDir(self.folder / f"disk-{number}")
        files.make_dirs(run.checkpoints)
        settings = {name: getattr(self.store.settings, name) for name in ("endpoint_url", "region", "addressing")}
        info = RunInfo(
            id=RUN_ID, name=self.called, created=0, steps=9, chunk=3, store_url=self.store.url, in_parts=True, **settings
        )
        files.create_exclusively(run.run_json, msgspec.json.encode(info))
        create_launch(run, self.launch)
        return run

    def share(self, number: int, name: CheckpointName, *, full: bool = True, seed: int = 0) -> Manifest | None:
        stored = parts([rank(number + seed, name.step)], 1)  # type: ignore[list-item]  # a source in memory
        return Share(
            run=self.runs[number], run_id=RUN_ID, name=name, node=Node(number, 2), stored=stored, full=full, encoding="auto",
            threads=1, store=self.store,
        ).write()  # fmt: skip

    def commit(self, name: CheckpointName, *, full: bool = True) -> Manifest:
        couriers = [Courier(run, name.token, number, self.store) for number, run in enumerate(self.runs)]
        for one in couriers:
            one.start()
        with ThreadPoolExecutor() as pool:
            zero, other = pool.map(lambda number: self.share(number, name, full=full), (0, 1))
        for one in couriers:
            one.end(60.0)
        assert other is None
        assert zero is not None
        return zero

    def files(self, number: int, name: CheckpointName = NAME) -> set[str]:
        return {path.name for path in self.runs[number].checkpoint(name).iterdir()}
