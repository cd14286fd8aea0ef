"""DTensors (fully_shard, tensor parallelism): this rank's piece of one is what is staged, and what is read on resume."""

import sys
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any, NamedTuple, TypeGuard

import torch

from perdure.training.errors import PerdureError

if TYPE_CHECKING:
    from torch.distributed.tensor import DTensor


class Place(NamedTuple):
    """Where a piece begins in the whole tensor, and its shape."""

    offsets: tuple[int, ...]
    shape: tuple[int, ...]


_PLACES: dict[Any, Place] = {}  # Any: shape, mesh and placements
"""Known ones: to work one out takes longer than all else that is done to a tensor."""


def is_sharded(value: object) -> "TypeGuard[DTensor]":
    """Without importing what makes DTensors."""
    return isinstance(value, torch.Tensor) and hasattr(value, "_local_tensor")


def local(tensor: torch.Tensor) -> torch.Tensor:
    """What of it is in this process: nothing done with that asks other ranks."""
    return tensor._local_tensor if is_sharded(tensor) else tensor


def place_of(tensor: "DTensor", path: str) -> Place:
    """Raises PerdureError where ranks still have to add it up."""
    key = (tensor.shape, tensor.device_mesh, tensor.placements)
    known = _PLACES.get(key)
    if known is None:
        if any(placement.is_partial() for placement in tensor.placements):
            raise PerdureError(f"{path} is a DTensor of partial sums", "redistribute it before it is saved")
        [chunk] = tensor.__create_chunk_list__()  # type: ignore[no-untyped-call]
        known = Place(tuple(chunk.offsets), tuple(chunk.sizes))
        if known.shape != tuple(local(tensor).shape):
            raise PerdureError(f"{path} is a DTensor of which ranks have no single piece", "lay it out in another way")
        _PLACES[key] = known
    return known


def with_layout(piece: torch.Tensor, live: "DTensor") -> "DTensor":
    """A DTensor laid out as `live`, with this piece as its own."""
    from torch.distributed.tensor import DTensor

    mesh, placements = live.device_mesh, live.placements
    return DTensor.from_local(piece, mesh, placements, run_check=False, shape=live.shape, stride=live.stride())


def check_state(name: str, parameter: torch.Tensor, state: Any) -> None:  # Any: what an optimizer keeps for it
    """Raises PerdureError for state laid out otherwise than its parameter: nothing would say how to lay it out again."""
    for key, value in state.items() if isinstance(state, dict) else ():
        like = is_sharded(parameter) and (parameter.shape, parameter.device_mesh, parameter.placements)
        if is_sharded(value) and (value.shape, value.device_mesh, value.placements) != like:
            raise PerdureError(
                f"{name}: its {key} is a DTensor of another shape or layout than the parameter: it cannot be saved"
            )


def gather_in(tracked: Mapping[str, Any]) -> None:  # Any: tracked objects
    """Have fully_shard's modules hold their sharded parameters: after a forward without a backward they hold whole ones."""
    if "torch.distributed.fsdp" not in sys.modules:
        return
    from torch.distributed.fsdp import FSDPModule

    for obj in tracked.values():
        for module in obj.modules() if isinstance(obj, torch.nn.Module) else ():
            if isinstance(module, FSDPModule):
                module.reshard()


def meshes(tracked: Mapping[str, Any]) -> list[dict[str, Any]]:  # Any: tracked objects in, JSON values out
    """For the manifest: the arrangements of ranks that tensors are laid out on."""
    parameters = [one for obj in tracked.values() if isinstance(obj, torch.nn.Module) for one in obj.parameters()]
    found = dict.fromkeys(parameter.device_mesh for parameter in parameters if is_sharded(parameter))
    return [{"shape": list(mesh.shape), "names": list(mesh.mesh_dim_names or ())} for mesh in found]
