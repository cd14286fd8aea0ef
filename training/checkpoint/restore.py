"""Bring a checkpoint's tensors back as one safetensors file, in the order of the packs: in memory are a few blobs at a time."""

import contextlib
import json
import struct
from collections.abc import Callable, Collection, Generator, Iterable
from fnmatch import fnmatchcase
from pathlib import Path
from urllib.parse import unquote

from perdure.training import files
from perdure.training.checkpoint.ordered import in_order
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
Leaf = tuple[int, IndexEntry]
"""With the rank in whose pack it is."""


def tensor_name(path: str) -> str:
    """`model/layers.0.weight` as the dotted name people know: `model.layers.0.weight`."""
    return ".".join(unquote(part) for part in path.split("/"))


def restore_safetensors(
    reader: CheckpointReader,
    out_file: Path,
    *,
    only: str | None = None,
    threads: int = 1,
    progress: Callable[[int, int], None] | None = None,
) -> int:
    """Write all tensors of rank 0, or those whose dotted name matches the glob `only`; the number of tensor bytes written.

    Plain leaves go into the metadata as JSON where JSON can hold them. Raises CheckpointNotFound when nothing matches."""
    leaves = sorted(reader.state().values(), key=lambda leaf: _place(reader, leaf))
    tensors = _choose(leaves, only, reader.where)
    header = _header(tensors, _metadata(reader, leaves if only is None else []))
    total, done = sum(entry.nbytes for _, entry in tensors.values()), 0
    with files.NewFile(out_file) as new, contextlib.closing(_blobs(reader, tensors.values(), threads)) as blobs:
        new.write(header)
        for raw in blobs:
            new.write(raw)
            done += len(raw)
            if progress is not None:
                progress(done, total)
        new.commit()
    return total


def _place(reader: CheckpointReader, leaf: Leaf) -> tuple[int, int]:
    """Rank, and where in its pack lies what is read: a derived leaf stands beside its source, so that this is fetched once."""
    rank, entry = leaf
    source = reader.rank_entries(rank)[entry.derived.source] if entry.derived else entry
    return rank, source.blobs[0].offset if source.blobs else 0


def _choose(leaves: Iterable[Leaf], only: str | None, where: str) -> dict[str, Leaf]:
    """Tensors by dotted name."""
    chosen: dict[str, Leaf] = {}
    for rank, entry in leaves:
        path, name = entry.path, tensor_name(entry.path)
        if entry.kind != "tensor" or (only is not None and not (fnmatchcase(name, only) or fnmatchcase(path, only))):
            continue
        if entry.dtype not in _DTYPES:
            raise PerdureError(
                f"{path} is of type {entry.dtype}, which safetensors cannot hold",
                "restore to OUT.pt, or leave it out with --only",
            )
        if name in chosen or name == "__metadata__":
            other = chosen[name][1].path if name in chosen else "the file's own metadata"
            raise PerdureError(f"{path} and {other} have the same dotted name {name}", "restore to OUT.pt")
        chosen[name] = rank, entry
    if not chosen:
        raise CheckpointNotFound(f"{where} has no tensor that matches {only!r}", "names look like model.0.weight")
    return chosen


def _header(tensors: dict[str, Leaf], metadata: dict[str, str]) -> bytes:
    header, offset = {"__metadata__": metadata}, 0
    told: dict[str, object] = {}
    for name, (_, entry) in tensors.items():
        offsets = [offset, offset + entry.nbytes]
        told[name] = {"dtype": _DTYPES[entry.dtype], "shape": list(entry.shape), "data_offsets": offsets}
        offset += entry.nbytes
    text = json.dumps({**header, **told}, separators=(",", ":")).encode()
    text += b" " * (-len(text) % 8)
    return struct.pack("<Q", len(text)) + text


def _blobs(reader: CheckpointReader, leaves: Collection[Leaf], threads: int) -> Generator[memoryview, None, None]:
    reader.expect(leaves)
    jobs = ((rank, entry, number) for rank, entry in leaves for number in range(len(entry.blobs)))
    work = in_order(
        lambda job: reader.blob(job[1], job[2], job[0]), jobs, threads=threads, nbytes=lambda job: job[1].blobs[job[2]].raw
    )
    with contextlib.closing(work):
        for _, raw in work:
            yield raw


def _metadata(reader: CheckpointReader, leaves: Iterable[Leaf]) -> dict[str, str]:
    manifest, told = reader.manifest, {}
    plain = [leaf for leaf in leaves if leaf[1].kind == "plain"]
    reader.expect(plain)
    for rank, entry in plain:
        with contextlib.suppress(TypeError, ValueError):  # bytes, say: not for JSON
            told[entry.path] = json.dumps(unpack_plain(reader.read(entry.path, rank)), allow_nan=False)
    ours = {"run": manifest.run, "step": str(manifest.step), "state_digest": manifest.state_digest}
    return {**told, "format": "pt", **{f"perdure.{key}": value for key, value in ours.items()}}
