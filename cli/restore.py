"""`perdure restore`: a checkpoint as a file others can read: .safetensors (here), or .pt (in a process with torch).

What is not here is read from the run's store and tiers, and of it only what --only names."""

import argparse
import json
import os
import subprocess
import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from perdure.cli import render, thaw
from perdure.cli.target import Target, add_endpoint, add_selection, add_target, resolve, select, store_at
from perdure.training.checkpoint import catalog, facts, lineage
from perdure.training.errors import CheckpointDamaged, CheckpointNotFound, ConfigError, PerdureError
from perdure.training.run_dir import CheckpointName, RunDir

if TYPE_CHECKING:
    from perdure.training.checkpoint.reader import CheckpointReader
    from perdure.training.travel.copies import Stored

_Answer = dict[str, Any]  # Any: JSON values
TORCH = (".pt", ".pth")
_THREADS = 4
"""At most: of each, some blobs of 8 MiB are in memory."""


@dataclass(frozen=True)
class _Copy:
    """One copy of the checkpoint, here (`folder`) or at a `place`. `open` takes a list for the numbers of bytes it fetches."""

    name: CheckpointName
    where: str
    open: "Callable[[list[int]], CheckpointReader]"
    folder: Path | None = None
    place: "Stored | None" = None
    run: RunDir | None = None
    """Whose directory a thaw is recorded in."""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    add_target(parser, "a run directory, its run.toml, or the URL of its store or of a tier (s3://bucket/prefix)")
    parser.add_argument("out", metavar="OUT", help="file to write: name.safetensors or name.pt")
    add_selection(parser, "the checkpoint")
    parser.add_argument("--only", metavar="GLOB", help="names to write, e.g. 'model.*'; for .pt names of tracked objects")
    add_endpoint(parser)
    thaw.add_arguments(parser)
    parser.add_argument("--force", action="store_true", help="replace OUT if it exists")
    parser.add_argument("--dry-run", action="store_true", help="say what would be written")


def run(args: argparse.Namespace) -> int:
    if not args.out.strip():
        raise ConfigError("OUT is empty", "name a file: name.safetensors or name.pt")
    out = Path(args.out).absolute()
    _check_out(out, args.force)
    copies = _copies(args)
    found, answer = copies[0], _Answer(fetched_bytes=0)
    if args.dry_run:
        answer |= {"dry_run": True, "bytes": 0}
    elif out.suffix in TORCH:
        answer |= _export(found, out, args.only)
    else:
        found, written = _written(args, copies, out)
        answer |= written
    answer |= {"out": str(out), "name": str(found.name), "step": found.name.step, "source": found.where}
    if args.json:
        render.print_json(answer)
    else:
        verb = "would write" if args.dry_run else f"wrote {render.size(answer['bytes'])} of"
        fetched = f"; {render.size(answer['fetched_bytes'])} were fetched" if answer["fetched_bytes"] else ""
        print(f"{verb} checkpoint {found.name} of {found.where} to {out}{fetched}")
    return 0


def _check_out(out: Path, force: bool) -> None:
    if out.suffix not in (".safetensors", *TORCH):
        raise ConfigError(f"{out} has no known ending", "name it .safetensors, or .pt for a file torch.load reads")
    if not out.parent.is_dir():
        raise ConfigError(f"{out.parent} is no folder", "create it first")
    if out.is_dir():
        raise ConfigError(f"{out} is a folder", "name a file")
    if out.exists() and not force:
        raise ConfigError(f"{out} exists", "name another file, or replace it with --force")


def _copies(args: argparse.Namespace) -> list[_Copy]:
    """Of the checkpoint that is asked for, in the order in which they are tried."""
    if "://" in args.target:
        from perdure.training.travel.copies import Stored

        if args.set:
            raise ConfigError(f"--set {args.set[0]}: {args.target} is a store", "--set needs a run.toml as target")
        return _elsewhere([Stored(store_at(args.target, args), facts.STORE)], args, None)
    target = resolve(args.target, args.set)
    if args.endpoint_url or args.region:
        raise ConfigError(
            "--endpoint-url and --region go with the URL of a store", "a run says itself how its store is reached"
        )
    try:
        return [_here(target, args)]
    except CheckpointNotFound:
        if not target.places:
            raise
    return _elsewhere(target.reading_order(), args, target.run)


def _here(target: Target, args: argparse.Namespace) -> _Copy:
    from perdure.training.checkpoint.reader import open_checkpoint

    target.started()
    if args.step is not None or args.name is not None:
        name = select(target.run.root, lineage.committed(target.run), lineage.lineage(target.run), args)
    elif names := catalog.candidates(target.run):
        name = names[0]
    else:
        raise CheckpointNotFound(f"{target.run.root} has no checkpoint that could be restored", "see `perdure ls`")
    folder = target.run.checkpoint(name)
    return _Copy(name, str(target.run.root), lambda _: open_checkpoint(folder), folder)


def _elsewhere(places: "Sequence[Stored]", args: argparse.Namespace, run: RunDir | None) -> list[_Copy]:
    """None that is known to be damaged, unless there is no other; first one that can be read now."""
    from perdure.training.travel.source import open_stored
    from perdure.training.travel.sources import look
    from perdure.training.travel.thaw import readable

    found, where = look(places, render.say), ", ".join(place.store.url for place in places)
    if args.step is not None or args.name is not None:
        name = select(where, found.committed, found.history, args)
    elif (newest := next(filter(found.good, found.history), None)) is not None:
        name = newest
    else:
        raise CheckpointNotFound(f"{where} has no checkpoint that could be restored", "see `perdure pull URL DIR --dry-run`")
    held = found.good(name) or found.holding(name)
    first = readable(held, name)

    def copy(place: "Stored") -> _Copy:
        def opened(fetched: list[int]) -> "CheckpointReader":
            return open_stored(place.store, name, found.info.id, fetched.append)

        return _Copy(name, place.store.url, opened, place=place, run=run)

    return [copy(place) for place in sorted(held, key=lambda one: one != first)]


def _written(args: argparse.Namespace, copies: Sequence[_Copy], out: Path) -> tuple[_Copy, _Answer]:
    """By the first copy that proves good; what is damaged is said, and leaves no OUT."""
    for copy in copies[:-1]:
        try:
            return copy, _read(args, copy, out)
        except CheckpointDamaged as error:
            render.say(f"{error}; another copy is read")
    return copies[-1], _read(args, copies[-1], out)


def _read(args: argparse.Namespace, found: _Copy, out: Path) -> _Answer:
    """With a thaw before it where that is needed and asked for."""
    if (place := found.place) is None:
        return _safetensors(found, out, args.only, quiet=args.json)
    from perdure.training.travel.thaw import needed

    def attempt() -> _Answer:
        with needed(place, found.name):
            return _safetensors(found, out, args.only, quiet=args.json)

    return thaw.reading(args, found.run, [place], attempt)


def _safetensors(found: _Copy, out: Path, only: str | None, *, quiet: bool) -> _Answer:
    from perdure.training.checkpoint.restore import restore_safetensors

    fetched: list[int] = []
    threads = min(_THREADS, len(os.sched_getaffinity(0)))
    with found.open(fetched) as reader, render.Progress(out.name, reader.manifest.raw_bytes, quiet=quiet) as progress:
        size = restore_safetensors(reader, out, only=only, threads=threads, progress=progress.at)
    return {"bytes": size, "fetched_bytes": sum(fetched)}


def _export(found: _Copy, out: Path, only: str | None) -> _Answer:
    """torch lives in another process: this one stays fast, and may have been installed without it."""
    folder = found.folder
    if folder is None:
        raise ConfigError(f"{out} cannot be made of {found.where}", "bring it here with `perdure pull`, or name a .safetensors")
    command = [sys.executable, "-m", "perdure.training.engine.export", str(folder), str(out)]
    command += ["--only", only] if only is not None else []
    done = subprocess.run(command, stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, check=False)
    try:
        answer = dict(json.loads(done.stdout.splitlines()[-1]))
    except (IndexError, ValueError):
        raise PerdureError(f"exporting {folder} ended with status {done.returncode} and no answer") from None
    if "errno" in answer:
        raise OSError(answer["errno"], answer["error"], str(out))
    if "error" in answer:
        kind = CheckpointDamaged if answer["exit_code"] == CheckpointDamaged.exit_code else PerdureError
        error = kind(answer["error"], hint=answer["hint"])
        error.exit_code = int(answer["exit_code"])
        raise error
    return answer
