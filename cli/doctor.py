"""`perdure doctor`: one line for each thing a run needs, with the fix in it. Exit code 1 when any of them fails."""

import argparse
from collections import Counter
from typing import TYPE_CHECKING

from perdure.cli import render
from perdure.training.config import load_config
from perdure.training.errors import ConfigError

if TYPE_CHECKING:
    from perdure.deployments.checks.finding import Level

FAILED = 1
_LEVELS: "tuple[Level, ...]" = ("ok", "warn", "fail", "skip")


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("config", nargs="?", metavar="RUN.TOML", help="examine what this run needs, too")
    parser.add_argument("--set", action="append", default=[], metavar="KEY=VALUE", help="override a setting of the run.toml")
    parser.add_argument("--work-pool", default="", metavar="NAME", help="default: the one the run is deployed to")


def run(args: argparse.Namespace) -> int:
    if args.set and not args.config:
        raise ConfigError(f"--set {args.set[0]}: no RUN.toml is named", "name one")
    config = load_config(args.config, args.set) if args.config else None
    from perdure.deployments import api

    api.prepare()
    from perdure.deployments.checks.finding import Subject
    from perdure.deployments.doctor import examine

    found = []
    for finding in examine(Subject(config=config, pool=args.work_pool)):
        found.append(finding)
        if not args.json:
            fix = f"; fix: {finding.fix}" if finding.fix else ""
            print(render.visible(f"{finding.level:<4}  {finding.check:<21}  {finding.text}{fix}"), flush=True)
    counts = Counter(finding.level for finding in found)
    if args.json:
        checks = [{"check": one.check, "level": one.level, "text": one.text, "fix": one.fix} for one in found]
        told = {level: counts[level] for level in _LEVELS}
        render.print_json({"ok": not counts["fail"], "counts": told, "checks": checks})
    else:
        print(", ".join(f"{counts[level]} {level}" for level in _LEVELS if counts[level]))
    return FAILED if counts["fail"] else 0
