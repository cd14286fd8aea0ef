"""A changed schedule on resume: the new plan, entered at the stored position, as if it had been followed from the start."""

import warnings
from collections.abc import Mapping
from typing import Any

import torch
from torch.optim.lr_scheduler import LRScheduler, ReduceLROnPlateau

from perdure.training.engine.compare import changed_plan, changed_settings
from perdure.training.engine.state import Tracked, built_settings, group_options

_SCHEDULED = frozenset({"lr", "initial_lr"})
_CYCLED = frozenset({"momentum", "betas"})
Stored = Mapping[str, Mapping[str, Any]]  # Any: plain values of a leaf


class Planned:
    """What the new plan decides: options to put over the loaded ones, and schedulers that need no loading any more."""

    def __init__(self) -> None:
        self.done: list[Any] = []
        self._options: list[tuple[torch.optim.Optimizer, list[dict[str, Any]]]] = []
        self._attributes: list[tuple[Any, dict[str, Any]]] = []

    def put_over(self, optimizer: torch.optim.Optimizer, options: list[dict[str, Any]]) -> None:
        self._options.append((optimizer, options))

    def keep(self, scheduler: LRScheduler, attributes: dict[str, Any]) -> None:
        self._attributes.append((scheduler, attributes))

    def apply(self) -> None:
        """After loading: the plan's values win over the checkpoint's."""
        for optimizer, groups in self._options:
            for group, options in zip(optimizer.param_groups, groups, strict=True):
                group.update(options)
        for scheduler, attributes in self._attributes:
            vars(scheduler).update(attributes)


NOTHING = Planned()


def plan(tracked: Tracked, stored: Stored) -> Planned:
    """Before loading: replay the changed schedules on the fresh optimizers, and note what must survive the loading."""
    planned = Planned()
    for name, optimizer in tracked.items():
        if isinstance(optimizer, torch.optim.Optimizer):
            schedulers = {key: obj for key, obj in tracked.items() if _steers(obj, optimizer)}
            changed = [
                _changed_keys(was, now) for was, now in zip(stored[name]["built"], built_settings(optimizer), strict=True)
            ]
            replayed = any(changed_plan(stored[key], obj) for key, obj in schedulers.items())
            if replayed:
                changed = [
                    keys | _scheduled(schedulers.values(), group)
                    for keys, group in zip(changed, optimizer.param_groups, strict=True)
                ]
                _replay(schedulers, stored)
                planned.done += schedulers.values()
            options = zip(optimizer.param_groups, changed, strict=True)
            planned.put_over(optimizer, [{key: group[key] for key in keys if key in group} for group, keys in options])
    for name, obj in tracked.items():
        if isinstance(obj, ReduceLROnPlateau):
            planned.keep(obj, {key: vars(obj)[key] for key in _changed_keys(stored[name]["built"], built_settings(obj))})
    return planned


def _steers(obj: Any, optimizer: torch.optim.Optimizer) -> bool:  # Any: a tracked object
    return isinstance(obj, LRScheduler) and not isinstance(obj, ReduceLROnPlateau) and obj.optimizer is optimizer


def _changed_keys(old: Mapping[str, Any], new: Mapping[str, Any]) -> set[str]:
    return {key for key in new if key in old and changed_settings(old[key], new[key])}


def _scheduled(schedulers: Any, group: Mapping[str, Any]) -> set[str]:  # Any: an iterable of schedulers
    """Options of a group that its schedulers own."""
    cycled = _CYCLED if any(getattr(scheduler, "cycle_momentum", False) for scheduler in schedulers) else frozenset()
    steered = {key for key in group_options(group) if key.endswith(("_lr", "_momentum"))}
    return set(_SCHEDULED | cycled) | steered


def _replay(schedulers: Mapping[str, LRScheduler], stored: Stored) -> None:
    """Step them as often as the checkpoint's were stepped. No weight moves: only the optimizer's options are written."""
    left = {name: position(stored[name]["state"]) - position(obj.state_dict()) for name, obj in schedulers.items()}
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # torch misses the optimizer steps in between: they were made before the cut
        for _ in range(max(left.values(), default=0)):
            for name, scheduler in schedulers.items():
                if left[name] > 0:
                    left[name] -= 1
                    scheduler.step()


def position(state: Mapping[str, Any]) -> int:
    """How often a scheduler was stepped, by its state."""
    if "last_epoch" in state:
        return int(state["last_epoch"])
    return max((position(inner) for inner in state.get("_schedulers", ())), default=0)
