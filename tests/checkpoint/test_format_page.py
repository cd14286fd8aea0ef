"""docs/format.md is enough to write a reader from, and names every field there is."""

import ast
import json
import math
import random
import re
from pathlib import Path

import mini_reader
import msgspec
import numpy as np
import pytest
from snapshots import Source, item_bytes, random_bytes, small_source, write

from perdure.training.checkpoint import codec, manifest, pack, plain
from perdure.training.checkpoint.derive import cast
from perdure.training.checkpoint.facts import Fact
from perdure.training.checkpoint.layout import DELTA, ITEM_SIZES
from perdure.training.checkpoint.lineage import LaunchEnd, LaunchRecord
from perdure.training.checkpoint.manifest import Base, FileRecord, Manifest
from perdure.training.checkpoint.pack import BLOB_BYTES, DERIVED, REFERENCE, Blob, Derived, IndexEntry
from perdure.training.checkpoint.reader import open_checkpoint
from perdure.training.checkpoint.run_info import RunInfo
from perdure.training.run_dir import CheckpointName, RunDir

PAGE = (Path(__file__).parents[2] / "docs" / "format.md").read_text()


def everything() -> list[Source]:
    """Every type small and large, plain values, a leaf of two blobs, two ranks with a path in common."""
    source = small_source()
    for dtype in sorted(set(ITEM_SIZES) - {"plain"}):
        for items in (0, 1, 333):
            source.tensor(f"all/{dtype}/{items}", dtype, (items,), random_bytes((dtype, items), items * item_bytes(dtype)))
        source.tensor(f"all/{dtype}/ones", dtype, (900, 2), b"\x3f" * 1800 * item_bytes(dtype))
    source.tensor("empty text/\u65e5\u672c/%", "float32", (), b"\0\0\x80\xff")
    source.array("large", np.arange(BLOB_BYTES // 4 + 5, dtype=np.int32))
    source.plain("values", {"a": [1, -2.5, None, True, b"x", "caf\u00e9"], ("k", 1): {1, 2}, "big": -(1 << 90), "c": 1 - 2j})
    return [source, small_source(seed=9)]


def test_a_reader_written_from_the_page_reads_every_leaf_and_agrees_on_the_state(run: RunDir) -> None:
    sources = everything()
    written = write(run, *sources)
    ranks = mini_reader.read(run.checkpoint(written.name))
    assert len(ranks) == 2
    for leaves, source in zip(ranks, sources, strict=True):
        assert [(leaf[:4], leaf[-1]) for leaf in leaves] == [
            ((entry.path, entry.kind, entry.dtype, entry.shape), source.bytes[entry.path]) for entry in source.entries
        ]
    assert mini_reader.state_digest([leaf for leaves in ranks for leaf in leaves]) == written.state_digest
    values = next(leaf[-1] for leaf in ranks[0] if leaf[0] == "values")
    assert mini_reader.unpack_plain(values) == plain.unpack_plain(values)


def changed(source: Source) -> Source:
    """A few bits of every leaf, of every leaf but some."""
    later = Source(4)
    for number, entry in enumerate(source.entries):
        raw = bytearray(source.bytes[entry.path])
        if number % 3 and raw:
            raw[len(raw) // 2] ^= 1
        if entry.kind == "plain":
            raw = bytearray(source.bytes[entry.path])
        later.tensor(entry.path, entry.dtype, entry.shape, bytes(raw), kind=entry.kind)
    return later


def test_that_reader_reads_increments_differences_casts_and_twins(run: RunDir) -> None:
    first, second = everything()
    odd = [math.nan, -math.inf, 1e-40, 65_519.9, 65_520, 3.4e38, -0.0]
    master = np.concatenate([np.random.default_rng(3).normal(0, 0.02, 5000), odd]).astype(np.float32)
    for source in (first, second):
        source.array("master", master).array("twin", master)
        for dtype in ("bfloat16", "float16"):
            source.tensor(f"cast/{dtype}", dtype, (5007,), bytes(cast(memoryview(master.tobytes()), dtype)))
    later = changed(first)
    for path in ("master", "twin", "cast/bfloat16", "cast/float16"):
        later.bytes[path] = first.bytes[path]
    full = write(run, first, second)
    found = write(run, later, second, name=CheckpointName(4, 1), base=full.name)
    assert found.base is not None
    with open_checkpoint(run.checkpoint(found.name)) as reader:
        kinds = {blob.layout[0] for entry in reader.entries.values() for blob in entry.blobs}
        assert {DELTA, REFERENCE, DERIVED} < kinds
    ranks = mini_reader.read(run.checkpoint(found.name))
    for leaves, source in zip(ranks, (later, second), strict=True):
        assert {leaf[0]: leaf[-1] for leaf in leaves} == source.bytes
    assert mini_reader.state_digest([leaf for leaves in ranks for leaf in leaves]) == found.state_digest


def test_that_reader_reads_version_1() -> None:
    folder = Path(__file__).with_name("version-1") / "000000000002-0001"
    ranks = mini_reader.read(folder)
    with open_checkpoint(folder) as reader:
        for rank, leaves in enumerate(ranks):
            assert {leaf[0]: leaf[-1] for leaf in leaves} == {
                path: bytes(reader.read(path, rank)) for path in reader.rank_entries(rank)
            }


def test_that_reader_knows_nothing_of_perdure() -> None:
    tree = ast.parse(Path(mini_reader.__file__).read_text())
    names = {alias.name for node in ast.walk(tree) if isinstance(node, ast.Import) for alias in node.names}
    names |= {node.module or "" for node in ast.walk(tree) if isinstance(node, ast.ImportFrom)}
    assert names == {"json", "pathlib", "struct", "typing", "blake3", "msgspec", "xxhash", "zstandard"}


def section(title: str) -> str:
    return re.split(r"^## ", PAGE.split(f"\n## {title}\n")[1], flags=re.M)[0]


@pytest.mark.parametrize(
    ("kind", "title"),
    [
        (Manifest, "manifest.json"),
        (FileRecord, "manifest.json"),
        (IndexEntry, "rank-NNNNN.index"),
        (Blob, "rank-NNNNN.index"),
        (Derived, "rank-NNNNN.index"),
        (Base, "manifest.json"),
        (RunInfo, "run.json"),
        (LaunchRecord, "Launch records"),
        (LaunchEnd, "Launch records"),
        (Fact, "Facts"),
    ],
)
def test_the_page_names_every_field(kind: type[Manifest], title: str) -> None:
    text = section(title)
    assert [field for field in kind.__struct_fields__ if not re.search(rf'[`"]{field}[`"]', text)] == []


def table(title: str) -> list[str]:
    """First cells of the rows of a section's tables."""
    return [line.split("|")[1].strip() for line in section(title).splitlines() if line.startswith("|")]


def test_the_page_names_no_manifest_field_that_is_none() -> None:
    assert set(re.findall("`(.*?)`", " ".join(table("manifest.json")))) == set(Manifest.__struct_fields__)


def test_the_page_gives_arrays_in_their_order() -> None:
    rows = [line.split("|") for line in section("rank-NNNNN.index").splitlines() if re.match(r"\| \d", line)]
    fields = [row[2].strip(" `") for row in rows]
    assert fields == [*IndexEntry.__struct_fields__, *Blob.__struct_fields__]


def test_the_page_names_every_type_with_its_sizes() -> None:
    for dtype, size in ITEM_SIZES.items():
        (row,) = [line for line in section("Blobs").splitlines() if line.startswith("|") and f"`{dtype}`" in line]
        first, elements, words, transform = [cell.strip() for cell in row.strip("|").split("|")]
        place = next(number for number, names in enumerate(first.split(" / ")) if f"`{dtype}`" in names)
        assert int(elements.split(" / ")[place % len(elements.split(" / "))]) == size
        assert codec._word(dtype) == int(words.split(" / ")[place % len(words.split(" / "))])
        few = [random_bytes((dtype, number), size) for number in range(4)]  # noise would be left as it is
        mixed = b"".join(random.Random(0).choices(few, k=512))
        assert codec.encode_blob(memoryview(mixed), dtype, "auto").layout[0] == int(transform)


def test_the_page_states_the_bounds() -> None:
    for bound in (
        f"({BLOB_BYTES} bytes)",
        f"at most {manifest.MAX_MANIFEST >> 20} MiB",
        f"(at most {pack.MAX_INDEX >> 20} MiB)",
        f"at most {pack.MAX_DIMENSIONS}, none negative",
        f"At most {plain.MAX_DEPTH} levels deep and {plain.MAX_PLAIN >> 20} MiB",
        f"at most `raw` + {pack._STORED_SLACK}",
        f"at least {codec._SMALLEST} bytes",
    ):
        assert bound in PAGE


def test_the_manifest_on_disk_has_the_spelling_of_the_page(run: RunDir) -> None:
    odd = {"b": [1, 0.1, 1e-7, 1e22, None, True], "a": {"z": {}, "y": [" "]}, "\u65e5": "caf\u00e9 / \x7f"}
    written = write(run, Source(code=odd))
    text = run.manifest(written.name).read_bytes()

    def in_order(pairs: list[tuple[str, object]]) -> dict[str, object]:
        assert [key for key, _ in pairs] == sorted(key for key, _ in pairs)
        return dict(pairs)

    assert json.loads(text, object_pairs_hook=in_order)["code"] == odd
    assert text == msgspec.json.format(text, indent=-1) + b"\n"
    assert "caf\u00e9 / \x7f".encode() in text
    assert b"[1,0.1,1e-7,1e22,null,true]" in text
