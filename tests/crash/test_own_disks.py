"""Two nodes with a disk each and a store between them: either is lost with its disk, and a bare one goes on from the store."""

import re
import shutil
import time
from pathlib import Path

import pytest
from harness import PATIENCE, Direct, Run, wait_until
from many_ranks import SLOW, OwnDisks, ranks_run, surviving, tracing

from perdure.training.checkpoint import catalog, facts, manifest
from perdure.training.checkpoint.parted import is_part
from perdure.training.checkpoint.verify import verify_in_run
from perdure.training.run_dir import CheckpointName


@pytest.fixture(scope="module")
def reference(tmp_path_factory: pytest.TempPathFactory) -> Run:
    run = ranks_run(tmp_path_factory.mktemp("reference"), "fsdp2")
    assert Direct(run).train_to_end([tracing(run)]).reason == "complete"
    return run


def packs(run: Run, name: CheckpointName) -> list[str]:
    return sorted(path.name for path in run.dir.checkpoint(name).glob("*.pack"))


def test_each_node_is_lost_with_its_disk_and_a_bare_one_reads_its_share(reference: Run, tmp_path: Path) -> None:
    disks = OwnDisks(tmp_path, "fsdp2", (tmp_path / "store").as_uri(), "launch.address=127.0.0.1")
    run = disks.zero
    node, direct = disks.node(), Direct(run)
    trainer = direct.launch([tracing(run), *run.held_at(8)])
    run.wait_until_held()
    wait_until(run.committed, "a checkpoint")
    node.lose(1)
    shutil.rmtree(disks.one.dir.root)
    trainer.process.wait(PATIENCE)
    end = direct.end()
    assert (end.reason, end.error_class) == ("failed", "infrastructure")
    name = run.committed()[0]
    assert name.step == 6
    assert packs(run, name) == ["rank-00000.pack"]
    assert is_part(run.dir, name)
    assert facts.trust(run.dir, name) == "replicated"
    assert verify_in_run(run.dir, name) == []

    node, direct = disks.node(), Direct(run)
    at = 16
    trainer = direct.launch([tracing(run), *run.held_at(14, at)])
    run.wait_until_held()
    wait_until(lambda: run.committed()[-1].step >= 12, "step 12: from here on there are free slots")
    told = re.search(
        r"rank 1 read (\d+) bytes of checkpoint \S+ from the store, which has (\d+)",
        (disks.one.dir.logs(2, 1) / "agent.log").read_text(),
    )
    assert told
    assert 0 < int(told[1]) < int(told[2]) * 0.7, "its share, and what is rank 0's alone is not"
    run.go_on_until_held()
    node.kill_rank(2)
    trainer.process.wait(PATIENCE)
    end = direct.end()
    assert re.fullmatch(r"node 1 \(.+\): rank 1 was killed by SIGKILL", end.detail), end
    saved = run.committed()[-1]
    assert saved.step >= at - 1, "no finished step of which both nodes have a snapshot is lost"
    shutil.rmtree(run.dir.root)

    assert Direct(run).train_to_end([tracing(run)]).reason == "complete"
    assert node.process.wait(PATIENCE) == 0, node.log()
    assert "is finished: step 24" in node.log()
    assert run.digest() == reference.digest()
    assert surviving(run) == surviving(reference)
    assert saved in run.committed()
    assert not packs(run, saved), "nothing of it was brought here"
    assert manifest.read(run.dir.checkpoint(run.committed()[-1])).world["size"] == 2
    assert catalog.leftovers(run.dir) == []


@pytest.mark.chaos
def test_a_store_that_is_away_for_longer_than_a_node_may_be_silent_ends_nothing(reference: Run, tmp_path: Path) -> None:
    store, own = tmp_path / "store", ("launch.address=127.0.0.1", "launch.node_timeout=5")
    disks = OwnDisks(tmp_path, "fsdp2", store.as_uri(), *own)
    run = disks.zero
    node, direct = disks.node(), Direct(run)
    trainer = direct.launch([SLOW, tracing(run), *run.held_at(8)])
    run.wait_until_held()
    wait_until(run.committed, "a checkpoint")
    away = store.rename(tmp_path / "away")
    store.write_bytes(b"no folder")
    wait_until(lambda: any("cannot hear each other" in str(event.get("text")) for event in run.events()), "it is said")
    run.go_on()
    wait_until(lambda: run.step() >= 13, "training goes on")
    time.sleep(6)  # more than launch.node_timeout
    assert trainer.is_alive()
    assert run.committed()[-1].step < 12
    store.unlink()
    away.rename(store)
    trainer.process.wait(PATIENCE)
    assert direct.end().reason == "complete"
    assert node.process.wait(PATIENCE) == 0, node.log()
    assert run.digest() == reference.digest()
    assert [name.token for name in run.committed()] == [1] * len(run.committed())
    assert "the nodes hear each other again" in [event.get("text") for event in run.events()]
