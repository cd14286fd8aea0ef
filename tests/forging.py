"""Forged checkpoints: right digests and sizes everywhere (whoever can write a folder can compute them), and lies elsewhere."""

import json
import os
import tracemalloc
from collections.abc import Callable
from pathlib import Path
from typing import Any

import blake3
import msgspec
import pytest
import xxhash
import zstandard
from snapshots import random_bytes

from perdure.training.checkpoint.layout import RAW, WHOLE
from perdure.training.checkpoint.pack import leaf_digest
from perdure.training.checkpoint.reader import open_checkpoint
from perdure.training.checkpoint.verify import verify_folder
from perdure.training.errors import CheckpointDamaged
from perdure.training.run_dir import rank_index, rank_pack

MIB = 1 << 20
CONTENT = random_bytes("content", 100)


class Exploding:
    """Unpickling this fails the test."""

    def __reduce__(self) -> tuple[Callable[..., Any], tuple[Any, ...]]:
        return os._exit, (66,)


def read_everything(folder: Path) -> None:
    with open_checkpoint(folder) as reader:
        for path in reader.entries:
            reader.read(path)
        reader.check_state_digest()


def refused(folder: Path, part: str) -> str:
    """Verification and reader both refuse, for that part, within 300 MiB; the first detail."""
    tracemalloc.start()
    try:
        found = verify_folder(folder)
        assert [damage.part for damage in found][:1] == [part], found
        with pytest.raises(CheckpointDamaged) as error:
            read_everything(folder)
        assert error.value.part == part
        assert tracemalloc.get_traced_memory()[1] < 300 * MIB
    finally:
        tracemalloc.stop()
    return found[0].detail


def forge(folder: Path, **changes: Any) -> None:
    """The manifest with those fields, digest right."""
    fields = json.loads((folder / "manifest.json").read_bytes())
    write_fields(folder, {**fields, **changes})


def write_fields(folder: Path, fields: dict[str, Any], *, sort: bool = True, **how: Any) -> None:
    def text(digest: str) -> bytes:
        how.setdefault("separators", (",", ":"))
        return json.dumps({**fields, "digest": digest}, sort_keys=sort, ensure_ascii=False, **how).encode() + b"\n"

    (folder / "manifest.json").write_bytes(text(blake3.blake3(text("")).hexdigest()))


def pack_digest(index: bytes) -> str:
    """Of the pack that such an index describes, if it does."""
    try:
        _, entries = msgspec.msgpack.decode(zstandard.decompress(index))
        stored = b"".join(blob[3] for entry in entries for blob in entry[6] if blob[1])
    except (ValueError, TypeError, IndexError, RecursionError, msgspec.DecodeError, zstandard.ZstdError):
        stored = b""
    return f"blobs:{xxhash.xxh3_128_hexdigest(stored)}"


def lay(folder: Path, index: bytes, pack: bytes = CONTENT) -> None:
    """Pack and index, and a manifest that vouches for both."""
    (folder / rank_pack(0)).write_bytes(pack)
    (folder / rank_index(0)).write_bytes(index)
    files = [
        {"name": rank_pack(0), "bytes": len(pack), "digest": pack_digest(index)},
        {"name": rank_index(0), "bytes": len(index), "digest": f"blake3:{blake3.blake3(index).hexdigest()}"},
    ]
    forge(folder, files=files, stored_bytes=len(pack) + len(index))


def blob(content: bytes = CONTENT, **changes: Any) -> list[Any]:
    fields = {
        "offset": 0,
        "stored": len(content),
        "raw": len(content),
        "xxh": xxhash.xxh3_128_digest(content),
        "digest": blake3.blake3(content).digest(),
        "layout": [WHOLE, [[RAW, len(content)]]],
    }
    return list({**fields, **changes}.values())


def leaf(*blobs: list[Any], **changes: Any) -> list[Any]:
    blobs = blobs or (blob(),)
    size = sum(item[2] for item in blobs if type(item[2]) is int)
    digest = leaf_digest(item[4] for item in blobs)
    fields = {"path": "w", "kind": "tensor", "dtype": "uint8", "shape": [size], "nbytes": size, "digest": digest}
    return list({**fields, "blobs": list(blobs), "derived": None, **changes}.values())


def packed(index: Any) -> bytes:
    return zstandard.compress(msgspec.msgpack.encode(index))


def streamed(data: bytes) -> bytes:
    compressor = zstandard.ZstdCompressor(level=1).compressobj()
    return compressor.compress(data) + compressor.flush()
