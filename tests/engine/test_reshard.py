"""A checkpoint of some ranks is gone on with by others: each has, bit for bit, the part of every tensor that is its own now.

Ranks are those of torch's fake process group, which communicates nothing: this process is each of them in turn."""

import contextlib
import random
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import torch.distributed as dist
from engine.conftest import keep
from snapshots import RUN_ID, Source
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor.debug import _clear_fast_path_sharding_prop_cache, _clear_python_sharding_prop_cache
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module
from torch.testing._internal.distributed.fake_pg import FakeStore
from torchdata.stateful_dataloader import StatefulDataLoader

from perdure.training import files
from perdure.training.checkpoint.pieces import piece_path
from perdure.training.checkpoint.reader import CheckpointReader, open_checkpoint
from perdure.training.checkpoint.shared import parts
from perdure.training.checkpoint.source import ByteSource
from perdure.training.checkpoint.writer import write_checkpoint
from perdure.training.engine import shards
from perdure.training.engine.invariants import check_after_load
from perdure.training.engine.loading import Loading, check_can_spread
from perdure.training.engine.restore import restore
from perdure.training.engine.rng import load_rng, rng_leaves, seed_rng
from perdure.training.engine.shards import is_sharded, local, place_of
from perdure.training.engine.state import Tracked, collect
from perdure.training.errors import ConfigError
from perdure.training.run_dir import CheckpointName, RunDir, rank_index

NAME = CheckpointName(2, 1)
LAYOUTS = {"whole": 1, "one": 1, "two": 2, "three": 3, "eight": 8, "replicated shards": 4, "tensor parallel": 4}
"""How many ranks each has. With three, one has nothing of the last tensors; with eight, three have nothing of any."""


@contextlib.contextmanager
def rank_of(layout: str, rank: int) -> Iterator[nn.Module]:
    """The model as that rank has it, its numbers not yet those of the run."""
    dist.init_process_group("fake", rank=rank, world_size=LAYOUTS[layout], store=FakeStore())
    for cache in (shards._PLACES.clear, _clear_python_sharding_prop_cache, _clear_fast_path_sharding_prop_cache):
        cache()  # a process is one rank for good, but here
    try:
        model = nn.Sequential(nn.Linear(6, 10), nn.Linear(10, 2))
        ranks = LAYOUTS[layout]
        mesh = (
            init_device_mesh("cpu", (2, 2), mesh_dim_names=("data", "tensor"))
            if ranks == 4
            else init_device_mesh("cpu", (ranks,))
        )
        if layout == "tensor parallel":
            parallelize_module(model, mesh["tensor"], {"0": ColwiseParallel(), "1": RowwiseParallel()})
            mesh = mesh["data"]
        if layout != "whole":
            fully_shard(model, mesh=mesh)
        yield model
    finally:
        dist.destroy_process_group()


def tracked_of(model: nn.Module) -> Tracked:
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.1)
    for parameter in model.parameters():
        parameter.grad = torch.zeros_like(parameter)
    optimizer.step()
    return {"model": model, "optimizer": optimizer}


def own_tensors(tracked: Tracked) -> Iterator[tuple[str, torch.Tensor, torch.Tensor]]:
    """Name, what this rank has, and what it must have: whole tensors are numbered through from a number of each name."""
    model, optimizer = tracked.values()
    assert isinstance(model, nn.Module)
    for name, parameter in model.named_parameters():
        state = optimizer.state[parameter]
        for key, tensor in {"": parameter, "exp_avg": state["exp_avg"], "exp_avg_sq": state["exp_avg_sq"]}.items():
            start = random.Random(name + key).randrange(1000)
            whole = torch.arange(start, start + tensor.numel(), dtype=torch.float32).view(tensor.shape)
            offsets, shape = place_of(tensor, name) if is_sharded(tensor) else ((0,) * tensor.ndim, tensor.shape)
            place = tuple(slice(first, first + size) for first, size in zip(offsets, shape, strict=True))
            yield f"{name} {key}", local(tensor).detach(), whole[place]


def commit(run: RunDir, layout: str, **more: Any) -> None:
    sources = []
    for rank in range(LAYOUTS[layout]):
        with rank_of(layout, rank) as model:
            tracked = tracked_of(model)
            for _, mine, wanted in own_tensors(tracked):
                mine.copy_(wanted)
            source = Source()
            torch.manual_seed(rank)
            for path, leaf in keep([*collect({**tracked, **more}), *rng_leaves()]).items():
                source.tensor(path, leaf.dtype, leaf.shape, bytes(leaf.data), kind=leaf.kind)
            sources.append(source)
    files.make_dirs(run.checkpoints)
    snapshots: list[Any] = sources
    write_checkpoint(run, RUN_ID, NAME, parts(snapshots, 1), encoding="auto", threads=1)


@pytest.fixture(scope="module")
def runs(tmp_path_factory: pytest.TempPathFactory) -> dict[str, RunDir]:
    made = {layout: RunDir(tmp_path_factory.mktemp("run")) for layout in LAYOUTS}
    for layout, run in made.items():
        commit(run, layout)
    return made


@contextlib.contextmanager
def opened(run: RunDir, rank: int, ranks: int) -> Iterator[tuple[CheckpointReader, Loading]]:
    with open_checkpoint(run.checkpoint(NAME)) as reader, Loading(reader, 1, rank, ranks) as loading:
        yield reader, loading


@pytest.mark.parametrize(
    ("before", "after"),
    [
        ("one", "three"),
        ("whole", "two"),
        ("three", "whole"),
        ("one", "tensor parallel"),
        ("two", "one"),
        ("two", "three"),
        ("three", "two"),
        ("replicated shards", "three"),
        ("tensor parallel", "two"),
        ("tensor parallel", "replicated shards"),
        ("replicated shards", "tensor parallel"),
        ("replicated shards", "replicated shards"),
        ("tensor parallel", "tensor parallel"),
        ("whole", "one"),
        ("one", "whole"),
    ],
)
def test_each_rank_has_the_part_that_is_its_own_now(runs: dict[str, RunDir], before: str, after: str) -> None:
    for rank in range(LAYOUTS[after]):
        with rank_of(after, rank) as model, opened(runs[before], rank, LAYOUTS[after]) as (reader, loading):
            tracked = tracked_of(model)
            check_can_spread(reader, tracked)
            assert restore(tracked, loading.read, loading.read_part) == []
            for name, mine, wanted in own_tensors(tracked):
                assert torch.equal(mine, wanted), name
            assert all(state["step"] == 1 for state in tracked["optimizer"].state.values())
            check_after_load(tracked, NAME.step, loading.digest, threads=1)


class Counting:
    """A ByteSource, and of which files it was asked for bytes."""

    def __init__(self, source: ByteSource) -> None:
        self.source, self.read_files = source, set[str]()

    def __getattr__(self, name: str) -> Any:  # Any: a method
        return getattr(self.source, name)

    def read(self, file: str, offset: int, length: int) -> bytes:
        self.read_files.add(file)
        return self.source.read(file, offset, length)


@pytest.mark.parametrize("layout", ["whole", "two", "three", "eight"])
def test_a_rank_of_as_many_as_before_opens_its_own_index_and_that_of_rank_0(runs: dict[str, RunDir], layout: str) -> None:
    for rank in range(LAYOUTS[layout]):
        with rank_of(layout, rank) as model, opened(runs[layout], rank, LAYOUTS[layout]) as (reader, loading):
            counting = Counting(reader.source)
            reader.source = counting
            tracked = tracked_of(model)
            restore(tracked, loading.read, loading.read_part)
            check_after_load(tracked, NAME.step, loading.digest, threads=1)
            load_rng(loading.read, {})
            assert {file for file in counting.read_files if file.endswith(".index")} == {rank_index(0), rank_index(rank)}
            assert all(torch.equal(mine, wanted) for _, mine, wanted in own_tensors(tracked))


def test_as_many_ranks_that_cut_a_tensor_of_another_shape_are_not_taken_for_the_same(tmp_path: Path) -> None:
    """Pieces at the right places, of a tensor twice as large: those who stored the other half say so."""
    run = RunDir(tmp_path)
    files.make_dirs(run.checkpoints)
    sources: list[Any] = [Source().array(piece_path("w", (2 * rank,)), np.full(2, rank, np.float32)) for rank in range(4)]
    write_checkpoint(run, RUN_ID, NAME, parts(sources, 1), encoding="auto", threads=1)
    found = []
    for rank in range(4):
        with opened(run, rank, 4) as (_, loading):
            found.append(loading.read_part("w", (4,), shards.Place((2 * (rank % 2),), (2,))))
    assert [part is None for part in found] == [False, False, True, True]
    with opened(run, 1, 2) as (_, loading):
        assert loading.read_part("w", (4,), shards.Place((2,), (2,))) is None, "of other ranks nobody would say so"


def test_new_ranks_have_generators_of_their_own_which_follow_from_the_checkpoint(runs: dict[str, RunDir]) -> None:
    drawn = []
    for rank in (2, 3, 3):
        generators = {"a": torch.Generator(), "b": random.Random(), "c": np.random.default_rng(), "d": np.random.RandomState()}
        with opened(runs["two"], rank, 4) as (_, loading):
            assert loading.is_new
            seed_rng(loading.read("perdure.rng").data, rank, generators)
        own = (torch.rand(1, generator=generators["a"]).item(), generators["b"].random(), generators["c"].random())
        drawn.append((torch.rand(1).item(), random.random(), np.random.random(), *own, generators["d"].random()))
    assert drawn[1] == drawn[2]
    assert len({number for one in drawn for number in one}) == 14, "no two are alike"


def test_a_new_rank_has_the_buffers_of_rank_0(tmp_path: Path) -> None:
    class Norm(nn.BatchNorm1d):
        def state_dict(self, *args: Any, **options: Any) -> Any:
            self.running_mean.fill_(dist.get_rank() if dist.is_initialized() else -1)  # type: ignore[union-attr, operator]
            return super().state_dict(*args, **options)

    commit(RunDir(tmp_path), "two", norm=Norm(3))
    for rank, mean in ((0, 0), (1, 1), (2, 0)):
        with rank_of("three", rank) as model, opened(RunDir(tmp_path), rank, 3) as (reader, loading):
            tracked = {**tracked_of(model), "norm": nn.BatchNorm1d(3)}
            check_can_spread(reader, tracked)
            restore(tracked, loading.read, loading.read_part)
            assert tracked["norm"].running_mean.tolist() == [mean] * 3


@pytest.mark.filterwarnings("ignore:'set_vital' is deprecated")  # by torchdata
def test_what_belongs_to_single_ranks_is_refused_by_name(tmp_path: Path) -> None:
    class PerRank:
        def state_dict(self) -> dict[str, int]:
            return {"rank": dist.get_rank()}

        def load_state_dict(self, state: dict[str, int]) -> None: ...

    commit(RunDir(tmp_path), "two", mine=PerRank(), same=torch.nn.Linear(1, 1))
    with opened(RunDir(tmp_path), 0, 1) as (reader, _):
        tracked = {"mine": PerRank(), "same": nn.Linear(1, 1), "data": StatefulDataLoader([1, 2])}
        with pytest.raises(ConfigError, match=r"each has its own state of mine, data"):
            check_can_spread(reader, tracked)
