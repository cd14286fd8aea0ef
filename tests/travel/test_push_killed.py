"""push is killed before each of its calls to the store in turn: the store never shows half a checkpoint."""

import json
import os
import shutil
import signal
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

import msgspec
import pytest
from storage.proxy import proxy_to

from perdure.training import files
from perdure.training.run_dir import MANIFEST, CheckpointName, RunDir, rank_index, rank_pack
from perdure.training.storage.s3 import S3Store
from perdure.training.storage.store import ObjectStore
from perdure.training.travel.pull import pull
from perdure.training.travel.push import push

MadeRun = Any


def push_killed_at(call: int, store: ObjectStore, run: RunDir, name: CheckpointName) -> int:
    """Exit status of a push that dies before its `call`-th call; 0 when it makes fewer."""
    settings = json.dumps(msgspec.structs.asdict(store.settings))
    command = [sys.executable, str(Path(__file__).with_name("mover.py")), "push", store.url, settings, str(run.root), str(name)]
    done = subprocess.run(command, env={**os.environ, "PERDURE_FAIL": f"push:kill:{call}"}, capture_output=True)
    assert done.returncode in (0, -signal.SIGKILL), done.stderr.decode()
    return done.returncode


def test_killed_anywhere_another_machine_gets_the_old_or_the_new_and_the_next_push_finishes(
    store: ObjectStore, made: MadeRun, tmp_path: Path
) -> None:
    old, new = made.commit(100, 1), made.commit(200, 1, pack=(6 << 20) if store.url.startswith("s3") else 3000)
    push(made.dir, store, old)
    before = tmp_path / "before"
    shutil.copytree(made.dir.root, before)
    call, pulled = 0, []
    while True:
        call += 1
        status = push_killed_at(call, store, made.dir, new)
        elsewhere = RunDir(tmp_path / f"machine-{call}")
        pulled.append(pull(store, elsewhere))
        for file in ("rank-00000.pack", "rank-00000.index", "manifest.json"):
            name = pulled[-1]
            assert (elsewhere.checkpoint(name) / file).read_bytes() == (made.dir.checkpoint(name) / file).read_bytes()
        shutil.rmtree(elsewhere.root)
        if status == 0:
            break
        if call % 4 == 0 or pulled[-1] == new:  # and the next push finishes what was begun
            push(made.dir, store, new)
            assert pull(store, elsewhere) == new
            shutil.rmtree(elsewhere.root)
        store.delete([info.key for info in store.list(RunDir.checkpoint_key(new, ""))])
        store.abort_uploads("", older_than_secs=-5)
        shutil.rmtree(made.dir.root)
        shutil.copytree(before, made.dir.root)
    assert pulled[0] == old
    assert pulled[-1] == new
    assert pulled == sorted(pulled)  # once the manifest is there it stays
    assert len(pulled) > 10


def test_killed_around_a_copy_in_place_nothing_is_named_before_it_is_where_it_belongs(
    open_s3: Callable[..., S3Store], made: MadeRun, monkeypatch: pytest.MonkeyPatch
) -> None:
    name, calls = made.commit(100, 1), list[str]()
    files_of = [RunDir.checkpoint_key(name, file) for file in (rank_pack(0), rank_index(0))]
    with monkeypatch.context() as patched:
        patched.setattr(files, "fail_point", lambda call, _: calls.append(call))
        push(made.dir, open_s3(storage_class="GLACIER"), name)
    copies = [number for number, call in enumerate(calls, start=1) if call == "s3:copy"]
    assert len(copies) == len(files_of)
    for call in (copies[0], copies[0] + 1, copies[-1], copies[-1] + 2):
        made.dir.fact(name, "store").unlink()
        store = open_s3(storage_class="GLACIER")
        assert push_killed_at(call, store, made.dir, name) != 0

        def settled(store: S3Store = store) -> list[str]:
            heads = [store.head(key) or {} for key in files_of]
            return [str(head.get("StorageClass", "")) for head in heads]

        if store.size(RunDir.checkpoint_key(name, MANIFEST)) is not None:
            assert settled() == ["GLACIER"] * 2
        assert push(made.dir, store, name).storage_class == "GLACIER"
        assert settled() == ["GLACIER"] * 2
        for key in files_of:
            assert store.get(key, limit=1 << 20) == (made.dir.root / key).read_bytes()


def test_the_manifest_is_sent_after_everything_it_names(open_s3: Callable[..., Any], s3_keys: Any, made: MadeRun) -> None:
    name = made.commit(100, 1, pack=11 << 20, ranks=3)
    with proxy_to(s3_keys.endpoint) as proxy:
        push(made.dir, open_s3(endpoint=proxy.endpoint), name)
        done = [urlsplit(seen.path).path.rpartition("/")[2] for seen in proxy.log if seen.operation in ("put", "complete")]
    assert done[:2] == ["run.json", "0001.json"]
    assert sorted(done[2:8]) == sorted(f"rank-{rank:05d}.{part}" for rank in range(3) for part in ("pack", "index"))
    assert done[8:] == ["manifest.json", "check.json"]
