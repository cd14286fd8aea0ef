"""Bring a checkpoint's tensors back as one safetensors file, in the order of the packs: in memory are a few blobs at a time."""

import contextlib
import json
import struct
from collections.abc import Callable, Collection, Generator, Iterable, Iterator
from fnmatch import fnmatchcase
from functools import partial
from pathlib import Path
from urllib.parse import unquote

from perdure.training import files
from perdure.training.checkpoint.ordered import in_order
from perdure.training.checkpoint.pack import IndexEntry
from perdure.training.checkpoint.pieces import Whole, alone, is_piece, whole_path, wholes
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
    """Write all tensors, or those whose dotted name matches the glob `only`; the number of tensor bytes written. Where ranks
    have their own (generators, say), those of rank 0.

    Plain leaves go into the metadata as JSON where JSON can hold them. Raises CheckpointNotFound when nothing matches."""
    leaves = sorted(reader.state().values(), key=lambda leaf: _place(reader, leaf))
    tensors = _choose(_tensors(reader, leaves), only, reader.where)
    header = _header(tensors, _metadata(reader, leaves if only is None else []))
    total, done = sum(tensor.nbytes for tensor in tensors.values()), 0
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


def _tensors(reader: CheckpointReader, leaves: Iterable[Leaf]) -> Iterator[Whole]:
    cut = wholes(reader)
    for rank, entry in leaves:
        if whole := cut.pop(whole_path(entry.path), None):  # at its first piece
            yield whole
        elif entry.kind == "tensor" and not is_piece(entry.path):
            yield alone(rank, entry)


def _choose(tensors: Iterable[Whole], only: str | None, where: str) -> dict[str, Whole]:
    """Tensors by dotted name."""
    chosen: dict[str, Whole] = {}
    for tensor in tensors:
        path, name = tensor.path, tensor_name(tensor.path)
        if only is not None and not (fnmatchcase(name, only) or fnmatchcase(path, only)):
            continue
        if tensor.dtype not in _DTYPES:
            raise PerdureError(
                f"{path} is of type {tensor.dtype}, which safetensors cannot hold",
                "restore to OUT.pt, or leave it out with --only",
            )
        if name in chosen or name == "__metadata__":
            other = chosen[name].path if name in chosen else "the file's own metadata"
            raise PerdureError(f"{path} and {other} have the same dotted name {name}", "restore to OUT.pt")
        chosen[name] = tensor
    if not chosen:
        raise CheckpointNotFound(f"{where} has no tensor that matches {only!r}", "names look like model.0.weight")
    return chosen


def _header(tensors: dict[str, Whole], metadata: dict[str, str]) -> bytes:
    header, offset = {"__metadata__": metadata}, 0
    told: dict[str, object] = {}
    for name, tensor in tensors.items():
        offsets = [offset, offset + tensor.nbytes]
        told[name] = {"dtype": _DTYPES[tensor.dtype], "shape": list(tensor.shape), "data_offsets": offsets}
        offset += tensor.nbytes
    text = json.dumps({**header, **told}, separators=(",", ":")).encode()
    text += b" " * (-len(text) % 8)
    return struct.pack("<Q", len(text)) + text


def _blobs(reader: CheckpointReader, tensors: Collection[Whole], threads: int) -> Generator[memoryview, None, None]:
    reader.expect((piece.rank, piece.entry) for tensor in tensors for piece in tensor.pieces)
    jobs = (job for tensor in tensors for job in _jobs(reader, tensor))
    work = in_order(lambda job: job[1](), jobs, threads=threads, nbytes=lambda job: job[0])
    with contextlib.closing(work):
        for _, raw in work:
            yield raw


def _jobs(reader: CheckpointReader, tensor: Whole) -> Iterator[tuple[int, Callable[[], memoryview]]]:
    """Bytes and work of what is to be written, part by part; all at once of a tensor whose pieces do not follow each other."""
    if not tensor.is_stack:
        yield tensor.nbytes, partial(tensor.read, reader)
        return
    for rank, entry, _ in tensor.pieces:
        for number in range(len(entry.blobs)):
            yield entry.blobs[number].raw, partial(reader.blob, entry, number, rank)


def _metadata(reader: CheckpointReader, leaves: Iterable[Leaf]) -> dict[str, str]:
    manifest, told = reader.manifest, {}
    plain = [leaf for leaf in leaves if leaf[1].kind == "plain"]
    reader.expect(plain)
    for rank, entry in plain:
        with contextlib.suppress(TypeError, ValueError):  # bytes, say: not for JSON
            told[entry.path] = json.dumps(unpack_plain(reader.read(entry.path, rank)), allow_nan=False)
    ours = {"run": manifest.run, "step": str(manifest.step), "state_digest": manifest.state_digest}
    return {**told, "format": "pt", **{f"perdure.{key}": value for key, value in ours.items()}}
