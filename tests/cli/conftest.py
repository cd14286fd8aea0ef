"""The real command in a process of its own, on real checkpoints."""

import json
import os
import subprocess
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest

from perdure.training.checkpoint.lineage import LaunchEnd, LaunchRecord, create_launch, write_end
from perdure.training.checkpoint.manifest import Manifest
from perdure.training.checkpoint.plain import pack_plain
from perdure.training.checkpoint.reader import open_checkpoint
from perdure.training.checkpoint.run_info import create_run_info, read_run_info
from perdure.training.checkpoint.writer import write_checkpoint
from perdure.training.config import load_config
from perdure.training.run_dir import CheckpointName, RunDir, rank_pack
from perdure.training.slots import About, Entry

RUN_TOML = """
[run]
name = "tiny"
entry = "train.py:train"
steps = 60
chunk = 20
[store]
url = "store"
"""


@dataclass(frozen=True)
class Answer:
    code: int
    out: str
    err: str

    @property
    def json(self) -> Any:
        return json.loads(self.out)


def perdure(*arguments: object, env: Mapping[str, str] | None = None, cwd: Path | None = None) -> Answer:
    command = [sys.executable, "-m", "perdure.cli", *map(str, arguments)]
    environment = {**os.environ, **(env or {})}
    done = subprocess.run(
        command, capture_output=True, text=True, env=environment, cwd=cwd, stdin=subprocess.DEVNULL, check=False
    )
    return Answer(done.returncode, done.stdout, done.stderr)


Leaves = Mapping[str, tuple[str, str, Sequence[int], bytes]]
"""Path -> kind, dtype, shape, bytes."""


def flip(path: Path, at: int) -> None:
    data = bytearray(path.read_bytes())
    data[at] ^= 1
    path.write_bytes(data)


@dataclass
class Memory:
    """A snapshot in memory, as the writer takes it."""

    step: int
    leaves: Leaves
    about: About = field(init=False)
    entries: list[Entry] = field(init=False)

    def __post_init__(self) -> None:
        about = {name: {} for name in ("world", "data", "environment", "code", "config", "loss")}
        self.about = About(step=self.step, **about)  # type: ignore[arg-type]
        self.entries, offset = [], 0
        for path, (kind, dtype, shape, data) in self.leaves.items():
            self.entries.append(Entry(path=path, kind=kind, dtype=dtype, shape=tuple(shape), offset=offset, nbytes=len(data)))
            offset += len(data)

    def data(self, entry: Entry) -> memoryview:
        return memoryview(self.leaves[entry.path][3])


def leaves_of(step: int) -> Leaves:
    plain = pack_plain({"kind": "module", "state": {"weight": ("tensor-ref", "weight")}}, "model")
    return {
        "model": ("plain", "plain", (len(plain),), plain),
        "model/weight": ("tensor", "float32", (64, 16), bytes(range(256)) * 16),
        "model/step": ("tensor", "int64", (), step.to_bytes(8, "little")),
    }


@dataclass(frozen=True)
class Made:
    run: RunDir
    toml: Path

    def write(self, step: int, token: int = 1, leaves: Leaves | None = None, base: int | None = None) -> Manifest:
        """A full, or an increment against the full of step `base`."""
        snapshot, name = Memory(step, leaves or leaves_of(step)), CheckpointName(step, token)
        full = None if base is None else CheckpointName(base, token)
        return write_checkpoint(self.run, self.id, name, [snapshot], encoding="auto", threads=1, base=full)

    @property
    def id(self) -> str:
        return read_run_info(self.run).id

    def damage(self, step: int, tensor: str) -> None:
        """Flip one bit of the first stored byte of a tensor."""
        folder = self.run.checkpoint(CheckpointName(step, 1))
        with open_checkpoint(folder) as reader:
            offset = reader.entries[tensor].blobs[0].offset
        flip(folder / rank_pack(0), offset)

    def launch(self, token: int, resumed_from: str | None = None) -> None:
        record = LaunchRecord(
            token=token, resumed_from=resumed_from, created=time.time(), host="h", pid=1, run=self.id, owner=f"o{token}"
        )
        assert create_launch(self.run, record)

    def end(self, token: int, reason: str, step: int, error_class: str = "", detail: str = "") -> None:
        write_end(
            self.run,
            LaunchEnd(
                token=token, reason=reason, error_class=error_class, step=step, detail=detail, log_tail="", ended=time.time()
            ),
        )


@pytest.fixture
def toml(tmp_path: Path) -> Path:
    (tmp_path / "train.py").write_text("def train(session): ...\n")
    path = tmp_path / "run.toml"
    path.write_text(RUN_TOML)
    return path


@pytest.fixture
def made(toml: Path) -> Made:
    """A run of 60 steps with checkpoints of steps 20 and 40, made by launch 1."""
    config = load_config(toml)
    run = RunDir(config.run_dir)
    create_run_info(run, config)
    made = Made(run, toml)
    made.launch(1)
    made.write(20)
    made.write(40)
    return made


@pytest.fixture
def command() -> Callable[..., Answer]:
    return perdure
