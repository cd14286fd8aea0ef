"""The state of everything tracked, as leaves: what a checkpoint of one rank holds. Collecting copies no tensor.

Layout (docs/format.md): each tracked object has one plain leaf under its own name; its tensors are leaves below that name.
Optimizer state is keyed by parameter name, never by position."""

import weakref
from collections.abc import Mapping
from typing import Any

import torch
from torch.optim.lr_scheduler import LRScheduler
from torchdata.stateful_dataloader import StatefulDataLoader

from perdure.training.engine.leaves import Encoder, Leaf, dtype_name, escape, plain_leaf
from perdure.training.engine.remembered import Memory
from perdure.training.engine.rng import preserving
from perdure.training.engine.shards import check_state, gather_in
from perdure.training.engine.zero import ZeroEngine, check_engine, is_engine
from perdure.training.errors import PerdureError

INVENTORY = "perdure.tracked"
"""Path of the plain leaf that lists what was tracked."""

Tracked = Mapping[str, Any]  # Any: whatever has state_dict and load_state_dict

_SMALL = 64
"""Elements up to which a tensor counts as a setting (a learning rate, say) rather than as data."""


def check_trackable(name: str, obj: Any) -> None:  # Any: what a user hands over
    """Refuse names and objects that no checkpoint could hold."""
    if not name or name.startswith("perdure.") or "/" in name or "%" in name:
        raise PerdureError(
            f"session.track: {name!r} cannot be a name: it must not be empty, start with 'perdure.' or hold '/' or '%'"
        )
    if isinstance(obj, ZeroEngine):
        check_engine(name, obj.engine)
        return
    if type(obj).__name__ == "FullyShardedDataParallel":
        raise PerdureError(f"session.track: {name!r} is wrapped in FSDP's first version", "shard it with fully_shard")
    for method in ("state_dict", "load_state_dict"):
        if not callable(getattr(obj, method, None)):
            raise PerdureError(
                f"session.track: {name!r} is a {type(obj).__qualname__} without {method}(): it cannot be saved and restored",
                "give it state_dict() and load_state_dict(), or wrap it in an object that has them",
            )  # fmt: skip


def unwrapped(obj: Any) -> Any:  # Any: what a user hands over
    """What is saved of it: of a DistributedDataParallel the module inside, whose names have no `module.` before them; of a
    DeepSpeed engine all that DeepSpeed saves."""
    if isinstance(obj, torch.nn.parallel.DistributedDataParallel):
        return obj.module
    return ZeroEngine(obj) if is_engine(obj) else obj


def collect(tracked: Tracked, memory: Memory | None = None) -> list[Leaf]:
    """Every leaf of every tracked object as it is now. Tensors are the live ones. A `memory`, kept from call to call, saves
    encoding again what has not changed."""
    note_built(tracked)
    names = parameter_names(tracked) if memory is None else memory.parameter_names(tracked, parameter_names)
    leaves = [plain_leaf(INVENTORY, {name: kind_of(obj) for name, obj in tracked.items()})]
    with preserving():  # a state_dict() may draw: torchdata's loader starts its workers to ask them
        for name, obj in tracked.items():
            leaves += collect_one(name, obj, names, memory)
    return leaves


def collect_one(name: str, obj: Any, names: Mapping[int, str], memory: Memory | None = None) -> list[Leaf]:  # Any: tracked
    """The leaves of one object, its plain leaf first."""
    if isinstance(obj, ZeroEngine):
        return obj.leaves(name)
    encoder = Encoder(name)
    if isinstance(obj, torch.nn.Module):
        known = memory.module(name, obj) if memory else None
        if known is not None:
            return known
        leaves = [_packed_once(obj, name, _module(obj, encoder)), *encoder.leaves]
        return memory.keep_module(name, obj, leaves) if memory else leaves
    if isinstance(obj, torch.optim.Optimizer):
        plain = _optimizer(name, obj, encoder, group_names(obj, names), memory)
    else:
        plain = {"kind": kind_of(obj), "type": type_name(obj), "state": encoder.encode(obj.state_dict(), "")}
        if isinstance(obj, LRScheduler):
            plain["built"] = _BUILT.get(obj)
        if generators := loader_generators(obj):
            plain["generators"] = encoder.encode([generator.get_state() for generator in generators], "%generators")
    return [plain_leaf(name, plain), *encoder.leaves]


def _packed_once(module: torch.nn.Module, name: str, plain: dict[str, Any]) -> Leaf:
    """A module's plain leaf hardly ever changes: pack it again only if it did. (Not by == alone where it holds a user's
    values, since 1 == True.)"""
    before = _PACKED.get(module)
    if before is not None and before[0] == plain and before[1].path == name and len(plain["tensors"]) == len(plain["state"]):
        return before[1]
    leaf = plain_leaf(name, plain)
    _PACKED[module] = (plain, leaf)
    return leaf


def kind_of(obj: Any) -> str:  # Any: a tracked object
    """`engine`, `module`, `optimizer`, `scheduler`, `scaler` or `object`; also the order in which they are restored."""
    if isinstance(obj, ZeroEngine):
        return "engine"
    if isinstance(obj, torch.nn.Module):
        return "module"
    if isinstance(obj, torch.optim.Optimizer):
        return "optimizer"
    if isinstance(obj, LRScheduler):
        return "scheduler"
    return "scaler" if isinstance(obj, torch.amp.GradScaler) else "object"


def type_name(obj: Any) -> str:  # Any: a tracked object
    return f"{type(obj).__module__}.{type(obj).__qualname__}"


def loader_generators(obj: Any) -> list[torch.Generator]:  # Any: a tracked object
    """Generators a StatefulDataLoader shares with its shuffling sampler. It puts them back without the draw that making the
    iterator takes, so the next epoch's order would differ. Drawing with replacement it must do by itself: it runs ahead."""
    if not isinstance(obj, StatefulDataLoader) or getattr(obj.sampler, "replacement", False):
        return []
    found = {id(generator): generator for generator in (obj.generator, getattr(obj.sampler, "generator", None))}
    return [generator for generator in found.values() if isinstance(generator, torch.Generator)]


def parameter_names(tracked: Tracked) -> dict[int, str]:
    """id(parameter) -> "<tracked name>.<parameter name>", the first name found."""
    names: dict[int, str] = {}
    gather_in(tracked)
    for name, obj in tracked.items():
        if isinstance(obj, torch.nn.Module):
            for parameter_name, parameter in obj.named_parameters():
                names.setdefault(id(parameter), f"{name}.{parameter_name}")
    return names


def group_names(optimizer: torch.optim.Optimizer, names: Mapping[int, str]) -> list[list[str]]:
    """Names of an optimizer's parameters, group by group. One that no tracked module knows is named by its position."""
    result = []
    for number, group in enumerate(optimizer.param_groups):
        found = [names.get(id(parameter)) for parameter in group["params"]]
        own = group.get("param_names") or (f"#{number}.{index}" for index in range(len(found)))
        result.append([name or ours for name, ours in zip(found, own, strict=True)])
    return result


def group_options(group: Mapping[str, Any]) -> dict[str, Any]:  # Any: an optimizer's settings
    """What a group says besides its parameters."""
    return {key: value for key, value in group.items() if key not in ("params", "param_names")}


def _module(module: torch.nn.Module, encoder: Encoder) -> dict[str, Any]:
    state = module.state_dict()
    versions = getattr(state, "_metadata", {})
    encoded = {
        key: encoder.tensor(value, escape(key)) if isinstance(value, torch.Tensor) else encoder.encode(value, escape(key))
        for key, value in state.items()
    }
    return {
        "kind": "module",
        "type": type_name(module),
        "state": encoded,
        "trainable": {name: parameter.requires_grad for name, parameter in module.named_parameters(remove_duplicate=False)},
        "tensors": {
            key: (dtype_name(value.dtype), *value.shape) for key, value in state.items() if isinstance(value, torch.Tensor)
        },
        "versions": {prefix: about["version"] for prefix, about in versions.items() if about.get("version", 1) != 1},
    }


def _optimizer(
    name: str, optimizer: torch.optim.Optimizer, encoder: Encoder, by_group: list[list[str]], memory: Memory | None
) -> dict[str, Any]:
    known = memory.optimizer(name, optimizer, by_group) if memory else None
    if known is not None:
        groups = [
            {**fixed, "options": encoder.encode(group_options(group), f"%groups/{number}")}
            for number, (fixed, group) in enumerate(zip(known.groups, optimizer.param_groups, strict=True))
        ]
        encoder.leaves += known.leaves
        return _optimizer_leaf(optimizer, groups, known.state, {})
    packed = optimizer.state_dict()
    by_index = [parameter for group in by_group for parameter in group]
    groups = []
    for number, (group, live, ordered) in enumerate(zip(packed["param_groups"], optimizer.param_groups, by_group, strict=True)):
        groups.append(
            {
                "names": ordered,
                "shapes": [tuple(parameter.shape) for parameter in live["params"]],
                "dtypes": [dtype_name(parameter.dtype) for parameter in live["params"]],
                "options": encoder.encode(group_options(group), f"%groups/{number}"),
            }
        )
    for parameter, values in optimizer.state.items():
        check_state(name, parameter, values)
    first = len(encoder.leaves)
    state = {
        by_index[key] if type(key) is int else key: encoder.encode(
            value, escape(by_index[key]) if type(key) is int else f"%state/{escape(str(key))}"
        )
        for key, value in packed["state"].items()
    }
    if memory:
        memory.keep_optimizer(name, optimizer, by_group, groups, state, encoder.leaves[first:])
    extra = {key: value for key, value in packed.items() if key not in ("state", "param_groups")}
    return _optimizer_leaf(optimizer, groups, state, encoder.encode(extra, "%extra"))


def _optimizer_leaf(
    optimizer: torch.optim.Optimizer, groups: Any, state: Any, extra: Any
) -> dict[str, Any]:  # Any: plain values
    return {
        "kind": "optimizer",
        "type": type_name(optimizer),
        "groups": groups,
        "state": state,
        "extra": extra,
        "built": _BUILT.get(optimizer),
    }


# The settings an optimizer or scheduler was built with, noted before anything is loaded or trained. A checkpoint carries them,
# so that a changed plan (another horizon, another weight decay) is told from a setting that merely moved during training.
_BUILT: "weakref.WeakKeyDictionary[Any, Any]" = weakref.WeakKeyDictionary()


_PACKED: "weakref.WeakKeyDictionary[torch.nn.Module, tuple[dict[str, Any], Leaf]]" = weakref.WeakKeyDictionary()


def note_built(tracked: Tracked) -> None:
    """Note the settings of optimizers and schedulers not seen before; call it before the first step and before loading."""
    for obj in tracked.values():
        if isinstance(obj, torch.optim.Optimizer) and obj not in _BUILT:
            _BUILT[obj] = [_settings(group_options(group)) for group in obj.param_groups]
        elif isinstance(obj, LRScheduler) and obj not in _BUILT:
            _BUILT[obj] = _settings(obj.state_dict())


def built_settings(obj: Any) -> Any:  # Any: an optimizer or scheduler -> plain settings
    """The settings `obj` was built with."""
    return _BUILT.get(obj)


def _settings(value: Any) -> Any:  # Any: settings of any shape, reduced to plain values
    if isinstance(value, torch.Tensor):
        return value.tolist() if value.numel() <= _SMALL else None
    if isinstance(value, Mapping):
        return {str(key): _settings(item) for key, item in value.items()}
    if isinstance(value, (list, tuple)):
        return [_settings(item) for item in value]
    return value if isinstance(value, (bool, int, float, str)) else None
