"""The smallest training that can be cut anywhere: a tiny network learns a fixed function. Also runs by hand: python train.py"""

import torch
from torch import nn

from perdure.training import Session
from perdure.training.engine.data import ResumableLoader


class Squares(torch.utils.data.Dataset[tuple[torch.Tensor, torch.Tensor]]):
    """Item i is a pure function of i."""

    def __len__(self) -> int:
        return 512

    def __getitem__(self, index: int) -> tuple[torch.Tensor, torch.Tensor]:
        x = torch.sin(torch.arange(16) * (index + 1.0))
        return x, x[:4] * x[4:8]


def train(session: Session) -> None:
    torch.manual_seed(session.params.get("seed", 0))
    model = nn.Sequential(nn.Linear(16, 32), nn.ReLU(), nn.Dropout(0.1), nn.Linear(32, 4))
    optimizer = torch.optim.AdamW(model.parameters(), lr=session.params.get("lr", 3e-3))
    scheduler = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, session.total_steps)
    loader = ResumableLoader(Squares(), batch_size=16, seed=1)
    session.track(model=model, optimizer=optimizer, scheduler=scheduler, loader=loader)
    batches = loader.forever()
    for _ in session.steps():
        x, y = next(batches)
        loss = nn.functional.mse_loss(model(x), y)
        loss.backward()
        optimizer.step()
        scheduler.step()
        optimizer.zero_grad()
        session.log(loss=loss, samples=len(x))


if __name__ == "__main__":
    train(Session.by_hand("run.toml"))
