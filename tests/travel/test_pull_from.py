"""A run comes back from whichever of its places has the newest good checkpoint, and the facts say which that was."""

from pathlib import Path
from typing import Any

import pytest
from snapshots import Source, random_bytes

from perdure.training import events
from perdure.training.checkpoint import facts, lineage
from perdure.training.errors import CheckpointDamaged, CheckpointNotFound, StoreConflict, StoreError
from perdure.training.run_dir import MANIFEST, CheckpointName, RunDir
from perdure.training.storage.folder import FolderStore
from perdure.training.travel.copies import Stored
from perdure.training.travel.pull import pull_from
from perdure.training.travel.push import push

MadeRun = Any


def name(step: int, token: int = 1) -> CheckpointName:
    return CheckpointName(step, token)


@pytest.fixture
def places(tmp_path: Path) -> list[Stored]:
    """In reading order."""
    return [Stored(FolderStore(tmp_path / word), word) for word in ("share", "store", "far")]


def fill(made: MadeRun, place: Stored, *names: CheckpointName) -> None:
    for one in names:
        push(made.dir, place.store, one, place=place.word)


def rot(tmp_path: Path, word: str, one: CheckpointName) -> None:
    pack = tmp_path / word / "checkpoints" / str(one) / "rank-00000.pack"
    pack.write_bytes(b"rot" + pack.read_bytes()[3:])


def notices(run: RunDir) -> list[str]:
    return [event.data["text"] for event in events.read(run) if event.kind == "notice"]


def test_the_newest_is_taken_wherever_it_is_and_the_first_place_that_has_it_is_named(
    made: MadeRun, elsewhere: RunDir, tmp_path: Path, places: list[Stored]
) -> None:
    share, store, far = places
    made.commit(100, 1)
    made.commit(200, 1)
    fill(made, far, name(100))
    fill(made, store, name(100), name(200))
    fill(made, share, name(100), name(200))
    assert pull_from(places, elsewhere) == (name(200), share)
    assert facts.is_in(elsewhere, name(200), "share")
    assert facts.read_fact(elsewhere, name(200), "store") is None, "nobody looked there"
    assert facts.trust(elsewhere, name(200)) == "written"
    assert pull_from([far], elsewhere, name=name(100)) == (name(100), far)
    rot(tmp_path, "share", name(200))
    again = RunDir(tmp_path / "again")
    assert pull_from(places, again) == (name(200), store)
    assert "using another copy" in notices(again)[0]
    rot(tmp_path, "store", name(200))
    last = RunDir(tmp_path / "last")
    assert pull_from(places, last) == (name(100), share)
    assert "using the one before it" in notices(last)[1]


def test_launches_of_all_places_make_the_history(made: MadeRun, elsewhere: RunDir, places: list[Stored]) -> None:
    """The tier was filled before the run was set back to step 100: its 200 is a leftover, and only the store knows."""
    share, store, _ = places
    made.commit(100, 1)
    made.commit(200, 1)
    fill(made, share, name(100), name(200))
    made.launch(2, resumed_from=name(100))
    made.commit(150, 2)
    fill(made, store, name(150, 2))
    assert pull_from(places, elsewhere) == (name(150, 2), store)
    assert sorted(lineage.read_launches(elsewhere)) == [1, 2]


def test_an_increment_comes_from_the_place_that_has_its_base(made: MadeRun, elsewhere: RunDir, places: list[Stored]) -> None:
    share, store, _ = places
    data = random_bytes(1, 50_000)
    made.write(name(100), Source(100).tensor("w", "uint8", (50_000,), data))
    made.write(name(200), Source(200).tensor("w", "uint8", (50_000,), data[:-3] + b"abc"), base=name(100))
    for place in (share, store):
        fill(made, place, name(200))
    share.store.delete([RunDir.checkpoint_key(name(100), MANIFEST)])
    assert pull_from(places, elsewhere).place == store
    assert facts.is_in(elsewhere, name(100), "store")


class Away(FolderStore):
    """Its server does not answer."""

    def get(self, key: str, *, limit: int) -> bytes:
        raise StoreError(f"{self.url}/{key}: no answer")


def test_a_tier_that_is_away_is_left_out_but_the_store_is_not(
    made: MadeRun, elsewhere: RunDir, tmp_path: Path, places: list[Stored]
) -> None:
    _, store, far = places
    share = Stored(Away(tmp_path / "share"), "share")
    made.commit(100, 1)
    with pytest.raises(CheckpointNotFound, match=r"store, .*far holds no run"):
        pull_from([store, far], elsewhere)
    with pytest.raises(StoreError, match="no answer"):
        pull_from([share, store], elsewhere)
    fill(made, far, name(100))
    assert pull_from([share, store, far], elsewhere) == (name(100), far)
    assert any("the tier share is left out" in text for text in notices(elsewhere))
    with pytest.raises(StoreError, match="no answer"):
        pull_from([Stored(Away(tmp_path / "store"), "store"), far], RunDir(tmp_path / "new"))


def test_places_that_hold_other_runs_or_other_machines_launches_are_not_mixed(
    made: MadeRun, make_run: Any, elsewhere: RunDir, tmp_path: Path, places: list[Stored]
) -> None:
    share, store, far = places
    made.commit(100, 1)
    fill(made, store, name(100))
    twin = make_run("twin", made.id)
    twin.launch(1)
    record = lineage.read_launches(twin.dir)[1]
    twin.dir.launch_record(1).unlink()
    assert lineage.create_launch(twin.dir, type(record)(**{**vars_of(record), "owner": "another machine"}))
    twin.commit(300, 1)
    fill(twin, share, name(300))
    assert pull_from([share, store], elsewhere) == (name(100), store), "what the store says counts"
    assert any("another machine's launches" in text for text in notices(elsewhere))
    other = make_run("other", "other-1")
    other.launch(1)
    other.commit(100, 1)
    fill(other, far, name(100))
    with pytest.raises(StoreConflict, match="holds run other-1, not this run gpt-1234"):
        pull_from([store, far], RunDir(tmp_path / "new"))
    with pytest.raises(StoreConflict, match="whose name is 'gpt', not 'mine'"):
        pull_from([store], RunDir(tmp_path / "new"), called="mine")
    rot(tmp_path, "store", name(100))
    with pytest.raises(CheckpointDamaged, match="no checkpoint is good"):
        pull_from([store], RunDir(tmp_path / "new"))


def vars_of(record: Any) -> dict[str, Any]:
    return {field: getattr(record, field) for field in record.__struct_fields__}
