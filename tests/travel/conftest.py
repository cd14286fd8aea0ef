"""Runs made by hand (real checkpoints of random bytes) and the two kinds of store."""

import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import msgspec
import pytest
from snapshots import Source, random_bytes

from perdure.training import files
from perdure.training.checkpoint import facts, manifest
from perdure.training.checkpoint.facts import Fact
from perdure.training.checkpoint.lineage import LaunchRecord, create_launch
from perdure.training.checkpoint.manifest import FileRecord, Manifest
from perdure.training.checkpoint.run_info import RunInfo
from perdure.training.checkpoint.writer import write_checkpoint
from perdure.training.run_dir import CheckpointName, RunDir
from perdure.training.storage.folder import FolderStore
from perdure.training.storage.store import ObjectStore


class MadeRun:
    """A run directory that tests fill: `launch(1)`, `commit(100, 1)`."""

    def __init__(self, root: Path, run_id: str = "gpt-1234") -> None:
        self.dir, self.id = RunDir(root), run_id
        files.make_dirs(self.dir.checkpoints)
        info = RunInfo(id=run_id, name="gpt", created=time.time(), steps=1000, chunk=100)
        files.create_exclusively(self.dir.run_json, msgspec.json.encode(info))

    def launch(self, token: int, resumed_from: CheckpointName | None = None) -> None:
        source = str(resumed_from) if resumed_from else None
        record = LaunchRecord(
            token=token,
            resumed_from=source,
            created=time.time(),
            host="here",
            pid=1,
            run=self.id,
            owner=f"owner-{self.id}-{token}",
        )
        assert create_launch(self.dir, record)

    def commit(self, step: int, token: int, *, pack: int = 3000, ranks: int = 1, **changes: Any) -> CheckpointName:
        """A checkpoint of noise, and a good local fact. `changes` of the manifest, sealed."""
        name = CheckpointName(step, token)
        sources = [
            Source(step).tensor("noise", "uint8", (pack,), random_bytes((step, token, rank), pack)) for rank in range(ranks)
        ]
        return self.write(name, *sources, **changes)

    def write(
        self, name: CheckpointName, *sources: Source, base: CheckpointName | None = None, **changes: Any
    ) -> CheckpointName:
        """A checkpoint of these ranks, an increment with a `base`, and a good local fact."""
        found = write_checkpoint(self.dir, self.id, name, sources, encoding="auto", threads=1, base=base)
        self.dir.manifest(name).write_bytes(manifest.seal(msgspec.structs.replace(found, **changes)))
        facts.write_fact(self.dir, name, Fact(copy="local", checked_at=time.time(), result="good"))
        return name

    def manifest(self, step: int, token: int, records: tuple[FileRecord, ...], **changes: Any) -> Manifest:
        fields: dict[str, Any] = {
            "format": manifest.FORMAT,
            "version": manifest.VERSION,
            "run": self.id,
            "step": step,
            "token": token,
            "created": 0.0,
            "state_digest": f"{step:064x}",
            "raw_bytes": 1,
            "leaves": 1,
            "files": records,
            "stored_bytes": sum(record.bytes for record in records),
            "world": {},
            "data": {},
            "environment": {},
            "code": {},
            "config": {},
            "loss": {},
            "exact": True,
            "exact_reasons": (),
        }
        return Manifest(**{**fields, **changes})


@pytest.fixture
def made(tmp_path: Path) -> MadeRun:
    """A run with one launch and no checkpoint."""
    run = MadeRun(tmp_path / "here" / "a run #1")
    run.launch(1)
    return run


@pytest.fixture
def make_run(tmp_path: Path) -> Callable[..., MadeRun]:
    return lambda place, run_id="gpt-1234": MadeRun(tmp_path / place / "run", run_id)


@pytest.fixture
def elsewhere(tmp_path: Path) -> RunDir:
    """A directory on a machine that has nothing."""
    return RunDir(tmp_path / "elsewhere" / "run")


@pytest.fixture(params=["folder", "s3"])
def store(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[ObjectStore]:
    if request.param == "folder":
        yield FolderStore(tmp_path / "store")
    else:
        yield request.getfixturevalue("open_s3")()


@pytest.fixture
def folder_store(tmp_path: Path) -> FolderStore:
    return FolderStore(tmp_path / "store")
