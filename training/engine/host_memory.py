"""What memory is really left to this process: the machine's, or the container's limit. Asked before slots are touched, since
the kernel's own answer is to kill."""

import contextlib
from collections.abc import Iterator
from pathlib import Path

from perdure.training.errors import ConfigError

_PROC = Path("/proc")
_CGROUPS = Path("/sys/fs/cgroup")


def require(more: int, each: int, *, proc: Path = _PROC, cgroups: Path = _CGROUPS) -> None:
    """Raises ConfigError when `more` bytes are not there. `each`: size of one slot, for the message."""
    free, where = available(proc, cgroups)
    if more > free:
        raise ConfigError(
            f"two slots of {_gib(each)} for snapshots need {_gib(more)} more memory, but {where} has only {_gib(free)} left",
            "give it more memory, train a smaller state, or use fewer loader workers",
        )


def available(proc: Path = _PROC, cgroups: Path = _CGROUPS) -> tuple[int, str]:
    """Bytes that can be had without swapping, and whose limit that is."""
    found = [(_machine(proc), "this machine")]
    found += [(free, f"the control group {folder}") for folder, free in _groups(proc, cgroups)]
    return min(found)


def _machine(proc: Path) -> int:
    for line in (proc / "meminfo").read_text().splitlines():
        if line.startswith("MemAvailable:"):
            return int(line.split()[1]) << 10
    return 1 << 62


def _groups(proc: Path, cgroups: Path) -> Iterator[tuple[Path, int]]:
    """Every control group above this process that limits memory (version 2 and 1), with what it has left."""
    for line in (proc / "self/cgroup").read_text().splitlines():
        _, controllers, path = line.split(":", 2)
        if controllers == "":
            root, limit, usage, cache = cgroups, "memory.max", "memory.current", ("inactive_file", "active_file")
        elif "memory" in controllers.split(","):
            root, limit, usage = cgroups / "memory", "memory.limit_in_bytes", "memory.usage_in_bytes"
            cache = "total_inactive_file", "total_active_file"
        else:
            continue
        folder = root / path.lstrip("/")
        while True:
            with contextlib.suppress(OSError, ValueError):  # no such group seen from in here, or "max"
                left = int((folder / limit).read_text()) - int((folder / usage).read_text())
                yield folder, max(0, left + _reclaimable(folder, cache))
            if folder == root:
                break
            folder = folder.parent


def _reclaimable(folder: Path, names: tuple[str, ...]) -> int:
    """Page cache counts as used, and is given back when needed."""
    lines = (line.split() for line in (folder / "memory.stat").read_text().splitlines())
    return sum(int(value) for name, value in lines if name in names)


def _gib(size: int) -> str:
    return f"{size / (1 << 30):.2f} GiB"
