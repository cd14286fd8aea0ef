"""What does a save and a restore cost with 1, 2 and 4 ranks, and what does a rank read when their number changes? Beside
torch.distributed.checkpoint, of FSDP2 state, over gloo on this machine."""

import contextlib
import io
import json
import os
import signal
import statistics
import subprocess
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path

from benchmarks import state
from benchmarks.measure import Failed, Values, Window, in_child, scratch
from benchmarks.rank import RUN
from benchmarks.report import Section, Setting

SIZE = 0.4
WORLDS = (1, 2, 4)
_LIMIT = 600.0
_ROUNDS = 2
"""Of each way, beside a first one that does not count: all takes about five minutes on two cores."""


def launch(setting: Setting, folder: Path, world: int, tiles: Sequence[str], others: dict[str, str]) -> Values:
    """What so many ranks found; `others` are folders that another number of ranks saved, by row."""
    folder.mkdir()
    task, answer = folder / "task.json", folder / "answer.json"
    asked = {"world": world, "quick": setting.quick, "tiles": tiles, "rounds": min(setting.rounds, _ROUNDS), "others": others}
    task.write_text(json.dumps({**asked, "folder": str(folder), "answer": str(answer)}))
    log = folder / "log"
    with open(log, "wb") as out:
        processes = [
            subprocess.Popen([sys.executable, "-m", "benchmarks.rank", str(task), str(rank)], stdout=out, stderr=out)
            for rank in range(world)
        ]
        try:
            for process in processes:
                process.wait(_LIMIT)
        finally:
            for process in processes:
                with contextlib.suppress(ProcessLookupError):
                    os.kill(process.pid, signal.SIGKILL)
                process.wait()
    if not answer.exists():
        raise Failed(f"{world} ranks: {log.read_text(errors='replace')[-400:]}")
    found: Values = json.loads(answer.read_text())
    return found


def tiles(setting: Setting) -> list[str]:
    count = state.needed(setting.shape, setting.bytes_of(SIZE))

    def train(_: Window) -> Values:
        return {"paths": [str(path) for path in state.tiles(setting.shape, count)]}

    found = in_child(train, limit=3600)
    if "failed" in found:
        raise Failed(f"no state to measure with: {found['failed']}")
    return list(found["paths"])


def _saved(found: Values) -> dict[str, str]:
    return {name: rows["saves"][-1]["folder"] for name, rows in found["rows"].items()}


def _median(found: Values, name: str, what: str, key: str) -> float:
    return float(statistics.median(one[key] for one in found["rows"][name][what]))


def measure(setting: Setting) -> Iterator[Section]:
    paths, found = tiles(setting), dict[int, Values]()
    with scratch(setting.folder, "ranks") as folder:
        for world in WORLDS:
            before = _saved(found[world // 2]) if world > 2 else {}
            found[world] = launch(setting, folder / str(world), world, paths, before)
            yield _section(found, {})
        back = launch(setting, folder / "back", 2, paths, _saved(found[4]))
    yield _section(found, {"2 to 4": found[4], "4 to 2": back})


def _section(found: dict[int, Values], resharded: dict[str, Values]) -> Section:
    first = next(iter(found.values()))
    section = Section("Ranks", header=("ranks", "row", "stall s", "durable s", "MB written", "restore s", "MB read by a rank"))
    section.notes = [
        f"{first['bytes'] / 1e9:.2f} GB of AdamW state in all, {first['tensors']} tensors, cut by fully_shard; gloo on one "
        "machine, one thread a rank. Stall: until the last rank may train on; durable: until all is committed and synced. "
        "Perdure in a run: all ranks copy into their slots, and one saver of two threads digests, encodes and writes what they "
        "have; its restore compares all digests afterwards, as a resume does. DCP neither digests nor encodes. Medians of "
        f"{len(first['rows'][RUN]['loads'])} after a first save; files are in the page cache; read is what a process asked of "
        "files. Rows like 2 to 4: so many ranks saved, so many restore, each from what it needs."
    ]
    for world, one in found.items():
        for name in one["rows"]:
            cells = [_median(one, name, "saves", key) for key in ("stall", "durable")]
            read = max(one["rows"][name]["loads"][-1]["read"])
            written = f"{_median(one, name, 'saves', 'bytes') / 1e6:.0f}"
            restored = f"{_median(one, name, 'loads', 'restore'):.2f}"
            section.rows.append((str(world), name, *(f"{cell:.2f}" for cell in cells), written, restored, f"{read / 1e6:.0f}"))
    for change, one in resharded.items():
        for name, rows in one["rows"].items():
            [load] = rows["others"]
            read = ", ".join(f"{number / 1e6:.0f}" for number in load["read"])
            section.rows.append((change, name, "-", "-", "-", f"{load['restore']:.2f}", read))
    section.data = {"worlds": found, "resharded": resharded}
    section.plots = {"cost-against-ranks": _plot(found)}
    return section


def _plot(found: dict[int, Values]) -> str:
    import matplotlib

    matplotlib.use("svg")
    matplotlib.rcParams["svg.hashsalt"] = "perdure"
    from matplotlib import pyplot

    figure, axes = pyplot.subplots(1, 3, figsize=(14, 4), layout="constrained")
    panels = (
        ("saves", "stall", "stall of the training step"),
        ("saves", "durable", "time to durable"),
        ("loads", "restore", "restore"),
    )
    for axis, (what, key, title) in zip(axes, panels, strict=True):
        for name in next(iter(found.values()))["rows"]:
            axis.plot(list(found), [_median(one, name, what, key) for one in found.values()], marker="o", label=name)
        axis.set(
            title=title, xlabel="ranks on one machine, the same state", ylabel="seconds", xticks=list(found), ylim=(0, None)
        )
        axis.grid(visible=True, alpha=0.3)
    axes[0].legend()
    out = io.StringIO()
    figure.savefig(out, format="svg", metadata={"Date": None})
    pyplot.close(figure)
    return out.getvalue()
