"""Where training stands in its data: a shuffled order that can be entered anywhere, and a position in global samples.

The order is a function of (seed, epoch, index) alone: no permutation is stored, and neither the number of ranks, nor workers,
nor NumPy's version changes it. What counts as consumed is what the training loop was handed, never what was prefetched."""

import random
from collections.abc import Callable, Iterable, Iterator, Sized
from typing import Any

import blake3
import numpy as np
import numpy.typing as npt
import torch
from torch.utils.data import DataLoader, Dataset, Sampler, get_worker_info

from perdure.training.errors import ConfigError

_ROUNDS = 8
_BLOCK = 1 << 14
"""Indices of the order computed at a time."""
_Words = npt.NDArray[np.uint64]


def shuffled(positions: npt.NDArray[np.int64], length: int, seed: int, epoch: int) -> npt.NDArray[np.int64]:
    """The items at these positions of an epoch's order: a permutation of range(length) by a keyed Feistel network."""
    half = max(1, (max(length - 1, 1).bit_length() + 1) // 2)
    keys = _mix(
        np.arange(_ROUNDS, dtype=np.uint64) + _mix(np.array([seed % (1 << 64)], np.uint64) + _mix(np.array([epoch], np.uint64)))
    )
    result = _permute(positions.astype(np.uint64), half, keys)
    while (outside := result >= length).any():
        result[outside] = _permute(result[outside], half, keys)
    return result.astype(np.int64)


def _permute(values: _Words, half: int, keys: _Words) -> _Words:
    """One pass of the network: a permutation of the numbers of 2 x half bits."""
    shift, mask = np.uint64(half), np.uint64((1 << half) - 1)
    left, right = values >> shift, values & mask
    for key in keys:
        left, right = right, left ^ (_mix(right ^ key) & mask)
    return (left << shift) | right


def _word(number: int) -> _Words:
    return np.array([number % (1 << 64)], np.uint64)


def _mix(values: _Words) -> _Words:
    """splitmix64's finalizer."""
    values = values + np.uint64(0x9E3779B97F4A7C15)
    values = (values ^ (values >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    values = (values ^ (values >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    return values ^ (values >> np.uint64(31))


def micro_batches_done(steps: int, accumulation: int, loader_length: int) -> tuple[int, int]:
    """(epoch, micro batches to skip in it) after so many optimizer steps of `accumulation` micro batches each."""
    if steps < 0 or accumulation < 1 or loader_length < 1:
        raise ConfigError(f"no position: {steps} steps of {accumulation} micro batches over a loader of {loader_length}")
    return divmod(steps * accumulation, loader_length)


def fingerprint(samples: Iterable[str | bytes | int]) -> str:
    """A digest of the ids (paths, hashes, lengths) of all samples in order; pass it on, and other data is refused on resume."""
    digest, count = blake3.blake3(), 0
    for sample in samples:
        text = sample if isinstance(sample, bytes) else str(sample).encode()
        digest.update(len(text).to_bytes(8, "little") + text)
        count += 1
    return f"{count}-{digest.hexdigest()[:32]}"


class ResumableSampler(Sampler[int]):
    """The indices one rank is to load, epoch after epoch. Global batch k is the k-th run of `batch_size * world` items of the
    order, whoever loads which part; so 4 ranks of 2 go on as 2 of 4 or 1 of 8. `batch_size` is what this rank takes at a time.

    Under torchdata's StatefulDataLoader nothing else is needed: that saves the sampler with its own position. Anywhere else
    iterating starts at the position and does not move it: `consumed()` does, once for each batch the training loop was given.
    `ResumableLoader` calls it and `next_epoch()`; with a plain DataLoader call both yourself, and give that a generator of
    its own (making an iterator draws from torch's global one, which a resume within an epoch would do once more)."""

    def __init__(
        self,
        data: Sized | int,
        *,
        seed: int,
        shuffle: bool = True,
        rank: int = 0,
        world: int = 1,
        batch_size: int = 1,
        drop_last: bool = False,
        fingerprint: str = "",
    ) -> None:
        self.length = data if isinstance(data, int) else len(data)
        self.seed, self.shuffle, self.rank, self.world = seed, shuffle, rank, world
        self.batch_size, self.drop_last, self.fingerprint = batch_size, drop_last, fingerprint
        self.epoch = 0
        """Epochs finished, from 0."""
        self.samples = 0
        """Samples of this epoch consumed by all ranks together."""
        self.batches = 0
        """Global batches consumed since this object was made."""
        self.started = False
        """Indices were taken."""
        self.exhausted = False
        """An iteration of this epoch came to its end."""
        if not 0 <= rank < world or batch_size < 1 or self.length < 1:
            raise ConfigError(
                f"ResumableSampler: rank {rank} of {world}, batch_size {batch_size}, {self.length} samples is impossible"
            )
        self._check_last_batch()

    def _check_last_batch(self) -> None:
        last = (self.length - self.samples) % self.global_batch
        if not self.drop_last and 0 < last < self.world:
            raise ConfigError(
                f"ResumableSampler: the last {last} samples of the epoch do not reach {self.world} ranks",
                "set drop_last=True, or take another batch_size",
            )

    @property
    def global_batch(self) -> int:
        """Samples of one batch of all ranks."""
        return self.batch_size * self.world

    @property
    def epoch_done(self) -> bool:
        """Every batch of this epoch was consumed."""
        return self._end() <= self.samples

    def __iter__(self) -> Iterator[int]:
        """The rest of this epoch; after an iteration that came to its end and was not counted by `consumed`, the next epoch."""
        if self.exhausted:
            self.next_epoch()
        return _Indices(self)

    def stream(self, skip: int) -> Iterator[int]:
        """This rank's indices from the position on, without the first `skip` of them."""
        self.started = True
        first = self.samples + skip // self.batch_size * self.global_batch
        batches = [self._bounds(start) for start in range(first, self._end(), self.global_batch)]
        at_once = max(1, _BLOCK // self.batch_size)
        skip %= self.batch_size
        for block in range(0, len(batches), at_once):
            items = self._items([np.arange(first, last) for first, last in batches[block : block + at_once]])
            yield from items[skip:]
            skip = 0
        self.exhausted = True

    def __len__(self) -> int:
        """Indices this rank still has to take in this epoch."""
        starts = range(self.samples, self._end(), self.global_batch)
        return sum(last - first for first, last in map(self._bounds, starts))

    def _items(self, parts: list[npt.NDArray[np.int64]]) -> list[int]:
        positions = np.concatenate(parts)
        items = shuffled(positions, self.length, self.seed, self.epoch) if self.shuffle else positions
        return list(items.tolist())

    def _bounds(self, start: int) -> tuple[int, int]:
        """This rank's part of the global batch at `start`: equal parts, in the last one as equal as can be."""
        size = min(self.global_batch, self.length - start)
        return start + size * self.rank // self.world, start + size * (self.rank + 1) // self.world

    def _end(self) -> int:
        """Where this epoch ends: a batch that would not be whole is left out with drop_last."""
        return self.length - (self.length - self.samples) % self.global_batch if self.drop_last else self.length

    def consumed(self, batches: int = 1) -> None:
        """The training loop was given `batches` more batches."""
        self.batches += batches
        self.samples = min(self.samples + batches * self.global_batch, self.length)

    def next_epoch(self) -> None:
        """End this epoch here, consumed or not."""
        self.epoch, self.samples, self.exhausted = self.epoch + 1, 0, False

    def position(self) -> dict[str, Any]:  # Any: plain JSON values
        """For the manifest."""
        return {"epoch": self.epoch, "samples": self.samples, "length": self.length, "global_batch": self.global_batch}

    def state_dict(self) -> dict[str, Any]:  # Any: plain values
        """The same for every rank and any number of them."""
        return {
            "epoch": self.epoch, "samples": self.samples, "length": self.length, "seed": self.seed, "shuffle": self.shuffle,
            "fingerprint": self.fingerprint,
        }  # fmt: skip

    def load_state_dict(self, state: dict[str, Any]) -> None:  # Any: plain values
        if self.started:
            raise ConfigError(
                "the data was iterated before it was restored", "make the iterator after session.resume() or inside the loop"
            )
        for key in ("length", "seed", "shuffle", "fingerprint"):
            if state[key] != getattr(self, key):
                raise ConfigError(f"the data's {key} was {state[key]!r} in the checkpoint, is {getattr(self, key)!r} now")
        self.epoch, self.samples, self.exhausted = int(state["epoch"]), int(state["samples"]), False
        self._check_last_batch()


class _Indices(Iterator[int]):
    """One iteration; stateful, so that torchdata's StatefulDataLoader saves and loads where in it training stands."""

    def __init__(self, sampler: ResumableSampler) -> None:
        self._sampler, self._yielded = sampler, 0
        self._source: Iterator[int] | None = None

    def __next__(self) -> int:
        if self._source is None:
            self._source = self._sampler.stream(self._yielded)
        item = next(self._source)
        self._yielded += 1
        return item

    def state_dict(self) -> dict[str, int]:
        return {"yielded": self._yielded}

    def load_state_dict(self, state: dict[str, int]) -> None:
        self._yielded, self._source = int(state["yielded"]), None
        if self._yielded >= len(self._sampler):
            self._sampler.exhausted = True


class _Numbered(Dataset[Any]):  # Any: items are the user's
    """The user's data set, asked by sample number `epoch * length + index`. In a worker every sample has its own seed, so that
    random augmentation is the same whichever worker loads it, and after a resume."""

    def __init__(self, dataset: Any, length: int, seed: int) -> None:  # Any: Dataset does not promise __len__
        self._dataset, self._length, self._seed = dataset, length, seed
        if hasattr(dataset, "__getitems__"):  # torch looks for it on the instance
            self.__getitems__ = self._many

    def __getitem__(self, number: int) -> Any:
        self._prepare(number)
        return self._dataset[number % self._length]

    def _many(self, numbers: list[int]) -> Any:
        self._prepare(numbers[0])
        return self._dataset.__getitems__([number % self._length for number in numbers])

    def _prepare(self, number: int) -> None:
        if get_worker_info() is not None:
            seed = int(_mix(_word(number) + _mix(_word(self._seed)))[0])
            random.seed(seed)
            np.random.seed(seed % (1 << 32))
            torch.default_generator.manual_seed(seed % (1 << 63))


class _Numbers(Sampler[int]):
    """Sample numbers instead of indices, for `_Numbered`."""

    def __init__(self, sampler: ResumableSampler) -> None:
        self._sampler = sampler

    def __iter__(self) -> Iterator[int]:
        first = self._sampler.epoch * self._sampler.length
        return (first + index for index in self._sampler)

    def __len__(self) -> int:
        return len(self._sampler)


class ResumableLoader:
    """A DataLoader over a map-style data set that knows what training consumed. `for batch in loader` is the rest of one epoch,
    `next(batches)` with `batches = loader.forever()` goes on from epoch to epoch. Workers may prefetch as they like."""

    def __init__(
        self,
        dataset: Dataset[Any],  # Any: items are the user's
        *,
        batch_size: int,
        seed: int,
        shuffle: bool = True,
        rank: int = 0,
        world: int = 1,
        drop_last: bool = False,
        fingerprint: str = "",
        num_workers: int = 0,
        collate_fn: Callable[[list[Any]], Any] | None = None,
        **options: Any,  # Any: for torch's DataLoader
    ) -> None:
        size: Any = dataset  # Any: Dataset does not promise the __len__ that map-style sets have
        self.sampler = ResumableSampler(
            size,
            seed=seed,
            shuffle=shuffle,
            rank=rank,
            world=world,
            batch_size=batch_size,
            drop_last=drop_last,
            fingerprint=fingerprint,
        )
        # a generator of its own: making an iterator must not draw from torch's, or a resume within an epoch would differ
        options.setdefault("generator", torch.Generator().manual_seed(0))
        self.iteration = object()
        """Another one in each iteration."""
        self._loader: DataLoader[Any] = DataLoader(
            _Numbered(dataset, self.sampler.length, seed), batch_size=batch_size, sampler=_Numbers(self.sampler),
            num_workers=num_workers, collate_fn=collate_fn, **options,
        )  # fmt: skip

    @property
    def epoch(self) -> int:
        """Epochs finished, from 0."""
        return self.sampler.epoch

    @property
    def epoch_done(self) -> bool:
        """The batch handed out last was the last of its epoch."""
        return self.sampler.epoch_done

    def __len__(self) -> int:
        """Batches left in this epoch."""
        return -(-len(self.sampler) // self.sampler.batch_size)

    def __iter__(self) -> Iterator[Any]:
        self.sampler.exhausted = False  # by an iteration that was left early, with its last batches prefetched but not consumed
        self.iteration = object()
        for batch in self._loader:
            self.sampler.consumed()  # before the batch is handed out: a cut in the loop body has it behind itself
            yield batch
        self.sampler.next_epoch()

    def forever(self) -> Iterator[Any]:
        """Batch after batch, epoch after epoch."""
        while True:
            yield from self

    def position(self) -> dict[str, Any]:  # Any: plain JSON values
        return self.sampler.position()

    def state_dict(self) -> dict[str, Any]:  # Any: plain values
        return self.sampler.state_dict()

    def load_state_dict(self, state: dict[str, Any]) -> None:  # Any: plain values
        self.sampler.load_state_dict(state)
