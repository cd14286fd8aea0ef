"""TINY on several ranks: dropout, AdamW, a scheduler, a data set that does not divide, one rank that lags."""

import atexit
import json
import os
import random
import subprocess
import time
from pathlib import Path

import numpy as np
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.fsdp import fully_shard
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import Dataset

from perdure.training import Session
from perdure.training.engine.data import ResumableLoader

ITEMS, BATCH = 61, 8
"""Of all ranks together. The last one of an epoch is of 5: two items for one rank, three for the other."""


class Items(Dataset[tuple[int, torch.Tensor]]):
    def __len__(self) -> int:
        return ITEMS

    def __getitem__(self, index: int) -> tuple[int, torch.Tensor]:
        generator = torch.Generator().manual_seed(index)
        return index, torch.randn(16, generator=generator) + random.random() * 0.01


class _Fragile:
    """As threads of torch do now and then, aborts a process that takes its interpreter apart."""

    def __del__(self) -> None:
        os.abort()


_FRAGILE = _Fragile()


def train(session: Session) -> None:
    trial = {name[5:]: value for name, value in os.environ.items() if name.startswith("TINY_")}
    dist.init_process_group("gloo")
    atexit.register(Path(f"left-{session.rank}").touch)
    if "child" in trial and session.rank == 1:  # a helper of the user's own that nobody waits for
        Path(trial["child"]).write_text(str(subprocess.Popen(["sleep", "600"]).pid))
    torch.manual_seed(1)
    model = nn.Sequential(nn.Linear(16, 65), nn.ReLU(), nn.Dropout(0.1), nn.Linear(65, 4))
    torch.manual_seed(100 + session.rank)  # dropout of each rank's own
    random.seed(session.rank)
    np.random.seed(session.rank)
    if session.params["kind"] == "ddp":
        model = DistributedDataParallel(model)
    else:
        fully_shard(model[0])
        fully_shard(model)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    scheduler = torch.optim.lr_scheduler.OneCycleLR(optimizer, max_lr=1e-2, total_steps=session.total_steps + 1)
    loader = ResumableLoader(
        Items(), seed=3, batch_size=BATCH // session.world_size, rank=session.rank, world=session.world_size
    )
    session.track(model=model, optimizer=optimizer, scheduler=scheduler, loader=loader)
    batches = loader.forever()
    for step in session.steps():
        indices, x = next(batches)
        if str(step) in trial.get("wait_at", "").split(",") and session.rank == 1:
            Path("held").touch()
            while not Path("go-on").exists():
                time.sleep(0.01)
            Path("go-on").unlink()
        time.sleep(float(trial.get("sleep", 0)) + float(trial.get("lag", 0.005)) * session.rank)
        loss = model(x).square().mean() + 0.01 * random.random()
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        scheduler.step()
        session.log(loss=loss, tokens=len(indices))
        time.sleep(random.Random(f"{step} {session.rank}").uniform(0, float(trial.get("jitter", 0))))
        if session.rank == 1 and session.params.get("name_at") == step:
            session.save("of-rank-1")
        if "trace" in trial:
            with open(f"{trial['trace']}-{session.rank}", "a") as file:
                file.write(json.dumps({"step": step, "indices": indices.tolist(), "loss": float(loss).hex()}) + "\n")
