"""Loading a checkpoint's state into what the user built. Everything is compared first; nothing is touched if anything differs.

Order: engines, modules, optimizers, schedulers, the rest. A scheduler writes into its optimizer when made, not when loaded."""

from typing import Any

import torch
from torchdata.stateful_dataloader import StatefulDataLoader

from perdure.training.engine import compare, replanning
from perdure.training.engine.leaves import Decoder, Read, ReadPart, ShapeOf, read_plain
from perdure.training.engine.state import (
    INVENTORY,
    Tracked,
    group_names,
    group_options,
    kind_of,
    loader_generators,
    note_built,
    parameter_names,
)
from perdure.training.engine.zero import ZeroEngine
from perdure.training.errors import ConfigError, PerdureError

_ORDER = ("engine", "module", "optimizer", "scheduler", "scaler", "object")
_LOAD_ERRORS = (KeyError, IndexError, TypeError, ValueError, AttributeError, RuntimeError, AssertionError)
"""What a load_state_dict raises on state it does not like."""


def restore(
    tracked: Tracked, read: Read, read_part: ReadPart | None = None, shape_of: ShapeOf | None = None, *, replan: bool = False
) -> list[str]:
    """Load every tracked object. Raises ConfigError naming all differences; with `replan`, changed settings of optimizers and
    schedulers are applied (new plan, stored position) and returned, one sentence each, for the record."""
    note_built(tracked)
    stored = {name: read_plain(read, name) for name in read_plain(read, INVENTORY)}
    names = parameter_names(tracked)
    problems, plan_changes = compare.compare_all(tracked, stored, names)
    if plan_changes and not replan:
        problems += plan_changes
    if problems:
        hint = "make the training code build what the checkpoint holds"
        hint += ", or ask for the schedule to be planned again (--replan)" if plan_changes else ""
        raise ConfigError("the checkpoint does not fit what was tracked:\n  " + "\n  ".join(problems), hint)
    planned = replanning.plan(tracked, stored) if plan_changes else replanning.NOTHING
    for name in sorted(tracked, key=lambda name: _ORDER.index(kind_of(tracked[name]))):
        if not any(tracked[name] is done for done in planned.done):
            _load(tracked[name], Decoder(name, read, read_part, shape_of), stored[name], names)
    planned.apply()
    return plan_changes


def _load(obj: Any, decoder: Decoder, plain: dict[str, Any], names: dict[int, str]) -> None:  # Any: a tracked object
    try:
        if isinstance(obj, torch.nn.Module):
            load_module(obj, decoder, plain)
        elif isinstance(obj, torch.optim.Optimizer):
            load_optimizer(obj, decoder, plain, names)
        elif isinstance(obj, ZeroEngine):
            obj.load(decoder, plain)
        else:
            obj.load_state_dict(decoder.decode(plain["state"]))
            if isinstance(obj, StatefulDataLoader):
                obj.state_dict()  # makes the iterator now: made later, it would draw from the restored generators
                for generator, state in zip(loader_generators(obj), decoder.decode(plain.get("generators", [])), strict=True):
                    generator.set_state(state)
    except PerdureError:
        raise
    except _LOAD_ERRORS as error:
        raise ConfigError(
            f"{decoder.root!r} ({type(obj).__qualname__}) refused the checkpoint's state: {type(error).__name__}: {error}"
        ) from error


def load_module(module: torch.nn.Module, decoder: Decoder, plain: dict[str, Any]) -> None:
    """Copy parameters and buffers in place; names, shapes and dtypes were compared before."""
    fresh: Any = module.state_dict()  # Any: torch hangs _metadata on it
    state = type(fresh)((key, decoder.decode_as(plain["state"][key], fresh[key])) for key in fresh)
    if hasattr(fresh, "_metadata"):
        versions = plain["versions"]
        state._metadata = {prefix: {"version": versions.get(prefix, 1)} for prefix in fresh._metadata}
    module.load_state_dict(state)


def load_optimizer(optimizer: torch.optim.Optimizer, decoder: Decoder, plain: dict[str, Any], names: dict[int, str]) -> None:
    """Rebuild torch's positional form in the order this process has, from state stored by name, and load that."""
    ordered = [name for group in group_names(optimizer, names) for name in group]
    parameters = [parameter for group in optimizer.param_groups for parameter in group["params"]]
    by_name = dict(zip(ordered, parameters, strict=True))
    state = {
        key: _as_laid_out(decoder.decode_as(value, by_name.get(key)), by_name.get(key)) for key, value in plain["state"].items()
    }  # fmt: skip
    index = {name: number for number, name in enumerate(ordered)}
    groups, first = [], 0
    for group, saved in zip(optimizer.param_groups, plain["groups"], strict=True):
        # a flag this version has and the checkpoint's did not keeps the value it was built with (torch upgrades)
        options = {**group_options(group), **decoder.decode(saved["options"])}
        if "param_names" in group:
            options["param_names"] = group["param_names"]
        groups.append({**options, "params": list(range(first, first + len(group["params"])))})
        first += len(group["params"])
    packed = {**decoder.decode(plain["extra"]), "state": {index.get(key, key): value for key, value in state.items()}}
    optimizer.load_state_dict({**packed, "param_groups": groups})
    _keep_dtypes(optimizer, state, by_name)
    # steps were made before the cut: torch must not warn of a schedule that is stepped before them
    vars(optimizer)["_opt_called"] = True


def _as_laid_out(state: Any, parameter: torch.Tensor | None) -> Any:  # Any: one parameter's optimizer state
    """Give tensors of a parameter's shape its memory layout (channels last, say), as torch does when it makes them."""
    if parameter is None or not isinstance(state, dict):
        return state

    def laid_out(value: Any) -> Any:  # Any: an item of the state
        if not isinstance(value, torch.Tensor) or value.shape != parameter.shape or value.stride() == parameter.stride():
            return value
        return torch.empty_like(parameter, dtype=value.dtype, device=value.device, requires_grad=False).copy_(value)

    return {key: laid_out(value) for key, value in state.items()}


def _keep_dtypes(optimizer: torch.optim.Optimizer, state: dict[Any, Any], by_name: dict[str, torch.Tensor]) -> None:
    """Undo torch's cast of state to the parameter's dtype: fp32 moments of a bf16 parameter must stay fp32."""
    for name, values in state.items():
        live = optimizer.state[by_name[name]] if name in by_name else {}
        for key, value in values.items() if isinstance(values, dict) else ():
            now = live.get(key)
            if isinstance(value, torch.Tensor) and isinstance(now, torch.Tensor) and now.dtype != value.dtype:
                live[key] = value.to(device=now.device)
