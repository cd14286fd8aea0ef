"""`checkpoint.lazy`: what optimizer.step() alone changes is copied beside the next forward and backward, and only that step
waits for the copy. All else is copied at once. A snapshot whose tensors were changed meanwhile is never finished."""

import weakref
from collections.abc import Callable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from typing import Any

import torch

from perdure.training.engine.device import Copies
from perdure.training.engine.shards import local
from perdure.training.engine.stage import Staging
from perdure.training.engine.state import Tracked
from perdure.training.errors import TrainingFailed

_LIVE: "weakref.WeakSet[Overlap]" = weakref.WeakSet()


def _settle_all(*_: object) -> None:
    """A function of the module, so that what it hangs on can still be copied and pickled."""
    for overlap in list(_LIVE):
        overlap.settle()


@dataclass(eq=False)
class _Pending:
    staging: Staging
    chosen: list[int]
    versions: list[int]
    """torch counts every change in place; a difference means that the copy may hold two states."""
    copied: "Future[None]"
    begun: Copies
    announce: Callable[[], None]


class Overlap:
    """At most one copy at a time. `settle` ends it: the snapshot is whole and announced, or the error is raised."""

    def __init__(self, tracked: Tracked) -> None:
        self._optimizers = [obj for obj in tracked.values() if isinstance(obj, torch.optim.Optimizer)]
        self._thread = ThreadPoolExecutor(1, thread_name_prefix="perdure-copy")
        self._pending: _Pending | None = None
        self._handles: list[Any] = []  # Any: removable handles of two kinds
        for obj in tracked.values():
            if isinstance(obj, torch.optim.Optimizer):
                self._handles.append(obj.register_step_pre_hook(_settle_all))
            if isinstance(obj, (torch.optim.Optimizer, torch.nn.Module)):
                self._handles.append(obj.register_load_state_dict_pre_hook(_settle_all))
        _LIVE.add(self)

    def start(self, staging: Staging, announce: Callable[[], None]) -> None:
        """Copy what anything else may change now, begin to copy the rest, and return."""
        own = self._own()
        later: list[int] = []
        now: list[int] = []
        for index, value in enumerate(staging.values):
            (later if value.numel() and (value.data_ptr(), value.nbytes) in own else now).append(index)
        for index in later:  # the memory of now, whatever `parameter.data = ...` puts in its place before the copy gets there
            staging.values[index] = staging.values[index].detach()
        first = staging.copy(now)
        on_device = [index for index in later if staging.values[index].is_cuda]
        on_host = [index for index in later if not staging.values[index].is_cuda]
        begun = staging.copy(on_device)
        copied = self._thread.submit(staging.copy_quietly, on_host)
        versions = [staging.values[index]._version for index in later]
        first.wait()
        self._pending = _Pending(staging, later, versions, copied, begun, announce)

    def _own(self) -> set[tuple[int, int]]:
        """Where the tensors lie that only optimizer.step() changes."""
        return {(tensor.data_ptr(), tensor.nbytes) for tensor in map(local, self._tensors()) if tensor.layout is torch.strided}

    def _tensors(self) -> Iterator[torch.Tensor]:
        for optimizer in self._optimizers:
            for group in optimizer.param_groups:
                yield from group["params"]
            for state in optimizer.state.values():
                for value in state.values() if isinstance(state, dict) else ():
                    if isinstance(value, torch.Tensor) and value.dim():
                        yield value

    def settle(self) -> None:
        """Wait for the copy under way. Raises TrainingFailed for a tensor that was changed before this."""
        pending, self._pending = self._pending, None
        if pending is None:
            return
        pending.copied.result()
        pending.begun.wait()
        for index, version in zip(pending.chosen, pending.versions, strict=True):
            if pending.staging.values[index]._version != version:
                raise TrainingFailed(
                    f"{pending.staging.paths[index]} was changed outside optimizer.step() while checkpoint.lazy copied it; "
                    "that snapshot is not used",
                    "set checkpoint.lazy = false, or make the change right after optimizer.step(), in the same session step",
                )
        pending.staging.finish()
        pending.announce()

    def close(self) -> None:
        """Take the hooks away, end the thread; a copy under way is given up."""
        for handle in self._handles:
            handle.remove()
        self._pending = None
        self._thread.shutdown()
        _LIVE.discard(self)
