"""Foreign and forged files in place of ours: refused as CheckpointDamaged, the part named, in bounded memory.

A forged checkpoint has right digests and sizes everywhere (whoever can write a folder can compute them) and lies elsewhere."""

import io
import json
import os
import pickle
import resource
import tracemalloc
import zipfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import blake3
import msgspec
import pytest
import xxhash
import zstandard
from snapshots import FIRST, random_bytes, small_source, write

from perdure.training.checkpoint import catalog, manifest
from perdure.training.checkpoint.codec import CONSTANT, RAW, WHOLE, ZSTD
from perdure.training.checkpoint.pack import MAX_INDEX, decode_index, encode_index, leaf_digest
from perdure.training.checkpoint.plain import MAX_DEPTH, MAX_PLAIN, pack_plain, unpack_plain
from perdure.training.checkpoint.reader import FolderSource, open_checkpoint
from perdure.training.checkpoint.verify import verify_folder
from perdure.training.errors import CheckpointDamaged
from perdure.training.run_dir import CheckpointName, RunDir, rank_index, rank_pack

MIB = 1 << 20
CONTENT = random_bytes("content", 100)


class Exploding:
    """Unpickling this fails the test."""

    def __reduce__(self) -> tuple[Callable[..., Any], tuple[Any, ...]]:
        return os._exit, (66,)


def archive() -> bytes:
    with io.BytesIO() as buffer:
        with zipfile.ZipFile(buffer, "w") as file:
            file.writestr("archive/data.pkl", pickle.dumps(Exploding()))
        return buffer.getvalue()


FOREIGN = {
    "empty": b"",
    "png": b"\x89PNG\r\n\x1a\n\0\0\0\rIHDR" + bytes(50),
    "pickle": pickle.dumps(Exploding()),
    "torch zip": archive(),
    "random": random_bytes("foreign", 4096),
    "null": b"null",
    "list": b"[]\n",
    "object": b"{}\n",
    "deep json": b"[" * 100_000,
    "deep object": b'{"a":' * 100_000,
    "not unicode": b'{"format":"\xff"}',
    "nothing framed": zstandard.compress(b""),
    "zeros framed": zstandard.compress(bytes(1000)),
}


@pytest.fixture
def folder(run: RunDir) -> Path:
    write(run, small_source())
    return run.checkpoint(FIRST)


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


@pytest.mark.parametrize("file", ["rank-00000.pack", "rank-00000.index", "manifest.json"])
@pytest.mark.parametrize("what", FOREIGN)
def test_a_foreign_file_is_refused(folder: Path, file: str, what: str) -> None:
    (folder / file).write_bytes(FOREIGN[what])
    detail = refused(folder, "manifest" if file == "manifest.json" else file.rpartition(".")[2])
    assert str(folder) in detail


@pytest.mark.parametrize("file", ["rank-00000.pack", "rank-00000.index", "manifest.json"])
@pytest.mark.parametrize("what", ["folder", "pipe", "dangling link", "link to itself"])
def test_what_is_no_regular_file_is_refused_without_waiting_for_it(run: RunDir, folder: Path, file: str, what: str) -> None:
    path = folder / file
    path.unlink()
    if what == "folder":
        path.mkdir()
    elif what == "pipe":
        os.mkfifo(path)
    else:
        path.symlink_to(path if what == "link to itself" else folder / "nowhere")
    refused(folder, "manifest" if file == "manifest.json" else file.rpartition(".")[2])
    assert all(listed.manifest is None or file != "manifest.json" for listed in catalog.list_checkpoints(run))


@pytest.mark.parametrize("file", ["rank-00000.pack", "rank-00000.index"])
def test_links_are_not_followed_even_to_the_right_bytes(folder: Path, file: str) -> None:
    (folder / file).rename(folder.parent / "moved")
    (folder / file).symlink_to(folder.parent / "moved")
    refused(folder, file.rpartition(".")[2])


def test_a_manifest_of_gigabytes_is_refused_unread(folder: Path) -> None:
    with open(folder / "manifest.json", "ab") as file:
        file.truncate(4 << 30)  # sparse
    refused(folder, "manifest")


# forged manifests


def forge(folder: Path, **changes: Any) -> None:
    """The manifest with those fields, digest right."""
    fields = json.loads((folder / "manifest.json").read_bytes())
    write_fields(folder, {**fields, **changes})


def write_fields(folder: Path, fields: dict[str, Any], *, sort: bool = True, **how: Any) -> None:
    def text(digest: str) -> bytes:
        how.setdefault("separators", (",", ":"))
        return json.dumps({**fields, "digest": digest}, sort_keys=sort, ensure_ascii=False, **how).encode() + b"\n"

    (folder / "manifest.json").write_bytes(text(blake3.blake3(text("")).hexdigest()))


def test_the_forger_of_these_tests_makes_manifests_that_pass(folder: Path) -> None:
    before = (folder / "manifest.json").read_bytes()
    forge(folder)
    assert (folder / "manifest.json").read_bytes() == before
    forge(folder, code={"commit": "caf\u00e9"}, loss={"mean": 0.25})
    assert verify_folder(folder) == []


NAMES = ["../../../etc/passwd", "/etc/passwd", "rank-00000.pack/../x", "rank-00000.pack\0", "rank-00000.pack\n", "rank-0.pack"]
NAMES += ["rank-0000\u0660.pack", "RANK-00000.pack", "", ".", "manifest.json", "rank-00001.pack", "rank-00000.index"]


@pytest.mark.parametrize("name", NAMES)
def test_no_name_leads_out_of_the_folder_or_to_another_file(folder: Path, name: str) -> None:
    records = json.loads((folder / "manifest.json").read_bytes())["files"]
    records[0]["name"] = name
    forge(folder, files=records)
    assert "names files" in refused(folder, "manifest")


@pytest.mark.parametrize("keep", [[], [0], [1], [1, 0], [0, 1, 0, 1], [0, 1, 0]])
def test_files_left_out_swapped_or_named_twice_are_refused(folder: Path, keep: list[int]) -> None:
    records = json.loads((folder / "manifest.json").read_bytes())["files"]
    forge(folder, files=[records[number] for number in keep], stored_bytes=sum(records[number]["bytes"] for number in keep))
    assert "names files" in refused(folder, "manifest")


ODD: list[Any] = [None, True, -1, 1.5, 10**30, "1", [], {}, ["a"], {"a": 1}]


@pytest.mark.parametrize("field", [field for field in manifest.Manifest.__struct_fields__ if field != "digest"])
def test_no_value_of_a_manifest_field_does_more_than_be_refused(folder: Path, field: str) -> None:
    for value in ODD:
        forge(folder, **{field: value})
        for damage in verify_folder(folder):
            assert damage.part in ("manifest", "index")
    fields = json.loads((folder / "manifest.json").read_bytes())
    del fields[field]
    write_fields(folder, fields)
    if field != "base":
        refused(folder, "manifest")


@pytest.mark.parametrize("depth", [10, 100, 300, *range(700, 1100, 7), 3000, 20_000])
def test_a_manifest_of_any_depth_is_read_or_refused(folder: Path, depth: int) -> None:
    bare = (folder / "manifest.json").read_bytes()
    digest = json.loads(bare)["digest"].encode()
    bare = bare.replace(digest, b"").replace(b'"code":{}', b'"code":' + b'{"a":' * depth + b"1" + b"}" * depth)
    sealed = bare.replace(b'"digest":""', b'"digest":"' + blake3.blake3(bare).hexdigest().encode() + b'"')
    (folder / "manifest.json").write_bytes(sealed)
    assert [damage.part for damage in verify_folder(folder)] in ([], ["manifest"])
    if depth <= 100:
        assert verify_folder(folder) == []


def test_numbers_that_lie_about_the_files_are_refused(folder: Path) -> None:
    fields = json.loads((folder / "manifest.json").read_bytes())
    for field, part in [("raw_bytes", "index"), ("leaves", "index"), ("stored_bytes", "manifest")]:
        forge(folder, **{field: fields[field] + 1})
        assert [damage.part for damage in verify_folder(folder)] == [part]
        forge(folder, **{field: fields[field]})
    forge(folder, state_digest="0" * 64)
    refused(folder, "index")
    forge(folder, state_digest=fields["state_digest"], base="000000000001-0001")
    assert "increment" in refused(folder, "manifest")


@pytest.mark.parametrize("size", [0, 1, 1 << 40, 1 << 62, 10**25])
def test_file_sizes_that_lie_are_refused(folder: Path, size: int) -> None:
    for number in (0, 1):
        records = json.loads((folder / "manifest.json").read_bytes())["files"]
        records[number]["bytes"] = size
        forge(folder, files=records, stored_bytes=sum(record["bytes"] for record in records))
        assert verify_folder(folder)[0].part in ("manifest", "index", "pack")


def test_an_index_file_of_terabytes_is_refused_unread(folder: Path) -> None:
    records = json.loads((folder / "manifest.json").read_bytes())["files"]
    records[1]["bytes"] = 1 << 40
    os.truncate(folder / "rank-00000.index", 1 << 40)  # sparse
    forge(folder, files=records, stored_bytes=records[0]["bytes"] + (1 << 40))
    assert "too many" in refused(folder, "index")


def test_any_other_spelling_of_the_same_manifest_is_refused(folder: Path) -> None:
    fields = json.loads((folder / "manifest.json").read_bytes())
    write_fields(folder, fields, indent=1)
    refused(folder, "manifest")
    write_fields(folder, dict(reversed(fields.items())), sort=False)
    refused(folder, "manifest")
    write_fields(folder, {**fields, "surprise": 1})
    refused(folder, "manifest")
    text = manifest.seal(msgspec.convert(fields, manifest.Manifest))
    for spelling in (text[:-1], text + b"\n", b" " + text, text.replace(b'"step":2', b'"step":1,"step":2')):
        (folder / "manifest.json").write_bytes(spelling)
        refused(folder, "manifest")
    (folder / "manifest.json").write_bytes(text)
    assert verify_folder(folder) == []


def test_a_manifest_of_another_checkpoint_is_refused(run: RunDir, folder: Path) -> None:
    write(run, small_source(step=4))
    (folder / "manifest.json").write_bytes(run.manifest(CheckpointName(4, 1)).read_bytes())
    assert "000000000004-0001" in refused(folder, "manifest")


@pytest.mark.parametrize("extra", [{}, {"shards": [1, 2]}, {"files": "elsewhere"}])
def test_a_newer_version_is_named_as_such_and_nothing_is_written(folder: Path, extra: dict[str, Any]) -> None:
    forge(folder, version=manifest.VERSION + 1, **extra)
    before = {path: path.read_bytes() for path in folder.rglob("*")}
    assert "written by a newer version" in refused(folder, "manifest")
    with pytest.raises(CheckpointDamaged) as error:
        open_checkpoint(folder)
    assert error.value.hint == "upgrade perdure"
    assert {path: path.read_bytes() for path in folder.rglob("*")} == before


@pytest.mark.parametrize("version", [0, -1, "1", 1.5, None, True, [1]])
def test_other_versions_and_formats_are_refused(folder: Path, version: Any) -> None:
    forge(folder, version=version)
    refused(folder, "manifest")
    forge(folder, version=1, format="somebody-elses")
    refused(folder, "manifest")


# forged indexes


def lay(folder: Path, index: bytes, pack: bytes = CONTENT) -> None:
    """Pack and index, and a manifest that vouches for both."""
    (folder / rank_pack(0)).write_bytes(pack)
    (folder / rank_index(0)).write_bytes(index)
    files = [
        {"name": rank_pack(0), "bytes": len(pack), "digest": f"xxh3-128:{xxhash.xxh3_128_hexdigest(pack)}"},
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
    return list({**fields, "blobs": list(blobs), **changes}.values())


def packed(index: Any) -> bytes:
    return zstandard.compress(msgspec.msgpack.encode(index))


def test_the_forger_of_these_tests_makes_indexes_that_pass() -> None:
    entries = decode_index(packed([1, [leaf()]]), len(CONTENT), "here")
    assert decode_index(encode_index(entries), len(CONTENT), "here") == entries


HUGE = 1 << 62
BAD_INDEXES: dict[str, Any] = {
    "no list": 5,
    "a map": {"version": 1, "entries": []},
    "too few fields": [1],
    "too many fields": [1, [leaf()], 0],
    "version": [2, [leaf()]],
    "nothing of a pack that is not empty": [1, []],
    "path twice": [1, [leaf(), leaf(blobs=[], shape=[0], nbytes=0, digest=leaf_digest([]))]],
    "no path": [1, [leaf(path="")]],
    "path no text": [1, [leaf(path=b"w")]],
    "kind": [1, [leaf(kind="pickle")]],
    "plain that is a tensor": [1, [leaf(kind="plain")]],
    "tensor that is plain": [1, [leaf(dtype="plain")]],
    "type": [1, [leaf(dtype="object")]],
    "shape of another size": [1, [leaf(shape=[99])]],
    "shape negative": [1, [leaf(shape=[-10, -10])]],
    "shape beyond 64 bits": [1, [leaf(shape=[1 << 33, 1 << 33], nbytes=0)]],
    "shape that wraps to its size": [1, [leaf(shape=[(1 << 63) + 50, 2])]],
    "shape of many dimensions": [1, [leaf(shape=[100] + [1] * 64)]],
    "nbytes negative": [1, [leaf(nbytes=-100, shape=[-100])]],
    "nbytes huge": [1, [leaf(nbytes=HUGE, shape=[HUGE])]],
    "nbytes of a float": [1, [leaf(nbytes=100.5)]],
    "leaf digest": [1, [leaf(digest=bytes(32))]],
    "leaf digest short": [1, [leaf(digest=b"")]],
    "no blobs": [1, [leaf(blobs=[])]],
    "offset negative": [1, [leaf(blob(offset=-1))]],
    "offset beyond": [1, [leaf(blob(offset=1))]],
    "overlap": [1, [leaf(), leaf(path="v")]],
    "stored negative": [1, [leaf(blob(stored=-100))]],
    "stored nothing": [1, [leaf(blob(stored=0))]],
    "stored beyond": [1, [leaf(blob(stored=HUGE, layout=[WHOLE, [[RAW, HUGE]]]))]],
    "stored too much": [1, [leaf(blob(stored=9000, layout=[WHOLE, [[RAW, 9000]]]))]],
    "raw huge": [1, [leaf(blob(raw=HUGE), nbytes=HUGE, shape=[HUGE])]],
    "raw nothing": [1, [leaf(blob(raw=0))]],
    "raw negative": [1, [leaf(blob(raw=-100))]],
    "blob too many": [1, [leaf(blob(), blob(b"", offset=100), nbytes=100, shape=[100])]],
    "xxh short": [1, [leaf(blob(xxh=b"x"))]],
    "blob digest short": [1, [leaf(blob(digest=b"x" * 31))]],
    "no planes": [1, [leaf(blob(layout=[WHOLE, []]))]],
    "plane negative": [1, [leaf(blob(layout=[WHOLE, [[RAW, 200], [RAW, -100]]]))]],
    "plane empty": [1, [leaf(blob(layout=[WHOLE, [[RAW, 100], [RAW, 0]]]))]],
    "planes many": [1, [leaf(blob(layout=[WHOLE, [[RAW, 1]] * 100]))]],
    "planes of other size": [1, [leaf(blob(layout=[WHOLE, [[RAW, 99]]]))]],
    "layout no list": [1, [leaf(blob(layout=0))]],
}


@pytest.mark.parametrize("what", BAD_INDEXES)
def test_an_index_that_lies_is_refused(folder: Path, what: str) -> None:
    lay(folder, packed(BAD_INDEXES[what]), bytes(9000) if what == "stored too much" else CONTENT)
    assert "index is malformed" in refused(folder, "index")  # and not just another state than the manifest's


BAD_FRAMES: dict[str, Callable[[], bytes]] = {
    "not framed": lambda: msgspec.msgpack.encode([1, [leaf()]]),
    "cut": lambda: packed([1, [leaf()]])[:-1],
    "two frames": lambda: packed([1, [leaf()]]) * 2,
    "junk after": lambda: packed([1, [leaf()]]) + b"junk",
    "more msgpack after": lambda: zstandard.compress(msgspec.msgpack.encode([1, [leaf()]]) + b"\xc0"),
    "deep": lambda: zstandard.compress(b"\x91" * 1_000_000),
    "count of four thousand million": lambda: zstandard.compress(b"\x92\x01\xdd\xff\xff\xff\xff" + bytes(1000)),
    "counts within counts": lambda: zstandard.compress(b"\x92\x01" + b"\xdd\x7f\xff\xff\xff" * 1000),
    "text of four gigabytes": lambda: zstandard.compress(b"\x92\x01\x91\x97\xdb\xff\xff\xff\xffab"),
    "bomb": lambda: zstandard.compress(bytes(MAX_INDEX + 1)),
    "bomb that says nothing of its size": lambda: streamed(bytes(100 * MIB)),
    "bomb within bounds": lambda: zstandard.compress(bytes(MAX_INDEX)),
}


def streamed(data: bytes) -> bytes:
    compressor = zstandard.ZstdCompressor(level=1).compressobj()
    return compressor.compress(data) + compressor.flush()


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
    "unknown transform": (b"x" * 50, [7, [[RAW, 50]]], "uint8"),
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
    lay(folder, packed([1, [leaf(item, dtype=dtype)]]), stored)
    refused(folder, "w")


def test_a_leaf_that_claims_more_memory_than_there_is_is_refused(folder: Path) -> None:
    size, count = 8 * MIB, 1000
    one = [1, size, xxhash.xxh3_128_digest(b"\0"), blake3.blake3(bytes(size)).digest(), [WHOLE, [[CONSTANT, 1]]]]
    lay(folder, packed([1, [leaf(*([number, *one] for number in range(count)))]]), bytes(count))
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


# forged plain values

E = msgspec.msgpack.encode
BAD_PLAIN: dict[str, bytes] = {
    "empty": b"",
    "pickle": pickle.dumps(Exploding()),
    "random": random_bytes("plain", 1000),
    "map": E({"a": 1}),
    "date": b"\xd6\xff\0\0\0\0",
    "extension": b"\xc7\x03\x05abc",
    "empty list": E([]),
    "no kind": E([1, 2]),
    "unknown kind": E(["x", 2]),
    "kind of hostile length": E(["l" * 100_000]),
    "two values": E(1) + E(2),
    "deep": b"\x92\xa1l" * 100_000 + b"\xc0",
    "deep in mappings": b"\x93\xa1d\xa1k" * 100_000 + b"\xc0",
    "one too deep": b"\x92\xa1l" * (MAX_DEPTH + 1) + b"\xc0",
    "count of four thousand million": b"\xdd\xff\xff\xff\xff",
    "counts within counts": b"\xdd\x7f\xff\xff\xff" * 500,
    "text of four gigabytes": b"\xdb\xff\xff\xff\xffab",
    "key without value": E(["d", 1]),
    "key twice": E(["d", 1, 2, 1, 3]),
    "key that cannot be one": E(["d", ["l"], 1]),
    "member that cannot be one": E(["s", ["l"]]),
    "integer of no text": E(["i", 5]),
    "integer of decimal text": E(["i", "5"]),
    "integer that fits": E(["i", "0x5"]),
    "integer with signs": E(["i", "0x1_0000_0000_0000_0000"]),
    "integer missing": E(["i"]),
    "complex of texts": E(["c", "1", "2"]),
    "complex of one": E(["c", 1.0]),
    "not unicode": b"\xa1\xff",
}


@pytest.mark.parametrize("what", BAD_PLAIN)
def test_plain_data_that_we_did_not_write_is_refused_in_bounded_memory(what: str) -> None:
    tracemalloc.start()
    try:
        with pytest.raises(CheckpointDamaged) as error:
            unpack_plain(BAD_PLAIN[what])
        assert error.value.part == "plain"
        assert tracemalloc.get_traced_memory()[1] < 32 * MIB
    finally:
        tracemalloc.stop()


def test_plain_data_beyond_the_bound_is_refused_unread() -> None:
    with pytest.raises(CheckpointDamaged, match="too large"):
        unpack_plain(memoryview(bytes(MAX_PLAIN + 1)))


def test_plain_data_cut_anywhere_is_refused() -> None:
    whole = pack_plain({"a": [1, 2.0, (None, b"x")], "b": {3, 4}, "c": 1 << 80, "d": "text"}, "x")
    for length in range(len(whole)):
        with pytest.raises(CheckpointDamaged):
            unpack_plain(whole[:length])
