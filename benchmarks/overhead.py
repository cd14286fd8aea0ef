"""What does chunked training under Prefect with checkpoints cost against the same loop bare? Interleaved runs, medians.

Three figures: share of the loop's wall time lost; time of a boundary step (with its snapshot) over the median step; both with
the trainer pinned to one core, so that the saver, the flow and the server have another one to use."""

import itertools
import json
import os
import statistics
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path

from benchmarks.report import Section, Setting, Target

LOOP = Path(__file__).parent / "loop"
ROUNDS = 3
STEPS, CHUNK = 120, 20
PERDURE = [sys.executable, "-m", "perdure.cli.main", "run", "--keep-server"]


def _settings(folder: Path, number: int) -> list[str]:
    """The example's own parameters; everything written goes to a folder of its own."""
    times = folder / f"times-{number}.json"
    return [f"run.dir='{folder}/runs/{number}'", f"store.url='{folder}/store-{number}'", f"params.times='{times}'"]


def _times(folder: Path, number: int) -> list[float]:
    ends: list[float] = json.loads((folder / f"times-{number}.json").read_text())
    return [after - before for before, after in itertools.pairwise(ends)]


def _bare(folder: Path, number: int) -> list[float]:
    command = [sys.executable, str(LOOP / "loop.py"), *_settings(folder, number)]
    subprocess.run(command, check=True, stdout=subprocess.DEVNULL, env={**os.environ, "OMP_NUM_THREADS": "1"})
    return _times(folder, number)


def _chunked(folder: Path, number: int) -> list[float]:
    command = [*PERDURE, str(LOOP / "run.toml")]
    for text in _settings(folder, number):
        command += ["--set", text]
    subprocess.run(command, check=True, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
    return _times(folder, number)


def measure(setting: Setting) -> Iterator[Section]:
    """Medians of interleaved rounds."""
    from perdure.deployments import server

    bare, chunked = [], []
    with tempfile.TemporaryDirectory() as name, server.acquire(server.ServerHome(Path(name) / "prefect")) as local:
        os.environ["PREFECT_API_URL"] = local.url
        folder = Path(name)
        for number in range(1 if setting.quick else ROUNDS):
            bare.append(_bare(folder, 2 * number))
            chunked.append(_chunked(folder, 2 * number + 1))
        del os.environ["PREFECT_API_URL"]
    lost = [sum(with_) / sum(without) - 1 for with_, without in zip(chunked, bare, strict=True)]
    boundary = statistics.median(_boundary(steps) for steps in chunked)
    section = Section("A chunked run against its bare loop", data={"bare": bare, "chunked": chunked})
    section.notes = [f"{STEPS} steps in chunks of {CHUNK} under Prefect, trainer pinned to one core; the loop alone beside it."]
    share = statistics.median(lost)
    told = f"{share:.1%} (rounds: {', '.join(f'{value:.1%}' for value in lost)})"
    section.targets = [
        Target(
            "boundary step, snapshot included, over the median step", f"{boundary * 1e3:.1f} ms", "under 50 ms", boundary < 0.05
        ),
        Target("share of wall time lost to chunks, checkpoints, proofs and copies", told, "under 5 %", share < 0.05),
    ]
    yield section


def _boundary(steps: list[float]) -> float:
    """Mean time by which the steps that end a chunk exceed the median step. The snapshot of step n lies between the
    ends of the loop bodies of steps n and n + 1, so in `steps[n - 1]`."""
    median = statistics.median(steps)
    ends = [seconds for number, seconds in enumerate(steps, start=1) if number % CHUNK == 0]
    return statistics.mean(ends) - median
