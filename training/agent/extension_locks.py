"""Locks that builds of torch extensions (DeepSpeed's, say) leave when they are killed: every later start waits for them, for
ever and silently. They are known by nobody having them open, and removed where that is certain."""

import contextlib
import fcntl
import os
import time
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import NamedTuple

_LOCKS = ("*/lock", "*/*/lock")
"""Below the cache: of a cache that is one environment's own, and of the default one with a folder per Python."""
_MAX_LOCKS = 1000
_SURE_SECS = 1.0
"""At its end a builder closes its lock and then removes it: one that nobody holds is looked at again after so long."""
_LOCAL = frozenset({"bcachefs", "btrfs", "ext2", "ext3", "ext4", "f2fs", "overlay", "ramfs", "tmpfs", "xfs", "zfs"})
"""File systems that no other machine can build in."""


class Lock(NamedTuple):
    path: Path
    device: int
    inode: int
    changed_ns: int
    owner: int


def cache_of(environment: Mapping[str, str]) -> Path:
    """Where a process with this environment builds its extensions."""
    home = Path(environment.get("XDG_CACHE_HOME") or Path.home() / ".cache")
    chosen = environment.get("TORCH_EXTENSIONS_DIR")
    return Path(chosen) if chosen else home / "torch_extensions"


def find(cache: Path) -> tuple[list[Lock], int]:
    """Locks that no process has open, of those that can be seen; and how many others there are."""
    locks = [lock for lock in map(_look_at, sorted({path for one in _LOCKS for path in cache.glob(one)})[:_MAX_LOCKS]) if lock]
    held = _open_files() if locks else set()  # after the look at the locks: one made since has another identity
    stale = [lock for lock in locks if (lock.device, lock.inode) not in held]
    return stale, len(locks) - len(stale)


def clear(cache: Path) -> tuple[list[Path], list[Path]]:
    """Remove those that are stale for certain: of this user, on a disk of this machine, held by nobody twice. Those that were
    removed, and those that only seem stale."""
    first, _ = find(cache)
    if not first:
        return [], []
    time.sleep(_SURE_SECS)
    removed: list[Path] = []
    left: list[Path] = []
    with _alone(cache):
        for lock in find(cache)[0]:
            if lock in first and lock.owner == os.geteuid() and _is_local(lock.path):
                lock.path.unlink(missing_ok=True)
                removed.append(lock.path)
            else:
                left.append(lock.path)
    return removed, left


@contextlib.contextmanager
def _alone(cache: Path) -> Iterator[None]:
    """Among those that clear: else the second could remove the lock of a build that began after the first was done."""
    folder = os.open(cache, os.O_RDONLY)
    try:
        fcntl.flock(folder, fcntl.LOCK_EX)
        yield
    finally:
        os.close(folder)


def _look_at(path: Path) -> Lock | None:
    with contextlib.suppress(FileNotFoundError):
        found = path.lstat()
        return Lock(path, found.st_dev, found.st_ino, found.st_ctime_ns, found.st_uid)
    return None


def _is_local(path: Path) -> bool:
    """By the type of the file system."""
    where, kind, real = "", "", path.resolve()
    for line in Path("/proc/self/mountinfo").read_text().splitlines():
        mount, _, about = line.partition(" - ")
        point = mount.split()[4]
        if real.is_relative_to(point) and len(point) >= len(where):
            where, kind = point, about.split()[0]
    return kind in _LOCAL


def _open_files() -> set[tuple[int, int]]:
    """Device and inode of every file that a process we may look into has open; torch keeps its lock open while it builds."""
    found: set[tuple[int, int]] = set()
    for entry in os.scandir("/proc"):
        if not entry.name.isdigit():
            continue
        with contextlib.suppress(OSError):  # ended, or somebody else's
            for fd in os.listdir(f"/proc/{entry.name}/fd"):
                with contextlib.suppress(OSError):  # closed meanwhile
                    about = os.stat(f"/proc/{entry.name}/fd/{fd}")
                    found.add((about.st_dev, about.st_ino))
    return found
