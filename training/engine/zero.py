"""A DeepSpeed engine (ZeRO 0 to 3) as a tracked object. What it would write into files of a checkpoint becomes leaves, what it
would read from them comes from leaves: DeepSpeed says what is in them, no file is written, nothing is pickled."""

import contextlib
import logging
import os
import sys
import tempfile
from collections.abc import Callable, Iterator, Mapping
from functools import partial
from importlib import import_module
from pathlib import Path
from typing import Any

import torch

from perdure.training.engine.leaves import Decoder, Encoder, Leaf, dtype_name, escape, plain_leaf, read_plain
from perdure.training.engine.zero_ranks import OtherRanks, Ref, slices
from perdure.training.errors import CheckpointDamaged, ConfigError
from perdure.training.redact import names_a_secret

_TAG = "perdure"
BUFFERS = "%buffers"
"""Beside the files: the path of what is in none of them."""
_SOCKET = "PERDURE_AGENT_SOCKET"
_OBJECTS = {
    "LossScaler": "deepspeed.runtime.fp16.loss_scaler",
    "DynamicLossScaler": "deepspeed.runtime.fp16.loss_scaler",
    "ZeroStageEnum": "deepspeed.runtime.zero.config",
    "fragment_address": "deepspeed.utils.tensor_fragment",
}
"""The classes, with their modules, whose objects DeepSpeed saves. No other one is ever made from a checkpoint."""
_Save = Callable[[Any, str], None]  # Any: what DeepSpeed saves; under the name of a file
_Load = Callable[[str], Any]  # Any: likewise


def _refuse(*_: object) -> None:
    raise AssertionError("DeepSpeed loads while it saves, or saves while it loads")


class ZeroEngine:
    """In place of the engine among what is tracked."""

    def __init__(self, engine: Any) -> None:  # Any: a DeepSpeedEngine
        self.engine = engine
        self._begun = int(engine.skipped_steps)
        self._unstepped = [-1]
        """Micro step of the newest backward pass; what is newer than the engine's own has not been stepped."""
        if self.stage == 3:
            _clear_padding(engine)

    # what is saved

    def leaves(self, name: str) -> list[Leaf]:
        """One plain leaf that is the same in all ranks, and a plain leaf and tensors for each file that this rank would write.
        All ranks must ask at the same place."""
        own = Encoder(name)
        plain = self.plain() | {"buffers": own.encode(self._buffers(), BUFFERS)}
        leaves = [plain_leaf(name, plain), *own.leaves]
        for file, state in self._saved().items():
            encoder = _Encoder(f"{name}/{escape(file)}")
            leaves += [plain_leaf(encoder.root, encoder.encode(state, "")), *encoder.leaves]
        return leaves

    def plain(self) -> dict[str, Any]:  # Any: plain values
        """What a resume has to find again."""
        engine, module = self.engine, self.engine.module
        named = [*module.named_parameters(remove_duplicate=False), *module.named_buffers(remove_duplicate=False)]
        return {
            "kind": "engine",
            "type": f"{type(module).__module__}.{type(module).__qualname__}",
            "stage": self.stage,
            "ranks": int(engine.seq_dp_world_size),
            "trainable": {name: parameter.requires_grad for name, parameter in module.named_parameters(remove_duplicate=False)},
            "tensors": {name: (dtype_name(one.dtype), *getattr(one, "ds_shape", one.shape)) for name, one in named},
        }

    def _buffers(self) -> dict[str, torch.Tensor]:
        """Running means, say: up to ZeRO 2 DeepSpeed saves those of rank 0 for all."""
        kept = set(self.engine._get_buffer_names())
        return {name: buffer for name, buffer in self.engine.module.named_buffers() if name in kept}

    def _saved(self) -> dict[str, Any]:  # Any: as DeepSpeed has it
        saved = {}

        def save(state: Any, file: str) -> None:  # Any: as DeepSpeed has it
            saved[file] = _without_secrets(state)

        with self._in_place_of_files(save=save), _folder() as folder:
            self.engine.save_checkpoint(folder, tag=_TAG, save_latest=False)
        return saved

    # what is loaded

    def load(self, decoder: Decoder, plain: dict[str, Any]) -> None:  # Any: plain values
        """Of as many ranks or of others. Raises CheckpointDamaged where the checkpoint lacks a file that is needed."""
        name, read = decoder.root, decoder.read

        def load(file: str, kind: type[Decoder] = ZeroDecoder) -> Any:  # Any: as DeepSpeed has it
            root = f"{name}/{escape(file)}"
            return kind(root, read).decode(read_plain(read, root))

        asked: _Load = load
        if plain["ranks"] != self.engine.seq_dp_world_size:
            asked = OtherRanks(self.engine, decoder, partial(load, kind=_Unread), plain["ranks"]).file
        with self._in_place_of_files(load=asked), _folder() as folder:
            wanted = Path(self.engine._get_ckpt_name(folder, _TAG))  # DeepSpeed looks for this one before it loads
            wanted.parent.mkdir()
            wanted.touch()
            found, _ = self.engine.load_checkpoint(folder, tag=_TAG)
        if found is None:
            raise CheckpointDamaged(f"DeepSpeed found nothing to load for {name!r}", part=name)
        for key, value in decoder.decode(plain["buffers"]).items():
            self._buffers()[key].copy_(value)
        self._begun = int(self.engine.skipped_steps)

    @contextlib.contextmanager
    def _in_place_of_files(self, save: _Save = _refuse, load: _Load = _refuse) -> Iterator[None]:
        engine, own, log = self.engine, self.engine.checkpoint_engine, logging.getLogger("DeepSpeed")
        level = log.level
        engine.checkpoint_engine = _in_memory(save, load)
        log.setLevel(max(level, logging.WARNING))  # it has several lines to say about each file
        try:
            yield
        finally:
            engine.checkpoint_engine = own
            log.setLevel(level)

    # what must hold

    def owns(self, obj: object) -> bool:
        """Whether the engine itself saves it."""
        return any(obj is one for one in (*self.optimizers, self.engine.lr_scheduler))

    @property
    def optimizers(self) -> list[Any]:  # Any: DeepSpeed's around torch's, or only torch's
        found, at = [], self.engine.optimizer
        while at is not None and at not in found:
            found.append(at)
            at = getattr(at, "optimizer", None)
        return found

    @property
    def skipped(self) -> int:
        """Optimizer steps left out for infinite gradients, since this process began."""
        return int(self.engine.skipped_steps) - self._begun

    @property
    def stage(self) -> int:
        return int(self.engine.zero_optimization_stage())

    def trained(self) -> Iterator[tuple[str, torch.Tensor]]:
        """Parameters by their names; of ZeRO 3's this rank's part."""
        for name, parameter in self.engine.module.named_parameters():
            if parameter.requires_grad:
                yield name, getattr(parameter, "ds_tensor", parameter).detach()

    def watch(self) -> Any:  # Any: a removable handle
        """Notice backward passes by the gradient of one parameter."""
        engine, unstepped = self.engine, self._unstepped
        first = next(parameter for parameter in engine.module.parameters() if parameter.requires_grad)

        def accumulated(_: torch.Tensor) -> None:
            unstepped[0] = int(engine.micro_steps)

        return first.register_post_accumulate_grad_hook(accumulated)

    def is_whole(self) -> bool:
        """No gradients wait for a step: neither those of a micro batch, nor those of an unfinished accumulation window."""
        made = int(self.engine.micro_steps)
        return made % int(self.engine.gradient_accumulation_steps()) == 0 and self._unstepped[0] < made


@torch.no_grad()
def _clear_padding(engine: Any) -> None:  # Any: a DeepSpeedEngine
    """Behind a parameter that does not divide, ZeRO 3 saves whatever was in memory: two equal runs would differ."""
    ranks, rank = int(engine.seq_dp_world_size), int(engine.global_rank)
    spans = {}
    for parameter in engine.module.parameters():
        [spans[parameter]] = slices({"": parameter.ds_numel}, ranks, rank)
        parameter.ds_tensor[spans[parameter].length :].zero_()
    optimizer = engine.optimizer
    for group, flat in zip(optimizer.fp16_groups, optimizer.fp32_partitioned_groups_flat, strict=True):
        start = 0
        for parameter in group:
            end = start + parameter.ds_tensor.ds_numel
            flat[start + spans[parameter].length : end].zero_()
            start = end


def is_engine(obj: object) -> bool:
    """Without importing DeepSpeed."""
    runtime = sys.modules.get("deepspeed.runtime.engine")
    return runtime is not None and isinstance(obj, runtime.DeepSpeedEngine)


def check_engine(name: str, engine: Any) -> None:  # Any: a DeepSpeedEngine
    """Raises ConfigError for what its checkpoint would not hold, or what has never been tried."""
    wrong = {
        "has no optimizer": engine.optimizer is None,
        "is a pipeline": type(engine).__name__ == "PipelineEngine",
        "has experts (MoE)": bool(engine.has_moe_layers),
        "is parallel inside its layers": engine.mpu is not None,
        "swaps its optimizer to NVMe": bool(engine.zero_nvme_offload_optimizer()),
        "has a loader of DeepSpeed's, whose position nobody saves": engine.training_dataloader is not None,
    }
    if found := [what for what, is_so in wrong.items() if is_so]:
        raise ConfigError(
            f"session.track: the DeepSpeed engine {name!r} {' and '.join(found)}: it cannot be saved and restored",
            "ZeRO 0 to 3 with data of a ResumableLoader can",
        )


def check_not_twice(tracked: Mapping[str, Any]) -> None:  # Any: tracked objects
    """Raises ConfigError for what an engine saves already."""
    for engine in (obj for obj in tracked.values() if isinstance(obj, ZeroEngine)):
        for name, obj in tracked.items():
            if engine.owns(obj):
                raise ConfigError(f"session.track({name}=...): the DeepSpeed engine saves it", "leave it out")


class _Encoder(Encoder):
    def _special(self, value: Any, path: str, depth: int) -> Any:  # Any: as in Encoder.encode
        kind = type(value)
        if _OBJECTS.get(kind.__name__) != kind.__module__:
            return super()._special(value, path, depth)
        fields = int(value) if isinstance(value, int) else self.encode(vars(value), path, depth + 1)
        return ("deepspeed", kind.__name__, fields)


class ZeroDecoder(Decoder):
    def _deepspeed(self, name: str, fields: Any) -> Any:  # Any: plain values in, the object out
        kind = getattr(import_module(_OBJECTS[name]), name)
        if isinstance(fields, int):
            return kind(fields)
        made = kind.__new__(kind)
        vars(made).update(self.decode(fields))
        return made


class _Unread(ZeroDecoder):
    def tensor(self, relative: str) -> Any:  # Any: what stands for it
        return Ref(f"{self.root}/{relative}")


def _in_memory(save: _Save, load: _Load) -> Any:  # Any: a CheckpointEngine
    from deepspeed.runtime.checkpoint_engine.checkpoint_engine import CheckpointEngine

    class InMemory(CheckpointEngine):  # type: ignore[misc]  # untyped
        def create(self, info: object) -> None:
            pass

        def makedirs(self, path: str, exist_ok: bool = False) -> None:
            pass

        def save(self, state_dict: Any, path: str) -> None:  # Any: as DeepSpeed has it
            save(state_dict, os.path.basename(path))

        def load(self, path: str, map_location: object = None) -> Any:  # Any: as DeepSpeed has it
            return load(os.path.basename(path))

        def commit(self, info: object) -> bool:
            return True

        def preserves_storage_sharing(self) -> bool:
            return False  # else every tensor is copied before it gets here

    return InMemory()


def _without_secrets(state: Any) -> Any:  # Any: as DeepSpeed has it
    """The settings it hangs to each file can hold the key of a metrics service, and nobody reads them."""
    return {key: _cleared(value) if key == "ds_config" else value for key, value in state.items()}


def _cleared(value: Any) -> Any:  # Any: JSON values
    if not isinstance(value, dict):
        return value
    return {key: "" if names_a_secret(str(key)) else _cleared(inner) for key, inner in value.items()}


@contextlib.contextmanager
def _folder() -> Iterator[str]:
    """A private one that DeepSpeed can look at: in the agent's, which goes with it whatever becomes of this process."""
    socket = os.environ.get(_SOCKET)
    with tempfile.TemporaryDirectory(prefix="zero-", dir=os.path.dirname(socket) if socket else None) as folder:
        yield folder
