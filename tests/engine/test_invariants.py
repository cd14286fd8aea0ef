"""What is refused around a step: unfinished windows, numbers nobody should keep, loaded state that changed."""

from typing import Any

import pytest
import torch
from torch import nn

from perdure.training.engine.environment import code_state, differences, environment, require_same
from perdure.training.engine.invariants import StepWatch, check_after_load, check_finite, data_position
from perdure.training.engine.invariants import tensor_digest as digest
from perdure.training.engine.state import collect
from perdure.training.errors import CheckpointDamaged, ConfigError, NonFinite, PerdureError


def made(**more: Any) -> dict[str, Any]:
    model = nn.Linear(4, 2)
    return {"model": model, "optimizer": torch.optim.SGD(model.parameters(), lr=0.1), **more}


def backward(tracked: dict[str, Any], scale: float = 1.0) -> None:
    (tracked["model"](torch.ones(4)).sum() * scale).backward()


def test_a_session_step_that_is_a_micro_batch_is_refused() -> None:
    tracked = made()
    watch = StepWatch(tracked)
    backward(tracked)
    with pytest.raises(ConfigError, match="session step 1 ended with gradients that optimizer 'optimizer' has not used"):
        watch.finished_step(1)


def test_a_save_between_micro_batches_is_refused() -> None:
    tracked = made()
    watch = StepWatch(tracked)
    backward(tracked)
    tracked["optimizer"].step()
    tracked["optimizer"].zero_grad()
    backward(tracked)  # the next window has begun
    watch.finished_step(1)
    with pytest.raises(ConfigError, match="has not used"):
        watch.check_before_save(1)


@pytest.mark.parametrize("zeroed", ["before the forward pass", "after the step", "to zeros"])
def test_whole_steps_pass_wherever_gradients_are_zeroed(zeroed: str) -> None:
    tracked = made()
    watch = StepWatch(tracked)
    for step in range(1, 4):
        if zeroed == "before the forward pass":
            tracked["optimizer"].zero_grad()
        for _ in range(2):
            backward(tracked)
        tracked["optimizer"].step()
        if zeroed != "before the forward pass":
            tracked["optimizer"].zero_grad(set_to_none=zeroed == "after the step")
        watch.finished_step(step)
        watch.check_before_save(step)
    assert watch.made == {"optimizer": 3}
    assert watch.skipped == 0


def test_steps_a_scaler_leaves_out_are_counted_apart() -> None:
    scaler = torch.amp.GradScaler("cpu")
    tracked = made(scaler=scaler)
    watch = StepWatch(tracked)
    for step in range(1, 7):
        tracked["optimizer"].zero_grad()
        scaler.scale(tracked["model"](torch.ones(4)).sum() * (float("inf") if step in (1, 4) else 1.0)).backward()
        scaler.step(tracked["optimizer"])
        scaler.update()
        watch.finished_step(step)
        watch.check_before_save(step)
    assert (watch.made["optimizer"], watch.skipped) == (4, 2)
    backward(tracked)
    with pytest.raises(ConfigError, match="has not used"):  # no update of the scaler: not a skipped step
        watch.finished_step(7)


def test_a_step_without_any_gradient_passes() -> None:
    watch = StepWatch(made())
    watch.finished_step(1)
    watch.check_before_save(1)


def test_a_closed_watch_counts_no_more() -> None:
    tracked = made()
    watch = StepWatch(tracked)
    watch.close()
    backward(tracked)
    tracked["optimizer"].step()
    assert watch.made == {"optimizer": 0}


@pytest.mark.parametrize("bad", [float("nan"), float("inf"), float("-inf")])
def test_weights_that_are_not_finite_are_never_saved(bad: float) -> None:
    tracked = made()
    check_finite(tracked, 5)
    with torch.no_grad():
        tracked["model"].weight[1, 2] = bad
    with pytest.raises(NonFinite, match=r"step 5: model.weight hold"):
        StepWatch(tracked).check_before_save(5)


def test_huge_weights_are_finite() -> None:
    tracked = made()
    with torch.no_grad():
        tracked["model"].weight.fill_(1e30)  # its squares are not
    check_finite(tracked, 5)


def test_loaded_tensors_are_compared_with_the_manifest() -> None:
    tracked = made()
    digests = {leaf.path: digest(leaf.value) for leaf in collect(tracked) if isinstance(leaf.value, torch.Tensor)}
    check_after_load(tracked, 3, digests.__getitem__, threads=2)
    with torch.no_grad():
        tracked["model"].weight[0, 0] += 1e-3
    with pytest.raises(CheckpointDamaged, match="step 3: model/weight differs"):
        check_after_load(tracked, 3, digests.__getitem__, threads=2)


def test_the_data_position_is_told_where_there_is_one() -> None:
    from perdure.training.engine.data import ResumableSampler

    sampler = ResumableSampler(100, seed=1, batch_size=8)
    sampler.consumed(3)
    assert data_position(made(sampler=sampler)) == {"sampler": {"epoch": 0, "samples": 24, "length": 100, "global_batch": 8}}


def test_thread_counts_are_told_apart() -> None:
    one = environment()
    torch.set_num_threads(2)
    two = environment()
    assert differences(one, two) == ["threads: 1 in the checkpoint, 2 now"]
    require_same(one, environment() | {"threads": 1})
    with pytest.raises(PerdureError, match="threads: 1 in the checkpoint, 2 now"):
        require_same(one, two)
    assert differences({**one, "torch": "99.0"}, one) == [f"torch: 99.0 in the checkpoint, {one['torch']} now"]


def test_environment_is_plain_json_and_stable() -> None:
    import json

    assert json.loads(json.dumps(environment())) == environment()


def test_the_commit_of_the_code_is_told_and_whether_it_was_changed(tmp_path: Any) -> None:
    import subprocess

    assert code_state(tmp_path) == {}
    git = ["git", "-C", str(tmp_path), "-c", "user.name=a", "-c", "user.email=a@b"]
    (tmp_path / "train.py").write_text("a = 1\n")
    for command in (["init", "-q"], ["add", "train.py"], ["commit", "-q", "-m", "first"]):
        subprocess.run([*git, *command], check=True)
    clean = code_state(tmp_path)
    assert len(clean["commit"]) == 40
    assert clean["dirty"] is False
    (tmp_path / "train.py").write_text("a = 2\n")
    assert code_state(tmp_path)["dirty"] is True
