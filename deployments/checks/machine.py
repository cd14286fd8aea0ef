"""This machine: Python and packages, memory, and locks of torch extensions whose builder died."""

import os
import platform
import sys
import time
from collections.abc import Iterator
from importlib.metadata import PackageNotFoundError, requires, version
from pathlib import Path

from perdure.deployments.checks.finding import Finding, Subject, fail, ok, warn
from perdure.deployments.checks.run import newest_raw_bytes
from perdure.training.agent import extension_locks


def check_python(subject: Subject) -> Iterator[Finding]:
    """Versions, against what the installed Perdure asks for."""
    said = f"Python {platform.python_version()} on {platform.system()} {platform.machine()}"
    if sys.platform != "linux":
        yield fail("Python", said, "use Linux")
    else:
        yield ok("Python", said)
    wrong = [text for text in map(_unmet, _needed(subject)) if text]
    if wrong:
        yield fail("packages", "; ".join(wrong), "pip install --upgrade perdure")
    else:
        shown = ", ".join(f"{name} {version(name)}" for name in ("perdure", "prefect", "torch"))
        yield ok("packages", shown)


def _needed(subject: Subject) -> list[str]:
    """Requirement lines without the markers of extras, and boto3's where the store is a bucket."""
    lines = requires("perdure") or []
    extra = 'extra == "s3"' if subject.config and subject.config.store_url.startswith("s3:") else "no extra"
    return [line.partition(";")[0].strip() for line in lines if "extra ==" not in line or extra in line]


def _unmet(line: str) -> str:
    from packaging.requirements import Requirement

    requirement = Requirement(line)
    try:
        found = version(requirement.name)
    except PackageNotFoundError:
        return f"{requirement.name} is not installed"
    if not requirement.specifier.contains(found, prereleases=True):
        return f"{requirement.name} {found} is not {requirement.specifier}"
    return ""


# memory


def check_memory(subject: Subject) -> Iterator[Finding]:
    """Available against one more copy of the state, which a snapshot is."""
    available = min(_meminfo("MemAvailable"), _cgroup_room())
    said = f"{available / 2**30:.1f} GiB available"
    raw = newest_raw_bytes(subject.config.directory) if subject.config else 0
    if not raw:
        yield ok("memory", said)
    elif available < 2 * raw:
        text = f"{said}; a snapshot of this run holds {raw / 2**30:.2f} GiB beside the model itself"
        yield warn("memory", text, "free memory, or use a machine with more")
    else:
        yield ok("memory", f"{said}, a snapshot of this run holds {raw / 2**30:.2f} GiB")


def _meminfo(key: str) -> int:
    for line in Path("/proc/meminfo").read_text().splitlines():
        if line.startswith(f"{key}:"):
            return int(line.split()[1]) << 10
    return 1 << 62


def _cgroup_room() -> int:
    """What the container's limit leaves; huge where there is none (or none that can be read)."""
    try:
        path = Path("/proc/self/cgroup").read_text().splitlines()[-1].rpartition(":")[2].lstrip("/")
        folder = Path("/sys/fs/cgroup", path)
        folder = folder if (folder / "memory.max").exists() else Path("/sys/fs/cgroup")
        return int((folder / "memory.max").read_text()) - int((folder / "memory.current").read_text())
    except (OSError, ValueError, IndexError):
        return 1 << 62


# torch extensions


def check_extensions(subject: Subject) -> Iterator[Finding]:
    """A build that was killed leaves its lock, and every later start waits for it for ever, silently."""
    cache = _cache(subject)
    if not cache.is_dir():
        yield ok("torch extensions", f"no cache in {cache}")
        return
    stale, held = extension_locks.find(cache)
    for lock in stale:
        age = (time.time() - lock.changed_ns / 1e9) / 60
        text = f"{lock.path} is {age:.0f} min old and no process that can be seen holds it: a start would wait for it for ever"
        yield fail("torch extensions", text, f"rm {lock.path}")
    if not stale:
        building = f"; {held} being built now" if held else ""
        yield ok("torch extensions", f"no stale lock in {cache}{building}")


def _cache(subject: Subject) -> Path:
    ranks = subject.config.launch.env if subject.config else {}
    return extension_locks.cache_of({**os.environ, **ranks})
