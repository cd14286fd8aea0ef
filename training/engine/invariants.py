"""What must hold before a step is trained on loaded state, and before a state is saved: refused with the cause, never guessed.

`StepWatch` knows, without asking a device, whether a session step was a whole optimizer step."""

import contextlib
import gc
import logging
from collections.abc import Iterator, Mapping
from typing import Any

import blake3
import torch
from torch.optim.lr_scheduler import LRScheduler

from perdure.training.checkpoint.ordered import in_order
from perdure.training.checkpoint.pack import BLOB_BYTES
from perdure.training.checkpoint.pieces import is_piece
from perdure.training.engine.compare import listed
from perdure.training.engine.shards import local
from perdure.training.engine.state import Tracked, collect, kind_of, parameter_names
from perdure.training.engine.zero import ZeroEngine
from perdure.training.errors import CheckpointDamaged, ConfigError, NonFinite

logger = logging.getLogger(__name__)

_STATEFUL = (LRScheduler, torch.amp.GradScaler, torch.optim.Optimizer)
_ONE_STEP = "one session step is one optimizer step: loop over the micro batches of gradient accumulation inside it"
_STRICT = ("engine", "module", "optimizer", "scheduler", "scaler")


def check_after_load(
    tracked: Tracked, step: int, digests: Mapping[str, bytes | None], *, threads: int, replan: bool = False
) -> None:
    """The loaded tensors, collected again, are bit for bit those of the manifest. Raises CheckpointDamaged naming the first.
    Those that were cut otherwise there are left out: `digests` has None for what is in pieces there, and no others' pieces."""
    strict = {name for name, obj in tracked.items() if kind_of(obj) in _STRICT}
    loaded = [
        (leaf.path, leaf.value, digests.get(leaf.path, None if replan or is_piece(leaf.path) else b""))
        for leaf in collect(tracked)
        if isinstance(leaf.value, torch.Tensor) and leaf.path.partition("/")[0] in strict
    ]
    known = [item for item in loaded if item[2] is not None]
    work = in_order(lambda item: tensor_digest(item[1]), known, threads=threads, nbytes=lambda item: item[1].nbytes)
    with contextlib.closing(work):
        for (path, _, stored), found in work:
            if found != stored:
                text = f"step {step}: {path} differs from the checkpoint after loading: something changed it on the way"
                raise CheckpointDamaged(text, part=path)


def tensor_digest(tensor: torch.Tensor) -> bytes:
    """The leaf digest of docs/format.md: BLAKE3 over the BLAKE3s of its blobs."""
    data = tensor.detach().cpu().resolve_conj().resolve_neg().contiguous()
    item = data.element_size()
    raw = data.reshape(-1).view(torch.uint8).numpy().data if data.numel() else memoryview(b"")
    size = BLOB_BYTES // item * item
    whole = blake3.blake3()
    for start in range(0, len(raw), size):
        whole.update(blake3.blake3(raw[start : start + size]).digest())
    return whole.digest()


def check_finite(tracked: Tracked, step: int) -> None:
    """Raises NonFinite naming the parameters that hold NaN or infinity. One read of the weights, no copy of them."""
    named = [
        (f"{name}.{parameter_name}", tensor)
        for name, obj in tracked.items()
        for parameter_name, tensor in _trained(obj)
        if tensor.is_floating_point() and tensor.numel()
    ]
    if not named:
        return
    norms = torch._foreach_norm([tensor for _, tensor in named], 2.0)  # 25 times as fast as looking for the largest value
    finite = torch.stack([norm.to(named[0][1].device, torch.float32) for norm in norms]).isfinite().tolist()
    suspects = [pair for pair, good in zip(named, finite, strict=True) if not good]
    if bad := [name for name, tensor in suspects if not bool(tensor.isfinite().all())]:  # a norm of huge numbers overflows, too
        raise NonFinite(f"step {step}: {listed(bad)} hold NaN or infinity: nothing is saved, the newest checkpoint stays good")


def _trained(obj: Any) -> Iterator[tuple[str, torch.Tensor]]:  # Any: a tracked object
    """Parameters, as far as they are in this process."""
    if isinstance(obj, ZeroEngine):
        yield from obj.trained()
    elif isinstance(obj, torch.nn.Module):
        for name, parameter in obj.named_parameters():
            if parameter.requires_grad:
                yield name, local(parameter).detach()


class StepWatch:
    """Counts optimizer steps, tells skipped ones apart, and refuses to save between the micro batches of one step."""

    def __init__(self, tracked: Tracked) -> None:
        self._tracked = tracked
        self._optimizers = {name: obj for name, obj in tracked.items() if isinstance(obj, torch.optim.Optimizer)}
        self._engines = {name: obj for name, obj in tracked.items() if isinstance(obj, ZeroEngine)}
        self._scalers = [obj for obj in tracked.values() if isinstance(obj, torch.amp.GradScaler) and obj.is_enabled()]
        self.made = dict.fromkeys(self._optimizers, 0)
        """Optimizer steps since this process began, by tracked name."""
        self._skipped = 0
        self._in_step = dict.fromkeys(self._optimizers, 0)
        self._unused = dict.fromkeys(self._optimizers, False)
        """Gradients were accumulated after the optimizer's last step."""
        self._versions = self._scaler_versions()
        self._looked = False
        self._handles = [handle for name in self._optimizers for handle in self._hook(name)]
        self._handles += [engine.watch() for engine in self._engines.values()]

    @property
    def skipped(self) -> int:
        """Session steps whose optimizer steps a GradScaler or DeepSpeed left out, since this process began."""
        return self._skipped + sum(engine.skipped for engine in self._engines.values())

    def _hook(self, name: str) -> Iterator[Any]:  # Any: removable handles of two kinds
        # torch holds hooks where Python's collector does not look: they must not hold the watch and with it everything tracked
        optimizer, made, in_step, unused = self._optimizers[name], self.made, self._in_step, self._unused

        def stepped(*_: object) -> None:
            made[name] += 1
            in_step[name] += 1
            unused[name] = False

        def accumulated(_: torch.Tensor) -> None:
            unused[name] = True

        yield optimizer.register_step_post_hook(stepped)
        for group in optimizer.param_groups:  # one parameter of each group tells of a backward pass
            first = next((parameter for parameter in group["params"] if parameter.requires_grad and parameter.is_leaf), None)
            if first is not None:
                yield first.register_post_accumulate_grad_hook(accumulated)

    def close(self) -> None:
        """Take the hooks away."""
        for handle in self._handles:
            handle.remove()

    def finished_step(self, step: int) -> None:
        """After each session step. Raises ConfigError where it ended inside a gradient accumulation window."""
        if not self._looked:
            self._looked = True
            check_registered(self._tracked)
        versions = self._scaler_versions()
        updated, self._versions = versions != self._versions, versions
        if self._optimizers and not any(self._in_step.values()):
            if updated:  # the scaler found infinite gradients, left the step out and lowered its scale
                self._skipped += 1
                self._unused.update(dict.fromkeys(self._optimizers, False))
            else:
                self._check_whole(step)
        self._in_step.update(dict.fromkeys(self._optimizers, 0))
        self._check_engines(step)

    def check_before_save(self, step: int) -> None:
        """Raises ConfigError for gradients of an unfinished window, NonFinite for weights nobody should keep."""
        self._check_whole(step)
        self._check_engines(step)
        check_finite(self._tracked, step)

    def _check_whole(self, step: int) -> None:
        for name, optimizer in self._optimizers.items():
            if self._unused[name] and _has_gradients(optimizer):
                raise ConfigError(f"session step {step} ended with gradients that optimizer {name!r} has not used", _ONE_STEP)

    def _check_engines(self, step: int) -> None:
        for name, engine in self._engines.items():
            if not engine.is_whole():
                within = f"within a gradient accumulation window of the DeepSpeed engine {name!r}"
                raise ConfigError(f"session step {step} ended {within}", _ONE_STEP)

    def _scaler_versions(self) -> list[tuple[int, int]]:
        """Changes with each GradScaler.update(), without reading the scale from its device."""
        scales = [getattr(scaler, "_scale", None) for scaler in self._scalers]
        return [(id(scale), scale._version) if isinstance(scale, torch.Tensor) else (0, 0) for scale in scales]


def _has_gradients(optimizer: torch.optim.Optimizer) -> bool:
    gradients = (parameter.grad for group in optimizer.param_groups for parameter in group["params"])
    return any(gradient is not None and bool(local(gradient).count_nonzero()) for gradient in gradients)


def check_registered(tracked: Tracked) -> None:
    """Raises ConfigError for state that lives beside what is tracked and that nobody would save."""
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
    if any(id(obj) not in known and _is_stray(obj, ours, scaled) for obj in _alive(*_STATEFUL)):
        gc.collect()  # what was built and dropped may still lie around in a cycle
        strays = [obj for obj in _alive(*_STATEFUL) if id(obj) not in known and _is_stray(obj, ours, scaled)]
        problems += [f"a {type(obj).__qualname__} is in use, but not tracked" for obj in strays]
    if problems:
        raise ConfigError("not everything would be saved: " + "; ".join(problems), "pass it to session.track(name=...)")
    for copy in sorted(set(_untracked_copies(tracked))):
        logger.warning("a %s looks like a copy of a tracked module but is not tracked: it will not be saved", copy)


def _alive(*kinds: type) -> list[Any]:  # Any: objects of these kinds
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


def _is_stray(obj: Any, ours: set[int], scaled: bool) -> bool:  # Any: as in _alive; ours: ids of parameters
    if isinstance(obj, LRScheduler):
        return _steps_one_of(getattr(obj, "optimizer", None), ours)
    if isinstance(obj, torch.amp.GradScaler):
        return not scaled and obj.is_enabled() and getattr(obj, "_scale", None) is not None
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
    for obj in _alive(torch.nn.Module):
        if id(obj) not in known:
            parameters = list(obj.parameters())
            own = [tuple(parameter.shape) for parameter in parameters]
            if own and own in shapes and not any(id(parameter) in ours for parameter in parameters):
                yield type(obj).__qualname__


def data_position(tracked: Tracked) -> dict[str, Any]:  # Any: plain JSON values
    """What the manifest says of the data: the position of every tracked object that has one."""
    found = {}
    for name, obj in tracked.items():
        position = getattr(obj, "position", None)
        if callable(position):
            found[name] = position()
    return found
