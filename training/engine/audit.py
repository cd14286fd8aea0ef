"""`checkpoint.audit`: the digest of a state by the rank itself, from its live tensors. The saver compares it with what it finds
in the slot."""

from collections.abc import Sequence

import torch

from perdure.training.checkpoint.audit import Digested, bytes_digest, digest_of
from perdure.training.engine.invariants import tensor_digest
from perdure.training.engine.leaves import Leaf


def state_digest(leaves: Sequence[Leaf]) -> str:
    """What a checkpoint of these leaves will have. Reads every byte: slow."""
    return digest_of(Digested(leaf.path, leaf.kind, leaf.dtype, leaf.shape, _digest(leaf.value)) for leaf in leaves)


def _digest(value: torch.Tensor | bytes) -> bytes:
    return tensor_digest(value) if isinstance(value, torch.Tensor) else bytes_digest(value)
