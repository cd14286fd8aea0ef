"""A simulation, on one machine, of what 1,024 ranks have to agree on: their parts, the manifest that names them, the catalog.
The leaves are there in their number, each of a few bytes; no rank trains, and nothing travels."""

import os
import statistics
import time
from collections.abc import Iterator, Sequence
from pathlib import Path

from benchmarks.many import command_secs, repeat
from benchmarks.measure import Failed, Values, Window, in_child, scratch
from benchmarks.ours import ABOUT
from benchmarks.report import Section, Setting
from perdure.training.checkpoint import manifest as manifests
from perdure.training.checkpoint.pieces import piece_path
from perdure.training.checkpoint.reader import open_checkpoint
from perdure.training.checkpoint.writer import Way, make_manifest, write_part
from perdure.training.engine.loading import Loading
from perdure.training.files import make_dirs, write_atomically
from perdure.training.run_dir import MANIFEST, CheckpointName, RunDir
from perdure.training.slots import Entry

RANKS = 1024
TENSORS = 291
"""Parameters, as many as a Llama of 7 billion has; each in a piece for every rank, as are both of AdamW's moments."""
CHECKPOINTS = 20
_FIRST = CheckpointName(1, 1)
_BYTES = 64
_VERBS = (("ls",), ("verify", "--manifests"))


class _Snapshot:
    """What a rank has: a piece of each parameter and of both moments. No two pieces are equal."""

    def __init__(self, rank: int, tensors: int) -> None:
        self._data = memoryview(os.urandom(3 * tensors * _BYTES))
        names = [(kind, number) for number in range(tensors) for kind in ("model", "optimizer/m", "optimizer/v")]
        count = _BYTES // 4
        self.entries: Sequence[Entry] = [
            Entry(
                path=piece_path(f"{kind}/layers.{number}.weight", (rank * count,)),
                kind="tensor", dtype="float32", shape=(count,), offset=at * _BYTES, nbytes=_BYTES,
            )
            for at, (kind, number) in enumerate(names)
        ]  # fmt: skip

    def data(self, entry: Entry) -> memoryview:
        return self._data[entry.offset : entry.offset + entry.nbytes]


def _write(run: RunDir, ranks: int, tensors: int) -> Values:
    """One checkpoint; what each part of it took, in seconds."""
    folder, parts, seconds = run.checkpoint(_FIRST), [], []
    make_dirs(folder)
    for rank in range(ranks):
        snapshot, start = _Snapshot(rank, tensors), time.perf_counter()
        parts.append(write_part(folder, rank, snapshot, Way("raw", 1)))
        seconds.append(time.perf_counter() - start)
    records, entries = [file for part in parts for file in part.files], [entry for part in parts for entry in part.entries]
    start = time.perf_counter()
    made = manifests.seal(make_manifest("bench", _FIRST, ABOUT, records, entries))
    named = time.perf_counter()
    write_atomically(folder / MANIFEST, made)
    committed = time.perf_counter()
    found = {"part": statistics.median(seconds), "parts": sum(seconds), "leaves": len(entries), "manifest bytes": len(made)}
    index = statistics.mean(part.files[1].bytes for part in parts)
    return {**found, "index bytes": index, "manifest": named - start, "commit": committed - named}


def _resume(folder: Path, rank: int) -> float:
    """Until a rank knows of all leaves where they are."""
    start = time.perf_counter()
    with open_checkpoint(folder) as reader, Loading(reader, 1, rank):
        return time.perf_counter() - start


def _alone(run: RunDir, ranks: int, tensors: int) -> Values:
    """Written, and looked at by a rank that resumes; in processes of their own, for their memory."""

    def write(window: Window) -> Values:
        window.open()
        found = _write(run, ranks, tensors)
        window.close()
        return found

    def resume(window: Window) -> Values:
        window.open()
        found = {"resume": _resume(run.checkpoint(_FIRST), ranks // 2)}
        window.close()
        return found

    written, resumed = in_child(write), in_child(resume)
    if failed := written.get("failed") or resumed.get("failed"):
        raise Failed(failed)
    return {**written, **resumed, "peak": written["peak"], "resume peak": resumed["peak"]}


def measure(setting: Setting) -> Iterator[Section]:
    ranks, tensors = (16, 10) if setting.quick else (RANKS, TENSORS)
    count = 3 if setting.quick else CHECKPOINTS
    section = Section(f"A simulation of {ranks:,} ranks on one machine", header=("what", "measured"))
    section.notes = [
        f"Simulated: {3 * tensors} tensors a rank ({tensors} parameters and their moments, each cut into {ranks:,} pieces of "
        f"{_BYTES} bytes), so this is the cost of names, digests and files, not of data. A rank's part would be written on its "
        "own node, at the same time as the others'; here one process writes one after the other. No rank ran."
    ]
    with scratch(setting.folder, "coordination") as folder:
        run = RunDir(folder)
        found = _alone(run, ranks, tensors)
        section.rows = [
            (
                "a rank's part, written and synced",
                f"{found['part'] * 1e3:.0f} ms, index of {found['index bytes'] / 1e3:.0f} kB",
            ),
            ("all parts, one after the other", f"{found['parts']:.1f} s"),
            (
                "the manifest made, by one process that has all indexes",
                f"{found['manifest']:.2f} s, {found['leaves']:,} leaves, {found['peak'] / 1e6:.0f} MB of memory",
            ),
            ("size of the manifest", f"{found['manifest bytes'] / 1e3:.0f} kB"),
            ("commit (the manifest written and synced)", f"{found['commit'] * 1e3:.1f} ms"),
            (
                "a rank that resumes knows where everything is",
                f"{found['resume']:.2f} s, {found['resume peak'] / 1e6:.0f} MB of memory",
            ),
        ]
        section.data = found
        yield section
        repeat(run, _FIRST, count)
        for verb in _VERBS:
            told, secs = f"perdure {' '.join(verb)}", command_secs(folder, verb)
            found[told] = secs
            section.rows.append((f"{told}, a run of {count} such checkpoints", f"{secs:.2f} s"))
            yield section
