"""Locks of torch extensions: one whose builder was killed is removed, one that is held is not."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

from perdure.training.agent import extension_locks

BUILDER = "import os, sys, time; os.open(sys.argv[1], os.O_CREAT | os.O_EXCL); print(flush=True); time.sleep(600)"
"""As torch's FileBaton."""


def test_a_killed_builders_lock_is_removed_and_a_living_ones_is_not(tmp_path: Path) -> None:
    locks = [tmp_path / "py311_cpu" / name / "lock" for name in ("killed", "building")]
    builders = []
    for lock in locks:
        lock.parent.mkdir(parents=True)
        builders.append(subprocess.Popen([sys.executable, "-c", BUILDER, lock], stdout=subprocess.PIPE))
    try:
        for builder in builders:
            assert builder.stdout is not None
            builder.stdout.readline()
        assert extension_locks.clear(tmp_path) == ([], [])
        builders[0].kill()
        builders[0].wait()
        assert [lock.path for lock in extension_locks.find(tmp_path)[0]] == [locks[0]]
        assert extension_locks.clear(tmp_path) == ([locks[0]], [])
        assert [lock.exists() for lock in locks] == [False, True]
    finally:
        for builder in builders:
            builder.kill()
            builder.communicate()


def test_a_lock_of_somebody_else_is_left_alone(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """What other users' processes hold cannot be seen."""
    lock = tmp_path / "op" / "lock"
    lock.parent.mkdir()
    lock.touch()
    own = os.geteuid()
    monkeypatch.setattr(os, "geteuid", lambda: own + 1)
    assert extension_locks.clear(tmp_path) == ([], [lock])
    assert lock.exists()


def test_the_cache_is_that_of_the_ranks_environment(tmp_path: Path) -> None:
    assert extension_locks.cache_of({"TORCH_EXTENSIONS_DIR": "/x", "XDG_CACHE_HOME": "/y"}) == Path("/x")
    assert extension_locks.cache_of({"XDG_CACHE_HOME": "/y"}) == Path("/y/torch_extensions")
