"""Another global batch on resume: kept by accumulation it changes nothing; else the rates of all steps are scaled if asked."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch.optim import lr_scheduler

from perdure.training.engine.batches import Batches, Rebatched, scale_rates
from perdure.training.engine.data import ResumableLoader
from perdure.training.engine.restore import restore
from perdure.training.engine.state import collect, note_built
from perdure.training.errors import ConfigError

SCHEDULES: dict[str, Callable[[torch.optim.Optimizer], Any]] = {
    "lambda": lambda optimizer: lr_scheduler.LambdaLR(optimizer, lambda i: 1 / (i + 1)),
    "one cycle": lambda optimizer: lr_scheduler.OneCycleLR(optimizer, 0.5, total_steps=20, cycle_momentum=False),
    "cosine to a floor": lambda optimizer: lr_scheduler.CosineAnnealingLR(optimizer, 12, eta_min=0.01),
    "cyclic": lambda optimizer: lr_scheduler.CyclicLR(optimizer, 0.1, 0.5, step_size_up=3, cycle_momentum=False),
    "sequential": lambda optimizer: lr_scheduler.SequentialLR(
        optimizer, [lr_scheduler.LinearLR(optimizer, 0.1, total_iters=6), lr_scheduler.CosineAnnealingLR(optimizer, 8)], [6]
    ),
    "plateau": lambda optimizer: lr_scheduler.ReduceLROnPlateau(optimizer, factor=0.5, patience=1, min_lr=0.02),
}


def rates(make: Callable[[torch.optim.Optimizer], Any], factor: float, at: int) -> list[float]:
    """Those of 12 steps, scaled before the one numbered `at`."""
    optimizer = torch.optim.SGD([torch.nn.Parameter(torch.ones(1))], lr=0.2)
    scheduler, found = make(optimizer), []
    for step in range(12):
        if step == at:
            scale_rates(optimizer, [scheduler], factor)
        found.append(float(optimizer.param_groups[0]["lr"]))
        optimizer.step()
        scheduler.step(*[1.0] * isinstance(scheduler, lr_scheduler.ReduceLROnPlateau))
    return found


@pytest.mark.parametrize("name", SCHEDULES)
def test_scaled_rates_are_the_same_curve_so_many_times_as_high(name: str) -> None:
    plain, scaled = rates(SCHEDULES[name], 1.0, 0), rates(SCHEDULES[name], 1.5, 5)
    assert scaled[:5] == plain[:5]
    assert scaled[5:] == pytest.approx([1.5 * rate for rate in plain[5:]])


def test_scaled_rates_are_kept_by_the_next_resume_which_has_nothing_to_plan(harness: Any) -> None:
    def build() -> tuple[dict[str, Any], torch.optim.Optimizer, Any]:
        model = torch.nn.Linear(2, 1)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.2)
        scheduler = SCHEDULES["cosine to a floor"](optimizer)
        tracked = {"model": model, "optimizer": optimizer, "scheduler": scheduler}
        note_built(tracked)
        return tracked, optimizer, scheduler

    tracked, optimizer, scheduler = build()
    optimizer.step()
    scheduler.step()
    scale_rates(optimizer, [scheduler], 2.0)
    again, other, follower = build()
    assert restore(again, harness.keep(collect(tracked)).__getitem__) == []
    for one, its in ((optimizer, scheduler), (other, follower)):
        one.step()
        its.step()
    assert other.param_groups[0]["lr"] == optimizer.param_groups[0]["lr"] > 0.2


class Case:
    """One step under a loader of 64 items, after a checkpoint whose steps took `old` samples."""

    def __init__(self, optimizer_of: Any, old: int | None, **flags: bool) -> None:
        model = torch.nn.Linear(2, 1)
        self.optimizer = optimizer_of(model.parameters(), lr=0.1)
        self.loader = ResumableLoader(torch.arange(64), batch_size=8, seed=1)  # type: ignore[arg-type]
        self.tracked = {"model": model, "optimizer": self.optimizer, "loader": self.loader}
        data = {"tokens": 7, "loader": {"global_batch": 4, **({} if old is None else {"step_samples": old})}}
        self.batches, self.said = Batches(self.tracked), list[tuple[str, bool]]()
        settings = {"scale": True, "planned": False, "others": True} | flags
        self.rebatched = Rebatched(self.tracked, self.batches, data, **settings)
        self.rebatched.watch(lambda text, changed: self.said.append((text, changed)))

    def step(self, micro_batches: int) -> float:
        """The learning rate after it."""
        batches = self.loader.forever()
        for _ in range(micro_batches):
            next(batches)
        self.optimizer.step()
        self.rebatched.decide(lambda text, changed: self.said.append((text, changed)))
        self.batches.finished_step()
        return float(self.optimizer.param_groups[0]["lr"])


@pytest.mark.parametrize(
    ("optimizer_of", "old", "micro_batches", "flags", "rate", "told"),
    [
        (torch.optim.SGD, 16, 2, {}, 0.1, ("the global batch of 16 samples is kept, and the learning rate with it", False)),
        (torch.optim.SGD, 16, 4, {}, 0.2, ("from 16 to 32 samples, the learning rate of 'optimizer' is scaled linearly", True)),
        (torch.optim.AdamW, 32, 1, {}, 0.05, ("the learning rate of 'optimizer' is scaled by the square root, x 0.5", True)),
        (torch.optim.AdamW, 32, 1, {"scale": False}, 0.1, ("from 32 to 8 samples, the learning rate is not scaled", True)),
        (torch.optim.SGD, 16, 4, {"planned": True}, 0.1, ("the learning rate is that of the new plan", True)),
        (torch.optim.SGD, None, 1, {}, 0.1, ("how many samples a step takes is not known", False)),
    ],
)  # fmt: skip
def test_what_is_decided_is_done_before_the_first_step_and_said_once(
    optimizer_of: Any, old: int | None, micro_batches: int, flags: dict[str, bool], rate: float, told: tuple[str, bool]
) -> None:
    case = Case(optimizer_of, old, **flags)
    assert case.step(micro_batches) == pytest.approx(rate)
    assert case.step(micro_batches + 1) == pytest.approx(rate), "once, whatever later steps take"
    [(text, changed)] = case.said
    assert (told[0] in text, changed) == (True, told[1]), text
    assert case.batches.of_step == {"loader": 8 * (micro_batches + 1)}


def test_where_nothing_has_changed_nothing_is_said() -> None:
    case = Case(torch.optim.SGD, 16, others=False)
    case.step(2)
    assert case.said == []


def test_an_optimizer_without_a_rule_is_refused_before_it_steps() -> None:
    case = Case(torch.optim.Adagrad, 16)
    with pytest.raises(ConfigError, match=r"scale_lr: no rule is known for 'optimizer' \(Adagrad\)"):
        case.step(1)
