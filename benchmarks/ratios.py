"""How small does real AdamW state get, without loss? Perdure beside zstd as DCP uses it and ZipNN, on the same tensors."""

import copy
import importlib
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import torch
import zstandard
from torch import Tensor

from benchmarks import state
from benchmarks.measure import Failed, Values, Window, in_child, scratch
from benchmarks.ours import Written, write
from benchmarks.report import Section, Setting, Target
from benchmarks.state import Tracked
from perdure.training.run_dir import CheckpointName

FIRST = CheckpointName(1, 1)
_SMALL = 1 << 10
"""Elements below which ZipNN is not asked: it refuses scalars."""


def fp32(paths: list[Path], setting: Setting) -> Tracked:
    """Master weights and both moments: 12 bytes a parameter."""
    return state.build(setting.shape, paths)


def bf16(paths: list[Path], setting: Setting) -> Tracked:
    """Weights alone, as bf16: 2 bytes a parameter."""
    return {"model": state.build(setting.shape, paths)["model"].bfloat16()}


def mixed(paths: list[Path], setting: Setting) -> Tracked:
    """fp32 masters, both moments, and the bf16 copy that trains: 14 bytes a parameter."""
    tracked = state.build(setting.shape, paths)
    return {"model": copy.deepcopy(tracked["model"]).bfloat16(), "master": tracked["model"], "optimizer": tracked["optimizer"]}


STATES: dict[str, tuple[Callable[[list[Path], Setting], Tracked], float]] = {
    "fp32 weights and moments, 12 bytes a parameter": (fp32, 1.20),
    "bf16 weights": (bf16, 1.48),
    "mixed precision with the bf16 copy, 14 bytes a parameter": (mixed, 1.38),
}
"""What is compressed -> how it is made, and the target."""


def _all_tensors(tracked: Tracked) -> list[Tensor]:
    found = [value for name in ("model", "master") if name in tracked for value in tracked[name].state_dict().values()]
    if "optimizer" in tracked:
        found += [value for one in tracked["optimizer"].state_dict()["state"].values() for value in one.values()]
    return [value.detach() for value in found]


def _zstd(tensors: list[Tensor]) -> int:
    codec = zstandard.ZstdCompressor()
    raw = (value.contiguous().reshape(-1).view(torch.uint8).numpy() for value in tensors)
    return sum(len(codec.compress(value.data)) for value in raw)


def _zipnn(tensors: list[Tensor]) -> int:
    api: Any = importlib.import_module("zipnn")  # Any: an optional package
    return sum(
        value.nbytes if value.numel() < _SMALL else len(api.ZipNN(input_format="torch").compress(value.clone()))
        for value in tensors
    )


def _ratio(raw: int, size: Callable[[], int]) -> Values:
    return in_child(lambda _: {"ratio": raw / size()})


def _told(figures: Values) -> str:
    return f"{figures['ratio']:.3f}" if "ratio" in figures else f"not measured: {figures['failed']}"


def measure(setting: Setting) -> Iterator[Section]:
    paths = train(setting, lambda: state.tiles(setting.shape, 1))
    section = Section("Lossless ratios", header=("state", "zstd, as DCP", "ZipNN", "Perdure auto", "Perdure small", "first"))
    section.notes = [f"One tile after {setting.shape.steps} steps; raw bytes of the state over stored bytes, index included."]
    section.data = {}
    for what, (make, target) in STATES.items():
        tracked = make(paths, setting)
        tensors = _all_tensors(tracked)
        raw = sum(value.nbytes for value in tensors)
        found = {
            "zstd": _ratio(raw, lambda tensors=tensors: _zstd(tensors)),  # type: ignore[misc]  # a default binds the loop's value
            "ZipNN": _ratio(raw, lambda tensors=tensors: _zipnn(tensors)),  # type: ignore[misc]  # as above
        }
        for encoding in ("auto", "small"):
            with scratch(setting.folder, "ratio") as folder:
                found[encoding] = in_child(lambda _, e=encoding, t=tracked, f=folder: _ours(f, t, e))  # type: ignore[misc]  # as above
        section.rows.append((what, *map(_told, found.values()), _first(found)))
        section.data[what] = {"raw_bytes": raw, **found}
        if (ratio := found["auto"].get("ratio")) is not None:
            section.targets.append(Target(f"ratio, {what}", f"{ratio:.3f}", f"at least {target:.2f}", ratio >= target))
        yield section


def _ours(folder: Path, tracked: Tracked, encoding: str) -> Values:
    written: Written = write(folder, FIRST, tracked, encoding)
    return {"ratio": written.raw / written.stored, "stored_bytes": written.stored}


def _first(found: dict[str, Values]) -> str:
    best = max(found, key=lambda name: found[name].get("ratio", 0.0))
    return "Perdure" if best in ("auto", "small") else f"{best}: **Perdure is not first**"


def train(setting: Setting, work: Callable[[], list[Path]]) -> list[Path]:
    """Paths of trained states, made in a process of their own where they are not cached."""

    def child(_: Window) -> Values:
        return {"paths": [str(path) for path in work()]}

    found = in_child(child, limit=3600)
    if "failed" in found:
        raise Failed(f"no state to measure with: {found['failed']}")
    return [Path(path) for path in found["paths"]]
