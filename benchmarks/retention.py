"""What does retention cost against the number of checkpoints? CPU seconds from 10 to 10,000, every policy at once: the plan
alone, and with all that a prune reads from the disk for it."""

import itertools
import statistics
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import msgspec

from benchmarks.measure import scratch
from benchmarks.plots import pyplot, svg
from benchmarks.report import Section, Setting, Target
from perdure.training.checkpoint import manifest as manifests
from perdure.training.checkpoint import prune, retention
from perdure.training.checkpoint.catalog import Listed
from perdure.training.checkpoint.facts import LOCAL, Fact
from perdure.training.checkpoint.lineage import LaunchRecord, create_launch
from perdure.training.checkpoint.manifest import Base, FileRecord, Manifest
from perdure.training.checkpoint.pins import Pins
from perdure.training.retention_settings import RetentionSection
from perdure.training.run_dir import CheckpointName, RunDir, rank_index, rank_pack

COUNTS = (10, 100, 1000, 10_000)
QUICK = 2
"""So many of the counts in a smoke run."""
LIMIT_SECS = 2.0
SETTINGS = RetentionSection(
    keep_last=5, keep_every=1000, keep_hourly=24, keep_daily=7, keep_weekly=4, keep_within="2h", keep_best=3, best="accuracy"
)
_FULL_EVERY, _PIN_EVERY, _MINUTE = 10, 500, 60.0
Points = dict[int, dict[str, float]]


def history(count: int) -> list[Listed]:
    """One checkpoint a minute, of which every tenth is a full and the others its increments; a measured value falls."""
    return [_listed(step) for step in range(1, count + 1)]


def _listed(step: int) -> Listed:
    full = step // _FULL_EVERY * _FULL_EVERY
    base = CheckpointName(full, 1) if full and full != step else None
    files = tuple(FileRecord(name=name, bytes=1, digest="") for name in (rank_pack(0), rank_index(0)))
    manifest = Manifest(
        format="perdure-checkpoint", version=2, run="bench", step=step, token=1, created=step * _MINUTE, state_digest="",
        raw_bytes=2, stored_bytes=2, leaves=1, files=files, world={}, data={}, environment={}, code={}, config={},
        loss={"smoothed": 1 / step, "last": 1 / step, "least": 1 / step, "count": step}, exact=True, exact_reasons=(),
        milestone="milestone" if step % _PIN_EVERY == 0 else msgspec.UNSET, metrics={"accuracy": 1 / step},
        base=Base(name=str(base), digest="") if base else None,
    )  # fmt: skip
    name = CheckpointName(step, 1)
    return Listed(name=name, in_lineage=True, trust="verified", manifest=manifest, problem="", bytes_on_disk=2, base=base)


def _on_disk(rows: list[Listed], folder: Path) -> RunDir:
    """The same history as a run directory; packs and indexes are of one byte, as nobody opens them."""
    run = RunDir(folder)
    run.checkpoints.mkdir()
    create_launch(run, LaunchRecord(token=1, resumed_from=None, created=0.0, host="bench", pid=1, run="bench", owner="bench"))
    for one in rows:
        assert one.manifest is not None
        run.checkpoint(one.name).mkdir()
        for record in one.manifest.files:
            (run.checkpoint(one.name) / record.name).write_bytes(b"x")
        run.manifest(one.name).write_bytes(manifests.seal(one.manifest))
        run.fact(one.name, LOCAL).write_bytes(msgspec.json.encode(Fact(copy=LOCAL, checked_at=1.0, result="good")))
    return run


def _seconds(make: Callable[[], retention.Plan], rounds: int) -> tuple[float, int]:
    """Median CPU time of a plan, and how many checkpoints it keeps."""
    times, kept = [], 0
    for _ in range(rounds):
        began = time.process_time()
        kept = len(make().keep)
        times.append(time.process_time() - began)
    return statistics.median(times), kept


def _measured(rows: list[Listed], setting: Setting) -> dict[str, float]:
    pins = Pins(names={one.name: ("milestone",) for one in rows[_PIN_EVERY - 1 :: _PIN_EVERY]})
    plan, kept = _seconds(lambda: retention.plan(rows, SETTINGS, False, pins=pins, roll_up=True), setting.rounds)
    with scratch(setting.folder, "retention") as folder:
        run = _on_disk(rows, folder)

        def survey() -> retention.Plan:
            return prune.survey(run, SETTINGS, stored=False, is_idle=lambda: True, may_roll_up=True).plan

        looked, kept_there = _seconds(survey, setting.rounds)
    assert kept == kept_there
    return {"plan": plan, "survey": looked, "kept": kept}


def _plot(points: Points) -> str:
    figure, axis = pyplot().subplots(figsize=(7, 4), layout="constrained")
    for key, label in (("survey", "read from the disk and planned"), ("plan", "planned")):
        axis.plot(list(points), [point[key] for point in points.values()], marker="o", label=label)
    axis.set(xlabel="checkpoints", ylabel="CPU seconds", xscale="log", yscale="log", title="what to keep")
    axis.grid(visible=True, which="both", alpha=0.3)
    axis.legend()
    return svg(figure)


def measure(setting: Setting) -> Iterator[Section]:
    section = Section("Retention", header=("checkpoints", "plan, CPU s", "us each", "read and plan, CPU s", "us each", "kept"))
    section.notes = [f"A checkpoint a minute, one full in {_FULL_EVERY}, a milestone in {_PIN_EVERY}; {SETTINGS.said()}."]
    points: Points = {}
    for count in itertools.islice(COUNTS, QUICK if setting.quick else None):
        points[count] = found = _measured(history(count), setting)
        cells = [cell for key in ("plan", "survey") for cell in (f"{found[key]:.4f}", f"{found[key] / count * 1e6:.1f}")]
        section.rows.append((f"{count:,}", *cells, f"{found['kept']:,.0f}"))
    section.data = {str(count): found for count, found in points.items()}
    section.plots = {"retention": _plot(points)}
    title, seconds = f"{count:,} checkpoints planned", found["plan"]
    section.targets = [Target(title, f"{seconds:.3f} s", f"under {LIMIT_SECS:.0f} s", seconds < LIMIT_SECS)]
    yield section
