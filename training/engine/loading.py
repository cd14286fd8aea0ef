"""What one rank reads of a checkpoint: what all have in common, its own pieces of what they have cut, and its own generators.
With another number of ranks tensors are cut anew and each reads no more than its part; a new rank has rank 0's plain leaves.

Indexes are opened when something in them is asked for. With as many ranks as before that is a rank's own and the few of those
that store what it has in common with others; to cut tensors anew takes all."""

from collections import Counter
from functools import cached_property
from types import TracebackType

import torch
from torchdata.stateful_dataloader import StatefulDataLoader

from perdure.training.checkpoint.pack import IndexEntry
from perdure.training.checkpoint.pieces import Whole, alone, is_piece, piece_path, whole_path, wholes
from perdure.training.checkpoint.readahead import ReadAhead
from perdure.training.checkpoint.reader import CheckpointReader
from perdure.training.engine.compare import listed
from perdure.training.engine.leaves import LoadedLeaf, escape
from perdure.training.engine.shards import Place
from perdure.training.engine.state import Tracked
from perdure.training.engine.zero import BUFFERS, ZeroEngine
from perdure.training.errors import ConfigError


class Loading:
    """`read`, `read_part` and `shape_of` as a Decoder wants them; `digest` for `check_after_load`."""

    def __init__(self, reader: CheckpointReader, threads: int, rank: int, ranks: int) -> None:
        """`ranks`: how many there are now."""
        self._reader = reader
        self._unchanged = ranks == reader.ranks
        self.is_new = rank >= reader.ranks
        """Whether the checkpoint has nothing that belonged to this rank alone."""
        self._rank = 0 if self.is_new else rank
        self._ahead = ReadAhead(reader, threads, self._rank)
        self._cut: dict[int, dict[str, list[IndexEntry]]] = {}
        """Of the ranks whose index was opened: their pieces of each tensor that is cut."""
        self._digests: dict[str, bytes | None] = {}
        """Of pieces that were read as they are; None of tensors that are cut anew."""

    @cached_property
    def _wholes(self) -> dict[str, Whole]:
        return wholes(self._reader)

    def read(self, path: str) -> LoadedLeaf:
        _, entry = self._search(path)
        if entry.path != path:
            whole = self._wholes[path]
            return LoadedLeaf("tensor", whole.dtype, whole.shape, whole.read(self._reader))
        return LoadedLeaf(entry.kind, entry.dtype, tuple(entry.shape), self._ahead.read(path))

    def read_part(self, path: str, shape: tuple[int, ...], place: Place) -> LoadedLeaf | None:
        owner, entry = self._search(path)
        if entry.path == path:
            whole = alone(owner, entry)
        elif (own := self._as_it_was(path, place, entry.dtype)) is not None:
            return own
        else:
            whole = self._wholes[path]
        if whole.shape != shape:
            return None
        piece = piece_path(path, place.offsets)
        return self._piece(piece, place) or LoadedLeaf(
            "tensor", whole.dtype, place.shape, whole.read_part(self._reader, place.offsets, place.shape)
        )

    def _as_it_was(self, path: str, place: Place, dtype: str) -> LoadedLeaf | None:
        """This rank's piece of a tensor that is cut as before; None where that takes a look at the pieces of all ranks.

        Each rank looks at those that it stores itself, and one whose are not what it is to have now looks at all. So where
        none does, all pieces are as they are to be now, and the tensor has the shape that it had."""
        own, piece = self._pieces(self._rank).get(path, []), piece_path(path, place.offsets)
        if not self._unchanged or any((entry.path, entry.shape) != (piece, place.shape) for entry in own):
            return None
        return LoadedLeaf("tensor", dtype, place.shape, b"") if 0 in place.shape else self._piece(piece, place)

    def _piece(self, piece: str, place: Place) -> LoadedLeaf | None:
        """That one as it is, if there is one of this shape."""
        try:
            entry = self._reader.rank_entries(self._reader.find(piece, self._rank))[piece]
        except KeyError:
            return None
        if entry.shape != place.shape:
            return None
        self._digests[piece] = entry.digest
        return LoadedLeaf(entry.kind, entry.dtype, place.shape, self._ahead.read(piece))

    def shape_of(self, path: str) -> tuple[int, ...]:
        """Of a tensor that is cut anew: what is loaded from it is not what has its name now."""
        self._digests[path] = None
        return tuple(self._reader.rank_entries(self._reader.find(path, self._rank))[path].shape)

    def digest(self, path: str) -> bytes | None:
        """What a loaded leaf's must be; None where it was cut anew. Raises KeyError where there is no such leaf."""
        if path in self._digests or is_piece(path):
            return self._digests.get(path)
        _, entry = self._search(path)
        return entry.digest if entry.path == path else None

    def _search(self, path: str) -> tuple[int, IndexEntry]:
        """A leaf, or any piece of the tensor where that is cut, and the rank that stores it: this one or the first that does.
        Raises KeyError."""
        for owner in (self._rank, *range(self._reader.ranks)):
            entries = self._reader.rank_entries(owner)
            if path in entries:
                return owner, entries[path]
            if path in self._pieces(owner):
                return owner, self._pieces(owner)[path][0]
        raise KeyError(path)

    def _pieces(self, owner: int) -> dict[str, list[IndexEntry]]:
        if owner not in self._cut:
            found: dict[str, list[IndexEntry]] = {}
            for path, entry in self._reader.rank_entries(owner).items():
                if is_piece(path):
                    found.setdefault(whole_path(path), []).append(entry)
            self._cut[owner] = found
        return self._cut[owner]

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
