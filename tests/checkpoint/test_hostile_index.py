"""Forged indexes and blobs: refused as CheckpointDamaged, the part named, in bounded memory."""

import pickle
import resource
from collections.abc import Callable
from pathlib import Path
from typing import Any

import blake3
import msgspec
import pytest
import xxhash
import zstandard
from forging import CONTENT, MIB, Exploding, blob, lay, leaf, packed, refused, streamed
from snapshots import FIRST, small_source, write

from perdure.training.checkpoint.layout import CONSTANT, RAW, WHOLE, ZSTD
from perdure.training.checkpoint.pack import MAX_INDEX, decode_index, encode_index, leaf_digest
from perdure.training.checkpoint.reader import open_checkpoint
from perdure.training.checkpoint.source import FolderSource
from perdure.training.errors import CheckpointDamaged
from perdure.training.run_dir import RunDir


@pytest.fixture
def folder(run: RunDir) -> Path:
    write(run, small_source())
    return run.checkpoint(FIRST)


def test_the_forger_of_these_tests_makes_indexes_that_pass() -> None:
    entries = decode_index(packed([2, [leaf()]]), len(CONTENT), "here")
    assert decode_index(encode_index(entries), len(CONTENT), "here") == entries


HUGE = 1 << 62
BAD_INDEXES: dict[str, Any] = {
    "no list": 5,
    "a map": {"version": 2, "entries": []},
    "too few fields": [2],
    "too many fields": [2, [leaf()], 0],
    "version": [1, [leaf()]],
    "nothing of a pack that is not empty": [2, []],
    "path twice": [2, [leaf(), leaf(blobs=[], shape=[0], nbytes=0, digest=leaf_digest([]))]],
    "no path": [2, [leaf(path="")]],
    "path no text": [2, [leaf(path=b"w")]],
    "kind": [2, [leaf(kind="pickle")]],
    "plain that is a tensor": [2, [leaf(kind="plain")]],
    "tensor that is plain": [2, [leaf(dtype="plain")]],
    "type": [2, [leaf(dtype="object")]],
    "shape of another size": [2, [leaf(shape=[99])]],
    "shape negative": [2, [leaf(shape=[-10, -10])]],
    "shape beyond 64 bits": [2, [leaf(shape=[1 << 33, 1 << 33], nbytes=0)]],
    "shape that wraps to its size": [2, [leaf(shape=[(1 << 63) + 50, 2])]],
    "shape of many dimensions": [2, [leaf(shape=[100] + [1] * 64)]],
    "nbytes negative": [2, [leaf(nbytes=-100, shape=[-100])]],
    "nbytes huge": [2, [leaf(nbytes=HUGE, shape=[HUGE])]],
    "nbytes of a float": [2, [leaf(nbytes=100.5)]],
    "leaf digest": [2, [leaf(digest=bytes(32))]],
    "leaf digest short": [2, [leaf(digest=b"")]],
    "no blobs": [2, [leaf(blobs=[])]],
    "offset negative": [2, [leaf(blob(offset=-1))]],
    "offset beyond": [2, [leaf(blob(offset=1))]],
    "overlap": [2, [leaf(), leaf(path="v")]],
    "stored negative": [2, [leaf(blob(stored=-100))]],
    "stored nothing": [2, [leaf(blob(stored=0))]],
    "stored beyond": [2, [leaf(blob(stored=HUGE, layout=[WHOLE, [[RAW, HUGE]]]))]],
    "stored too much": [2, [leaf(blob(stored=9000, layout=[WHOLE, [[RAW, 9000]]]))]],
    "raw huge": [2, [leaf(blob(raw=HUGE), nbytes=HUGE, shape=[HUGE])]],
    "raw nothing": [2, [leaf(blob(raw=0))]],
    "raw negative": [2, [leaf(blob(raw=-100))]],
    "blob too many": [2, [leaf(blob(), blob(b"", offset=100), nbytes=100, shape=[100])]],
    "xxh short": [2, [leaf(blob(xxh=b"x"))]],
    "blob digest short": [2, [leaf(blob(digest=b"x" * 31))]],
    "no planes": [2, [leaf(blob(layout=[WHOLE, []]))]],
    "plane negative": [2, [leaf(blob(layout=[WHOLE, [[RAW, 200], [RAW, -100]]]))]],
    "plane empty": [2, [leaf(blob(layout=[WHOLE, [[RAW, 100], [RAW, 0]]]))]],
    "planes many": [2, [leaf(blob(layout=[WHOLE, [[RAW, 1]] * 100]))]],
    "planes of other size": [2, [leaf(blob(layout=[WHOLE, [[RAW, 99]]]))]],
    "transform of version 1": [2, [leaf(blob(layout=[2, [[RAW, 50], [RAW, 50]]]), dtype="float16", shape=[50])]],
    "difference in a full": [2, [leaf(blob(layout=[5, [[RAW, 100]]]))]],
    "reference in a full": [2, [leaf(blob(layout=[6, []]))]],
    "layout no list": [2, [leaf(blob(layout=0))]],
}


@pytest.mark.parametrize("what", BAD_INDEXES)
def test_an_index_that_lies_is_refused(folder: Path, what: str) -> None:
    lay(folder, packed(BAD_INDEXES[what]), bytes(9000) if what == "stored too much" else CONTENT)
    assert "index is malformed" in refused(folder, "index")  # and not just another state than the manifest's


BAD_FRAMES: dict[str, Callable[[], bytes]] = {
    "not framed": lambda: msgspec.msgpack.encode([2, [leaf()]]),
    "cut": lambda: packed([2, [leaf()]])[:-1],
    "two frames": lambda: packed([2, [leaf()]]) * 2,
    "junk after": lambda: packed([2, [leaf()]]) + b"junk",
    "more msgpack after": lambda: zstandard.compress(msgspec.msgpack.encode([2, [leaf()]]) + b"\xc0"),
    "deep": lambda: zstandard.compress(b"\x91" * 1_000_000),
    "count of four thousand million": lambda: zstandard.compress(b"\x92\x02\xdd\xff\xff\xff\xff" + bytes(1000)),
    "counts within counts": lambda: zstandard.compress(b"\x92\x02" + b"\xdd\x7f\xff\xff\xff" * 1000),
    "text of four gigabytes": lambda: zstandard.compress(b"\x92\x02\x91\x97\xdb\xff\xff\xff\xffab"),
    "bomb": lambda: zstandard.compress(bytes(MAX_INDEX + 1)),
    "bomb that says nothing of its size": lambda: streamed(bytes(100 * MIB)),
    "bomb within bounds": lambda: zstandard.compress(bytes(MAX_INDEX)),
}


@pytest.mark.parametrize("what", BAD_FRAMES)
def test_an_index_that_is_no_single_frame_of_msgpack_is_refused_in_bounded_memory(folder: Path, what: str) -> None:
    lay(folder, BAD_FRAMES[what]())
    detail = refused(folder, "index")
    assert "index is malformed" in detail
    assert ("declares" in detail) == (what in ("bomb", "bomb that says nothing of its size"))


def bomb(size: int) -> bytes:
    return zstandard.compress(bytes(size))


BAD_BLOBS: dict[str, tuple[bytes, list[Any], str]] = {
    "bomb": (bomb(256 * MIB), [WHOLE, [[ZSTD, len(bomb(256 * MIB))]]], "uint8"),
    "bomb that says nothing of its size": (
        streamed(bytes(64 * MIB)),
        [WHOLE, [[ZSTD, len(streamed(bytes(64 * MIB)))]]],
        "uint8",
    ),
    "unknown plane": (b"x" * 50, [WHOLE, [[9, 50]]], "uint8"),
    "unknown transform": (b"x" * 50, [99, [[RAW, 50]]], "uint8"),
    "planes of a type without": (b"x" * 50, [1, [[RAW, 25], [RAW, 25]]], "uint8"),
    "constant of many bytes": (b"x" * 50, [WHOLE, [[2, 50]]], "uint8"),
    "raw of fewer bytes": (b"x" * 50, [WHOLE, [[RAW, 50]]], "uint8"),
    "other content": (b"x" * 20_000, [WHOLE, [[RAW, 20_000]]], "uint8"),
    "frame of a pickle": (zstandard.compress(pickle.dumps(Exploding())), [WHOLE, [[ZSTD, 0]]], "uint8"),
}


@pytest.mark.parametrize("what", BAD_BLOBS)
def test_a_blob_that_lies_is_refused_by_its_leaf_in_bounded_memory(folder: Path, what: str) -> None:
    stored, layout, dtype = BAD_BLOBS[what]
    if what == "frame of a pickle":
        layout = [WHOLE, [[ZSTD, len(stored)]]]
    raw = 20_000
    item = blob(stored, raw=raw, digest=blake3.blake3(bytes(raw)).digest(), layout=layout)
    lay(folder, packed([2, [leaf(item, dtype=dtype)]]), stored)
    refused(folder, "w")


def test_a_leaf_that_claims_more_memory_than_there_is_is_refused(folder: Path) -> None:
    size, count = 8 * MIB, 1000
    one = [1, size, xxhash.xxh3_128_digest(b"\0"), blake3.blake3(bytes(size)).digest(), [WHOLE, [[CONSTANT, 1]]]]
    lay(folder, packed([2, [leaf(*([number, *one] for number in range(count)))]]), bytes(count))
    before = resource.getrlimit(resource.RLIMIT_AS)
    used = int(Path("/proc/self/statm").read_text().split()[0]) * resource.getpagesize()
    resource.setrlimit(resource.RLIMIT_AS, (used + 4096 * MIB, before[1]))
    try:
        with pytest.raises(CheckpointDamaged, match="memory") as error, open_checkpoint(folder) as reader:
            reader.read("w")
    finally:
        resource.setrlimit(resource.RLIMIT_AS, before)
    assert error.value.part == "w"


def test_a_bad_sector_is_damage_of_what_lies_there() -> None:
    source = FolderSource(Path("/proc/self"))
    assert source.read("mem", 0, 10) == b""  # the kernel answers EIO: nothing is mapped at 0
    source.close()
