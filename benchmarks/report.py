"""What a question found, as Markdown and JSON. Results are written anew after every row: a run cut short keeps what it has."""

import importlib.metadata
import json
import os
import platform
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Protocol

from benchmarks.state import FULL, TINY, Shape

RESULTS = Path(__file__).parent / "results"
PACKAGES = ("torch", "safetensors", "torch-checkpointing", "deepspeed", "zipnn", "zstandard", "blake3", "xxhash", "numpy")

_DATA = (
    "Data: real AdamW state. A byte-level GPT ({shape.layers} layers, width {shape.width}) learned Python's documentation and "
    "standard library for {shape.steps} steps of AdamW (6e-4, 0.9, 0.95); a tile is its weights and moments every "
    "{shape.every} steps after that. A state of a given size is that many different tiles side by side in one model with one "
    "optimizer. No "
    "gradients are held."
)


@dataclass(frozen=True)
class Target:
    """One figure of the issue's and what was measured beside it."""

    question: str
    shown: str
    target: str
    met: bool | None
    """None for what is only to be told."""


@dataclass
class Section:
    """What one question says."""

    title: str
    notes: list[str] = field(default_factory=list)
    header: tuple[str, ...] = ()
    rows: list[tuple[str, ...]] = field(default_factory=list)
    targets: list[Target] = field(default_factory=list)
    data: Any = None  # Any: JSON values, all that was measured
    plots: dict[str, str] = field(default_factory=dict)
    """Title -> SVG."""


@dataclass(frozen=True)
class Setting:
    """How large, how often and where. `folder` lies on the disk that is measured."""

    folder: Path
    quick: bool = False

    @property
    def shape(self) -> Shape:
        return TINY if self.quick else FULL

    @property
    def rounds(self) -> int:
        return 1 if self.quick else 3

    def bytes_of(self, gigabytes: float) -> int:
        return int(gigabytes * (1e6 if self.quick else 1e9))


class Question(Protocol):
    """A module of benchmarks: it yields its section again whenever it knows more."""

    def __call__(self, setting: Setting) -> Iterator[Section]: ...


def machine() -> str:
    """CPU model, cores and memory of this machine."""
    lines = Path("/proc/cpuinfo").read_text().splitlines()
    model = next((line.partition(":")[2].strip() for line in lines if line.startswith("model name")), platform.machine())
    memory = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES") / 2**30
    return f"{os.cpu_count()} x {model}, {memory:.0f} GiB"


def disk(folder: Path) -> str:
    """Device and file system that hold a folder."""
    mounts = [line.split() for line in Path("/proc/mounts").read_text().splitlines()]
    above = [mount for mount in mounts if folder.resolve().is_relative_to(mount[1])]
    device, _, kind, *_ = max(above, key=lambda mount: len(mount[1]))
    return f"{kind} on {device}"


def versions() -> dict[str, str]:
    """Of everything measured; what is not installed says so."""
    found = {}
    for package in PACKAGES:
        try:
            found[package] = importlib.metadata.version(package)
        except importlib.metadata.PackageNotFoundError:
            found[package] = "not installed"
    return found


class Report:
    """One Markdown page, one JSON file and the plots, named after the hardware and the day."""

    def __init__(self, setting: Setting, results: Path, what: str, *, title: str, engine: bool) -> None:
        day = time.strftime("%Y-%m-%d")
        self._results, self._name = results, f"{what}_{os.cpu_count()}-cores_{day}"
        self._title, self._data = title, _DATA.format(shape=setting.shape) if engine else ""
        self._started, self._sections = time.monotonic(), dict[str, Section]()
        self._about: dict[str, Any] = {  # Any: JSON values
            "day": day,
            "machine": machine(),
            "disk": disk(setting.folder),
            "kernel": platform.release(),
            "python": platform.python_version(),
            "versions": versions(),
            "load at start": os.getloadavg(),
            "quick": setting.quick,
            "seconds": 0.0,
        }

    def keep(self, question: str, section: Section) -> None:
        """Take a section over the one before of the same question and write everything."""
        self._sections[question] = section
        self._about["load at end"] = os.getloadavg()
        self._about["seconds"] = round(time.monotonic() - self._started, 1)
        self._results.mkdir(parents=True, exist_ok=True)
        for title, svg in section.plots.items():
            (self._results / f"{self._name}_{title}.svg").write_text(svg)
        found = {name: {"title": part.title, "data": part.data} for name, part in self._sections.items()}
        goals = [vars(target) for part in self._sections.values() for target in part.targets]
        text = json.dumps({"about": self._about, "targets": goals, "questions": found}, indent=1)
        (self._results / f"{self._name}.json").write_text(text + "\n")
        (self._results / f"{self._name}.md").write_text(self.markdown())

    def markdown(self) -> str:
        about, sections = self._about, self._sections.values()
        load = ", ".join(f"{value:.2f}" for value in about["load at start"])
        lines = [
            f"# {self._title}, measured {about['day']}",
            f"{about['machine']}; {about['disk']}; Linux {about['kernel']}; Python {about['python']}; load at start {load}; "
            f"{about['seconds']:.0f} s in all.",
            ", ".join(f"{name} {version}" for name, version in about["versions"].items()) + ".",
        ]
        lines += [self._data] if self._data else []
        targets = [target for section in sections for target in section.targets]
        if targets:
            lines += ["## Targets", _table(("question", "measured", "target", "met"), [_target_row(one) for one in targets])]
        for section in sections:
            lines += [f"## {section.title}", *section.notes]
            lines += [_table(section.header, section.rows)] if section.header else []
            lines += [f"![{title}]({self._name}_{title}.svg)" for title in section.plots]
        return "\n\n".join(lines) + "\n"


def _target_row(target: Target) -> tuple[str, ...]:
    return target.question, target.shown, target.target, {None: "-", True: "yes", False: "**no**"}[target.met]


def _table(header: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    lines = [header, ["---"] * len(header), *rows]
    return "\n".join("| " + " | ".join(line) + " |" for line in lines)
