"""Launch records and the lineage they define: which checkpoints belong to the present history, and which to a zombie's."""

import re

import msgspec

from perdure.training import files
from perdure.training.run_dir import CheckpointName, RunDir

MAX_RECORD = 1 << 20
_RECORD = re.compile(r"([0-9]{4,})\.json")


class LaunchRecord(msgspec.Struct, frozen=True, kw_only=True):
    """One life of the trainer. Written once, exclusively; `owner` tells our own record from another machine's."""

    token: int
    resumed_from: str | None
    """Name of the checkpoint it went on from."""
    created: float
    host: str
    pid: int
    run: str
    owner: str
    notes: dict[str, str] = {}


class LaunchEnd(msgspec.Struct, frozen=True, kw_only=True):
    """Why a launch ended; absent when its agent died."""

    token: int
    reason: str
    """complete, stopped, failed."""
    error_class: str
    step: int
    detail: str
    log_tail: str
    ended: float


def create_launch(run: RunDir, record: LaunchRecord) -> bool:
    """Write the record of a new launch; False when the token is taken."""
    files.make_dirs(run.launches)
    return files.create_exclusively(run.launch_record(record.token), msgspec.json.encode(record))


def read_launches(run: RunDir) -> dict[int, LaunchRecord]:
    """Every readable launch record by token."""
    found = {}
    for path in run.launches.iterdir() if run.launches.is_dir() else ():
        match = _RECORD.fullmatch(path.name)
        if not match:
            continue
        try:
            record = msgspec.json.decode(files.read_limited(path, MAX_RECORD), type=LaunchRecord)
        except (OSError, ValueError, RecursionError):
            continue
        if record.token == int(match[1]):
            found[record.token] = record
    return found


def write_end(run: RunDir, end: LaunchEnd, node: int = 0) -> None:
    """Texts of a user's error may hold what is no Unicode; it is replaced, never a reason not to write."""
    detail, tail = (text.encode("utf-8", "replace").decode() for text in (end.detail, end.log_tail))
    whole = msgspec.structs.replace(end, detail=detail, log_tail=tail)
    files.write_atomically(run.launch_end(end.token, node), msgspec.json.encode(whole))


def read_end(run: RunDir, token: int, node: int = 0) -> LaunchEnd | None:
    try:
        return msgspec.json.decode(files.read_limited(run.launch_end(token, node), MAX_RECORD), type=LaunchEnd)
    except (OSError, ValueError, RecursionError):
        return None


def committed(run: RunDir) -> list[CheckpointName]:
    """Every checkpoint with a manifest, by step and token, in the lineage or not. One that is pruned while we look goes for a
    newer one, which is not missed: older ones are looked at first, and all again when a folder came meanwhile."""
    while True:
        names = _folders(run)
        found = [name for name in sorted(names) if run.manifest(name).exists()]
        if _folders(run) <= names:
            return found


def _folders(run: RunDir) -> set[CheckpointName]:
    folders = run.checkpoints.iterdir() if run.checkpoints.is_dir() else ()
    return {name for folder in folders if (name := CheckpointName.parse(folder.name)) is not None}


def lineage(run: RunDir) -> list[CheckpointName]:
    """Committed checkpoints of the present history, newest first: those of the newest launch, then those of the launch it
    resumed from up to that step, and so on. What an older launch commits late is not among them."""
    launches = read_launches(run)
    return follow(launches, committed(run))


def follow(launches: dict[int, LaunchRecord], names: list[CheckpointName]) -> list[CheckpointName]:
    """`lineage` on records and names from anywhere (a store, say)."""
    found: list[CheckpointName] = []
    token, limit = max(launches, default=0), None
    while token in launches:
        found += sorted((n for n in names if n.token == token and (limit is None or n.step <= limit)), reverse=True)
        start = CheckpointName.parse(launches[token].resumed_from or "")
        if start is None or start.token >= token:
            break
        token, limit = start.token, start.step
    return found
