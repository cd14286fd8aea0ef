"""The saver: maps a slot, encodes, digests, writes and commits one checkpoint at a time. It may be killed at any moment: the
slot stays with the agent, and the next saver writes the same snapshot again."""

import argparse
import contextlib
import os
import socket
import time
from pathlib import Path

from perdure.training import files
from perdure.training.checkpoint.writer import write_checkpoint
from perdure.training.errors import PerdureError
from perdure.training.process import die_with_parent
from perdure.training.run_dir import CheckpointName, RunDir
from perdure.training.slots import Snapshot
from perdure.training.wire import Message, Wire

NICENESS = 10
"""Training comes first on a busy machine."""


def save(run: RunDir, request: Message, fd: int, run_id: str, encoding: str, threads: int) -> Message:
    """Write the snapshot in `fd`; the answer says `committed` or `failed`."""
    started = time.monotonic()
    name = CheckpointName(request["step"], request["token"])
    snapshot = Snapshot(fd)
    try:
        if not snapshot.whole or snapshot.step != name.step:
            return {"failed": f"slot holds no whole snapshot of step {name.step}", "errno": 0, "path": ""}
        manifest = write_checkpoint(run, run_id, name, [snapshot], encoding=encoding, threads=threads)
    except OSError as error:
        return {"failed": str(error), "errno": error.errno or 0, "path": str(error.filename or run.checkpoint(name))}
    except PerdureError as error:
        return {"failed": str(error), "errno": 0, "path": str(run.checkpoint(name))}
    finally:
        snapshot.close()
        os.close(fd)
    return {
        "committed": str(name),
        "step": name.step,
        "raw_bytes": manifest.raw_bytes,
        "stored_bytes": manifest.stored_bytes,
        "state_digest": manifest.state_digest,
        "seconds": round(time.monotonic() - started, 3),
    }


def main() -> None:
    parser = argparse.ArgumentParser()
    for name in ("run_dir", "run_id", "encoding"):
        parser.add_argument(name)
    for name in ("socket_fd", "parent", "threads"):
        parser.add_argument(name, type=int)
    options = parser.parse_args()
    die_with_parent(options.parent)
    files.set_role("saver")
    with contextlib.suppress(OSError):
        os.nice(NICENESS)
    run, wire = RunDir(Path(options.run_dir)), Wire(socket.socket(fileno=options.socket_fd))
    while not wire.closed:
        for request in wire.receive(None):
            wire.send(save(run, request, wire.fds.pop(0), options.run_id, options.encoding, options.threads))


if __name__ == "__main__":
    main()
