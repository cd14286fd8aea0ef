"""A checkpoint of two nodes: what all ranks have in common is stored once, all else by each rank, and it is there when both
have written, or not at all."""

import os
import shutil
import signal
import threading
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from snapshots import RUN_ID
from two_nodes import rank, share

from perdure.training import files
from perdure.training.checkpoint import manifest as manifests
from perdure.training.checkpoint import nodes
from perdure.training.checkpoint.manifest import Manifest
from perdure.training.checkpoint.reader import open_checkpoint
from perdure.training.checkpoint.shared import parts
from perdure.training.checkpoint.verify import verify_folder
from perdure.training.checkpoint.writer import write_checkpoint
from perdure.training.errors import CheckpointDamaged
from perdure.training.run_dir import CheckpointName, RunDir


def commit(run: RunDir, name: CheckpointName, *, full: bool = True) -> Manifest:
    with ThreadPoolExecutor() as pool:
        zero, one = pool.map(lambda number: share(run, number, name, full=full), (0, 1))
    assert one is None
    assert zero is not None
    return zero


def test_two_nodes_store_what_one_with_all_the_ranks_would(run: RunDir, tmp_path: Path) -> None:
    name = CheckpointName(2, 1)
    found = commit(run, name)
    alone = RunDir(tmp_path / "alone")
    files.make_dirs(alone.checkpoints)
    ranks: list[object] = [rank(number, 2) for number in range(4)]
    wanted = write_checkpoint(alone, RUN_ID, name, parts(ranks, 1), encoding="auto", threads=1)  # type: ignore[arg-type]  # sources
    assert (found.state_digest, found.raw_bytes, found.data) == (wanted.state_digest, wanted.raw_bytes, wanted.data)
    assert verify_folder(run.checkpoint(name)) == []
    assert {path.suffix for path in run.checkpoint(name).iterdir()} == {".pack", ".index", ".json"}, "what they told is gone"
    with open_checkpoint(run.checkpoint(name)) as reader:
        sizes = [sum(entry.nbytes for at in (0, 1) for entry in reader.rank_entries(node + at).values()) for node in (0, 2)]
        assert max(sizes) < 600_000, "nobody stores all of the 780 kB"
        for number in range(4):
            state = reader.state(number)
            owner, _ = state["node"]
            assert bytes(reader.read("node", owner))[:4] == np.float32(number // 2).tobytes()
            assert state["model"][0] == 0, "what is small or plain is in the first node's"
            assert {"model/master", "model/half", "rng/cpu"} <= set(state)


def test_both_write_against_the_same_base_and_find_their_leaves_there(run: RunDir) -> None:
    full = commit(run, CheckpointName(2, 1))
    files.make_dirs(run.launches)
    increment = commit(run, CheckpointName(4, 1), full=False)
    assert increment.base is None, "without a launch record there is no lineage, so no base"
    run.launch_record(1).write_text(
        f'{{"token":1,"resumed_from":null,"created":0,"host":"","pid":1,"run":"{RUN_ID}","owner":""}}'
    )
    increment = commit(run, CheckpointName(6, 1), full=False)
    assert increment.base_name == CheckpointName(4, 1)
    assert increment.stored_bytes < full.stored_bytes / 5
    assert verify_folder(run.checkpoint(increment.name)) == []


def test_a_node_that_was_killed_writes_again_and_the_same_comes_out(run: RunDir, tmp_path: Path) -> None:
    name = CheckpointName(2, 1)
    wanted = commit(run, name)
    pieces = shutil.copytree(run.checkpoint(name), tmp_path / "pieces")
    shutil.rmtree(run.checkpoint(name))
    with ThreadPoolExecutor() as pool:
        one = pool.submit(share, run, 1, name)
        while not run.offer(name, 1).exists():
            pass
        (run.checkpoint(name) / ".rank-00001.pack.1-1.tmp").write_bytes(b"torn")
        (run.checkpoint(name) / "rank-00000.pack").write_bytes((pieces / "rank-00000.pack").read_bytes()[:100])
        found = share(run, 0, name)
        assert one.result(60) is None
    assert found is not None
    assert found.files == wanted.files
    assert not (run.checkpoint(name) / ".rank-00001.pack.1-1.tmp").exists()
    assert share(run, 0, name) == manifests.read(run.checkpoint(name)), "asked again after the commit"
    assert share(run, 1, name) is None


def test_a_node_that_is_asked_again_while_node_0_commits_has_nothing_to_do(
    run: RunDir, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its saver died once it had told its part; node 0 commits, and removes what they told, between two looks of the next."""
    name, go_on, written = CheckpointName(2, 1), threading.Event(), threading.Event()
    make, look = nodes.make_manifest, manifests.is_committed

    def held(*arguments: Any) -> Manifest:
        written.set()
        assert go_on.wait(60)
        return make(*arguments)

    monkeypatch.setattr(nodes, "make_manifest", held)
    with ThreadPoolExecutor() as pool:
        zero = pool.submit(share, run, 0, name)
        assert share(run, 1, name) is None
        assert written.wait(60)

        def late(run: RunDir, name: CheckpointName) -> bool:
            found = look(run, name)
            monkeypatch.setattr(manifests, "is_committed", look)
            go_on.set()
            zero.result(60)
            return found

        def never(path: Path, _: object) -> None:
            raise AssertionError(f"it waits for {path}, which nobody writes again")

        monkeypatch.setattr(manifests, "is_committed", late)
        monkeypatch.setattr(nodes, "_await", never)
        try:
            assert share(run, 1, name) is None
        finally:
            go_on.set()
    assert {path.suffix for path in run.checkpoint(name).iterdir()} == {".pack", ".index", ".json"}


@pytest.mark.parametrize("victim", [0, 1])
def test_a_node_killed_before_each_disk_call_goes_on_and_the_same_comes_out(
    run: RunDir, order: Callable[..., int], victim: int
) -> None:
    name = CheckpointName(4, 1)
    wanted = commit(run, name).files
    shutil.rmtree(run.checkpoint(name))
    for number in range(1, 99):
        with ThreadPoolExecutor() as pool:
            other = pool.submit(share, run, 1 - victim, name)
            status = order(run, f"saver:kill:{number}", act="share", seed=victim)
            if status:
                assert status == -signal.SIGKILL
                assert order(run, act="share", seed=victim) == 0
            other.result(60)
        assert verify_folder(run.checkpoint(name)) == []
        assert manifests.read(run.checkpoint(name)).files == wanted
        assert {path.suffix for path in run.checkpoint(name).iterdir()} == {".pack", ".index", ".json"}, number
        if status == 0:
            break
        shutil.rmtree(run.checkpoint(name))
    assert 15 < number < 98


def test_a_part_that_is_not_what_its_node_has_written_is_never_committed(run: RunDir) -> None:
    name, other = CheckpointName(2, 1), CheckpointName(2, 2)
    commit_first = ThreadPoolExecutor()
    with commit_first as pool:
        one = pool.submit(share, run, 1, name)
        zero = pool.submit(share, run, 0, other)
        for number, theirs, ours in ((0, other, name), (1, name, other)):
            while not run.offer(theirs, number).exists():
                pass
            run.offer(ours, number).parent.mkdir(parents=True, exist_ok=True)
            os.link(run.offer(theirs, number), run.offer(ours, number))  # whole at once, as all they tell is
        one.result(60)
        os.link(run.part(name, 1), run.part(other, 1))
        with pytest.raises(CheckpointDamaged, match="is of checkpoint 000000000002-0001"):
            zero.result(60)
    assert not manifests.is_committed(run, other)
    assert not manifests.is_committed(run, name)
