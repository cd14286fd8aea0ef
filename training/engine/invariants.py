"""What must hold before a step is trained on loaded state, and before a state is saved: refused with the cause, never guessed.

`StepWatch` knows, without asking a device, whether a session step was a whole optimizer step."""

import contextlib
from collections.abc import Callable, Iterator
from typing import Any

import blake3
import torch

from perdure.training.checkpoint.ordered import in_order
from perdure.training.checkpoint.pack import BLOB_BYTES
from perdure.training.engine.compare import listed
from perdure.training.engine.shards import local
from perdure.training.engine.state import Tracked, collect, kind_of
from perdure.training.engine.unsaved import ForgottenData, alive, check_registered
from perdure.training.engine.zero import ZeroEngine
from perdure.training.errors import CheckpointDamaged, ConfigError, NonFinite

_ONE_STEP = "one session step is one optimizer step: loop over the micro batches of gradient accumulation inside it"
_STRICT = ("engine", "module", "optimizer", "scheduler", "scaler")


def check_after_load(
    tracked: Tracked, step: int, digest_of: Callable[[str], bytes | None], *, threads: int, replan: bool = False
) -> None:
    """The loaded tensors, collected again, are bit for bit those of the manifest. Raises CheckpointDamaged naming the first.
    `digest_of` raises KeyError where it has no such leaf, and gives None for what was cut otherwise there: that is left out."""

    def stored(path: str) -> bytes | None:
        try:
            return digest_of(path)
        except KeyError:
            return None if replan else b""

    strict = {name for name, obj in tracked.items() if kind_of(obj) in _STRICT}
    loaded = [
        (leaf.path, leaf.value, stored(leaf.path))
        for leaf in collect(tracked)
        if isinstance(leaf.value, torch.Tensor) and leaf.path.partition("/")[0] in strict
    ]
    known = [item for item in loaded if item[2] is not None]
    work = in_order(lambda item: tensor_digest(item[1]), known, threads=threads, nbytes=lambda item: item[1].nbytes)
    with contextlib.closing(work):
        for (path, _, wanted), found in work:
            if found != wanted:
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
        self._scaling: set[int] = set()
        """Ids of scalers, tracked or not, that made the first step of a tracked optimizer."""
        self._data = ForgottenData(tracked)
        self._handles = [handle for name in self._optimizers for handle in self._hook(name)]
        self._handles += [engine.watch() for engine in self._engines.values()]

    @property
    def skipped(self) -> int:
        """Session steps whose optimizer steps a GradScaler or DeepSpeed left out, since this process began."""
        return self._skipped + sum(engine.skipped for engine in self._engines.values())

    def _hook(self, name: str) -> Iterator[Any]:  # Any: removable handles of two kinds
        # torch holds hooks where Python's collector does not look: they must not hold the watch and with it everything tracked
        optimizer, made, in_step, unused = self._optimizers[name], self.made, self._in_step, self._unused
        scaled, scaling = bool(self._scalers), self._scaling

        def stepped(stepping: torch.optim.Optimizer, *_: object) -> None:
            if scaled and not made[name]:  # until its update() a scaler knows whose gradients it has scaled back
                found = alive(torch.amp.GradScaler)
                scaling.update(id(one) for one in found if id(stepping) in getattr(one, "_per_optimizer_states", ()))
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
        if not self._looked or self._scaling:
            self._looked = True
            check_registered(self._tracked, self._scaling)
            self._scaling.clear()
        self._data.finished_step()
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


def data_position(tracked: Tracked) -> dict[str, Any]:  # Any: plain JSON values
    """What the manifest says of the data: the position of every tracked object that has one."""
    found = {}
    for name, obj in tracked.items():
        position = getattr(obj, "position", None)
        if callable(position):
            found[name] = position()
    return found
