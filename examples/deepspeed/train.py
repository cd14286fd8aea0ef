"""DeepSpeed's own loop, one optimizer step in each session step. By hand: `torchrun --nproc-per-node=2 train.py`."""

import deepspeed
import torch
from torch import nn

from perdure.training import Session
from perdure.training.engine.data import ResumableLoader


class Squares(torch.utils.data.Dataset[tuple[torch.Tensor, torch.Tensor]]):
    """Item i is a pure function of i."""

    def __len__(self) -> int:
        return 500

    def __getitem__(self, index: int) -> tuple[torch.Tensor, torch.Tensor]:
        x = torch.sin(torch.arange(16) * (index + 1.0))
        return x, x[:4] * x[4:8]


def train(session: Session) -> None:
    params = session.params
    torch.manual_seed(params["seed"])  # the same weights in every rank ...
    model = nn.Sequential(nn.Linear(16, 64), nn.ReLU(), nn.Dropout(0.1), nn.Linear(64, 4))
    config = {
        "train_micro_batch_size_per_gpu": params["micro_batch"],
        "gradient_accumulation_steps": params["accumulation"],
        "optimizer": {"type": "AdamW", "params": {"lr": params["lr"], "torch_adam": True}},
        "scheduler": {"type": "WarmupDecayLR", "params": {"warmup_num_steps": 5, "total_num_steps": session.total_steps}},
        "bf16": {"enabled": True},
        "zero_optimization": {"stage": params["stage"]},
    }
    engine, *_ = deepspeed.initialize(model=model, model_parameters=model.parameters(), config=config)
    torch.manual_seed(params["seed"] + 1 + session.rank)  # ... and dropout of its own
    loader = ResumableLoader(Squares(), batch_size=params["micro_batch"], seed=1, rank=session.rank, world=session.world_size)
    session.track(model=engine, loader=loader)  # optimizer, scheduler and loss scale are the engine's
    batches = loader.forever()
    for _ in session.steps():
        for _ in range(engine.gradient_accumulation_steps()):
            x, y = (part.to(engine.device, torch.bfloat16) for part in next(batches))
            loss = nn.functional.mse_loss(engine(x), y)
            engine.backward(loss)
            engine.step()
        session.log(loss=loss, samples=engine.train_batch_size())


if __name__ == "__main__":
    train(Session.by_hand("run.toml"))
