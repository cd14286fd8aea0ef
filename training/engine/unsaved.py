"""State that lives beside what is tracked and that nobody would save: told in the first steps, not after the first crash."""

import gc
import logging
from collections.abc import Iterable, Iterator
from typing import Any

import torch
from torch.optim.lr_scheduler import LRScheduler
from torchdata.stateful_dataloader import StatefulDataLoader

from perdure.training.engine.data import ResumableLoader
from perdure.training.engine.shards import local
from perdure.training.engine.state import Tracked, collect, kind_of, parameter_names
from perdure.training.engine.zero import ZeroEngine
from perdure.training.errors import ConfigError

logger = logging.getLogger(__name__)

_STATEFUL = (LRScheduler, torch.amp.GradScaler, torch.optim.Optimizer)
_LOOKS = 3
"""Steps after which it is clear which loader feeds the training."""


def check_registered(tracked: Tracked, scaling: Iterable[int] = ()) -> None:
    """Raises ConfigError for state that lives beside what is tracked and that nobody would save. `scaling`: ids of the scalers
    that are known to scale for a tracked optimizer; others count only where no scaler is tracked."""
    problems = [*_unsaved_parameters(tracked)]
    optimizers = [obj for obj in tracked.values() if isinstance(obj, torch.optim.Optimizer)]
    known = {id(inner) for obj in tracked.values() for inner in (obj, *_nested(obj))}
    held = [inner for obj in tracked.values() for inner in _held(obj)]
    known |= {id(one) for one in held if not (isinstance(one, LRScheduler) and any(one.optimizer is obj for obj in optimizers))}
    for engine in (obj for obj in tracked.values() if isinstance(obj, ZeroEngine)):
        optimizers += engine.optimizers
        known |= {id(obj) for obj in (*engine.optimizers, engine.engine.lr_scheduler)}
    ours = {id(parameter) for optimizer in optimizers for group in optimizer.param_groups for parameter in group["params"]}
    ours |= {id(one) for obj in tracked.values() if isinstance(obj, torch.nn.Module) for one in obj.parameters()}
    scaled = any(isinstance(obj, torch.amp.GradScaler) for obj in tracked.values())
    ours.update(scaling if scaled else map(id, alive(torch.amp.GradScaler)))
    if any(id(obj) not in known and _is_stray(obj, ours) for obj in alive(*_STATEFUL)):
        gc.collect()  # what was built and dropped may still lie around in a cycle
        strays = [obj for obj in alive(*_STATEFUL) if id(obj) not in known and _is_stray(obj, ours)]
        problems += [f"a {type(obj).__qualname__} is in use, but not tracked" for obj in strays]
    if problems:
        raise ConfigError("not everything would be saved: " + "; ".join(problems), "pass it to session.track(name=...)")
    for copy in sorted(set(_untracked_copies(tracked))):
        logger.warning("a %s looks like a copy of a tracked module but is not tracked: it will not be saved", copy)


def alive(*kinds: type) -> list[Any]:  # Any: objects of these kinds
    """Every living object of these kinds; by type, since isinstance() runs code of foreign objects."""
    wanted: dict[type, bool] = {}
    found = []
    for obj in gc.get_objects():
        kind = type(obj)
        if kind not in wanted:
            wanted[kind] = issubclass(kind, kinds)
        if wanted[kind]:
            found.append(obj)
    return found


def _is_stray(obj: Any, ours: set[int]) -> bool:  # Any: as in _alive; ours: ids of parameters and scalers
    if isinstance(obj, LRScheduler):
        return _steps_one_of(getattr(obj, "optimizer", None), ours)
    if isinstance(obj, torch.amp.GradScaler):
        return id(obj) in ours and obj.is_enabled() and getattr(obj, "_scale", None) is not None
    return bool(obj.state) and _steps_one_of(obj, ours)


def _steps_one_of(optimizer: Any, ours: set[int]) -> bool:  # Any: an optimizer, or None
    return any(id(parameter) in ours for group in getattr(optimizer, "param_groups", ()) for parameter in group["params"])


def _held(obj: Any) -> Iterator[Any]:  # Any: what a tracked object of the user's, or an optimizer around another, has in itself
    if kind_of(obj) in ("object", "optimizer"):
        for value in getattr(obj, "__dict__", {}).values():
            yield from value if isinstance(value, (list, tuple)) else value.values() if isinstance(value, dict) else (value,)


def _nested(obj: Any) -> Iterator[Any]:  # Any: schedulers inside schedulers
    for inner in getattr(obj, "_schedulers", ()) if isinstance(obj, LRScheduler) or hasattr(obj, "_schedulers") else ():
        yield inner
        yield from _nested(inner)


def _unsaved_parameters(tracked: Tracked) -> Iterator[str]:
    names = parameter_names(tracked)
    optimizers = [(name, obj) for name, obj in tracked.items() if isinstance(obj, torch.optim.Optimizer)]
    if all(id(parameter) in names for _, obj in optimizers for group in obj.param_groups for parameter in group["params"]):
        return
    saved = {leaf.value.data_ptr() for leaf in collect(tracked) if isinstance(leaf.value, torch.Tensor)}
    for name, obj in optimizers:
        for number, group in enumerate(obj.param_groups):
            for index, parameter in enumerate(group["params"]):
                if id(parameter) not in names and parameter.numel() and local(parameter).data_ptr() not in saved:
                    yield f"parameter {index} of group {number} of optimizer {name!r} belongs to nothing that is tracked"


def _untracked_copies(tracked: Tracked) -> Iterator[str]:
    modules = [obj for obj in tracked.values() if isinstance(obj, torch.nn.Module)]
    known = {id(inner) for module in modules for inner in module.modules()}
    ours = {id(parameter) for module in modules for parameter in module.parameters()}
    shapes = [[tuple(parameter.shape) for parameter in module.parameters()] for module in modules]
    for obj in alive(torch.nn.Module):
        if id(obj) not in known:
            parameters = list(obj.parameters())
            own = [tuple(parameter.shape) for parameter in parameters]
            if own and own in shapes and not any(id(parameter) in ours for parameter in parameters):
                yield type(obj).__qualname__


class ForgottenData:
    """Loaders for evaluation are nobody's business: one feeds training that gives batches of one and the same iteration in each
    of the first steps of a launch. Where an object of the user's own is tracked, that may hold the position: nothing is asked.
    """

    def __init__(self, tracked: Tracked) -> None:
        kinds = {kind_of(obj) for obj in tracked.values()}
        self._left = _LOOKS if kinds & {"optimizer", "engine"} and "object" not in kinds else 0
        self._found: list[tuple[Any, Any, int]] | None = None  # Any: a loader, what stands for its iteration

    def finished_step(self) -> None:
        """Raises ConfigError after the third step, if there is such a loader."""
        if not self._left:
            return
        self._left -= 1
        if self._found is None:
            self._found = [(loader, *_progress(loader)) for loader in alive(ResumableLoader, StatefulDataLoader)]
            self._found = [one for one in self._found if one[2]]
        else:
            now = [(before, (before[0], *_progress(before[0]))) for before in self._found]
            self._found = [one for before, one in now if one[1] is before[1] and one[2] > before[2]]
        if not self._left:
            forgotten, self._found = [type(loader).__qualname__ for loader, _, _ in self._found], None
            if forgotten:
                said = f"a {forgotten[0]} feeds the training step after step, but is not tracked: it would begin anew on resume"
                raise ConfigError(f"not everything would be saved: {said}", "pass it to session.track(loader=...)")


def _progress(
    loader: ResumableLoader | StatefulDataLoader[Any],
) -> tuple[Any, int]:  # Any: whatever is another in each iteration
    """The iteration under way, and the batches handed out."""
    if isinstance(loader, ResumableLoader):
        return loader.iteration, loader.sampler.batches
    iterator = getattr(loader, "_iterator", None)
    return iterator, getattr(iterator, "_num_yielded", 0)
