"""Rot in one copy is repaired from the other, in both stores; what no copy can repair is quarantined and said once."""

import shutil
import time
from pathlib import Path
from typing import Any

import pytest
from snapshots import Source, random_bytes

from perdure.training import events
from perdure.training.checkpoint import facts
from perdure.training.checkpoint.facts import Fact
from perdure.training.checkpoint.upkeep import upkeep
from perdure.training.checkpoint.verify import verify_in_run
from perdure.training.errors import ConfigError, StoreError
from perdure.training.run_dir import MANIFEST, CheckpointName, RunDir, rank_index, rank_pack
from perdure.training.storage.folder import FolderStore
from perdure.training.storage.store import ObjectStore
from perdure.training.travel.copies import Local, Stored, check
from perdure.training.travel.push import push
from perdure.training.travel.scrub import Done, scrub
from perdure.training.travel.scrub_plan import Copy, choose, parse_budget, survey

FILES = (rank_pack(0), rank_index(0), MANIFEST)


@pytest.fixture
def name(made: Any, store: ObjectStore) -> CheckpointName:
    """A checkpoint of step 100, here and in the store."""
    found: CheckpointName = made.commit(100, 1)
    push(made.dir, store, found)
    return found


def at(store: ObjectStore | None) -> list[Stored]:
    return [Stored(store)] if store is not None else []


def copies_of(made: Any, *places: Stored) -> list[Copy]:
    return list(survey(made.dir, places).copies)


def scrubbed(made: Any, store: ObjectStore | None, *tiers: Stored) -> Done:
    places = [*at(store), *tiers]
    copies = copies_of(made, *places)
    return scrub(made.dir, places, copies, choose(copies, 1 << 40))


def outcomes(done: Done) -> dict[str, str]:
    return {one.copy.place: one.outcome for one in done.found}


def rot_here(made: Any, name: CheckpointName, file: str, at: int = 50) -> None:
    path = made.dir.checkpoint(name) / file
    data = bytearray(path.read_bytes())
    data[at] ^= 1
    path.write_bytes(data)


def rot_there(store: ObjectStore, name: CheckpointName, file: str, at: int = 50) -> None:
    key = RunDir.checkpoint_key(name, file)
    data = bytearray(store.get(key, limit=1 << 24))
    data[at] ^= 1
    store.put(key, bytes(data))


def is_good_here(made: Any, name: CheckpointName) -> bool:
    return not verify_in_run(made.dir, name)


def is_good_there(made: Any, store: ObjectStore, name: CheckpointName) -> bool:
    return check(Stored(store), None, name, made.id).good


def kinds(made: Any) -> list[str]:
    return [event.kind for event in events.read(made.dir)]


@pytest.mark.parametrize("file", FILES)
def test_a_rotten_copy_here_is_repaired_from_the_store(made: Any, store: ObjectStore, name: CheckpointName, file: str) -> None:
    rot_here(made, name, file)
    assert outcomes(scrubbed(made, store)) == {"local": "repaired", "store": "good"}
    assert is_good_here(made, name)
    assert facts.trust(made.dir, name) == "replicated"
    assert kinds(made).count("repaired") == 1
    assert not [path for path in made.dir.checkpoint(name).iterdir() if path.name.startswith(".")]


@pytest.mark.parametrize("file", FILES)
def test_a_rotten_copy_in_the_store_is_repaired_from_here(
    made: Any, store: ObjectStore, name: CheckpointName, file: str
) -> None:
    rot_there(store, name, file)
    assert outcomes(scrubbed(made, store)) == {"local": "good", "store": "repaired"}
    assert is_good_there(made, store, name)
    assert kinds(made).count("repaired") == 1
    assert outcomes(scrubbed(made, store)) == {"local": "good", "store": "good"}


def test_missing_files_are_rot(made: Any, store: ObjectStore, name: CheckpointName) -> None:
    (made.dir.checkpoint(name) / rank_pack(0)).unlink()
    assert outcomes(scrubbed(made, store))["local"] == "repaired"
    store.delete([RunDir.checkpoint_key(name, rank_pack(0))])
    assert outcomes(scrubbed(made, store))["store"] == "repaired"
    assert is_good_here(made, name)
    assert is_good_there(made, store, name)


def test_copies_that_are_rotten_in_different_files_repair_each_other(
    made: Any, store: ObjectStore, name: CheckpointName
) -> None:
    rot_here(made, name, rank_pack(0))
    rot_there(store, name, rank_index(0))
    assert outcomes(scrubbed(made, store)) == {"local": "repaired", "store": "repaired"}
    assert is_good_here(made, name)
    assert is_good_there(made, store, name)


def test_rot_in_both_is_quarantined_and_said_once(made: Any, store: ObjectStore, name: CheckpointName) -> None:
    rot_here(made, name, rank_pack(0), 10)
    rot_there(store, name, rank_pack(0), 20)
    assert outcomes(scrubbed(made, store)) == {"local": "damaged", "store": "damaged"}
    assert outcomes(scrubbed(made, store)) == {"local": "damaged", "store": "damaged"}
    assert facts.trust(made.dir, name) == "quarantined"
    assert kinds(made).count("quarantined") == 1
    assert "repaired" not in kinds(made)


def test_what_is_known_to_be_damaged_is_cured_first_once_the_store_is_whole_again(
    made: Any, store: ObjectStore, name: CheckpointName
) -> None:
    rot_here(made, name, rank_pack(0), 10)
    assert outcomes(scrubbed(made, None)) == {"local": "damaged"}
    other = made.commit(200, 1)
    push(made.dir, store, other)
    copies = copies_of(made, *at(store))
    first = choose(copies, 1)
    assert [(copy.name, copy.place) for copy in first] == [(name, "local")]
    scrub(made.dir, at(store), copies, first)
    assert is_good_here(made, name)
    assert facts.trust(made.dir, name) == "replicated"


def test_a_copy_that_is_only_in_the_store_is_read_and_its_fact_is_there(
    made: Any, store: ObjectStore, name: CheckpointName
) -> None:
    for path in made.dir.checkpoint(name).iterdir():
        path.unlink()
    made.dir.checkpoint(name).rmdir()
    assert outcomes(scrubbed(made, store)) == {"store": "good"}
    rot_there(store, name, rank_pack(0))
    assert outcomes(scrubbed(made, store)) == {"store": "damaged"}
    assert outcomes(scrubbed(made, store)) == {"store": "damaged"}
    assert kinds(made).count("quarantined") == 1
    assert [copy.result for copy in copies_of(made, *at(store))] == ["damaged"]


def test_an_increment_is_as_good_as_its_base(made: Any, folder_store: FolderStore) -> None:
    base, increment = CheckpointName(100, 1), CheckpointName(200, 1)
    for name, full in ((base, None), (increment, base)):
        source = Source(name.step).tensor("frozen", "uint8", (20_000,), random_bytes("frozen", 20_000))
        made.write(name, source.tensor("new", "uint8", (3000,), random_bytes(name.step, 3000)), base=full)
    push(made.dir, folder_store, increment)
    rot_here(made, base, rank_pack(0))
    done = scrubbed(made, folder_store)
    here = [(one.copy.name, one.outcome) for one in done.found if one.copy.place == "local"]
    assert here == [(base, "repaired"), (increment, "good")]
    rot_here(made, base, rank_pack(0))
    rot_there(folder_store, base, rank_pack(0), 60)
    copies = copies_of(made, *at(folder_store))
    assert [one.base for one in copies if one.name == increment] == [base, base]
    scrub(made.dir, at(folder_store), copies, [one for one in copies if one.name == base])
    assert facts.trust(made.dir, base) == facts.trust(made.dir, increment) == "quarantined"
    assert [one.result for one in copies_of(made, *at(folder_store))] == ["damaged"] * 4


def test_while_other_upkeep_works_nothing_is_replaced(made: Any, folder_store: FolderStore) -> None:
    name = made.commit(100, 1)
    push(made.dir, folder_store, name)
    rot_here(made, name, rank_pack(0))
    rotten = (made.dir.checkpoint(name) / rank_pack(0)).read_bytes()
    with upkeep(made.dir):
        scrubbed(made, folder_store)
    assert (made.dir.checkpoint(name) / rank_pack(0)).read_bytes() == rotten
    assert outcomes(scrubbed(made, folder_store))["local"] == "repaired"


def test_nothing_is_written_to_the_good_copy(made: Any, folder_store: FolderStore) -> None:
    name = made.commit(100, 1)
    push(made.dir, folder_store, name)
    before = {path: path.stat().st_mtime_ns for path in folder_store.root.rglob("rank-*")}
    rot_here(made, name, rank_pack(0))
    scrubbed(made, folder_store)
    assert {path: path.stat().st_mtime_ns for path in folder_store.root.rglob("rank-*")} == before


def test_an_undecoded_copy_is_proven_in_full_before_it_counts_as_verified(made: Any) -> None:
    name = made.commit(100, 1)
    made.dir.fact(name, "local").unlink()
    assert facts.trust(made.dir, name) == "written"
    assert outcomes(scrubbed(made, None)) == {"local": "good"}
    assert facts.trust(made.dir, name) == "verified"
    assert check(Local(made.dir), None, name, "another run").bad.keys() == {MANIFEST}


# more places than one


@pytest.fixture
def tiers(tmp_path: Path) -> list[Stored]:
    return [Stored(FolderStore(tmp_path / word), word) for word in ("near", "far")]


def test_the_copy_here_is_repaired_from_whichever_tier_is_good(made: Any, tiers: list[Stored]) -> None:
    name = made.commit(100, 1)
    for tier in tiers:
        push(made.dir, tier.store, name, place=tier.word)
    rot_here(made, name, rank_pack(0), 10)
    rot_there(tiers[0].store, name, rank_pack(0), 20)
    assert outcomes(scrubbed(made, None, *tiers)) == {"local": "repaired", "near": "repaired", "far": "good"}
    assert is_good_here(made, name)
    assert is_good_there(made, tiers[0].store, name)
    assert facts.read_facts(made.dir, name, ["check-near.json", "check-store.json"]).keys() == {"near"}
    assert not made.dir.spool.exists()


def test_a_tier_is_repaired_from_the_store_where_nothing_is_here(
    made: Any, folder_store: FolderStore, tiers: list[Stored]
) -> None:
    name = made.commit(100, 1)
    for place in (Stored(folder_store), tiers[0]):
        push(made.dir, place.store, name, place=place.word)
    shutil.rmtree(made.dir.checkpoint(name))
    rot_there(tiers[0].store, name, rank_index(0))
    assert outcomes(scrubbed(made, folder_store, *tiers)) == {"store": "good", "near": "repaired"}
    assert is_good_there(made, tiers[0].store, name)
    assert not made.dir.checkpoint(name).exists(), "nothing came back here"


class Away(FolderStore):
    def get(self, key: str, *, limit: int) -> bytes:
        raise StoreError(f"{key}: no answer")


def test_a_tier_that_is_away_is_said_and_what_only_it_could_repair_is_left_for_later(made: Any, tiers: list[Stored]) -> None:
    name = made.commit(100, 1)
    push(made.dir, tiers[0].store, name, place="near")
    rot_here(made, name, rank_pack(0))
    copies, away = copies_of(made, *tiers), Stored(Away(Path(tiers[0].store.url.removeprefix("file://"))), "near")
    assert list(survey(made.dir, [away]).problems) == ["near"]
    done = scrub(made.dir, [away], copies, [copy for copy in copies if copy.place == "local"])
    assert (outcomes(done), list(done.problems)) == ({"local": "skipped"}, ["near"])
    assert "quarantined" not in kinds(made)
    assert outcomes(scrubbed(made, None, *tiers))["local"] == "repaired"


class PrunedMeanwhile(FolderStore):
    def put(self, key: str, data: bytes, *, if_absent: bool = False) -> bool:
        done = super().put(key, data, if_absent=if_absent)
        self.delete([f"{key.rpartition('/')[0]}/{MANIFEST}"])
        return done


def test_nobody_counts_on_a_copy_that_was_pruned_while_it_was_read(made: Any, tiers: list[Stored]) -> None:
    name = made.commit(100, 1)
    push(made.dir, tiers[0].store, name, place="near")
    place = Stored(PrunedMeanwhile(Path(tiers[0].store.url.removeprefix("file://"))), "near")
    scrub(made.dir, [place], copies_of(made, place), [copy for copy in copies_of(made, place) if copy.place == "near"])
    assert not facts.is_in(made.dir, name, "near")


# the plan


def copy(step: int, checked: float, *, place: str = "local", size: int = 10, result: str = "good", base: int = 0) -> Copy:
    full = CheckpointName(base, 1) if base else None
    return Copy(name=CheckpointName(step, 1), place=place, bytes=size, checked_at=checked, result=result, base=full)


def steps(chosen: list[Copy]) -> list[int]:
    return [one.name.step for one in chosen]


def test_the_longest_unchecked_come_first_and_the_budget_ends_it() -> None:
    copies = [copy(1, 300.0), copy(2, 100.0), copy(3, 0.0, result=""), copy(4, 200.0)]
    assert steps(choose(copies, 40)) == [3, 2, 4, 1]
    assert steps(choose(copies, 29)) == [3, 2]
    assert steps(choose(copies, 9)) == [3], "one that is larger than every budget would never be read"
    assert choose(copies, 0) == []
    assert choose([], 100) == []


def test_a_small_young_one_does_not_overtake_a_large_old_one() -> None:
    copies = [copy(1, 1.0), copy(2, 2.0, size=100), copy(3, 3.0, size=1)]
    assert steps(choose(copies, 50)) == [1]


def test_the_base_is_read_with_its_increment_once_and_counts() -> None:
    copies = [copy(1, 900.0), copy(2, 100.0, base=1), copy(3, 200.0, base=1), copy(4, 300.0)]
    assert steps(choose(copies, 20)) == [1, 2]
    assert steps(choose(copies, 30)) == [1, 2, 3]
    assert steps(choose(copies, 19)) == [1, 2]


def test_only_a_damage_that_may_be_cured_is_preferred() -> None:
    hopeless = [copy(1, 900.0, result="damaged"), copy(1, 900.0, result="damaged", place="store")]
    curable = [copy(2, 800.0, result="damaged"), copy(2, 800.0, place="store")]
    chosen = choose([*hopeless, *curable, copy(3, 1.0)], 20)
    assert [(one.name.step, one.place) for one in chosen] == [(2, "local"), (3, "local")]


@pytest.mark.parametrize(
    ("text", "bytes_"),
    [("10%", 100), ("0.5", 500), ("100%", 1000), ("20GB", 20 * 10**9), ("512MiB", 512 << 20), ("7", 7), ("1.5k", 1500)],
)
def test_budget_is_bytes_or_a_share(text: str, bytes_: int) -> None:
    assert parse_budget(text, 1000) == bytes_


@pytest.mark.parametrize("text", ["", "ten", "-1", "101%", "1.5", "5 apples", "1e9"])
def test_another_budget_is_refused(text: str) -> None:
    with pytest.raises(ConfigError, match="neither a number of bytes nor a share"):
        parse_budget(text, 1000)


def test_over_days_everything_is_read_in_turn(made: Any, folder_store: FolderStore) -> None:
    for step in (100, 200, 300):
        push(made.dir, folder_store, made.commit(step, 1))
    now = time.time()
    for step, age in ((100, 50.0), (200, 90.0), (300, 70.0)):
        fact = Fact(copy="local", checked_at=now - age, result="good")
        facts.write_fact(made.dir, CheckpointName(step, 1), fact)
        facts.write_fact(made.dir, CheckpointName(step, 1), Fact(copy="store", checked_at=now - age - 1, result="good"))
    seen = []
    for _ in range(6):
        copies = copies_of(made, *at(folder_store))
        chosen = choose(copies, 1)
        scrub(made.dir, at(folder_store), copies, chosen)
        seen += [(one.name.step, one.place) for one in chosen]
    assert seen == [(step, place) for step in (200, 300, 100) for place in ("store", "local")]
