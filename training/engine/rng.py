"""Every random number generator of this process: Python's, NumPy's, torch's on CPU and devices, and those the user registers.

`restore_rng` must be the last act before the first new step; whatever draws after it changes the run."""

import contextlib
import random
from collections.abc import Iterator, Mapping
from typing import Any

import blake3
import numpy as np
import torch

from perdure.training.checkpoint.plain import unpack_plain
from perdure.training.engine.leaves import Decoder, Encoder, Leaf, Read, plain_leaf
from perdure.training.errors import CheckpointDamaged, PerdureError

RNG = "perdure.rng"
"""Path of the generators' plain leaf."""

Generators = Mapping[str, Any]  # Any: torch.Generator, random.Random, numpy Generator or RandomState
State = dict[str, Any]  # Any: plain values, arrays and tensors
_NONE: Generators = {}


def collect_rng(generators: Generators = _NONE) -> State:
    """The state of every generator, as plain values, arrays and tensors."""
    state: State = {
        "python": random.getstate(),
        "numpy": np.random.get_state(legacy=False),
        "torch": torch.get_rng_state(),
        "registered": {name: _get(generator) for name, generator in generators.items()},
    }
    # an idle CUDA is not asked: that would create its context
    if torch.cuda.is_available() and torch.cuda.is_initialized():  # type: ignore[no-untyped-call]
        state["cuda"] = torch.cuda.get_rng_state_all()
    return state


def restore_rng(state: State, generators: Generators = _NONE) -> None:
    """Put every generator back. Raises PerdureError, before anything is touched, where state and process do not fit."""
    missing, unknown = sorted(set(generators) - set(state["registered"])), sorted(set(state["registered"]) - set(generators))
    if missing or unknown:
        raise PerdureError(
            f"registered generators differ from the checkpoint's: not in it {missing}, not registered now {unknown}"
        )
    devices = state.get("cuda", [])
    if devices and (not torch.cuda.is_available() or torch.cuda.device_count() < len(devices)):
        raise PerdureError(f"the checkpoint holds generators of {len(devices)} CUDA devices, this process sees {_cuda_count()}")
    random.setstate(state["python"])
    np.random.set_state(state["numpy"])
    torch.set_rng_state(state["torch"])
    for index, device_state in enumerate(devices):
        torch.cuda.set_rng_state(device_state, index)
    for name, generator in generators.items():
        _set(generator, state["registered"][name])


def rng_leaves(generators: Generators = _NONE) -> list[Leaf]:
    """The generators' state as leaves of a checkpoint."""
    encoder = Encoder(RNG)
    plain = encoder.encode(collect_rng(generators), "")
    return [plain_leaf(RNG, plain), *encoder.leaves]


def load_rng(read: Read, generators: Generators = _NONE, *, tolerant: bool = False) -> list[str]:
    """Restore from a checkpoint. What stands in the way is raised; `tolerant`: returned, as reasons for not being exact."""
    try:
        state = Decoder(RNG, read).decode(unpack_plain(read(RNG).data))
        restore_rng(state, generators)
    except (KeyError, TypeError, ValueError, IndexError, RuntimeError) as error:
        problem = CheckpointDamaged(f"the state of the random number generators is missing or malformed: {error!r}", part=RNG)
        return _refuse(problem, tolerant)
    except PerdureError as error:
        return _refuse(error, tolerant)
    return []


def seed_rng(material: bytes | memoryview, rank: int, generators: Generators = _NONE) -> None:
    """For a rank that the checkpoint has no generators of: seeds that follow from those it has and from the rank."""
    seeds = random.Random(blake3.blake3(material).digest() + rank.to_bytes(4, "little"))
    random.seed(seeds.getrandbits(64))
    np.random.seed(seeds.getrandbits(32))
    torch.manual_seed(seeds.getrandbits(63))  # of the devices too
    for _, generator in sorted(generators.items()):
        _seed(generator, seeds.getrandbits(32))


@contextlib.contextmanager
def preserving(generators: Generators = _NONE) -> Iterator[None]:
    """Whatever is drawn inside, every generator leaves as it came: evaluation and logging cannot change the training."""
    state = collect_rng(generators)
    try:
        yield
    finally:
        restore_rng(state, generators)


def is_generator(thing: Any) -> bool:  # Any: what a user hands over
    """Whether `collect_rng` can save it."""
    return isinstance(thing, (torch.Generator, random.Random, np.random.Generator, np.random.RandomState))


def _refuse(problem: PerdureError, tolerant: bool) -> list[str]:
    if not tolerant:
        raise problem
    return [f"generators not restored: {problem}"]


def _cuda_count() -> int:
    return torch.cuda.device_count() if torch.cuda.is_available() else 0


def _get(generator: Any) -> Any:  # Any: a generator -> its plain state
    if isinstance(generator, torch.Generator):
        return generator.get_state()
    if isinstance(generator, random.Random):
        return generator.getstate()
    if isinstance(generator, np.random.RandomState):
        return generator.get_state(legacy=False)
    return generator.bit_generator.state


def _seed(generator: Any, seed: int) -> None:  # Any: a generator
    if isinstance(generator, torch.Generator):
        generator.manual_seed(seed)
    elif isinstance(generator, (random.Random, np.random.RandomState)):
        generator.seed(seed)
    else:
        generator.bit_generator.state = type(generator.bit_generator)(seed).state


def _set(generator: Any, state: Any) -> None:  # Any: a generator and its plain state
    if isinstance(generator, torch.Generator):
        generator.set_state(state)
    elif isinstance(generator, random.Random):
        generator.setstate(state)
    elif isinstance(generator, np.random.RandomState):
        generator.set_state(state)
    else:
        generator.bit_generator.state = state
