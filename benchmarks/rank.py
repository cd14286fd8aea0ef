"""One rank of the question `ranks`, a process of its own: real AdamW state under fully_shard, saved and restored by each row.
Rank 0 writes what was found. argv: a JSON file (see `ranks.py`) and the number of this rank."""

import json
import os
import socket
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any, Protocol

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.checkpoint.state_dict_loader import load as dcp_load
from torch.distributed.checkpoint.state_dict_saver import async_save
from torch.distributed.checkpoint.state_dict_saver import save as dcp_save
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor, distribute_tensor

from benchmarks import state
from benchmarks.measure import THREADS, Values, stored_bytes
from benchmarks.ours import Slots
from benchmarks.state import FULL, TINY, Tracked
from perdure.training import PerdureReader, PerdureWriter
from perdure.training.checkpoint.reader import open_checkpoint
from perdure.training.engine import invariants
from perdure.training.engine.loading import Loading
from perdure.training.engine.restore import restore
from perdure.training.process import die_with_parent
from perdure.training.run_dir import CheckpointName, RunDir
from perdure.training.wire import Wire

DCP, DCP_ASYNC, WRITER, RUN = "dcp.save", "dcp.async_save", "dcp.save, PerdureWriter", "Perdure, in a run"


class Peer(Protocol):
    """A way to save into a folder (numbered) and to restore from it; all ranks call it together."""

    def save(self, folder: Path) -> None:
        """Until training may go on."""

    def wait(self) -> None:
        """Until it is durable."""

    def load(self, folder: Path) -> None:
        """Into the tensors of this process."""


def sharded(tracked: Tracked) -> Tracked:
    """The same state, cut among the ranks."""
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
    return {"model": model, "optimizer": optimizer}


def laid_out(values: Tensor, like: DTensor) -> Tensor:
    return distribute_tensor(values, like.device_mesh, like.placements, src_data_rank=None)


def local(value: Tensor) -> Tensor:
    return (value.to_local() if isinstance(value, DTensor) else value).detach()


def flat(tracked: Tracked) -> dict[str, Tensor]:
    """Every tensor by name, in the memory it has."""
    named = dict(tracked["model"].named_parameters())
    found: dict[str, Tensor] = {name: value.detach() for name, value in named.items()}
    for name, parameter in named.items():
        found.update((f"{name}/{key}", value) for key, value in tracked["optimizer"].state[parameter].items())
    return found


class Dcp:
    """As its documentation has it; into a folder."""

    def __init__(self, tracked: Tracked, *, asynchronous: bool = False) -> None:
        self._state, self._asynchronous = flat(tracked), asynchronous
        self._group = dist.new_group(backend="gloo") if asynchronous else None  # its thread and ours must not mix their talk
        self._pending: Any = None  # Any: dcp's future

    def save(self, folder: Path) -> None:
        if self._asynchronous:
            self._pending = async_save(self._state, checkpoint_id=folder, process_group=self._group)
        else:
            dcp_save(self._state, checkpoint_id=folder)

    def wait(self) -> None:
        if self._pending is not None:
            self._pending.result()

    def load(self, folder: Path) -> None:
        dcp_load(self._state, checkpoint_id=folder)


class Writer:
    """DCP's own planners on Perdure's storage."""

    def __init__(self, tracked: Tracked) -> None:
        self._state = flat(tracked)

    def save(self, folder: Path) -> None:
        dcp_save(self._state, storage_writer=PerdureWriter(folder))

    def wait(self) -> None:
        pass

    def load(self, folder: Path) -> None:
        dcp_load(self._state, storage_reader=PerdureReader(folder))


class Run:
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
            how = {"encoding": "auto", "threads": THREADS, "retention": {}, "stored": False, "node": 0, "nodes": 1}
            self._wire.send({**told, **how}, tuple(self._every))

    def wait(self) -> None:
        if self._wire is not None:
            [answer] = self._wire.receive(None)
            if "committed" not in answer:
                raise RuntimeError(answer["failed"])

    def load(self, folder: Path) -> None:
        with open_checkpoint(place(folder)) as reader, Loading(reader, 1, dist.get_rank()) as loading:
            restore(self._tracked, loading.read, loading.read_part)
            invariants.check_after_load(self._tracked, 1, loading.digests, threads=1)


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


def peers(tracked: Tracked) -> dict[str, Callable[[], Peer]]:
    return {
        DCP: lambda: Dcp(tracked),
        DCP_ASYNC: lambda: Dcp(tracked, asynchronous=True),
        WRITER: lambda: Writer(tracked),
        RUN: lambda: Run(tracked),
    }


def slowest(seconds: float) -> float:
    """Of all ranks."""
    told = torch.tensor([seconds], dtype=torch.float64)
    dist.all_reduce(told, dist.ReduceOp.MAX)
    return told.item()


def bytes_read() -> int:
    """By this process so far, from files (and sockets), whether they were in the page cache or not."""
    lines = Path("/proc/self/io").read_text().splitlines()
    return int(next(line for line in lines if line.startswith("rchar")).split()[1])


def save(peer: Peer, folder: Path) -> Values:
    dist.barrier()
    start = time.perf_counter()
    peer.save(folder)
    stall = slowest(time.perf_counter() - start)
    peer.wait()
    dist.barrier()
    seconds = time.perf_counter() - start
    return {"stall": stall, "durable": seconds, "bytes": stored_bytes(folder) + stored_bytes(place(folder))}


def load(peer: Peer, folder: Path, tracked: Tracked, wanted: dict[str, Tensor]) -> Values:
    """Into tensors that were emptied; what comes back must be what was saved."""
    for value in flat(tracked).values():
        local(value).zero_()
    dist.barrier()
    before, start = bytes_read(), time.perf_counter()
    peer.load(folder)
    seconds = slowest(time.perf_counter() - start)
    read = torch.tensor([bytes_read() - before])
    for name, value in flat(tracked).items():
        if not torch.equal(local(value), wanted[name]):
            raise RuntimeError(f"{name} came back otherwise")
    every = [torch.zeros_like(read) for _ in range(dist.get_world_size())]
    dist.all_gather(every, read)
    return {"restore": seconds, "read": [int(one) for one in every]}


def main() -> None:
    task, rank = json.loads(Path(sys.argv[1]).read_text()), int(sys.argv[2])
    die_with_parent(os.getppid())
    torch.set_num_threads(1)
    os.environ["GLOO_SOCKET_IFNAME"] = "lo"
    dist.init_process_group("gloo", init_method=f"file://{sys.argv[1]}.meet", rank=rank, world_size=task["world"])
    tracked = sharded(state.build(TINY if task["quick"] else FULL, [Path(path) for path in task["tiles"]]))
    wanted = {name: local(value).clone() for name, value in flat(tracked).items()}
    found: dict[str, dict[str, list[Values]]] = {}
    for name, make in peers(tracked).items():
        peer, own = make(), Path(task["folder"]) / name.replace(" ", "-")
        rows = found[name] = {"saves": [], "loads": [], "others": []}
        for number in range(task["rounds"] + 1):
            folder = own / str(number)
            if rank == 0:
                folder.mkdir(parents=True)
            rows["saves"].append(save(peer, folder))
        rows["saves"].pop(0)  # it fills buffers
        for _ in range(task["rounds"]):
            rows["loads"].append(load(peer, folder, tracked, wanted))
        if name in task["others"]:
            rows["others"].append(load(peer, Path(task["others"][name]), tracked, wanted))
        rows["saves"][-1]["folder"] = str(folder)
    size = sum(value.nbytes for value in flat(tracked).values())
    if rank == 0:
        Path(task["answer"]).write_text(json.dumps({"bytes": size, "tensors": len(wanted), "rows": found}))
    dist.barrier()


if __name__ == "__main__":
    main()
