"""One rank of the question `ranks`, a process of its own: real AdamW state, saved and restored by each row in turn.
Rank 0 writes what was found. argv: a JSON file (see `ranks.py`) and the number of this rank."""

import gc
import json
import os
import shutil
import sys
import time
from pathlib import Path

import torch
import torch.distributed as dist
from torch import Tensor

from benchmarks import rank_ways, state
from benchmarks.measure import Values, files_in, stored_bytes
from benchmarks.rank_ways import Peer, Setup, local, place
from benchmarks.saves import interleaved
from benchmarks.state import FULL, TINY
from perdure.training.process import die_with_parent

Rows = dict[str, dict[str, list[Values]]]


def slowest(seconds: float) -> float:
    """Of all ranks."""
    told = torch.tensor([seconds], dtype=torch.float64)
    dist.all_reduce(told, dist.ReduceOp.MAX)
    return told.item()


def bytes_read() -> int:
    """By this process and its children that ended, from files, whether they were in the page cache or not. What gloo receives
    is not in it."""
    lines = Path("/proc/self/io").read_text().splitlines()
    return int(next(line for line in lines if line.startswith("rchar")).split()[1])


def save(peer: Peer, folder: Path) -> Values:
    dist.barrier()
    start = time.perf_counter()
    peer.save(folder)
    stall = slowest(time.perf_counter() - start)
    peer.wait(folder)
    dist.barrier()
    seconds = time.perf_counter() - start
    return {"stall": stall, "durable": seconds, "bytes": stored_bytes(folder) + stored_bytes(place(folder))}


def load(peer: Peer, folder: Path, setup: Setup, wanted: dict[str, Tensor]) -> Values:
    """Into tensors that were emptied; what comes back must be what was saved. The files are in the page cache."""
    for value in setup.tensors().values():
        local(value).zero_()
    if dist.get_rank() == 0:
        for path in files_in(folder) + files_in(place(folder)):
            path.read_bytes()
    dist.barrier()
    before, start = bytes_read(), time.perf_counter()
    aside = peer.load(folder)
    seconds = slowest(time.perf_counter() - start - aside.seconds)
    read = torch.tensor([bytes_read() - before - (aside.read if dist.get_rank() == 0 else 0)])
    for name, value in setup.tensors().items():
        if not torch.equal(local(value), wanted[name]):
            count = int((local(value) != wanted[name]).sum())
            raise RuntimeError(f"{type(peer).__name__}, {folder}: {count} elements of {name} came back otherwise")
    every = [torch.zeros_like(read) for _ in range(dist.get_world_size())]
    dist.all_gather(every, read)
    return {"restore": seconds, "read": [int(one) for one in every], "aside": aside.seconds}


def measure(setup: Setup, own: Path, rounds: int, others: dict[str, str], *, spread: bool) -> Rows:
    """Rows take turns. Each has a first save that does not count: it fills buffers. With `spread` only what other ranks saved
    is restored."""
    wanted = {name: local(value).clone() for name, value in setup.tensors().items()}
    peers = {name: make() for name, make in setup.peers.items()}
    found: Rows = {name: {"saves": [], "loads": [], "others": []} for name in peers}
    folders: dict[str, Path] = {}
    for turn, name in enumerate(interleaved(list(peers), rounds + 1)):
        peer, number = peers[name], turn // len(peers)
        if not peer.source and not spread:
            before, folders[name] = folders.get(name), _made(own / name.replace(" ", "-") / str(number))
            saved = save(peer, folders[name])
            found[name]["saves"] += [saved] if number else []
            _forget(before)
        if number and not spread:
            found[name]["loads"].append(load(peer, folders[peer.source or name], setup, wanted))
        if number and others and peer.any_ranks:
            found[name]["others"].append(load(peer, Path(others[peer.source or name]), setup, wanted))
    for name, folder in folders.items():
        found[name]["saves"][-1]["folder"] = str(folder)
    return found


def _made(folder: Path) -> Path:
    if dist.get_rank() == 0:
        folder.mkdir(parents=True)
    return folder


def _forget(folder: Path | None) -> None:
    if folder is not None and dist.get_rank() == 0:
        shutil.rmtree(folder)
        shutil.rmtree(place(folder), ignore_errors=True)


def setup_of(kind: str, tracked: state.Tracked) -> Setup:
    """`ddp`, `fsdp2`, or `zero` and the number of a stage."""
    if kind.startswith("zero"):
        from benchmarks.rank_zero import zero  # DeepSpeed takes seconds to import

        return zero(tracked, int(kind.removeprefix("zero")))
    return {"ddp": rank_ways.ddp, "fsdp2": rank_ways.fsdp2}[kind](tracked)


def main() -> None:
    task, rank = json.loads(Path(sys.argv[1]).read_text()), int(sys.argv[2])
    die_with_parent(os.getppid())
    torch.set_num_threads(1)
    os.environ |= {"GLOO_SOCKET_IFNAME": "lo", "DS_ACCELERATOR": "cpu"}
    dist.init_process_group("gloo", init_method=f"file://{sys.argv[1]}.meet", rank=rank, world_size=task["world"])
    found: dict[str, Values] = {}
    for kind in task["kinds"]:
        setup = setup_of(kind, state.build(TINY if task["quick"] else FULL, [Path(path) for path in task["tiles"]]))
        held = setup.tensors().values()
        size, count = sum(local(value).nbytes for value in held), len(held)
        own, others = Path(task["folder"]) / kind, task["others"].get(kind, {})
        rows = measure(setup, own, task["rounds"], others, spread=task["spread"])
        found[kind] = {"bytes": size, "tensors": count, "rows": rows}
        del setup, held
        gc.collect()
    if rank == 0:
        Path(task["answer"]).write_text(json.dumps(found))
    dist.barrier()


if __name__ == "__main__":
    main()
