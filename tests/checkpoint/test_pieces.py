"""A tensor that ranks have cut among themselves is put together from its pieces, or refused where they do not make one up."""

import json
import struct
from pathlib import Path

import numpy as np
import pytest
from snapshots import FIRST, RUN_ID, Source

from perdure.training import files
from perdure.training.checkpoint.pieces import piece_path, wholes
from perdure.training.checkpoint.reader import open_checkpoint
from perdure.training.checkpoint.restore import restore_safetensors
from perdure.training.checkpoint.shared import parts
from perdure.training.checkpoint.writer import write_checkpoint
from perdure.training.errors import CheckpointDamaged
from perdure.training.run_dir import RunDir

TENSOR = np.arange(7 * 5, dtype=np.float32).reshape(7, 5)


def commit(run: RunDir, *ranks: dict[tuple[int, int], tuple[int, int]]) -> None:
    """For each rank, pieces of TENSOR: where they begin -> where they end."""
    sources = []
    for pieces in ranks:
        source = Source().array("model/bias", np.ones(3, np.float32))
        for (row, column), (end, right) in pieces.items():
            source.array(piece_path("model/weight", (row, column)), np.ascontiguousarray(TENSOR[row:end, column:right]))
        sources.append(source)
    files.make_dirs(run.checkpoints)
    snapshots: list[object] = [*sources]
    write_checkpoint(run, RUN_ID, FIRST, parts(snapshots, 1), encoding="auto", threads=1)  # type: ignore[arg-type]  # in memory


@pytest.fixture
def run(tmp_path: Path) -> RunDir:
    return RunDir(tmp_path / "run")


ROWS = ({(0, 0): (4, 5)}, {(4, 0): (7, 5)})
GRID = ({(0, 0): (4, 2)}, {(0, 2): (4, 5)}, {(4, 0): (7, 2)}, {(4, 2): (7, 5)})
REPLICATED = (*ROWS, *ROWS)


@pytest.mark.parametrize("ranks", [ROWS, GRID, REPLICATED], ids=["rows", "grid", "replicated"])
def test_restored_file_has_the_tensor_under_its_own_name(
    run: RunDir, tmp_path: Path, ranks: tuple[dict[tuple[int, int], tuple[int, int]], ...]
) -> None:
    commit(run, *ranks)
    out = tmp_path / "out.safetensors"
    with open_checkpoint(run.checkpoint(FIRST)) as reader:
        assert reader.manifest.raw_bytes == TENSOR.nbytes + 12, "what several ranks have is stored once"
        restore_safetensors(reader, out)
    data = out.read_bytes()
    header = int(struct.unpack_from("<Q", data)[0])
    told = json.loads(data[8 : 8 + header])
    assert set(told) == {"__metadata__", "model.bias", "model.weight"}
    start, end = told["model.weight"]["data_offsets"]
    assert told["model.weight"]["shape"] == [7, 5]
    assert data[8 + header + start : 8 + header + end] == TENSOR.tobytes()


WRONG = {
    "a gap": ({(0, 0): (3, 5)}, {(4, 0): (7, 5)}),
    "an overlap": ({(0, 0): (5, 5)}, {(4, 0): (7, 5)}),
    "no beginning": ({(4, 0): (7, 5)},),
    "a hole in the grid": GRID[:3],
    "other sizes": ({(0, 0): (4, 2)}, {(0, 2): (4, 4)}, {(4, 0): (7, 2)}, {(4, 2): (7, 5)}),
}


@pytest.mark.parametrize("what", WRONG)
def test_pieces_that_do_not_make_up_a_tensor_are_damage(run: RunDir, what: str) -> None:
    commit(run, *WRONG[what])
    with open_checkpoint(run.checkpoint(FIRST)) as reader, pytest.raises(CheckpointDamaged, match="do not make up a tensor"):
        wholes(reader)


@pytest.mark.parametrize("name", ["model/weight%at/0", "model/weight%at/0,0,0", "model/weight%at/-1,0", "model/weight%at/a,0"])
def test_name_that_is_no_place_is_damage(run: RunDir, name: str) -> None:
    files.make_dirs(run.checkpoints)
    snapshots: list[object] = [Source().array(name, TENSOR)]
    write_checkpoint(run, RUN_ID, FIRST, parts(snapshots, 1), encoding="auto", threads=1)  # type: ignore[arg-type]  # in memory
    with open_checkpoint(run.checkpoint(FIRST)) as reader, pytest.raises(CheckpointDamaged, match="no name of a piece"):
        wholes(reader)


def test_pieces_of_two_types_are_damage(run: RunDir) -> None:
    files.make_dirs(run.checkpoints)
    source = Source().array("w%at/0,0", TENSOR).array("w%at/7,0", TENSOR.astype(np.float64))
    snapshots: list[object] = [source]
    write_checkpoint(run, RUN_ID, FIRST, parts(snapshots, 1), encoding="auto", threads=1)  # type: ignore[arg-type]  # in memory
    with open_checkpoint(run.checkpoint(FIRST)) as reader, pytest.raises(CheckpointDamaged, match="of several types"):
        wholes(reader)
