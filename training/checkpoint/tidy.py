"""What a roll-up leaves beside a checkpoint, finished or killed, and who may still be reading it."""

import contextlib
import fcntl
import os
from pathlib import Path

from perdure.training import files
from perdure.training.checkpoint import manifest as manifests
from perdure.training.checkpoint.catalog import sizes_in, strays
from perdure.training.run_dir import MANIFEST, REPLACED_MANIFEST, CheckpointName, RunDir


def tidy(run: RunDir, name: CheckpointName) -> bool:
    """Remove the files of a roll-up that the manifest does not name: those it replaced, or those of one that was killed. False
    while somebody reads by the manifest that was replaced. The caller has the upkeep lock."""
    folder = run.checkpoint(name)
    current = manifests.read(folder)
    if current.base is None and not nobody_reads_replaced(folder):
        return False  # an increment was not replaced yet: what lies beside it nobody reads
    left = [file for file in strays(sizes_in(folder), current) if not files.is_temporary(file) or _is_ours(file)]
    for file in sorted(left, key=lambda file: file == REPLACED_MANIFEST):  # last: it says who may still read
        files.remove(folder / file)
    return True


def nobody_reads_replaced(folder: Path) -> bool:
    """Readers hold the manifest they read by, also when a roll-up has replaced it. Nobody begins to read by that one."""
    try:
        fd = os.open(folder / REPLACED_MANIFEST, os.O_RDWR | os.O_CLOEXEC)
    except FileNotFoundError:
        return True
    with contextlib.closing(os.fdopen(fd)):
        try:
            fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            return False
    return True


def _is_ours(temporary: str) -> bool:
    """Temporary files of such names in a committed folder are those of a roll-up, and there is none now."""
    return temporary.startswith(f".{MANIFEST}.") or (temporary.startswith(".rank-") and ".full." in temporary)
