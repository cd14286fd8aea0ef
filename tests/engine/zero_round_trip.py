"""One process, a DeepSpeed engine for each stage and precision: its state as leaves, loaded into an engine built with other
weights, which then makes the same steps. Ends with what went wrong."""

import contextlib
import sys
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import deepspeed
import pytest
import torch
from deepspeed.accelerator import get_accelerator

sys.path.insert(0, str(Path(__file__).parent.parent / "crash" / "zero"))

import train as tiny

from perdure.training.checkpoint.plain import pack_plain, unpack_plain
from perdure.training.engine.invariants import StepWatch
from perdure.training.engine.leaves import LoadedLeaf
from perdure.training.engine.restore import restore
from perdure.training.engine.state import check_trackable, collect, unwrapped
from perdure.training.engine.unsaved import check_registered
from perdure.training.engine.zero import check_not_twice
from perdure.training.errors import ConfigError, PerdureError

CASES = [(2, "bf16"), (0, "fp32"), (1, "fp16"), (3, "fp16")]
MORE = [(0, "bf16"), (1, "bf16"), (1, "fp32"), (2, "fp32"), (2, "fp16"), (3, "bf16"), (3, "fp32")]
Loaded = dict[str, LoadedLeaf]


def steps(engine: Any, numbers: range) -> list[float]:
    losses = []
    for number in numbers:
        for part in range(engine.gradient_accumulation_steps()):
            micro_step(engine, number * 10 + part)
            losses.append(engine.losses)
    return losses


def micro_step(engine: Any, seed: int, factor: float = 1.0) -> None:
    torch.manual_seed(seed)
    x = torch.randn(8, 16).to(next(engine.module.parameters()).dtype)
    loss = engine(x).float().square().mean() * factor
    engine.losses = float(loss)
    engine.backward(loss)
    engine.step()


def saved(tracked: dict[str, Any]) -> Loaded:
    """As a checkpoint would have it."""
    return {leaf.path: LoadedLeaf(leaf.kind, leaf.dtype, leaf.shape, data_of(leaf.value)) for leaf in collect(tracked)}


def data_of(value: torch.Tensor | bytes) -> bytes:
    return value if isinstance(value, bytes) else value.detach().contiguous().reshape(-1).view(torch.uint8).numpy().tobytes()


@contextlib.contextmanager
def refused(*words: str) -> Iterator[None]:
    with pytest.raises(PerdureError) as caught:
        yield
    assert all(word in f"{caught.value} {caught.value.hint}" for word in words), caught.value


def build(stage: int, dtype: str, seed: int, *, round_robin: bool = False) -> Any:
    session = SimpleNamespace(params={"stage": stage, "dtype": dtype, "round_robin": round_robin}, world_size=1, total_steps=40)
    return tiny.make_engine(session, seed)


def check(stage: int, dtype: str) -> None:
    engine = build(stage, dtype, 1)
    tracked = {"model": unwrapped(engine)}
    check_trackable("model", tracked["model"])
    watch = StepWatch(tracked)
    steps(engine, range(2))
    if dtype == "fp16":  # two infinite gradients: the second lowers the scale
        for seed in range(4):
            micro_step(engine, seed, 1e30)
    watch.finished_step(4)
    state, scale, rate = saved(tracked), getattr(engine.optimizer, "cur_scale", None), engine.get_lr()
    went_on = steps(engine, range(4, 7))

    micro_step(engine, 1)
    with refused("gradient accumulation window", "'model'"):
        watch.finished_step(7)
    check_not_twice(tracked)
    with refused("optimizer", "leave it out"):
        check_not_twice({**tracked, "optimizer": engine.optimizer})
    watch.close()

    other = {"model": unwrapped(build(stage, dtype, 2))}
    restore(other, state.__getitem__)
    again = saved(other)
    assert again == state, [path for path in state if again.get(path) != state[path]]
    resumed = other["model"].engine
    assert (getattr(resumed.optimizer, "cur_scale", None), resumed.get_lr()) == (scale, rate)
    assert dtype != "fp16" or (scale < 65536 and resumed.skipped_steps == 2 and other["model"].skipped == 0)
    assert steps(resumed, range(4, 7)) == went_on
    restore(other, state.__getitem__)
    assert saved(other) == state, "the one that is asked for, whatever the engine has come to since"
    if (stage, dtype) == (2, "bf16"):
        check_refusals(state, other)


def check_refusals(state: Loaded, tracked: dict[str, Any]) -> None:
    with refused("ZeRO stage 2 in the checkpoint, 1 now", "stage"):
        restore({"model": unwrapped(build(1, "bf16", 2))}, state.__getitem__)
    with refused("frozen in the checkpoint, trainable now: frozen.weight"):
        tracked["model"].engine.module.frozen.weight.requires_grad_(True)
        restore(tracked, state.__getitem__)
    tracked["model"].engine.module.frozen.weight.requires_grad_(False)
    with refused("no leaf 'model/mp_rank_00_model_states.pt'"):
        restore(tracked, {path: leaf for path, leaf in state.items() if "mp_rank_00_model" not in path}.__getitem__)
    stray = torch.optim.lr_scheduler.ConstantLR(tracked["model"].engine.optimizer.optimizer)
    with refused("ConstantLR is in use, but not tracked"):
        check_registered(tracked)
    check_registered({**tracked, "scheduler": stray})
    check_orders_are_refused()


def check_orders_are_refused() -> None:
    """On another number of ranks."""
    for was, now in ((True, False), (False, True)):
        state = saved({"model": unwrapped(build(2, "bf16", 1, round_robin=was))})
        plain = unpack_plain(state["model"].data) | {"ranks": 2}
        state["model"] = replace(state["model"], data=pack_plain(plain, "model"))
        shapes = {path: leaf.shape for path, leaf in state.items()}
        again = {"model": unwrapped(build(2, "bf16", 2, round_robin=now))}
        with refused("round_robin_gradients", "as many ranks"):
            restore(again, state.__getitem__, lambda *_: None, shapes.__getitem__)


if __name__ == "__main__":
    accelerator = get_accelerator()  # DeepSpeed takes fp16 on CPUs that have instructions for it only
    accelerator.is_fp16_supported = lambda: True
    accelerator.supported_dtypes = lambda: [torch.float, torch.half, torch.bfloat16]
    deepspeed.init_distributed()
    for stage, dtype in CASES if len(sys.argv) == 1 else MORE:
        try:
            check(stage, dtype)
        except (AssertionError, ConfigError, pytest.fail.Exception) as error:
            sys.exit(f"stage {stage}, {dtype}: {error!r}")
