"""How a rank of the question `ranks` holds its state under DDP or fully_shard, and the ways to save and to restore it."""

import os
import socket
import subprocess
import sys
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.checkpoint.state_dict_loader import load as dcp_load
from torch.distributed.checkpoint.state_dict_saver import async_save
from torch.distributed.checkpoint.state_dict_saver import save as dcp_save
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor, distribute_tensor
from torch.nn.parallel import DistributedDataParallel

from benchmarks.measure import THREADS, fsync_all
from benchmarks.ours import Slots
from benchmarks.state import Tracked
from perdure.training import PerdureReader, PerdureWriter
from perdure.training.checkpoint.reader import open_checkpoint
from perdure.training.engine import invariants
from perdure.training.engine.loading import Loading
from perdure.training.engine.restore import restore
from perdure.training.engine.state import unwrapped
from perdure.training.run_dir import CheckpointName, RunDir
from perdure.training.wire import Wire

TORCH, DCP, DCP_ASYNC, WRITER = "torch.save by rank 0, fsync", "dcp.save", "dcp.async_save", "dcp.save, PerdureWriter"
RUN = "Perdure, in a run"


class Aside(NamedTuple):
    """What was spent meanwhile on starting a program, and does not count."""

    seconds: float = 0.0
    read: int = 0
    """Bytes, by the rank that asked for it."""


class Peer:
    """A way to save into a folder (numbered) and to restore from it; all ranks call it together."""

    source = ""
    """Whose folder it restores from where it saves nothing itself."""
    any_ranks = True
    """Whether it restores what another number of ranks saved."""

    def save(self, folder: Path) -> None:
        """Until training may go on."""
        raise NotImplementedError

    def wait(self, folder: Path) -> None:
        """Until it is durable."""

    def load(self, folder: Path) -> Aside:
        """Into the tensors of this process."""
        raise NotImplementedError


Peers = dict[str, Callable[[], Peer]]


@dataclass(frozen=True)
class Setup:
    """A state as this rank has it, and who is to save it."""

    tracked: Tracked
    tensors: Callable[[], dict[str, Tensor]]
    """Every tensor by name, in the memory it has at the moment."""
    peers: Peers


def ddp(tracked: Tracked) -> Setup:
    """All of it in every rank."""
    model = DistributedDataParallel(tracked["model"])
    tracked = {"model": unwrapped(model), "optimizer": tracked["optimizer"]}
    return _setup(tracked, {TORCH: lambda: TorchSave(tracked), **_dcp(tracked)})


def fsdp2(tracked: Tracked) -> Setup:
    """Cut among the ranks."""
    whole = [value.detach().clone() for value in tracked["model"].parameters()]
    moments = [tracked["optimizer"].state[parameter] for parameter in tracked["model"].parameters()]
    model = tracked["model"]
    for part in model:
        fully_shard(part)
    optimizer = torch.optim.AdamW(model.parameters())
    for parameter, values, moment in zip(model.parameters(), whole, moments, strict=True):
        assert isinstance(parameter, DTensor)
        local(parameter).copy_(local(laid_out(values, parameter)))
        optimizer.state[parameter] = {
            key: laid_out(value, parameter) if value.shape == parameter.shape else value for key, value in moment.items()
        }
    tracked = {"model": model, "optimizer": optimizer}
    return _setup(tracked, {**_dcp(tracked), WRITER: lambda: Writer(tracked)})


def _setup(tracked: Tracked, peers: Peers) -> Setup:
    return Setup(tracked, lambda: flat(tracked), {**peers, RUN: lambda: Run(tracked)})


def _dcp(tracked: Tracked) -> Peers:
    return {DCP: lambda: Dcp(tracked), DCP_ASYNC: lambda: Dcp(tracked, asynchronous=True)}


def laid_out(values: Tensor, like: DTensor) -> Tensor:
    return distribute_tensor(values, like.device_mesh, like.placements, src_data_rank=None)


def local(value: Tensor) -> Tensor:
    return (value.to_local() if isinstance(value, DTensor) else value).detach()


def flat(tracked: Tracked) -> dict[str, Tensor]:
    named = dict(tracked["model"].named_parameters())
    found: dict[str, Tensor] = {name: value.detach() for name, value in named.items()}
    for name, parameter in named.items():
        found.update((f"{name}/{key}", value) for key, value in tracked["optimizer"].state[parameter].items())
    return found


class TorchSave(Peer):
    """Rank 0 saves for all, and all load its file."""

    def __init__(self, tracked: Tracked) -> None:
        self._tracked = tracked

    def save(self, folder: Path) -> None:
        if dist.get_rank() == 0:
            torch.save(flat(self._tracked), folder / "state.pt")
        dist.barrier()

    def wait(self, folder: Path) -> None:
        if dist.get_rank() == 0:
            fsync_all(folder)

    def load(self, folder: Path) -> Aside:
        found = torch.load(folder / "state.pt", weights_only=True)
        for name, value in flat(self._tracked).items():
            value.copy_(found[name])
        return Aside()


class Dcp(Peer):
    """As its documentation has it; into a folder, which it syncs itself."""

    def __init__(self, tracked: Tracked, *, asynchronous: bool = False) -> None:
        self._tracked, self._asynchronous = tracked, asynchronous
        self._group = dist.new_group(backend="gloo") if asynchronous else None  # its thread and ours must not mix their talk
        self._pending: Any = None  # Any: dcp's future

    def save(self, folder: Path) -> None:
        if self._asynchronous:
            self._pending = async_save(flat(self._tracked), checkpoint_id=folder, process_group=self._group)
        else:
            dcp_save(flat(self._tracked), checkpoint_id=folder)

    def wait(self, folder: Path) -> None:
        if self._pending is not None:
            self._pending.result()

    def load(self, folder: Path) -> Aside:
        dcp_load(flat(self._tracked), checkpoint_id=folder)
        return Aside()


class Writer(Peer):
    """DCP's own planners on Perdure's storage."""

    def __init__(self, tracked: Tracked) -> None:
        self._tracked = tracked

    def save(self, folder: Path) -> None:
        dcp_save(flat(self._tracked), storage_writer=PerdureWriter(folder))

    def load(self, folder: Path) -> Aside:
        dcp_load(flat(self._tracked), storage_reader=PerdureReader(folder))
        return Aside()


class Run(Peer):
    """Each rank copies into its slot; one saver writes all of them, as the agent has it do. A restore is a resume's."""

    def __init__(self, tracked: Tracked) -> None:
        self._tracked, self._slots = tracked, Slots(tracked, 1)
        places: list[Any] = [None] * dist.get_world_size()  # Any: pickled by torch
        dist.all_gather_object(places, (os.getpid(), self._slots.descriptors[0]))
        self._every = [os.open(f"/proc/{pid}/fd/{number}", os.O_RDWR) for pid, number in places]
        self._wire: Wire | None = None

    def save(self, folder: Path) -> None:
        self._slots.snapshot(self._tracked)
        dist.barrier()  # the agent waits for the snapshots of all
        if dist.get_rank() == 0:
            self._wire = self._wire or _saver(folder.parent)
            told = {"step": 1, "token": int(folder.name), "full": True, "ranks": len(self._every)}
            how = {
                "encoding": "auto",
                "threads": THREADS,
                "retention": {},
                "stored": False,
                "node": 0,
                "nodes": 1,
                "shared_disk": True,
            }
            self._wire.send({**told, **how}, tuple(self._every))

    def wait(self, folder: Path) -> None:
        if self._wire is not None:
            [answer] = self._wire.receive(None)
            if "committed" not in answer:
                raise RuntimeError(answer["failed"])

    def load(self, folder: Path) -> Aside:
        with open_checkpoint(place(folder)) as reader, Loading(reader, 1, dist.get_rank(), dist.get_world_size()) as loading:
            replan = reader.ranks != dist.get_world_size()  # as it is resumed with --replan
            restore(self._tracked, loading.read, loading.read_part, loading.shape_of, replan=replan)
            invariants.check_after_load(self._tracked, 1, loading.digest, threads=1, replan=replan)
        return Aside()


def _saver(folder: Path) -> Wire:
    """The product's, of the run in this folder; it ends with this process."""
    ours, theirs = socket.socketpair()
    command = [sys.executable, "-m", "perdure.training.agent.saver", str(folder), "bench", str(theirs.fileno())]
    subprocess.Popen([*command, str(os.getpid())], pass_fds=[theirs.fileno()])
    theirs.close()
    return Wire(ours)


def place(folder: Path) -> Path:
    """Where a run has what others have in `folder`."""
    return RunDir(folder.parent).checkpoint(CheckpointName(1, int(folder.name)))
