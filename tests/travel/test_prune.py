"""A place is pruned by its own retention: what it keeps is whole and can be pulled, whatever pushes, pulls or prunes beside
it."""

import os
import shutil
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import msgspec
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from snapshots import Source, random_bytes
from upkeep_runs import prune_all

from perdure.training import events, files
from perdure.training.checkpoint import facts, manifest
from perdure.training.checkpoint.facts import Fact
from perdure.training.checkpoint.lineage import committed
from perdure.training.checkpoint.manifest import FileRecord
from perdure.training.checkpoint.pins import pin
from perdure.training.errors import RunBusy, StoreConflict, StoreError
from perdure.training.process import ProcessId
from perdure.training.retention_settings import RetentionSection
from perdure.training.run_dir import MANIFEST, CheckpointName, RunDir
from perdure.training.storage.folder import FolderStore
from perdure.training.storage.store import ObjectStore
from perdure.training.travel import mark, prune, sweep
from perdure.training.travel.contents import remote_checkpoints
from perdure.training.travel.copies import Stored, check
from perdure.training.travel.mark import Mark
from perdure.training.travel.prune import Survey
from perdure.training.travel.pull import pull
from perdure.training.travel.push import pending, push
from perdure.training.travel.sweep import Done

MadeRun = Any
BASE, FIRST, LATE, NEWEST = (CheckpointName(step, 1) for step in (100, 110, 120, 200))
HOUR = 3600


def look(run: RunDir, store: ObjectStore, **keep: Any) -> Survey:
    return prune.survey(run, store, "store", RetentionSection(**(keep or {"keep_last": 1})))


def prune_there(run: RunDir, store: ObjectStore, **keep: Any) -> Done:
    sweep.recover(run, store, "store")
    return sweep.execute(run, store, "store", look(run, store, **keep))


def steps(store: ObjectStore) -> list[int]:
    return [name.step for name in remote_checkpoints(store)]


def keys(store: ObjectStore, name: CheckpointName) -> list[str]:
    return [item.key.rpartition("/")[2] for item in store.list(RunDir.checkpoint_key(name, ""))]


def assert_whole(store: ObjectStore, run_id: str) -> None:
    """Whatever is committed there is good, and so is its base."""
    there = remote_checkpoints(store)
    for name in there:
        state = check(Stored(store), None, name, run_id)
        assert state.good, (name, state.bad)
        assert state.manifest is not None
        assert state.manifest.base_name in (None, *there)


def age(folder: FolderStore, prefix: str, seconds: float) -> None:
    moment = time.time() - seconds
    for path in folder.root.glob(prefix):
        os.utime(path, (moment, moment))


@pytest.fixture
def history(made: MadeRun) -> MadeRun:
    """A full, two increments of it, a newer full."""
    data = random_bytes("same", 5000)
    for name in (BASE, FIRST, LATE, NEWEST):
        source = Source(name.step).tensor("a", "uint8", (5000,), data if name != NEWEST else random_bytes("other", 5000))
        made.write(name, source, base=BASE if name in (FIRST, LATE) else None)
    return made


def pushed(made: MadeRun, store: ObjectStore, *names: CheckpointName) -> None:
    for name in names:
        push(made.dir, store, name)


def test_what_retention_lets_go_is_deleted_there_stays_here_and_is_not_sent_again(
    store: ObjectStore, history: MadeRun, elsewhere: RunDir
) -> None:
    pushed(history, store, FIRST, LATE, NEWEST)
    pin(history.dir, "release", FIRST)
    found = look(history.dir, store)
    assert [str(verdict.name) for verdict in found.plan.remove] == [str(LATE)]
    assert [verdict.reasons for verdict in found.plan.keep] == [
        (f"base of {FIRST}",), ("milestone release",), ("one of the newest 1", "the newest verified"),
    ]  # fmt: skip
    size = sum(item.size for item in store.list(RunDir.checkpoint_key(LATE, "")) if not item.key.endswith(MANIFEST))
    assert found.freed == size
    assert look(history.dir, store, keep_every=1).plan.remove == ()
    done = prune_there(history.dir, store)
    assert ([one.name for one in done.removed], done.freed, done.spared) == ([LATE], size, {})
    assert (steps(store), keys(store, LATE)) == ([100, 110, 200], [])
    assert store.size(RunDir.PRUNING_KEY) is None
    assert committed(history.dir) == [BASE, FIRST, LATE, NEWEST]
    assert [facts.trust(history.dir, name) for name in (FIRST, LATE)] == ["replicated", "verified"]
    assert pending(history.dir) == []
    (event,) = [event.data for event in events.read(history.dir) if event.kind == "copy_pruned"]
    assert (event["name"], event["place"], event["reason"]) == (str(LATE), "store", "older than what is kept")
    assert look(history.dir, store).empty
    assert pull(store, elsewhere) == NEWEST
    prune_all(history.dir, 1, stored=True)
    assert committed(history.dir) == [BASE, FIRST, NEWEST], "what the store let go counts as if it were there"


def test_a_key_that_may_not_delete_is_refused_and_loses_nothing(
    open_s3: Callable[..., Any], s3_keys: Any, history: MadeRun
) -> None:
    store = open_s3()
    pushed(history, store, LATE, NEWEST)
    before = [(item.key, item.size) for item in store.list("")]
    weak = open_s3(prefix=store.url.partition("ckpt/")[2], keys=s3_keys.no_delete)
    with pytest.raises(StoreError, match="were not deleted") as caught:
        prune_there(history.dir, weak)
    assert (caught.value.exit_code, caught.value.retryable) == (6, False)
    assert "s3:DeleteObject" in caught.value.hint
    assert [(item.key, item.size) for item in store.list("")] == before
    assert facts.trust(history.dir, LATE) == "replicated"


class Refusing(FolderStore):
    """Manifests may not be deleted, everything else may."""

    def delete(self, some: Any) -> None:
        super().delete([key for key in some if not key.endswith(MANIFEST)])
        if any(key.endswith(MANIFEST) for key in some):
            raise StoreError("object lock", retryable=False)


def test_manifests_whose_deletion_was_refused_half_way_are_put_back(history: MadeRun, tmp_path: Path) -> None:
    store = FolderStore(tmp_path / "store")
    pushed(history, store, LATE, NEWEST)
    found = look(history.dir, store)
    store.delete([RunDir.checkpoint_key(LATE, MANIFEST)])  # as if the first of two went
    with pytest.raises(StoreError, match="object lock"):
        sweep.execute(history.dir, Refusing(store.root), "store", found)
    assert (steps(store), store.size(RunDir.PRUNING_KEY)) == ([100, 120, 200], None)
    assert_whole(store, history.id)


def test_damaged_and_torn_copies_are_kept_and_count_for_nothing(history: MadeRun, folder_store: FolderStore) -> None:
    pushed(history, folder_store, BASE, NEWEST)
    (folder_store.root / RunDir.checkpoint_key(NEWEST, "rank-00000.pack")).unlink()
    assert look(history.dir, folder_store).plan.anchor == BASE
    assert prune_there(history.dir, folder_store).removed == []
    told = Fact(copy="store", checked_at=1.0, result="damaged", damage=("rot",))
    folder_store.put(RunDir.checkpoint_key(BASE, "check.json"), msgspec.json.encode(told))
    assert look(history.dir, folder_store).plan.anchor is None
    assert prune_there(history.dir, folder_store).removed == []
    assert steps(folder_store) == [100, 200]


def test_another_runs_place_and_another_history_are_refused(history: MadeRun, make_run: Any, folder_store: FolderStore) -> None:
    """Case M9."""
    pushed(history, folder_store, LATE, NEWEST)
    other = make_run("other", "other-1")
    with pytest.raises(StoreConflict, match="holds run"):
        prune_there(other.dir, folder_store)
    theirs = make_run("third")
    files.make_dirs(theirs.dir.launches)
    record = msgspec.json.decode(history.dir.launch_record(1).read_bytes())
    theirs.dir.launch_record(1).write_bytes(msgspec.json.encode({**record, "owner": "somebody"}))
    with pytest.raises(StoreConflict, match="two histories"):
        prune_there(theirs.dir, folder_store)
    assert steps(folder_store) == [100, 120, 200]


def test_a_zombies_copies_go_unless_a_launch_record_is_missing(history: MadeRun, folder_store: FolderStore) -> None:
    pushed(history, folder_store, LATE, NEWEST)
    history.launch(3, resumed_from=LATE)
    later = history.commit(150, 3)
    push(history.dir, folder_store, later)
    assert prune_there(history.dir, folder_store, keep_last=3).removed == []
    history.launch(2, resumed_from=LATE)
    assert [one.name for one in prune_there(history.dir, folder_store, keep_last=3).removed] == [NEWEST]
    assert folder_store.size(RunDir.launch_key(2)) is not None, "whoever pulls sees the history that was judged by"


def test_what_no_manifest_names_goes_when_it_is_a_day_old(history: MadeRun, folder_store: FolderStore) -> None:
    pushed(history, folder_store, LATE)
    for name in (FIRST, NEWEST):
        folder_store.put(RunDir.checkpoint_key(name, "rank-00000.pack"), b"half a push")
        folder_store.put(RunDir.checkpoint_key(name, "notes.txt"), b"somebody's")
    folder_store.put(RunDir.checkpoint_key(LATE, "rank-00000.full.pack"), b"a roll-up")
    (folder_store.root / "checkpoints" / ".x.1-1.tmp").write_bytes(b"cut off")
    age(folder_store, f"checkpoints/{FIRST}/*", 25 * HOUR)
    age(folder_store, f"checkpoints/{LATE}/*", 25 * HOUR)
    age(folder_store, "checkpoints/.*", 8 * 24 * HOUR)
    found = look(history.dir, folder_store)
    assert [(one.name, one.goes, one.reason) for one in found.leftovers] == [
        (FIRST, True, "never committed, older than a day"),
        (LATE, True, "no manifest names them, older than a day"),
        (NEWEST, False, "perhaps still being pushed"),
    ]
    done = prune_there(history.dir, folder_store)
    assert ([one.name for one in done.swept], done.freed, done.uploads) == ([FIRST, LATE], 20, 1)
    assert (keys(folder_store, FIRST), keys(folder_store, NEWEST)) == (["notes.txt"], ["notes.txt", "rank-00000.pack"])
    assert_whole(folder_store, history.id)
    assert look(history.dir, folder_store).empty


# beside others


class At(FolderStore):
    """Does something else once, before its `number`-th call."""

    def __init__(self, root: Path, number: int, act: Callable[[], object]) -> None:
        super().__init__(root)
        self.left, self.act = number, act
        self.answers: list[Any] = []

    def _tick(self) -> None:
        self.left -= 1
        if self.left == 0:
            self.answers.append(self.act())

    def put(self, *arguments: Any, **more: Any) -> bool:
        self._tick()
        return super().put(*arguments, **more)

    def put_file(self, *arguments: Any, **more: Any) -> None:
        self._tick()
        super().put_file(*arguments, **more)

    def get(self, *arguments: Any, **more: Any) -> bytes:
        self._tick()
        return super().get(*arguments, **more)

    def list(self, prefix: str) -> Iterator[Any]:
        self._tick()
        return super().list(prefix)

    def size(self, key: str) -> int | None:
        self._tick()
        return super().size(key)

    def delete(self, some: Any) -> None:
        for key in some:
            self._tick()
            super().delete([key])


class Scene:
    """A run and its store, taken back to how they were."""

    def __init__(self, made: MadeRun, store: FolderStore, place: Path) -> None:
        self.made, self.store, self.place = made, store, place
        for name, path in (("run", made.dir.root), ("store", store.root)):
            shutil.copytree(path, place / name)

    def reset(self) -> None:
        for name, path in (("run", self.made.dir.root), ("store", self.store.root)):
            shutil.rmtree(path)
            shutil.copytree(self.place / name, path)

    def push_late(self, store: ObjectStore) -> bool:
        """Whether it arrived. What a prune disturbs may be tried again, and a copy that counts is whole."""
        try:
            push(self.made.dir, store, LATE)
        except StoreError as error:
            if not error.retryable:
                raise
            return False
        return True


@pytest.fixture
def scene(history: MadeRun, folder_store: FolderStore, tmp_path: Path) -> Scene:
    """The base, an increment and the newest are there; another increment of that base is not yet."""
    pushed(history, folder_store, FIRST, NEWEST)
    return Scene(history, folder_store, tmp_path / "before")


def test_an_increment_pushed_at_any_moment_of_a_prune_is_there_with_its_base_or_pushed_again(scene: Scene) -> None:
    number, outcomes = 0, set()
    while True:
        number += 1
        scene.reset()
        store = At(scene.store.root, number, lambda: scene.push_late(scene.store))
        done = prune_there(scene.made.dir, store)
        arrived = store.answers
        if not arrived:
            break
        outcomes.add((arrived[0], BASE in done.spared))
        if arrived[0] and LATE in remote_checkpoints(scene.store):
            assert_whole(scene.store, scene.made.id)
        if not arrived[0]:
            assert facts.read_fact(scene.made.dir, LATE, "store") is None
            assert scene.push_late(scene.store)
        assert {LATE, NEWEST} <= set(remote_checkpoints(scene.store)) or facts.is_pruned(scene.made.dir, LATE, "store")
        assert_whole(scene.store, scene.made.id)
        prune_there(scene.made.dir, scene.store)
        assert (steps(scene.store), pending(scene.made.dir)) == ([200], [])
    assert number > 20
    assert outcomes >= {(True, False), (True, True), (False, False)}


def test_a_prune_at_any_moment_of_a_push_leaves_whole_what_counts(scene: Scene) -> None:
    number, outcomes = 0, set()
    while True:
        number += 1
        scene.reset()
        store = At(scene.store.root, number, lambda: prune_there(scene.made.dir, scene.store))
        arrived = scene.push_late(store)
        if not store.answers:
            break
        outcomes.add(arrived)
        if not arrived:
            assert not facts.is_in(scene.made.dir, LATE, "store")
            assert scene.push_late(scene.store)
        elif not facts.is_pruned(scene.made.dir, LATE, "store"):
            assert LATE in remote_checkpoints(scene.store)
        assert_whole(scene.store, scene.made.id)
        prune_there(scene.made.dir, scene.store)
        assert (steps(scene.store), pending(scene.made.dir)) == ([200], [])
    assert number > 15
    assert outcomes == {True, False}


def test_a_manifest_that_a_slow_push_puts_while_its_files_go_does_not_stay(scene: Scene) -> None:
    """That push had looked before the prune began; it looks again and sends the files anew."""
    key = RunDir.checkpoint_key(FIRST, MANIFEST)
    text = scene.store.get(key, limit=10**6)
    number, torn = 0, []
    while True:
        number += 1
        scene.reset()
        store = At(scene.store.root, number, lambda: scene.store.put(key, text, if_absent=True))
        prune_there(scene.made.dir, store)
        if not store.answers:
            break
        torn += [number] if FIRST in remote_checkpoints(scene.store) else []
    assert len(torn) < 6, "only where it comes after the last look at manifests"
    assert torn[-1] == number - 1


def test_a_pull_at_whose_any_moment_everything_older_is_pruned_brings_the_newest(scene: Scene, tmp_path: Path) -> None:
    latest = scene.made.commit(300, 1)
    scene.place = tmp_path / "again"
    Scene(scene.made, scene.store, scene.place)
    number, brought = 0, set()

    def newer_then_prune() -> None:
        push(scene.made.dir, scene.store, latest)
        prune_there(scene.made.dir, scene.store)

    while True:
        number += 1
        scene.reset()
        elsewhere = RunDir(tmp_path / f"machine-{number}")
        store = At(scene.store.root, number, newer_then_prune)
        name = pull(store, elsewhere)
        brought.add(name)
        assert committed(elsewhere) == [name]
        told = [event.data["text"] for event in events.read(elsewhere)]
        assert not any("damaged" in text for text in told), told
        if not store.answers:
            break
    assert brought == {NEWEST, latest}
    assert number > 8


def test_a_pinned_one_and_what_has_become_the_last_are_spared_at_the_second_look(scene: Scene) -> None:
    found = look(scene.made.dir, scene.store)
    pin(scene.made.dir, "late", FIRST)
    done = sweep.execute(scene.made.dir, scene.store, "store", found)
    assert done.spared == {FIRST: "milestone late", BASE: f"base of {FIRST}"}
    pin_file = scene.made.dir.pin("late")
    pin_file.unlink()
    scene.store.delete([RunDir.checkpoint_key(NEWEST, MANIFEST)])
    done = sweep.execute(scene.made.dir, scene.store, "store", found)
    assert list(done.spared.values()) == [f"{NEWEST} is there no more: plan anew"] * 2
    assert_whole(scene.store, scene.made.id)
    assert steps(scene.store) == [100, 110]


def foreign_mark(store: FolderStore, **going: str) -> None:
    other = Mark(owner=ProcessId(pid=1, start=1, host="another"), going=going)
    store.put(RunDir.PRUNING_KEY, msgspec.json.encode(other))


def test_a_mark_is_never_larger_than_what_is_read_of_one(made: MadeRun, folder_store: FolderStore) -> None:
    quotes = {"diff": '"' * (3 << 20)}  # each takes two bytes in a manifest, and four in a mark
    large = [made.manifest(step, 1, (), code=quotes) for step in range(1, 6)]
    batches = list(sweep._batches(sweep._Victim(name=one.name, files=(), manifest=one) for one in large))
    assert [len(batch) for batch in batches] == [2, 2, 1]
    for batch in batches:
        mark.put_mark(folder_store, {str(victim.name): victim.text for victim in batch})
        assert mark.going(folder_store) == {victim.name for victim in batch}


def test_one_prune_at_a_place_at_a_time_and_a_dead_ones_work_is_finished_or_undone(scene: Scene) -> None:
    store, run = scene.store, scene.made.dir
    scene.push_late(store)
    texts = {name: store.get(RunDir.checkpoint_key(name, MANIFEST), limit=10**6).decode() for name in (BASE, FIRST)}
    foreign_mark(store, **{str(name): text for name, text in texts.items()})
    found = look(run, store)
    with pytest.raises(RunBusy, match="on another prunes there"):
        sweep.recover(run, store, "store")
    with pytest.raises(RunBusy):
        sweep.execute(run, store, "store", found)
    with pytest.raises(StoreError, match=f"deleting {BASE}") as caught:
        push(run, store, BASE)
    assert caught.value.retryable
    assert steps(store) == [100, 110, 120, 200]
    store.delete([RunDir.checkpoint_key(name, MANIFEST) for name in texts])  # the other one got so far
    age(store, RunDir.PRUNING_KEY, 16 * 60)
    sweep.recover(run, store, "store")
    assert steps(store) == [100, 120, 200], "what an increment needs came back, the rest was finished"
    assert (keys(store, FIRST), store.size(RunDir.PRUNING_KEY)) == ([], None)
    assert_whole(store, scene.made.id)


def test_a_fact_that_says_pruned_is_corrected_where_the_copy_is(scene: Scene) -> None:
    facts.write_fact(scene.made.dir, NEWEST, Fact(copy="store", checked_at=1.0, result=facts.PRUNED))
    prune_there(scene.made.dir, scene.store, keep_last=5)
    assert facts.trust(scene.made.dir, NEWEST) == "replicated"


# any history

rows = st.lists(
    st.tuples(
        st.sampled_from(["full", "increment", "increment"]),
        st.sampled_from(["good"] * 6 + ["damaged", "lost file", "no manifest", "pinned"]),
    ),
    min_size=1,
    max_size=9,
)


def lay(made: MadeRun, root: Path, history: list[tuple[str, str]], zombie: int) -> None:
    """A place with such checkpoints, one file each; those from `zombie` on are outside the history."""
    base = None
    for number, (kind, state) in enumerate(history, 1):
        step, record = 10 * number, FileRecord(name="rank-00000.pack", bytes=number, digest="blobs:0")
        index = FileRecord(name="rank-00000.index", bytes=1, digest="blake3:0")
        of = None if kind == "full" or base is None else manifest.Base(name=str(base.name), digest=base.digest)
        found = made.manifest(step, 1, (record, index), base=of, created=float(step))
        found = manifest.parse(manifest.seal(found), "here")
        base = found if of is None else base
        folder = root / "checkpoints" / str(found.name)
        folder.mkdir(parents=True)
        (folder / "rank-00000.pack").write_bytes(b"x" * (number - (state == "lost file")))
        (folder / "rank-00000.index").write_bytes(b"x")
        if state == "damaged":
            (folder / "check.json").write_bytes(msgspec.json.encode(Fact(copy="store", checked_at=1.0, result="damaged")))
        if state != "no manifest":
            (folder / MANIFEST).write_bytes(manifest.seal(found))
        if state == "pinned":
            files.make_dirs(made.dir.pins)
            pinned = {"checkpoint": str(found.name), "created": 1.0}
            made.dir.pin(f"p{step}").write_bytes(msgspec.json.encode(pinned))
    made.launch(2, resumed_from=CheckpointName(10 * zombie, 1))
    (root / RunDir.RUN_KEY).write_bytes(made.dir.run_json.read_bytes())


@settings(max_examples=25, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(rows, st.integers(1, 9), st.integers(1, 4))
def test_whatever_the_history_what_must_stay_stays_and_the_plan_is_what_happens(
    tmp_path_factory: pytest.TempPathFactory, make_run: Any, history: list[tuple[str, str]], zombie: int, keep: int
) -> None:
    place = tmp_path_factory.mktemp("any")
    made = type(make_run("unused"))(place / "run")
    made.launch(1)
    lay(made, place / "store", history, zombie)
    age(FolderStore(place / "store"), "checkpoints/*/*", 48 * HOUR)
    store = FolderStore(place / "store")
    before = {name: keys(store, name) for name in remote_checkpoints(store)}
    found = look(made.dir, store, keep_last=keep)
    stays = {verdict.name for verdict in found.plan.keep}
    done = prune_there(made.dir, store, keep_last=keep)
    assert {name: keys(store, name) for name in remote_checkpoints(store)} == {name: before[name] for name in sorted(stays)}
    assert ({one.name for one in done.removed}, done.spared) == (set(before) - stays, {})
    for name in stays:
        state = made.dir and manifest.parse(store.get(RunDir.checkpoint_key(name, MANIFEST), limit=10**6), "there")
        assert state.base_name is None or state.base_name in stays or state.base_name not in before
    good = [
        CheckpointName(10 * number, 1)
        for number, (_, what) in enumerate(history, 1)
        if what in ("good", "pinned") and number <= zombie
    ]
    broken = {verdict.name for verdict in found.plan.verdicts if "damaged" in "; ".join(verdict.reasons)}
    assert set([name for name in good if name not in broken][-keep:]) <= stays
    assert {CheckpointName(10 * number, 1) for number, (_, what) in enumerate(history, 1) if what == "pinned"} <= stays
    assert not any(keys(store, CheckpointName(10 * n, 1)) for n, (_, what) in enumerate(history, 1) if what == "no manifest")
    assert look(made.dir, store, keep_last=keep).empty
