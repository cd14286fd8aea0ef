"""A tier of a class that has to be thawed: filled, asked for, waited for, read; each state is shown and none is an error."""

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from conftest import S3Server
from storage.glacier import Glacier
from storage.proxy import Proxy, Reply, proxy_to

from perdure.training.checkpoint import facts, manifest, thaws
from perdure.training.checkpoint.facts import Fact
from perdure.training.errors import CheckpointNotFound, NeedsThaw, StoreError
from perdure.training.run_dir import MANIFEST, CheckpointName, RunDir, rank_index, rank_pack
from perdure.training.storage.folder import FolderStore
from perdure.training.storage.s3 import S3Store
from perdure.training.tier_settings import TierSection
from perdure.training.travel import archive, thaw
from perdure.training.travel.copies import Stored
from perdure.training.travel.places import Tier
from perdure.training.travel.pull import pull_from
from perdure.training.travel.push import push
from perdure.training.travel.scrub import scrub
from perdure.training.travel.scrub_plan import choose, survey

MadeRun = Any
FILES = [rank_index(0), rank_pack(0)]


@pytest.fixture
def glacier() -> Glacier:
    return Glacier(looks=3)


@pytest.fixture
def proxy(s3_keys: S3Server, glacier: Glacier) -> Iterator[Proxy]:
    with proxy_to(s3_keys.endpoint, glacier) as proxy:
        yield proxy


@pytest.fixture
def tier(proxy: Proxy, open_s3: Callable[..., S3Store]) -> Tier:
    store = open_s3(endpoint=proxy.endpoint, storage_class="DEEP_ARCHIVE")
    section = TierSection(url=store.url, storage_class="DEEP_ARCHIVE")
    return Tier(word="cold", store=store, section=section)


def fill(made: MadeRun, tier: Tier) -> archive.Done:
    return archive.execute(made.dir, [tier], archive.survey(made.dir, [tier]))


def operations(proxy: Proxy, *files: str) -> list[str]:
    """What was done with these files."""
    return [seen.operation for seen in proxy.log if seen.path.partition("?")[0].endswith(files)]


def test_a_cold_tier_is_filled_with_proven_copies_and_not_filled_twice(
    made: MadeRun, tier: Tier, proxy: Proxy, glacier: Glacier
) -> None:
    name = made.commit(100, 1)
    assert len(fill(made, tier).copied) == 1
    assert sorted(path.rpartition("/")[2] for path in glacier.cold) == FILES, "the manifest can be read"
    fact = facts.read_fact(made.dir, name, "cold")
    assert fact is not None
    assert (fact.result, fact.storage_class) == ("good", "DEEP_ARCHIVE")
    assert facts.trust(made.dir, name) == "archived"
    assert archive.survey(made.dir, [tier]).steps == ()
    tier.store.delete([RunDir.checkpoint_key(name, MANIFEST)])  # killed before the last step
    made.dir.fact(name, "cold").unlink()
    proxy.log.clear()
    assert len(fill(made, tier).copied) == 1
    assert set(operations(proxy, *FILES)) == {"head"}, "proven before it was moved: neither read nor sent again"
    assert facts.read_fact(made.dir, name, "cold").storage_class == "DEEP_ARCHIVE"  # type: ignore[union-attr]
    facts.write_fact(made.dir, name, Fact(copy="cold", checked_at=1.0, result="damaged", damage=("rot",)))
    proxy.log.clear()
    assert len(fill(made, tier).copied) == 1
    assert operations(proxy, rank_pack(0)).count("put") == 2, "sent, and moved"
    assert facts.is_in(made.dir, name, "cold")


def test_a_thaw_is_asked_for_once_and_pull_goes_on_when_it_is_done(
    made: MadeRun, elsewhere: RunDir, tier: Tier, glacier: Glacier
) -> None:
    name = made.commit(100, 1)
    fill(made, tier)
    places, said = [Stored(tier.store, "cold")], list[str]()

    def pulled(*, asks: bool = True, waits: bool = False) -> Any:
        return thaw.reading(lambda: pull_from(places, elsewhere), elsewhere, places, asks=asks, waits=waits, say=said.append)

    with pytest.raises(NeedsThaw, match=f"checkpoint {name} .* has to be thawed") as caught:
        pulled(asks=False)
    assert (caught.value.exit_code, glacier.asked) == (12, [])
    assert not elsewhere.run_json.exists()
    with pytest.raises(NeedsThaw, match=f"checkpoint {name} in cold is thawing") as caught:
        pulled()
    assert "the same command goes on" in caught.value.hint
    (known,) = thaws.read_thaws(elsewhere)
    assert (known.state, known.place, known.checkpoint) == ("thawing", "cold", str(name))
    assert pulled(waits=True) == (name, places[0])
    assert sorted(glacier.asked) == FILES, "each once"
    assert said == [f"checkpoint {name} in cold is thawing"]
    (known,) = thaws.read_thaws(elsewhere)
    assert (known.state, known.until) == ("thawed", int(glacier.until))
    fact = facts.read_fact(elsewhere, name, "cold")
    assert fact is not None
    assert fact.storage_class == "DEEP_ARCHIVE", "it can be read for some days only"
    assert facts.read_fact(elsewhere, name, "store") is None


def test_the_newest_is_not_passed_over_because_it_is_frozen(
    made: MadeRun, elsewhere: RunDir, tier: Tier, folder_store: Any
) -> None:
    old, new = made.commit(100, 1), made.commit(200, 1)
    near = Tier(word="near", store=folder_store, section=TierSection(url=folder_store.url, every=200))
    fill(made, tier)
    near_copy, cold_copy = Stored(near.store, "near"), Stored(tier.store, "cold")
    with pytest.raises(NeedsThaw, match=str(new)):
        pull_from([near_copy, cold_copy], elsewhere)
    fill(made, near)
    assert pull_from([near_copy, cold_copy], elsewhere) == (new, near_copy)
    assert thaw.copy_of([cold_copy, near_copy], new) == near_copy, "what can be read as it is needs no thaw"
    assert thaw.ask(elsewhere, near_copy, new) is None
    assert thaw.copy_of([near_copy, cold_copy], old) == cold_copy
    with pytest.raises(CheckpointNotFound, match="no place holds"):
        thaw.copy_of([near_copy, cold_copy], CheckpointName(300, 1))


def test_a_frozen_place_is_no_source_of_an_archive_and_says_when_it_is_ready(
    made: MadeRun, tier: Tier, glacier: Glacier, tmp_path: Any, folder_store: Any
) -> None:
    name = made.commit(100, 1)
    fill(made, tier)
    glacier.looks = 1
    asked = thaw.ask(made.dir, Stored(tier.store, "cold"), name)
    assert asked is not None
    again = thaw.ask(made.dir, Stored(tier.store, "cold"), name)
    assert again is not None
    assert (again.state, again.asked_at) == ("thawed", asked.asked_at)
    thaws.write_thaw(made.dir, name, asked)
    done = fill(made, tier)
    assert [(one.place, one.state) for one in done.thawed] == [("cold", "thawed")]
    glacier.freeze()
    assert fill(made, tier).thawed == []
    assert thaws.read_thaws(made.dir) == [], "it is over"
    other = Tier(word="other", store=folder_store, section=TierSection(url=folder_store.url))
    made.dir.manifest(name).unlink()
    assert archive.survey(made.dir, [other, tier]).steps == ()


def test_scrub_reads_a_cold_copy_while_it_is_thawed(made: MadeRun, tier: Tier, glacier: Glacier, proxy: Proxy) -> None:
    name, place = made.commit(100, 1), Stored(tier.store, "cold")
    fill(made, tier)
    found = survey(made.dir, [place])
    assert (found.frozen, [copy.place for copy in choose(found.copies, 1 << 30)]) == (1, ["local"])
    facts.write_fact(made.dir, name, Fact(copy="cold", checked_at=1.0, result="good"))  # as if a rule of the bucket moved it
    assert survey(made.dir, [place]).frozen == 1
    pack = made.dir.checkpoint(name) / rank_pack(0)
    whole = pack.read_bytes()
    pack.write_bytes(b"rot" + whole[3:])
    (one,) = scrub(made.dir, [place], found.copies, choose(found.copies, 1 << 30)).found
    assert (one.outcome, "its copy in cold has to be thawed first" in one.reason) == ("damaged", True)
    glacier.looks = 0
    assert thaw.ask(made.dir, place, name).state == "thawed"  # type: ignore[union-attr]
    found = survey(made.dir, [place])
    done = scrub(made.dir, [place], found.copies, choose(found.copies, 1 << 30))
    assert [(one.copy.place, one.outcome) for one in done.found] == [("local", "repaired"), ("cold", "good")]
    assert pack.read_bytes() == whole
    fact = facts.read_fact(made.dir, name, "cold")
    assert fact is not None
    assert (fact.result, fact.storage_class) == ("good", "DEEP_ARCHIVE")
    record, key = manifest.read(made.dir.checkpoint(name)).files[0], RunDir.checkpoint_key(name, rank_pack(0))
    tier.store.raw(  # type: ignore[attr-defined]
        "put_object", key, Key=tier.store.full_key(key), Body=b"rot" + whole[3:], StorageClass="DEEP_ARCHIVE",  # type: ignore[attr-defined]
        Metadata={"perdure-digest": record.digest},
    )  # fmt: skip
    proxy.log.clear()
    there = [copy for copy in found.copies if copy.place == "cold"]
    assert [one.outcome for one in scrub(made.dir, [place], found.copies, there).found] == ["repaired"]
    assert operations(proxy, rank_pack(0)).count("put") == 2, "sent, and moved, whatever an earlier push had proven"
    assert operations(proxy, rank_index(0)).count("put") == 0
    assert [one.outcome for one in scrub(made.dir, [place], found.copies, there).found] == ["skipped"], "frozen again"


def test_a_refused_thaw_is_one_sentence(made: MadeRun, tier: Tier, proxy: Proxy, glacier: Glacier) -> None:
    name = made.commit(100, 1)
    fill(made, tier)
    proxy.rule = lambda seen: Reply(403, "AccessDenied") if seen.method == "POST" else glacier(seen)
    with pytest.raises(StoreError, match="AccessDenied") as caught:
        thaw.ask(made.dir, Stored(tier.store, "cold"), name)
    assert "s3:RestoreObject" in caught.value.hint
    assert thaws.read_thaws(made.dir) == []
    proxy.rule = lambda seen: Reply(409, "RestoreAlreadyInProgress") if seen.method == "POST" else glacier(seen)
    places = [Stored(tier.store, "cold")]

    def read() -> None:
        raise NeedsThaw("frozen", checkpoint=str(name), place="cold")

    with pytest.raises(NeedsThaw, match="is frozen, though it was asked for"):  # and not for ever
        thaw.reading(read, made.dir, places, asks=True, waits=True, say=lambda _: None)


def test_a_place_may_be_away_while_a_thaw_is_waited_for(made: MadeRun, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(thaw, "_FIRST_POLL_SECS", 0.01)
    name, failures = made.commit(100, 1), [StoreError("no answer"), StoreError("no answer")]

    class AwayForAWhile(FolderStore):
        @property
        def cold(self) -> None:
            if failures:
                raise failures.pop()

    place = Stored(AwayForAWhile(tmp_path / "far"), "far")
    push(made.dir, FolderStore(tmp_path / "far"), name, place="far")
    asked = thaws.Thaw(place="far", checkpoint=str(name), state="thawing", asked_at=1.0, checked_at=1.0)
    assert thaw.wait(made.dir, place, name, asked).state == "thawed"
    failures.append(StoreError("refused", retryable=False))
    with pytest.raises(StoreError, match="refused"):
        thaw.wait(made.dir, place, name, asked)
