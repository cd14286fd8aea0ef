"""What ranks have in common is stored once, whoever's it is; what differs, each stores its own. Every reader finds both."""

import struct
from pathlib import Path

import numpy as np
import pytest
from snapshots import FIRST, RUN_ID, Source, random_bytes

from perdure.training import files
from perdure.training.checkpoint.diff import diff
from perdure.training.checkpoint.manifest import Manifest
from perdure.training.checkpoint.pack import DERIVED, REFERENCE
from perdure.training.checkpoint.readahead import ReadAhead
from perdure.training.checkpoint.reader import open_checkpoint
from perdure.training.checkpoint.restore import restore_safetensors
from perdure.training.checkpoint.shared import parts
from perdure.training.checkpoint.verify import verify_folder
from perdure.training.checkpoint.writer import write_checkpoint
from perdure.training.run_dir import CheckpointName, RunDir

LARGE = 300_000


def rank(number: int, step: int = 2, *, diverged: bool = False) -> Source:
    """A model that all have, its bf16 copy, a generator of each rank's own, a leaf that only ranks 1 and 2 have in common."""
    master = np.random.default_rng(7 + (diverged and number == 2)).normal(0, 1, LARGE).astype(np.float32)
    source = Source(step, data={"samples": 7 + number, "tokens": 10})
    source.plain("model", {"layers": 3})
    source.array("model/master", master)
    source.tensor("model/half", "bfloat16", (LARGE,), (master.view(np.uint32) >> 16).astype(np.uint16).tobytes())
    source.array("model/table", np.arange(LARGE, dtype=np.int64))
    source.tensor("rng/cpu", "uint8", (5000,), random_bytes(number, 5000))
    source.array("model/some", np.full(2000, min(number, 1) * 0.5 + step * (number > 0), np.float32))
    return source


def commit(run: RunDir, sources: list[Source], base: CheckpointName | None = None) -> Manifest:
    files.make_dirs(run.checkpoints)
    name = CheckpointName(sources[0].about.step, 1)
    snapshots: list[object] = [*sources]
    return write_checkpoint(run, RUN_ID, name, parts(snapshots, 1), encoding="auto", threads=1, base=base)  # type: ignore[arg-type]  # sources in memory


@pytest.fixture
def run(tmp_path: Path) -> RunDir:
    return RunDir(tmp_path / "run")


def test_each_rank_reads_its_whole_state_and_what_is_equal_is_stored_once(run: RunDir) -> None:
    sources = [rank(number) for number in range(3)]
    manifest = commit(run, sources)
    once = sum(len(data) for path, data in sources[0].bytes.items() if path not in ("rng/cpu", "model/some"))
    assert manifest.raw_bytes == once + 3 * 5000 + 3 * 8000, "model/some differs in rank 0, so each has its own"
    assert (manifest.data["tokens"], manifest.data["ranks"][2]) == (30, {"samples": 9})
    assert verify_folder(run.checkpoint(FIRST)) == []
    with open_checkpoint(run.checkpoint(FIRST)) as reader:
        sizes = [sum(entry.nbytes for entry in reader.rank_entries(number).values()) for number in range(3)]
        assert max(sizes) < once, "nobody stores all of it"
        for number, source in enumerate(sources):
            with ReadAhead(reader, 2, number) as ahead:
                assert {path: bytes(ahead.read(path)) for path in source.bytes} == source.bytes


def test_small_and_plain_leaves_that_all_have_are_in_the_lowest_ranks_pack(run: RunDir) -> None:
    sources = []
    for _ in range(3):
        source = Source().array("large", np.arange(LARGE)).plain("settings", {"lr": 0.1})
        for number in range(5):
            source.array(f"step{number}", np.array(7.0, np.float32))
        sources.append(source.array("next", np.arange(LARGE) * 2))
    commit(run, sources)
    with open_checkpoint(run.checkpoint(FIRST)) as reader:
        owners = {path: reader.find(path, 2) for path in sources[0].bytes}
    assert owners == {"large": 0, "settings": 0, **{f"step{number}": 0 for number in range(5)}, "next": 1}


def test_content_decides_whether_a_leaf_is_shared(run: RunDir) -> None:
    manifest = commit(run, [rank(number, diverged=True) for number in range(3)])
    assert manifest.raw_bytes > 3 * 4 * LARGE
    with open_checkpoint(run.checkpoint(FIRST)) as reader:
        assert [reader.find("model/master", number) for number in range(3)] == [0, 1, 2]
        assert bytes(reader.read("model/master", 2)) == rank(2, diverged=True).bytes["model/master"]


def test_derived_leaf_stays_with_its_source(run: RunDir) -> None:
    master = np.random.default_rng(1).normal(0, 1, LARGE).astype(np.float32)
    words = master.view(np.uint32)
    half = ((words + 0x7FFF + ((words >> 16) & 1)) >> 16).astype(np.uint16).tobytes()
    sources = []
    for _ in range(2):
        source = Source().array("first", np.arange(LARGE, dtype=np.int64)).array("master", master)
        sources.append(source.tensor("half", "bfloat16", (LARGE,), half))
    commit(run, sources)
    with open_checkpoint(run.checkpoint(FIRST)) as reader:
        owner = reader.find("half")
        assert reader.find("master") == owner
        assert {blob.layout[0] for blob in reader.rank_entries(owner)["half"].blobs} == {DERIVED}


def test_increment_finds_every_shared_leaf_where_its_base_has_it(run: RunDir) -> None:
    commit(run, [rank(number) for number in range(3)])
    manifest = commit(run, [rank(number, 4) for number in range(3)], base=FIRST)
    assert manifest.stored_bytes < 100_000
    with open_checkpoint(run.checkpoint(manifest.name)) as reader:
        for path in ("model/master", "model/table"):
            assert reader.rank_entries(reader.find(path))[path].blobs[0].layout[0] == REFERENCE
    assert verify_folder(run.checkpoint(manifest.name)) == []


def test_diff_does_not_mind_in_whose_pack_a_leaf_is(run: RunDir) -> None:
    commit(run, [rank(number) for number in range(3)])
    commit(run, [rank(number, 4, diverged=True) for number in range(3)])
    commit(run, [rank(0, 6)])
    with open_checkpoint(run.checkpoint(FIRST)) as one, open_checkpoint(run.checkpoint(CheckpointName(4, 1))) as other:
        found = {(leaf.path, leaf.rank): leaf.what for leaf in diff(one, other)}
    assert found[("model/master", 2)] == "changed"
    assert ("model/master", 0) not in found
    assert {path for path, _ in found} == {"model/master", "model/half", "model/some"}
    with open_checkpoint(run.checkpoint(FIRST)) as one, open_checkpoint(run.checkpoint(CheckpointName(6, 1))) as other:
        assert {leaf.path for leaf in diff(one, other, only="model*")} == {"model/some"}


def test_restored_file_holds_what_rank_0_has(run: RunDir, tmp_path: Path) -> None:
    commit(run, [rank(number) for number in range(3)])
    out = tmp_path / "out.safetensors"
    with open_checkpoint(run.checkpoint(FIRST)) as reader:
        restore_safetensors(reader, out)
    data = out.read_bytes()
    header = int(struct.unpack_from("<Q", data)[0])
    for path in ("model/table", "rng/cpu", "model/half"):
        assert rank(0).bytes[path] in data[8 + header :]
