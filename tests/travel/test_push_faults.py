"""Wrong bytes in the store or on the way are found by reading back, before a manifest vouches for them."""

import os
import time
from collections.abc import Callable
from email.utils import formatdate
from typing import Any

import pytest
from storage.proxy import Reply, proxy_to

from perdure.training.errors import StoreError
from perdure.training.run_dir import RunDir
from perdure.training.storage.folder import FolderStore
from perdure.training.travel.contents import remote_checkpoints
from perdure.training.travel.pull import pull
from perdure.training.travel.push import push

MadeRun = Any


class DamagingStore(FolderStore):
    """A real folder whose disk turns one bit of every pack, keeping its size."""

    damaging = True

    def put_file(self, key: str, path: Any, **options: Any) -> None:
        super().put_file(key, path, **options)
        if self.damaging and key.endswith(".pack"):
            stored = self.root / key
            stored.write_bytes(bytes([stored.read_bytes()[0] ^ 1]) + stored.read_bytes()[1:])


def test_a_wrong_byte_of_the_right_size_is_found_and_healed_by_the_next_push(
    made: MadeRun, elsewhere: RunDir, tmp_path: Any
) -> None:
    store, name = DamagingStore(tmp_path / "store"), made.commit(100, 1)
    with pytest.raises(StoreError, match="other bytes are read back") as caught:
        push(made.dir, store, name)
    assert caught.value.retryable
    assert remote_checkpoints(store) == []
    store.damaging = False
    push(made.dir, store, name)
    assert pull(store, elsewhere) == name


def test_a_key_that_may_not_delete_is_enough_to_push(
    open_s3: Callable[..., Any], s3_keys: Any, made: MadeRun, elsewhere: RunDir
) -> None:
    store, name = open_s3(keys=s3_keys.no_delete), made.commit(100, 1, pack=11 << 20)
    push(made.dir, store, name)
    prefix = store.url.removeprefix("s3://ckpt/")
    assert pull(open_s3(prefix=prefix, keys=s3_keys.read_only), elsewhere) == name


def test_push_sweeps_uploads_that_nobody_came_back_to_for_a_week(
    open_s3: Callable[..., Any], s3_keys: Any, made: MadeRun
) -> None:
    days, name = [0], made.commit(100, 1)
    later = lambda seen: Reply(answer_headers={"Date": formatdate(time.time() + days[0] * 86400, usegmt=True)})  # noqa: E731
    with proxy_to(s3_keys.endpoint, later) as proxy:
        store = open_s3(endpoint=proxy.endpoint)
        for key in ("checkpoints/old/rank-00000.pack", "elsewhere"):
            store.raw("create_multipart_upload", key, Key=store.full_key(key))
        for days[0], left in ((6, {"checkpoints/old/rank-00000.pack", "elsewhere"}), (8, {"elsewhere"})):
            push(made.dir, store, name)
            assert {upload.key for upload in store.list_uploads("")} == left


def test_push_sweeps_copies_that_nobody_came_back_to_for_a_week(folder_store: FolderStore, made: MadeRun) -> None:
    name, cut = made.commit(100, 1), folder_store.root / "checkpoints/.rank-00000.pack.1-00000000.tmp"
    cut.parent.mkdir(parents=True)
    cut.write_bytes(b"half")
    for days, left in ((6, True), (8, False)):
        os.utime(cut, (time.time() - days * 86400,) * 2)
        push(made.dir, folder_store, name)
        assert cut.exists() == left


def test_odd_paths_make_no_difference(make_run: Callable[..., MadeRun], tmp_path: Any) -> None:
    made = make_run("a b/тест 日本/run.v1.2/-dash %41+#'")
    made.launch(1)
    name, store = made.commit(100, 1), FolderStore(tmp_path / "c d" / "%2e+#'")
    push(made.dir, store, name)
    before = sorted(path.name for path in tmp_path.iterdir())
    assert pull(store, RunDir(tmp_path / "x" / "é y")) == name
    assert sorted(path.name for path in tmp_path.iterdir()) == sorted([*before, "x"])
