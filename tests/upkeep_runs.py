"""Runs whose checkpoints are pruned and rolled up: launches, good checkpoints, bytes used and bytes needed."""

import time

from snapshots import RUN_ID, small_source, write

from perdure.training.checkpoint import catalog, prune
from perdure.training.checkpoint.lineage import LaunchRecord, committed, create_launch
from perdure.training.checkpoint.prune import Done
from perdure.training.checkpoint.upkeep import upkeep
from perdure.training.checkpoint.verify import check
from perdure.training.retention_settings import RetentionSection
from perdure.training.run_dir import CheckpointName, RunDir


def name(step: int, token: int = 1) -> CheckpointName:
    return CheckpointName(step, token)


def launch(run: RunDir, token: int, resumed_from: CheckpointName | None = None) -> None:
    source = None if resumed_from is None else str(resumed_from)
    record = LaunchRecord(token=token, resumed_from=source, created=time.time(), host="h", pid=1, run=RUN_ID, owner=f"o{token}")
    assert create_launch(run, record)


def save(run: RunDir, step: int, token: int = 1, *, proven: bool = True) -> CheckpointName:
    write(run, small_source(step, step), name=name(step, token))
    if proven:
        assert check(run, name(step, token)).result == "good"
    return name(step, token)


def used(run: RunDir) -> int:
    return sum(path.lstat().st_size for path in run.checkpoints.rglob("*") if path.is_file())


def needed(run: RunDir) -> int:
    """Bytes of what the committed manifests name, of the manifests and of the facts."""
    total = 0
    for listed in catalog.list_checkpoints(run):
        assert listed.manifest is not None
        folder = run.checkpoint(listed.name)
        beside = [run.manifest(listed.name), *folder.glob("check-*.json")]
        total += sum(record.bytes for record in listed.manifest.files) + sum(path.stat().st_size for path in beside)
    return total


def keep(last: int) -> RetentionSection:
    return RetentionSection(keep_last=last)


def prune_all(run: RunDir, keep_last: int, *, stored: bool = False, idle: bool = True) -> Done:
    with upkeep(run):
        return prune.execute(run, prune.survey(run, keep(keep_last), stored=stored, is_idle=lambda: idle))


def left(run: RunDir) -> list[int]:
    return [one.step for one in committed(run)]
