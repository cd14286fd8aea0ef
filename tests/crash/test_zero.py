"""Two ranks under DeepSpeed: whichever is killed, the finished state, the order of the data and the rates are those of a run
nobody disturbed; what DeepSpeed would have written into files is ordinary state of a checkpoint: other ranks go on from it."""

import json
import os
import shutil
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from harness import PATIENCE, Direct, Run, wait_until
from many_ranks import OtherNode, assert_about_the_same, hit, losses_with, surviving, tracing, train_with
from torch import nn

from perdure.training.checkpoint import catalog, manifest
from perdure.training.checkpoint.facts import Fact, write_fact
from perdure.training.checkpoint.plain import unpack_plain
from perdure.training.checkpoint.reader import open_checkpoint
from perdure.training.checkpoint.verify import verify_folder
from perdure.training.engine.loading import Loading
from perdure.training.engine.zero_files import write_files
from perdure.training.run_dir import CheckpointName

ZERO = Path(__file__).parent / "zero"
OTHER_SEED = "launch.env.TINY_seed=2"
"""What is not loaded differs."""
FRESH_NAN = "launch.env.TINY_fresh_nan=1"
"""What is not written differs."""


def make_run(folder: Path, *settings: str) -> Run:
    shutil.copytree(ZERO, folder / "zero")
    return Run(folder / "zero" / "run.toml", *settings)


def undisturbed(folder: Path, *settings: str) -> Run:
    run = make_run(folder, *settings)
    end = Direct(run).train_to_end([tracing(run)])
    assert end.reason == "complete", end
    return run


def leaves_of(run: Run) -> dict[str, Any]:
    """Of the last checkpoint: plain leaves as values, of tensors their shapes."""
    with open_checkpoint(run.dir.checkpoint(run.committed()[-1])) as reader:
        return {
            path: unpack_plain(reader.read(path, rank)) if entry.kind == "plain" else entry.shape
            for path, (rank, entry) in reader.state().items()
        }


def lose(run: Run, step: int, victims: list[int], *settings: str) -> None:
    """A launch that is killed after this step."""
    direct, at = hit(run, step, victims, signal.SIGKILL, *settings)
    end = direct.end()
    assert (end.reason, end.error_class) == ("failed", "infrastructure"), end
    assert len(victims) > 1 or end.detail == f"rank {victims[0]} was killed by SIGKILL"
    assert run.committed()[-1].step >= at - 1, "no finished step of which both have a snapshot is lost"


RANKS = ((1, 12), (4, 18), (2, 24))
KILLS: list[Any] = [(2, [[1]], ((1, 24),))]  # Any: pytest's parameter sets
KILLS += [pytest.param(stage, [[0], [0, 1]], RANKS, marks=pytest.mark.chaos) for stage in (0, 1, 2, 3)]
"""ZeRO's stage; the victims of each launch but the last; then, from an earlier checkpoint on, so many ranks until that step."""


@pytest.mark.parametrize(("stage", "kills", "launches"), KILLS)
def test_zero_ends_bit_identical_after_ranks_are_killed_and_goes_on_with_another_number_of_them(
    tmp_path: Path, stage: int, kills: list[list[int]], launches: tuple[tuple[int, int], ...]
) -> None:
    reference = undisturbed(tmp_path / "reference", f"params.stage={stage}")
    run = make_run(tmp_path, f"params.stage={stage}")
    for number, victims in enumerate(kills):
        lose(run, 3 + 8 * number, victims, FRESH_NAN, f"launch.launcher={('deepspeed', 'torchrun')[number]}")
    lose_sight_of(run, run.committed()[0].step)  # case K3: what is asked for is loaded, not the newest that is there
    assert Direct(run).train_to_end([tracing(run), OTHER_SEED, "checkpoint.audit=true"]).reason == "complete"
    assert run.digest() == reference.digest()
    assert surviving(run) == surviving(reference)
    assert all(verify_folder(run.dir.checkpoint(name)) == [] for name in run.committed())
    assert_it_is_ordinary_state(run, stage)
    if len(kills) > 1:
        assert_restore_gives_the_weights(run)
    assert_others_go_on(run, surviving(reference), stage, launches)


@pytest.mark.chaos
@pytest.mark.parametrize("stage", [1, 3])
def test_zero_on_two_nodes_ends_bit_identical_after_one_of_them_loses_its_rank(tmp_path: Path, stage: int) -> None:
    reference = undisturbed(tmp_path / "reference", f"params.stage={stage}")
    run = make_run(tmp_path, f"params.stage={stage}")
    nodes = ["launch.nodes=2", "launch.processes=1", "launch.address=127.0.0.1", "launch.launcher=torchrun"]
    node, direct = OtherNode(run), Direct(run)
    at = 8
    trainer = direct.launch([tracing(run), FRESH_NAN, *run.held_at(at), *nodes])
    run.wait_until_held()
    wait_until(run.committed, "the saver needs no slot")
    node.kill_rank(1)
    trainer.process.wait(PATIENCE)
    end = direct.end()
    assert (end.reason, end.error_class) == ("failed", "infrastructure"), end
    assert run.committed()[-1].step >= at - 1, "no finished step of which both nodes have a snapshot is lost"
    assert Direct(run).train_to_end([tracing(run), OTHER_SEED, *nodes]).reason == "complete"
    assert node.process.wait(PATIENCE) == 0, node.log()
    assert run.digest() == reference.digest(), "that of two ranks on one machine"
    assert surviving(run) == surviving(reference)


def lose_sight_of(run: Run, after: int) -> None:
    """What is later than this step is as it was, and no candidate any more."""
    for name in run.committed():
        if name.step > after:
            write_fact(run.dir, name, Fact(copy="local", checked_at=0.0, result="damaged"))


def assert_others_go_on(
    run: Run, reference: dict[tuple[int, int], str], stage: int, launches: tuple[tuple[int, int], ...]
) -> None:
    """From the checkpoint 6 steps before that of the first launch on."""
    start = launches[0][1] - 6
    lose_sight_of(run, start)
    losses = []
    for number, (processes, until) in enumerate(launches):
        wanted = by_deepspeed(run, run.toml.parent / f"universal-{number}") if stage else {}
        loaded = run.toml.parent / f"loaded-{number}.pt"
        train_with(run, processes, until, OTHER_SEED, *([f"launch.env.TINY_loaded={loaded}"] if stage else []))
        found = manifest.read(run.dir.checkpoint(newest(run)))
        assert (found.step, found.world["size"], found.exact) == (until, processes, False)
        assert verify_folder(run.dir.checkpoint(newest(run))) == []
        if stage:
            assert_same_tensors(torch.load(loaded), wanted)
        losses += losses_with(run, processes, range(start, until), reference)
        start = until
    assert_about_the_same(losses)


def by_deepspeed(run: Run, folder: Path) -> dict[str, dict[str, torch.Tensor]]:
    """Masters and moments of the checkpoint that is next gone on from, put together by DeepSpeed's own converter."""
    with open_checkpoint(run.dir.checkpoint(newest(run))) as reader, Loading(reader, 1, 0, reader.ranks) as loading:
        folder.mkdir()
        write_files("model", reader, loading.read, folder / "files")
    convert = [sys.executable, "-m", "deepspeed.checkpoint.ds_to_universal", "--inject_missing_state"]
    convert += ["--num_extract_workers", "1", "--num_merge_workers", "1"]
    convert += ["--input_folder", str(folder / "files"), "--output_folder", str(folder / "out")]
    subprocess.run(convert, check=True, capture_output=True, env={**os.environ, "DS_ACCELERATOR": "cpu"})
    found = {}
    for one in (path for path in (folder / "out" / "zero").iterdir() if path.is_dir()):
        loaded = {file.stem: torch.load(file, weights_only=False) for file in one.glob("*.pt")}
        found[one.name] = {key: value["param"] if isinstance(value, dict) else value for key, value in loaded.items()}
    return found


def newest(run: Run) -> CheckpointName:
    """Of those that are good."""
    return catalog.candidates(run.dir)[0]


def assert_same_tensors(loaded: dict[str, dict[str, torch.Tensor]], wanted: dict[str, dict[str, torch.Tensor]]) -> None:
    assert sorted(loaded) == ["trained.0.bias", "trained.0.weight", "trained.3.bias", "trained.3.weight"]
    for name, tensors in loaded.items():
        for key in ("fp32", "exp_avg", "exp_avg_sq"):
            assert tensors[key].count_nonzero(), "it has been trained"
            assert torch.equal(tensors[key].flatten(), wanted[name][key].flatten()), (name, key)


def assert_it_is_ordinary_state(run: Run, stage: int) -> None:
    with open_checkpoint(run.dir.checkpoint(run.committed()[-1])) as reader:
        assert (reader.manifest.world["size"], reader.manifest.world["zero"]) == (2, {"model": stage})
        own = [{path for path in reader.rank_entries(rank) if path.startswith("model/")} for rank in (0, 1)]
        assert own[0] & own[1] == {"model/%buffers/mean"}, "nothing else is of each rank and has the same name"
    leaves = leaves_of(run)
    assert leaves["model"]["trainable"]["frozen.weight"] is False
    assert "planted-and-never-saved" not in json.dumps(leaves, default=str)
    assert any(path.endswith("exp_avg") for path in leaves)


def assert_restore_gives_the_weights(run: Run) -> None:
    out = run.toml.parent / "weights.pt"
    command = [sys.executable, "-m", "perdure.training.engine.export", str(run.dir.checkpoint(run.committed()[-1])), str(out)]
    assert json.loads(subprocess.run(command, check=True, capture_output=True, text=True).stdout)["objects"] == [
        "model",
        "loader",
    ]
    weights = torch.load(out)["model"]
    shapes = {name: tuple(tensor.shape) for name, tensor in weights.items()}
    assert shapes == {
        "frozen.weight": (16, 16), "frozen.bias": (16,), "mean": (16,),
        "trained.0.weight": (65, 16), "trained.0.bias": (65,), "trained.3.weight": (4, 65), "trained.3.bias": (4,),
    }  # fmt: skip
    torch.manual_seed(1)
    assert torch.equal(weights["frozen.weight"].float(), nn.Linear(16, 16).weight.bfloat16().float())


@pytest.mark.chaos
@pytest.mark.parametrize("stage", [1, 2, 3])
@pytest.mark.parametrize(("before", "after"), [(2, 1), (1, 2)])
def test_losses_with_another_number_of_ranks_are_those_of_the_old_one_up_to_rounding(
    tmp_path: Path, stage: int, before: int, after: int
) -> None:
    """Case K1: without dropout, buffers of each rank's own and uneven batches."""
    plain = (f"params.stage={stage}", "params.dtype=fp32", "params.plain=true", "run.steps=12", "launch.launcher=torchrun")
    run = undisturbed(tmp_path, *plain, f"launch.processes={before}")
    reference = surviving(run, before)
    lose_sight_of(run, 6)
    train_with(run, after, 12, OTHER_SEED)
    found = manifest.read(run.dir.checkpoint(newest(run)))
    assert (found.step, found.exact) == (12, False)
    assert any(f"processes: {before} -> {after}" in reason for reason in found.exact_reasons)
    here, undisturbed_ones = zip(*losses_with(run, after, range(6, 12), reference), strict=True)
    assert here == pytest.approx(undisturbed_ones, rel=1e-5)
    assert len(set(here)) == 6
