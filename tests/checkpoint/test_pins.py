"""Milestones stay, whatever retention says and whenever they are pinned; their bases go only after a roll-up."""

import shutil
import threading
from collections.abc import Callable
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from snapshots import Source, random_bytes, write
from upkeep_runs import keep, launch, left, name, needed, prune_all, save, used

from perdure.training.checkpoint import facts, prune, retention
from perdure.training.checkpoint import manifest as manifests
from perdure.training.checkpoint.catalog import Listed, list_checkpoints
from perdure.training.checkpoint.hold import hold, try_hold_alone
from perdure.training.checkpoint.pins import Pins, pin, read_pins, unpin
from perdure.training.checkpoint.prune import Done
from perdure.training.checkpoint.reader import open_checkpoint
from perdure.training.checkpoint.rollup import roll_up
from perdure.training.checkpoint.upkeep import upkeep
from perdure.training.checkpoint.verify import check, verify_folder
from perdure.training.errors import CheckpointDamaged, CheckpointNotFound, ConfigError
from perdure.training.run_dir import MANIFEST, CheckpointName, RunDir

Order = Callable[..., int]


@pytest.fixture
def three(run: RunDir) -> RunDir:
    launch(run, 1)
    for step in (10, 20, 30):
        save(run, step)
    return run


def all_pins(run: RunDir) -> Pins:
    return read_pins(run, list_checkpoints(run))


def increment(run: RunDir, step: int, base: int) -> None:
    source = Source(step).tensor("frozen", "uint8", (6000,), random_bytes("f", 6000))
    assert write(run, source.tensor("fresh", "uint8", (700,), random_bytes(step, 700)), base=name(base)).base is not None
    assert check(run, name(step)).result == "good"


def full(run: RunDir, step: int) -> None:
    source = Source(step).tensor("frozen", "uint8", (6000,), random_bytes("f", 6000))
    write(run, source.tensor("fresh", "uint8", (700,), random_bytes(step, 700)))
    assert check(run, name(step)).result == "good"


@pytest.fixture
def chain(run: RunDir) -> RunDir:
    """Full 10 with increments 12, 14 and 16, the second of them a milestone; full 20, increment 22."""
    launch(run, 1)
    full(run, 10)
    for step in (12, 14, 16):
        increment(run, step, 10)
    full(run, 20)
    increment(run, 22, 20)
    pin(run, "best-eval", name(14))
    return run


def prune_rolling(run: RunDir, keep_last: int = 1) -> tuple[prune.Survey, Done]:
    with upkeep(run):
        found = prune.survey(run, keep(keep_last), stored=False, is_idle=lambda: True, may_roll_up=True)
        return found, prune.execute(run, found, roll_up=roll_up)


def test_a_milestone_stays_until_its_name_is_taken_away(three: RunDir) -> None:
    assert pin(three, "before-lr-drop", name(10))
    assert not pin(three, "before-lr-drop", name(10)), "again is no error"
    pin(three, "a", name(10))
    prune_all(three, 1)
    assert left(three) == [10, 30]
    assert all_pins(three) == Pins(names={name(10): ("a", "before-lr-drop")})
    unpin(three, "a")
    prune_all(three, 1)
    assert left(three) == [10, 30]
    unpin(three, "before-lr-drop")
    prune_all(three, 1)
    assert left(three) == [30]
    assert all_pins(three) == Pins()


def test_the_reason_names_the_milestone(three: RunDir) -> None:
    pin(three, "z", name(10))
    pin(three, "a", name(10))
    found = prune.survey(three, keep(1), stored=False, is_idle=lambda: True)
    assert found.plan.verdicts[0].reasons == ("milestone a, z",)


def test_a_milestone_outside_the_history_stays_too(three: RunDir) -> None:
    pin(three, "other-way", name(30))
    launch(three, 2, name(10))
    save(three, 15, 2)
    prune_all(three, 1)
    assert left(three) == [15, 30]


def test_a_name_is_taken_once(three: RunDir) -> None:
    pin(three, "best", name(10))
    with pytest.raises(ConfigError, match=f"best is pinned to {name(10)} already"):
        pin(three, "best", name(20))
    assert all_pins(three).names == {name(10): ("best",)}


@pytest.mark.parametrize("label", ["", ".", "..", "../x", "a/b", "-a", "a b", "a\n", "x" * 101, ".a.tmp", "\u00e9"])
def test_a_name_that_is_no_plain_name_is_refused(three: RunDir, label: str) -> None:
    with pytest.raises(ConfigError, match="is not a plain name"):
        pin(three, label, name(10))
    with pytest.raises(ConfigError, match="is not a plain name"):
        unpin(three, label)
    assert not three.pins.exists()


def test_what_is_not_there_is_neither_pinned_nor_unpinned(three: RunDir) -> None:
    with pytest.raises(CheckpointNotFound):
        pin(three, "x", name(99))
    pin(three, "y", name(10))
    with pytest.raises(CheckpointNotFound, match="no milestone x"):
        unpin(three, "x")
    assert all_pins(three).names == {name(10): ("y",)}


def test_while_a_pin_cannot_be_read_nothing_goes_and_every_reason_says_so(three: RunDir) -> None:
    pin(three, "rotten", name(10))
    found = prune.survey(three, keep(1), stored=False, is_idle=lambda: True)
    three.pin("rotten").write_bytes(b"{")
    plan = prune.survey(three, keep(1), stored=False, is_idle=lambda: True).plan
    assert plan.remove == ()
    assert all(one.reasons[-1] == f"{three.pin('rotten')} cannot be read: which checkpoint it pins is not known"
               for one in plan.verdicts)  # fmt: skip
    with upkeep(three):
        assert set(prune.execute(three, found).spared) == {name(20)}, "an older plan finds it too"
    assert left(three) == [10, 20, 30]
    unpin(three, "rotten")
    prune_all(three, 1)
    assert left(three) == [30]


def test_other_files_in_the_folder_are_no_pins(three: RunDir) -> None:
    pin(three, "x", name(10))
    (three.pins / "notes.txt").write_text("mine")
    (three.pins / ".x.json.1.tmp").write_text("half")
    assert all_pins(three) == Pins(names={name(10): ("x",)})


def test_what_is_pinned_after_the_plan_was_made_is_spared(three: RunDir) -> None:
    found = prune.survey(three, keep(1), stored=False, is_idle=lambda: True)
    pin(three, "late", name(10))
    with upkeep(three):
        assert prune.execute(three, found).spared == {name(10): "milestone late"}
    assert left(three) == [10, 30]


def test_a_pin_waits_for_the_deletion_under_way_and_then_says_that_it_is_gone(three: RunDir) -> None:
    """As prune does it: held alone, looked at once more, manifest removed."""
    said: list[str] = []

    def pin_it() -> None:
        try:
            pin(three, "late", name(10))
        except CheckpointNotFound as error:
            said.append(str(error))

    thread = threading.Thread(target=pin_it)
    with try_hold_alone(three.checkpoint(name(10))) as alone:
        assert alone
        thread.start()
        (three.checkpoint(name(10)) / MANIFEST).unlink()
    thread.join()
    assert len(said) == 1
    assert all_pins(three) == Pins()


# rolling up


def test_a_milestone_is_rolled_up_and_then_its_base_goes(chain: RunDir) -> None:
    digest = manifests.read(chain.checkpoint(name(14))).state_digest
    found, done = prune_rolling(chain)
    told = {one.name.step: one for one in found.plan.verdicts}
    assert told[14].reasons == ("milestone best-eval", f"rolled up first, then its base {name(10)} can go")
    assert [one.name.step for one in found.plan.roll_ups] == [14]
    assert [one.name.step for one in found.plan.remove] == [12, 16, 10]
    assert [one.name.step for one in done.rolled_up] == [14]
    assert done.spared == {}
    assert left(chain) == [14, 20, 22]
    with open_checkpoint(chain.checkpoint(name(14))) as reader:
        assert (reader.manifest.base, reader.manifest.state_digest) == (None, digest)
    assert verify_folder(chain.checkpoint(name(14))) == []
    assert used(chain) == needed(chain)
    assert prune_rolling(chain)[0].empty


def test_without_a_way_to_roll_up_the_base_stays(chain: RunDir) -> None:
    prune_all(chain, 1)
    assert left(chain) == [10, 14, 20, 22]


@pytest.mark.parametrize("why", ["another needs it", "it is a milestone", "the milestone is damaged", "it is the newest full"])
def test_a_base_that_stays_anyway_is_no_reason_to_roll_up(chain: RunDir, why: str) -> None:
    if why == "another needs it":
        pin(chain, "second", name(16))
    elif why == "it is a milestone":
        pin(chain, "base", name(10))
    elif why == "the milestone is damaged":
        fact = facts.read_fact(chain, name(14), "local")
        assert fact is not None
        facts.write_fact(chain, name(14), facts.Fact(copy="local", checked_at=fact.checked_at, result="damaged"))
    else:
        for step in (22, 20):
            shutil.rmtree(chain.checkpoint(name(step)))
        increment(chain, 24, 10)
        (chain.checkpoint(name(24)) / MANIFEST).unlink()
    found, _ = prune_rolling(chain)
    assert found.plan.roll_ups == ()
    assert {10, 14} <= set(left(chain))


def test_a_milestone_that_cannot_be_rolled_up_keeps_its_base(chain: RunDir) -> None:
    with upkeep(chain):
        found = prune.survey(chain, keep(1), stored=False, is_idle=lambda: True, may_roll_up=True)

        def fails(run: RunDir, one: CheckpointName) -> None:
            raise CheckpointDamaged(f"{one}: rotten", part="pack")

        done = prune.execute(chain, found, roll_up=fails)
    assert done.spared == {name(14): f"not rolled up: {name(14)}: rotten", name(10): f"base of {name(14)}"}
    assert left(chain) == [10, 14, 20, 22]


def test_who_reads_the_milestone_as_an_increment_keeps_the_base_for_now(chain: RunDir) -> None:
    with open_checkpoint(chain.checkpoint(name(14))) as reader:
        _, done = prune_rolling(chain)
        assert done.spared == {name(10): "being read or written against"}
        assert bytes(reader.read("frozen")) == random_bytes("f", 6000)
    _, done = prune_rolling(chain)
    assert [one.name.step for one in done.removed] == [10]
    assert left(chain) == [14, 20, 22]


def test_killed_at_any_call_the_milestone_is_whole_and_the_next_prune_ends_the_work(
    chain: RunDir, tmp_path: Path, order_upkeep: Order
) -> None:
    digest = manifests.read(chain.checkpoint(name(14))).state_digest
    shutil.copytree(chain.root, tmp_path / "pristine")
    for number in range(1, 300):
        status = order_upkeep(chain, f"prune:kill:{number}", act="prune_rolling")
        assert verify_folder(chain.checkpoint(name(14))) == []
        assert manifests.read(chain.checkpoint(name(14))).state_digest == digest
        assert all_pins(chain).names == {name(14): ("best-eval",)}
        assert order_upkeep(chain, act="prune_rolling") == 0
        assert left(chain) == [14, 20, 22]
        assert used(chain) == needed(chain)
        if status == 0:
            break
        assert status == -9
        shutil.rmtree(chain.root)
        shutil.copytree(tmp_path / "pristine", chain.root)
    assert 30 < number < 299


def test_a_pin_that_was_killed_is_there_or_not_and_can_be_set_again(three: RunDir, order_upkeep: Order) -> None:
    for number in range(1, 50):
        status = order_upkeep(three, f"prune:kill:{number}", act="pin")
        assert all_pins(three).problem == ""
        pin(three, "late", name(30))
        assert all_pins(three).names == {name(30): ("late",)}
        if status == 0:
            break
        assert order_upkeep(three, f"prune:kill:{1 + number % 2}", act="unpin") in (0, -9)
        if all_pins(three).names:
            unpin(three, "late")
    assert 2 < number < 49
    prune_all(three, 3)
    assert [path.name for path in three.pins.iterdir()] == ["late.json"], "no temporary file stays"


# laws


@st.composite
def histories(draw: st.DrawFn) -> tuple[list[Listed], Pins]:
    rows: list[Listed] = []
    pinned: dict[CheckpointName, tuple[str, ...]] = {}
    for step in range(1, draw(st.integers(1, 20))):
        fulls = [row.name for row in rows if row.base is None]
        base = draw(st.sampled_from([None, *fulls]))
        trust = draw(st.sampled_from(["written", "verified", "verified", "replicated", "quarantined"]))
        rows.append(Listed(name=name(step), in_lineage=draw(st.integers(0, 9)) < 9, trust=trust, manifest=None, problem="",
                           bytes_on_disk=1, base=base))  # fmt: skip
        if draw(st.integers(0, 3)) == 0:
            pinned[name(step)] = ("m",)
    return rows, Pins(names=pinned)


@settings(max_examples=200, deadline=None)
@given(histories(), st.integers(0, 4), st.booleans(), st.booleans())
def test_milestones_and_every_base_they_need_stay(
    made: tuple[list[Listed], Pins], keep_last: int, stored: bool, rolling: bool
) -> None:
    rows, pins = made
    plan = retention.plan(rows, keep(keep_last), stored, pins=pins, roll_up=rolling)
    stays, rolled = {one.name for one in plan.keep}, {one.name for one in plan.roll_ups}
    assert set(pins.names) <= stays
    assert rolled <= set(pins.names)
    assert rolling or not rolled
    for one in plan.keep:
        assert one.base is None or one.base in stays or one.name in rolled
    for one in plan.roll_ups:
        assert one.base is not None
        assert one.base not in stays
        assert [other.name for other in plan.keep if other.base == one.base] == [one.name]
    after = [Listed(**{**vars(row), "base": None if row.name in rolled else row.base}) for row in rows if row.name in stays]
    again = retention.plan(after, keep(keep_last), stored, pins=pins, roll_up=rolling)
    assert (again.remove, again.roll_ups) == ((), ())


def test_pinning_holds_the_checkpoint_only_while_it_writes(three: RunDir) -> None:
    pin(three, "x", name(10))
    with try_hold_alone(three.checkpoint(name(10))) as alone:
        assert alone
    with hold(three.checkpoint(name(10))):
        assert pin(three, "y", name(10)), "others may read meanwhile"
