"""A simulation, on one machine, of what 1,024 ranks have to agree on: their parts, the manifest that names them, the catalog.
The leaves are there in their number, each of a few bytes; no rank trains, and nothing travels."""

import os
import statistics
import time
from collections.abc import Callable, Iterator, Sequence

from benchmarks.many import command_secs, repeat
from benchmarks.measure import Failed, Values, Window, in_child, scratch
from benchmarks.ours import ABOUT
from benchmarks.report import Section, Setting
from perdure.training.checkpoint import manifest as manifests
from perdure.training.checkpoint.pieces import piece_path
from perdure.training.checkpoint.reader import open_checkpoint
from perdure.training.checkpoint.writer import Way, make_manifest, write_part
from perdure.training.engine.loading import Loading
from perdure.training.engine.shards import Place
from perdure.training.files import make_dirs, write_atomically
from perdure.training.run_dir import MANIFEST, CheckpointName, RunDir
from perdure.training.slots import Entry

RANKS = 1024
TENSORS = 291
"""Parameters, as many as a Llama of 7 billion has; each in a piece for every rank, as are both of AdamW's moments."""
CHECKPOINTS = 20
_FIRST = CheckpointName(1, 1)
_BYTES = 64
_COUNT = _BYTES // 4
_PLAIN = ("model", "optimizer", "perdure.session")
"""What all have in common beside AdamW's counts of steps. The first rank stores it."""
_VERBS = (("ls",), ("verify", "--manifests"))


def _names(tensors: int) -> list[str]:
    return [f"{kind}/{number}" for number in range(tensors) for kind in ("model", "optimizer/m", "optimizer/v")]


def _common(tensors: int) -> list[str]:
    return [*_PLAIN, *(f"optimizer/step/{number}" for number in range(tensors))]


class _Snapshot:
    """What a rank stores: a piece of each parameter and of both moments, no two of them equal, and its generators; the first
    also what all have."""

    def __init__(self, rank: int, tensors: int) -> None:
        self._made: list[Entry] = []
        self._end = 0
        for name in _common(tensors) if rank == 0 else ():
            self._add(name, "plain", "plain", 100 * tensors) if name in _PLAIN else self._add(name, "tensor", "float32", 4)
        for name in _names(tensors):
            self._add(piece_path(name, (rank * _COUNT,)), "tensor", "float32", _BYTES)
        self._add("perdure.rng", "plain", "plain", 5000)
        self._data = memoryview(os.urandom(self._end))

    def _add(self, path: str, kind: str, dtype: str, nbytes: int) -> None:
        shape = (nbytes,) if kind == "plain" else (nbytes // 4,)
        self._made.append(Entry(path=path, kind=kind, dtype=dtype, shape=shape, offset=self._end, nbytes=nbytes))
        self._end += nbytes

    @property
    def entries(self) -> Sequence[Entry]:
        return self._made

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


def _resume(run: RunDir, before: int, ranks: int, tensors: int) -> float:
    """Until the middle one of so many ranks has read all that it asks for."""
    start, rank, mine = time.perf_counter(), ranks // 2, _COUNT * before // ranks
    with open_checkpoint(run.checkpoint(_FIRST)) as reader, Loading(reader, 1, rank, ranks) as loading:
        for path in (*_common(tensors), "perdure.rng"):
            loading.read(path)
        for path in _names(tensors):
            assert loading.read_part(path, (_COUNT * before,), Place((rank * mine,), (mine,)))
        return time.perf_counter() - start


def _alone(run: RunDir, ranks: int, tensors: int) -> Values:
    """Written, and looked at by ranks that resume; in processes of their own, for their memory."""

    def in_window(work: Callable[[], Values]) -> Values:
        def opened(window: Window) -> Values:
            window.open()
            found = work()
            window.close()
            return found

        found = in_child(opened)
        if failed := found.get("failed"):
            raise Failed(failed)
        return found

    found = in_window(lambda: _write(run, ranks, tensors))
    as_before = in_window(lambda: {"secs": _resume(run, ranks, ranks, tensors)})
    by_half = in_window(lambda: {"secs": _resume(run, ranks, ranks // 2, tensors)})
    found |= {"resume": as_before["secs"], "resume peak": as_before["peak"]}
    return found | {"resume by half": by_half["secs"], "resume by half peak": by_half["peak"]}


def measure(setting: Setting) -> Iterator[Section]:
    ranks, tensors = (16, 10) if setting.quick else (RANKS, TENSORS)
    count = 3 if setting.quick else CHECKPOINTS
    section = Section(f"A simulation of {ranks:,} ranks on one machine", header=("what", "measured"))
    section.notes = [
        f"Simulated: {3 * tensors} tensors a rank ({tensors} parameters and their moments, each cut into {ranks:,} pieces of "
        f"{_BYTES} bytes) and {tensors + len(_PLAIN)} small leaves that all have in common, so this is the cost of names, "
        "digests and files, not of data. A rank's part would be written on its own node, at the same time as the others'; "
        "here one process writes one after the other. No rank ran."
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
                "a rank that resumes has read its leaves",
                f"{found['resume']:.2f} s, {found['resume peak'] / 1e6:.0f} MB of memory",
            ),
            (
                f"one of {ranks // 2:,} ranks that resume, for which tensors are cut anew",
                f"{found['resume by half']:.2f} s, {found['resume by half peak'] / 1e6:.0f} MB of memory",
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
