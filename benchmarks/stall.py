"""How long does a step wait for a snapshot, against a bare `copy_` of the same state into preallocated tensors?"""

import statistics
import time
from collections.abc import Callable
from typing import Any

import torch

from perdure.training.engine.rng import rng_leaves
from perdure.training.engine.stage import Stager
from perdure.training.engine.state import collect
from perdure.training.slots import About, SlotWriter, create_slot

ROUNDS = 15
WIDTH, LAYERS = 1024, 24
"""About 0.3 GB of weights, gradients apart, and AdamW moments."""


def _state() -> dict[str, Any]:  # Any: a module and its optimizer
    torch.manual_seed(0)
    model = torch.nn.Sequential(*(torch.nn.Linear(WIDTH, WIDTH) for _ in range(LAYERS)))
    optimizer = torch.optim.AdamW(model.parameters())
    model(torch.randn(4, WIDTH)).square().mean().backward()
    optimizer.step()
    optimizer.zero_grad()
    return {"model": model, "optimizer": optimizer}


def _seconds(call: Callable[[], object]) -> float:
    start = time.perf_counter()
    call()
    return time.perf_counter() - start


def measure() -> list[dict[str, Any]]:  # Any: JSON values
    """Median of interleaved rounds."""
    tracked = _state()
    stager = Stager([SlotWriter(create_slot(f"bench-{number}")) for number in range(2)])
    about = About(step=1, world={}, data={}, environment={}, code={}, config={}, loss={})
    leaves = [*collect(tracked), *rng_leaves()]
    stager.prepare(leaves)
    sources = [leaf.value for leaf in leaves if isinstance(leaf.value, torch.Tensor)]
    targets = [torch.empty_like(source).fill_(0) for source in sources]

    def bare() -> None:
        for source, target in zip(sources, targets, strict=True):
            target.copy_(source.detach())

    def snapshot(number: int) -> None:
        stager.copy(number % 2, [*collect(tracked), *rng_leaves()], about)

    bares, snapshots = [], []
    for number in range(ROUNDS):
        bares.append(_seconds(bare))
        snapshots.append(_seconds(lambda number=number: snapshot(number)))
    ratio = statistics.median(snapshots) / statistics.median(bares)
    size = sum(source.nbytes for source in sources)
    shown = f"{ratio:.2f} x ({statistics.median(snapshots) * 1e3:.1f} ms against {statistics.median(bares) * 1e3:.1f} ms)"
    question = f"stall of a snapshot of {size / 1e6:.0f} MB of AdamW state against a bare copy_"
    return [
        {
            "question": question,
            "shown": shown,
            "target": "under 2 x",
            "met": ratio < 2,
            "ratio": ratio,
            "snapshot": snapshots,
            "copy": bares,
        }
    ]
