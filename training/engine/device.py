"""Copies from wherever the state lives into host memory: at once on a CPU, on a side stream into pinned memory on CUDA.

Not run on a device yet: no machine of ours has one. The CPU path is what the tests prove."""

import mmap
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import torch

_INTEGERS = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}
"""By their size; NumPy does not know all of torch's types."""


@dataclass(eq=False)
class Copies:
    """Copies under way; the sources must stay as they are until `wait` returns."""

    events: "list[torch.cuda.Event]" = field(default_factory=list)

    def wait(self) -> None:
        for event in self.events:
            event.synchronize()


_streams: dict[torch.device, torch.cuda.Stream] = {}


def copy(targets: list[torch.Tensor], sources: list[torch.Tensor]) -> Copies:
    """Begin to copy each source into its target. What is on the CPU is there when this returns."""
    begun = Copies()
    if not targets:
        return begun
    if not torch.cuda.is_initialized():  # type: ignore[no-untyped-call]
        _copy(targets, sources)
        return begun
    by_device: dict[torch.device, list[int]] = {}
    for index, source in enumerate(sources):
        by_device.setdefault(source.device, []).append(index)
    for at, chosen in by_device.items():
        pair = [targets[index] for index in chosen], [sources[index] for index in chosen]
        if at.type == "cuda":
            begun.events.append(_copy_beside(at, *pair))
        else:
            _copy(*pair)
    return begun


def join(target: torch.Tensor, sources: list[torch.Tensor]) -> bool:
    """Copy small tensors of one type and shape, one after the other; False where one is not on the CPU."""
    if not all(source.is_cpu for source in sources):
        return False
    with torch.no_grad():
        torch.stack(sources, out=target)
    return True


def copy_quietly(targets: list[torch.Tensor], sources: list[torch.Tensor]) -> None:
    """Copy on the CPU, in this thread alone: for any other than the trainer's torch would start a second set of threads, and
    from then on no step of the training would be as quick as before."""
    for target, source in zip(targets, sources, strict=True):
        if source.is_cpu:
            np.copyto(_array(target), _array(source))
        else:
            _copy([target], [source])


def _array(tensor: torch.Tensor) -> np.ndarray[Any, Any]:  # Any: elements of that size
    plain = tensor.detach().resolve_conj().resolve_neg()
    return plain.view(_INTEGERS.get(plain.element_size(), plain.dtype)).numpy()


def _copy(targets: list[torch.Tensor], sources: list[torch.Tensor]) -> None:
    with torch.no_grad():
        torch._foreach_copy_(targets, sources)


def _copy_beside(at: torch.device, targets: list[torch.Tensor], sources: list[torch.Tensor]) -> torch.cuda.Event:
    if at not in _streams:
        _streams[at] = torch.cuda.Stream(at)  # type: ignore[no-untyped-call]
    stream = _streams[at]
    stream.wait_stream(torch.cuda.current_stream(at))
    with torch.cuda.stream(stream), torch.no_grad():
        for target, source in zip(targets, sources, strict=True):
            target.copy_(source, non_blocking=True)
            source.record_stream(stream)
        event = torch.cuda.Event()  # type: ignore[no-untyped-call]
        event.record(stream)
    return event


def pin(space: mmap.mmap) -> None:
    """Have CUDA know this memory, so that copies into it need no detour; nothing without a device in use."""
    if torch.cuda.is_initialized():  # type: ignore[no-untyped-call]
        whole = torch.frombuffer(space, dtype=torch.uint8)
        status = torch.cuda.cudart().cudaHostRegister(whole.data_ptr(), len(space), 0)  # type: ignore[no-untyped-call]
        if int(status) == 0:
            _pinned.add(id(space))


def release(space: mmap.mmap) -> None:
    """Undo `pin`, before the slot gets another mapping."""
    if id(space) in _pinned:
        _pinned.discard(id(space))
        whole = torch.frombuffer(space, dtype=torch.uint8)
        torch.cuda.cudart().cudaHostUnregister(whole.data_ptr())  # type: ignore[no-untyped-call]


_pinned: set[int] = set()
"""By id: a mapping that is pinned is held by its slot."""
