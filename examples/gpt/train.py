"""A small GPT learns Python's documentation, byte by byte. Resumable: `perdure run run.toml`; by hand: `python train.py`."""

from pydoc_data.topics import topics

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from perdure.training import Session
from perdure.training.engine.data import ResumableLoader, fingerprint


class Windows(torch.utils.data.Dataset[tuple[Tensor, Tensor]]):
    """Item i is the i-th window of the text, as (bytes, the same shifted by one)."""

    def __init__(self, text: bytes, block: int) -> None:
        self.text, self.block = torch.frombuffer(bytearray(text), dtype=torch.uint8).long(), block

    def __len__(self) -> int:
        return (len(self.text) - 1) // self.block

    def __getitem__(self, index: int) -> tuple[Tensor, Tensor]:
        window = self.text[index * self.block :][: self.block + 1]
        return window[:-1], window[1:]


class Block(nn.Module):
    """Attention to what came before, then a two-layer perceptron, each added to the stream."""

    def __init__(self, width: int, heads: int, dropout: float) -> None:
        super().__init__()
        self.heads, self.dropout = heads, dropout
        self.norm1, self.norm2 = nn.LayerNorm(width), nn.LayerNorm(width)
        self.qkv, self.out = nn.Linear(width, 3 * width), nn.Linear(width, width)
        self.mlp = nn.Sequential(nn.Linear(width, 4 * width), nn.GELU(), nn.Linear(4 * width, width), nn.Dropout(dropout))

    def forward(self, x: Tensor) -> Tensor:
        batch, length, width = x.shape
        q, k, v = self.qkv(self.norm1(x)).view(batch, length, 3, self.heads, -1).permute(2, 0, 3, 1, 4)
        seen = F.scaled_dot_product_attention(q, k, v, is_causal=True, dropout_p=self.dropout if self.training else 0.0)
        x = x + self.out(seen.transpose(1, 2).reshape(batch, length, width))
        return x + self.mlp(self.norm2(x))


class GPT(nn.Module):
    """Bytes in, the logits of each next byte out. The embedding is also the output layer."""

    def __init__(self, layers: int, width: int, heads: int, block: int, dropout: float) -> None:
        super().__init__()
        self.bytes, self.places = nn.Embedding(256, width), nn.Embedding(block, width)
        self.blocks = nn.Sequential(*(Block(width, heads, dropout) for _ in range(layers)))
        self.norm = nn.LayerNorm(width)
        for parameter in self.parameters():
            if parameter.ndim > 1:
                nn.init.normal_(parameter, std=0.02)

    def forward(self, x: Tensor) -> Tensor:
        stream = self.bytes(x) + self.places(torch.arange(x.shape[1], device=x.device))
        return F.linear(self.norm(self.blocks(stream)), self.bytes.weight)


def loss_of(model: nn.Module, x: Tensor, y: Tensor) -> Tensor:
    return F.cross_entropy(model(x).flatten(0, 1), y.flatten())


@torch.no_grad()
def evaluate(model: nn.Module, dataset: Windows, batch_size: int) -> float:
    model.eval()
    batches = torch.utils.data.DataLoader(dataset, batch_size)
    loss = sum(loss_of(model, x, y).item() * len(x) for x, y in batches) / len(dataset)
    model.train()
    return loss


def train(session: Session) -> None:
    p = session.params
    torch.manual_seed(p["seed"])
    text = "\n".join(topics[name] for name in sorted(topics)).encode()
    held_out = len(text) // 50
    training, validation = Windows(text[:-held_out], p["block"]), Windows(text[-held_out:], p["block"])

    model = GPT(p["layers"], p["width"], p["heads"], p["block"], p["dropout"])
    optimizer = torch.optim.AdamW(model.parameters(), lr=p["lr"], betas=(0.9, 0.95), weight_decay=0.1)
    warmup = torch.optim.lr_scheduler.LinearLR(optimizer, 0.05, total_iters=p["warmup"])
    decay = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, session.total_steps - p["warmup"], eta_min=p["lr"] / 10)
    scheduler = torch.optim.lr_scheduler.SequentialLR(optimizer, [warmup, decay], [p["warmup"]])
    loader = ResumableLoader(training, batch_size=p["batch"], seed=p["seed"], drop_last=True, fingerprint=fingerprint([text]))

    session.track(model=model, optimizer=optimizer, scheduler=scheduler, loader=loader)
    batches = loader.forever()
    for step in session.steps():
        x, y = next(batches)
        loss = loss_of(model, x, y)
        loss.backward()
        nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        scheduler.step()
        optimizer.zero_grad()
        session.log(loss=loss, tokens=y.numel(), lr=scheduler.get_last_lr()[0])
        if (step + 1) % p["evaluate_every"] == 0:
            with session.evaluation():
                validation_loss = evaluate(model, validation, p["batch"])
            session.log(validation_loss=validation_loss)
            print(f"step {step + 1:4d}  loss {loss.item():.3f}  validation {validation_loss:.3f}", flush=True)


if __name__ == "__main__":
    train(Session.by_hand("run.toml"))
