"""The run's own place: rights of its directory, room for its checkpoints, and whether somebody holds it."""

import os
import stat
import time
from collections.abc import Iterator
from pathlib import Path
from urllib.parse import unquote, urlsplit

from perdure.deployments.checks.finding import Finding, Subject, fail, ok, skip_all, warn
from perdure.training import files
from perdure.training.agent import lock
from perdure.training.checkpoint import catalog, lineage, space
from perdure.training.errors import CheckpointDamaged, CheckpointNotFound
from perdure.training.run_dir import RunDir

_SAVES = 2
"""Checkpoints that should fit: the next one, and the one after it before anything is pruned."""
_LOW_BYTES, _LOW_FILES = 1 << 30, 1000


def newest_raw_bytes(run: RunDir) -> int:
    """Size of the state in its newest readable checkpoint; 0 without one."""
    for name in reversed(lineage.committed(run)):
        try:
            return catalog.manifest_of(run, name).raw_bytes
        except (CheckpointNotFound, CheckpointDamaged):
            continue
    return 0


def check_run(subject: Subject) -> Iterator[Finding]:
    """Directory, holder, room here and in a store that is a folder."""
    if subject.config is None:
        yield from skip_all(("run directory", "run holder", "run room"), "no RUN.toml was named")
        return
    run = subject.config.directory
    yield _directory(run.root)
    yield _holder(run)
    yield _room(run)
    url = subject.config.store_url
    if url.startswith("file:"):
        yield _free("store room", _existing(Path(unquote(urlsplit(url).path))), _SAVES * newest_raw_bytes(run))


def _existing(path: Path) -> Path:
    while not path.exists():
        path = path.parent
    return path


def _directory(root: Path) -> Finding:
    name, place = "run directory", _existing(root)
    try:
        probe = place / f".perdure-doctor-{os.getpid()}.tmp"
        files.write_atomically(probe, b"probe")
        files.remove(probe)
    except OSError as error:
        return fail(name, f"{place} takes no file: {error.strerror}", f"chown or chmod {place} for this user, or set run.dir")
    if place != root:
        return ok(name, f"{root} will be made in {place}")
    about = root.stat()
    if about.st_uid != os.geteuid():
        return warn(name, f"{root} belongs to user {about.st_uid}, this is {os.geteuid()}", "run as one user, or chown -R it")
    if stat.S_IMODE(about.st_mode) & 0o077:
        text = f"{root} has mode {stat.S_IMODE(about.st_mode):04o}: others on this machine may look into it"
        return warn(name, text, f"chmod 700 {root}, unless that is meant")
    return ok(name, f"{root} takes files, and only this user sees them")


def _holder(run: RunDir) -> Finding:
    if not lock.is_held(run):
        return ok("run holder", "nobody holds the run")
    holder = lock.read_holder(run)
    if holder is None:
        return warn("run holder", f"{run.root} is held by another process", "wait for it, or `perdure stop` it")
    since = time.strftime("%Y-%m-%d %H:%M:%S", time.localtime(holder.since))
    text = f"{run.root} is held by process {holder.process.pid} on {holder.process.host} since {since}"
    return warn("run holder", text, "that is as it should be while it trains; else `perdure stop` it")


def _room(run: RunDir) -> Finding:
    raw = newest_raw_bytes(run)
    if raw:
        short = space.shortage(run, raw, saves=_SAVES)
        if short:
            return fail("run room", short, "make room, or set retention.keep_last and `perdure prune`")
    return _free("run room", _existing(run.root), 0 if not raw else 1)


def _free(name: str, place: Path, needed: int) -> Finding:
    room = os.statvfs(place)
    free, inodes = room.f_bavail * room.f_frsize, room.f_favail if room.f_files else _LOW_FILES
    said = f"{free / 2**30:.1f} GiB free in {place}"
    if needed > free:
        return fail(name, f"{said}, {_SAVES} checkpoints need {needed / 2**30:.1f}", "make room there")
    if free < _LOW_BYTES or inodes < _LOW_FILES:
        return warn(name, f"{said}, {inodes} inodes", "make room there")
    return ok(name, said + (f", room for {_SAVES} checkpoints" if needed else "; no checkpoint yet to compare with"))
