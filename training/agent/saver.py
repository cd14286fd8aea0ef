"""The saver: maps slots, one of each rank, encodes, digests, writes and commits one checkpoint at a time. It may be killed at
any moment: the slots stay with the agent, and the next saver writes the same snapshots again."""

import argparse
import contextlib
import errno
import os
import signal
import socket
import time
from collections.abc import Sequence
from pathlib import Path

import msgspec

from perdure.training import files
from perdure.training.checkpoint import facts, space
from perdure.training.checkpoint.audit import snapshots_digest
from perdure.training.checkpoint.increment import choose_base
from perdure.training.checkpoint.manifest import Manifest
from perdure.training.checkpoint.nodes import Node, Share
from perdure.training.checkpoint.run_info import run_store
from perdure.training.checkpoint.shared import Part, parts
from perdure.training.checkpoint.writer import write_checkpoint
from perdure.training.errors import CheckpointDamaged, PerdureError, StoreError
from perdure.training.process import die_with_parent, keep_freed_memory
from perdure.training.retention_settings import RetentionSection
from perdure.training.run_dir import CheckpointName, RunDir
from perdure.training.slots import MappedSlots, Snapshot
from perdure.training.wire import Message, Wire

NICENESS = 10
"""Training comes first on a busy machine."""


def save(run: RunDir, request: Message, snapshots: Sequence[Snapshot], run_id: str) -> Message:
    """Write the snapshots, one of each rank, as one checkpoint; the answer says `committed` or `failed`."""
    started = time.monotonic()
    name = CheckpointName(request["step"], request["token"])
    try:
        if any(not snapshot.whole or snapshot.step != name.step for snapshot in snapshots):
            return {"failed": f"slot holds no whole snapshot of step {name.step}", "errno": 0, "path": ""}
        stored = parts(snapshots, request["threads"])
        raw_bytes = sum(entry.nbytes for part in stored for entry in part.entries)
        if not request["node"]:  # the others' disk is mostly node 0's, which asks for all
            make_room(run, request, raw_bytes * (request["nodes"] if request["shared_disk"] else 1))
        manifest = write(run, run_id, name, request, stored)
    except OSError as error:
        told = {"failed": str(error), "errno": error.errno or 0, "path": str(error.filename or run.checkpoint(name))}
        return {**told, "away": isinstance(error, StoreError) and error.retryable}
    except PerdureError as error:
        return {"failed": str(error), "errno": 0, "path": str(run.checkpoint(name))}
    if manifest is None:
        return {"written": str(name), "step": name.step}
    return {
        "committed": str(name),
        "step": name.step,
        "raw_bytes": manifest.raw_bytes,
        "stored_bytes": manifest.stored_bytes,
        "state_digest": manifest.state_digest,
        "seconds": round(time.monotonic() - started, 3),
    }


def make_room(run: RunDir, request: Message, raw_bytes: int) -> None:
    """Delete what may go if the checkpoint would not fit. Raises OSError (ENOSPC) where that is not enough."""
    increment = not request["full"]
    if space.shortage(run, raw_bytes, increment=increment):
        settings = msgspec.convert(request["retention"], RetentionSection)
        space.make_room(run, settings, raw_bytes, stored=request["stored"], increment=increment)
        if problem := space.shortage(run, raw_bytes, increment=increment):
            raise OSError(errno.ENOSPC, problem, str(run.checkpoints))


def write(run: RunDir, run_id: str, name: CheckpointName, request: Message, stored: Sequence[Part]) -> Manifest | None:
    """Commit it; None where node 0 does that. With `checkpoint.audit`, what was written must be what the slots held before."""
    audited = audit(name, stored)
    encoding, threads = request["encoding"], request["threads"]
    if request["nodes"] > 1:
        node, full = Node(request["node"], request["nodes"]), bool(request["full"])
        share = Share(
            run=run,
            run_id=run_id,
            name=name,
            node=node,
            stored=stored,
            full=full,
            encoding=encoding,
            threads=threads,
            store=None if request["shared_disk"] else run_store(run),
        )
        return share.write()
    base = None if request["full"] else choose_base(run)
    manifest = write_checkpoint(run, run_id, name, stored, encoding=encoding, threads=threads, base=base)
    if audited and manifest.state_digest != audited:
        problem = f"audit: step {name.step} changed in memory while it was written"
        facts.write_fact(run, name, facts.Fact(copy="local", checked_at=time.time(), result="damaged", damage=(problem,)))
        raise CheckpointDamaged(problem, part="slot")
    return manifest


def audit(name: CheckpointName, stored: Sequence[Part]) -> str:
    """Digest that the checkpoint must have; "" where nothing is audited. Raises CheckpointDamaged where a slot does not hold
    what its rank had in its tensors."""
    said = [part.snapshot.header.state_digest for part in stored if part.snapshot.header]
    if not all(said):
        return ""
    for rank, part in enumerate(stored):
        if snapshots_digest([part.snapshot]) != said[rank]:
            text = f"audit: the snapshot of step {name.step} is not what rank {rank} had in its tensors"
            raise CheckpointDamaged(text, part="slot")
    return said[0] if len(stored) == 1 else snapshots_digest(stored)


def main() -> None:
    parser = argparse.ArgumentParser()
    for name in ("run_dir", "run_id"):
        parser.add_argument(name)
    for name in ("socket_fd", "parent"):
        parser.add_argument(name, type=int)
    options = parser.parse_args()
    die_with_parent(options.parent)
    signal.signal(signal.SIGTERM, signal.SIG_IGN)  # whoever tells every process to stop means the last save as well
    files.set_role("saver")
    keep_freed_memory()
    with contextlib.suppress(OSError):
        os.nice(NICENESS)
    run, wire = RunDir(Path(options.run_dir)), Wire(socket.socket(fileno=options.socket_fd))
    slots = MappedSlots()
    while not wire.closed:
        for request in wire.receive(None):
            fds, wire.fds = wire.fds[: request["ranks"]], wire.fds[request["ranks"] :]
            snapshots = [slots.snapshot(fd) for fd in fds]
            wire.send(save(run, request, snapshots, options.run_id))
            for snapshot, fd in zip(snapshots, fds, strict=True):
                snapshot.close()
                os.close(fd)


if __name__ == "__main__":
    main()
