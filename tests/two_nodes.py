"""Two nodes of two ranks each that write their parts of one checkpoint."""

import numpy as np
from snapshots import RUN_ID, Source, random_bytes

from perdure.training.checkpoint.manifest import Manifest
from perdure.training.checkpoint.nodes import Node, Share
from perdure.training.checkpoint.shared import parts
from perdure.training.run_dir import CheckpointName, RunDir


def rank(number: int, step: int) -> Source:
    """Of two on each of two nodes. A model that changes a little, its bf16 copy, a generator, what only the two nodes have
    different, a piece."""
    master = np.random.default_rng(7).normal(0, 1, 50_000).astype(np.float32)
    master[:step] = step
    source = Source(step, data={"samples": 7, "tokens": 10})
    source.plain("model", {"layers": 3})
    source.array("model/master", master)
    source.tensor("model/half", "bfloat16", master.shape, (master.view(np.uint32) >> 16).astype(np.uint16).tobytes())
    source.array("model/table", np.arange(50_000, dtype=np.int64))
    source.tensor("rng/cpu", "uint8", (5000,), random_bytes(number, 5000))
    source.array("node", np.full(2000, number // 2, np.float32))
    return source.array(f"piece%at/{number}", np.full(2000, number, np.float32))


def share(run: RunDir, number: int, name: CheckpointName, *, full: bool = True) -> Manifest | None:
    own: list[object] = [rank(at, name.step) for at in (2 * number, 2 * number + 1)]
    stored = parts(own, 1)  # type: ignore[arg-type]  # sources in memory
    node = Node(number, 2)
    return Share(run=run, run_id=RUN_ID, name=name, node=node, stored=stored, full=full, encoding="auto", threads=1).write()
