"""`perdure deploy RUN.toml...`: register runs with the Prefect server that PREFECT_API_URL (or a profile) names."""

import argparse
import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from perdure.cli import render
from perdure.deployments import api
from perdure.deployments.table import DEFAULT_POOL
from perdure.training.config import load_config
from perdure.training.errors import ConfigError
from perdure.training.redact import redact

_LONGEST_SHOWN = 100
_ALSO = {
    "not there": ": the worker's environment counts",
    "forbidden": " to look for with this key (403): a worker whose key may not read it either has its environment only",
}


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("configs", nargs="+", metavar="RUN.TOML", help="describes a run; its run.name names the deployments")
    parser.add_argument(
        "--remove", action="store_true", help="take retired runs off the server, each named by its RUN.TOML or its run.name"
    )
    parser.add_argument(
        "--work-pool", default=DEFAULT_POOL, metavar="NAME", help="made as a process pool if missing; default: %(default)s"
    )
    parser.add_argument("--set", action="append", default=[], metavar="KEY=VALUE", help="override a setting in all of them")
    parser.add_argument(
        "--stall-after", type=float, default=6.0, metavar="HOURS", help="alarm when no chunk ends for so long; default: 6"
    )
    parser.add_argument(
        "--notify-block", default="", metavar="TYPE/NAME", help="Prefect block told of a stall, e.g. slack-webhook/ops"
    )
    parser.add_argument("--dry-run", action="store_true", help="show the difference, change nothing")


def run(args: argparse.Namespace) -> int:
    return _remove(args) if args.remove else _deploy(args)


def _remove(args: argparse.Namespace) -> int:
    """What was trained stays where it is."""
    names = [load_config(text, args.set).run.name if text.endswith(".toml") else text for text in args.configs]
    api.prepare()
    from perdure.deployments.retire import retire

    with api.connected() as client:
        items = [item for name in dict.fromkeys(names) for item in retire(client, name, dry_run=args.dry_run)]
    if args.json:
        print(
            redact(json.dumps({"api": api.api_url(), "dry_run": args.dry_run, "removed": len(items), "items": _shown(items)}))
        )
        return 0
    for item in items:
        _show(item)
    would = "would be " if args.dry_run else ""
    print(f"{len(items)} {would}removed" if items else f"nothing to do: {api.api_url()} has none of {', '.join(names)}")
    return 0


def _deploy(args: argparse.Namespace) -> int:
    runs = [load_config(path, args.set) for path in args.configs]
    if not args.work_pool.strip():
        raise ConfigError("--work-pool is empty", f"leave it out for {DEFAULT_POOL}")
    if not 10 <= args.stall_after * 3600 <= 366 * 86400:
        raise ConfigError(f"--stall-after {args.stall_after} is out of range", "use 10 seconds (0.003) to a year, in hours")
    api.prepare()
    from perdure.deployments.deploy import Settings, deploy
    from perdure.deployments.retire import orphans

    settings = Settings(pool=args.work_pool, stall_secs=args.stall_after * 3600, notify_block=args.notify_block)
    items = []
    with api.connected() as client:
        for item in deploy(client, runs, settings, overrides=args.set, dry_run=args.dry_run):
            items.append(item)
            if not args.json:
                _show(item)
        lost = dict(orphans(client))
    for name, path in lost.items() if not args.json else ():
        print(render.visible(f"{name} is deployed, and {path} is not here; if it is retired: perdure deploy --remove {name}"))
    _finish(args, items, lost)
    return 0


def _show(item: Any) -> None:  # Any: deploy.Item, whose module is imported late
    print(render.visible(f"{item.kind} {item.name}: {item.action}{_ALSO.get(item.action, '')}"))
    for change in item.changes:
        print(render.visible(redact(f"    {change.field}: {_short(change.old)} -> {_short(change.new)}")))


def _short(value: Any) -> str:  # Any: JSON values
    text = json.dumps(value, ensure_ascii=False)
    return text if len(text) <= _LONGEST_SHOWN else f"{text[:_LONGEST_SHOWN]}..."


def _shown(items: list[Any]) -> list[dict[str, Any]]:  # Any: as in _show; JSON values
    return [
        {
            "kind": item.kind,
            "name": item.name,
            "action": item.action,
            "changes": [{"field": one.field, "old": one.old, "new": one.new} for one in item.changes],
        }
        for item in items
    ]


def _finish(args: argparse.Namespace, items: list[Any], lost: Mapping[str, Path]) -> None:  # Any: as in _show
    counts = {word: sum(item.action == word for item in items) for word in ("created", "changed", "unchanged")}
    if args.json:
        told = {"not_here": {name: str(path) for name, path in lost.items()}, "items": _shown(items)}
        print(redact(json.dumps({"api": api.api_url(), "dry_run": args.dry_run, **counts, **told})))
        return
    if not counts["created"] and not counts["changed"]:
        print(f"nothing to do: {api.api_url()} has all of it already")
        return
    would = "would be " if args.dry_run else ""
    print(f"{counts['created']} {would}created, {counts['changed']} {would}changed, {counts['unchanged']} unchanged")
    if not args.dry_run:
        print(f"start a worker where it is to train: prefect worker start --pool {args.work_pool}")
