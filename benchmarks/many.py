"""How long do verbs take in a run of 2,000 checkpoints? Wall time of the whole command, from the shell to its exit."""

import os
import statistics
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import msgspec

from benchmarks.measure import Failed, Values, Window, in_child, scratch
from benchmarks.ours import write
from benchmarks.report import Section, Setting, Target
from benchmarks.saves import loaded
from benchmarks.state import Tracked
from perdure.training.checkpoint import manifest as manifests
from perdure.training.checkpoint.facts import Fact, write_fact
from perdure.training.checkpoint.run_info import RunInfo
from perdure.training.run_dir import CheckpointName, RunDir

COUNT = 2000
LIMIT_SECS = 2.0
_VERBS = (("ls",), ("status",), ("verify", "--manifests"))


def _fill(run: RunDir, tracked: Tracked, count: int) -> None:
    first = CheckpointName(1, 1)

    def one(_: Window) -> Values:
        return vars(write(run.root, first, tracked, "auto"))

    if "failed" in (found := in_child(one)):
        raise Failed(found["failed"])
    repeat(run, first, count)


def repeat(run: RunDir, first: CheckpointName, count: int) -> None:
    """A run of so many checkpoints: the files of the first under every name, each with a manifest of its own."""
    manifest = manifests.read(run.checkpoint(first))
    info = RunInfo(id=manifest.run, name="bench", created=time.time(), steps=count, chunk=1)
    run.run_json.write_bytes(msgspec.json.encode(info))
    for step in range(1, count + 1):
        name = CheckpointName(step, 1)
        run.checkpoint(name).mkdir(exist_ok=True)
        for record in manifest.files if name != first else ():
            os.link(run.checkpoint(first) / record.name, run.checkpoint(name) / record.name)
        run.manifest(name).write_bytes(manifests.seal(msgspec.structs.replace(manifest, step=step)))
        write_fact(run, name, Fact(copy="local", checked_at=time.time(), result="good"))


def command_secs(root: Path, verb: tuple[str, ...]) -> float:
    start = time.perf_counter()
    command = [sys.executable, "-m", "perdure.cli.main", verb[0], str(root), *verb[1:]]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    if done.returncode:
        raise Failed(f"perdure {' '.join(verb)}: {(done.stderr or done.stdout)[-300:]}")
    return time.perf_counter() - start


def measure(setting: Setting) -> Iterator[Section]:
    tracked, count = loaded(setting, 0.1), 20 if setting.quick else COUNT
    section = Section(f"A run of {count:,} checkpoints", header=("command", "s"), data={})
    section.notes = [f"Medians of {setting.rounds} calls, Python's start included; manifests are in the page cache."]
    with scratch(setting.folder, "many") as folder:
        _fill(RunDir(folder), tracked, count)
        for verb in _VERBS:
            told = f"perdure {' '.join(verb)}"
            times = section.data[told] = [command_secs(folder, verb) for _ in range(setting.rounds)]
            seconds = statistics.median(times)
            section.rows.append((told, f"{seconds:.2f}"))
            question = f"{told}, {count:,} checkpoints"
            section.targets.append(Target(question, f"{seconds:.2f} s", f"under {LIMIT_SECS:.0f} s", seconds < LIMIT_SECS))
            yield section
