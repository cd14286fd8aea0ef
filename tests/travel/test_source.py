"""Weights straight from the store: only what is needed is fetched, and what is damaged is refused."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import pytest
from safetensors.numpy import load_file
from snapshots import Source, random_bytes, write
from storage.proxy import proxy_to

from perdure.training.checkpoint import manifest
from perdure.training.checkpoint.derive import cast
from perdure.training.checkpoint.pieces import piece_path
from perdure.training.checkpoint.reader import open_checkpoint
from perdure.training.checkpoint.restore import restore_safetensors
from perdure.training.errors import CheckpointDamaged
from perdure.training.run_dir import CheckpointName, RunDir
from perdure.training.storage.folder import FolderStore
from perdure.training.travel.push import push
from perdure.training.travel.source import open_stored

MadeRun = Any
FULL, INCREMENT = CheckpointName(100, 1), CheckpointName(110, 1)
MASTER = np.random.default_rng(0).normal(0, 0.02, 600_000).astype(np.float32)


def state(step: int, bias: int) -> Source:
    """A model whose weight is the fp16 copy of a master among the optimizer's leaves."""
    source = Source(step).plain("model", {"names": ["weight", "bias", "late"]})
    source.tensor("model/weight", "float16", (600, 1000), bytes(cast(memoryview(MASTER.tobytes()), "float16")))
    source.tensor("model/bias", "uint8", (300_000,), random_bytes(bias, 300_000))
    source.tensor("optimizer/moment", "uint8", (9_000_000,), random_bytes("moment", 9_000_000))
    source.array("optimizer/master", MASTER)
    source.tensor("optimizer/moment2", "uint8", (1_000_000,), random_bytes(step, 1_000_000))
    return source.tensor("model/late", "uint8", (400_000,), random_bytes("late", 400_000))


@pytest.fixture
def history(made: MadeRun) -> MadeRun:
    made.write(FULL, state(FULL.step, 1))
    made.write(INCREMENT, state(INCREMENT.step, 2), base=FULL)
    return made


def stored(run: RunDir, name: CheckpointName, *paths: str) -> int:
    with open_checkpoint(run.checkpoint(name)) as reader:
        return sum(blob.stored for path in paths for blob in reader.entries[path].blobs)


def test_of_the_packs_only_what_is_asked_for_is_fetched(
    open_s3: Callable[..., Any], s3_keys: Any, history: MadeRun, tmp_path: Path
) -> None:
    run, out = history.dir, tmp_path / "out.safetensors"
    needed = {
        FULL: {FULL: ("model/bias", "optimizer/master", "model/late")},
        INCREMENT: {FULL: ("optimizer/master", "model/late"), INCREMENT: ("model/bias",)},
    }
    with proxy_to(s3_keys.endpoint) as proxy:
        store = open_s3(endpoint=proxy.endpoint)
        push(run, store, INCREMENT)
        for name, bias in ((FULL, 1), (INCREMENT, 2)):
            proxy.log.clear()
            counts: list[int] = []
            with open_stored(store, name, history.id, counts.append) as reader:
                assert restore_safetensors(reader, out, only="model.*", threads=2) == 1_200_000 + 300_000 + 400_000
            found, wanted = load_file(out), state(name.step, bias)
            assert {f"model/{key[6:]}": value.tobytes() for key, value in found.items()} == {
                path: wanted.bytes[path] for path in ("model/weight", "model/bias", "model/late")
            }
            for place, paths in needed[name].items():
                assert proxy.fetched(f"{place}/rank-00000.pack") == stored(run, place, *paths)
            assert sum(counts) == proxy.fetched(".pack") + proxy.fetched(".index")
        proxy.log.clear()
        with open_stored(store, FULL, history.id) as reader:
            restore_safetensors(reader, out, threads=2)
        whole = (run.checkpoint(FULL) / "rank-00000.pack").stat().st_size
        assert proxy.fetched(".pack") == whole, "all of it once, though the weight is made from the master"


def test_packs_of_many_ranks_are_fetched_once_though_tensors_lie_across_all_of_them(tmp_path: Path) -> None:
    run, ranks, rows, out = RunDir(tmp_path / "run"), 12, 40_000, tmp_path / "out.safetensors"
    pieces = [{name: random_bytes((name, rank), rows * 10) for name in "abcdefgh"} for rank in range(ranks)]
    sources = [Source() for _ in pieces]
    for rank, own in enumerate(pieces):
        for name, data in own.items():
            sources[rank].tensor(piece_path(f"model/{name}", (rank * rows, 0)), "uint8", (rows, 10), data)
    found = write(run, *sources)
    counts: list[int] = []
    with open_stored(FolderStore(run.root), found.name, found.run, counts.append) as reader:
        restore_safetensors(reader, out, threads=1)  # of several, one may fall so far behind that its span is gone again
    assert {name[6:]: value.tobytes() for name, value in load_file(out).items()} == {
        name: b"".join(own[name] for own in pieces) for name in "abcdefgh"
    }
    assert sum(counts) == sum(record.bytes for record in found.files)


@pytest.mark.parametrize(
    ("name", "leaf"),
    [(FULL, "model/bias"), (FULL, "optimizer/master"), (INCREMENT, "model/late"), (INCREMENT, "optimizer/moment")],
)
def test_a_damaged_tensor_is_named_where_it_is_needed(
    folder_store: FolderStore, history: MadeRun, tmp_path: Path, name: CheckpointName, leaf: str
) -> None:
    push(history.dir, folder_store, INCREMENT)
    with open_checkpoint(history.dir.checkpoint(FULL)) as reader:
        offset = reader.entries[leaf].blobs[0].offset
    with open(folder_store.root / f"checkpoints/{FULL}/rank-00000.pack", "r+b") as file:
        file.seek(offset)
        byte = file.read(1)[0]
        file.seek(offset)
        file.write(bytes([byte ^ 1]))
    out = tmp_path / "out.safetensors"
    with open_stored(folder_store, name, history.id) as reader:
        if leaf == "optimizer/moment":
            restore_safetensors(reader, out, only="model.*")
        with pytest.raises(CheckpointDamaged, match=leaf):
            restore_safetensors(reader, out)
    assert out.exists() == (leaf == "optimizer/moment")


def test_a_base_that_is_gone_or_another_is_refused(folder_store: FolderStore, history: MadeRun) -> None:
    push(history.dir, folder_store, INCREMENT)
    key = f"checkpoints/{FULL}/manifest.json"
    other = msgspec.structs.replace(manifest.read(history.dir.checkpoint(FULL)), created=0.0)
    folder_store.put(key, manifest.seal(other))
    with pytest.raises(CheckpointDamaged, match=f"base of {INCREMENT} is another one"):
        open_stored(folder_store, INCREMENT, history.id)
    folder_store.delete([key])
    with pytest.raises(CheckpointDamaged, match=f"base of {INCREMENT} is damaged.*is missing"):
        open_stored(folder_store, INCREMENT, history.id)
