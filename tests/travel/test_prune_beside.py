"""Prune in the middle of a push, a pull, saves and another prune: what is kept restores, what travels arrives whole."""

import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from snapshots import Source, random_bytes
from upkeep_runs import keep, prune_all

from perdure.training.agent import lock
from perdure.training.checkpoint import prune
from perdure.training.checkpoint.increment import choose_base
from perdure.training.checkpoint.lineage import committed
from perdure.training.checkpoint.rollup import roll_up
from perdure.training.checkpoint.upkeep import try_upkeep
from perdure.training.checkpoint.verify import verify_folder
from perdure.training.run_dir import CheckpointName, RunDir
from perdure.training.storage.folder import FolderStore
from perdure.training.travel.copies import Stored, check
from perdure.training.travel.pull import pull
from perdure.training.travel.push import push


class Interrupted(FolderStore):
    """Does something else in the middle of each transfer, once it has begun."""

    def __init__(self, root: Path, meanwhile: Callable[[], object]) -> None:
        super().__init__(root)
        self.meanwhile, self.times, self.one = meanwhile, 0, threading.Lock()

    def put_file(self, key: str, path: Path, **more: Any) -> None:
        self._do()
        super().put_file(key, path, **more)

    def get(self, key: str, *, limit: int) -> bytes:
        if key.endswith((".pack", ".index")):
            self._do()
        return super().get(key, limit=limit)

    def get_range(self, key: str, offset: int, length: int) -> bytes:
        self._do()
        return super().get_range(key, offset, length)

    def _do(self) -> None:
        with self.one:  # transfers run in several threads
            self.times += 1
            self.meanwhile()


def test_what_is_being_pushed_and_its_base_arrive_whole_though_retention_lets_them_go(made: Any, tmp_path: Path) -> None:
    leaves = [Source(step).tensor("a", "uint8", (5000,), random_bytes("same", 5000)) for step in (100, 200)]
    base = made.write(CheckpointName(100, 1), leaves[0])
    increment = made.write(CheckpointName(200, 1), leaves[1], base=base)
    made.commit(300, 1)
    store = Interrupted(tmp_path / "store", lambda: prune_all(made.dir, 1))
    push(made.dir, store, increment)
    assert store.times > 0
    assert committed(made.dir) == [base, increment, CheckpointName(300, 1)]
    for name in (base, increment):
        assert check(Stored(store), None, name, made.id).good
    prune_all(made.dir, 1)
    assert committed(made.dir) == [CheckpointName(300, 1)]


def test_a_checkpoint_that_is_being_pulled_arrives_whole_beside_a_prune(made: Any, elsewhere: RunDir, tmp_path: Path) -> None:
    """A pull holds the run's lock, as `perdure pull` does."""
    name = made.commit(100, 1)
    push(made.dir, FolderStore(tmp_path / "store"), name)

    def prune_there() -> None:
        with try_upkeep(elsewhere) as ours:
            assert ours
            found = prune.survey(elsewhere, keep(1), stored=True, is_idle=lambda: not lock.is_held(elsewhere))
            prune.execute(elsewhere, found)

    elsewhere.root.mkdir(parents=True)
    store = Interrupted(tmp_path / "store", prune_there)
    with lock.RunLock.acquire(elsewhere, 0):
        assert pull(store, elsewhere) == name
    assert store.times > 0
    assert verify_folder(elsewhere.checkpoint(name)) == []


@pytest.mark.parametrize("rolling", [False, True])
def test_saves_and_two_prunes_at_once_lose_nothing_that_is_kept(made: Any, rolling: bool) -> None:
    """One writes increments of the newest full; two delete all but the newest, as often as they can."""
    written: list[CheckpointName] = [made.commit(100, 1)]
    over = threading.Event()
    problems: list[BaseException] = []

    def deleting() -> None:
        try:
            while not over.is_set():
                with try_upkeep(made.dir) as ours:
                    if ours:
                        found = prune.survey(made.dir, keep(1), stored=False, is_idle=lambda: False, may_roll_up=rolling)
                        prune.execute(made.dir, found, roll_up=roll_up if rolling else None)
        except BaseException as error:
            problems.append(error)
            raise

    threads = [threading.Thread(target=deleting) for _ in range(2)]
    for thread in threads:
        thread.start()
    try:
        for step in range(110, 400, 10):
            source = Source(step).tensor("a", "uint8", (3000,), random_bytes("same", 3000))
            base = None if step % 50 == 0 else choose_base(made.dir)
            written.append(made.write(CheckpointName(step, 1), source, base=base))
    finally:
        over.set()
        for thread in threads:
            thread.join()
    assert problems == []
    prune_all(made.dir, 1)
    left = committed(made.dir)
    assert left[-1] == written[-1]
    assert all(verify_folder(made.dir.checkpoint(name)) == [] for name in left)
    assert len(left) <= 2
