"""A checkpoint as a file for `torch.load(weights_only=True)`: {tracked name: state_dict}. Started by `perdure restore`.

Optimizers come in torch's positional form, with the parameters' names beside them."""

import argparse
import contextlib
import json
import os
import sys
from collections import Counter, OrderedDict, deque
from collections.abc import Sequence
from fnmatch import fnmatchcase
from pathlib import Path
from typing import Any

import numpy as np
import torch

from perdure.training import files
from perdure.training.checkpoint.pieces import wholes
from perdure.training.checkpoint.reader import CheckpointReader, open_checkpoint
from perdure.training.engine.leaves import Decoder, LoadedLeaf, Read, read_plain
from perdure.training.engine.state import INVENTORY
from perdure.training.engine.zero_files import weights
from perdure.training.errors import CheckpointDamaged, CheckpointNotFound, PerdureError


def reading(reader: CheckpointReader) -> Read:
    """Leaves of rank 0, and what ranks have pieces of; digests are checked by the reader."""
    leaves, whole = reader.state(), wholes(reader)

    def read(path: str) -> LoadedLeaf:
        if path in whole:
            return LoadedLeaf("tensor", whole[path].dtype, whole[path].shape, whole[path].read(reader))
        owner, entry = leaves[path]
        return LoadedLeaf(entry.kind, entry.dtype, tuple(entry.shape), reader.read(path, owner))

    return read


def state_dicts(reader: CheckpointReader, only: str | None) -> dict[str, Any]:  # Any: state dicts of tracked objects
    """What each tracked object's state_dict() returned, built of torch tensors and plain values only; of a DeepSpeed engine all
    weights."""
    read = reading(reader)
    names = [name for name in read_plain(read, INVENTORY) if only is None or fnmatchcase(name, only)]
    if not names:
        raise CheckpointNotFound(f"no tracked object is called {only!r}", f"it has {', '.join(read_plain(read, INVENTORY))}")
    return {name: _simple(_state_dict(name, reader, read)) for name in names}


def _state_dict(name: str, reader: CheckpointReader, read: Read) -> Any:  # Any: as in state_dicts
    plain, decoder = read_plain(read, name), Decoder(name, read)
    try:
        if plain["kind"] == "engine":
            return weights(name, plain, reader, read)
        if plain["kind"] == "optimizer":
            return _optimizer(plain, decoder)
        return decoder.decode(plain["state"])
    except (KeyError, TypeError, IndexError) as error:
        raise CheckpointDamaged(f"{name} is not laid out as a {type(plain).__name__} of ours: {error}", part=name) from None


def _optimizer(plain: dict[str, Any], decoder: Decoder) -> dict[str, Any]:
    names = [name for group in plain["groups"] for name in group["names"]]
    index = {name: number for number, name in enumerate(names)}
    groups = []
    for group in plain["groups"]:
        options = decoder.decode(group["options"])
        groups.append({**options, "params": [index[name] for name in group["names"]], "param_names": list(group["names"])})
    state = {index.get(key, key): decoder.decode(value) for key, value in plain["state"].items()}
    return {**decoder.decode(plain["extra"]), "state": state, "param_groups": groups}


def _simple(value: Any) -> Any:  # Any: as in state_dicts
    """Without the types that torch.load(weights_only=True) refuses."""
    if isinstance(value, np.ndarray):
        return torch.from_numpy(value) if value.dtype.kind in "biufc" else value.tolist()
    if isinstance(value, np.generic):
        return value.item()
    if isinstance(value, (dict, OrderedDict)) and not isinstance(value, Counter):
        return type(value)((_simple(key), _simple(item)) for key, item in value.items())
    if isinstance(value, (deque, frozenset)):
        return [_simple(item) for item in value]
    if isinstance(value, (list, set)) or type(value) is tuple:
        return type(value)(_simple(item) for item in value)
    return str(value) if isinstance(value, torch.device) else value


def export(folder: Path, out: Path, only: str | None) -> dict[str, Any]:  # Any: JSON values
    """Write `out`, whole or not at all; it is read back the way its users will before it appears."""
    with open_checkpoint(folder) as reader:
        content = state_dicts(reader, only)
    temporary = files.temporary_name(out)
    try:
        _save(content, temporary)
        torch.load(temporary, weights_only=True, mmap=True)
        with open(temporary, "rb") as written:
            os.fsync(written.fileno())
        os.replace(temporary, out)
        files.fsync_dir(out.parent)
    finally:
        with contextlib.suppress(FileNotFoundError):
            os.unlink(temporary)
    return {"bytes": out.stat().st_size, "objects": list(content)}


def _save(content: dict[str, Any], path: Path) -> None:  # Any: as in state_dicts
    """torch says in words of its own what the disk said to it."""
    try:
        with open(path, "xb", opener=lambda name, flags: os.open(name, flags, files.FILE_MODE)) as file:
            torch.save(content, file)
    except RuntimeError as error:
        if isinstance(error.__context__, OSError):
            raise error.__context__ from None
        raise


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser()
    parser.add_argument("folder", type=Path)
    parser.add_argument("out", type=Path)
    parser.add_argument("--only")
    options = parser.parse_args(arguments)
    try:
        answer = export(options.folder, options.out, options.only)
    except PerdureError as error:
        answer = {"error": str(error), "hint": error.hint, "exit_code": error.exit_code}
    except OSError as error:
        answer = {"error": error.strerror or str(error), "errno": error.errno or 0, "exit_code": 1}
    print(json.dumps(answer))
    return int(answer.get("exit_code", 0))


if __name__ == "__main__":
    sys.exit(main())
