"""Copies that were asked to be thawed: a small file for each says since when, and what was seen when it was last looked at."""

import time
from typing import Literal

import msgspec

from perdure.training import files
from perdure.training.run_dir import CheckpointName, RunDir

MAX_THAW = 1 << 16


class Thaw(msgspec.Struct, frozen=True, kw_only=True):
    place: str
    checkpoint: str
    state: Literal["frozen", "thawing", "thawed"]
    asked_at: float
    """Unix seconds, as all times here."""
    checked_at: float
    until: float = 0.0
    """It can be read until then; 0: not known."""

    @property
    def is_over(self) -> bool:
        """It froze again."""
        return self.state == "frozen" or 0 < self.until < time.time()


def read_thaws(run: RunDir) -> list[Thaw]:
    """Those that are not over, by checkpoint and place."""
    found = [read_thaw(path.stem, run) for path in (run.thaws.glob("*.json") if run.thaws.is_dir() else ())]
    return sorted((one for one in found if one and not one.is_over), key=lambda one: (one.checkpoint, one.place))


def read_thaw(stem: str, run: RunDir) -> Thaw | None:
    try:
        return msgspec.json.decode(files.read_limited(run.thaws / f"{stem}.json", MAX_THAW), type=Thaw)
    except (OSError, ValueError, RecursionError):
        return None


def find_thaw(run: RunDir, place: str, name: CheckpointName) -> Thaw | None:
    return read_thaw(run.thaw(place, name).stem, run)


def forget_thaw(run: RunDir, place: str, name: CheckpointName) -> None:
    files.remove(run.thaw(place, name))


def write_thaw(run: RunDir, name: CheckpointName, thaw: Thaw) -> None:
    files.make_dirs(run.thaws)
    files.write_atomically(run.thaw(thaw.place, name), msgspec.json.encode(thaw))
