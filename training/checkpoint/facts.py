"""Facts of the checker beside each copy of a checkpoint; trust is derived from them and never stored."""

import msgspec

from perdure.training import files
from perdure.training.run_dir import CheckpointName, RunDir

MAX_FACT = 1 << 20


class Fact(msgspec.Struct, frozen=True, kw_only=True):
    """What the checker found, once, about one copy."""

    copy: str
    """local or store."""
    checked_at: float
    result: str
    """good or damaged."""
    damage: tuple[str, ...] = ()
    location: str = ""


def read_fact(run: RunDir, name: CheckpointName, copy: str) -> Fact | None:
    try:
        return msgspec.json.decode(files.read_limited(run.fact(name, copy), MAX_FACT), type=Fact)
    except (OSError, ValueError, RecursionError):
        return None


def write_fact(run: RunDir, name: CheckpointName, fact: Fact) -> None:
    files.write_atomically(run.fact(name, fact.copy), msgspec.json.encode(fact))


def trust(run: RunDir, name: CheckpointName) -> str:
    """written, verified, replicated or quarantined."""
    local, store = read_fact(run, name, "local"), read_fact(run, name, "store")
    if local is not None and local.result == "damaged":
        return "quarantined"
    if store is not None and store.result == "good":
        return "replicated"
    return "verified" if local is not None and local.result == "good" else "written"
