"""Perdure's saver for the benchmarks: a process without torch, niced as the product's is, that writes the snapshot in a slot to
the run directory named on each line of its input and answers when it is committed. argv: slot descriptor, encoding, threads."""

import os
import sys
from pathlib import Path

from perdure.training.agent.saver import NICENESS
from perdure.training.checkpoint.writer import write_checkpoint
from perdure.training.process import keep_freed_memory
from perdure.training.run_dir import CheckpointName, RunDir
from perdure.training.slots import MappedSlots

NAME = CheckpointName(1, 1)


def main() -> None:
    slot, encoding, threads = int(sys.argv[1]), sys.argv[2], int(sys.argv[3])
    os.nice(NICENESS)
    keep_freed_memory()
    slots = MappedSlots()
    print("ready", flush=True)
    for line in sys.stdin:
        snapshot = slots.snapshot(slot)
        write_checkpoint(RunDir(Path(line.strip())), "bench", NAME, [snapshot], encoding=encoding, threads=threads)
        snapshot.close()
        print("committed", flush=True)


if __name__ == "__main__":
    main()
