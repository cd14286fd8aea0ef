"""DeepSpeed's ZeRO in the question `ranks`: real AdamW state in an engine, and DeepSpeed's own ways to save and restore it."""

import json
import os
import shutil
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import deepspeed
import torch
import torch.distributed as dist
from deepspeed.utils import safe_set_full_fp32_param, safe_set_full_optimizer_state
from torch import Tensor

from benchmarks.measure import THREADS, fsync_all
from benchmarks.rank_ways import RUN, Aside, Peer, Run, Setup
from benchmarks.state import Tracked
from examples.gpt.train import loss_of
from perdure.training.engine.state import unwrapped

deepspeed.ops.__compatible_ops__["deepspeed_shm_comm"] = False  # 30 s of compiling for what only inference uses
OWN, UNIVERSAL = "engine.save_checkpoint, fsync", "ds_to_universal and universal load"
_TAG = "bench"
_MOMENTS = ("exp_avg", "exp_avg_sq")
_CONVERT = """
import json, time
from pathlib import Path
from deepspeed.checkpoint import ds_to_universal as convert
def read():
    return int(Path("/proc/self/io").read_text().split()[1])
arguments, before, start = convert.parse_arguments(), read(), time.perf_counter()
convert.main(arguments)
print(json.dumps({"seconds": time.perf_counter() - start, "read before": before}))
"""
"""The script itself, which also says what it took without Python's start and imports."""


class _Tiles(torch.nn.Module):
    """The models side by side, of which DeepSpeed wants one forward."""

    def __init__(self, tiles: torch.nn.ModuleList) -> None:
        super().__init__()
        self.tiles = tiles

    def forward(self, windows: Tensor) -> Tensor:
        return torch.stack([loss_of(tile, windows[:, :-1], windows[:, 1:]) for tile in self.tiles]).sum()


def zero(tracked: Tracked, stage: int) -> Setup:
    """bf16 weights, fp32 masters and moments: 14 bytes a parameter, of which ZeRO cuts 12 among the ranks, ZeRO 3 all."""
    engine = _engine(tracked, stage)
    ours: Tracked = {"model": unwrapped(engine)}
    peers = {OWN: lambda: Own(engine), UNIVERSAL: lambda: Universal(engine), RUN: lambda: Run(ours)}
    return Setup(ours, lambda: _tensors(engine), peers)


def _engine(tracked: Tracked, stage: int) -> Any:  # Any: a DeepSpeedEngine
    tiles = tracked["model"]
    real = {name: (value.detach().clone(), tracked["optimizer"].state[value]) for name, value in tiles.named_parameters()}
    model = _Tiles(tiles)
    os.environ |= {"RANK": str(dist.get_rank()), "LOCAL_RANK": str(dist.get_rank()), "WORLD_SIZE": str(dist.get_world_size())}
    deepspeed.init_distributed(dist_backend="gloo")
    config = {
        "train_micro_batch_size_per_gpu": 1,
        "optimizer": {"type": "AdamW", "params": {"lr": 0.0, "betas": (0.9, 0.95), "weight_decay": 0.1, "torch_adam": True}},
        "zero_optimization": {"stage": stage},
        "bf16": {"enabled": True},
    }
    engine, *_ = deepspeed.initialize(model=model, model_parameters=model.parameters(), config=config)
    _train(engine)  # moments begin to exist; no weight moves
    named = dict(model.tiles.named_parameters())
    for name, parameter in named.items():
        safe_set_full_fp32_param(parameter, real[name][0])
    _train(engine)  # the bf16 weights follow
    for name, parameter in named.items():
        for key in _MOMENTS:
            safe_set_full_optimizer_state(parameter, real[name][1][key], key)
    return engine


def _train(engine: Any) -> None:  # Any: a DeepSpeedEngine
    windows = torch.randint(256, (1, 17), generator=torch.Generator().manual_seed(0))
    engine.backward(engine(windows))
    engine.step()


def _masters(engine: Any) -> list[Tensor]:  # Any: a DeepSpeedEngine
    """The flat fp32 tensors of this rank."""
    optimizer = engine.optimizer
    return list(getattr(optimizer, "fp32_partitioned_groups_flat", None) or optimizer.single_partition_of_fp32_groups)


def _tensors(engine: Any) -> dict[str, Tensor]:  # Any: a DeepSpeedEngine
    named = engine.module.named_parameters()
    found = {name: getattr(parameter, "ds_tensor", parameter).detach() for name, parameter in named}
    for number, master in enumerate(_masters(engine)):
        found[f"master {number}"] = master.detach()
        found |= {f"{key} {number}": engine.optimizer.optimizer.state[master][key] for key in _MOMENTS}
    return found


class Own(Peer):
    """DeepSpeed's own checkpoint, synced by us: it never does."""

    any_ranks = False

    def __init__(self, engine: Any) -> None:  # Any: a DeepSpeedEngine
        self._engine = engine

    def save(self, folder: Path) -> None:
        self._engine.save_checkpoint(str(folder), tag=_TAG)

    def wait(self, folder: Path) -> None:
        if dist.get_rank() == 0:
            fsync_all(folder)

    def load(self, folder: Path) -> Aside:
        if self._engine.load_checkpoint(str(folder), tag=_TAG)[0] is None:
            raise RuntimeError(f"DeepSpeed found nothing in {folder}")
        return Aside()


class Universal(Peer):
    """What `Own` saved, converted by DeepSpeed's script, which any number of ranks can load."""

    source = OWN

    def __init__(self, engine: Any) -> None:  # Any: a DeepSpeedEngine
        self._engine = engine

    def load(self, folder: Path) -> Aside:
        told = [self._convert(folder) if dist.get_rank() == 0 else Aside()]
        dist.broadcast_object_list(told)
        config = self._engine._config
        config.load_universal_checkpoint = True
        try:
            if self._engine.load_checkpoint(str(folder.parent), tag="universal")[0] is None:
                raise RuntimeError(f"DeepSpeed found nothing in {folder.parent}")
        finally:
            config.load_universal_checkpoint = False
        return told[0]

    def _convert(self, folder: Path) -> Aside:
        target = folder.parent / "universal"
        shutil.rmtree(target, ignore_errors=True)
        workers = [f"--num_{what}_workers={THREADS}" for what in ("extract", "merge")]
        command = [sys.executable, "-c", _CONVERT, f"--input_folder={folder / _TAG}", f"--output_folder={target}", *workers]
        start = time.perf_counter()
        done = subprocess.run([*command, "--inject_missing_state"], check=True, capture_output=True, text=True)
        told = json.loads(done.stdout.splitlines()[-1])
        return Aside(time.perf_counter() - start - told["seconds"], told["read before"])
