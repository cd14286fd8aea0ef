"""What one rank reads of a checkpoint: what all have in common, its own pieces of what they have cut, and its own generators.
With another number of ranks tensors are cut anew and each reads no more than its part; a new rank has rank 0's plain leaves."""

from collections import Counter
from types import TracebackType

import torch
from torchdata.stateful_dataloader import StatefulDataLoader

from perdure.training.checkpoint.pieces import alone, is_piece, piece_path, wholes
from perdure.training.checkpoint.readahead import ReadAhead
from perdure.training.checkpoint.reader import CheckpointReader
from perdure.training.engine.compare import listed
from perdure.training.engine.leaves import LoadedLeaf, escape
from perdure.training.engine.shards import Place
from perdure.training.engine.state import Tracked
from perdure.training.engine.zero import BUFFERS, ZeroEngine
from perdure.training.errors import ConfigError


class Loading:
    """`read` and `read_part` as a Decoder wants them; `digests` for `check_after_load`, of pieces those that were read as they
    are."""

    def __init__(self, reader: CheckpointReader, threads: int, rank: int) -> None:
        self._reader = reader
        self.is_new = rank >= reader.ranks
        """Whether the checkpoint has nothing that belonged to this rank alone."""
        rank = 0 if self.is_new else rank
        self._leaves = reader.state(rank)
        self._whole = wholes(reader)
        self._ahead = ReadAhead(reader, threads, rank)
        whole: dict[str, bytes | None] = dict.fromkeys(self._whole)
        self.digests = whole | {path: entry.digest for path, (_, entry) in self._leaves.items() if not is_piece(path)}

    def read(self, path: str) -> LoadedLeaf:
        if path in self._whole:
            whole = self._whole[path]
            return LoadedLeaf("tensor", whole.dtype, whole.shape, whole.read(self._reader))
        _, entry = self._leaves[path]
        return LoadedLeaf(entry.kind, entry.dtype, tuple(entry.shape), self._ahead.read(path))

    def read_part(self, path: str, shape: tuple[int, ...], place: Place) -> LoadedLeaf | None:
        whole = self._whole[path] if path in self._whole else alone(*self._leaves[path])
        if whole.shape != shape:
            return None
        piece = piece_path(path, place.offsets)
        if piece in self._leaves and self._leaves[piece][1].shape == place.shape:
            self.digests[piece] = self._leaves[piece][1].digest
            return LoadedLeaf("tensor", whole.dtype, place.shape, self._ahead.read(piece))
        return LoadedLeaf("tensor", whole.dtype, place.shape, whole.read_part(self._reader, place.offsets, place.shape))

    def shape_of(self, path: str) -> tuple[int, ...]:
        """Of a tensor that is cut anew: what is loaded from it is not what has its name now."""
        self.digests[path] = None
        return tuple(self._leaves[path][1].shape)

    def __enter__(self) -> "Loading":
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        self._ahead.__exit__(kind, error, trace)


def check_can_spread(reader: CheckpointReader, tracked: Tracked) -> None:
    """Whether another number of ranks can go on from it. Raises ConfigError naming what belongs to single ranks. Buffers of a
    module may differ (running means, say): a new rank has those of rank 0."""
    several = {path.partition("/")[0] for path in _in_several(reader) - _buffers(tracked)}
    own = [name for name, obj in tracked.items() if name in several or isinstance(obj, StatefulDataLoader)]
    if own:
        raise ConfigError(
            f"the checkpoint {reader.manifest.name} is of {reader.ranks} ranks, and each has its own state of {listed(own)}, "
            "which cannot be spread over another number of ranks",
            f"set launch.processes = {reader.ranks}; of the data, ResumableLoader has one position for all ranks",
        )


def _in_several(reader: CheckpointReader) -> set[str]:
    """Paths of leaves of which several ranks have stored their own."""
    seen = Counter(path for rank in range(reader.ranks) for path in reader.rank_entries(rank))
    return {path for path, ranks in seen.items() if ranks > 1}


def _buffers(tracked: Tracked) -> set[str]:
    modules = {name: obj for name, obj in tracked.items() if isinstance(obj, torch.nn.Module)}
    modules |= {f"{name}/{BUFFERS}": obj.engine.module for name, obj in tracked.items() if isinstance(obj, ZeroEngine)}
    return {f"{name}/{escape(key)}" for name, module in modules.items() for key, _ in module.named_buffers()}
