"""Increments: what did not change is not written again, what changed a little is a difference; all comes back bit for bit."""

import shutil
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from snapshots import RUN_ID, Source, random_bytes, small_source, write

from perdure.training.checkpoint import blobs as blobs_module
from perdure.training.checkpoint import writer as writer_module
from perdure.training.checkpoint.hold import try_hold_alone
from perdure.training.checkpoint.increment import choose_base
from perdure.training.checkpoint.layout import DELTA
from perdure.training.checkpoint.lineage import LaunchRecord, create_launch
from perdure.training.checkpoint.manifest import Base
from perdure.training.checkpoint.pack import BLOB_BYTES, DERIVED, REFERENCE
from perdure.training.checkpoint.reader import open_checkpoint
from perdure.training.checkpoint.verify import check, verify_folder
from perdure.training.run_dir import CheckpointName, RunDir, rank_pack

FULL, NEXT = CheckpointName(2, 1), CheckpointName(4, 1)


def near(raw: bytes, share: float, seed: int = 0) -> bytes:
    """float32 weights after a small step: some moved by a little."""
    rng, values = np.random.default_rng(seed), np.frombuffer(raw, np.float32).copy()
    moved = rng.random(len(values)) < share
    values[moved] *= 1 + rng.normal(0, 1e-6, int(moved.sum())).astype(np.float32)
    return values.tobytes()


def weights(size: int, seed: int = 0) -> bytes:
    return np.random.default_rng(seed).normal(0, 0.02, size).astype(np.float32).tobytes()


def transforms(run: RunDir, name: CheckpointName, rank: int = 0) -> dict[str, list[int]]:
    with open_checkpoint(run.checkpoint(name)) as reader:
        return {path: [blob.layout[0] for blob in entry.blobs] for path, entry in reader.rank_entries(rank).items()}


def assert_comes_back(run: RunDir, name: CheckpointName, *sources: Source) -> None:
    folder = run.checkpoint(name)
    assert verify_folder(folder) == verify_folder(folder, deep=False) == verify_folder(folder, threads=3) == []
    with open_checkpoint(folder) as reader:
        for rank, source in enumerate(sources):
            assert [
                (path, bytes(raw)) for path, raw in ((path, reader.read(path, rank)) for path in reader.rank_entries(rank))
            ] == [(entry.path, source.bytes[entry.path]) for entry in source.entries]
            for path, raw in source.bytes.items():
                assert bytes(reader.read(path, rank)) == raw


def frozen_and_trained(step: int, share: float = 0.01) -> Source:
    """Frozen weights of several blobs, weights that move a little, moments that are new each time, an embedding of which one
    row was touched."""
    source = Source(step).tensor("frozen", "float32", (3 << 20,), weights(3 << 20, 1))
    trained = weights(3 << 20, 2)
    source.tensor("trained", "float32", (3 << 20,), trained if step == 2 else near(trained, share))
    source.tensor("moments", "float32", (3 << 20,), weights(3 << 20, step))
    rows = bytearray(weights(4 << 20, 3))
    rows[(9 << 20) : (9 << 20) + 4096] = weights(1024, step)
    return source.tensor("embedding", "float32", (1 << 12, 1 << 10), bytes(rows)).plain("model", {"step": step})


def test_what_did_not_change_is_a_reference_what_moved_a_little_a_difference_the_rest_its_own(run: RunDir) -> None:
    full = write(run, frozen_and_trained(2))
    found = write(run, frozen_and_trained(4), base=FULL)
    assert found.base == Base(name=str(FULL), digest=full.digest)
    kinds = transforms(run, NEXT)
    assert kinds["frozen"] == [REFERENCE, REFERENCE]
    assert kinds["trained"] == [DELTA, DELTA]
    assert not {REFERENCE, DELTA} & {*kinds["moments"], *kinds["model"]}
    assert kinds["embedding"][0] == REFERENCE
    assert kinds["embedding"][1] == DELTA
    assert_comes_back(run, NEXT, frozen_and_trained(4))
    assert found.state_digest == write(RunDir(run.root / "other"), frozen_and_trained(4)).state_digest
    assert found.stored_bytes < 0.35 * full.stored_bytes


def test_an_unchanged_state_is_next_to_nothing_and_several_ranks_have_their_own_references(run: RunDir) -> None:
    sources = small_source(seed=1), small_source(seed=2)
    full = write(run, *sources)
    found = write(run, *(small_source(seed=seed) for seed in (1, 2)), name=NEXT, base=FULL)
    assert [record.bytes for record in found.files[::2]] == [0, 0]
    assert found.state_digest == full.state_digest
    assert_comes_back(run, NEXT, *sources)


def test_the_base_is_not_read_for_what_did_not_change(run: RunDir) -> None:
    write(run, small_source(seed=1))
    pack = run.checkpoint(FULL) / rank_pack(0)
    data = pack.read_bytes()
    pack.write_bytes(bytes(len(data)))  # sizes are right, content is not
    assert write(run, small_source(seed=1), name=NEXT, base=FULL).base is not None
    pack.write_bytes(data)
    assert_comes_back(run, NEXT, small_source(seed=1))


def test_a_blob_of_the_base_that_cannot_be_read_is_not_used_for_a_difference(run: RunDir) -> None:
    write(run, Source(2).tensor("w", "float32", (50_000,), weights(50_000)).tensor("v", "float32", (1000,), weights(1000)))
    pack = run.checkpoint(FULL) / rank_pack(0)
    data = pack.read_bytes()
    pack.write_bytes(bytes(len(data)))
    later = Source(4).tensor("w", "float32", (50_000,), near(weights(50_000), 0.01))
    later.tensor("v", "float32", (1000,), weights(1000))
    assert write(run, later, base=FULL).base is not None
    assert [kind in (REFERENCE, DELTA) for (kind,) in transforms(run, NEXT).values()] == [False, True]
    pack.write_bytes(data)
    assert_comes_back(run, NEXT, later)


def test_moments_cost_one_try_and_raw_no_difference_at_all(run: RunDir, monkeypatch: pytest.MonkeyPatch) -> None:
    tried: list[int] = []
    real = blobs_module.encode_delta
    monkeypatch.setattr(blobs_module, "encode_delta", lambda raw, *rest: tried.append(len(raw)) or real(raw, *rest))
    many = 6 * BLOB_BYTES // 4
    write(run, Source(2).tensor("m", "float32", (many,), weights(many, 1)))
    write(run, Source(4).tensor("m", "float32", (many,), weights(many, 2)), base=FULL, threads=1)
    assert len(tried) == 1
    write(run, Source(6).tensor("m", "float32", (many,), near(weights(many, 1), 0.01)), base=FULL, encoding="raw")
    assert len(tried) == 1


@pytest.mark.parametrize("problem", ["missing", "manifest", "index", "of another run", "an increment", "of a higher step"])
def test_with_a_base_that_cannot_be_one_a_full_is_written(run: RunDir, problem: str) -> None:
    base = FULL
    write(run, small_source(seed=1))
    folder = run.checkpoint(FULL)
    if problem == "missing":
        shutil.rmtree(folder)
    elif problem in ("manifest", "index"):
        file = folder / ("manifest.json" if problem == "manifest" else "rank-00000.index")
        file.write_bytes(file.read_bytes()[:-1])
    elif problem == "of another run":
        shutil.rmtree(folder)
        write_as(run, "another", small_source(seed=1))
    elif problem == "an increment":
        base = write(run, small_source(seed=1), name=CheckpointName(3, 1), base=FULL).name
    else:
        base = write(run, small_source(seed=1), name=CheckpointName(4, 2)).name
    found = write(run, small_source(seed=1), name=NEXT, base=base)
    assert found.base is None
    assert_comes_back(run, NEXT, small_source(seed=1))


def write_as(run: RunDir, run_id: str, source: Source) -> None:
    writer_module.write_checkpoint(run, run_id, FULL, [source], encoding="auto", threads=1)


def test_an_increment_that_uses_nothing_of_its_base_is_a_full(run: RunDir) -> None:
    write(run, Source(2).tensor("w", "uint8", (9000,), random_bytes(1, 9000)))
    assert write(run, Source(4).tensor("w", "uint8", (9000,), random_bytes(2, 9000)), base=FULL).base is None


def test_leaves_that_came_went_grew_or_changed_type_come_back(run: RunDir) -> None:
    grown = weights(3 << 20)
    full = Source(2).tensor("grows", "float32", (2 << 20,), grown[: 8 << 20]).tensor("goes", "uint8", (9000,), bytes(9000))
    full.tensor("type", "float32", (5000,), weights(5000)).tensor("shape", "float32", (5000,), weights(5000, 5))
    write(run, full)
    later = Source(4).tensor("grows", "float32", (3 << 20,), grown).tensor("comes", "uint8", (9000,), random_bytes(3, 9000))
    later.tensor("type", "int32", (5000,), weights(5000)).tensor("shape", "float32", (50, 100), weights(5000, 5))
    assert write(run, later, base=FULL).base is not None
    kinds = transforms(run, NEXT)
    assert kinds["grows"][0] == kinds["shape"][0] == REFERENCE
    assert not {REFERENCE, DELTA} & {kinds["grows"][1], *kinds["comes"]}
    assert_comes_back(run, NEXT, later)


def test_the_base_chosen_is_the_newest_full_of_the_lineage_that_is_not_damaged(run: RunDir) -> None:
    record = LaunchRecord(token=1, resumed_from=None, created=0.0, host="h", pid=1, run=RUN_ID, owner="o")
    create_launch(run, record)
    assert choose_base(run) is None
    for step in (2, 4):
        write(run, small_source(step))
    write(run, small_source(6), base=CheckpointName(4, 1))
    write(run, small_source(8), name=CheckpointName(8, 2))  # of no launch of this history
    assert choose_base(run) == CheckpointName(4, 1)
    pack = run.checkpoint(CheckpointName(4, 1)) / rank_pack(0)
    pack.write_bytes(bytes(pack.stat().st_size))
    assert check(run, CheckpointName(4, 1)).result == "damaged"
    assert choose_base(run) == FULL
    run.manifest(FULL).write_bytes(b"")
    assert choose_base(run) is None


def test_an_open_reader_holds_its_checkpoint_and_the_base(run: RunDir) -> None:
    write(run, small_source())
    write(run, small_source(), name=NEXT, base=FULL)

    def free(name: CheckpointName) -> bool:
        with try_hold_alone(run.checkpoint(name)) as alone:
            return alone

    with open_checkpoint(run.checkpoint(NEXT)):
        assert (free(FULL), free(NEXT)) == (False, False)
    assert (free(FULL), free(NEXT)) == (True, True)


class Watching(Source):
    """Looks, while it is written, whether the base could be deleted."""

    folder: Path
    free: bool

    def data(self, entry: Any) -> memoryview:
        with try_hold_alone(self.folder) as self.free:
            return super().data(entry)


def test_the_base_cannot_be_deleted_while_an_increment_is_written_against_it(run: RunDir) -> None:
    write(run, small_source())
    watching = Watching(4)
    watching.folder = run.checkpoint(FULL)
    watching.entries, watching.bytes = small_source().entries, small_source().bytes
    assert write(run, watching, base=FULL).base is not None
    assert watching.free is False


def test_a_leaf_derived_in_the_base_and_not_any_more_stands_on_its_own(run: RunDir) -> None:
    tied = weights(5000)
    write(run, Source(2).tensor("a", "float32", (5000,), tied).tensor("b", "float32", (5000,), tied))
    assert transforms(run, FULL)["b"] == [DERIVED]
    later = Source(4).tensor("a", "float32", (5000,), weights(5000, 9)).tensor("b", "float32", (5000,), tied)
    later.tensor("c", "float32", (10,), weights(10))
    write(run, later, base=FULL)
    assert not {REFERENCE, DELTA} & {*transforms(run, NEXT)["b"]}
    assert_comes_back(run, NEXT, later)
