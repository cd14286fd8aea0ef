"""Bring a checkpoint's tensors back as one safetensors file, leaf by leaf: in memory is one leaf at a time."""

import json
import struct
from collections.abc import Callable
from fnmatch import fnmatchcase
from pathlib import Path
from urllib.parse import unquote

from perdure.training import files
from perdure.training.checkpoint.pack import IndexEntry
from perdure.training.checkpoint.plain import unpack_plain
from perdure.training.checkpoint.reader import CheckpointReader
from perdure.training.errors import CheckpointNotFound, PerdureError

_DTYPES = {
    "float64": "F64",
    "float32": "F32",
    "float16": "F16",
    "bfloat16": "BF16",
    "int64": "I64",
    "int32": "I32",
    "int16": "I16",
    "int8": "I8",
    "uint64": "U64",
    "uint32": "U32",
    "uint16": "U16",
    "uint8": "U8",
    "bool": "BOOL",
    "float8_e4m3fn": "F8_E4M3",
    "float8_e5m2": "F8_E5M2",
    "complex64": "C64",
}
"""Names of the safetensors format (its specification, huggingface/safetensors)."""


def tensor_name(path: str) -> str:
    """`model/layers.0.weight` as the dotted name people know: `model.layers.0.weight`."""
    return ".".join(unquote(part) for part in path.split("/"))


def restore_safetensors(
    reader: CheckpointReader, out_file: Path, *, only: str | None = None, progress: Callable[[int, int], None] | None = None
) -> int:
    """Write all tensors of rank 0, or those whose dotted name matches the glob `only`; the number of tensor bytes written.

    Plain leaves go into the metadata as JSON where JSON can hold them. Raises CheckpointNotFound when nothing matches."""
    chosen = _choose(reader, only)
    total = sum(entry.nbytes for entry in chosen.values())
    header, offset = {"__metadata__": _metadata(reader, only)}, 0
    tensors: dict[str, object] = {}
    for name, entry in chosen.items():
        tensors[name] = {
            "dtype": _DTYPES[entry.dtype],
            "shape": list(entry.shape),
            "data_offsets": [offset, offset + entry.nbytes],
        }
        offset += entry.nbytes
    text = json.dumps({**header, **tensors}, separators=(",", ":")).encode()
    text += b" " * (-len(text) % 8)
    done = 0
    with files.NewFile(out_file) as new:
        new.write(struct.pack("<Q", len(text)) + text)
        for entry in chosen.values():
            new.write(reader.read(entry.path, reader.find(entry.path)))
            done += entry.nbytes
            if progress is not None:
                progress(done, total)
        new.commit()
    return total


def _choose(reader: CheckpointReader, only: str | None) -> dict[str, IndexEntry]:
    chosen: dict[str, IndexEntry] = {}
    for path, (_, entry) in reader.state().items():
        name = tensor_name(path)
        if entry.kind != "tensor" or (only is not None and not (fnmatchcase(name, only) or fnmatchcase(path, only))):
            continue
        if entry.dtype not in _DTYPES:
            raise PerdureError(
                f"{path} is of type {entry.dtype}, which safetensors cannot hold",
                "restore to OUT.pt, or leave it out with --only",
            )
        if name in chosen or name == "__metadata__":
            other = chosen[name].path if name in chosen else "the file's own metadata"
            raise PerdureError(f"{path} and {other} have the same dotted name {name}", "restore to OUT.pt")
        chosen[name] = entry
    if not chosen:
        raise CheckpointNotFound(f"{reader.where} has no tensor that matches {only!r}", "names look like model.0.weight")
    return chosen


def _metadata(reader: CheckpointReader, only: str | None) -> dict[str, str]:
    manifest, told = reader.manifest, {}
    for path, (owner, entry) in reader.state().items():
        if entry.kind == "plain" and only is None:
            try:
                told[path] = json.dumps(unpack_plain(reader.read(path, owner)), allow_nan=False)
            except (TypeError, ValueError):
                continue  # bytes, say: not for JSON
    ours = {"run": manifest.run, "step": str(manifest.step), "state_digest": manifest.state_digest}
    return {**told, "format": "pt", **{f"perdure.{key}": value for key, value in ours.items()}}
