"""A pull that dies is gone on with: what arrived is not fetched again, unless it is not what it should be."""

import json
import shutil
import signal
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import msgspec
from storage.proxy import proxy_to

from perdure.training.run_dir import RunDir
from perdure.training.travel.pull import pull
from perdure.training.travel.push import push

MadeRun = Any
MIB = 1 << 20


def test_a_killed_pull_fetches_only_what_is_missing_or_wrong(
    open_s3: Callable[..., Any], s3_keys: Any, made: MadeRun, tmp_path: Path
) -> None:
    store, name = open_s3(), made.commit(100, 1, pack=32 * MIB)  # four blobs, in two parts at once
    push(made.dir, store, name)
    cut, wrong = RunDir(tmp_path / "cut"), RunDir(tmp_path / "wrong")
    settings = json.dumps(msgspec.structs.asdict(store.settings))
    command = [sys.executable, str(Path(__file__).with_name("mover.py")), "pull", store.url, settings, str(cut.root)]
    done = subprocess.run([*command, str(25 * MIB)], capture_output=True)  # the first blob of each part is there
    assert done.returncode == -signal.SIGKILL, done.stderr.decode()
    assert not cut.run_json.exists()
    shutil.copytree(cut.root, wrong.root)
    (partial,) = wrong.root.rglob("*.partial.tmp")
    with open(partial, "r+b") as file:
        first = file.read(1)[0]
        file.seek(0)
        file.write(bytes([first ^ 1]))
    for run, least, most in ((cut, 0, 16 * MIB), (wrong, 8 * MIB, 24 * MIB)):
        with proxy_to(s3_keys.endpoint) as proxy:
            prefix = store.url.removeprefix("s3://ckpt/")
            assert pull(open_s3(prefix=prefix, endpoint=proxy.endpoint), run) == name
        assert least <= proxy.fetched(".pack") <= most
        assert proxy.fetched(".index") == 0
        for file in ("rank-00000.pack", "rank-00000.index", "manifest.json"):
            assert (run.checkpoint(name) / file).read_bytes() == (made.dir.checkpoint(name) / file).read_bytes()
        assert not list(run.root.rglob("*.tmp"))
