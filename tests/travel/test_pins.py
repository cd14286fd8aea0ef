"""Milestones given by hand are at every place after a push, and here after a pull; the later word counts."""

import shutil
from pathlib import Path
from typing import Any

import msgspec
import pytest

from perdure.training import events, files
from perdure.training.checkpoint.pins import Pin, pin, pins_by_hand, read_pin, unpin
from perdure.training.errors import StoreConflict
from perdure.training.retention_settings import RetentionSection
from perdure.training.run_dir import CheckpointName, RunDir
from perdure.training.storage.store import ObjectStore
from perdure.training.travel import prune
from perdure.training.travel.pins import push_pins, remote_pins
from perdure.training.travel.pull import pull
from perdure.training.travel.push import push

MadeRun = Any
OLD, NEW = CheckpointName(100, 1), CheckpointName(200, 1)


@pytest.fixture
def pinned(store: ObjectStore, made: MadeRun) -> MadeRun:
    """Two checkpoints in the store; the older one is a milestone."""
    for name in (OLD, NEW):
        made.commit(name.step, name.token)
    pin(made.dir, "release", OLD)
    for name in (OLD, NEW):
        push(made.dir, store, name)
    return made


def kept(run: RunDir, store: ObjectStore) -> list[CheckpointName]:
    found = prune.survey(run, store, "store", RetentionSection(keep_last=1))
    return [verdict.name for verdict in found.plan.keep]


def test_a_milestone_comes_with_the_run_and_so_does_that_it_is_none_any_more(
    store: ObjectStore, pinned: MadeRun, elsewhere: RunDir
) -> None:
    assert pull(store, elsewhere) == NEW
    assert read_pin(elsewhere, "release") == read_pin(pinned.dir, "release")
    unpin(elsewhere, "release")
    push_pins(elsewhere, store)
    push(pinned.dir, store, NEW)  # what is known later there is not taken back
    assert kept(pinned.dir, store) == [NEW], "what a place says later than we counts there"
    pull(store, pinned.dir)
    assert kept(pinned.dir, store) == [NEW]
    assert pins_by_hand(pinned.dir)[0]["release"].checkpoint == ""


def test_a_place_is_pruned_by_its_milestones_too_and_not_at_all_when_one_cannot_be_read(
    store: ObjectStore, pinned: MadeRun, elsewhere: RunDir
) -> None:
    shutil.rmtree(pinned.dir.pins)
    assert kept(pinned.dir, store) == [OLD, NEW]
    store.put(RunDir.pin_key("release"), b"rot")
    store.put("pins/no label.json", b"{}")
    found = prune.survey(pinned.dir, store, "store", RetentionSection(keep_last=1))
    assert any("release.json cannot be read" in reason for reason in found.plan.keep[0].reasons)
    assert pull(store, elsewhere) == NEW
    assert any("passed over" in event.data.get("text", "") for event in events.read(elsewhere))
    pin(pinned.dir, "release", NEW)
    push_pins(pinned.dir, store)
    assert remote_pins(store)[0] == pins_by_hand(pinned.dir)[0], "what rots is put again from where it is good"


def test_one_that_rots_here_is_brought_again_and_no_foreign_place_gets_any(
    store: ObjectStore, pinned: MadeRun, tmp_path: Path
) -> None:
    good = read_pin(pinned.dir, "release")
    pinned.dir.pin("release").write_bytes(b"rot")
    pull(store, pinned.dir)
    assert read_pin(pinned.dir, "release") == good
    other = type(pinned)(tmp_path / "other", "other-1")
    files.make_dirs(other.dir.pins)
    other.dir.pin("mine").write_bytes(msgspec.json.encode(Pin(checkpoint=str(OLD), created=1.0)))
    with pytest.raises(StoreConflict):
        push_pins(other.dir, store)
    assert sorted(remote_pins(store)[0]) == ["release"]
