"""`perdure prune`: show what retention lets go, with a reason for every checkpoint, then delete it and sweep leftovers; here,
or with `--tier` in the store or a tier."""

import argparse
from collections.abc import Iterable
from typing import TYPE_CHECKING, Any

import msgspec

from perdure.cli import render
from perdure.cli.target import Target, add_target, resolve
from perdure.training.agent import lock
from perdure.training.checkpoint import facts, prune
from perdure.training.checkpoint.prune import Done, Survey
from perdure.training.checkpoint.retention import Verdict
from perdure.training.checkpoint.upkeep import upkeep
from perdure.training.errors import ConfigError
from perdure.training.retention_settings import RetentionSection, wrong_retention

if TYPE_CHECKING:
    from perdure.training.storage.store import ObjectStore
    from perdure.training.travel import prune as places
    from perdure.training.travel import sweep

_COUNTS = {
    "keep_last": "the newest N, or `all`",
    "keep_every": "those whose step is a multiple of N",
    "keep_hourly": "the newest of each of the last N hours that have one",
    "keep_daily": "the newest of each of the last N days that have one",
    "keep_weekly": "the newest of each of the last N weeks that have one",
    "keep_best": "the best N by --best",
}


def add_arguments(parser: argparse.ArgumentParser) -> None:
    add_target(parser)
    group = parser.add_argument_group(
        "what to keep", "of the verified checkpoints (with a store: of those in it); each default is retention's of run.toml"
    )
    for key, text in _COUNTS.items():
        kind = _number if key == "keep_last" else int
        group.add_argument(f"--{key.replace('_', '-')}", type=kind, metavar="N", help=f"keep {text}")
    group.add_argument("--keep-within", metavar="AGE", help="keep those at most so much older than the newest: 36h, 7d, 2w")
    group.add_argument(
        "--best", metavar="NAME", help="what --keep-best compares: loss (smoothed; the default), last, least, or a logged name"
    )
    group.add_argument("--best-mode", choices=("min", "max"), help="whether the lowest or the highest is best; default: min")
    parser.add_argument("--tier", metavar="PLACE", help="prune the copies there, not here: `store`, or the name of a tier")
    parser.add_argument("--dry-run", action="store_true", help="show the plan, delete nothing")


def _number(text: str) -> int | str:
    return text if text == "all" else int(text)


def run(args: argparse.Namespace) -> int:
    target = resolve(args.target, args.set)
    target.started()
    if args.tier is not None:
        return _prune_place(args, target)
    settings = _settings(args, target, target.retention)
    if args.dry_run:
        found = _survey(target, settings)
        _show(args, target, found)
        _finish(args, target, found, None, settings)
        return 0
    from perdure.training.checkpoint.rollup import roll_up

    with upkeep(target.run):
        found = _survey(target, settings)
        _show(args, target, found)
        done = prune.execute(target.run, found, roll_up=roll_up)
    _finish(args, target, found, done, settings)
    return 0


def _settings(args: argparse.Namespace, target: Target, section: RetentionSection | None) -> RetentionSection:
    """Those of the run.toml, with what was given on the command line in their place."""
    given = {key: getattr(args, key) for key in RetentionSection.__struct_fields__ if getattr(args, key) is not None}
    if section is None and not given:
        raise ConfigError(f"{target.run.root} does not say which checkpoints to keep", "name its run.toml, or --keep-last N")
    settings: RetentionSection = msgspec.structs.replace(section or RetentionSection(), **given)
    for problem, fix in wrong_retention(settings):
        key, _, rest = problem.removeprefix("retention.").partition(" = ")
        raise ConfigError(f"--{key.replace('_', '-')} {rest}", fix)
    return settings


def _survey(target: Target, settings: RetentionSection) -> Survey:
    def is_idle() -> bool:
        return not lock.is_held(target.run)

    return prune.survey(target.run, settings, stored=bool(target.store_url), is_idle=is_idle, may_roll_up=True)


def _action(one: Verdict) -> str:
    return "roll up" if one.roll_up else "keep" if one.keep else "remove"


def _show(args: argparse.Namespace, target: Target, found: Survey) -> None:
    if args.json or (not found.plan.verdicts and not found.leftovers):
        return
    rows = _rows(found.plan.verdicts)
    for one in found.leftovers:
        path = one.path.relative_to(target.run.root)
        rows.append((path, "remove" if one.goes else "keep", render.size(one.bytes), f"leftover: {one.reason}"))
    render.table(("checkpoint", "action", "on disk", "reason"), rows)


def _rows(verdicts: Iterable[Verdict]) -> list[tuple[object, ...]]:
    return [(one.name, _action(one), render.size(one.bytes), "; ".join(one.reasons)) for one in verdicts]


def _finish(args: argparse.Namespace, target: Target, found: Survey, done: Done | None, settings: RetentionSection) -> None:
    if args.json:
        render.print_json(_json(target, found, done, settings))
        return
    if found.empty:
        print(f"nothing to prune in {target.run.root}: {settings.said()}")
        return
    if done is None:
        goes = _counts(len(found.plan.remove), sum(one.goes for one in found.leftovers))
        print(f"would delete {goes}, {render.size(found.freed)}")
        return
    for name, why in done.spared.items():
        print(render.visible(f"left {name}: {why}"))
    print(f"deleted {_counts(len(done.removed), len(done.swept))}, {render.size(done.freed)} freed")


def _counts(checkpoints: int, leftovers: int) -> str:
    return f"{render.counted(checkpoints, 'checkpoint')} and {render.counted(leftovers, 'leftover')}"


def _json(target: Target, found: Survey, done: Done | None, settings: RetentionSection) -> dict[str, Any]:  # Any: JSON values
    leftovers = [
        {
            "path": str(one.path.relative_to(target.run.root)), "action": "remove" if one.goes else "keep",
            "reason": one.reason, "bytes": one.bytes,
        }
        for one in found.leftovers
    ]  # fmt: skip
    return {
        "run_dir": str(target.run.root), **msgspec.to_builtins(settings), "dry_run": done is None,
        "checkpoints": _checkpoints(found.plan.verdicts), "leftovers": leftovers,
        "removed": [str(one.name) for one in done.removed] if done else [],
        "rolled_up": [str(one.name) for one in done.rolled_up] if done else [],
        "spared": {str(name): why for name, why in done.spared.items()} if done else {},
        "freed_bytes": done.freed if done else found.freed,
    }  # fmt: skip


def _checkpoints(verdicts: Iterable[Verdict]) -> list[dict[str, Any]]:  # Any: JSON values
    return [
        {
            "name": str(one.name), "step": one.name.step, "token": one.name.token, "action": _action(one),
            "reasons": list(one.reasons), "bytes": one.bytes, "base": str(one.base) if one.base else None,
        }
        for one in verdicts
    ]  # fmt: skip


# the store and the tiers


def _prune_place(args: argparse.Namespace, target: Target) -> int:
    from perdure.training.travel import prune as places
    from perdure.training.travel import sweep

    store, section = _place(target, args.tier)
    settings = _settings(args, target, section)
    if not args.dry_run:
        sweep.recover(target.run, store, args.tier)
    found = places.survey(target.run, store, args.tier, settings)
    if not args.json:
        _show_place(found)
    done = None if args.dry_run else sweep.execute(target.run, store, args.tier, found)
    if args.json:
        told = {"place": args.tier, "url": store.url, **msgspec.to_builtins(settings), "dry_run": done is None}
        render.print_json({"run_dir": str(target.run.root), **told, **_place_json(found, done)})
    else:
        _say_place(store.url, found, done, settings)
    return 0


def _place(target: Target, word: str) -> "tuple[ObjectStore, RetentionSection | None]":
    """The place, opened, and its retention. Raises ConfigError where the run has no such place."""
    config = target.config
    if word == facts.STORE:
        return target.open_store(), config.store.retention if config is not None else None
    if config is None:
        raise ConfigError(f"{target.run.root} does not say which tiers it has", "name its run.toml")
    from perdure.training.travel.places import tiers_of

    for tier in tiers_of(config):
        if tier.word == word:
            return tier.store, tier.section.retention
    raise ConfigError(f"--tier {word}: {config.path} has no such place", f"it has: {', '.join(target.places) or 'none'}")


def _show_place(found: "places.Survey") -> None:
    rows = _rows(found.plan.verdicts)
    for one in found.leftovers:
        what = f"{one.name}: {render.counted(len(one.files), 'file')}"
        rows.append((what, "remove" if one.goes else "keep", render.size(one.bytes), f"leftover: {one.reason}"))
    if rows:
        render.table(("checkpoint", "action", "size", "reason"), rows)


def _say_place(url: str, found: "places.Survey", done: "sweep.Done | None", settings: RetentionSection) -> None:
    if found.empty:
        print(f"nothing to prune in {url}: {settings.said()}")
    elif done is None:
        goes = _counts(len(found.plan.remove), sum(one.goes for one in found.leftovers) + found.uploads)
        print(f"would delete {goes} from {url}, {render.size(found.freed)}")
    else:
        for name, why in done.spared.items():
            print(render.visible(f"left {name}: {why}"))
        gone = _counts(len(done.removed), len(done.swept) + done.uploads)
        print(f"deleted {gone} from {url}, {render.size(done.freed)} freed")


def _place_json(found: "places.Survey", done: "sweep.Done | None") -> dict[str, Any]:  # Any: JSON values
    leftovers = [
        {
            "name": str(one.name), "files": list(one.files), "action": "remove" if one.goes else "keep", "reason": one.reason,
            "bytes": one.bytes,
        }
        for one in found.leftovers
    ]  # fmt: skip
    return {
        "checkpoints": _checkpoints(found.plan.verdicts), "leftovers": leftovers,
        "removed": [str(one.name) for one in done.removed] if done else [],
        "spared": {str(name): why for name, why in done.spared.items()} if done else {},
        "unfinished_uploads": done.uploads if done else found.uploads,
        "freed_bytes": done.freed if done else found.freed,
    }  # fmt: skip
