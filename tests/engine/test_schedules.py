"""Learning rates after a resume: those of the uninterrupted run; with another plan, a refusal or that plan's."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch.optim import lr_scheduler

from perdure.training.engine.compare import changed_settings
from perdure.training.errors import ConfigError

Make = Callable[[torch.optim.Optimizer], Any]


def trained(harness: Any, make: Make, *, lr: float = 1.0, optimizer_of: Any = torch.optim.SGD) -> Callable[[], Any]:
    """A training whose step returns the learning rate it used."""

    def build() -> Any:
        model = torch.nn.Linear(2, 1)
        optimizer = optimizer_of(model.parameters(), lr=lr)
        scheduler = make(optimizer)

        def step(_: int) -> float:
            used = float(optimizer.param_groups[0]["lr"])
            model(torch.ones(2)).backward()
            optimizer.step()
            optimizer.zero_grad()
            scheduler.step()
            return used

        return harness.Training({"model": model, "optimizer": optimizer, "scheduler": scheduler}, step)

    return build


def sequential(optimizer: torch.optim.Optimizer) -> Any:
    parts = [lr_scheduler.LinearLR(optimizer, 0.1, total_iters=3), lr_scheduler.CosineAnnealingLR(optimizer, 7)]
    return lr_scheduler.SequentialLR(optimizer, parts, [3])  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("make", "expected"),
    [
        (lambda optimizer: lr_scheduler.LambdaLR(optimizer, lambda i: 1 - i / 10), [0.6, 0.5, 0.4, 0.3, 0.2, 0.1]),
        (
            lambda optimizer: lr_scheduler.OneCycleLR(optimizer, 1.0, total_steps=12),
            [0.93301, 0.81175, 0.64738, 0.46264, 0.28306, 0.13348],
        ),
        (sequential, [0.95048, 0.81174, 0.61126, 0.38874, 0.18826, 0.04952]),
    ],
    ids=["lambda", "one cycle", "sequential"],
)
def test_the_learning_rates_after_a_cut_are_those_of_the_uninterrupted_run(
    harness: Any, make: Make, expected: list[float]
) -> None:
    whole, resumed = harness.run(trained(harness, make), 10), harness.run(trained(harness, make), 10, (4,))
    assert resumed.returned[4:] == pytest.approx(expected, abs=6e-6)
    assert resumed.returned == whole.returned  # bit for bit


def cosine(steps: int) -> Make:
    return lambda optimizer: lr_scheduler.CosineAnnealingLR(optimizer, steps)


def test_an_unchanged_horizon_goes_on_where_it_was(harness: Any) -> None:
    assert harness.run(trained(harness, cosine(10)), 5, (4,)).returned[4] == pytest.approx(0.654508, abs=1e-6)


def switching(harness: Any, *makes: Make, lr: tuple[float, float] = (1.0, 1.0), optimizer_of: Any = torch.optim.SGD) -> Any:
    """A build that uses the first plan in the first life (and for the harness's blank), the second afterwards."""
    lives = iter([(makes[0], lr[0]), (makes[0], lr[0])])

    def build() -> Any:
        make, rate = next(lives, (makes[1], lr[1]))
        return trained(harness, make, lr=rate, optimizer_of=optimizer_of)()

    return build


def test_another_horizon_is_refused_naming_both(harness: Any) -> None:
    with pytest.raises(ConfigError, match=r"scheduler 'scheduler': T_max was 10 when .* is 20 now"):
        harness.run(switching(harness, cosine(10), cosine(20)), 5, (4,))


def test_a_setting_of_equal_value_and_another_type_of_number_is_no_change(harness: Any) -> None:
    resumed = harness.run(switching(harness, cosine(10), cosine(10.0), lr=(1.0, 1)), 5, (4,))  # type: ignore[arg-type]
    assert resumed.returned == harness.run(trained(harness, cosine(10)), 5).returned
    assert changed_settings({"a": [1]}, {"a": [True]}) == ["a[0] was 1 when the checkpoint's run began, is True now"]


@pytest.mark.parametrize("optimizer_of", [torch.optim.SGD, torch.optim.AdamW])
def test_another_horizon_on_request_is_entered_at_the_stored_position(harness: Any, optimizer_of: Any) -> None:
    build = switching(harness, cosine(10), cosine(20), optimizer_of=optimizer_of)
    resumed = harness.run(build, 20, (4,), replan=True)
    followed = harness.run(trained(harness, cosine(20), optimizer_of=optimizer_of), 20)
    assert resumed.returned[4] == pytest.approx(0.904508, abs=1e-6)
    assert resumed.returned[4:] == followed.returned[4:]


def test_another_sequential_plan_on_request_is_entered_at_the_stored_position(harness: Any) -> None:
    resumed = harness.run(switching(harness, cosine(10), sequential), 10, (4,), replan=True)
    assert resumed.returned[4:] == harness.run(trained(harness, sequential), 10).returned[4:]


def test_other_milestones_are_refused_or_entered_on_request(harness: Any) -> None:
    def at(*milestones: int) -> Make:
        return lambda optimizer: lr_scheduler.MultiStepLR(optimizer, milestones)

    with pytest.raises(ConfigError, match=r"milestones was .*6.*8.* is .*5.*9.* now"):
        harness.run(switching(harness, at(6, 8), at(5, 9)), 5, (4,))
    resumed = harness.run(switching(harness, at(6, 8), at(5, 9)), 10, (4,), replan=True)
    assert resumed.returned[4:] == harness.run(trained(harness, at(5, 9)), 10).returned[4:]


def linear(steps: int) -> Make:
    return lambda optimizer: lr_scheduler.LambdaLR(optimizer, lambda step: 1 - step / steps)


def warmed(steps: int) -> Make:
    """Its first part is over at the cut, its second under way."""

    def make(optimizer: torch.optim.Optimizer) -> Any:
        parts = [lr_scheduler.ConstantLR(optimizer, 0.5, 2), linear(steps)(optimizer)]
        return lr_scheduler.SequentialLR(optimizer, parts, [2])

    return make


@pytest.mark.parametrize(
    ("plan", "says"), [(linear, r"a rate of 0.8 at position 4, gave 0.6"), (warmed, r"a rate of 0.9 at position 2, gave 0.8")]
)
def test_an_edited_function_of_a_schedule_is_refused_or_entered_on_request(harness: Any, plan: Any, says: str) -> None:
    with pytest.raises(ConfigError, match=f"scheduler 'scheduler': its function gives {says}"):
        harness.run(switching(harness, plan(10), plan(20)), 5, (4,))
    resumed = harness.run(switching(harness, plan(10), plan(20)), 8, (4,), replan=True)
    assert resumed.returned[4:] == harness.run(trained(harness, plan(20)), 8).returned[4:]
    unchanged = harness.run(trained(harness, plan(10)), 8, (1, 2, 3))
    assert unchanged.returned == harness.run(trained(harness, plan(10)), 8).returned


def test_a_replanned_run_is_resumed_again_without_asking(harness: Any) -> None:
    build = switching(harness, cosine(10), cosine(20))
    once = harness.run(build, 8, (4,), replan=True)
    followed = harness.run(trained(harness, cosine(20)), 8)
    assert once.returned[4:] == followed.returned[4:]
    again = build()
    from perdure.training.engine.restore import restore

    assert restore(again.tracked, once.kept.__getitem__) == []
    assert again.step(8) == harness.run(trained(harness, cosine(20)), 9).returned[8]


def test_another_base_rate_is_refused_or_applied_on_request(harness: Any) -> None:
    rates = (1.0, 0.5)
    with pytest.raises(ConfigError, match=r"lr was 1.0 .* is 0.5 now"):
        harness.run(switching(harness, cosine(10), cosine(10), lr=rates), 5, (4,))
    resumed = harness.run(switching(harness, cosine(10), cosine(10), lr=rates), 5, (4,), replan=True)
    assert resumed.returned[4] == pytest.approx(0.5 * 0.654508, abs=1e-6)


def test_a_plateau_keeps_its_rate_and_takes_new_settings_on_request(harness: Any) -> None:
    def made(factor: float) -> Any:
        model = torch.nn.Linear(2, 1)
        optimizer = torch.optim.SGD(model.parameters(), lr=1.0)
        scheduler = lr_scheduler.ReduceLROnPlateau(optimizer, factor=factor, patience=0, threshold=0.0)

        def step(_: int) -> float:
            model(torch.ones(2)).backward()
            optimizer.step()
            optimizer.zero_grad()
            scheduler.step(1.0)
            return float(optimizer.param_groups[0]["lr"])

        return harness.Training({"model": model, "optimizer": optimizer, "scheduler": scheduler}, step)

    factors = iter([0.5, 0.5])
    resumed = harness.run(lambda: made(next(factors, 0.1)), 4, (2,), replan=True)
    assert resumed.returned == pytest.approx([1.0, 0.5, 0.05, 0.005])


def test_an_epochs_scheduler_step_is_neither_lost_nor_made_twice_at_its_end(harness: Any) -> None:
    from perdure.training.engine.data import ResumableLoader

    def build() -> Any:
        model = torch.nn.Linear(1, 1)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        scheduler = lr_scheduler.MultiStepLR(optimizer, [1, 2], gamma=0.1)
        loader = ResumableLoader(range(16), batch_size=4, seed=0)  # type: ignore[arg-type]

        def loop() -> Any:  # nested epochs, cut inside the inner loop
            while loader.epoch < 3:
                for batch in loader:
                    used = optimizer.param_groups[0]["lr"]
                    model(batch.float().mean().view(1)).backward()
                    optimizer.step()
                    optimizer.zero_grad()
                    yield round(used, 9)
                scheduler.step()

        steps = loop()
        return harness.Training(
            {"model": model, "optimizer": optimizer, "scheduler": scheduler, "loader": loader}, lambda _: next(steps)
        )

    expected = [0.1] * 4 + [0.01] * 4 + [0.001] * 4
    assert harness.run(build, 12).returned == expected
    assert harness.run(build, 12, (4,)).returned == expected
    assert harness.run(build, 12, (3, 4, 8, 9)).returned == expected


def test_changed_settings_of_an_optimizer_are_refused_or_applied_on_request(harness: Any) -> None:
    def build(decay: float) -> Any:
        model = torch.nn.Linear(2, 1)
        optimizer = torch.optim.AdamW(model.parameters(), lr=0.1, weight_decay=decay)

        def step(_: int) -> float:
            model(torch.ones(2)).backward()
            optimizer.step()
            optimizer.zero_grad()
            return float(optimizer.param_groups[0]["weight_decay"])

        return harness.Training({"model": model, "optimizer": optimizer}, step)

    decays = iter([0.1, 0.1])
    with pytest.raises(ConfigError, match=r"optimizer 'optimizer': \[0\].weight_decay was 0.1 .* is 0.2 now"):
        harness.run(lambda: build(next(decays, 0.2)), 2, (1,))
    decays = iter([0.1, 0.1])
    assert harness.run(lambda: build(next(decays, 0.2)), 2, (1,), replan=True).returned == [0.1, 0.2]


def test_a_setting_that_merely_moved_during_training_is_no_change_of_plan(harness: Any) -> None:
    def build() -> Any:
        model = torch.nn.Linear(2, 1)
        optimizer = torch.optim.AdamW(model.parameters(), lr=0.1, weight_decay=0.1)

        def step(number: int) -> float:
            optimizer.param_groups[0]["weight_decay"] *= 0.5
            model(torch.ones(2)).backward()
            optimizer.step()
            optimizer.zero_grad()
            return float(optimizer.param_groups[0]["weight_decay"])

        return harness.Training({"model": model, "optimizer": optimizer}, step)

    assert harness.run(build, 3, (1, 2)).returned == [0.05, 0.025, 0.0125]
