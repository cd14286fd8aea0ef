"""What differs between a checkpoint's state and what the user's code built, before anything is loaded: one sentence each."""

import math
from collections.abc import Iterable, Mapping
from types import FunctionType
from typing import Any

import torch
from torch.optim.lr_scheduler import LambdaLR

from perdure.training.engine.leaves import dtype_name
from perdure.training.engine.state import Tracked, built_settings, group_names, kind_of, type_name
from perdure.training.engine.zero import ZeroEngine

_SHOWN = 40
"""Names listed before "and N more"."""

Plain = Mapping[str, Any]  # Any: plain values of a leaf


def compare_all(tracked: Tracked, stored: Mapping[str, Plain], names: Mapping[int, str]) -> tuple[list[str], list[str]]:
    """(differences nobody can load over, changed settings of optimizers and schedulers)."""
    problems = []
    if missing := [name for name in stored if name not in tracked]:
        problems.append(f"in the checkpoint, but not tracked now: {listed(missing)}")
    if unknown := [name for name in tracked if name not in stored]:
        problems.append(f"tracked now, but not in the checkpoint: {listed(unknown)}")
    changes: list[str] = []
    for name in tracked:
        if name in stored:
            found, changed = _compare_one(name, tracked[name], stored[name], names)
            problems += found
            changes += changed
    return problems, changes


def _compare_one(name: str, obj: Any, plain: Plain, names: Mapping[int, str]) -> tuple[list[str], list[str]]:
    kind = kind_of(obj)
    if kind != plain["kind"]:
        return [f"{name!r} is a {kind} ({type_name(obj)}) now, a {plain['kind']} ({plain['type']}) in the checkpoint"], []
    if isinstance(obj, torch.nn.Module):
        return [f"model {name!r}: {problem}" for problem in _module(obj, plain)], []
    if isinstance(obj, ZeroEngine):
        return [f"DeepSpeed engine {name!r}: {problem}" for problem in _engine(obj, plain)], []
    if kind not in ("optimizer", "scheduler"):
        return [], []
    problems, changes = [], []
    changes += [f"{kind} {name!r}: {change}" for change in changed_plan(plain, obj)]
    if isinstance(obj, torch.optim.Optimizer):
        problems = [*changes] if type_name(obj) != plain["type"] else []
        problems += [f"optimizer {name!r}: {problem}" for problem in _optimizer(obj, plain, names)]
    return problems, [] if problems else changes


def _module(module: torch.nn.Module, plain: Plain) -> list[str]:
    now = {key: described(value) for key, value in module.state_dict().items()}
    stored = {key: plain["tensors"].get(key, ()) for key in plain["state"]}
    return _tensors(now, stored) + _trainable(module, plain["trainable"])


def _engine(engine: ZeroEngine, plain: Plain) -> list[str]:
    now = engine.plain()
    problems = _tensors(now["tensors"], plain["tensors"]) + _trainable(engine.engine.module, plain["trainable"])
    if now["stage"] != plain["stage"]:
        was, fix = plain["stage"], "set it back in the settings of DeepSpeed"
        problems.append(f"it is of ZeRO stage {was} in the checkpoint, {now['stage']} now: {fix}")
    return problems


def _tensors(now: Mapping[str, tuple[Any, ...]], stored: Mapping[str, tuple[Any, ...]]) -> list[str]:
    problems = []
    if missing := [key for key in now if key not in stored]:
        problems.append(f"not in the checkpoint: {listed(missing)}")
    if unexpected := [key for key in stored if key not in now]:
        problems.append(f"only in the checkpoint: {listed(unexpected)}")
    for key, is_now in now.items():
        if key in stored and stored[key] != is_now:
            problems.append(f"{key} is {_shown(stored[key])} in the checkpoint, {_shown(is_now)} now")
    return problems


def _trainable(module: torch.nn.Module, stored: Mapping[str, bool]) -> list[str]:
    problems = []
    flags = {name: parameter.requires_grad for name, parameter in module.named_parameters(remove_duplicate=False)}
    frozen = [name for name, flag in flags.items() if not flag and stored.get(name)]
    thawed = [name for name, flag in flags.items() if flag and stored.get(name) is False]
    if frozen:
        problems.append(f"trained in the checkpoint, frozen now: {listed(frozen)}")
    if thawed:
        problems.append(f"frozen in the checkpoint, trainable now: {listed(thawed)}")
    if frozen and not any(flags.values()):
        problems.append("the cause: it has 0 trainable parameters now; enable gradients where it is built")
    return problems


def described(value: Any) -> tuple[Any, ...]:  # Any: an item of a module's state
    """What must not change of a module's item: dtype and shape of a tensor, nothing of anything else."""
    return (dtype_name(value.dtype), *value.shape) if isinstance(value, torch.Tensor) else ()


def _optimizer(optimizer: torch.optim.Optimizer, plain: Plain, names: Mapping[int, str]) -> list[str]:
    groups, stored = group_names(optimizer, names), plain["groups"]
    if len(groups) != len(stored):
        return [f"{len(stored)} parameter groups in the checkpoint, {len(groups)} now"]
    problems = []
    for number, (ordered, saved, live) in enumerate(zip(groups, stored, optimizer.param_groups, strict=True)):
        if missing := [name for name in ordered if name not in saved["names"]]:
            problems.append(f"group {number}: not in the checkpoint's: {listed(missing)}")
        if unexpected := [name for name in saved["names"] if name not in ordered]:
            problems.append(f"group {number}: only in the checkpoint's: {listed(unexpected)}")
        was = {
            name: (dtype, *shape) for name, dtype, shape in zip(saved["names"], saved["dtypes"], saved["shapes"], strict=True)
        }
        for name, parameter in zip(ordered, live["params"], strict=True):
            now = described(parameter)
            if name in was and was[name] != now:
                problems.append(f"group {number}: {name} is {_shown(was[name])} in the checkpoint, {_shown(now)} now")
    return problems


def changed_plan(plain: Plain, obj: Any) -> list[str]:  # Any: an optimizer or scheduler
    """What of its type, its settings and its functions is no longer what the checkpoint's run began with."""
    if type_name(obj) != plain["type"]:
        return [f"it is a {type_name(obj)} now, a {plain['type']} in the checkpoint"]
    return [*changed_settings(plain["built"], built_settings(obj)), *_edited_functions(obj, plain["state"])]


def _edited_functions(scheduler: Any, state: Any) -> list[str]:  # Any: an optimizer or scheduler, and its plain state
    """A LambdaLR's functions are code, which no state holds: asked for the rates at the stored position, they must agree."""
    if type(scheduler) is not LambdaLR:
        inner = getattr(scheduler, "_schedulers", ())
        pairs = zip(inner, state["_schedulers"], strict=False) if inner else ()
        return [change for one, its in pairs for change in _edited_functions(one, its)]
    at, found = state["last_epoch"], []
    for function, base, was in zip(scheduler.lr_lambdas, state["base_lrs"], state["_last_lr"], strict=False):
        if type(function) is FunctionType and at >= 0 and _is_number(base) and _is_number(was):  # below 0: not begun yet
            now = base * function(at)
            if not math.isclose(now, was, rel_tol=1e-9):
                found.append(f"its function gives a rate of {now!r} at position {at}, gave {was!r} before the checkpoint")
    return found


def _is_number(value: Any) -> bool:  # Any: a plain value
    return type(value) in (int, float)


def changed_settings(old: Any, new: Any, path: str = "") -> list[str]:  # Any: plain settings of any shape
    """Settings present in both that differ: what only one version of torch knows is no change of plan."""
    counts = isinstance(old, Mapping) and isinstance(new, Mapping) and all(key.isdigit() for key in {*old, *new})
    if isinstance(old, Mapping) and isinstance(new, Mapping) and not counts:  # counts: milestones, where each key is a setting
        return [
            change
            for key in old
            if key in new
            for change in changed_settings(old[key], new[key], f"{path}.{key}" if path else key)
        ]
    if isinstance(old, list) and isinstance(new, list) and len(old) == len(new):
        pairs = enumerate(zip(old, new, strict=True))
        return [change for index, (was, now) in pairs for change in changed_settings(was, now, f"{path}[{index}]")]
    alike = type(old) is type(new) or {type(old), type(new)} == {int, float}  # 10 is 10.0, but 1 is not True
    same = (alike and old == new) or old is None or new is None
    return [] if same else [f"{path} was {old!r} when the checkpoint's run began, is {new!r} now"]


def listed(names: Iterable[str]) -> str:
    every = list(names)
    more = f" and {len(every) - _SHOWN} more" if len(every) > _SHOWN else ""
    return ", ".join(every[:_SHOWN]) + more


def _shown(description: tuple[Any, ...] | None) -> str:
    return f"{description[0]} {description[1:]}" if description else "no tensor"
