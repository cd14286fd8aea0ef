"""Room for the next checkpoints: what they need against what is free, bytes and inodes; and making room by what may go.

Measured on the file system of the run directory itself. An estimate may be wrong: a disk that is full after all is noticed by
the writer, which leaves nothing behind."""

import os
from pathlib import Path

from perdure.training.checkpoint import prune
from perdure.training.checkpoint.catalog import manifest_of
from perdure.training.checkpoint.lineage import committed
from perdure.training.checkpoint.manifest import Manifest
from perdure.training.checkpoint.upkeep import try_upkeep
from perdure.training.errors import CheckpointDamaged, CheckpointNotFound
from perdure.training.retention_settings import RetentionSection
from perdure.training.run_dir import CheckpointName, RunDir

_MARGIN = 1.05
"""The next one may be a little harder to encode than the last."""
_SLACK = 64 << 10
"""Manifest, facts, and blocks that are not full."""
_FILES = 8
"""Beside packs and indexes: folder, manifest, facts, temporary files."""


def shortage(run: RunDir, raw_bytes: int, *, saves: int = 1, increment: bool = False) -> str:
    """Why the next `saves` checkpoints of a state of `raw_bytes` do not fit, in one sentence; "" when they do.

    `increment`: they are increments. Where there is none yet to learn from, each counts as large as the state."""
    like = _newest(run, increment)
    place = _existing(run.checkpoints)
    room = os.statvfs(place)
    what = "the next checkpoint needs" if saves == 1 else f"the next {saves} checkpoints need"
    needed, free = saves * _bytes(like, raw_bytes), room.f_bavail * room.f_frsize
    if needed > free:
        return f"{place}: {what} {needed:,} bytes, {free:,} are free"
    inodes = saves * (_FILES + (len(like.files) if like else 2))
    if room.f_files and inodes > room.f_favail:  # 0: a file system that does not count them
        return f"{place}: {what} {inodes} inodes, {room.f_favail} are free"
    return ""


def make_room(
    run: RunDir, settings: RetentionSection, raw_bytes: int, *, saves: int = 1, stored: bool, increment: bool = False
) -> list[CheckpointName]:
    """Delete what retention lets go, leftovers first, then oldest first, until `shortage` is over; which checkpoints went.

    For whoever trains this run. Nothing goes while somebody else prunes or rolls up."""

    def enough() -> bool:
        return not shortage(run, raw_bytes, saves=saves, increment=increment)

    if enough():
        return []
    with try_upkeep(run) as ours:
        if not ours:
            return []
        found = prune.survey(run, settings, stored=stored, is_idle=lambda: False)
        return [verdict.name for verdict in prune.execute(run, found, enough=enough).removed]


def _bytes(like: Manifest | None, raw_bytes: int) -> int:
    ratio = min(1.0, _MARGIN * like.stored_bytes / like.raw_bytes) if like and like.raw_bytes else 1.0
    return int(raw_bytes * ratio) + raw_bytes // 256 + _SLACK


def _newest(run: RunDir, increment: bool) -> Manifest | None:
    """The newest readable checkpoint of this kind."""
    for name in reversed(committed(run)):
        try:
            found = manifest_of(run, name)
        except (CheckpointNotFound, CheckpointDamaged):
            continue
        if (found.base_name is not None) == increment:
            return found
    return None


def _existing(path: Path) -> Path:
    while not path.exists():
        path = path.parent
    return path
