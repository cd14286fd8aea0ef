"""Random number generators: every kind goes on where it was, losing them is never quiet, and saving draws nothing."""

import random
from typing import Any

import numpy as np
import pytest
import torch
from torch.utils.data import DataLoader, TensorDataset

from perdure.training.engine.leaves import LoadedLeaf
from perdure.training.engine.rng import RNG, is_generator, load_rng, preserving, restore_rng, rng_leaves
from perdure.training.engine.state import collect
from perdure.training.errors import CheckpointDamaged, PerdureError


def generators() -> dict[str, Any]:
    return {
        "torch": torch.Generator().manual_seed(1),
        "python": random.Random(2),
        "numpy": np.random.default_rng(3),
        "legacy": np.random.RandomState(4),
        "mt": np.random.Generator(np.random.MT19937(5)),
    }


def draws(own: dict[str, Any]) -> list[float]:
    """One draw of each; the Gaussian ones keep a second value for later."""
    return [
        random.random(), random.gauss(0, 1), np.random.rand(), np.random.randn(), torch.rand(()).item(),
        torch.randn(3)[0].item(),
        torch.rand((), generator=own["torch"]).item(), own["python"].gauss(0, 1), own["numpy"].standard_normal(),
        own["legacy"].randn(), own["mt"].random(),
    ]  # fmt: skip


def test_the_next_draws_of_every_generator_are_those_of_the_uninterrupted_run(harness: Any) -> None:
    own = generators()
    draws(own)
    kept = harness.keep(rng_leaves(own))
    expected = [draws(own) for _ in range(5)]
    harness.seed_everything(99)
    other = generators()
    assert load_rng(kept.__getitem__, other) == []
    assert [draws(other) for _ in range(5)] == expected


def test_nothing_stored_is_a_pickle(harness: Any) -> None:
    kept = harness.keep([*collect({"model": torch.nn.Linear(2, 2)}), *rng_leaves(generators())])
    for path, leaf in kept.items():
        assert bytes(leaf.data[:2]) not in [bytes([0x80, version]) for version in range(2, 6)], path
        assert bytes(leaf.data[:4]) != b"PK\x03\x04", path


@pytest.mark.parametrize("damage", ["missing", "empty", "other", "tensor"])
def test_lost_generators_are_fatal_or_else_a_recorded_reason(harness: Any, damage: str) -> None:
    kept = harness.keep(rng_leaves())
    if damage == "missing":
        del kept[RNG]
    elif damage == "tensor":
        del kept[f"{RNG}/torch"]
    else:
        other = harness.keep(collect({"x": torch.nn.Linear(1, 1)}))["x"]
        kept[RNG] = LoadedLeaf("plain", "plain", (0,), b"") if damage == "empty" else other
    with pytest.raises(CheckpointDamaged):
        load_rng(kept.__getitem__)
    (reason,) = load_rng(kept.__getitem__, tolerant=True)
    assert reason.startswith("generators not restored: ")


def test_other_registered_generators_are_refused_before_anything_is_touched(harness: Any) -> None:
    kept = harness.keep(rng_leaves({"mine": random.Random(1)}))
    before = random.getstate()
    random.seed(5)
    with pytest.raises(PerdureError, match=r"not in it \['yours'\], not registered now \['mine'\]"):
        load_rng(kept.__getitem__, {"yours": random.Random(1)})
    assert random.random() == random.Random(5).random()
    random.setstate(before)


def test_generators_of_devices_this_process_lacks_are_refused() -> None:
    state = {"cuda": [torch.zeros(16, dtype=torch.uint8)] * 99, "registered": {}}
    with pytest.raises(PerdureError, match="99 CUDA devices"):
        restore_rng(state)


def test_generators_are_told_from_other_things() -> None:
    assert all(
        is_generator(thing) for thing in (random.Random(), torch.Generator(), np.random.default_rng(), np.random.RandomState(1))
    )
    assert not is_generator(5)


def test_saving_and_evaluating_change_nothing(harness: Any) -> None:
    data = TensorDataset(torch.arange(32.0).view(8, 4))

    def final(save_every: int, evaluate_every: int) -> str:
        harness.seed_everything(0)
        model = torch.nn.Sequential(torch.nn.Linear(4, 8), torch.nn.Dropout(0.5), torch.nn.Linear(8, 1))
        optimizer = torch.optim.AdamW(model.parameters())
        for step in range(1, 21):
            model(torch.randn(4, 4) + random.random()).square().mean().backward()
            optimizer.step()
            optimizer.zero_grad()
            if save_every and step % save_every == 0:
                collect({"model": model, "optimizer": optimizer})
                rng_leaves()
            if evaluate_every and step % evaluate_every == 0:
                with preserving():  # an iterator's base seed, dropout, and numbers of all three kinds
                    [model(batch) for (batch,) in DataLoader(data, batch_size=4, shuffle=True)]
                    random.random(), np.random.rand()
        return str(harness.digest_of(harness.keep([*collect({"model": model, "optimizer": optimizer}), *rng_leaves()])))

    assert len({final(0, 0), final(1, 0), final(0, 3), final(1, 3)}) == 1


def test_generators_are_put_back_even_when_evaluation_fails() -> None:
    torch.manual_seed(1)
    expected = torch.rand(())
    torch.manual_seed(1)
    with pytest.raises(ValueError, match="bad"), preserving():
        torch.rand(()).resize_(0).fill_(int("bad"))
    assert torch.rand(()) == expected
