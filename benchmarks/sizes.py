"""How does the cost of a save grow with the state? Stall and time to durable from 0.1 to 4 GB, as a plotted line."""

import statistics
from collections.abc import Iterator

from benchmarks import state
from benchmarks.measure import Values, scratch
from benchmarks.ours import DEFAULT
from benchmarks.plots import pyplot, svg
from benchmarks.report import Section, Setting
from benchmarks.saves import BASELINE, BEST_RAW, LARGE, interleaved, loaded, rows, save_once

SIZES = (0.1, 0.4, 1.5, 4.0)
COMPARED = (BASELINE, "DCP async, thread", BEST_RAW, DEFAULT)
Points = dict[str, list[Values]]


def _plot(points: Points) -> str:
    figure, axes = pyplot().subplots(1, 2, figsize=(11, 4), layout="constrained")
    for axis, key, title in zip(axes, ("stall", "durable"), ("stall of the training step", "time to durable"), strict=True):
        for name, found in points.items():
            good = [point for point in found if key in point]
            axis.plot([point["GB"] for point in good], [point[key] for point in good], marker="o", label=name)
        axis.set(title=title, xlabel="GB of AdamW state", ylabel="seconds", xscale="log", yscale="log")
        axis.grid(visible=True, which="both", alpha=0.3)
    axes[0].legend()
    return svg(figure)


def _section(points: Points) -> Section:
    section = Section("Cost against size", header=("row", "GB", "stall s", "durable s", "durable GB/s"), data=points)
    section.notes = ["Medians of three rounds up to 1 GB, one above. The bases are those of the tables: state, process, disk."]
    for name, found in points.items():
        for point in found:
            if "failed" in point:
                section.rows.append((name, f"{point['GB']:.2f}", "-", "-", f"not measured: {point['failed']}"))
            else:
                rate = point["GB"] / point["durable"]
                cells = (f"{point['GB']:.2f}", f"{point['stall']:.3f}", f"{point['durable']:.2f}", f"{rate:.2f}")
                section.rows.append((name, *cells))
    section.plots = {"cost-against-size": _plot(points)}
    return section


def measure(setting: Setting) -> Iterator[Section]:
    points: Points = {name: [] for name in COMPARED}
    for gigabytes in SIZES:
        tracked, tries = loaded(setting, gigabytes), {name: list[Values]() for name in COMPARED}
        for name in interleaved(list(COMPARED), 1 if gigabytes >= LARGE else setting.rounds):
            with scratch(setting.folder, "save") as folder:
                tries[name].append(save_once(rows()[name], tracked, folder))
        for name, found in tries.items():
            failed = next((one for one in found if "failed" in one), None)
            figures = failed or {key: statistics.median(one[key] for one in found) for key in found[0]}
            points[name].append({**figures, "GB": state.nbytes(tracked) / 1e9})
        del tracked
        yield _section(points)
