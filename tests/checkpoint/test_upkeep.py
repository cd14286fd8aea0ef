"""Bases: what is deleted, rolled up and written against in any order leaves every kept checkpoint restorable to its digest."""

import shutil
import tempfile
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from snapshots import Source, random_bytes, write
from upkeep_runs import keep, launch, left, name, needed, prune_all, used

from perdure.training.checkpoint import manifest as manifests
from perdure.training.checkpoint import prune
from perdure.training.checkpoint.catalog import list_checkpoints
from perdure.training.checkpoint.increment import choose_base, opened_base
from perdure.training.checkpoint.lineage import committed
from perdure.training.checkpoint.manifest import Manifest
from perdure.training.checkpoint.reader import open_checkpoint
from perdure.training.checkpoint.rollup import roll_up
from perdure.training.checkpoint.upkeep import upkeep
from perdure.training.checkpoint.verify import check, verify_folder
from perdure.training.run_dir import CheckpointName, RunDir

Order = Callable[..., int]


def state(step: int) -> Source:
    """A frozen leaf, one that moves a little, one that is new each time."""
    master = np.random.default_rng(1).normal(0, 0.02, 3000).astype(np.float32)
    master[:20] += np.float32(step * 1e-5)
    source = Source(step).tensor("frozen", "uint8", (6000,), random_bytes("f", 6000)).array("master", master)
    return source.tensor("fresh", "uint8", (700,), random_bytes(step, 700))


def save(run: RunDir, step: int, base: CheckpointName | None = None, *, proven: bool = True) -> Manifest:
    found = write(run, state(step), base=base)
    assert found.base_name == base
    if proven:
        assert check(run, name(step)).result == "good"
    return found


def restores(run: RunDir, one: CheckpointName, digest: str) -> None:
    """Verified, and the content is what was written."""
    assert verify_folder(run.checkpoint(one)) == []
    with open_checkpoint(run.checkpoint(one)) as reader:
        assert reader.manifest.state_digest == digest
        assert {path: bytes(reader.read(path)) for path in reader.entries} == state(one.step).bytes


@pytest.fixture
def chain(run: RunDir) -> RunDir:
    """Case U1: full 10, increments 12, 14 and 16 of it."""
    launch(run, 1)
    save(run, 10)
    for step in (12, 14, 16):
        save(run, step, name(10))
    return run


def test_the_base_of_what_is_kept_is_kept_and_the_bytes_freed_are_exact(chain: RunDir) -> None:
    digest = manifests.read(chain.checkpoint(name(16))).state_digest
    gone = [sum(path.stat().st_size for path in chain.checkpoint(name(step)).iterdir()) for step in (12, 14)]
    before = used(chain)
    done = prune_all(chain, 1)
    assert left(chain) == [10, 16]
    assert before - used(chain) == done.freed == sum(gone)
    assert used(chain) == needed(chain)
    restores(chain, name(16), digest)


def test_killed_at_any_call_nothing_kept_loses_its_base_and_no_byte_stays_behind(
    chain: RunDir, tmp_path: Path, order_upkeep: Order
) -> None:
    """Case U3, of increments: a new full lets all four go, increments first."""
    save(chain, 20)
    digest = manifests.read(chain.checkpoint(name(20))).state_digest
    shutil.copytree(chain.root, tmp_path / "pristine")
    for number in range(1, 200):
        status = order_upkeep(chain, f"prune:kill:{number}")
        for one in list_checkpoints(chain):
            assert verify_folder(chain.checkpoint(one.name)) == []
            assert one.base is None or one.base in committed(chain)
        assert order_upkeep(chain) == 0
        assert left(chain) == [20]
        assert used(chain) == needed(chain)
        if status == 0:
            break
        assert status == -9
        shutil.rmtree(chain.root)
        shutil.copytree(tmp_path / "pristine", chain.root)
    restores(chain, name(20), digest)
    assert 20 < number < 199


def test_a_base_that_is_written_against_meanwhile_is_spared_then_and_afterwards(run: RunDir) -> None:
    """The plan lets the full go; an increment of it is being written, and then committed, before its turn comes."""
    launch(run, 1)
    save(run, 10)
    save(run, 20)
    found = prune.survey(run, keep(1), stored=False, is_idle=lambda: True)
    assert [one.name.step for one in found.plan.remove] == [10]
    with upkeep(run), opened_base(run, "gpt-1234", name(30), name(10)) as reader:
        assert reader is not None
        assert prune.execute(run, found).spared == {name(10): "being read or written against"}
    written = save(run, 30, name(10), proven=False)
    with upkeep(run):
        assert prune.execute(run, found).spared == {name(10): f"base of {name(30)}"}
    restores(run, name(30), written.state_digest)


def test_an_increment_that_is_read_keeps_its_base_too(chain: RunDir) -> None:
    save(chain, 20)
    with open_checkpoint(chain.checkpoint(name(12))):
        done = prune_all(chain, 1)
        assert set(done.spared) == {name(12), name(10)}
        assert left(chain) == [10, 12, 20]
    prune_all(chain, 1)
    assert left(chain) == [20]


Act = tuple[str, int]
acts = st.one_of(
    st.tuples(st.sampled_from(["full", "increment", "increment", "unproven"]), st.just(0)),
    st.tuples(st.just("prune"), st.integers(0, 4)),
    st.tuples(st.just("rollup"), st.integers(0, 9)),
)


@settings(max_examples=40, deadline=None)
@given(st.lists(acts, min_size=2, max_size=14))
def test_whatever_happens_in_whatever_order_every_kept_checkpoint_restores(history: list[Act]) -> None:
    with tempfile.TemporaryDirectory() as place:
        run, digests = RunDir(Path(place)), {}
        launch(run, 1)
        save(run, 1)
        digests[name(1)] = manifests.read(run.checkpoint(name(1))).state_digest
        for number, (what, choice) in enumerate(history):
            step = number + 2
            if what in ("full", "increment", "unproven"):
                base = None if what == "full" else choose_base(run)
                digests[name(step)] = save(run, step, base, proven=what != "unproven").state_digest
            elif what == "rollup":
                one = committed(run)[choice % len(committed(run))]
                with upkeep(run):
                    assert roll_up(run, one).base is None
            else:
                _prune_and_check(run, choice)
            assert used(run) == needed(run)
            for listed in list_checkpoints(run):
                assert listed.base is None or manifests.read(run.checkpoint(listed.base)).base is None
                restores(run, listed.name, digests[listed.name])


def _prune_and_check(run: RunDir, keep_last: int) -> None:
    """The plan is what happens, to the byte, and a second one has nothing to do."""
    before, found = used(run), prune.survey(run, keep(keep_last), stored=False, is_idle=lambda: True)
    done = prune_all(run, keep_last)
    assert done.spared == {}
    assert committed(run) == [verdict.name for verdict in found.plan.keep]
    assert before - used(run) == found.freed == done.freed
    assert prune.survey(run, keep(keep_last), stored=False, is_idle=lambda: True).empty
