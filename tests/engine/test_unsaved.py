"""What nobody would save is refused in the first steps: schedulers, scalers, optimizers, parameters and data beside what is
tracked; and what is nobody's business is left alone."""

import copy
import logging
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from torch import nn
from torch.utils.data import DataLoader
from torchdata.stateful_dataloader import StatefulDataLoader

from perdure.training.engine.data import ResumableLoader
from perdure.training.engine.invariants import StepWatch
from perdure.training.engine.unsaved import check_registered
from perdure.training.errors import ConfigError

# torchdata 0.11 calls a function that torch 2.13 deprecates
pytestmark = pytest.mark.filterwarnings("ignore:'set_vital' is deprecated")


def made(**more: Any) -> dict[str, Any]:
    model = nn.Linear(4, 2)
    return {"model": model, "optimizer": torch.optim.SGD(model.parameters(), lr=0.1), **more}


def test_a_scheduler_that_nobody_saves_is_refused() -> None:
    tracked = made()
    scheduler = torch.optim.lr_scheduler.LambdaLR(tracked["optimizer"], lambda step: 1.0)
    with pytest.raises(ConfigError, match="a LambdaLR is in use, but not tracked"):
        check_registered(tracked)
    check_registered({**tracked, "scheduler": scheduler})


def test_a_scheduler_that_another_tracked_object_only_knows_is_refused() -> None:
    tracked = made()
    wrapper = Wrapper(tracked["optimizer"])
    wrapper.scheduler = torch.optim.lr_scheduler.LambdaLR(tracked["optimizer"], lambda step: 1.0)  # type: ignore[attr-defined]
    with pytest.raises(ConfigError, match="a LambdaLR is in use, but not tracked"):
        check_registered({**tracked, "wrapper": wrapper})


def test_a_dropped_scheduler_is_not_missed() -> None:
    tracked = made()
    torch.optim.lr_scheduler.LambdaLR(tracked["optimizer"], lambda step: 1.0)
    check_registered(tracked)


def test_schedulers_inside_a_tracked_one_are_saved_with_it() -> None:
    tracked = made()
    parts = [torch.optim.lr_scheduler.ConstantLR(tracked["optimizer"], 0.5, 2) for _ in range(2)]
    check_registered({**tracked, "scheduler": torch.optim.lr_scheduler.ChainedScheduler(parts)})  # type: ignore[arg-type]


def test_a_scaler_that_nobody_saves_is_refused() -> None:
    tracked, scaler = made(), torch.amp.GradScaler("cpu")
    check_registered(tracked)  # not used yet
    scaler.scale(tracked["model"](torch.ones(4)).sum()).backward()
    with pytest.raises(ConfigError, match="a GradScaler is in use, but not tracked"):
        check_registered(tracked)


class Wrapper:
    """A user's object around an optimizer, which saves it."""

    def __init__(self, optimizer: torch.optim.Optimizer) -> None:
        self.inner = [optimizer]

    def state_dict(self) -> dict[str, Any]:
        return self.inner[0].state_dict()

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.inner[0].load_state_dict(state)


@pytest.mark.parametrize("others", [False, True])
def test_an_optimizer_of_a_tracked_model_that_nobody_saves_is_refused(others: bool) -> None:
    model = nn.Linear(4, 2)
    optimizer = torch.optim.AdamW(model.parameters())
    model(torch.ones(4)).sum().backward()
    optimizer.step()
    tracked = {**(made() if others else {}), "second": model}
    with pytest.raises(ConfigError, match="a AdamW is in use, but not tracked"):
        check_registered(tracked)
    check_registered({**tracked, "wrapper": Wrapper(optimizer)})


def test_a_scheduler_whose_optimizer_is_not_tracked_either_is_refused() -> None:
    model = nn.Linear(4, 2)
    scheduler = torch.optim.lr_scheduler.LambdaLR(torch.optim.SGD(model.parameters(), lr=0.1), lambda step: 1.0)
    with pytest.raises(ConfigError, match="a LambdaLR is in use, but not tracked"):
        check_registered({"model": model})
    assert scheduler.last_epoch == 0


def test_parameters_that_nobody_saves_are_refused() -> None:
    tracked, stray = made(), nn.Parameter(torch.ones(2))
    tracked["optimizer"].add_param_group({"params": [stray]})
    with pytest.raises(ConfigError, match="parameter 0 of group 1 of optimizer 'optimizer' belongs to nothing that is tracked"):
        check_registered(tracked)


def test_a_copy_of_a_model_that_nobody_saves_is_told(caplog: pytest.LogCaptureFixture) -> None:
    tracked = made()
    with caplog.at_level(logging.WARNING):
        check_registered(tracked)
    before = len(caplog.records)
    average = copy.deepcopy(tracked["model"])
    with caplog.at_level(logging.WARNING):
        check_registered(tracked)
        assert len(caplog.records) > before
        told = len(caplog.records)
        check_registered({**tracked, "average": average})
        assert len(caplog.records) - told == before
    assert "a Linear looks like a copy" in caplog.text


def scaled_step(scaler: torch.amp.GradScaler, model: nn.Module, optimizer: torch.optim.Optimizer, factor: float = 1.0) -> None:
    optimizer.zero_grad()
    scaler.scale(model(torch.ones(4)).sum() * factor).backward()
    scaler.step(optimizer)
    scaler.update()


@pytest.mark.parametrize("first", [1.0, float("inf")])
def test_a_second_scaler_that_nobody_saves_is_refused_once_it_scales_for_a_tracked_optimizer(first: float) -> None:
    scaler, forgotten = torch.amp.GradScaler("cpu"), torch.amp.GradScaler("cpu")
    tracked = made(scaler=scaler, off=torch.amp.GradScaler("cpu", enabled=False))
    critic = nn.Linear(4, 2)
    tracked |= {"critic": critic, "critic_optimizer": torch.optim.SGD(critic.parameters(), lr=0.1)}
    watch = StepWatch(tracked)
    scaled_step(scaler, tracked["model"], tracked["optimizer"])
    scaled_step(forgotten, critic, tracked["critic_optimizer"], first)
    if first != 1.0:  # left out: nothing has stepped yet
        watch.finished_step(1)
        scaled_step(forgotten, critic, tracked["critic_optimizer"])
    with pytest.raises(ConfigError, match="a GradScaler is in use, but not tracked"):
        watch.finished_step(2)
    watch.close()


def test_a_scaler_for_what_is_none_of_the_runs_is_left_alone() -> None:
    scaler, other = torch.amp.GradScaler("cpu"), torch.amp.GradScaler("cpu")
    tracked, probe = made(scaler=scaler), nn.Linear(4, 2)
    watch, probing = StepWatch(tracked), torch.optim.SGD(probe.parameters(), lr=0.1)
    for step in range(1, 4):
        scaled_step(other, probe, probing)
        scaled_step(scaler, tracked["model"], tracked["optimizer"])
        watch.finished_step(step)
    watch.close()


Source = Callable[[], Any]


def resumable() -> Any:
    return ResumableLoader(range(64), batch_size=4, seed=1)  # type: ignore[arg-type]


def stateful() -> Any:
    return StatefulDataLoader(range(64), batch_size=4, shuffle=True)  # type: ignore[var-annotated]


def train(tracked: dict[str, Any], batches: Iterator[Any], beside: Callable[[], object] = lambda: None) -> None:
    """Five steps."""
    watch = StepWatch(tracked)
    for step in range(1, 6):
        tracked["optimizer"].zero_grad()
        tracked["model"](next(batches).float()).sum().backward()
        tracked["optimizer"].step()
        beside()
        watch.finished_step(step)
    watch.close()


LOADERS = [pytest.param(resumable, "ResumableLoader"), pytest.param(stateful, "StatefulDataLoader")]


@pytest.mark.parametrize(("make", "name"), LOADERS)
def test_a_loader_that_feeds_training_and_that_nobody_saves_is_refused(make: Source, name: str) -> None:
    loader = make()
    with pytest.raises(ConfigError, match=f"a {name} feeds the training step after step, but is not tracked"):
        train(made(), iter(loader))
    loader = make()
    train(made(loader=loader), iter(loader))


@pytest.mark.parametrize(("make", "name"), LOADERS)
@pytest.mark.parametrize("how", ["all of it", "some of it", "once", "before the training"])
def test_a_loader_for_evaluation_is_left_alone(make: Source, name: str, how: str) -> None:
    """In every step, as nobody would."""
    loader, kept = make(), []

    def evaluate() -> None:
        if how == "all of it":
            assert len(list(loader)) == 16
        elif how == "some of it" or not kept:
            kept.append(iter(loader))
            next(kept[-1]), next(kept[-1])

    if how == "before the training":
        evaluate()
    plain = iter(DataLoader(range(64), batch_size=4))  # type: ignore[var-annotated,arg-type]
    train(made(), plain, evaluate)


def test_where_an_object_of_the_users_own_may_hold_the_position_nothing_is_asked() -> None:
    class Position:
        def __init__(self, loader: Any) -> None:
            self.state_dict, self.load_state_dict = loader.state_dict, loader.load_state_dict

    loader = resumable()
    train(made(position=Position(loader)), iter(loader))
