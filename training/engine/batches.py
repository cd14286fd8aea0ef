"""The global batch: samples of one optimizer step of all ranks, accumulation counted. Where a resume with --replan has another,
the learning rate is scaled if `run.scale_lr` asks for it; what was decided is said."""

import math
from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import Any

import torch

from perdure.training.engine.data import ResumableLoader, ResumableSampler
from perdure.training.engine.state import Tracked
from perdure.training.errors import ConfigError

Say = Callable[[str, bool], None]
"""What was decided, and whether it changes the numbers."""
_RATES = ("base_lrs", "max_lrs", "min_lrs", "eta_min", "_last_lr")
"""Of a scheduler: a multiple of all of these is the same curve, so many times as high."""
_ADAPTIVE = (
    torch.optim.Adam, torch.optim.AdamW, torch.optim.NAdam, torch.optim.RAdam, torch.optim.Adamax, torch.optim.RMSprop,
)  # fmt: skip


class Batches:
    """How many samples the steps take of each tracked loader that counts what it hands out."""

    def __init__(self, tracked: Tracked) -> None:
        self._samplers = dict(_samplers(tracked))
        self._before = {name: sampler.batches for name, sampler in self._samplers.items()}
        self.of_step: dict[str, int] = {}
        """Samples of the last whole step, by loader."""

    def so_far(self) -> dict[str, int]:
        """Of the step under way."""
        return {name: (sampler.batches - self._before[name]) * sampler.global_batch for name, sampler in self._samplers.items()}

    def finished_step(self) -> None:
        self.of_step = self.so_far()
        self._before = {name: sampler.batches for name, sampler in self._samplers.items()}


def _samplers(tracked: Tracked) -> Iterator[tuple[str, ResumableSampler]]:
    for name, obj in tracked.items():
        if isinstance(obj, (ResumableLoader, ResumableSampler)):
            yield name, obj.sampler if isinstance(obj, ResumableLoader) else obj


class Rebatched:
    """Decides, once, in the first step after a re-planned resume: only then it is known how many samples a step takes."""

    def __init__(
        self,
        tracked: Tracked,
        batches: Batches,
        old: Mapping[str, Any],  # Any: plain JSON values, the manifest's `data`
        *,
        scale: bool,
        planned: bool,
        others: bool,
    ) -> None:
        """`planned`: settings of optimizers or schedulers were planned anew; `others`: there is another number of ranks."""
        self._tracked, self._batches = tracked, batches
        self._scale, self._planned, self._others = scale, planned, others
        self._old = {name: int(one.get("step_samples", 0)) for name, one in old.items() if isinstance(one, Mapping)}
        self._optimizers = {name: obj for name, obj in tracked.items() if isinstance(obj, torch.optim.Optimizer)}
        self._handles: list[Any] = []  # Any: torch's removable handles
        self._decided = False

    def watch(self, say: Say) -> None:
        """Decide before the first optimizer step and `say` so."""

        def before(*_: object) -> None:
            self.decide(say)

        self._handles = [optimizer.register_step_pre_hook(before) for optimizer in self._optimizers.values()]

    def decide(self, say: Say) -> None:
        """Also called after a first step in which no optimizer made one."""
        if self._decided:
            return
        self._decided = True
        for handle in self._handles:
            handle.remove()
        now = self._batches.so_far()
        pairs = [(self._old[name], now[name]) for name in now if self._old.get(name) and now[name]]
        was, samples = sum(pair[0] for pair in pairs), sum(pair[1] for pair in pairs)
        if was != samples:
            say(f"the global batch changes from {was} to {samples} samples, {self._changed(samples / was)}", True)
        elif self._others and pairs:
            say(f"the global batch of {was} samples is kept, and the learning rate with it", False)
        elif self._others:
            say("how many samples a step takes is not known, the learning rate is not scaled", False)

    def _changed(self, ratio: float) -> str:
        if self._planned:
            return "the learning rate is that of the new plan"
        if not self._scale or not self._optimizers:
            why = "no optimizer of torch's is tracked" if self._scale else "run.scale_lr is not set"
            return f"the learning rate is not scaled: {why}"
        return ", ".join(self._scaled(name, optimizer, ratio) for name, optimizer in self._optimizers.items())

    def _scaled(self, name: str, optimizer: torch.optim.Optimizer, ratio: float) -> str:
        if isinstance(optimizer, torch.optim.SGD):
            factor, rule = ratio, "linearly"
        elif isinstance(optimizer, _ADAPTIVE):
            factor, rule = math.sqrt(ratio), "by the square root"
        else:
            raise ConfigError(
                f"run.scale_lr: no rule is known for {name!r} ({type(optimizer).__qualname__})",
                "set it to false, and the learning rate in your code",
            )
        scale_rates(optimizer, [obj for obj in self._tracked.values() if getattr(obj, "optimizer", None) is optimizer], factor)
        return f"the learning rate of {name!r} is scaled {rule}, x {factor:.4g}"


def scale_rates(optimizer: torch.optim.Optimizer, schedulers: Iterable[Any], factor: float) -> None:  # Any: schedulers
    """The learning rates of now and of all that is still to come."""
    for group in optimizer.param_groups:
        for key in [key for key in group if key == "lr" or key.endswith("_lr")]:
            if isinstance(group[key], torch.Tensor):
                group[key].mul_(factor)  # a captured graph holds it
            else:
                group[key] *= factor
    for one in {id(one): one for scheduler in schedulers for one in _with_inner(scheduler)}.values():
        for key in [key for key in _RATES if key in vars(one)]:
            setattr(one, key, _times(getattr(one, key), factor))


def _with_inner(scheduler: Any) -> Iterator[Any]:  # Any: a scheduler
    yield scheduler
    for inner in getattr(scheduler, "_schedulers", ()):
        yield from _with_inner(inner)


def _times(rate: Any, factor: float) -> Any:  # Any: a number, a tensor, a list of them
    return type(rate)(one * factor for one in rate) if isinstance(rate, (list, tuple)) else rate * factor
