"""Prune does what its plan says, to the byte; spares what is in use; and killed anywhere, the next one finishes its work."""

import os
import shutil
import threading
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
from harness import wait_until
from snapshots import small_source, write
from upkeep_runs import keep, launch, left, name, needed, prune_all, save, used

from perdure.training import events, files
from perdure.training.checkpoint import catalog, facts, prune
from perdure.training.checkpoint.facts import Fact
from perdure.training.checkpoint.hold import hold
from perdure.training.checkpoint.lineage import committed
from perdure.training.checkpoint.prune import Done
from perdure.training.checkpoint.upkeep import try_upkeep, upkeep
from perdure.training.checkpoint.verify import check, verify_folder
from perdure.training.errors import CheckpointNotFound, RunBusy
from perdure.training.run_dir import RunDir

Order = Callable[..., int]


@pytest.fixture
def four(run: RunDir) -> RunDir:
    """Launch 1 with four good fulls: steps 10, 20, 30, 40."""
    launch(run, 1)
    for step in (10, 20, 30, 40):
        save(run, step)
    return run


def test_what_the_plan_says_is_freed_to_the_byte_and_told(four: RunDir) -> None:
    before = used(four)
    found = prune.survey(four, keep(2), stored=False, is_idle=lambda: True)
    assert used(four) == before
    with upkeep(four):
        done = prune.execute(four, found)
    assert left(four) == [30, 40]
    assert before - used(four) == found.freed == done.freed > 0
    assert used(four) == needed(four)
    assert [event.data["step"] for event in events.read(four) if event.kind == "pruned"] == [10, 20]
    assert all(verify_folder(four.checkpoint(one)) == [] for one in committed(four))


def test_a_second_prune_finds_nothing_to_do(four: RunDir) -> None:
    prune_all(four, 2)
    before = used(four)
    found = prune.survey(four, keep(2), stored=False, is_idle=lambda: True)
    assert found.empty
    assert (prune_all(four, 2), used(four)) == (Done(), before)


def test_only_as_much_goes_as_is_asked_for(four: RunDir) -> None:
    found = prune.survey(four, keep(1), stored=False, is_idle=lambda: True)
    with upkeep(four):
        done = prune.execute(four, found, enough=lambda: left(four) == [20, 30, 40])
    assert [one.name.step for one in done.removed] == [10]
    assert left(four) == [20, 30, 40]


def test_what_somebody_reads_is_spared_and_goes_the_next_time(four: RunDir) -> None:
    with hold(four.checkpoint(name(20))):
        done = prune_all(four, 1)
        assert left(four) == [20, 40]
        assert done.spared == {name(20): "being read or written against"}
    prune_all(four, 1)
    assert left(four) == [40]


def test_nothing_goes_once_the_newest_good_one_is_found_damaged(four: RunDir) -> None:
    found = prune.survey(four, keep(1), stored=False, is_idle=lambda: True)
    facts.write_fact(four, name(40), Fact(copy="local", checked_at=time.time(), result="damaged"))
    with upkeep(four):
        done = prune.execute(four, found)
    assert left(four) == [10, 20, 30, 40]
    assert set(done.spared) == {name(10), name(20), name(30)}
    prune_all(four, 1)
    assert left(four) == [30, 40], "planned anew, the newest that counts is another"


def test_nothing_goes_once_the_base_of_the_newest_good_one_is_found_damaged(four: RunDir) -> None:
    assert write(four, small_source(50, 40), name=name(50), base=name(40)).base is not None
    assert check(four, name(50)).result == "good"
    found = prune.survey(four, keep(1), stored=False, is_idle=lambda: True)
    facts.write_fact(four, name(40), Fact(copy="local", checked_at=time.time(), result="damaged"))
    with upkeep(four):
        done = prune.execute(four, found)
    assert left(four) == [10, 20, 30, 40, 50]
    assert set(done.spared) == {name(10), name(20), name(30)}


def test_what_is_gone_already_is_no_error(four: RunDir) -> None:
    found = prune.survey(four, keep(1), stored=False, is_idle=lambda: True)
    shutil.rmtree(four.checkpoint(name(10)))
    with upkeep(four):
        done = prune.execute(four, found)
    assert done.spared == {name(10): "gone already"}
    assert left(four) == [40]


def test_two_at_once_are_one_after_the_other_and_the_second_is_told_whom_it_waits_for(four: RunDir) -> None:
    with upkeep(four):
        with pytest.raises(RunBusy, match=f"process {os.getpid()} deletes or rolls up"), upkeep(four):
            pass
        with try_upkeep(four) as ours:
            assert not ours
    prune_all(four, 1)
    assert left(four) == [40]


def test_killed_before_each_disk_call_the_next_prune_leaves_exactly_what_is_kept(
    four: RunDir, tmp_path: Path, order_upkeep: Order
) -> None:
    shutil.copytree(four.root, tmp_path / "pristine")
    for number in range(1, 200):
        status = order_upkeep(four, f"prune:kill:{number}")
        assert 40 in left(four)
        assert all(verify_folder(four.checkpoint(one)) == [] for one in committed(four))
        again = order_upkeep(four, f"prune:kill:{number}") if status else 0  # and killed once more, on what the first left
        assert again in (0, -9)
        assert order_upkeep(four) == 0
        assert left(four) == [40]
        assert used(four) == needed(four)
        assert {path.name for path in four.checkpoints.iterdir()} == {str(name(40))}
        if status == 0:
            break
        assert status == -9
        shutil.rmtree(four.root)
        shutil.copytree(tmp_path / "pristine", four.root)
    assert 20 < number < 199


def test_killed_anywhere_in_a_save_and_the_prune_after_it_a_verified_one_is_there(
    four: RunDir, tmp_path: Path, order_upkeep: Order
) -> None:
    """Case H1, keep one: the old one goes only when the new one is committed and proven."""
    shutil.copytree(four.root, tmp_path / "pristine")
    for number in range(1, 200):
        status = order_upkeep(four, f"prune:kill:{number}", act="save_then_prune")
        proven = [one for one in committed(four) if facts.trust(four, one) == "verified"]
        assert proven[-1] in (name(40), name(50))
        assert verify_folder(four.checkpoint(proven[-1])) == []
        if status == 0:
            break
        assert status == -9
        shutil.rmtree(four.root)
        shutil.copytree(tmp_path / "pristine", four.root)
    assert left(four) == [50]
    assert 20 < number < 199


def test_what_a_killed_prune_left_is_swept_even_while_the_run_trains(four: RunDir, order_upkeep: Order) -> None:
    assert order_upkeep(four, "prune:kill:3") == -9  # the manifest is gone, the packs are not
    half = four.checkpoint(name(10))
    assert half.is_dir()
    assert not four.manifest(name(10)).exists()
    prune_all(four, 1, idle=False)
    assert not half.exists()
    assert used(four) == needed(four)


def test_whoever_looks_for_the_newest_while_it_is_replaced_finds_one_and_never_an_older_one(four: RunDir) -> None:
    """Case P4: no pointer is to be kept true, manifests are all that is looked at."""
    seen: list[int] = []
    ended = threading.Event()

    def look() -> None:
        while not ended.is_set() or len(seen) < 100:
            newest = catalog.candidates(four)[0]
            try:
                assert catalog.manifest_of(four, newest).step == newest.step
            except CheckpointNotFound:
                assert catalog.candidates(four)[0] > newest, "pruned meanwhile, for a newer one is there"
            seen.append(newest.step)

    with ThreadPoolExecutor() as pool:
        looking = pool.submit(look)
        for step in range(50, 200, 10):
            save(four, step)
            prune_all(four, 1, idle=False)
            wait_until(lambda step=step: looking.done() or step in seen[-1:], f"a look at step {step}")
        ended.set()
        looking.result(60)
    assert seen == sorted(seen)
    assert set(seen) - {40} == set(range(50, 200, 10)), "while it was replaced"


# leftovers


def half_written(run: RunDir, step: int, token: int) -> Path:
    folder = run.checkpoint(name(step, token))
    folder.mkdir()
    (folder / ".rank-00000.pack.77-abcdef01.tmp").write_bytes(b"half")
    return folder


def judged(run: RunDir, *, idle: bool) -> dict[str, tuple[bool, str]]:
    found = prune.survey(run, keep(1), stored=False, is_idle=lambda: idle)
    return {str(one.path.relative_to(run.root)): (one.goes, one.reason) for one in found.leftovers}


def test_a_folder_that_a_live_writer_may_be_filling_stays(four: RunDir) -> None:
    half = half_written(four, 50, 1)
    key = f"checkpoints/{half.name}"
    assert judged(four, idle=False)[key] == (False, "perhaps still being written")
    prune_all(four, 1, idle=False)
    assert half.is_dir()
    assert judged(four, idle=True)[key] == (True, "never committed")
    prune_all(four, 1, idle=True)
    assert not half.exists()


def test_a_folder_of_a_launch_before_the_present_one_goes_while_it_trains(four: RunDir) -> None:
    old = half_written(four, 50, 1)
    before = time.time() - 100
    os.utime(old, (before, before))
    launch(four, 2, name(40))
    pulled = half_written(four, 35, 1)
    new = half_written(four, 60, 2)
    assert judged(four, idle=False) == {
        f"checkpoints/{old.name}": (True, "never committed by an older launch"),
        f"checkpoints/{pulled.name}": (False, "perhaps still being written"),
        f"checkpoints/{new.name}": (False, "perhaps still being written"),
    }


def test_idleness_is_asked_after_everything_was_listed(four: RunDir) -> None:
    """A run that starts between the two begins a launch of its own: its folders are not on the list."""

    def starts_now() -> bool:
        launch(four, 2, name(40))
        half_written(four, 50, 2)
        return True

    with upkeep(four):
        prune.execute(four, prune.survey(four, keep(1), stored=False, is_idle=starts_now))
    assert four.checkpoint(name(50, 2)).is_dir()


def test_a_checker_s_temporary_file_goes_when_it_is_old_or_the_run_idle(four: RunDir) -> None:
    torn = files.temporary_name(four.fact(name(40), "local"))
    torn.write_bytes(b"x")
    key = str(torn.relative_to(four.root))
    assert judged(four, idle=False)[key][0] is False
    assert judged(four, idle=True)[key][0] is True
    os.utime(torn, (0, 0))
    assert judged(four, idle=False)[key] == (True, "temporary file of a crash")


def test_what_is_not_ours_is_listed_and_left(four: RunDir) -> None:
    (four.checkpoints / "notes").mkdir()
    (four.checkpoints / "notes" / "a.txt").write_text("mine")
    (four.checkpoints / "todo.txt").write_text("mine")
    assert judged(four, idle=True) == {
        "checkpoints/notes": (False, "not Perdure's"),
        "checkpoints/todo.txt": (False, "not Perdure's"),
    }
    prune_all(four, 1)
    assert (four.checkpoints / "notes" / "a.txt").exists()


def test_a_zombie_s_checkpoint_goes_and_one_of_a_launch_nobody_can_read_does_not(four: RunDir) -> None:
    launch(four, 2, name(20))
    save(four, 30, 2)
    done = prune_all(four, 5)
    assert [str(one.name) for one in done.removed] == [str(name(30)), str(name(40))]
    assert committed(four) == [name(10), name(20), name(30, 2)]
    four.launch_record(2).write_bytes(b"rotten")
    assert prune_all(four, 5) == Done()
    assert committed(four) == [name(10), name(20), name(30, 2)]
