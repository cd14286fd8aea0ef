"""A roll-up makes a full of the same state: under readers, killed or failing at any call; then the base can go."""

import contextlib
import shutil
from collections.abc import Callable, Iterator
from pathlib import Path

import numpy as np
import pytest
from snapshots import Source, random_bytes, write
from upkeep_runs import launch, left, name, needed, prune_all, used

from perdure.training import files
from perdure.training.checkpoint import manifest as manifests
from perdure.training.checkpoint import rollup
from perdure.training.checkpoint.catalog import leftovers, list_checkpoints
from perdure.training.checkpoint.facts import read_fact
from perdure.training.checkpoint.hold import let_go, open_held
from perdure.training.checkpoint.layout import DELTA
from perdure.training.checkpoint.pack import DERIVED, REFERENCE
from perdure.training.checkpoint.reader import open_checkpoint
from perdure.training.checkpoint.rollup import roll_up
from perdure.training.checkpoint.tidy import tidy
from perdure.training.checkpoint.upkeep import upkeep
from perdure.training.checkpoint.verify import check, verify_folder
from perdure.training.errors import CheckpointDamaged, DiskFull
from perdure.training.run_dir import REPLACED_MANIFEST, RunDir, rank_index, rank_pack

Order = Callable[..., int]


def state(step: int) -> Source:
    """A frozen leaf, one that moves a little, one that is new each time, a half made of another, and plain data."""
    rng, moving = np.random.default_rng(1), np.random.default_rng(step)
    master = rng.normal(0, 0.02, 40_000).astype(np.float32)
    master[:50] += moving.normal(0, 1e-4, 50).astype(np.float32)
    half = ((master.view(np.uint32) + 0x7FFF + ((master.view(np.uint32) >> 16) & 1)) >> 16).astype(np.uint16)
    source = Source(step).plain("p", {"step": step}).tensor("frozen", "uint8", (50_000,), random_bytes("f", 50_000))
    source.array("master", master).tensor("half", "bfloat16", (40_000,), half.tobytes())
    return source.tensor("fresh", "uint8", (9000,), random_bytes(step, 9000)).array("zeros", np.zeros(5000))


def content(run: RunDir, step: int) -> dict[str, bytes]:
    with open_checkpoint(run.checkpoint(name(step))) as reader:
        return {path: bytes(reader.read(path)) for path in reader.entries}


def increment(run: RunDir, step: int, base: int) -> None:
    found = write(run, state(step), base=name(base))
    assert found.base_name == name(base)
    assert check(run, name(step)).result == "good"


@pytest.fixture
def three(run: RunDir) -> RunDir:
    """A full of step 10 and increments of it, 20 and 30; every one good."""
    launch(run, 1)
    write(run, state(10))
    assert check(run, name(10)).result == "good"
    increment(run, 20, 10)
    increment(run, 30, 10)
    return run


def rolled(run: RunDir, step: int) -> manifests.Manifest:
    with upkeep(run):
        return roll_up(run, name(step))


def files_of(run: RunDir, step: int) -> set[str]:
    return {path.name for path in run.checkpoint(name(step)).iterdir()}


FULL = {rank_pack(0, rolled_up=True), rank_index(0, rolled_up=True), "manifest.json", "check-local.json"}


def test_a_rolled_up_increment_is_a_full_of_the_same_state(three: RunDir) -> None:
    before, digest = content(three, 30), manifests.read(three.checkpoint(name(30))).state_digest
    with open_checkpoint(three.checkpoint(name(30))) as reader:
        kinds = {blob.layout[0] for entry in reader.entries.values() for blob in entry.blobs}
        assert kinds >= {DELTA, REFERENCE, DERIVED}, "the fixture has every kind"
    found = rolled(three, 30)
    assert (found.base, found.state_digest) == (None, digest)
    assert files_of(three, 30) == FULL
    shutil.rmtree(three.checkpoint(name(10)))
    assert content(three, 30) == before
    assert verify_folder(three.checkpoint(name(30))) == []
    assert read_fact(three, name(30), "local").result == "good"  # type: ignore[union-attr]
    write(three, state(40), base=name(30))
    assert manifests.read(three.checkpoint(name(40))).base_name == name(30)
    assert verify_folder(three.checkpoint(name(40))) == []


def test_what_needs_no_base_is_taken_over_as_it_is_stored(three: RunDir) -> None:
    with open_checkpoint(three.checkpoint(name(30))) as reader:
        own = reader.entries["fresh"].blobs[0]
        base = reader.base_entries(0)["frozen"].blobs[0]
    rolled(three, 30)
    with open_checkpoint(three.checkpoint(name(30))) as reader:
        fresh, frozen = reader.entries["fresh"].blobs[0], reader.entries["frozen"].blobs[0]
        assert (fresh.xxh, fresh.layout, frozen.xxh, frozen.layout) == (own.xxh, own.layout, base.xxh, base.layout)
        assert reader.entries["half"].derived is not None


def test_then_the_old_base_can_go(three: RunDir) -> None:
    """Case U5: 20 goes, then 10 cannot while 30 needs it; rolled up, 30 does not, and restores to the same digest."""
    before = content(three, 30)
    assert left(three) == [10, 20, 30]
    done = prune_all(three, 1)
    assert [one.name.step for one in done.removed] == [20]
    assert left(three) == [10, 30]
    rolled(three, 30)
    done = prune_all(three, 1)
    assert [one.name.step for one in done.removed] == [10]
    assert content(three, 30) == before
    assert used(three) == needed(three)


def test_rolled_up_twice_is_rolled_up_once(three: RunDir) -> None:
    first = rolled(three, 30)
    assert rolled(three, 30) == first
    assert rolled(three, 10) == manifests.read(three.checkpoint(name(10)))
    assert files_of(three, 30) == FULL


def test_an_open_reader_reads_on_and_the_old_files_go_after_it(three: RunDir) -> None:
    before = content(three, 30)
    with open_checkpoint(three.checkpoint(name(30))) as reader:
        rolled(three, 30)
        assert files_of(three, 30) == FULL | {rank_pack(0), rank_index(0), REPLACED_MANIFEST}
        with upkeep(three):
            assert not tidy(three, name(30))
        done = prune_all(three, 1)
        assert name(10) in done.spared, "the reader holds the base"
        assert {path: bytes(reader.read(path)) for path in reader.entries} == before
    prune_all(three, 1)
    assert files_of(three, 30) == FULL
    assert left(three) == [30]
    assert content(three, 30) == before


def test_a_reader_that_has_not_come_to_the_base_yet_still_finds_it(three: RunDir) -> None:
    """It has opened the increment; before it opens the base, the increment is rolled up and the run pruned."""
    held = open_held(three.checkpoint(name(30)))
    rolled(three, 30)
    done = prune_all(three, 1)
    assert done.spared == {name(10): "being read or written against"}
    let_go(held)
    prune_all(three, 1)
    assert left(three) == [30]


def test_one_that_is_read_by_its_old_manifest_is_not_deleted(three: RunDir) -> None:
    with open_checkpoint(three.checkpoint(name(20))):
        rolled(three, 20)
        done = prune_all(three, 1)
        assert done.spared[name(20)] == "being read or written against"
    prune_all(three, 1)
    assert left(three) == [10, 30]


@pytest.mark.parametrize(("step", "leaf"), [(30, "fresh"), (10, "master"), (10, "frozen")])
def test_damage_in_it_or_its_base_is_refused_and_nothing_is_left(three: RunDir, step: int, leaf: str) -> None:
    folder = three.checkpoint(name(step))
    with open_checkpoint(folder) as reader:
        offset = reader.entries[leaf].blobs[0].offset
    data = bytearray((folder / rank_pack(0)).read_bytes())
    data[offset] ^= 1
    (folder / rank_pack(0)).write_bytes(data)
    before = files_of(three, 30)
    with pytest.raises(CheckpointDamaged, match=leaf):
        rolled(three, 30)
    assert files_of(three, 30) == before
    assert manifests.read(three.checkpoint(name(30))).base_name == name(10)


def test_what_does_not_read_back_as_the_same_state_never_takes_its_place(
    three: RunDir, monkeypatch: pytest.MonkeyPatch
) -> None:
    before, real = files_of(three, 30), rollup.encode_blob
    monkeypatch.setattr(rollup, "encode_blob", lambda raw, dtype, how: real(memoryview(bytes(len(raw))), dtype, how))
    with pytest.raises(CheckpointDamaged, match="does not match its digest"):
        rolled(three, 30)
    assert files_of(three, 30) == before
    assert manifests.read(three.checkpoint(name(30))).base_name == name(10)


def test_without_room_it_stays_an_increment(three: RunDir, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(rollup, "shortage", lambda run, raw: f"{run.root}: too little")
    with pytest.raises(DiskFull, match="stays an increment"):
        rolled(three, 30)
    assert rank_pack(0, rolled_up=True) not in files_of(three, 30)


def test_several_ranks_are_rolled_up_together(run: RunDir) -> None:
    launch(run, 1)
    write(run, state(10), state(11))
    write(run, state(20), state(21), base=name(10))
    with open_checkpoint(run.checkpoint(name(20))) as reader:
        before = [{path: bytes(reader.read(path, rank)) for path in reader.rank_entries(rank)} for rank in (0, 1)]
    found = rolled(run, 20)
    assert [record.name for record in found.files] == [
        file(rank, rolled_up=True) for rank in (0, 1) for file in (rank_pack, rank_index)
    ]
    with open_checkpoint(run.checkpoint(name(20))) as reader:
        assert [{path: bytes(reader.read(path, rank)) for path in reader.rank_entries(rank)} for rank in (0, 1)] == before


def test_killed_before_each_disk_call_it_restores_to_its_digest_and_the_next_one_finishes(
    three: RunDir, tmp_path: Path, order_upkeep: Order
) -> None:
    before = content(three, 30)
    shutil.copytree(three.root, tmp_path / "pristine")
    fulls = []
    for number in range(1, 100):
        status = order_upkeep(three, f"prune:kill:{number}", act="rollup")
        assert content(three, 30) == before
        assert verify_folder(three.checkpoint(name(30))) == []
        fulls.append(manifests.read(three.checkpoint(name(30))).base is None)
        if number % 2:
            prune_all(three, 1, idle=True)  # whatever lies there is swept, or is rolled up over
            assert content(three, 30) == before
            assert used(three) == needed(three)
        assert order_upkeep(three, act="rollup") == 0
        prune_all(three, 1)
        assert files_of(three, 30) == FULL
        assert content(three, 30) == before
        assert left(three) == [30]
        assert used(three) == needed(three)
        if status == 0:
            break
        assert status == -9
        shutil.rmtree(three.root)
        shutil.copytree(tmp_path / "pristine", three.root)
    assert 15 < number < 99
    assert fulls == sorted(fulls), "an increment up to one call, a full from there on"
    assert not fulls[0]


@pytest.fixture
def plan_failure() -> Iterator[Callable[[str], None]]:
    def arm(text: str) -> None:
        files.plan_failure(text)
        files.set_role("prune")

    yield arm
    files.plan_failure("")


@pytest.mark.parametrize("code", ["ENOSPC", "EIO"])
def test_each_disk_call_that_fails_leaves_it_whole(three: RunDir, plan_failure: Callable[[str], None], code: str) -> None:
    before, names = content(three, 30), files_of(three, 30)
    for number in range(1, 100):
        plan_failure(f"prune:{code}:{number}")
        with contextlib.suppress(OSError):
            rolled(three, 30)
        plan_failure("")
        assert content(three, 30) == before
        if manifests.read(three.checkpoint(name(30))).base is None:
            break
        assert (
            files_of(three, 30) - {REPLACED_MANIFEST} - {rank_pack(0, rolled_up=True), rank_index(0, rolled_up=True)} == names
        )
    assert 8 < number < 99
    rolled(three, 30)
    assert files_of(three, 30) == FULL


def test_the_catalog_lists_what_a_killed_one_left(three: RunDir, order_upkeep: Order) -> None:
    assert order_upkeep(three, "prune:kill:9", act="rollup") == -9
    assert [path.name for path in leftovers(three) if path.parent == three.checkpoint(name(30))]
    assert [one.name.step for one in list_checkpoints(three)] == [10, 20, 30]
