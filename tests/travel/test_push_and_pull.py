"""A checkpoint goes to a store and comes back on a machine that has nothing but the URL."""

import json
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import msgspec
import pytest
from storage.proxy import Reply, proxy_to

from perdure.training import events
from perdure.training.checkpoint import facts, lineage, manifest
from perdure.training.checkpoint.facts import Fact
from perdure.training.checkpoint.lineage import read_launches
from perdure.training.checkpoint.manifest import FileRecord
from perdure.training.checkpoint.run_info import read_run_info, with_store
from perdure.training.errors import CheckpointDamaged, CheckpointNotFound, DiskFull, StoreConflict, StoreError
from perdure.training.run_dir import CheckpointName, RunDir
from perdure.training.storage.folder import FolderStore
from perdure.training.storage.store import ObjectStore, TransferStopped
from perdure.training.travel import copy_in
from perdure.training.travel.contents import remote_checkpoints
from perdure.training.travel.fence import claim_run
from perdure.training.travel.pull import pull
from perdure.training.travel.push import pending, push

MadeRun = Any


def contents(run: RunDir, name: CheckpointName) -> dict[str, bytes]:
    return {path.name: path.read_bytes() for path in run.checkpoint(name).iterdir() if not path.name.startswith("check-")}


def bytes_read() -> int:
    """From files, by all threads of this process so far."""
    return int(Path("/proc/self/io").read_text().split()[1])


def test_what_was_pushed_is_pulled_byte_for_byte(store: ObjectStore, made: MadeRun, elsewhere: RunDir) -> None:
    name = made.commit(100, 1, pack=11 << 20, ranks=2)
    seen: list[tuple[int, int]] = []
    before = bytes_read()
    fact = push(made.dir, store, name, progress=lambda done, total: seen.append((done, total)))
    times = (bytes_read() - before) / manifest.read(made.dir.checkpoint(name)).stored_bytes
    assert 1 <= times - store.url.startswith("file:") < 1.2  # each local file once; a folder store's are files too
    assert (fact.copy, fact.result, fact.location) == ("store", "good", store.url)
    assert seen[-1][0] == seen[-1][1] == 2 * manifest.read(made.dir.checkpoint(name)).stored_bytes > 44 << 20
    assert facts.trust(made.dir, name) == "replicated"
    assert pull(store, elsewhere) == name
    assert contents(elsewhere, name) == contents(made.dir, name)
    assert read_run_info(elsewhere) == with_store(read_run_info(made.dir), store.url, store.settings)
    assert read_launches(elsewhere) == read_launches(made.dir)
    assert lineage.lineage(elsewhere) == [name]
    assert facts.trust(elsewhere, name) == "replicated"


def test_the_store_holds_exactly_the_documented_keys(store: ObjectStore, made: MadeRun) -> None:
    name = made.commit(100, 1)
    push(made.dir, store, name)
    files = ["check.json", "manifest.json", "rank-00000.index", "rank-00000.pack"]
    expected = [f"checkpoints/{name}/{file}" for file in files] + ["launches/0001.json", "run.json"]
    assert [info.key for info in store.list("")] == expected
    assert msgspec.json.decode(store.get(f"checkpoints/{name}/check.json", limit=1000), type=Fact).result == "good"


def test_pushing_twice_changes_nothing(store: ObjectStore, made: MadeRun) -> None:
    name = made.commit(100, 1)
    push(made.dir, store, name)
    before = {info.key: store.get(info.key, limit=5000) for info in store.list("") if not info.key.endswith("check.json")}
    assert push(made.dir, store, name).result == "good"
    assert before == {
        info.key: store.get(info.key, limit=5000) for info in store.list("") if not info.key.endswith("check.json")
    }


def test_pending_is_what_is_verified_and_not_replicated_newest_first(folder_store: FolderStore, made: MadeRun) -> None:
    names = [made.commit(step, 1) for step in (100, 200, 300)]
    made.dir.fact(names[1], "local").unlink()
    assert pending(made.dir) == [names[2], names[0]]
    push(made.dir, folder_store, names[2])
    assert pending(made.dir) == [names[0]]


@pytest.mark.parametrize("file", ["rank-00000.pack", "rank-00000.index", "manifest.json"])
def test_a_locally_damaged_checkpoint_is_not_pushed(folder_store: FolderStore, made: MadeRun, file: str) -> None:
    name = made.commit(100, 1)
    path = made.dir.checkpoint(name) / file
    data = bytearray(path.read_bytes())
    data[len(data) // 2] ^= 1
    path.write_bytes(data)
    with pytest.raises(CheckpointDamaged, match=file.removesuffix(".json")):
        push(made.dir, folder_store, name)
    assert remote_checkpoints(folder_store) == []


def test_a_quarantined_checkpoint_is_not_pushed(folder_store: FolderStore, made: MadeRun) -> None:
    name = made.commit(100, 1)
    facts.write_fact(made.dir, name, Fact(copy="local", checked_at=0, result="damaged", damage=("model/w",)))
    with pytest.raises(CheckpointDamaged, match="model/w"):
        push(made.dir, folder_store, name)
    assert list(folder_store.list("")) == []


def test_a_missing_shard_means_no_manifest_in_the_store(folder_store: FolderStore, made: MadeRun, elsewhere: RunDir) -> None:
    old, new = made.commit(100, 1), made.commit(200, 1, ranks=2)
    push(made.dir, folder_store, old)
    (made.dir.checkpoint(new) / "rank-00001.pack").write_bytes(b"")
    with pytest.raises(CheckpointDamaged, match="rank-00001"):
        push(made.dir, folder_store, new)
    assert pull(folder_store, elsewhere) == old


def test_a_store_of_another_run_is_refused_both_ways(
    store: ObjectStore, made: MadeRun, make_run: Callable[..., MadeRun]
) -> None:
    push(made.dir, store, made.commit(100, 1))
    other = make_run("other", "bert-9999")
    other.launch(1)
    with pytest.raises(StoreConflict, match=r"holds run gpt-1234, not this run bert-9999"):
        push(other.dir, store, other.commit(100, 1))
    with pytest.raises(StoreConflict, match=r"holds run gpt-1234, not this run bert-9999"):
        pull(store, other.dir)
    assert remote_checkpoints(store) == [CheckpointName(100, 1)]


def test_another_checkpoint_under_the_same_name_is_never_replaced(store: ObjectStore, made: MadeRun, elsewhere: RunDir) -> None:
    name = made.commit(100, 1)
    push(made.dir, store, name)
    kept = store.get(f"checkpoints/{name}/manifest.json", limit=10_000)
    made.commit(100, 1, state_digest="f" * 64)
    with pytest.raises(StoreConflict, match="holds another checkpoint"):
        push(made.dir, store, name)
    assert store.get(f"checkpoints/{name}/manifest.json", limit=10_000) == kept
    assert pull(store, elsewhere) == name


def test_a_launch_taken_by_another_machine_fences_the_push(
    folder_store: FolderStore, made: MadeRun, make_run: Callable[..., MadeRun]
) -> None:
    push(made.dir, folder_store, made.commit(100, 1))
    cut_off = make_run("cut off")
    record = msgspec.structs.replace(read_launches(made.dir)[1], owner="somebody else")
    assert lineage.create_launch(cut_off.dir, record)
    with pytest.raises(StoreConflict, match="launch 1 is taken by another machine"):
        push(cut_off.dir, folder_store, cut_off.commit(200, 1))
    assert remote_checkpoints(folder_store) == [CheckpointName(100, 1)]


def test_a_stopped_push_is_finished_by_the_next(store: ObjectStore, made: MadeRun, elsewhere: RunDir) -> None:
    name = made.commit(100, 1, pack=30 << 20)
    done = [0]
    with pytest.raises(TransferStopped):
        push(made.dir, store, name, progress=lambda n, _: done.append(n), should_stop=lambda: done[-1] > 0)
    assert remote_checkpoints(store) == []
    push(made.dir, store, name)
    assert pull(store, elsewhere) == name


def _damage(store: ObjectStore, key: str, how: str) -> None:
    data = bytearray(store.get(key, limit=1 << 20))
    if how == "missing":
        store.delete([key])
        return
    if how == "flipped":
        data[len(data) // 2] ^= 1
    store.put(key, bytes({"flipped": data, "truncated": data[:-1], "empty": b"", "longer": data + b"\0"}[how]))


@pytest.mark.parametrize("how", ["flipped", "truncated", "empty", "longer", "missing"])
@pytest.mark.parametrize("file", ["rank-00000.pack", "rank-00000.index", "manifest.json"])
def test_a_damaged_newest_is_reported_and_the_one_before_is_pulled(
    store: ObjectStore, made: MadeRun, elsewhere: RunDir, file: str, how: str
) -> None:
    old, new = made.commit(100, 1), made.commit(200, 1)
    push(made.dir, store, old)
    push(made.dir, store, new)
    _damage(store, f"checkpoints/{new}/{file}", how)
    assert pull(store, elsewhere) == old
    assert contents(elsewhere, old) == contents(made.dir, old)
    assert not elsewhere.checkpoint(new).exists()
    said = [event.data["text"] for event in events.read(elsewhere)]
    if (file, how) == ("manifest.json", "missing"):  # then there is no such checkpoint, and nothing to report
        assert said == []
    else:
        assert len(said) == 1
        assert str(new) in said[0]
    push(made.dir, store, new)  # and the machine that has it whole heals the store
    assert pull(store, elsewhere) == new
    assert contents(elsewhere, new) == contents(made.dir, new)


def test_when_none_is_good_nothing_looks_like_a_run(store: ObjectStore, made: MadeRun, elsewhere: RunDir) -> None:
    for step in (100, 200):
        name = made.commit(step, 1)
        push(made.dir, store, name)
        _damage(store, f"checkpoints/{name}/rank-00000.pack", "flipped")
    with pytest.raises(CheckpointDamaged, match="no checkpoint is good"):
        pull(store, elsewhere)
    assert not elsewhere.run_json.exists()
    assert list(elsewhere.checkpoints.iterdir()) == []


def test_a_zombies_late_checkpoint_is_not_the_one_pulled(folder_store: FolderStore, made: MadeRun, elsewhere: RunDir) -> None:
    first = made.commit(100, 1)
    made.launch(2, resumed_from=first)
    ours, late = made.commit(150, 2), made.commit(900, 1)
    for name in (first, ours, late):
        push(made.dir, folder_store, name)
    assert pull(folder_store, elsewhere) == ours
    assert pull(folder_store, elsewhere, name=late) == late
    assert remote_checkpoints(folder_store) == [first, ours, late]


def test_a_named_checkpoint_that_is_not_there_is_said(folder_store: FolderStore, made: MadeRun, elsewhere: RunDir) -> None:
    push(made.dir, folder_store, made.commit(100, 1))
    with pytest.raises(CheckpointNotFound, match="000000000777-0001"):
        pull(folder_store, elsewhere, name=CheckpointName(777, 1))


def test_an_empty_store_has_no_run(store: ObjectStore, elsewhere: RunDir) -> None:
    with pytest.raises(CheckpointNotFound, match=r"no run\.json"):
        pull(store, elsewhere)
    assert not elsewhere.root.exists()


def test_a_run_without_checkpoints_gives_its_identity_only(folder_store: FolderStore, made: MadeRun, elsewhere: RunDir) -> None:
    claim_run(made.dir, folder_store)
    with pytest.raises(CheckpointNotFound, match="no checkpoint of it yet"):
        pull(folder_store, elsewhere)
    assert read_run_info(elsewhere).id == "gpt-1234"


def _hostile(made: MadeRun, **changes: Any) -> bytes:
    return manifest.seal(made.manifest(200, 1, changes.pop("records", ()), **changes))


PACK = "xxh3-128:" + "0" * 32


def _record(name: str, size: int = 1, digest: str = PACK) -> tuple[FileRecord, ...]:
    return (FileRecord(name=name, bytes=size, digest=digest),)


@pytest.mark.parametrize(
    "make",
    [
        lambda made: b"",
        lambda made: b"{}",
        lambda made: b"\x80\x04\x95pickle",
        lambda made: b"[" * 200_000,
        lambda made: b'{"format": "perdure-checkpoint", "version": 1, "step": 1e999}',
        lambda made: b'{"format": "perdure-checkpoint", "version": 99}',
        lambda made: _hostile(made, records=_record("../../../escape")),
        lambda made: _hostile(made, records=_record("/etc/escape")),
        lambda made: _hostile(made, records=_record("run.json")),
        lambda made: _hostile(made, records=_record("rank-00000.pack\0")),
        lambda made: _hostile(made, records=_record("rank-00000.pack", 1 << 60)),
        lambda made: _hostile(made, records=_record("rank-00000.pack", -1)),
        lambda made: _hostile(made, records=_record("rank-00000.pack", 1, "md5:00")),
        lambda made: _hostile(made, records=_record("rank-00000.pack") * 2),
        lambda made: _hostile(made, run="another-run"),
        lambda made: manifest.seal(made.manifest(201, 1, ())),
    ],
)
def test_a_hostile_manifest_is_refused_and_the_one_before_pulled(
    folder_store: FolderStore, made: MadeRun, elsewhere: RunDir, tmp_path: Path, make: Callable[[MadeRun], bytes]
) -> None:
    old = made.commit(100, 1)
    push(made.dir, folder_store, old)
    folder_store.put(f"checkpoints/{CheckpointName(200, 1)}/rank-00000.pack", b"x")
    folder_store.put(f"checkpoints/{CheckpointName(200, 1)}/manifest.json", make(made))
    assert pull(folder_store, elsewhere) == old
    assert sorted(path.name for path in elsewhere.checkpoints.iterdir()) == [str(old)]
    assert not list(tmp_path.rglob("escape"))


@pytest.mark.parametrize(
    "key", ["checkpoints/x/manifest.json", "checkpoints/1-1/manifest.json", "checkpoints/000000000900-0001/a/manifest.json"]
)
def test_strange_names_in_the_listing_are_no_checkpoints(folder_store: FolderStore, made: MadeRun, key: str) -> None:
    push(made.dir, folder_store, made.commit(100, 1))
    folder_store.put(key, b"{}")
    assert remote_checkpoints(folder_store) == [CheckpointName(100, 1)]


@pytest.mark.parametrize("data", [b"", b"[]", b'{"id": "../x"}', b"[" * 100_000, b"\xff\xfe"])
def test_a_hostile_run_json_is_refused(folder_store: FolderStore, elsewhere: RunDir, data: bytes) -> None:
    folder_store.put("run.json", data)
    with pytest.raises(StoreConflict, match=r"run\.json is not a run's"):
        pull(folder_store, elsewhere)
    assert not elsewhere.root.exists()


def test_a_run_id_that_is_no_plain_name_is_refused(folder_store: FolderStore, made: MadeRun, elsewhere: RunDir) -> None:
    info = json.loads(made.dir.run_json.read_bytes())
    folder_store.put("run.json", json.dumps({**info, "id": "../../x"}).encode())
    with pytest.raises(StoreConflict, match="not a run's"):
        pull(folder_store, elsewhere)


@pytest.mark.parametrize(
    ("setting", "value"),
    [("part_mib", 10**9), ("steps", 0), ("chunk", -1), ("storage_class", "x y"), ("endpoint_url", "nowhere")],
)
def test_a_setting_in_a_bucket_that_no_run_could_have_is_refused_by_name_and_value(
    folder_store: FolderStore, made: MadeRun, elsewhere: RunDir, setting: str, value: Any
) -> None:
    info = json.loads(made.dir.run_json.read_bytes())
    folder_store.put("run.json", json.dumps({**info, setting: value}).encode())
    with pytest.raises(StoreConflict, match=rf"/run\.json: .*{setting}.*{re.escape(repr(value))}"):
        pull(folder_store, elsewhere)
    assert not elsewhere.root.exists()


def test_a_damaged_launch_record_is_said_and_older_ones_used(
    folder_store: FolderStore, made: MadeRun, elsewhere: RunDir
) -> None:
    name = made.commit(100, 1)
    push(made.dir, folder_store, name)
    folder_store.put("launches/0002.json", b"rotten")
    assert pull(folder_store, elsewhere) == name
    assert "launch record 2" in next(events.read(elsewhere)).data["text"]


def test_too_little_room_is_said_before_anything_is_fetched(
    folder_store: FolderStore, made: MadeRun, elsewhere: RunDir, monkeypatch: pytest.MonkeyPatch
) -> None:
    push(made.dir, folder_store, made.commit(100, 1))
    monkeypatch.setattr(copy_in, "SPARE_BYTES", 1 << 60)
    with pytest.raises(DiskFull, match=r"needs 3\d{3} bytes, \d+ are free"):
        pull(folder_store, elsewhere)
    assert not elsewhere.run_json.exists()


def test_a_store_that_fails_is_not_taken_for_damage(
    open_s3: Callable[..., Any], s3_keys: Any, made: MadeRun, elsewhere: RunDir
) -> None:
    store = open_s3()
    for step in (100, 200):
        push(made.dir, store, made.commit(step, 1))
    pack = f"checkpoints/{CheckpointName(200, 1)}/rank-00000.pack"
    with proxy_to(s3_keys.endpoint, lambda seen: Reply(503, "SlowDown") if pack in seen.path else None) as proxy:
        down = open_s3(prefix=store.url.removeprefix("s3://ckpt/"), endpoint=proxy.endpoint)
        with pytest.raises(StoreError) as caught:
            pull(down, elsewhere)
    assert caught.value.retryable
    assert not elsewhere.run_json.exists()
