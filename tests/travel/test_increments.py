"""An increment travels with its base: neither store nor machine ever has one without the other."""

import shutil
import time
from pathlib import Path
from typing import Any

import msgspec
import pytest
from snapshots import Source, random_bytes

from perdure.training import events, files
from perdure.training.checkpoint import facts, manifest
from perdure.training.checkpoint.facts import Fact
from perdure.training.checkpoint.verify import verify_folder
from perdure.training.errors import CheckpointDamaged, StoreConflict, StoreError
from perdure.training.run_dir import CheckpointName, RunDir
from perdure.training.storage.folder import FolderStore
from perdure.training.storage.store import ObjectStore
from perdure.training.travel.contents import remote_checkpoints
from perdure.training.travel.pull import pull
from perdure.training.travel.push import push

MadeRun = Any
OLD, FULL, FIRST, SECOND = (CheckpointName(step, 1) for step in (50, 100, 110, 120))


def state(step: int) -> Source:
    """Most of it never changes."""
    source = Source(step).tensor("frozen", "uint8", (20_000,), random_bytes("frozen", 20_000))
    return source.tensor("new", "uint8", (3000,), random_bytes(step, 3000))


@pytest.fixture
def history(made: MadeRun) -> MadeRun:
    """A full of its own, a full, and two increments against it."""
    made.commit(OLD.step, OLD.token)
    made.write(FULL, state(FULL.step))
    for name in (FIRST, SECOND):
        made.write(name, state(name.step), base=FULL)
        assert manifest.read(made.dir.checkpoint(name)).base_name == FULL
    return made


def test_the_base_is_pushed_first_and_pulled_too(store: ObjectStore, history: MadeRun, elsewhere: RunDir) -> None:
    seen: list[tuple[int, int]] = []
    push(history.dir, store, SECOND, progress=lambda done, total: seen.append((done, total)))
    assert remote_checkpoints(store) == [FULL, SECOND]
    stored = sum(manifest.read(history.dir.checkpoint(name)).stored_bytes for name in (FULL, SECOND))
    assert seen == sorted(seen)
    assert seen[-1] == (2 * stored, 2 * stored)
    assert [facts.trust(history.dir, name) for name in (FULL, FIRST, SECOND)] == ["replicated", "verified", "replicated"]
    assert pull(store, elsewhere) == SECOND
    for name in (FULL, SECOND):
        assert verify_folder(elsewhere.checkpoint(name)) == []
        assert manifest.read(elsewhere.checkpoint(name)) == manifest.read(history.dir.checkpoint(name))


def test_a_base_that_is_there_is_not_sent_again(folder_store: FolderStore, history: MadeRun) -> None:
    push(history.dir, folder_store, FIRST)
    pack = folder_store.root / f"checkpoints/{FULL}/rank-00000.pack"
    before = pack.stat().st_ino
    seen: list[int] = []
    push(history.dir, folder_store, SECOND, progress=lambda _, total: seen.append(total))
    assert pack.stat().st_ino == before
    assert set(seen) == {2 * manifest.read(history.dir.checkpoint(SECOND)).stored_bytes}


def test_without_a_good_base_an_increment_is_not_pushed(folder_store: FolderStore, history: MadeRun) -> None:
    facts.write_fact(history.dir, FULL, Fact(copy="local", checked_at=time.time(), result="damaged", damage=("frozen",)))
    with pytest.raises(CheckpointDamaged, match="quarantined"):
        push(history.dir, folder_store, SECOND)
    history.dir.fact(FULL, "local").unlink()
    _flip(history.dir.checkpoint(FULL) / "rank-00000.pack")
    with pytest.raises(CheckpointDamaged, match=f"{FULL}.*not what the manifest says"):
        push(history.dir, folder_store, SECOND)
    files.remove_tree(history.dir.checkpoint(FULL))
    with pytest.raises(CheckpointDamaged, match="is missing"):
        push(history.dir, folder_store, SECOND)
    assert remote_checkpoints(folder_store) == []


def _flip(path: Path) -> None:
    data = bytearray(path.read_bytes())
    data[len(data) // 2] ^= 1
    path.write_bytes(data)


@pytest.mark.parametrize("file", ["rank-00000.pack", "rank-00000.index", "manifest.json"])
@pytest.mark.parametrize("how", ["flipped", "missing"])
def test_a_damaged_base_in_the_store_takes_all_its_increments_with_it(
    folder_store: FolderStore, history: MadeRun, elsewhere: RunDir, file: str, how: str
) -> None:
    for name in (OLD, FIRST, SECOND):
        push(history.dir, folder_store, name)
    path = folder_store.root / f"checkpoints/{FULL}/{file}"
    if how == "missing":
        path.unlink()
    else:
        _flip(path)
    assert pull(folder_store, elsewhere) == OLD
    assert [folder.name for folder in elsewhere.checkpoints.iterdir()] == [str(OLD)]
    said = " ".join(event.data["text"] for event in events.read(elsewhere))
    assert str(FIRST) in said
    assert str(SECOND) in said
    push(history.dir, folder_store, FULL)  # the machine that has it whole heals the store
    assert pull(folder_store, elsewhere) == SECOND


def test_a_damaged_increment_leaves_its_base_as_the_newest(
    folder_store: FolderStore, history: MadeRun, elsewhere: RunDir
) -> None:
    push(history.dir, folder_store, SECOND)
    _flip(folder_store.root / f"checkpoints/{SECOND}/rank-00000.pack")
    assert pull(folder_store, elsewhere) == FULL
    assert not elsewhere.checkpoint(SECOND).exists()


def test_an_increment_whose_base_is_another_one_is_refused(
    folder_store: FolderStore, history: MadeRun, elsewhere: RunDir
) -> None:
    for name in (OLD, SECOND):
        push(history.dir, folder_store, name)
    found = manifest.read(history.dir.checkpoint(SECOND))
    for base in (manifest.Base(name=str(OLD), digest=found.digest), manifest.Base(name=str(FULL), digest="0" * 64)):
        forged = manifest.seal(msgspec.structs.replace(found, base=base))
        folder_store.put(f"checkpoints/{SECOND}/manifest.json", forged)
        assert pull(folder_store, elsewhere) == FULL
        files.remove_tree(elsewhere.root)


def rolled_up(made: MadeRun, name: CheckpointName) -> None:
    """As roll-up does it: the same state as a full, in place of the increment."""
    folder, other = made.dir.checkpoint(name), RunDir(made.dir.root / "other")
    made_there = type(made).__new__(type(made))
    made_there.dir, made_there.id = other, made.id
    made_there.write(name, state(name.step))
    found = manifest.read(other.checkpoint(name))
    for old in manifest.read(folder).files:
        (folder / old.name).unlink()
    records = []
    for record in found.files:
        new = record.name.replace("rank-00000", "rank-00000.full")
        (other.checkpoint(name) / record.name).rename(folder / new)
        records.append(manifest.FileRecord(name=new, bytes=record.bytes, digest=record.digest))
    (folder / "manifest.json").write_bytes(manifest.seal(msgspec.structs.replace(found, files=tuple(records))))
    files.remove_tree(other.root)
    assert verify_folder(folder) == []


def test_what_was_rolled_up_takes_the_place_of_the_increment_in_the_store(
    store: ObjectStore, history: MadeRun, elsewhere: RunDir, tmp_path: Path
) -> None:
    push(history.dir, store, SECOND)
    increment = RunDir(tmp_path / "increment")
    assert pull(store, increment) == SECOND
    rolled_up(history, SECOND)
    push(history.dir, store, SECOND)
    assert pull(store, elsewhere) == SECOND
    assert [folder.name for folder in elsewhere.checkpoints.iterdir()] == [str(SECOND)]  # the base is not needed any more
    keys = [info.key.rpartition("/")[2] for info in store.list(RunDir.checkpoint_key(SECOND, ""))]
    assert {"check.json", "manifest.json", "rank-00000.full.index", "rank-00000.full.pack"} < set(keys)  # others: for a prune
    push(increment, store, SECOND)  # a machine that still has the increment changes nothing
    assert sorted(info.key.rpartition("/")[2] for info in store.list(RunDir.checkpoint_key(SECOND, ""))) == sorted(keys)


def test_a_rotten_full_in_the_store_is_no_good_copy_of_the_increment_it_was_made_from(
    folder_store: FolderStore, history: MadeRun, tmp_path: Path
) -> None:
    push(history.dir, folder_store, SECOND)
    increment = RunDir(tmp_path / "increment")
    pull(folder_store, increment)
    rolled_up(history, SECOND)
    push(history.dir, folder_store, SECOND)
    files.remove(increment.fact(SECOND, "store"))
    key = RunDir.checkpoint_key(SECOND, "rank-00000.full.pack")
    data = bytearray(folder_store.get(key, limit=1 << 30))
    data[len(data) // 2] ^= 1
    folder_store.put(key, bytes(data))
    with pytest.raises(StoreError, match="is damaged"):
        push(increment, folder_store, SECOND)
    assert facts.read_fact(increment, SECOND, "store") is None


def test_the_increment_in_the_store_does_not_take_the_place_of_the_full_made_of_it_here(
    folder_store: FolderStore, history: MadeRun
) -> None:
    push(history.dir, folder_store, SECOND)
    rolled_up(history, SECOND)
    full = manifest.read(history.dir.checkpoint(SECOND))
    newer = history.write(CheckpointName(130, 1), state(130), base=SECOND)
    files.remove_tree(history.dir.checkpoint(FULL))
    assert pull(folder_store, history.dir) == SECOND
    assert manifest.read(history.dir.checkpoint(SECOND)) == full
    assert not history.dir.checkpoint(FULL).exists()
    assert verify_folder(history.dir.checkpoint(newer)) == []
    _flip(history.dir.checkpoint(SECOND) / "rank-00000.full.pack")
    assert pull(folder_store, history.dir) == SECOND
    assert verify_folder(history.dir.checkpoint(SECOND)) == []


def test_a_rolled_up_one_of_another_state_replaces_nothing(folder_store: FolderStore, history: MadeRun) -> None:
    push(history.dir, folder_store, SECOND)
    rolled_up(history, SECOND)
    path = history.dir.manifest(SECOND)
    found = manifest.read(path.parent)
    path.write_bytes(manifest.seal(msgspec.structs.replace(found, state_digest="f" * 64)))
    with pytest.raises(StoreConflict, match="holds another checkpoint"):
        push(history.dir, folder_store, SECOND)


def test_an_increment_that_stores_nothing_travels_too(store: ObjectStore, made: MadeRun, elsewhere: RunDir) -> None:
    made.write(FULL, state(1))
    made.write(FIRST, state(1), base=FULL)
    assert manifest.read(made.dir.checkpoint(FIRST)).files[0].bytes == 0
    push(made.dir, store, FIRST)
    push(made.dir, store, FIRST)
    assert pull(store, elsewhere) == FIRST
    assert verify_folder(elsewhere.checkpoint(FIRST)) == []


def test_an_increment_of_version_2_on_a_base_of_version_1_travels(
    folder_store: FolderStore, made: MadeRun, elsewhere: RunDir
) -> None:
    old = Path(__file__).parents[1] / "checkpoint" / "version-1" / "000000000002-0001"
    name = CheckpointName(2, 1)
    shutil.copytree(old, made.dir.checkpoint(name))
    made.write(
        FIRST, Source(FIRST.step).tensor("all/bfloat16", "bfloat16", (300,), random_bytes("bfloat16", 200) * 3), base=name
    )
    assert manifest.read(made.dir.checkpoint(FIRST)).base_name == name
    push(made.dir, folder_store, FIRST)
    assert pull(folder_store, elsewhere) == FIRST
    assert verify_folder(elsewhere.checkpoint(name)) == verify_folder(elsewhere.checkpoint(FIRST)) == []
    _flip(folder_store.root / f"checkpoints/{name}/rank-00000.pack")
    with pytest.raises(CheckpointDamaged, match="no checkpoint is good"):
        pull(folder_store, RunDir(elsewhere.root.parent / "third"))
