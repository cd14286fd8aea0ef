"""One contract, every store: the same tests against a folder and against a real S3 server."""

import hashlib
import json
import random
import re
import shutil
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from subprocess import PIPE

import msgspec
import pytest

from perdure.training.errors import CheckpointDamaged, ObjectNotFound, StoreError
from perdure.training.storage.folder import FolderStore
from perdure.training.storage.store import ObjectStore, TransferStopped

PART = 5 << 20


@pytest.fixture(params=["folder", "s3"])
def store(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[ObjectStore]:
    if request.param == "folder":
        yield FolderStore(tmp_path / "a store" / "run #1 %41+'")
    else:
        yield request.getfixturevalue("open_s3")()


def content(size: int, seed: int = 1) -> bytes:
    return random.Random(seed).randbytes(size)


def test_what_was_put_is_what_is_read(store: ObjectStore) -> None:
    assert store.put("a/b.json", b"one") is True
    assert store.get("a/b.json", limit=10) == b"one"
    assert store.put("a/b.json", b"") is True
    assert store.get("a/b.json", limit=10) == b""
    assert store.size("a/b.json") == 0


def test_an_object_larger_than_the_limit_is_refused(store: ObjectStore) -> None:
    store.put("big", b"x" * 11)
    with pytest.raises(StoreError, match="larger than 10"):
        store.get("big", limit=10)


def test_the_second_conditional_put_changes_nothing(store: ObjectStore) -> None:
    assert store.put("once", b"first", if_absent=True) is True
    assert store.put("once", b"second", if_absent=True) is False
    assert store.put("once", b"first", if_absent=True) is False
    assert store.get("once", limit=10) == b"first"


def test_of_eight_processes_exactly_one_wins_each_conditional_put(store: ObjectStore) -> None:
    command = [sys.executable, str(Path(__file__).with_name("racer.py")), "race", store.url, settings_of(store)]
    racers = [subprocess.Popen([*command, str(n)], stdin=PIPE, stdout=PIPE, text=True) for n in range(8)]
    try:
        assert [racer.stdout.readline() for racer in racers if racer.stdout] == ["ready\n"] * 8
        for round_ in range(3):
            for racer in racers:
                assert racer.stdin
                racer.stdin.write(f"{round_}\n")
                racer.stdin.flush()
            answers = [racer.stdout.readline() for racer in racers if racer.stdout]
            assert sorted(answers) == ["0\n"] * 7 + ["1\n"]
            assert store.get(f"race/{round_}", limit=10) == b"%d" % answers.index("1\n")
    finally:
        for racer in racers:
            racer.communicate()


def settings_of(store: ObjectStore) -> str:
    return json.dumps(msgspec.structs.asdict(store.settings))


@pytest.mark.parametrize("size", [0, 1, PART - 1, PART, PART + 1, 2 * PART + 3])
def test_files_of_every_size_come_back_whole(store: ObjectStore, tmp_path: Path, size: int) -> None:
    data, counted, watched = content(size), [0], [b""]
    (tmp_path / "source").write_bytes(data)
    store.put_file("files/x.pack", tmp_path / "source", watch=watched.append, progress=counted.append)
    assert store.size("files/x.pack") == size
    back = b"".join(store.get_range("files/x.pack", at, min(PART, size - at)) for at in range(0, size, PART))
    assert hashlib.sha256(back).digest() == hashlib.sha256(data).digest() == hashlib.sha256(b"".join(watched)).digest()
    assert sum(counted) == size
    assert list(store.list_uploads("")) == []


def test_put_file_replaces_what_was_there(store: ObjectStore, tmp_path: Path) -> None:
    for seed in (1, 2):
        (tmp_path / "source").write_bytes(content(PART + 9, seed))
        store.put_file("x", tmp_path / "source")
    assert store.get("x", limit=2 * PART) == content(PART + 9, 2)


def test_what_the_watcher_refuses_is_not_stored(store: ObjectStore, tmp_path: Path) -> None:
    def refuse(data: bytes) -> None:
        raise CheckpointDamaged("not these")

    for size in (5, 3 * PART):
        (tmp_path / "source").write_bytes(content(size))
        with pytest.raises(CheckpointDamaged, match="not these"):
            store.put_file("x", tmp_path / "source", watch=refuse)
    assert list(store.list("")) == list(store.list_uploads("")) == []


@pytest.mark.parametrize(("offset", "length"), [(0, 1), (0, 1000), (999, 1), (10, 500), (5, 0)])
def test_a_range_is_exactly_those_bytes(store: ObjectStore, offset: int, length: int) -> None:
    data = content(1000)
    store.put("x", data)
    assert store.get_range("x", offset, length) == data[offset : offset + length]


@pytest.mark.parametrize(("offset", "length"), [(0, 1001), (999, 2), (1000, 1), (5000, 5)])
def test_a_range_past_the_end_is_an_error_not_fewer_bytes(store: ObjectStore, offset: int, length: int) -> None:
    store.put("x", content(1000))
    with pytest.raises(StoreError) as caught:
        store.get_range("x", offset, length)
    assert not caught.value.retryable


def test_missing_objects_say_so(store: ObjectStore) -> None:
    assert store.size("none") is None
    assert list(store.list("none/")) == []
    for read in (lambda: store.get("none", limit=1), lambda: store.get_range("none", 0, 1)):
        with pytest.raises(ObjectNotFound, match="none"):
            read()
    store.put("file", b"x")
    assert store.size("file/below") is None


def test_delete_removes_only_what_is_named_and_forgives_what_is_gone(store: ObjectStore) -> None:
    for key in ("a/1", "a/2", "a/3"):
        store.put(key, b"x")
    store.delete(["a/1", "a/3", "a/none"])
    assert [info.key for info in store.list("")] == ["a/2"]
    store.delete([])


def test_a_listing_of_1500_checkpoints_ends_with_the_newest(store: ObjectStore) -> None:
    keys = [f"checkpoints/{step:012d}-0001/manifest.json" for step in range(1, 1501)]
    with ThreadPoolExecutor(8) as pool:
        list(pool.map(lambda key: store.put(key, b"m"), random.Random(3).sample(keys, len(keys))))
    assert [info.key for info in store.list("checkpoints/")] == keys
    store.delete(keys[:-10])  # more than one batch of a thousand
    assert [info.key for info in store.list("checkpoints/")] == keys[-10:]


def test_a_listing_is_sorted_by_whole_key_and_keeps_to_its_prefix(store: ObjectStore) -> None:
    keys = ["a-b", "a/b", "a/b-c", "a/c", "a0", "b/a", "a/b.d/x", "a/b0"]
    for number, key in enumerate(keys):
        store.put(key, b"x" * number)
    assert [info.key for info in store.list("")] == sorted(keys)
    assert [info.key for info in store.list("a/b")] == ["a/b", "a/b-c", "a/b.d/x", "a/b0"]
    assert {info.key: info.size for info in store.list("a/")} == {key: keys.index(key) for key in keys if key.startswith("a/")}


ODD = [
    "a b/c d",
    "run.v1.2/x",
    "тест/日本",
    "-dash",
    "per%41cent",
    "plus+sign",
    "hash#tag",
    "quote'\"",
    "q?x=1&y",
    "~tilde",
    "~~",
]


@pytest.mark.parametrize("key", ODD)
def test_odd_names_are_kept_as_they_are(store: ObjectStore, tmp_path: Path, key: str) -> None:
    store.put(key, b"odd")
    (tmp_path / "source").write_bytes(b"odder")
    store.put_file(key + "2", tmp_path / "source")
    assert store.get(key, limit=10) == b"odd"
    assert [info.key for info in store.list(key)] == [key, key + "2"]
    store.delete([key])
    assert store.size(key) is None


BAD = [
    "",
    "/etc/passwd",
    "../x",
    "a/../../x",
    "a/./b",
    "a//b",
    "a/",
    "a\nb",
    "a\0b",
    "a\\b",
    "\x7f",
    ".x.1.tmp",
    "a/" + "x" * 300,
    "x/" * 600 + "x",
]


@pytest.mark.parametrize("key", BAD)
def test_a_key_that_could_leave_the_store_is_refused(store: ObjectStore, tmp_path: Path, key: str) -> None:
    (tmp_path / "source").write_bytes(b"x")
    calls: list[Callable[[], object]] = [
        lambda: store.put(key, b"x"),
        lambda: store.put(key, b"x", if_absent=True),
        lambda: store.put_file(key, tmp_path / "source"),
        lambda: store.get(key, limit=1),
        lambda: store.get_range(key, 0, 1),
        lambda: store.size(key),
        lambda: store.delete([key]),
    ]
    for call in calls:
        with pytest.raises(StoreError, match="key") as caught:
            call()
        assert not caught.value.retryable


@pytest.mark.parametrize("at", ["checkpoints", "checkpoints/one", "checkpoints/one/rank-00000.pack", "run.json"])
def test_a_link_below_a_store_folder_is_refused_and_what_it_names_left_alone(tmp_path: Path, at: str) -> None:
    """Somebody else's, on a share; the root may be one, which the user chose."""
    (tmp_path / "disk").mkdir()
    (tmp_path / "store").symlink_to(tmp_path / "disk")
    store, outside = FolderStore(tmp_path / "store"), tmp_path / "outside"
    key = at if at.endswith((".pack", ".json")) else f"{at}/one/x"
    (outside / "one").mkdir(parents=True)
    (outside / "one" / "x").write_bytes(b"mine")
    (outside / "file").write_bytes(b"mine")
    assert store.put(key, b"ours")
    assert [info.key for info in store.list("")] == [key]
    link = tmp_path / "disk" / at
    shutil.rmtree(link) if link.is_dir() else link.unlink()
    link.symlink_to(outside / "file" if key == at else outside)
    for call in (
        lambda: store.put(key, b"theirs"),
        lambda: store.put(key, b"theirs", if_absent=True),
        lambda: store.put_file(key, outside / "file"),
        lambda: store.get(key, limit=10),
        lambda: store.get_range(key, 0, 4),
        lambda: store.size(key),
        lambda: store.delete([key]),
        lambda: list(store.list("")),
        lambda: list(store.list(f"{at.partition('/')[0]}/" if "/" in key else "")),
        lambda: store.abort_uploads("", 0),
    ):
        with pytest.raises(StoreError, match=f"{re.escape(str(tmp_path / 'store' / at))} is a symbolic link") as caught:
            call()
        assert not caught.value.retryable
    assert {path: path.read_bytes() for path in outside.rglob("*") if path.is_file()} == {
        outside / "file": b"mine", outside / "one" / "x": b"mine"
    }  # fmt: skip


def test_a_stopped_upload_leaves_no_object_and_the_next_one_finishes(store: ObjectStore, tmp_path: Path) -> None:
    data, sent = content(10 * PART), [0]
    (tmp_path / "source").write_bytes(data)
    with pytest.raises(TransferStopped) as caught:
        store.put_file("x", tmp_path / "source", progress=lambda n: sent.append(n), should_stop=lambda: sum(sent) > 0)
    assert caught.value.retryable
    assert store.size("x") is None
    store.put_file("x", tmp_path / "source")
    assert store.get("x", limit=11 * PART) == data


def test_a_file_that_shrinks_on_the_way_is_not_stored(store: ObjectStore, tmp_path: Path) -> None:
    source = tmp_path / "source"
    source.write_bytes(content(8 * PART))
    with pytest.raises(StoreError, match="changed"):
        store.put_file("x", source, progress=lambda _: source.write_bytes(b"gone"))
    assert store.size("x") is None


def test_an_unfinished_upload_is_seen_and_dropped_only_when_old_and_below_the_prefix(
    store: ObjectStore, tmp_path: Path
) -> None:
    for key in ("checkpoints/1/a", "other/b"):
        _leave_unfinished(store, key, tmp_path)
    assert sorted(upload.key.split("/")[0] for upload in store.list_uploads("")) == ["checkpoints", "other"]
    assert store.abort_uploads("checkpoints/", older_than_secs=3600) == 0
    assert store.abort_uploads("checkpoints/", older_than_secs=-5) == 1
    assert [upload.key.split("/")[0] for upload in store.list_uploads("")] == ["other"]


def _leave_unfinished(store: ObjectStore, key: str, tmp_path: Path) -> None:
    if isinstance(store, FolderStore):
        path = store.root / key
        path.parent.mkdir(parents=True)
        path.with_name(f".{path.name}.1-00.tmp").write_bytes(b"half")
        return
    (tmp_path / "half").write_bytes(content(3 * PART))
    started = time.monotonic()
    with pytest.raises(TransferStopped):
        store.put_file(key, tmp_path / "half", should_stop=lambda: time.monotonic() > started)
