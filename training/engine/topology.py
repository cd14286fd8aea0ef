"""On what a run trains: ranks, hosts, devices, the mesh. Each manifest has it under `world`. A change is told on resume, with
what a step took before and, once that is measured, takes now."""

import os
import socket
from collections import Counter
from collections.abc import Mapping
from typing import Any

import blake3
import torch

from perdure.training.engine.environment import Facts, differences
from perdure.training.engine.pace import Pace
from perdure.training.engine.shards import meshes
from perdure.training.engine.together import Alone
from perdure.training.engine.zero import ZeroEngine

MEASURED = 5
"""Steps after which the time of one counts as measured."""


def topology(tracked: Mapping[str, Any], together: Alone) -> dict[str, Any]:  # Any: tracked objects in, JSON values out
    """What all ranks find alike, but `device` and `devices`, which are of this rank's host."""
    cuda = torch.cuda.is_available()
    found: dict[str, Any] = {
        "size": together.world,
        "hosts": list(Counter(together.gather(_host_number())).values()),
        "device": torch.cuda.get_device_name() if cuda else "cpu",
        "devices": torch.cuda.device_count() if cuda else len(os.sched_getaffinity(0)),
    }
    if layouts := meshes(tracked):
        found["meshes"] = layouts
    if stages := {name: obj.stage for name, obj in tracked.items() if isinstance(obj, ZeroEngine)}:
        found["zero"] = stages
    return found


def _host_number() -> float:
    """The same for processes of one host, exact in a float."""
    return float(int.from_bytes(blake3.blake3(socket.gethostname().encode()).digest(6), "little"))


class Move:
    """From the topology of the checkpoint to another one: what is to be said of it."""

    def __init__(self, old: Facts, new: Facts) -> None:
        known = ("size", "hosts", "device", "devices", "meshes") if "hosts" in old else ("size", "meshes")
        self.changes = differences(*({key: one[key] for key in known if key in one} for one in (old, new)))
        self._hosts = (old.get("hosts"), new["hosts"])
        self._before = old.get("step_secs")
        self._told = not self.changes

    def with_hosts(self, old: Facts, new: Facts) -> tuple[Facts, Facts]:
        """Environments as they are to be compared: by how ranks lie on hosts NCCL chooses in which order to add up."""
        if not new.get("nccl") or self._hosts[0] is None:
            return old, new
        return {**old, "hosts": self._hosts[0]}, {**new, "hosts": self._hosts[1]}

    @property
    def notice(self) -> str:
        took = f"; a step took {self._before:.3g} s there" if self._before else ""
        return f"resumed on another topology: {'; '.join(self.changes)}{took}"

    def after(self, pace: Pace) -> str:
        """Once, when it is known: what a step takes now, beside what it took before."""
        if self._told or pace.steps < MEASURED or pace.step_secs is None or not self._before:
            return ""
        self._told = True
        return f"a step takes {pace.step_secs:.3g} s here, took {self._before:.3g} s on the topology before (medians)"
