"""A prune of a place is killed before each of its calls in turn: what stays is whole at any time, and the next one finishes."""

import json
import shutil
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import msgspec
import pytest
from snapshots import Source, random_bytes

from perdure.training.checkpoint import facts
from perdure.training.run_dir import CheckpointName, RunDir
from perdure.training.storage.folder import FolderStore
from perdure.training.storage.store import ObjectStore
from perdure.training.travel.contents import remote_checkpoints
from perdure.training.travel.copies import Stored, check
from perdure.training.travel.push import pending, push

MadeRun = Any
BASE, INCREMENT, NEWEST = (CheckpointName(step, 1) for step in (100, 110, 200))


@pytest.fixture
def pruner() -> Iterator["subprocess.Popen[str]"]:
    script = str(Path(__file__).with_name("pruner.py"))
    with subprocess.Popen([sys.executable, script], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as process:
        yield process
        assert process.stdin is not None
        process.stdin.close()
        assert process.wait(60) == 0


def give(pruner: "subprocess.Popen[str]", run: RunDir, store: ObjectStore, plan: str) -> int:
    assert pruner.stdin is not None
    assert pruner.stdout is not None
    settings = json.dumps(msgspec.structs.asdict(store.settings))
    pruner.stdin.write(json.dumps({"plan": plan, "url": store.url, "settings": settings, "run": str(run.root)}) + "\n")
    pruner.stdin.flush()
    return int(pruner.stdout.readline())


def contents(store: ObjectStore) -> dict[str, bytes]:
    return {item.key: store.get(item.key, limit=10**6) for item in store.list("")}


def taken_back(store: ObjectStore, before: dict[str, bytes], run: RunDir, saved: Path) -> None:
    shutil.rmtree(run.root)
    shutil.copytree(saved, run.root)
    if isinstance(store, FolderStore):
        shutil.rmtree(store.root)
    there = {item.key: item.size for item in store.list("")}
    store.delete([key for key in there if key not in before])
    for key, data in before.items():
        if there.get(key) != len(data):
            store.put(key, data)


@pytest.mark.parametrize("kind", ["folder", pytest.param("s3", marks=pytest.mark.chaos)])
def test_killed_anywhere_what_stays_is_whole_and_the_next_prune_finishes(
    kind: str, request: pytest.FixtureRequest, made: MadeRun, tmp_path: Path
) -> None:
    store: ObjectStore = request.getfixturevalue("folder_store") if kind == "folder" else request.getfixturevalue("open_s3")()
    pruner = request.getfixturevalue("pruner")  # now that the store's keys are in the environment
    for name in (BASE, INCREMENT, NEWEST):
        source = Source(name.step).tensor("a", "uint8", (3000,), random_bytes(name == NEWEST, 3000))
        made.write(name, source, base=BASE if name == INCREMENT else None)
    push(made.dir, store, INCREMENT)
    push(made.dir, store, NEWEST)
    before = contents(store)
    shutil.copytree(made.dir.root, tmp_path / "run")
    outcomes: list[tuple[CheckpointName, ...]] = []
    while True:
        status = give(pruner, made.dir, store, f"prune:kill:{len(outcomes) + 1}")
        there = remote_checkpoints(store)
        outcomes.append(tuple(there))
        for name in there:
            assert check(Stored(store), None, name, made.id).good
        assert INCREMENT not in there or BASE in there
        for name in (BASE, INCREMENT):
            assert not facts.is_pruned(made.dir, name, "store") or name not in there
        if status != 0:
            assert give(pruner, made.dir, store, "") == 0
        left = {key: data for key, data in before.items() if str(BASE) not in key and str(INCREMENT) not in key}
        assert contents(store) == left
        assert pending(made.dir) == []
        if status == 0:
            break
        assert status == -9
        taken_back(store, before, made.dir, tmp_path / "run")
    assert len(outcomes) > (12 if kind == "s3" else 40)
    assert outcomes[0] == (BASE, INCREMENT, NEWEST)
    assert outcomes[-1] == (NEWEST,)
    assert sorted(outcomes, key=len, reverse=True) == outcomes, "a manifest that is gone stays away"
