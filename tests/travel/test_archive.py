"""Tiers are filled with what their settings choose, wherever a checkpoint is read from; a plan is shown first and then done."""

from pathlib import Path
from typing import Any

import pytest

from perdure.training import events, files
from perdure.training.checkpoint import facts, lineage, pins
from perdure.training.checkpoint.upkeep import try_lock
from perdure.training.errors import ObjectNotFound, RunBusy, StoreConflict
from perdure.training.retention_settings import RetentionSection
from perdure.training.run_dir import CheckpointName, RunDir
from perdure.training.storage.folder import FolderStore
from perdure.training.tier_settings import StoreSection, TierSection
from perdure.training.travel import archive, prune, sweep
from perdure.training.travel.archive import Done
from perdure.training.travel.contents import contents
from perdure.training.travel.places import Remote, Tier
from perdure.training.travel.pull import pull
from perdure.training.travel.push import push

MadeRun = Any


def name(step: int, token: int = 1) -> CheckpointName:
    return CheckpointName(step, token)


def tier(folder: Path, word: str = "share", **settings: Any) -> Tier:
    return Tier(word=word, store=FolderStore(folder / word), section=TierSection(url=f"file://{folder / word}", **settings))


def the_store(folder: Path) -> Remote:
    return Remote(word="store", store=FolderStore(folder / "store"), section=StoreSection(url=f"file://{folder / 'store'}"))


def fill(made: MadeRun, *remotes: Remote) -> Done:
    return archive.execute(made.dir, remotes, archive.survey(made.dir, remotes))


def held(remote: Remote) -> list[int]:
    return [one.step for one in contents(remote.store).checkpoints]


def test_each_tier_gets_what_its_settings_choose_and_the_facts_say_so(made: MadeRun, tmp_path: Path) -> None:
    for step in (100, 200, 300, 400):
        made.commit(step, 1, loss={"smoothed": {100: 4.0, 200: 1.0, 300: 2.0, 400: 3.0}[step]})
    made.dir.fact(name(400), "local").unlink()
    pins.pin(made.dir, "release", name(300))
    remotes = [
        tier(tmp_path, "every", every=200),
        tier(tmp_path, "named", milestones=True),
        tier(tmp_path, "best", best=1),
        tier(tmp_path, "all"),
    ]
    found = archive.survey(made.dir, remotes)
    assert [(step.name.step, step.tier) for step in found.steps] == [
        (100, "all"), (200, "all"), (200, "best"), (200, "every"), (300, "all"), (300, "named"),
    ]  # fmt: skip
    assert found.unproven == (name(400),)
    assert all(step.reasons and step.bytes > 3000 and step.source == "local" for step in found.steps)
    done = archive.execute(made.dir, remotes, found)
    assert done.copied == list(found.steps)
    assert [held(remote) for remote in remotes] == [[200], [300], [200], [100, 200, 300]]
    assert [facts.trust(made.dir, name(step)) for step in (200, 400)] == ["archived", "written"]
    assert facts.is_in(made.dir, name(200), "every")
    assert not facts.is_in(made.dir, name(100), "every")
    assert [event.kind for event in events.read(made.dir)] == ["archived"] * 6
    assert archive.survey(made.dir, remotes).steps == ()


def test_a_checkpoint_that_was_pruned_here_is_archived_from_the_store(made: MadeRun, tmp_path: Path, elsewhere: RunDir) -> None:
    store, share = the_store(tmp_path), tier(tmp_path, every=100)
    full = made.commit(100, 1)
    for step in (100, 200, 300):
        made.commit(step, 1) if step != 100 else None
        push(made.dir, store.store, name(step))
    for step in (100, 200):
        files.remove_tree(made.dir.checkpoint(name(step)))
    found = archive.survey(made.dir, [store, share])
    assert [(step.name.step, step.source) for step in found.steps] == [(100, "store"), (200, "store"), (300, "local")]
    archive.execute(made.dir, [store, share], found)
    assert held(share) == [100, 200, 300]
    assert not made.dir.spool.exists()
    assert lineage.committed(made.dir) == [name(300)], "nothing came back here"
    assert pull(share.store, elsewhere, name=full, place="share") == full
    assert facts.is_in(elsewhere, full, "share")


def test_an_increment_brings_its_base_and_is_whole_in_the_tier(made: MadeRun, tmp_path: Path, elsewhere: RunDir) -> None:
    from snapshots import Source, random_bytes

    data = random_bytes(1, 200_000)
    made.write(name(100), Source(100).tensor("w", "uint8", (200_000,), data))
    made.write(name(200), Source(200).tensor("w", "uint8", (200_000,), data[:-9] + b"123456789"), base=name(100))
    share = tier(tmp_path, every=200)
    found = archive.survey(made.dir, [share])
    assert [(step.name.step, step.reasons) for step in found.steps] == [
        (100, (f"base of {name(200)}",)), (200, ("step is a multiple of 200",)),
    ]  # fmt: skip
    fill(made, share)
    assert pull(share.store, elsewhere) == name(200)
    assert sorted(lineage.committed(elsewhere)) == [name(100), name(200)]


def test_a_tier_that_is_away_stops_none_of_the_others_and_is_filled_later(made: MadeRun, tmp_path: Path) -> None:
    made.commit(100, 1)
    share, far = tier(tmp_path), tier(tmp_path, "far")
    (tmp_path / "far").write_text("no folder")
    done = fill(made, far, share)
    assert list(done.problems) == ["far"]
    assert held(share) == [100]
    (tmp_path / "far").unlink()
    assert fill(made, far, share).copied[0].tier == "far"


def test_a_copy_found_damaged_is_made_again_and_one_made_elsewhere_is_adopted(made: MadeRun, tmp_path: Path) -> None:
    share = tier(tmp_path)
    made.commit(100, 1)
    fill(made, share)
    made.dir.fact(name(100), "share").unlink()
    fill(made, share)
    assert facts.trust(made.dir, name(100)) == "archived"
    fact = facts.read_fact(made.dir, name(100), "share")
    assert fact is not None
    facts.write_fact(made.dir, name(100), facts.Fact(copy="share", checked_at=1.0, result="damaged", damage=("rot",)))
    pack = tmp_path / "share/checkpoints" / str(name(100)) / "rank-00000.pack"
    pack.write_bytes(b"rot" + pack.read_bytes()[3:])
    assert [step.name.step for step in fill(made, share).copied] == [100]
    assert facts.is_in(made.dir, name(100), "share")


def test_a_zombies_checkpoint_and_another_runs_tier_get_nothing(made: MadeRun, make_run: Any, tmp_path: Path) -> None:
    share = tier(tmp_path)
    made.commit(100, 1)
    made.commit(200, 1)
    made.launch(2, resumed_from=name(100))
    fill(made, share)
    assert held(share) == [100]
    other = make_run("other", "other-1")
    other.launch(1)
    other.commit(100, 1)
    with pytest.raises(StoreConflict, match="holds run gpt-1234"):
        fill(other, share)


def test_one_archive_at_a_time_and_what_a_killed_one_left_is_cleared(made: MadeRun, tmp_path: Path) -> None:
    share = tier(tmp_path)
    made.commit(100, 1)
    files.make_dirs(made.dir.spool / "checkpoints")
    with try_lock(made.dir.archive_lock), pytest.raises(RunBusy):
        fill(made, share)
    assert made.dir.spool.exists()
    fill(made, share)
    assert not made.dir.spool.exists()


def test_a_checkpoint_damaged_here_is_not_archived_and_comes_from_the_store_next_time(made: MadeRun, tmp_path: Path) -> None:
    store, share = the_store(tmp_path), tier(tmp_path)
    made.commit(100, 1)
    push(made.dir, store.store, name(100))
    pack = made.dir.checkpoint(name(100)) / "rank-00000.pack"
    pack.write_bytes(b"rot" + pack.read_bytes()[3:])
    assert list(fill(made, store, share).skipped) != []
    with pytest.raises(ObjectNotFound):
        share.store.get(RunDir.checkpoint_key(name(100), "manifest.json"), limit=10**6)
    facts.write_fact(made.dir, name(100), facts.Fact(copy="local", checked_at=1.0, result="damaged", damage=("rot",)))
    assert [step.source for step in fill(made, store, share).copied] == ["store"]


def test_what_a_tiers_retention_let_go_is_not_copied_again_from_anywhere(made: MadeRun, tmp_path: Path) -> None:
    store, share = the_store(tmp_path), tier(tmp_path, retention=RetentionSection(keep_last=2))
    for step in (100, 200, 300):
        made.commit(step, 1)
        push(made.dir, store.store, name(step))
    assert [step.name.step for step in archive.survey(made.dir, [store, share]).steps] == [200, 300]
    fill(made, store, share)
    made.commit(400, 1)
    files.remove_tree(made.dir.checkpoint(name(200)))  # it is in the store and in the tier
    assert [step.name.step for step in fill(made, store, share).copied] == [400]
    done = sweep.execute(made.dir, share.store, "share", prune.survey(made.dir, share.store, "share", share.section.retention))
    assert [one.name.step for one in done.removed] == [200]
    assert archive.survey(made.dir, [store, share]).steps == ()
    assert held(share) == [300, 400]
    pins.pin(made.dir, "release", name(100))
    assert [step.name.step for step in archive.survey(made.dir, [store, share]).steps] == [100]
