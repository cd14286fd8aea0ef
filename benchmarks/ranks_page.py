"""What the question `ranks` found about one engine, as a table, a line for each row against the number of ranks, and JSON."""

import statistics
from collections.abc import Sequence
from typing import Any

from benchmarks.measure import Values
from benchmarks.plots import pyplot, svg
from benchmarks.rank_ways import RUN, WRITER
from benchmarks.report import Section

TITLES = {"ddp": "DDP", "fsdp2": "FSDP2", "zero1": "ZeRO 1", "zero2": "ZeRO 2", "zero3": "ZeRO 3"}
HEADER = (
    *("ranks", "state", "row", "stall s", "durable s", "MB written", "restore s", "MB read, by rank"),
    "where it beats Perdure, in a run",
)
_WORDS = {"stall": "stall", "durable": "time to durable", "bytes": "size", "restore": "restore", "most": "bytes read"}
_NOTE = (
    "gloo on one machine, one thread a rank; {rounds} interleaved rounds after a first save that does not count: medians, and "
    "how many times Perdure's. Stall: until the last rank may train on; durable: until all is committed and synced (of what "
    "does not sync, by us). Perdure in a run: all ranks copy into their slots, and one saver of two threads digests, encodes "
    "and writes what they have; its restore compares all digests afterwards, as a resume does. Nobody else digests or encodes. "
    "Restores are into the tensors of a rank, and their files are in the page cache; what came back was compared with what was "
    "saved. MB read: what each rank asked of files (rchar of /proc/self/io, into which what gloo receives does not count). "
    "Rows like 2 to 4: so many ranks saved, so many restore, each from what it needs."
)
_ZERO_NOTE = (
    "bf16 weights with real fp32 masters and moments of torch's AdamW. The universal load is that of what "
    "`engine.save_checkpoint` saved: rank 0 runs DeepSpeed's script with two workers, then all load; of the script, Python's "
    "start and imports ({aside:.0f} s in the median) are left out of the seconds and the bytes. Without the script DeepSpeed "
    "refuses a checkpoint of another number of ranks. ZeRO 2 saves and loads the same files as ZeRO 1."
)


def section(kinds: Sequence[str], found: dict[int, Values], resharded: dict[str, Values]) -> Section:
    named = " and ".join(TITLES[kind] for kind in kinds)
    told = Section(f"Ranks: {named}", header=HEADER, data={"worlds": found, "resharded": resharded})
    first = next(iter(found.values()))
    rounds = len(first[kinds[0]]["rows"][RUN]["loads"])
    sizes = ", ".join(f"{TITLES[kind]} {first[kind]['bytes'] / 1e9:.2f} GB" for kind in kinds)
    told.notes = [f"Real AdamW state, as one process has it: {sizes}; {_NOTE.format(rounds=rounds)}", *_zero_note(kinds, first)]
    groups = [(str(world), kind, _figures(one[kind]["rows"], "loads")) for world, one in found.items() for kind in kinds]
    groups += [(change, kind, _figures(one[kind]["rows"], "others")) for change, one in resharded.items() for kind in kinds]
    for ranks, kind, rows in groups:
        told.rows += [(ranks, TITLES[kind], *_cells(name, one, rows[RUN])) for name, one in rows.items()]
    marks = [row[-1].startswith("**") for row in told.rows if not row[2].startswith(RUN) and row[2] != WRITER]
    told.notes.append(f"Of {len(marks)} rows of others, {sum(marks)} beat Perdure somewhere; the last column says in what.")
    told.plots = {f"against-ranks-{'-'.join(kinds)}": _plot(kinds, found)}
    return told


def _zero_note(kinds: Sequence[str], first: Values) -> list[str]:
    if not kinds[0].startswith("zero"):
        return []
    started = [one["aside"] for kind in kinds for rows in first[kind]["rows"].values() for one in rows["loads"] if one["aside"]]
    return [_ZERO_NOTE.format(aside=statistics.median(started))]


def _figures(rows: Values, loads: str) -> dict[str, Values]:
    """Medians of each row; of a restore from other ranks (`others`) there is no save."""
    found = {}
    for name, one in rows.items():
        if not one[loads]:
            continue
        figures: Values = {"restore": statistics.median(load["restore"] for load in one[loads])}
        figures["read"] = [statistics.median(by_rank) for by_rank in zip(*(load["read"] for load in one[loads]), strict=True)]
        figures["most"] = max(figures["read"])
        if loads == "loads" and one["saves"]:
            figures |= {key: statistics.median(save[key] for save in one["saves"]) for key in ("stall", "durable", "bytes")}
        found[name] = figures
    return found


def _cells(name: str, figures: Values, ours: Values) -> tuple[str, ...]:
    def cell(key: str, form: str, unit: float = 1.0) -> str:
        if key not in figures:
            return "-"
        text = format(figures[key] / unit, form)
        return text if name == RUN else f"{text} ({figures[key] / ours[key]:.2g} x)"

    read = ", ".join(f"{number / 1e6:.0f}" for number in figures["read"])
    seconds = (cell("stall", ".3f"), cell("durable", ".2f"), cell("bytes", ".0f", 1e6), cell("restore", ".2f"))
    return name, *seconds, read, _ahead(name, figures, ours)


def _ahead(name: str, figures: Values, ours: Values) -> str:
    if name == RUN:
        return "-"
    better = ", ".join(word for key, word in _WORDS.items() if key in figures and key in ours and figures[key] < ours[key])
    if name == WRITER:
        return better or "nothing"
    return f"**Perdure is not first** in {better}" if better else "nothing: Perdure is first in all"


def _plot(kinds: Sequence[str], found: dict[int, Values]) -> str:
    panels = (("stall", "stall of the training step"), ("durable", "time to durable"), ("restore", "restore"))
    figure, axes = pyplot().subplots(len(kinds), 3, figsize=(14, 4 * len(kinds)), layout="constrained", squeeze=False)
    for line, kind in zip(axes, kinds, strict=True):
        rows = {world: _figures(one[kind]["rows"], "loads") for world, one in found.items()}
        for axis, (key, title) in zip(line, panels, strict=True):
            for name in next(iter(rows.values())):
                points: list[tuple[int, Any]] = [(world, one[name][key]) for world, one in rows.items() if key in one[name]]
                if points:
                    axis.plot(*zip(*points, strict=True), marker="o", label=name)
            told = {"title": f"{TITLES[kind]}: {title}", "xlabel": "ranks on one machine, the same state", "ylabel": "seconds"}
            axis.set(**told, xticks=list(found), ylim=(0, None))
            axis.grid(visible=True, alpha=0.3)
        line[2].legend()
    return svg(figure)
