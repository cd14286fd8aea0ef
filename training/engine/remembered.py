"""What collecting the state of a module or optimizer found last time, used again while the very same tensors are in it. For
states of many small tensors: looking at a tensor's identity, shape and type costs a thirtieth of encoding it."""

from collections.abc import Callable, Iterator, Mapping, Sequence
from itertools import chain
from operator import is_
from typing import Any, NamedTuple

import msgspec
import torch

from perdure.training.checkpoint.plain import prepack
from perdure.training.engine.leaves import Leaf
from perdure.training.engine.shards import is_sharded

_OVERRIDES = ("state_dict", "_save_to_state_dict", "get_extra_state")


class Looks(NamedTuple):
    """Everything that a module's leaves, its plain leaf included, are made from; the values of its tensors apart."""

    objects: list[Any]  # Any: tensors, modules, None
    """Compared by identity."""
    facts: list[Any]  # Any: names, shapes, types, flags
    """Compared by value."""

    def are(self, other: "Looks") -> bool:
        same = len(self.objects) == len(other.objects) and all(map(is_, self.objects, other.objects))
        return same and self.facts == other.facts


def tensor_facts(tensors: Sequence[torch.Tensor]) -> list[Any]:  # Any: as in Looks
    return [[tensor.shape for tensor in tensors], [tensor.dtype for tensor in tensors]]


class ModuleMemory:
    """One module whose `state_dict()` is torch's own all the way down."""

    def __init__(self, module: torch.nn.Module, leaves: list[Leaf]) -> None:
        self.root = module
        self._modules = list(_walk(module))
        self.names: dict[int, str] | None = None
        self._looks = self._look()
        self.leaves = [
            leaves[0],
            *(_live(leaf, tensor) for leaf, tensor in zip(leaves[1:], _saved(self._modules), strict=True)),
        ]
        """As collected, with the live tensors themselves: one that gets other storage is still the one."""

    @staticmethod
    def is_plain(module: torch.nn.Module) -> bool:
        """Nobody's code takes part in its `state_dict()`, and no tensor is laid out over ranks."""
        base = torch.nn.Module
        for inner in _walk(module):
            own = vars(inner)
            if inner._state_dict_hooks or inner._state_dict_pre_hooks:
                return False
            if any(getattr(type(inner), name) is not getattr(base, name) or name in own for name in _OVERRIDES):
                return False
            if any(map(is_sharded, chain(inner._parameters.values(), inner._buffers.values()))):
                return False
        return True

    def is_current(self) -> bool:
        return self._looks.are(self._look())

    def _look(self) -> Looks:
        inside = self._modules
        parameters = [value for one in inside for value in one._parameters.values()]
        buffers = [value for one in inside for value in one._buffers.values()]
        children = [value for one in inside for value in one._modules.values()]
        tensors = [value for value in (*parameters, *buffers) if value is not None]
        facts = [
            [*chain.from_iterable(chain(one._parameters, one._buffers, one._modules) for one in inside)],
            [set(one._non_persistent_buffers_set) for one in inside],
            [bool(one._state_dict_hooks or one._state_dict_pre_hooks) for one in inside],
            [value.requires_grad for value in tensors],
            *tensor_facts(tensors),
        ]
        return Looks([*parameters, *buffers, *children], facts)


def _walk(module: torch.nn.Module) -> Iterator[torch.nn.Module]:
    """In the order of `state_dict()`, shared modules as often as they are in it."""
    yield module
    for child in module._modules.values():
        if child is not None:
            yield from _walk(child)


def _saved(modules: Sequence[torch.nn.Module]) -> Iterator[torch.Tensor]:
    for one in modules:
        yield from (value for value in one._parameters.values() if value is not None)
        kept = (value for name, value in one._buffers.items() if name not in one._non_persistent_buffers_set)
        yield from (value for value in kept if value is not None)


def _live(leaf: Leaf, tensor: torch.Tensor) -> Leaf:
    assert isinstance(leaf.value, torch.Tensor)
    assert (leaf.value.data_ptr(), leaf.dtype, leaf.shape) == (tensor.data_ptr(), str(tensor.dtype)[6:], tuple(tensor.shape))
    return Leaf(leaf.path, "tensor", tensor, leaf.dtype, leaf.shape)


class OptimizerMemory:
    """The parameters and the state of one optimizer: per parameter a dict of tensors."""

    def __init__(self, optimizer: torch.optim.Optimizer, names: list[list[str]]) -> None:
        self._names = names
        self._looks = _look_at(optimizer)
        self.groups: list[dict[str, msgspec.Raw]] = []
        """All but the options of each group, packed."""
        self.state = msgspec.Raw()
        """That part of the plain leaf, packed."""
        self.leaves: list[Leaf] = []

    @staticmethod
    def is_plain(optimizer: torch.optim.Optimizer) -> bool:
        """Only torch's own `state_dict()` takes part, and the state is tensors."""
        hooked = optimizer._optimizer_state_dict_pre_hooks or optimizer._optimizer_state_dict_post_hooks
        own = type(optimizer).state_dict is torch.optim.Optimizer.state_dict and "state_dict" not in vars(optimizer)
        states = list(optimizer.state.values())
        if not own or hooked or not set(map(type, states)) <= {dict}:
            return False
        return set(map(type, chain.from_iterable(state.values() for state in states))) <= {torch.Tensor}

    def is_current(self, optimizer: torch.optim.Optimizer, names: list[list[str]]) -> bool:
        return names == self._names and self.is_plain(optimizer) and self._looks.are(_look_at(optimizer))


def _look_at(optimizer: torch.optim.Optimizer) -> Looks:
    states = list(optimizer.state.values())
    tensors = [value for state in states for value in state.values()]
    parameters = [parameter for group in optimizer.param_groups for parameter in group["params"]]
    facts = [list(map(tuple, states)), *tensor_facts(tensors), *tensor_facts(parameters)]
    return Looks([*optimizer.state, *tensors, *parameters], facts)


class Memory:
    """Of everything tracked, by its name. It holds what is tracked, so it must not outlive the training."""

    def __init__(self) -> None:
        self._modules: dict[str, ModuleMemory] = {}
        self._optimizers: dict[str, OptimizerMemory] = {}
        self._current: set[str] = set()
        """Modules that `parameter_names` found as they were."""

    def module(self, name: str, module: torch.nn.Module) -> list[Leaf] | None:
        """Its leaves, if nothing but values had changed when `parameter_names` was asked."""
        known = self._modules.get(name)
        return known.leaves if known is not None and name in self._current and known.root is module else None

    def keep_module(self, name: str, module: torch.nn.Module, leaves: list[Leaf]) -> list[Leaf]:
        """Remember these, if that can be done; the leaves to use."""
        self._modules.pop(name, None)
        if not ModuleMemory.is_plain(module):
            return leaves
        self._modules[name] = ModuleMemory(module, leaves)
        return self._modules[name].leaves

    def optimizer(self, name: str, optimizer: torch.optim.Optimizer, names: list[list[str]]) -> OptimizerMemory | None:
        known = self._optimizers.get(name)
        return known if known is not None and known.is_current(optimizer, names) else None

    def keep_optimizer(
        self, name: str, optimizer: torch.optim.Optimizer, names: list[list[str]], groups: Any, state: Any, leaves: list[Leaf]
    ) -> None:  # Any: plain values, as they go into the plain leaf
        self._optimizers.pop(name, None)
        if OptimizerMemory.is_plain(optimizer):
            known = self._optimizers[name] = OptimizerMemory(optimizer, names)
            for group in groups:
                known.groups.append({key: prepack(value, name) for key, value in group.items() if key != "options"})
            known.state, known.leaves = prepack(state, name), leaves

    def parameter_names(self, tracked: Mapping[str, Any], ask: Callable[[Any], dict[int, str]]) -> dict[int, str]:
        """As `ask(tracked)` gives them, asked again only where a module has changed. Each collection begins with it."""
        roots = {name: known for name, known in self._modules.items() if known.root is tracked.get(name)}
        self._current = {name for name, known in roots.items() if known.is_current()}
        modules = {name: obj for name, obj in tracked.items() if isinstance(obj, torch.nn.Module)}
        names: dict[int, str] = {}
        for name, module in reversed(modules.items()):  # the first name found counts
            known = self._modules.get(name)
            if known is None or name not in self._current:
                names.update(ask({name: module}))
            else:
                if known.names is None:
                    known.names = ask({name: module})
                names.update(known.names)
        return names
