"""How long steps take: the wall time of each, and of several ranks the time that each works itself, by which slow are named.

Own work of a step is its time until all ranks agree at its end, without what a rank may wait for others in between: from its
gradients being there (under fully_shard: from the beginning of its forward) to its optimizer's step. It is host time."""

import statistics
import sys
import time
from collections import deque
from collections.abc import Mapping, Sequence
from typing import Any

import torch

from perdure.training.engine.link import Link
from perdure.training.engine.together import Alone

WINDOW = 20
"""Steps over which ranks are compared, by their medians."""
FACTOR = 1.5
"""A rank is slow that works so many times as long as the median of all (of an even number, the lower one) ..."""
LEAST_SHARE = 0.1
"""... and longer by such a share of a whole step."""


class Pace:
    """Counts from `begin`, which the session calls before each loop body, to `agree`, which it calls after."""

    def __init__(self, link: Link, together: Alone, tracked: Mapping[str, Any]) -> None:  # Any: tracked objects
        self._link, self._together, self._marks = link, together, _Marks()
        self.steps = 0
        """Made by this launch."""
        self._began = 0.0
        self._walls: deque[float] = deque(maxlen=WINDOW)
        self._works: deque[float] = deque(maxlen=WINDOW)
        if together.world > 1:
            _watch(tracked, self._marks)

    @property
    def step_secs(self) -> float | None:
        """Wall time of a step, the median of the last ones; what is saved or waited for between two steps is not in it."""
        return statistics.median(self._walls) if self._walls else None

    def begin(self) -> None:
        self._began = time.perf_counter()
        self._marks.take()

    def agree(self, step: int) -> None:
        """Have all ranks agree, who wait here for the last of them; every now and then also compare their work."""
        self._works.append(time.perf_counter() - self._began - self._marks.take())
        self._together.agree()
        self._walls.append(time.perf_counter() - self._began)
        self.steps += 1
        if self._together.world > 1 and self.steps % WINDOW == 0:
            self._compare(step)

    def _compare(self, step: int) -> None:
        works = self._together.gather(statistics.median(self._works))
        if self._link.rank == 0:
            slow = slow_ranks(works, statistics.median(self._walls))
            told = [[rank, round(works[rank], 4)] for rank in slow]
            self._link.say(slow=told, median=round(statistics.median_low(works), 4), ranks=len(works), at=step)


def slow_ranks(works: Sequence[float], step_secs: float) -> list[int]:
    """The slowest first."""
    median = statistics.median_low(works)
    most = max(FACTOR * median, median + LEAST_SHARE * step_secs)
    return sorted((rank for rank, secs in enumerate(works) if secs > most), key=lambda rank: -works[rank])


class _Marks:
    """Since when this rank may be waiting for others, as far as hooks can tell. Torch holds hooks where Python's collector does
    not look, so it holds nothing of what is tracked."""

    def __init__(self) -> None:
        self._since = self._waited = 0.0

    def gradient(self, _: torch.Tensor) -> None:
        """The last one counts."""
        self._since = time.perf_counter()

    def forward(self, *_: object) -> None:
        """The first one counts."""
        self._since = self._since or time.perf_counter()

    def optimizer(self, *_: object) -> None:
        self._waited += time.perf_counter() - self._since if self._since else 0.0
        self._since = 0.0

    def take(self) -> float:
        """Seconds waited since it was asked last."""
        waited, self._waited, self._since = self._waited, 0.0, 0.0
        return waited


def _watch(tracked: Mapping[str, Any], marks: _Marks) -> None:  # Any: tracked objects
    optimizers = [obj for obj in tracked.values() if isinstance(obj, torch.optim.Optimizer)]
    sharded = _fully_sharded(tracked)
    for module in sharded:  # they wait for each other in forward and backward, again and again
        uncompiled = torch.compiler.disable(marks.forward)  # type: ignore[no-untyped-call]  # torch's stub
        module.register_forward_pre_hook(uncompiled, prepend=True)
    for optimizer in optimizers:
        optimizer.register_step_pre_hook(marks.optimizer)
        for group in optimizer.param_groups if not sharded else ():  # backward reaches the first of a group about last
            first = next((parameter for parameter in group["params"] if parameter.requires_grad and parameter.is_leaf), None)
            if first is not None:
                first.register_post_accumulate_grad_hook(marks.gradient)


def _fully_sharded(tracked: Mapping[str, Any]) -> list[torch.nn.Module]:  # Any: tracked objects
    """Without importing what makes them."""
    if "torch.distributed.fsdp" not in sys.modules:
        return []
    from torch.distributed.fsdp import FSDPModule

    return [obj for obj in tracked.values() if isinstance(obj, FSDPModule) and isinstance(obj, torch.nn.Module)]
