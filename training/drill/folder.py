"""The bare folder of a drill, named after its owner's pid and start time: the next drill sweeps what a killed one left."""

import contextlib
import os
import re
import shutil
import tempfile
from collections.abc import Iterator
from pathlib import Path

from perdure.training.agent.lock import end_agent
from perdure.training.process import ProcessId, identify
from perdure.training.run_dir import RunDir

_NAME = re.compile(r"perdure-drill-(.+)-([0-9]{1,18})-([0-9]{1,18})-[a-z0-9_]+")
_LONGEST_SOCKET = 107
"""Bytes in the path of a Unix socket; the agent's lies in a folder of eighteen characters in TMPDIR."""


class BareFolder:
    """0700, in TMPDIR (or /tmp). Use as a context: whatever happens inside, it is gone afterwards."""

    def __init__(self) -> None:
        me = identify()
        self.path = Path(tempfile.mkdtemp(prefix=f"perdure-drill-{me.host}-{me.pid}-{me.start}-"))
        self.run = RunDir(self.path / "run")

    def environment(self) -> dict[str, str]:
        """Temporary files of the launches go here too, unless that makes their sockets' paths too long."""
        inside = self.path / "tmp"
        if len(os.fsencode(inside)) + len("/perdure-12345678/agent") > _LONGEST_SOCKET:
            return {}
        inside.mkdir(mode=0o700, exist_ok=True)
        return {"TMPDIR": str(inside)}

    def __enter__(self) -> "BareFolder":
        return self

    def __exit__(self, *_: object) -> None:
        _remove(self.path)


def sweep() -> list[Path]:
    """Remove the folders of drills that were killed on this machine, and end what still works in them; which they were."""
    swept = []
    for path in _abandoned():
        with contextlib.suppress(OSError):
            _remove(path)
            swept.append(path)
    return swept


def _abandoned() -> Iterator[Path]:
    """Our own folders only: anybody may make one of such a name in /tmp."""
    for entry in os.scandir(tempfile.gettempdir()):
        match = _NAME.fullmatch(entry.name)
        if match is None or not entry.is_dir(follow_symlinks=False) or entry.stat(follow_symlinks=False).st_uid != os.getuid():
            continue
        owner = ProcessId(host=match[1], pid=int(match[2]), start=int(match[3]))
        if owner.is_here and not owner.is_alive():
            yield Path(entry.path)


def _remove(path: Path) -> None:
    end_agent(RunDir(path / "run"), grace=0.0)
    shutil.rmtree(path)
