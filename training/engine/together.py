"""What all ranks decide together at the end of each step: whether to save, to stop, to wait. A handful of numbers is reduced
over a gloo group of our own, so every rank cuts and stops at the same step, and a stop waits for no further one."""

from datetime import timedelta

import torch
import torch.distributed as dist

from perdure.training.engine.link import Link
from perdure.training.errors import ConfigError

_TIMEOUT = timedelta(days=31)
"""Ranks wait here for what may take long: a lease, room on the disk. Whether they hang, the agent finds out."""


class Alone:
    """One rank: what it is asked counts."""

    def __init__(self, link: Link) -> None:
        self._link = link
        self.world = 1

    def agree(self) -> None:
        """Agree on what every rank knows at this moment. All must call it at the same place."""
        self._link.agree(self._link.wishes())

    def gather(self, number: float) -> list[float]:
        """Every rank's number, by rank. All must call it at the same place."""
        return [number]


class Together(Alone):
    """Several ranks."""

    def __init__(self, link: Link, world: int) -> None:
        super().__init__(link)
        self.world = world
        if not dist.is_initialized():
            raise ConfigError(
                f"the launch is of {world} ranks, but torch.distributed is not initialised",
                "call torch.distributed.init_process_group() before session.steps(), or train with one process",
            )
        if dist.get_world_size() != world:
            raise ConfigError(f"the launch is of {world} ranks, but torch.distributed has {dist.get_world_size()} ranks")
        self._group = dist.new_group(backend="gloo", timeout=_TIMEOUT)

    def agree(self) -> None:
        numbers = torch.tensor(self._link.wishes(), dtype=torch.int64)
        dist.all_reduce(numbers, dist.ReduceOp.MAX, group=self._group)
        self._link.agree(numbers.tolist())

    def gather(self, number: float) -> list[float]:
        mine = torch.tensor([number], dtype=torch.float64)
        every = [torch.empty_like(mine) for _ in range(self.world)]
        dist.all_gather(every, mine, group=self._group)
        return [one.item() for one in every]


def together(link: Link, world: int) -> Alone:
    return Together(link, world) if world > 1 else Alone(link)
