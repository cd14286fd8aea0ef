"""The harness of this room: a training in lives, each cut and resumed through bytes, compared with one that was not cut."""

import gc
import hashlib
import importlib
import random
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import pytest
import torch

from perdure.training.engine import invariants
from perdure.training.engine.leaves import Leaf, LoadedLeaf
from perdure.training.engine.remembered import Memory
from perdure.training.engine.restore import restore
from perdure.training.engine.rng import load_rng, rng_leaves
from perdure.training.engine.state import collect, note_built

Kept = dict[str, LoadedLeaf]


@pytest.fixture(scope="module", autouse=True)
def few_objects() -> Iterator[None]:
    """The look for untracked state goes over every object; those of pytest and torch are none of its business."""
    importlib.import_module("torch._dynamo")  # the first optimizer would

    gc.collect()
    gc.freeze()
    yield
    gc.unfreeze()


@pytest.fixture(autouse=True)
def one_thread() -> Iterator[None]:
    """The number of threads decides the last bits."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


def keep(leaves: Sequence[Leaf]) -> Kept:
    """What a checkpoint would hold of these leaves: bytes in C order."""
    kept: Kept = {}
    for leaf in leaves:
        assert leaf.path not in kept, leaf.path
        if isinstance(leaf.value, bytes):
            data = leaf.value
        else:
            dense = leaf.value.detach().cpu().contiguous()
            data = dense.reshape(-1).view(torch.uint8).numpy().tobytes() if dense.numel() else b""
        kept[leaf.path] = LoadedLeaf(leaf.kind, leaf.dtype, leaf.shape, memoryview(data))
    return kept


def digest_of(kept: Kept) -> str:
    whole = hashlib.sha256()
    for path in sorted(kept):
        leaf = kept[path]
        whole.update(repr((path, leaf.kind, leaf.dtype, leaf.shape)).encode() + bytes(leaf.data))
    return whole.hexdigest()


def seed_everything(seed: int) -> None:
    random.seed(seed)
    np.random.seed(seed)
    torch.manual_seed(seed)


@dataclass
class Training:
    """What a user's script builds: what it tracks, and what one session step does."""

    tracked: dict[str, Any]
    step: Callable[[int], Any]
    generators: Mapping[str, Any] = field(default_factory=dict)


@dataclass
class Outcome:
    returned: list[Any]
    """What `step` returned, step by step."""
    digests: list[str]
    """Of the whole state, generators included, after each step."""
    last: Training
    kept: Kept


def run(build: Callable[[], Training], steps: int, cuts: Sequence[int] = (), *, replan: bool = False) -> Outcome:
    """Train `steps` steps; at each cut throw the objects away, build them anew under another seed, and resume."""
    outcome, done = Outcome([], [], build(), {}), 0
    for life, end in enumerate([*cuts, steps]):
        seed_everything(life)  # a new process starts with other weights and other generators
        training = build()
        note_built(training.tracked)
        if outcome.kept:
            restore(training.tracked, outcome.kept.__getitem__, replan=replan)
            load_rng(outcome.kept.__getitem__, training.generators)
        watch, memory = invariants.StepWatch(training.tracked), Memory()
        for step in range(done, end):
            outcome.returned.append(training.step(step))
            watch.finished_step(step + 1)
            watch.check_before_save(step + 1)
            leaves = collect(training.tracked)
            assert keep(collect(training.tracked, memory)) == keep(leaves), "what is remembered is what would be found"
            outcome.kept = keep([*leaves, *rng_leaves(training.generators)])
            outcome.digests.append(digest_of(outcome.kept))
        watch.close()
        outcome.last, done = training, end
    return outcome


class Harness:
    """The functions above, as one fixture."""

    Training = Training
    run = staticmethod(run)
    keep = staticmethod(keep)
    digest_of = staticmethod(digest_of)
    seed_everything = staticmethod(seed_everything)

    @staticmethod
    def assert_cuts_do_not_matter(build: Callable[[], Training], steps: int, *cuts: Sequence[int]) -> Outcome:
        whole = run(build, steps)
        assert len(set(whole.digests)) == steps, "every step must change the state, or equal digests would say nothing"
        for places in cuts:
            resumed = run(build, steps, places)
            assert resumed.returned == whole.returned, places
            assert resumed.digests == whole.digests, places
        return whole


@pytest.fixture
def harness() -> Harness:
    return Harness()
