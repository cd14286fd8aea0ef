"""`perdure restore`: a checkpoint as a file others can read: .safetensors (here), or .pt (in a process with torch)."""

import argparse
import json
import subprocess
import sys
from pathlib import Path
from typing import Any

from perdure.cli import render
from perdure.cli.target import Target, add_selection, add_target, resolve, select
from perdure.training.checkpoint import catalog, lineage
from perdure.training.errors import CheckpointDamaged, CheckpointNotFound, ConfigError, PerdureError
from perdure.training.run_dir import CheckpointName

TORCH = (".pt", ".pth")


def add_arguments(parser: argparse.ArgumentParser) -> None:
    add_target(parser)
    parser.add_argument("out", metavar="OUT", help="file to write: name.safetensors or name.pt")
    add_selection(parser, "the checkpoint")
    parser.add_argument("--only", metavar="GLOB", help="names to write, e.g. 'model.*'; for .pt names of tracked objects")
    parser.add_argument("--force", action="store_true", help="replace OUT if it exists")
    parser.add_argument("--dry-run", action="store_true", help="say what would be written")


def run(args: argparse.Namespace) -> int:
    target = resolve(args.target, args.set)
    target.started()
    if not args.out.strip():
        raise ConfigError("OUT is empty", "name a file: name.safetensors or name.pt")
    out = Path(args.out).absolute()
    _check_out(out, args.force)
    name = _chosen(target, args)
    folder = target.run.checkpoint(name)
    answer: dict[str, Any] = {"out": str(out), "name": str(name), "step": name.step}  # Any: JSON values
    if args.dry_run:
        answer |= {"dry_run": True, "bytes": 0}
    elif out.suffix in TORCH:
        answer |= _export(folder, out, args.only)
    else:
        answer |= {"bytes": _safetensors(folder, out, args.only, quiet=args.json)}
    if args.json:
        render.print_json(answer)
    else:
        verb = "would write" if args.dry_run else f"wrote {render.size(answer['bytes'])} of"
        print(f"{verb} checkpoint {name} to {out}")
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


def _chosen(target: Target, args: argparse.Namespace) -> CheckpointName:
    if args.step is not None or args.name is not None:
        return select(target, lineage.committed(target.run), lineage.lineage(target.run), args)
    names = catalog.candidates(target.run)
    if not names:
        raise CheckpointNotFound(f"{target.run.root} has no checkpoint that could be restored", "see `perdure ls`")
    return names[0]


def _safetensors(folder: Path, out: Path, only: str | None, *, quiet: bool) -> int:
    from perdure.training.checkpoint.reader import open_checkpoint
    from perdure.training.checkpoint.restore import restore_safetensors

    with open_checkpoint(folder) as reader, render.Progress(out.name, reader.manifest.raw_bytes, quiet=quiet) as progress:
        return restore_safetensors(reader, out, only=only, progress=progress.at)


def _export(folder: Path, out: Path, only: str | None) -> dict[str, Any]:  # Any: JSON values
    """torch lives in another process: this one stays fast, and may have been installed without it."""
    command = [sys.executable, "-m", "perdure.training.engine.export", str(folder), str(out)]
    command += ["--only", only] if only is not None else []
    done = subprocess.run(command, stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, check=False)
    try:
        answer = dict(json.loads(done.stdout.splitlines()[-1]))
    except (IndexError, ValueError):
        raise PerdureError(f"exporting {folder} ended with status {done.returncode} and no answer") from None
    if "error" in answer:
        kind = CheckpointDamaged if answer["exit_code"] == CheckpointDamaged.exit_code else PerdureError
        error = kind(answer["error"], hint=answer["hint"])
        error.exit_code = int(answer["exit_code"])
        raise error
    return answer
