"""An increment whose base is missing, foreign, forged or damaged is refused, and what lies in an increment's index too."""

import json
import random
import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import blake3
import msgspec
import numpy as np
import pytest
import xxhash
import zstandard
from forging import blob, forge, lay, leaf, packed, refused
from snapshots import Source, random_bytes, write

from perdure.training.checkpoint import manifest
from perdure.training.checkpoint.layout import DELTA, RAW, WHOLE
from perdure.training.checkpoint.pack import DERIVED, NOTHING, REFERENCE
from perdure.training.checkpoint.reader import open_checkpoint
from perdure.training.checkpoint.verify import verify_folder
from perdure.training.errors import CheckpointDamaged
from perdure.training.run_dir import CheckpointName, RunDir, rank_index, rank_pack

FULL, NEXT = CheckpointName(2, 1), CheckpointName(4, 1)
SAME, MOVED = random_bytes("same", 6000), np.random.default_rng(0).normal(0, 0.02, 3000).astype(np.float32)


def source(step: int) -> Source:
    """One leaf that stays, one that moves a little, one that is new, one made from the one that moves."""
    moved = MOVED.copy()
    moved[:20] *= 1 + step * 1e-6
    made = Source(step).tensor("same", "uint8", (6000,), SAME).array("moved", moved).array("twin", moved)
    return made.tensor("new", "uint8", (600,), random_bytes(step, 600))


@pytest.fixture
def folder(run: RunDir) -> Path:
    """An increment."""
    write(run, source(2))
    assert write(run, source(4), base=FULL).base is not None
    with open_checkpoint(run.checkpoint(NEXT)) as reader:
        kinds = [entry.blobs[0].layout[0] for entry in reader.entries.values()]
    assert kinds == [REFERENCE, DELTA, DERIVED, WHOLE]
    return run.checkpoint(NEXT)


def fields(folder: Path) -> dict[str, Any]:
    return dict(json.loads((folder / "manifest.json").read_bytes()))


# the base


@pytest.mark.parametrize("name", ["", "x", "../000000000002-0001", "2-1", "000000000004-0001", "000000000009-0001", "/etc"])
def test_a_base_is_named_by_the_name_of_an_older_checkpoint_and_nothing_else(folder: Path, name: str) -> None:
    forge(folder, base={"name": name, "digest": fields(folder)["base"]["digest"]})
    assert "base" in refused(folder, "manifest")


@pytest.mark.parametrize("base", ["000000000002-0001", 5, [], {}, {"name": "000000000002-0001"}, {"name": 1, "digest": ""}])
def test_a_base_of_any_other_form_is_refused(folder: Path, base: Any) -> None:
    forge(folder, base=base)
    refused(folder, "manifest")


def test_a_base_with_more_fields_is_refused(folder: Path) -> None:
    forge(folder, base={**fields(folder)["base"], "more": 1})
    refused(folder, "manifest")


def test_a_missing_base_is_said(run: RunDir, folder: Path) -> None:
    shutil.rmtree(run.checkpoint(FULL))
    detail = refused(folder, "base")
    assert "is missing" in detail
    assert str(FULL) in detail


def test_a_base_of_another_digest_run_or_with_a_base_is_refused(run: RunDir, folder: Path) -> None:
    base, before = run.checkpoint(FULL), fields(run.checkpoint(FULL))
    forge(base, loss={"mean": 1.0})
    assert "another one" in refused(folder, "base")
    forge(base, run="somebody-else")
    assert "somebody-else" in refused(folder, "base")
    forge(base, run=before["run"], base={"name": "000000000001-0001", "digest": "0" * 64})
    pinned = {"name": str(FULL), "digest": fields(base)["digest"]}
    forge(folder, base=pinned)
    assert "itself an increment" in refused(folder, "base")


def test_a_circle_is_refused(run: RunDir, folder: Path) -> None:
    third = write(run, source(6), base=NEXT)  # an increment is no base: a full
    assert third.base is None
    forge(run.checkpoint(FULL), base={"name": str(NEXT), "digest": "0" * 64})
    refused(run.checkpoint(FULL), "manifest")  # of a higher step
    assert "manifest" in refused(folder, "base")
    forge(folder, base={"name": str(NEXT), "digest": "0" * 64})
    refused(folder, "manifest")  # itself


@pytest.mark.parametrize("file", ["manifest.json", "rank-00000.index", "rank-00000.pack"])
@pytest.mark.parametrize("harm", ["missing", "short", "folder", "link"])
def test_a_base_whose_files_are_not_there_is_refused(run: RunDir, folder: Path, file: str, harm: str) -> None:
    path = run.checkpoint(FULL) / file
    data = path.read_bytes()
    path.unlink()
    if harm == "short":
        path.write_bytes(data[:-1])
    elif harm == "folder":
        path.mkdir()
    elif harm == "link" and file != "manifest.json":
        path.symlink_to(folder / file)
    detail = refused(folder, {"rank-00000.index": "index", "rank-00000.pack": "pack"}.get(file, "base"))
    assert str(FULL) in detail


# flipped bits


def flips(path: Path, count: int) -> Iterator[int]:
    """Each flipped bit in turn, on disk while it is yielded."""
    data = path.read_bytes()
    for bit in random.Random(str(path.name)).sample(range(len(data) * 8), min(count, len(data) * 8)):
        path.write_bytes(data[: bit // 8] + bytes([data[bit // 8] ^ 1 << bit % 8]) + data[bit // 8 + 1 :])
        yield bit
    path.write_bytes(data)


def owner(folder: Path, bit: int) -> str:
    with open_checkpoint(folder) as reader:
        return [e.path for e in reader.entries.values() for b in e.blobs if b.stored and b.offset <= bit // 8][-1]


def assert_names(folder: Path, leaves: list[str]) -> None:
    deep = [damage.part for damage in verify_folder(folder)]
    assert deep == [
        path for path in ("same", "moved", "twin", "new") if path in leaves or ("moved" in leaves and path == "twin")
    ]
    assert [damage.part for damage in verify_folder(folder, deep=False)] == leaves
    with open_checkpoint(folder) as reader:
        for path in reader.entries:
            if path in deep:
                with pytest.raises(CheckpointDamaged) as error:
                    reader.read(path)
                assert error.value.part == path
            else:
                reader.read(path)


def test_every_flipped_bit_of_an_increments_pack_names_its_leaf(folder: Path) -> None:
    for bit in flips(folder / rank_pack(0), 60):
        assert_names(folder, [owner(folder, bit)])


def test_every_flipped_bit_of_the_bases_pack_names_the_leaf_that_uses_it(run: RunDir, folder: Path) -> None:
    base = run.checkpoint(FULL)
    seen = set()
    for bit in flips(base / rank_pack(0), 60):
        hit = owner(base, bit)
        seen.add(hit)
        assert_names(folder, [hit] if hit != "new" else [])  # that one the increment has of its own
        if hit != "new":
            assert str(base) in verify_folder(folder)[0].detail
    assert seen == {"same", "moved", "new"}


def test_every_flipped_bit_of_an_index_or_manifest_of_either_is_found(run: RunDir, folder: Path) -> None:
    base = run.checkpoint(FULL)
    for place, file, part in (
        (folder, "manifest.json", "manifest"),
        (folder, rank_index(0), "index"),
        (base, "manifest.json", "base"),
        (base, rank_index(0), "index"),
    ):
        for _ in flips(place / file, 60):
            assert [damage.part for damage in verify_folder(folder)] == [part]
            with pytest.raises(CheckpointDamaged), open_checkpoint(folder) as reader:
                reader.read("same")


# forged indexes of increments and of derived leaves


def reference(**changes: Any) -> list[Any]:
    told = {"offset": 0, "stored": 0, "raw": 6000, "xxh": NOTHING, "digest": blake3.blake3(SAME).digest()}
    return list({**told, "layout": [REFERENCE, []], **changes}.values())


def delta(content: bytes, raw: int, digest: bytes) -> list[Any]:
    return [0, len(content), raw, xxhash.xxh3_128_digest(content), digest, [DELTA, [[RAW, len(content)]]]]


def lay_increment(folder: Path, entries: list[Any], pack: bytes = b"") -> None:
    lay(folder, packed([2, entries]), pack)


def test_the_forger_of_these_tests_makes_increments_that_are_read(folder: Path) -> None:
    lay_increment(folder, [leaf(reference(), path="same")])
    with open_checkpoint(folder) as reader:
        assert bytes(reader.read("same")) == SAME
    zero = bytes(6000)
    lay_increment(folder, [leaf(delta(zero, 6000, blake3.blake3(SAME).digest()), path="same")], zero)
    with open_checkpoint(folder) as reader:
        assert bytes(reader.read("same")) == SAME


SHORT = random_bytes("short", 600)
BAD: dict[str, list[Any]] = {
    "leaf that the base lacks": [leaf(reference(), path="nowhere")],
    "leaf of another type": [leaf(reference(), path="same", dtype="int8")],
    "blob of another length": [leaf(reference(raw=5000), path="same")],
    "blob of another digest": [leaf(reference(digest=bytes(32)), path="same")],
    "leaf that the base made from another": [leaf(reference(raw=12_000), path="twin", dtype="float32", shape=[3000])],
    "reference with stored bytes": [leaf(reference(stored=5), path="same")],
    "reference with planes": [leaf(reference(layout=[REFERENCE, [[RAW, 0]]]), path="same")],
    "reference with a digest of something": [leaf(reference(xxh=bytes(16)), path="same")],
    "reference at another place": [leaf(reference(offset=1), path="same")],
    "reference beyond the first": [leaf(reference(), reference(raw=100), path="same")],
    "unknown kind of nothing": [leaf(reference(layout=[8, []]), path="same")],
    "derived blob of a leaf that is not": [leaf(reference(layout=[DERIVED, []]), path="same")],
    "reference in a derived leaf": [leaf(reference(), path="same"), leaf(reference(), derived=["same", "same"])],
}


@pytest.mark.parametrize("what", BAD)
def test_a_reference_that_lies_is_refused(folder: Path, what: str) -> None:
    lay_increment(folder, BAD[what])
    refused(folder, "index")


@pytest.mark.parametrize("path", ["nowhere", "new"])
def test_a_difference_from_what_the_base_lacks_or_has_in_another_length_is_refused(folder: Path, path: str) -> None:
    lay_increment(folder, [leaf(delta(bytes(6000), 6000, bytes(32)), path=path)], bytes(6000))
    refused(folder, "index")


def test_a_difference_that_gives_other_bytes_is_refused_by_its_leaf(folder: Path) -> None:
    lay_increment(folder, [leaf(delta(b"\1" * 6000, 6000, blake3.blake3(SAME).digest()), path="same")], b"\1" * 6000)
    refused(folder, "same")


def test_a_full_has_neither_references_nor_differences(run: RunDir) -> None:
    write(run, source(2))
    folder = run.checkpoint(FULL)
    lay(folder, packed([2, [leaf(reference(), path="same")]]), b"")
    assert "out of place" in refused(folder, "index")
    lay(folder, packed([2, [leaf(delta(bytes(6000), 6000, blake3.blake3(SAME).digest()), path="same")]]), bytes(6000))
    assert "out of place" in refused(folder, "index")


def derived(path: str, how: str, origin: str, raw: int = 100, **changes: Any) -> list[Any]:
    one = reference(
        raw=raw, offset=100, layout=[DERIVED, []], digest=blake3.blake3(random_bytes("content", 100)[:raw]).digest()
    )
    return leaf(one, path=path, derived=[how, origin], **changes)


BAD_DERIVED: dict[str, list[Any]] = {
    "from nowhere": [leaf(), derived("v", "same", "x")],
    "from itself": [leaf(), derived("v", "same", "v")],
    "from one that is derived": [leaf(), derived("v", "same", "w"), derived("u", "same", "v")],
    "in a circle": [leaf(), derived("v", "same", "u"), derived("u", "same", "v")],
    "in an unknown way": [leaf(), derived("v", "add", "w")],
    "of other length": [leaf(), derived("v", "same", "w", 50)],
    "cast from what is no float32": [leaf(), derived("v", "cast", "w", 50, dtype="bfloat16", shape=[25])],
    "cast to what is no half": [leaf(dtype="float32", shape=[25]), derived("v", "cast", "w", 50, dtype="int16", shape=[25])],
    "cast to other length": [leaf(dtype="float32", shape=[25]), derived("v", "cast", "w", 100, dtype="bfloat16", shape=[50])],
    "plain": [leaf(), derived("v", "same", "w", kind="plain", dtype="plain")],
    "with blobs of its own": [leaf(), leaf(blob(offset=100), path="v", derived=["same", "w"])],
    "of nothing": [
        leaf(),
        leaf(path="v", blobs=[], shape=[0], nbytes=0, digest=blake3.blake3(b"").digest(), derived=["same", "w"]),
    ],
    "with more fields": [leaf(), leaf(path="v", derived=["same", "w", 1])],
    "with fewer fields": [leaf(), leaf(path="v", derived=["same"])],
    "without saying so": [leaf()[:-1]],
}


@pytest.mark.parametrize("what", BAD_DERIVED)
def test_a_derived_leaf_that_lies_is_refused(run: RunDir, what: str) -> None:
    write(run, source(2))
    pack = random_bytes("content", 100) * (2 if what == "with blobs of its own" else 1)
    lay(run.checkpoint(FULL), packed([2, BAD_DERIVED[what]]), pack)
    assert "index is malformed" in refused(run.checkpoint(FULL), "index")


def test_a_derived_leaf_of_another_digest_is_refused_by_its_name(run: RunDir) -> None:
    write(run, source(2))
    good, bad = derived("v", "same", "w"), derived("u", "same", "w")
    lay(run.checkpoint(FULL), packed([2, [leaf(), good]]))
    assert [damage.part for damage in verify_folder(run.checkpoint(FULL))] == ["index"]  # another state, and nothing else
    bad[6][0][4] = bytes(32)
    bad[5] = blake3.blake3(bytes(32)).digest()
    lay(run.checkpoint(FULL), packed([2, [leaf(), bad]]))
    refused(run.checkpoint(FULL), "u")


def test_a_pack_digest_that_is_not_of_these_blobs_is_refused(run: RunDir) -> None:
    write(run, source(2))
    folder = run.checkpoint(FULL)
    records = fields(folder)["files"]
    for digest in ("blobs:" + "0" * 32, "xxh3-128:" + records[0]["digest"][6:], ""):
        records[0]["digest"] = digest
        forge(folder, files=records)
        refused(folder, "index")
    assert msgspec.msgpack.decode(zstandard.decompress((folder / rank_index(0)).read_bytes()))[0] == 2
    assert manifest.VERSION == 2
