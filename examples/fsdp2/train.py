"""Parameters, gradients and optimizer state sharded over the ranks. By hand: `torchrun --nproc-per-node=2 train.py`."""

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.fsdp import fully_shard

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
    params, device = session.params, session.device
    dist.init_process_group("nccl" if device.type == "cuda" else "gloo")
    torch.manual_seed(params["seed"])  # the same weights in every rank ...
    model = nn.Sequential(nn.Linear(16, 64), nn.ReLU(), nn.Dropout(0.1), nn.Linear(64, 4)).to(device)
    torch.manual_seed(params["seed"] + 1 + session.rank)  # ... and dropout of its own
    for part in (model[0], model[3], model):
        fully_shard(part)
    optimizer = torch.optim.AdamW(model.parameters(), lr=params["lr"])
    scheduler = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, session.total_steps)
    loader = ResumableLoader(Squares(), batch_size=params["batch"], seed=1, rank=session.rank, world=session.world_size)
    session.track(model=model, optimizer=optimizer, scheduler=scheduler, loader=loader)
    batches = loader.forever()
    for _ in session.steps():
        x, y = (part.to(device) for part in next(batches))
        loss = nn.functional.mse_loss(model(x), y)
        loss.backward()
        optimizer.step()
        scheduler.step()
        optimizer.zero_grad()
        session.log(loss=loss, samples=len(x))
    dist.destroy_process_group()


if __name__ == "__main__":
    train(Session.by_hand("run.toml"))
