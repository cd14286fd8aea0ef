"""`perdure diff`: which leaves of two checkpoints differ, and by how much. Exit code 0: none; 1: some."""

import argparse
import math
from pathlib import Path
from typing import TYPE_CHECKING, Any

from perdure.cli import render
from perdure.cli.target import resolve
from perdure.training.checkpoint import catalog, lineage
from perdure.training.errors import CheckpointNotFound, ConfigError
from perdure.training.run_dir import MANIFEST, CheckpointName, RunDir

if TYPE_CHECKING:
    from perdure.training.checkpoint.diff import LeafDiff
    from perdure.training.checkpoint.reader import CheckpointReader

DIFFERENT = 1
"""As diff(1): 0 is equal, 1 is different."""
SHOWN, VALUES = 30, 5
"""Leaves shown without --all, and values of one plain leaf."""
_ORDER = ("added", "removed", "retyped", "changed", "values")
_NAMES = "RUN@STEP, RUN@NAME, RUN alone for its newest, or a checkpoint's folder; RUN: a run directory or run.toml"


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("a", metavar="A", help=_NAMES)
    parser.add_argument("b", metavar="B", help="the other one; @STEP or @NAME: of the same run")
    parser.add_argument("--only", metavar="GLOB", help="names to compare, e.g. 'model.*'")
    parser.add_argument("--all", action="store_true", help=f"show every leaf and value, not the {SHOWN} that differ most")


def run(args: argparse.Namespace) -> int:
    from perdure.training.checkpoint.reader import open_checkpoint

    place_a, place_b = _places(args.a, args.b)
    with open_checkpoint(place_a) as a, open_checkpoint(place_b) as b:
        found = _compare(a, b, args)
        heads = [_head(place_a, a), _head(place_b, b)]
    if args.json:
        render.print_json({"a": heads[0], "b": heads[1], "equal": not found, "leaves": [_json(one) for one in found]})
    else:
        _print(found, heads, args)
    return DIFFERENT if found else 0


def _compare(a: "CheckpointReader", b: "CheckpointReader", args: argparse.Namespace) -> "list[LeafDiff]":
    """Most changed first. Equal state digests are equal states: nothing more is read."""
    from perdure.training.checkpoint.diff import diff

    if a.manifest.state_digest == b.manifest.state_digest:
        return []
    with render.Progress("diff", 0, quiet=args.json) as progress:
        found = list(diff(a, b, only=args.only, progress=progress.at))
    return sorted(found, key=lambda one: (_ORDER.index(one.what), not one.not_finite, -one.max_abs, -one.share, one.path))


# which checkpoints


def _places(a: str, b: str) -> tuple[Path, Path]:
    base = _split(a)[0] if b.startswith("@") else ""
    return _place(a), _place(base + b)


def _split(text: str) -> tuple[str, str]:
    """Path and checkpoint; a path that exists is taken whole, whatever is in it."""
    if Path(text).exists() or "@" not in text:
        return text, ""
    path, _, wanted = text.rpartition("@")
    return path, wanted


def _place(text: str) -> Path:
    path, wanted = _split(text)
    if not wanted and (Path(path) / MANIFEST).exists():
        return Path(path).absolute()
    target = resolve(path)
    target.started()
    name = _wanted(target.run, wanted)
    return target.run.checkpoint(name)


def _wanted(run: RunDir, wanted: str) -> CheckpointName:
    if not wanted:
        names = catalog.candidates(run)
        if not names:
            raise CheckpointNotFound(f"{run.root} has no checkpoint that could be compared", "see `perdure ls`")
        return names[0]
    name = CheckpointName.parse(wanted)
    if name is None and not wanted.isdecimal():
        raise ConfigError(f"@{wanted} is neither a step nor the name of a checkpoint", "write @200, or @000000000200-0001")
    for one in lineage.lineage(run) if name is None else lineage.committed(run):
        if one == name or (name is None and one.step == int(wanted)):
            return one
    raise CheckpointNotFound(f"{run.root} has no checkpoint {wanted}", "see `perdure ls`")


# how it looks


def _head(place: Path, reader: "CheckpointReader") -> dict[str, Any]:  # Any: JSON values
    found = reader.manifest
    return {
        "path": str(place),
        "run": found.run,
        "name": str(found.name),
        "step": found.step,
        "state_digest": found.state_digest,
    }


def _number(value: float) -> float | str:
    return value if math.isfinite(value) else str(value)  # JSON has no infinity


def _json(one: "LeafDiff") -> dict[str, Any]:  # Any: JSON values
    told: dict[str, Any] = {"path": one.path, "rank": one.rank, "what": one.what, "old": one.old, "new": one.new}
    if one.what == "changed":
        told |= {
            "elements": one.elements, "differing": one.differing, "share": one.share, "max_abs": _number(one.max_abs),
            "rms": _number(one.rms), "not_finite": one.not_finite,
        }  # fmt: skip
    if one.what == "values":
        told["values"] = [{"key": value.key, "old": value.old, "new": value.new} for value in one.values]
    return told


def _print(found: "list[LeafDiff]", heads: list[dict[str, Any]], args: argparse.Namespace) -> None:  # Any: JSON values
    names = [f"step {head['step']} of {head['run']}" for head in heads]
    if not found:
        same = "" if args.only is None else f" in what matches {args.only}"
        print(f"{names[0]} and {names[1]} are equal{same}, bit for bit")
        return
    shown = found if args.all else found[:SHOWN]
    render.table(("leaf", "what", "type", "differ", "max", "rms", "note"), [_row(one) for one in shown])
    for one in shown:
        _print_values(one, None if args.all else VALUES)
    if len(found) > len(shown):
        print(f"and {len(found) - len(shown)} more; --all shows them")
    print(f"different between {names[0]} and {names[1]}: {render.counted(len(found), 'leaf', 'leaves')}")


def _row(one: "LeafDiff") -> tuple[object, ...]:
    name = one.path if not one.rank else f"{one.path} (rank {one.rank})"
    kinds = one.old or one.new
    if one.what == "retyped":
        kinds = f"{one.old} -> {one.new}"
    if one.what != "changed":
        return (name, one.what, kinds, "", "", "", render.counted(len(one.values), "value") if one.what == "values" else "")
    note = f"{one.not_finite} NaN or infinite" if one.not_finite else ""
    return (name, one.what, kinds, f"{one.share:.2%}", f"{one.max_abs:.3g}", f"{one.rms:.3g}", note)


def _print_values(one: "LeafDiff", limit: int | None) -> None:
    for value in one.values[:limit]:
        key = f"{one.path}: {value.key}" if value.key else one.path
        old, new = ("(absent)" if text is None else text for text in (value.old, value.new))
        print(render.visible(f"  {key}: {old} -> {new}"))
    if limit is not None and len(one.values) > limit:
        print(f"  {one.path}: and {len(one.values) - limit} more")
