"""The data of the benchmarks: real AdamW state. A small GPT learns Python's own documentation and standard library for some
hundred steps; a tile is its weights and both moments every few steps after that. Larger states are several different tiles.

No two tiles are equal anywhere but by chance: all moments and nearly all weights differ from tile to tile, and equal leaves
lie further apart than a compressor here looks back. Tiles are kept in a cache; more are trained when they are needed."""

import os
import sysconfig
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from pydoc_data.topics import topics
from typing import Any

import torch
from torch import Tensor

from examples.gpt.train import GPT, loss_of

CACHE = Path(os.environ.get("PERDURE_BENCH_CACHE", "~/.cache/perdure-bench")).expanduser()
FINE_TUNING_RATE = 3e-6
Tracked = dict[str, Any]
"""{"model": a module, "optimizer": its AdamW}."""


@dataclass(frozen=True)
class Shape:
    """What is trained, and how long before the first tile."""

    name: str
    layers: int
    width: int
    heads: int
    block: int
    batch: int
    steps: int
    every: int
    """Steps from one tile to the next."""

    def model(self) -> GPT:
        return GPT(self.layers, self.width, self.heads, self.block, 0.0)

    @property
    def parameters(self) -> int:
        with torch.device("meta"):
            return sum(parameter.numel() for parameter in self.model().parameters())


FULL = Shape("gpt-10.8M", layers=6, width=384, heads=6, block=128, batch=4, steps=300, every=5)
TINY = Shape("gpt-tiny", layers=2, width=64, heads=2, block=32, batch=2, steps=10, every=2)


def text() -> Tensor:
    """Python's documentation topics and the top of its standard library."""
    library = sorted(Path(sysconfig.get_path("stdlib")).glob("*.py"))
    parts = [topics[name].encode() for name in sorted(topics)] + [path.read_bytes() for path in library]
    return torch.frombuffer(bytearray(b"\n".join(parts)), dtype=torch.uint8)


class Training:
    """A run that can be left at a tile and taken up again: batches are drawn by the number of the step."""

    def __init__(self, shape: Shape, saved: dict[str, Any] | None = None, rate: float = 6e-4) -> None:  # Any: a tile
        torch.manual_seed(0)
        self.shape, self.text, self.rate = shape, text(), rate
        self.model, self.step = shape.model(), 0
        self.optimizer = torch.optim.AdamW(self.model.parameters(), lr=rate, betas=(0.9, 0.95), weight_decay=0.1)
        if saved is not None:
            self.model.load_state_dict(saved["model"])
            self.optimizer.load_state_dict(saved["optimizer"])
            self.step = saved["step"]

    def advance(self, steps: int) -> None:
        for _ in range(steps):
            self._one()

    def _one(self) -> None:
        shape, draw = self.shape, torch.Generator().manual_seed(self.step)
        starts = torch.randint(len(self.text) - shape.block - 1, (shape.batch,), generator=draw)
        windows = torch.stack([self.text[start : start + shape.block + 1].long() for start in starts.tolist()])
        for group in self.optimizer.param_groups:
            group["lr"] = self.rate * min(1.0, (self.step + 1) / 50)
        loss = loss_of(self.model, windows[:, :-1], windows[:, 1:])
        loss.backward()  # type: ignore[no-untyped-call]  # torch's stub
        torch.nn.utils.clip_grad_norm_(self.model.parameters(), 1.0)
        self.optimizer.step()
        self.optimizer.zero_grad()
        self.step += 1

    def state(self) -> dict[str, Any]:  # Any: state dicts
        return {"model": self.model.state_dict(), "optimizer": self.optimizer.state_dict(), "step": self.step}


def _folder(shape: Shape) -> Path:
    return CACHE / f"{shape.name}-{shape.batch}x{shape.block}-{shape.steps}+{shape.every}-torch{torch.__version__}"


def _keep(state: dict[str, Any], path: Path) -> None:  # Any: state dicts
    path.parent.mkdir(parents=True, exist_ok=True)
    part = path.with_suffix(f".{os.getpid()}")
    torch.save(state, part)
    part.replace(path)


def load(path: Path) -> dict[str, Any]:  # Any: state dicts
    found: dict[str, Any] = torch.load(path, weights_only=True)
    return found


def tiles(shape: Shape, count: int) -> list[Path]:
    """The first `count` tiles, trained where the cache lacks them. Computes: call it in a process of its own."""
    paths = [_folder(shape) / f"tile-{number:02d}.pt" for number in range(count)]
    run: Training | None = None
    for number, path in enumerate(paths):
        if path.exists():
            continue
        if run is None:
            run = Training(shape, load(paths[number - 1])) if number else Training(shape)
        run.advance(shape.steps + shape.every * number - run.step)
        _keep(run.state(), path)
    return paths


def fine_tuned(shape: Shape, steps: int) -> Path:
    """The first tile, trained on for `steps` at a fine-tuning learning rate. Computes, as `tiles` does."""
    path = _folder(shape) / f"fine-{steps}.pt"
    if not path.exists():
        run = Training(shape, load(tiles(shape, 1)[0]), FINE_TUNING_RATE)
        run.advance(steps)
        _keep(run.state(), path)
    return path


def needed(shape: Shape, size: int) -> int:
    """How many tiles come nearest to `size` bytes of weights and moments."""
    return max(1, round(size / (12 * shape.parameters)))


def build(shape: Shape, paths: list[Path]) -> Tracked:
    """One module and one AdamW that hold all these tiles side by side. Only loads; no thread pool is started."""
    with torch.device("meta"):
        model = torch.nn.ModuleList(shape.model() for _ in paths)
    saved = [load(path) for path in paths]
    for part, tile in zip(model, saved, strict=True):
        part.load_state_dict(tile["model"], assign=True)
    group = {key: value for key, value in saved[0]["optimizer"]["param_groups"][0].items() if key not in ("params", "lr")}
    optimizer = torch.optim.AdamW(model.parameters(), lr=saved[0]["optimizer"]["param_groups"][0]["lr"])
    optimizer.param_groups[0].update(group)
    moments = [state for tile in saved for _, state in sorted(tile["optimizer"]["state"].items())]
    for parameter, state in zip(model.parameters(), moments, strict=True):
        optimizer.state[parameter] = state
    return {"model": model, "optimizer": optimizer}


def tensors(tracked: Tracked) -> Iterator[tuple[str, Tensor]]:
    """Every tensor of the state by a flat name."""
    yield from ((f"model.{name}", value) for name, value in tracked["model"].state_dict().items())
    for number, state in tracked["optimizer"].state_dict()["state"].items():
        yield from ((f"optimizer.{number}.{name}", value) for name, value in state.items())


def nbytes(tracked: Tracked) -> int:
    return sum(value.nbytes for _, value in tensors(tracked))
