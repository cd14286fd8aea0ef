"""What does planning retention cost against the number of checkpoints? CPU seconds from 10 to 10,000, every policy at once."""

import statistics
import time
from collections.abc import Iterator

from benchmarks.report import Section, Setting, Target
from perdure.training.checkpoint import retention
from perdure.training.checkpoint.catalog import Listed
from perdure.training.checkpoint.manifest import Base, Manifest
from perdure.training.checkpoint.pins import Pins
from perdure.training.retention_settings import RetentionSection
from perdure.training.run_dir import CheckpointName

COUNTS = (10, 100, 1000, 10_000)
LIMIT_SECS = 2.0
SETTINGS = RetentionSection(
    keep_last=5, keep_every=1000, keep_hourly=24, keep_daily=7, keep_weekly=4, keep_within="2h", keep_best=3
)
_FULL_EVERY, _PIN_EVERY, _MINUTE = 10, 500, 60.0


def history(count: int) -> list[Listed]:
    """One checkpoint a minute, of which every tenth is a full and the others its increments; the loss falls."""
    return [_listed(step) for step in range(1, count + 1)]


def _listed(step: int) -> Listed:
    full = step // _FULL_EVERY * _FULL_EVERY
    base = CheckpointName(full, 1) if full and full != step else None
    manifest = Manifest(
        format="perdure-checkpoint", version=2, run="bench", step=step, token=1, created=step * _MINUTE, state_digest="",
        raw_bytes=1, stored_bytes=1, leaves=1, files=(), world={}, data={}, environment={}, code={}, config={},
        loss={"smoothed": 1 / step, "last": 1 / step, "least": 1 / step, "count": step}, exact=True, exact_reasons=(),
        base=Base(name=str(base), digest="") if base else None,
    )  # fmt: skip
    name = CheckpointName(step, 1)
    return Listed(name=name, in_lineage=True, trust="verified", manifest=manifest, problem="", bytes_on_disk=1, base=base)


def _seconds(rows: list[Listed], rounds: int) -> tuple[float, int]:
    """Median CPU time of a plan, and how many checkpoints it keeps."""
    pins = Pins(names={one.name: ("milestone",) for one in rows[_PIN_EVERY::_PIN_EVERY]})
    times, kept = [], 0
    for _ in range(rounds):
        began = time.process_time()
        plan = retention.plan(rows, SETTINGS, False, pins=pins, roll_up=True)
        kept = len(rows) - len(plan.remove)
        times.append(time.process_time() - began)
    return statistics.median(times), kept


def measure(setting: Setting) -> Iterator[Section]:
    section = Section("Planning retention", header=("checkpoints", "CPU s", "us each", "kept"), data={})
    section.notes = [f"A checkpoint a minute, one full in {_FULL_EVERY}, a milestone in {_PIN_EVERY}; {SETTINGS.said()}."]
    for count in COUNTS:
        seconds, kept = _seconds(history(count), setting.rounds)
        section.rows.append((f"{count:,}", f"{seconds:.4f}", f"{seconds / count * 1e6:.1f}", f"{kept:,}"))
        section.data[str(count)] = {"cpu": seconds, "kept": kept}
    target = Target(
        f"{COUNTS[-1]:,} checkpoints planned", f"{seconds:.3f} s", f"under {LIMIT_SECS:.0f} s", seconds < LIMIT_SECS
    )
    section.targets = [target]
    yield section
