"""TINY under DeepSpeed: a frozen layer, a buffer of each rank's own, two groups of parameters, dropout, two micro batches in a
step, a scheduler that the caller makes, and a data set that does not divide."""

import json
import os
import random
import time
from pathlib import Path

import deepspeed
import numpy as np
import torch
from deepspeed.utils import safe_get_full_fp32_param, safe_get_full_optimizer_state
from torch import nn
from torch.optim.lr_scheduler import OneCycleLR
from torch.utils.data import Dataset

from perdure.training import Session
from perdure.training.engine.data import ResumableLoader

deepspeed.ops.__compatible_ops__["deepspeed_shm_comm"] = False  # 30 s of compiling for what only inference uses
ITEMS, BATCH = 61, 8
"""Of all ranks together."""
EVEN = 64
"""With params.plain: nothing is of a rank's own then, and only the order of sums depends on their number."""


class Items(Dataset[tuple[int, torch.Tensor]]):
    def __init__(self, length: int) -> None:
        self.length = length

    def __len__(self) -> int:
        return self.length

    def __getitem__(self, index: int) -> tuple[int, torch.Tensor]:
        return index, torch.randn(16, generator=torch.Generator().manual_seed(index))


class Tiny(nn.Module):
    def __init__(self, plain: bool) -> None:
        super().__init__()
        self.plain = plain
        self.frozen = nn.Linear(16, 16).requires_grad_(False)
        self.register_buffer("mean", torch.zeros(16))
        self.trained = nn.Sequential(nn.Linear(16, 65), nn.ReLU(), nn.Dropout(0.0 if plain else 0.1), nn.Linear(65, 4))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.frozen(x)
        if self.training and not self.plain:
            self.mean.lerp_(x.detach().mean(0).to(self.mean.dtype), 0.1)
        return self.trained(x - self.mean.to(x.dtype))


def make_engine(session: Session, seed: int) -> deepspeed.DeepSpeedEngine:
    torch.manual_seed(seed)
    plain = session.params.get("plain", False)
    model = Tiny(plain)
    dtype = session.params.get("dtype", "bf16")
    config = {
        "train_micro_batch_size_per_gpu": BATCH // session.world_size,
        "gradient_accumulation_steps": 2,
        "optimizer": {"type": "AdamW", "params": {"lr": 1e-2, "torch_adam": True}},
        "zero_optimization": {
            "stage": session.params["stage"],
            "stage3_param_persistence_threshold": 0,
            "round_robin_gradients": session.params.get("round_robin", False),
        },
        "comet": {"api_key": "planted-and-never-saved"},
        "gradient_clipping": 1.0,
        **({} if dtype == "fp32" else {dtype: {"enabled": True}}),
    }
    engine, *_ = deepspeed.initialize(
        model=model,
        model_parameters=[
            {"params": [one for one in model.trained.parameters() if one.dim() > 1]},
            {"params": [one for one in model.trained.parameters() if one.dim() == 1], "weight_decay": 0.0},
        ],
        config=config,
        lr_scheduler=lambda optimizer: OneCycleLR(optimizer, 1e-2, total_steps=session.total_steps + 1),
    )
    return engine


def tell_what_was_loaded(engine: deepspeed.DeepSpeedEngine, rank: int, file: str) -> None:
    """Masters and moments of the whole model by their names, as DeepSpeed gathers them from all ranks."""
    found = {}
    if 1 <= engine.zero_optimization_stage() <= 2:
        engine.optimizer._lazy_init_hp_params_optimizer_state()  # else only its first step would
    for name, one in engine.module.named_parameters():
        if one.requires_grad:
            moments = {key: safe_get_full_optimizer_state(one, key) for key in ("exp_avg", "exp_avg_sq")}
            found[name] = {"fp32": safe_get_full_fp32_param(one), **moments}
    if rank == 0:
        torch.save(found, file)


def train(session: Session) -> None:
    trial = {name[5:]: value for name, value in os.environ.items() if name.startswith("TINY_")}
    deepspeed.init_distributed()
    torch.use_deterministic_algorithms("fresh_nan" in trial)  # then memory that nobody has written is NaN
    engine = make_engine(session, int(trial.get("seed", 1)))
    torch.use_deterministic_algorithms(False)
    torch.manual_seed(100 + session.rank)  # dropout of each rank's own
    random.seed(session.rank)
    np.random.seed(session.rank)
    data = Items(EVEN if session.params.get("plain") else ITEMS)
    loader = ResumableLoader(data, seed=3, batch_size=BATCH // session.world_size, rank=session.rank, world=session.world_size)
    session.track(model=engine, loader=loader)
    batches = loader.forever()
    dtype = next(engine.module.parameters()).dtype
    for step in session.steps():
        if file := trial.pop("loaded", ""):
            tell_what_was_loaded(engine, session.rank, file)
        if trial.get("wait_at") == str(step) and session.rank == 1:
            Path("held").touch()
            while not Path("go-on").exists():
                time.sleep(0.01)
        seen, losses = [], []
        for _ in range(engine.gradient_accumulation_steps()):
            indices, x = next(batches)
            loss = engine(x.to(dtype)).float().square().mean()
            engine.backward(loss)
            engine.step()
            seen += indices.tolist()
            losses.append(float(loss))
        session.log(loss=loss, tokens=len(seen))
        time.sleep(float(trial.get("sleep", 0)) + 0.005 * session.rank)
        if "trace" in trial:
            told = {"step": step, "indices": seen, "loss": (sum(losses) / len(losses)).hex(), "lr": engine.get_lr()}
            with open(f"{trial['trace']}-{session.rank}", "a") as file:
                file.write(json.dumps(told) + "\n")
