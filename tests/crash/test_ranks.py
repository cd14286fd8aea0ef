"""Two ranks on one machine: whichever of them is killed, the finished state and the order of the data are those of a run nobody
disturbed, and what they have in common is stored once."""

import json
import os
import re
import shutil
import signal
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
from harness import PATIENCE, Direct, Run, kill, wait_until
from many_ranks import (
    OtherNode,
    assert_about_the_same,
    hit,
    losses_with,
    ranks,
    ranks_run,
    surviving,
    tracing,
    train_with,
)
from torch import nn

from perdure.training.agent.commands import refuse_what_cannot_start
from perdure.training.checkpoint import manifest
from perdure.training.checkpoint.manifest import Manifest
from perdure.training.checkpoint.reader import CheckpointReader, open_checkpoint
from perdure.training.checkpoint.verify import verify_folder
from perdure.training.config import load_config
from perdure.training.engine.export import state_dicts
from perdure.training.errors import ConfigError
from perdure.training.files import is_temporary
from perdure.training.process import identify

ITEMS = 61
LAG = "launch.env.TINY_lag=0.15"
"""Rank 1 has its batches so much later."""


@dataclass
class Reference:
    run: Run
    trace: dict[tuple[int, int], str]


def make_reference(folder: Path, kind: str, *settings: str) -> Reference:
    run = ranks_run(folder, kind)
    end = Direct(run).train_to_end([tracing(run), *settings])
    assert end.reason == "complete", end
    assert [name.step for name in run.committed()] == [6, 9, 12, 18, 24], "a save asked for by one rank is everybody's"
    assert all(verify_folder(run.dir.checkpoint(name)) == [] for name in run.committed())
    return Reference(run, surviving(run))


@pytest.fixture(scope="module")
def fsdp2(tmp_path_factory: pytest.TempPathFactory) -> Reference:
    return make_reference(tmp_path_factory.mktemp("reference"), "fsdp2")


@pytest.fixture(scope="module")
def ddp(tmp_path_factory: pytest.TempPathFactory) -> Reference:
    return make_reference(tmp_path_factory.mktemp("reference"), "ddp", LAG)


def assert_every_sample_once(trace: dict[tuple[int, int], str]) -> None:
    """Epoch after epoch, whichever rank had it."""
    steps = max(step for _, step in trace) + 1
    order = [index for step in range(steps) for rank in (0, 1) for index in json.loads(trace[(rank, step)])["indices"]]
    for first in range(0, len(order), ITEMS):
        epoch = order[first : first + ITEMS]
        assert len(set(epoch)) == len(epoch)
    assert sorted(order[:ITEMS]) == list(range(ITEMS))


def assert_nothing_is_twice_there(reader: CheckpointReader) -> list[set[str]]:
    """But what each rank has of its own; the leaves of each rank's index."""
    own = [set(reader.rank_entries(rank)) for rank in (0, 1)]
    common = own[0] & own[1]
    assert {"perdure.rng/torch", "perdure.rng", "perdure.session"} <= common
    assert not any(path.startswith(("model", "optimizer", "scheduler", "loader")) for path in common), common
    return own


def told_of(found: Manifest) -> dict[str, Any]:
    """The topology; what a step took is there, too."""
    world = dict(found.world)
    assert 0 < world.pop("step_secs") < 60
    return world


def test_a_rank_that_works_longer_is_named_once_though_the_others_wait_for_it_in_the_backward(ddp: Reference) -> None:
    [event] = [event for event in ddp.run.events() if event["kind"] == "slow_rank"]
    assert (event["ranks"], event["step"]) == ([1], 20)
    assert re.fullmatch(r"slow: rank 1 0\.\d+ s of work in a step, the median of 2 ranks is [\d.e-]+ s", str(event["text"]))
    assert json.loads(ddp.run.dir.progress_json.read_bytes())["slow"]["1"] > 0.15


def test_a_rank_leaves_by_what_its_code_registered_and_does_not_take_its_interpreter_apart(ddp: Reference) -> None:
    """Which would have aborted it: the run would not be complete."""
    assert [(ddp.run.toml.parent / f"left-{rank}").exists() for rank in (0, 1)] == [True, True]


def test_what_ranks_have_in_common_is_stored_once_and_the_rest_per_rank(ddp: Reference) -> None:
    name = ddp.run.committed()[1]
    with open_checkpoint(ddp.run.dir.checkpoint(name)) as reader:
        assert (reader.ranks, reader.manifest.milestone) == (2, "of-rank-1")
        assert told_of(reader.manifest) == {"size": 2, "hosts": [2], "device": "cpu", "devices": len(os.sched_getaffinity(0))}
        assert reader.manifest.data["loader"] == {
            "epoch": 1,
            "samples": 8,
            "length": ITEMS,
            "global_batch": 8,
            "step_samples": 8,
        }
        assert reader.manifest.data["tokens"] == ITEMS + 8
        own = assert_nothing_is_twice_there(reader)
        assert {"model/0.weight", "optimizer/model.0.weight/exp_avg"} <= own[0] | own[1], "no `module.` of the wrapper's"
        assert bytes(reader.read("perdure.rng/torch", 0)) != bytes(reader.read("perdure.rng/torch", 1))
    assert_every_sample_once(ddp.trace)


def test_ddp_ends_bit_identical_after_one_rank_is_killed_and_another_stopped(ddp: Reference, tmp_path: Path) -> None:
    run = ranks_run(tmp_path, "ddp")
    direct, at = hit(run, 3, [1], signal.SIGKILL)
    end = direct.end()
    assert (end.reason, end.error_class, end.detail) == ("failed", "infrastructure", "rank 1 was killed by SIGKILL")
    assert run.committed()[-1].step >= at - 1, "no finished step of which both have a snapshot is lost"

    direct = Direct(run)
    trainer = direct.launch([tracing(run), *run.held_at(14)])
    run.wait_until_held()
    kill(ranks(run)[1], signal.SIGTERM)
    run.go_on()
    trainer.process.wait(PATIENCE)
    end = direct.end()
    assert (end.reason, end.step, run.committed()[-1].step) == ("stopped", 15, 15), "both cut at the end of the same step"

    with pytest.raises(ConfigError, match="processes: 2 -> 1"):
        Direct(run).launch(["launch.processes=1"])
    assert Direct(run).train_to_end([tracing(run)]).reason == "complete"
    assert run.digest() == ddp.run.digest()
    assert surviving(run) == ddp.trace
    assert all(verify_folder(run.dir.checkpoint(name)) == [] for name in run.committed())


def by_shell(loop: str) -> list[str]:
    """Settings that have two ranks started by a shell command of the user's own."""
    words = ["bash", "-c", f'for r in 0 1; do {loop} "$0" -m {{module}} & done; wait', "{python}"]
    return ["launch.launcher=command", f"launch.command={json.dumps(words)}"]


def test_ranks_started_by_a_command_end_bit_identical_after_one_of_them_and_the_agent_are_killed(
    ddp: Reference, tmp_path: Path
) -> None:
    run = ranks_run(tmp_path, "ddp")
    command = by_shell("RANK=$r")
    direct, at = hit(run, 3, [1], signal.SIGKILL, *command)
    end = direct.end()
    assert (end.reason, end.error_class, end.detail) == ("failed", "infrastructure", "rank 1 ended without a word")
    assert run.committed()[-1].step >= at - 1

    direct = Direct(run)
    direct.launch([tracing(run), *run.held_at(8), *command])
    run.wait_until_held()
    found = ranks(run)
    assert len(found) == 2
    kill(run.agent())
    wait_until(lambda: not any(rank.is_alive() for rank in found), "the ranks gone")
    direct.end()

    assert Direct(run).train_to_end([tracing(run), *command]).reason == "complete"
    assert run.digest() == ddp.run.digest()
    assert surviving(run) == ddp.trace


@pytest.mark.parametrize(
    ("loop", "problem"),
    [
        ("", "gives a process no rank: it must set one of RANK,"),
        ("RANK=0", "two processes of rank 0"),
        ("RANK=3", "a rank 3, but"),
    ],
)
def test_a_command_that_gives_wrong_ranks_is_refused_at_once(tmp_path: Path, loop: str, problem: str) -> None:
    run = ranks_run(tmp_path, "ddp")
    direct = Direct(run)
    direct.launch(by_shell(loop)).process.wait(PATIENCE)
    end = direct.end()
    assert (end.reason, end.error_class) == ("failed", "config")
    assert problem in end.detail


def test_a_launcher_that_is_not_there_is_refused_before_anything_starts(tmp_path: Path) -> None:
    run = ranks_run(tmp_path, "ddp")
    missing = load_config(run.toml, ["launch.launcher=command", 'launch.command=["no-such-mpirun", "{module}"]'])
    with pytest.raises(ConfigError, match="starts 'no-such-mpirun', which is not there"):
        refuse_what_cannot_start(missing, os.environ)
    with pytest.raises(ConfigError, match="this is no Slurm job"):
        refuse_what_cannot_start(load_config(run.toml, ["launch.launcher=srun"]), {})


NODES = ("launch.nodes=2", "launch.processes=1", "launch.address=127.0.0.1")


@pytest.mark.parametrize("kind", ["ddp", pytest.param("fsdp2", marks=pytest.mark.chaos)])
def test_two_nodes_end_bit_identical_after_one_is_lost_and_another_loses_its_rank(
    request: pytest.FixtureRequest, tmp_path: Path, kind: str
) -> None:
    reference: Reference = request.getfixturevalue(kind)
    run = ranks_run(tmp_path, kind)
    node, direct = OtherNode(run), Direct(run)
    trainer = direct.launch([tracing(run), *run.held_at(8), *NODES])
    wait_until(lambda: run.committed(), "step 6 committed")
    run.wait_until_held()
    node.lose(1)
    trainer.process.wait(PATIENCE)
    end = direct.end()
    assert (end.reason, end.error_class) == ("failed", "infrastructure")
    assert [name.step for name in run.committed()] == [6]

    node = OtherNode(run)
    direct = Direct(run)
    at = 15
    trainer = direct.launch([tracing(run), *run.held_at(13, at), *NODES])
    wait_until(lambda: [name.step for name in run.committed()] == [6, 9, 12], "the saver needs no slot")
    run.wait_until_held()
    run.go_on_until_held()
    node.kill_rank(2)
    trainer.process.wait(PATIENCE)
    end = direct.end()
    assert (end.reason, end.error_class) == ("failed", "infrastructure")
    assert re.fullmatch(r"node 1 \(.+\): rank 1 was killed by SIGKILL", end.detail), end
    settled = run.committed()[-1]
    assert settled.token == 2
    assert settled.step >= at - 1, "no finished step of which both nodes have a snapshot is lost"

    assert Direct(run).train_to_end([tracing(run), *NODES]).reason == "complete"
    assert node.process.wait(PATIENCE) == 0, node.log()
    assert run.digest() == reference.run.digest(), "that of two ranks on one machine"
    assert surviving(run) == reference.trace
    assert [name.step for name in run.committed()] == sorted({6, 9, 12, settled.step, 18, 24})
    assert [name.token for name in run.committed() if name.step <= 12] == [1, 2, 2]
    told = [path for name in run.committed() for path in run.dir.checkpoint(name).glob("node-*")]
    assert not told, "what the nodes told each other of what is committed is gone"
    with open_checkpoint(run.dir.checkpoint(run.committed()[-1])) as reader:
        assert_nothing_is_twice_there(reader)


def test_fsdp2_each_rank_stores_its_pieces_and_readers_put_them_together(fsdp2: Reference) -> None:
    name = fsdp2.run.committed()[-1]
    with open_checkpoint(fsdp2.run.dir.checkpoint(name)) as reader:
        assert told_of(reader.manifest)["meshes"] == [{"shape": [2], "names": []}]
        for rank, rows in ((0, 33), (1, 32)):
            entry = reader.rank_entries(rank)[f"model/0.weight%at/{rank * 33},0"]
            assert tuple(entry.shape) == (rows, 16)
            assert f"optimizer/model.0.weight/exp_avg%at/{rank * 33},0" in reader.rank_entries(rank)
        assert_nothing_is_twice_there(reader)
        found = state_dicts(reader, None)
    model = nn.Sequential(nn.Linear(16, 65), nn.ReLU(), nn.Dropout(0.1), nn.Linear(65, 4))
    model.load_state_dict(found["model"])
    assert found["optimizer"]["state"][0]["exp_avg"].shape == (65, 16)
    assert_every_sample_once(fsdp2.trace)


def test_fsdp2_ends_bit_identical_after_all_ranks_and_the_agent_are_killed(fsdp2: Reference, tmp_path: Path) -> None:
    run = ranks_run(tmp_path, "fsdp2")
    direct, at = hit(run, 3, [0, 1], signal.SIGKILL)
    assert direct.end().error_class == "infrastructure"
    assert run.committed()[-1].step >= at - 1

    helper = tmp_path / "helper"
    direct = Direct(run)
    direct.launch([tracing(run), *run.held_at(14), "checkpoint.lazy=true", f"launch.env.TINY_child={helper}"])
    run.wait_until_held()
    wait_until(lambda: run.committed()[-1].step >= 12, "step 12 committed")
    child, found = identify(int(helper.read_text())), ranks(run)
    kill(run.agent())
    wait_until(lambda: not any(rank.is_alive() for rank in found), "the ranks gone")
    direct.end()

    assert Direct(run).train_to_end([tracing(run), "checkpoint.lazy=true", "checkpoint.audit=true"]).reason == "complete"
    assert not child.is_alive(), "nor is what they had started"
    assert "save_failed" not in run.kinds()
    assert run.digest() == fsdp2.run.digest()
    assert surviving(run) == fsdp2.trace


@pytest.mark.chaos  # half a minute of four ranks on two cores
def test_of_four_ranks_that_come_to_each_save_at_different_times_every_checkpoint_is_whole(tmp_path: Path) -> None:
    run = ranks_run(tmp_path, "ddp")
    end = Direct(run).train_to_end(["launch.processes=4", "checkpoint.every=1", "launch.env.TINY_jitter=0.05"])
    assert end.reason == "complete", end
    names = run.committed()
    assert [name.step for name in names] == list(range(1, 25)), "none was skipped"
    for name in names:
        found = manifest.read(run.dir.checkpoint(name))
        assert (found.step, found.world["size"], len(found.files)) == (name.step, 4, 8)
        assert verify_folder(run.dir.checkpoint(name)) == []
    assert {path.name for path in run.dir.checkpoints.iterdir()} == set(map(str, names))
    assert [path for path in run.dir.checkpoints.rglob("*") if is_temporary(path.name)] == []


ELASTIC = [
    ("fsdp2", 18, ((1, 24),)),
    pytest.param("fsdp2", 6, ((1, 12), (4, 18), (2, 24)), marks=pytest.mark.chaos),
    pytest.param("fsdp2", 12, ((4, 18), (1, 24)), marks=pytest.mark.chaos),
    pytest.param("ddp", 6, ((1, 12), (4, 18), (2, 24)), marks=pytest.mark.chaos),
]
"""From a checkpoint of two ranks at that step on: so many ranks until that step, and so on."""


@pytest.mark.parametrize(("kind", "start", "launches"), ELASTIC)
def test_another_number_of_ranks_goes_on_with_the_same_samples(
    request: pytest.FixtureRequest, tmp_path: Path, kind: str, start: int, launches: tuple[tuple[int, int], ...]
) -> None:
    reference: Reference = request.getfixturevalue(kind)
    shutil.copytree(reference.run.toml.parent, tmp_path / kind)
    run = Run(tmp_path / kind / "run.toml", f"params.kind={kind}", "params.name_at=8")
    for name in run.committed():
        if name.step > start:
            shutil.rmtree(run.dir.checkpoint(name))
    with pytest.raises(ConfigError, match=f"processes: 2 -> {launches[0][0]}"):
        Direct(run).launch([f"launch.processes={launches[0][0]}"])
    before, losses = 2, []
    for processes, until in launches:
        train_with(run, processes, until)
        found = manifest.read(run.dir.checkpoint(run.committed()[-1]))
        assert (found.step, found.world["size"], len(found.files) // 2, found.exact) == (until, processes, processes, False)
        assert any(f"processes: {before} -> {processes}" in reason for reason in found.exact_reasons)
        said = [str(event["text"]) for event in run.events() if event["kind"] == "notice"]
        assert "re-planned: the global batch of 8 samples is kept, and the learning rate with it" in said
        moved = [text for text in said if text.startswith("resumed on another topology: ")]
        assert any(f"hosts: [{before}] in the checkpoint, [{processes}] now" in text for text in moved), said
        took = r"a step takes \S+ s here, took \S+ s on the topology before \(medians\)"
        assert sum(bool(re.fullmatch(took, text)) for text in said) == len(moved)
        losses += losses_with(run, processes, range(start, until), reference.trace)
        before, start = processes, until
    assert found.data["tokens"] == 3 * ITEMS, "of all ranks that there were"
    assert_about_the_same(losses)
