"""Trust is derived from facts in one place: what each combination of copies is called, and what counts as a copy."""

from pathlib import Path

import pytest

from perdure.training import files
from perdure.training.checkpoint import facts
from perdure.training.checkpoint.facts import Fact
from perdure.training.run_dir import CheckpointName, RunDir

NAME = CheckpointName(10, 1)


@pytest.mark.parametrize(
    ("said", "word", "places"),
    [
        ({}, "written", ()),
        ({"local": "good"}, "verified", ("local",)),
        ({"store": "good"}, "replicated", ("store",)),
        ({"local": "good", "store": "damaged"}, "verified", ("local",)),
        ({"local": "good", "share": "good"}, "archived", ("local", "share")),
        ({"local": "good", "store": "good", "share": "good", "cold": "damaged"}, "archived", ("local", "share", "store")),
        ({"local": "good", "store": "good", "share": "damaged"}, "replicated", ("local", "store")),
        ({"share": "good"}, "written", ("share",)),
        ({"local": "damaged", "store": "good", "share": "good"}, "quarantined", ("share", "store")),
    ],
)
def test_trust_follows_from_the_facts_beside_each_copy(
    said: dict[str, str], word: str, places: tuple[str, ...], tmp_path: Path
) -> None:
    run = RunDir(tmp_path)
    files.make_dirs(run.checkpoint(NAME))
    for place, result in said.items():
        facts.write_fact(run, NAME, Fact(copy=place, checked_at=1.0, result=result))
    (run.checkpoint(NAME) / "check-..x.json").write_text("{}")
    known = facts.read_facts(run, NAME, [path.name for path in run.checkpoint(NAME).iterdir()])
    assert (facts.trust(run, NAME), facts.places_of(known)) == (word, places)
    assert [facts.is_in(run, NAME, place) for place in said] == [result == "good" for result in said.values()]


def test_checkpoint_that_is_gone_is_only_written(tmp_path: Path) -> None:
    assert facts.trust(RunDir(tmp_path), NAME) == "written"
