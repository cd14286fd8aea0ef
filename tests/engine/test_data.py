"""The data position: every sample once an epoch, whatever the cuts, the number of ranks, and what was prefetched."""

import itertools
from collections.abc import Sequence
from typing import Any

import numpy as np
import pytest
from torch.utils.data import DataLoader

from perdure.training.engine.data import ResumableLoader, ResumableSampler, fingerprint, micro_batches_done, shuffled
from perdure.training.errors import ConfigError


def flat(parts: Any) -> list[int]:
    return list(itertools.chain.from_iterable(parts))


class Numbers:
    """Item i is i."""

    def __init__(self, length: int) -> None:
        self.length = length

    def __len__(self) -> int:
        return self.length

    def __getitem__(self, index: int) -> int:
        return index


def loader_of(length: int, batch: int, **options: Any) -> ResumableLoader:
    return ResumableLoader(Numbers(length), batch_size=batch, seed=7, **options)  # type: ignore[arg-type]


def consume(lives: Sequence[int], length: int, batch: int, **options: Any) -> tuple[list[list[int]], ResumableLoader]:
    """Take so many batches in each life; each life gets only the state of the one before."""
    batches, state = [], None
    for count in lives:
        loader = loader_of(length, batch, **options)
        if state is not None:
            loader.load_state_dict(state)
        source = loader.forever()
        batches += [next(source).tolist() for _ in range(count)]
        state = loader.state_dict()
        source.close()
    return batches, loader


@pytest.mark.parametrize("length", [1, 2, 3, 5, 64, 1000, 4097])
def test_an_order_holds_every_item_once(length: int) -> None:
    assert sorted(shuffled(np.arange(length), length, seed=1, epoch=0)) == list(range(length))


def test_an_order_does_not_depend_on_the_machine() -> None:
    """Frozen: a change here would repeat and skip samples in every run that is under way."""
    assert shuffled(np.arange(8), 1000, seed=1, epoch=0).tolist() == [84, 333, 753, 559, 172, 10, 368, 322]


def test_orders_are_even_over_all_permutations() -> None:
    counts: dict[tuple[int, ...], int] = {}
    for seed in range(2400):
        order = tuple(shuffled(np.arange(4), 4, seed, 0).tolist())
        counts[order] = counts.get(order, 0) + 1
    assert len(counts) == 24
    assert sum((count - 100) ** 2 / 100 for count in counts.values()) < 50  # chi square, 23 degrees of freedom, p < 0.001


@pytest.mark.parametrize("cut", [21, 37])  # 5 batches into epoch 1 and into epoch 2
def test_a_cut_in_a_later_epoch_keeps_that_epochs_order(cut: int) -> None:
    whole, resumed = consume([48], 64, 4)[0], consume([cut, 48 - cut], 64, 4)[0]
    assert resumed == whole
    epochs = [flat(whole[start : start + 16]) for start in (0, 16, 32)]
    assert [sorted(epoch) for epoch in epochs] == [list(range(64))] * 3
    assert epochs[0] != epochs[1] != epochs[2] != epochs[0]


def test_positions_are_absolute_however_often_an_epoch_is_cut() -> None:
    whole = consume([64], 64, 1)[0]
    assert consume([30, 10, 1], 64, 1)[0][40] == whole[40]
    for cuts in range(1, 6):
        assert consume([7] * cuts, 64, 1)[1].sampler.samples == 7 * cuts
    assert consume([7] * 5 + [29], 64, 1)[0] == whole


def test_only_the_resumed_epoch_is_shorter() -> None:
    state = consume([6], 64, 4)[1].state_dict()
    loader = loader_of(64, 4)
    loader.load_state_dict(state)
    lengths = []
    while loader.epoch < 3:
        lengths.append(sum(1 for _ in loader))
    assert lengths == [10, 16, 16]
    assert 6 + sum(lengths) == 48


def test_a_batch_counts_as_done_at_the_cut_after_it() -> None:
    assert [len(part) for part in (consume([8], 64, 4)[0], consume([8, 8], 64, 4)[0])] == [8, 16]
    assert sorted(flat(consume([8, 8], 64, 4)[0])) == list(range(64))


@pytest.mark.parametrize("workers", [0, 2])
def test_prefetched_batches_are_not_consumed(workers: int) -> None:
    whole, resumed = consume([20], 64, 4)[0], consume([3, 2, 12, 3], 64, 4, num_workers=workers)[0]
    assert resumed == whole


def test_an_epoch_left_early_goes_on_where_it_was_left() -> None:
    loader = loader_of(64, 4, num_workers=1, prefetch_factor=20)
    first = next(iter(loader)).tolist()
    assert loader.epoch == 0
    rest = [batch.tolist() for batch in loader]
    assert sorted(first + flat(rest)) == list(range(64))


@pytest.mark.parametrize("length", [64, 60])
def test_other_numbers_of_ranks_share_the_same_global_batches(length: int) -> None:
    def taken(world: int, state: dict[str, Any] | None, count: int) -> tuple[list[list[int]], dict[str, Any]]:
        ranks = []
        for rank in range(world):
            loader = loader_of(length, 8 // world, rank=rank, world=world)
            if state is not None:
                loader.load_state_dict(state)
            source = loader.forever()
            ranks.append((loader, [next(source).tolist() for _ in range(count)]))
        states = [loader.state_dict() for loader, _ in ranks]
        assert all(other == states[0] for other in states)
        return [sorted(flat((batches[k] for _, batches in ranks))) for k in range(count)], states[0]

    whole, _ = taken(4, None, 8)
    found, state = taken(4, None, 3)
    for world, count in ((2, 2), (1, 1), (4, 2)):
        more, state = taken(world, state, count)
        found += more
    assert found == whole
    assert sorted(flat(found)) == list(range(length))


def test_ranks_that_would_get_nothing_of_the_last_batch_are_refused() -> None:
    with pytest.raises(ConfigError, match="the last 2 samples of the epoch do not reach 4 ranks"):
        ResumableSampler(66, seed=1, rank=0, world=4, batch_size=2)
    assert len(ResumableSampler(66, seed=1, rank=3, world=4, batch_size=2, drop_last=True)) == 16
    before = ResumableSampler(66, seed=1, rank=0, world=1, batch_size=3)
    before.consumed(4)
    with pytest.raises(ConfigError, match="the last 2 samples of the epoch do not reach 4 ranks"):
        ResumableSampler(66, seed=1, rank=0, world=4, batch_size=13).load_state_dict(before.state_dict())


def test_micro_batches_are_counted_not_optimizer_steps() -> None:
    assert micro_batches_done(2748, 4, 27484) == (0, 10992)
    assert micro_batches_done(2, 4, 16) == (0, 8)
    assert micro_batches_done(9, 4, 16) == (2, 4)


def test_other_data_is_refused() -> None:
    state = loader_of(64, 4, fingerprint=fingerprint(["a", "b"])).state_dict()
    with pytest.raises(ConfigError, match=r"length was 64 in the checkpoint, is 65 now"):
        loader_of(65, 4, fingerprint=fingerprint(["a", "b"])).load_state_dict(state)
    with pytest.raises(ConfigError, match=r"fingerprint was '2-"):
        loader_of(64, 4, fingerprint=fingerprint(["b", "a"])).load_state_dict(state)
    assert fingerprint(["ab", "c"]) != fingerprint(["a", "bc"])


def test_data_iterated_before_it_was_restored_is_refused() -> None:
    state, loader = consume([3], 64, 4)[1].state_dict(), loader_of(64, 4)
    next(iter(loader))
    with pytest.raises(ConfigError, match="iterated before it was restored"):
        loader.load_state_dict(state)


def test_a_plain_dataloader_shuffles_anew_each_epoch_and_goes_on_when_told() -> None:
    sampler = ResumableSampler(12, seed=1, batch_size=4)
    loader: DataLoader[Any] = DataLoader(Numbers(12), batch_size=4, sampler=sampler)  # type: ignore[arg-type]
    first, second = ([batch.tolist() for batch in loader] for _ in range(2))
    assert sampler.epoch == 1
    assert first != second
    sampler.consumed(2)
    resumed = ResumableSampler(12, seed=1, batch_size=4)
    resumed.load_state_dict(sampler.state_dict())
    assert list(resumed) == second[2]
