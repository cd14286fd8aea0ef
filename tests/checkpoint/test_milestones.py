"""The name that training code gives a checkpoint: in its manifest, of the present history only, taken away like any other."""

import msgspec
import pytest
from snapshots import Source, random_bytes, write
from upkeep_runs import keep, launch, left, name, prune_all

from perdure.training.checkpoint import manifest as manifests
from perdure.training.checkpoint.catalog import list_checkpoints
from perdure.training.checkpoint.pins import pin, read_pins, unpin
from perdure.training.checkpoint.rollup import roll_up
from perdure.training.checkpoint.upkeep import upkeep
from perdure.training.checkpoint.verify import check
from perdure.training.errors import CheckpointDamaged, CheckpointNotFound, ConfigError
from perdure.training.run_dir import CheckpointName, RunDir


def save(run: RunDir, step: int, token: int = 1, label: str = "", base: CheckpointName | None = None) -> None:
    source = Source(step, milestone=label or msgspec.UNSET).tensor("frozen", "uint8", (6000,), random_bytes("f", 6000))
    write(run, source.tensor("fresh", "uint8", (70,), random_bytes((step, token), 70)), name=name(step, token), base=base)
    assert check(run, name(step, token)).result == "good"


def names(run: RunDir) -> dict[CheckpointName, tuple[str, ...]]:
    return dict(read_pins(run, list_checkpoints(run)).names)


@pytest.fixture
def three(run: RunDir) -> RunDir:
    """Step 20 is a milestone."""
    launch(run, 1)
    save(run, 10)
    save(run, 20, label="before-decay")
    save(run, 30)
    return run


def test_it_stays_until_its_name_is_taken_away(three: RunDir) -> None:
    assert names(three) == {name(20): ("before-decay",)}
    pin(three, "best", name(20))
    prune_all(three, 1)
    assert left(three) == [20, 30]
    assert names(three) == {name(20): ("before-decay", "best")}
    unpin(three, "best")
    unpin(three, "before-decay")
    with pytest.raises(CheckpointNotFound, match="no milestone before-decay"):
        unpin(three, "before-decay")
    prune_all(three, 1)
    assert left(three) == [30]


def test_without_a_name_the_manifest_says_nothing_of_it(three: RunDir) -> None:
    assert b"milestone" not in three.manifest(name(10)).read_bytes()
    assert b'"milestone":"before-decay"' in three.manifest(name(20)).read_bytes()


def test_a_step_that_is_trained_again_takes_its_name_along(three: RunDir) -> None:
    launch(three, 2, name(10))
    assert names(three) == {}
    save(three, 20, 2, label="before-decay")
    save(three, 40, 2)
    assert names(three) == {name(20, 2): ("before-decay",)}
    prune_all(three, 1)
    assert [str(one.name) for one in list_checkpoints(three)] == [str(name(20, 2)), str(name(40, 2))]


def test_a_name_that_was_taken_away_stays_away_until_it_is_given_again(three: RunDir) -> None:
    unpin(three, "before-decay")
    assert names(three) == {}
    launch(three, 2, name(10))
    save(three, 20, 2, label="before-decay")
    assert names(three) == {name(20, 2): ("before-decay",)}, "the step trained again has it"
    unpin(three, "before-decay")
    save(three, 50, 2, label="before-decay")
    assert names(three) == {name(50, 2): ("before-decay",)}, "a later step has it"
    unpin(three, "before-decay")
    assert pin(three, "before-decay", name(10))
    assert names(three) == {name(10): ("before-decay",)}, "by hand"


def test_a_name_given_twice_pins_both_and_a_person_cannot_take_it(three: RunDir) -> None:
    save(three, 40, label="before-decay")
    assert names(three) == {name(20): ("before-decay",), name(40): ("before-decay",)}
    with pytest.raises(ConfigError, match=f"before-decay is pinned to {name(40)} already"):
        pin(three, "before-decay", name(10))
    prune_all(three, 1)
    assert left(three) == [20, 40]
    unpin(three, "before-decay")
    assert names(three) == {}


def test_a_roll_up_keeps_the_name(three: RunDir) -> None:
    save(three, 40, label="export", base=name(20))
    with upkeep(three):
        roll_up(three, name(40))
    assert manifests.read(three.checkpoint(name(40))).base is None
    assert names(three)[name(40)] == ("export",)


@pytest.mark.parametrize("label", ["../x", "", "a b", "x" * 101, ".a.tmp"])
def test_a_manifest_with_a_name_that_is_none_is_refused(three: RunDir, label: str) -> None:
    found = manifests.read(three.checkpoint(name(20)))
    with pytest.raises(CheckpointDamaged, match="which is no milestone's name"):
        manifests.parse(manifests.seal(msgspec.structs.replace(found, milestone=label)), "here")


def test_the_plan_gives_the_name_as_the_reason(three: RunDir) -> None:
    from perdure.training.checkpoint import prune

    plan = prune.survey(three, keep(1), stored=False, is_idle=lambda: True).plan
    assert [one.reasons for one in plan.verdicts if one.name == name(20)] == [("milestone before-decay",)]
