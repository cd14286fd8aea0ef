"""Cut anywhere, resumed through bytes: bit for bit the training that was not cut."""

import itertools
import random
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn
from torch.optim import lr_scheduler
from torch.optim.swa_utils import AveragedModel, get_ema_multi_avg_fn
from torchdata.stateful_dataloader import StatefulDataLoader

from perdure.training.engine.data import ResumableLoader, ResumableSampler

# torchdata 0.11 calls a function that torch 2.13 deprecates
pytestmark = pytest.mark.filterwarnings("ignore:'set_vital' is deprecated")


def flat(parts: Any) -> list[int]:
    return list(itertools.chain.from_iterable(parts))


def tiny() -> nn.Sequential:
    return nn.Sequential(nn.Linear(16, 32), nn.ReLU(), nn.Dropout(0.1), nn.Linear(32, 4))


def example(index: int) -> torch.Tensor:
    return torch.sin(torch.arange(16) * (index + 1.0))


def loss_of(model: nn.Module, inputs: torch.Tensor) -> torch.Tensor:
    return (model(inputs) - inputs[..., :4].mean(dim=1, keepdim=True)).square().mean()


def one_step(model: nn.Module, optimizer: torch.optim.Optimizer, inputs: torch.Tensor) -> str:
    loss = loss_of(model, inputs)
    loss.backward()
    optimizer.step()
    optimizer.zero_grad()
    return loss.item().hex()


def batch(step: int) -> torch.Tensor:
    return torch.stack([example(step * 4 + offset) for offset in range(4)])


SCHEDULERS: dict[str, Callable[[torch.optim.Optimizer], Any]] = {
    "lambda": lambda optimizer: lr_scheduler.LambdaLR(optimizer, lambda step: 1 - step / 20),
    "one cycle": lambda optimizer: lr_scheduler.OneCycleLR(optimizer, 0.01, total_steps=12),
    "warm-up then cosine": lambda optimizer: lr_scheduler.SequentialLR(
        optimizer, [lr_scheduler.LinearLR(optimizer, 0.1, total_iters=3), lr_scheduler.CosineAnnealingLR(optimizer, 7)], [3]
    ),
    "cosine": lambda optimizer: lr_scheduler.CosineAnnealingLR(optimizer, 8),
    "chained": lambda optimizer: lr_scheduler.ChainedScheduler(
        [lr_scheduler.ConstantLR(optimizer, 0.1, 3), lr_scheduler.ExponentialLR(optimizer, 0.9)]
    ),
    "steps": lambda optimizer: lr_scheduler.MultiStepLR(optimizer, [2, 5]),
    "restarts": lambda optimizer: lr_scheduler.CosineAnnealingWarmRestarts(optimizer, 3),
    "cyclic": lambda optimizer: lr_scheduler.CyclicLR(optimizer, 1e-4, 1e-2, 3, cycle_momentum=False),
    "polynomial": lambda optimizer: lr_scheduler.PolynomialLR(optimizer, 10, 2.0),
    "plateau": lambda optimizer: lr_scheduler.ReduceLROnPlateau(optimizer, patience=1, threshold=10.0),
}


@pytest.mark.parametrize("name", SCHEDULERS)
def test_every_scheduler_goes_on_bit_for_bit(harness: Any, name: str) -> None:
    def build() -> Any:
        model = tiny()
        optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
        scheduler = SCHEDULERS[name](optimizer)

        def step(number: int) -> Any:
            loss = one_step(model, optimizer, batch(number))
            scheduler.step(*([float.fromhex(loss)] if name == "plateau" else []))
            return loss, optimizer.param_groups[0]["lr"]

        return harness.Training({"model": model, "optimizer": optimizer, "scheduler": scheduler}, step)

    whole = harness.assert_cuts_do_not_matter(build, 9, (4,), (2, 3, 7))
    assert len({lr for _, lr in whole.returned}) > 1


OPTIMIZERS: dict[str, Callable[[Any], torch.optim.Optimizer]] = {
    "sgd momentum": lambda parameters: torch.optim.SGD(parameters, lr=0.1, momentum=0.9, nesterov=True),
    "adam": lambda parameters: torch.optim.Adam(parameters, lr=0.01, amsgrad=True),
    "adamw fused": lambda parameters: torch.optim.AdamW(parameters, lr=0.01, fused=True),
    "adamw foreach": lambda parameters: torch.optim.AdamW(parameters, lr=0.01, foreach=True),
    "adamw lr tensor": lambda parameters: torch.optim.AdamW(parameters, lr=torch.tensor(0.01), foreach=False),
    "adagrad": lambda parameters: torch.optim.Adagrad(parameters, lr=0.1),
    "rmsprop": lambda parameters: torch.optim.RMSprop(parameters, lr=0.01, momentum=0.5, centered=True),
    "nadam": lambda parameters: torch.optim.NAdam(parameters, lr=0.01),
}


@pytest.mark.parametrize("name", OPTIMIZERS)
def test_every_optimizer_goes_on_bit_for_bit(harness: Any, name: str) -> None:
    def build() -> Any:
        model = tiny()
        optimizer = OPTIMIZERS[name](model.parameters())
        return harness.Training(
            {"model": model, "optimizer": optimizer}, lambda number: one_step(model, optimizer, batch(number))
        )

    harness.assert_cuts_do_not_matter(build, 7, (3,), (1, 2, 6))


def test_named_parameters_in_two_groups_go_on_bit_for_bit(harness: Any) -> None:
    def build() -> Any:
        model = tiny()
        named = list(model.named_parameters())
        decayed = [(name, parameter) for name, parameter in named if parameter.ndim > 1]
        plain = [(name, parameter) for name, parameter in named if parameter.ndim == 1]
        groups: Any = [{"params": decayed, "weight_decay": 0.1}, {"params": plain, "weight_decay": 0.0}]
        optimizer = torch.optim.AdamW(groups, lr=0.01)
        return harness.Training(
            {"model": model, "optimizer": optimizer}, lambda number: one_step(model, optimizer, batch(number))
        )

    harness.assert_cuts_do_not_matter(build, 5, (3,))


class ShiftedMoments(torch.optim.Optimizer):
    """A user's optimizer: fp32 moments whatever the parameter's type, a plain counter, a state entry of its own."""

    def __init__(self, parameters: Any) -> None:
        super().__init__(parameters, {"lr": 0.01, "note": "mine"})

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:
        for group in self.param_groups:
            for parameter in group["params"]:
                state = self.state[parameter]
                state["count"] = state.get("count", 0) + 1
                moment = state.setdefault("moment", torch.zeros(parameter.shape, dtype=torch.float32))
                moment.mul_(0.9).add_(parameter.grad.float(), alpha=0.1)
                parameter.add_((-group["lr"] * moment / state["count"]).to(parameter.dtype))


def test_fp32_moments_of_bf16_parameters_stay_fp32(harness: Any) -> None:
    def build() -> Any:
        model = tiny().to(torch.bfloat16)
        optimizer = ShiftedMoments(model.parameters())
        return harness.Training(
            {"model": model, "optimizer": optimizer}, lambda number: one_step(model, optimizer, batch(number).bfloat16())
        )

    whole = harness.assert_cuts_do_not_matter(build, 6, (2,), (1, 4))
    assert whole.kept["optimizer/model.0.weight/moment"].dtype == "float32"


def test_gradient_accumulation_goes_on_bit_for_bit(harness: Any) -> None:
    def build() -> Any:
        model = tiny()
        optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
        loader = ResumableLoader(range(64), batch_size=4, seed=3)  # type: ignore[arg-type]
        batches = loader.forever()

        def step(_: int) -> list[int]:
            seen: list[int] = []
            for _ in range(4):
                indices = next(batches).tolist()
                seen += indices
                (loss_of(model, torch.stack([example(index) for index in indices])) / 4).backward()
            optimizer.step()
            optimizer.zero_grad()
            return seen

        return harness.Training({"model": model, "optimizer": optimizer, "loader": loader}, step)

    whole = harness.assert_cuts_do_not_matter(build, 8, (3,), (4, 5))
    assert sorted(flat(whole.returned[:4])) == list(range(64))


def test_of_30_epochs_cut_at_20_the_other_ten_follow_whatever_the_accumulation(harness: Any) -> None:
    """D3: 4 steps an epoch, of 4 micro batches each."""

    def build() -> Any:
        model = nn.Linear(1, 1)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
        loader = ResumableLoader(range(64), batch_size=4, seed=3)  # type: ignore[arg-type]
        batches = loader.forever()

        def step(_: int) -> tuple[int, list[int]]:
            epoch, seen = loader.epoch + loader.epoch_done, []
            for _ in range(4):
                indices = next(batches)
                seen += indices.tolist()
                (model(indices.float().mean().view(1)) / 400).backward()
            optimizer.step()
            optimizer.zero_grad()
            return epoch, seen

        return harness.Training({"model": model, "optimizer": optimizer, "loader": loader}, step)

    whole, resumed = harness.run(build, 120), harness.run(build, 120, (80,))
    assert resumed.returned == whole.returned
    assert [epoch for epoch, _ in resumed.returned[80:]] == [epoch for epoch in range(20, 30) for _ in range(4)]
    for epoch in range(30):
        assert sorted(flat(seen for of, seen in resumed.returned if of == epoch)) == list(range(64))
    assert (resumed.last.tracked["loader"].epoch, resumed.last.tracked["loader"].epoch_done) == (29, True)


def test_batch_norm_and_channels_last_convolutions_go_on_bit_for_bit(harness: Any) -> None:
    def build() -> Any:
        model = nn.Sequential(nn.Conv2d(2, 4, 3), nn.BatchNorm2d(4), nn.ReLU(), nn.Flatten(), nn.Linear(16, 2))
        model = model.to(memory_format=torch.channels_last)  # type: ignore[call-overload]
        optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)

        def step(_: int) -> str:
            loss = model(torch.randn(3, 2, 4, 4)).square().mean()
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
            return float(loss.item()).hex()

        return harness.Training({"model": model, "optimizer": optimizer}, step)

    whole = harness.assert_cuts_do_not_matter(build, 6, (3,), (1, 5))
    resumed = harness.run(build, 6, (3,))
    weight = resumed.last.tracked["model"][0].weight
    assert resumed.last.tracked["optimizer"].state[weight]["exp_avg"].stride() == weight.stride()
    assert whole.kept["model/1.num_batches_tracked"].shape == ()


def test_tied_weights_stay_tied(harness: Any) -> None:
    class Tied(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.embedding, self.head = nn.Embedding(8, 4), nn.Linear(4, 8, bias=False)
            self.head.weight = self.embedding.weight

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return self.head(self.embedding(x))  # type: ignore[no-any-return]

    def build() -> Any:
        model = Tied()
        optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)

        def step(number: int) -> str:
            loss = nn.functional.cross_entropy(model(torch.arange(8)), (torch.arange(8) + number) % 8)
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
            assert model.head.weight is model.embedding.weight
            return loss.item().hex()

        return harness.Training({"model": model, "optimizer": optimizer}, step)

    harness.assert_cuts_do_not_matter(build, 5, (2,))


class Ema:
    """F7: an average whose decay depends on how often it was updated."""

    def __init__(self, model: nn.Module) -> None:
        self.updates, self.average, self.last_decay = 0, {name: p.detach().clone() for name, p in model.named_parameters()}, 0.0

    def update(self, model: nn.Module) -> None:
        self.updates += 1
        self.last_decay = min(0.999, (1 + self.updates) / (10 + self.updates))
        for name, parameter in model.named_parameters():
            self.average[name].lerp_(parameter.detach(), 1 - self.last_decay)

    def state_dict(self) -> dict[str, Any]:
        return {"updates": self.updates, "average": self.average}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.updates, self.average = state["updates"], state["average"]


def test_averaged_models_go_on_with_their_counters(harness: Any) -> None:
    def build() -> Any:
        model = tiny()
        optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
        swa, ema = AveragedModel(model, multi_avg_fn=get_ema_multi_avg_fn(0.9)), Ema(model)  # type: ignore[no-untyped-call]

        def step(number: int) -> Any:
            loss = one_step(model, optimizer, batch(number))
            swa.update_parameters(model)
            ema.update(model)
            return loss, ema.last_decay

        return harness.Training({"model": model, "optimizer": optimizer, "swa": swa, "ema": ema}, step)

    harness.assert_cuts_do_not_matter(build, 7, (4,))
    resumed = harness.run(build, 5, (4,))
    assert resumed.returned[4][1] == 6 / 15  # a lost counter would give 2/11


class Adapted(nn.Module):
    """A frozen linear layer with a low-rank adapter beside it."""

    def __init__(self, base: nn.Linear) -> None:
        super().__init__()
        self.base = base.requires_grad_(False)
        self.lora_a, self.lora_b = (
            nn.Parameter(torch.randn(2, base.in_features)),
            nn.Parameter(torch.zeros(base.out_features, 2)),
        )

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.base(x) + x @ self.lora_a.T @ self.lora_b.T  # type: ignore[no-any-return]


def test_adapters_go_on_and_their_base_never_changes(harness: Any) -> None:
    def build() -> Any:
        model = nn.Sequential(Adapted(nn.Linear(16, 32)), nn.ReLU(), Adapted(nn.Linear(32, 4)))
        optimizer = torch.optim.AdamW([p for p in model.parameters() if p.requires_grad], lr=0.01)
        return harness.Training(
            {"model": model, "optimizer": optimizer}, lambda number: one_step(model, optimizer, batch(number))
        )

    whole = harness.assert_cuts_do_not_matter(build, 6, (4,))
    first = harness.run(build, 1)
    assert bytes(whole.kept["model/0.base.weight"].data) == bytes(first.kept["model/0.base.weight"].data)


def test_a_gradient_scaler_keeps_its_scale_and_skips_nothing_after_the_cut(harness: Any) -> None:
    def build() -> Any:
        model = nn.Linear(16, 4)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
        scheduler = lr_scheduler.LambdaLR(optimizer, lambda step: 1 / (1 + step))
        scaler = torch.amp.GradScaler("cpu", init_scale=65536.0)

        def step(number: int) -> Any:
            loss = loss_of(model, batch(number)) * (float("inf") if number < 8 else 1.0)
            scaler.scale(loss).backward()
            before = scaler.get_scale()
            scaler.step(optimizer)
            scaler.update()
            if scaler.get_scale() >= before:  # the rule here: the schedule follows the steps made
                scheduler.step()
            optimizer.zero_grad()
            return scaler.get_scale(), scheduler.last_epoch

        return harness.Training({"model": model, "optimizer": optimizer, "scheduler": scheduler, "scaler": scaler}, step)

    whole, resumed = harness.run(build, 14), harness.run(build, 14, (9,))
    assert [scale for scale, _ in resumed.returned[8:]] == [256.0] * 6
    assert resumed.returned == whole.returned
    assert resumed.digests == whole.digests
    assert resumed.returned[-1][1] == 6


class Augmented(torch.utils.data.Dataset[torch.Tensor]):
    """Random augmentation by all three generators."""

    def __len__(self) -> int:
        return 24

    def __getitem__(self, index: int) -> torch.Tensor:
        noise = random.random() + np.random.rand() + torch.rand(()).item()
        return example(index) + 0.1 * noise


@pytest.mark.parametrize("workers", [0, 2])
def test_random_augmentation_goes_on_bit_for_bit(harness: Any, workers: int) -> None:
    def build() -> Any:
        model = tiny()
        optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
        loader = ResumableLoader(Augmented(), batch_size=4, seed=1, num_workers=workers)
        batches = loader.forever()
        return harness.Training(
            {"model": model, "optimizer": optimizer, "loader": loader}, lambda _: one_step(model, optimizer, next(batches))
        )

    harness.assert_cuts_do_not_matter(build, 9, (3,), (6, 7))


class Items(torch.utils.data.Dataset[torch.Tensor]):
    def __len__(self) -> int:
        return 32

    def __getitem__(self, index: int) -> torch.Tensor:
        return example(index)


class ShuffleBuffer(torch.utils.data.IterableDataset[int]):
    """B6: a stream read through a shuffle buffer; buffer and generator are in the state."""

    def __init__(self, items: int, size: int) -> None:
        self.items, self.size, self.next_item, self.buffer, self.generator = items, size, 0, list[int](), random.Random(5)

    def __iter__(self) -> Any:
        while self.buffer or self.next_item < self.items:
            while len(self.buffer) < self.size and self.next_item < self.items:
                self.buffer.append(self.next_item)
                self.next_item += 1
            yield self.buffer.pop(self.generator.randrange(len(self.buffer)))

    def state_dict(self) -> dict[str, Any]:
        return {"next": self.next_item, "buffer": list(self.buffer), "generator": self.generator.getstate()}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.next_item, self.buffer = state["next"], list(state["buffer"])
        self.generator.setstate(state["generator"])


def endless(loader: Any) -> Any:
    while True:
        yield from loader


@pytest.mark.parametrize("workers", [0, 2])
@pytest.mark.parametrize("kind", ["own shuffle", "resumable sampler"])
def test_torchdata_loaders_go_on_bit_for_bit(harness: Any, kind: str, workers: int) -> None:
    def build() -> Any:
        model = tiny()
        optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
        if kind == "own shuffle":
            generator = torch.Generator().manual_seed(2)
            loader = StatefulDataLoader(Items(), batch_size=8, shuffle=True, num_workers=workers, generator=generator)
        else:
            sampler = ResumableSampler(Items(), seed=4, batch_size=8)
            loader = StatefulDataLoader(Items(), batch_size=8, sampler=sampler, num_workers=workers)
        batches = endless(loader)
        return harness.Training(
            {"model": model, "optimizer": optimizer, "loader": loader}, lambda _: one_step(model, optimizer, next(batches))
        )

    whole = harness.run(build, 10)
    for cuts in ((3,), (4,), (2, 5, 8)):  # 4 and 8 are ends of an epoch
        resumed = harness.run(build, 10, cuts)
        assert resumed.returned == whole.returned, cuts
        assert harness.digest_of({path: leaf for path, leaf in resumed.kept.items() if not path.startswith("loader")}) == (
            harness.digest_of({path: leaf for path, leaf in whole.kept.items() if not path.startswith("loader")})
        )


def test_a_shuffle_buffer_in_the_state_loses_and_repeats_nothing(harness: Any) -> None:
    def build() -> Any:
        loader = StatefulDataLoader(ShuffleBuffer(1000, 100), batch_size=10)
        batches = iter_late(loader)
        return harness.Training({"loader": loader}, lambda _: next(batches).tolist())

    whole, resumed = harness.run(build, 100), harness.run(build, 100, (30, 95))
    assert resumed.returned == whole.returned
    assert sorted(flat(resumed.returned)) == list(range(1000))


def iter_late(loader: Any) -> Any:
    yield from loader
