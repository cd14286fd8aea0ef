"""Runs made by hand (real manifests and facts, packs of random bytes) and the two kinds of store."""

import random
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import blake3
import msgspec
import pytest
import xxhash

from perdure.training import files
from perdure.training.checkpoint import facts, manifest
from perdure.training.checkpoint.facts import Fact
from perdure.training.checkpoint.lineage import LaunchRecord, create_launch
from perdure.training.checkpoint.manifest import FileRecord, Manifest
from perdure.training.checkpoint.run_info import RunInfo
from perdure.training.run_dir import CheckpointName, RunDir, rank_index, rank_pack
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
        """Pack, index, sealed manifest and a good local fact."""
        name = CheckpointName(step, token)
        folder = self.dir.checkpoint(name)
        files.make_dirs(folder)
        records = []
        for rank in range(ranks):
            data = random.Random(f"{step} {token} {rank}").randbytes(pack)
            index = data[:50]
            (folder / rank_pack(rank)).write_bytes(data)
            (folder / rank_index(rank)).write_bytes(index)
            digest = f"xxh3-128:{xxhash.xxh3_128_hexdigest(data)}"
            records.append(FileRecord(name=rank_pack(rank), bytes=len(data), digest=digest))
            digest = f"blake3:{blake3.blake3(index).hexdigest()}"
            records.append(FileRecord(name=rank_index(rank), bytes=len(index), digest=digest))
        (folder / "manifest.json").write_bytes(manifest.seal(self.manifest(step, token, tuple(records), **changes)))
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
