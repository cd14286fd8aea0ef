"""`perdure push`: copy to the store what it lacks, and read it back. Safe beside a running run: nothing is sent twice."""

import argparse

from perdure.cli import render, verify
from perdure.cli.target import Target, add_selection, add_target, resolve, select
from perdure.training import events
from perdure.training.checkpoint import facts, lineage
from perdure.training.checkpoint.catalog import manifest_of
from perdure.training.errors import CheckpointDamaged, StoreError
from perdure.training.run_dir import CheckpointName


def add_arguments(parser: argparse.ArgumentParser) -> None:
    add_target(parser)
    add_selection(parser, "only the checkpoint")
    parser.add_argument("--dry-run", action="store_true", help="say what would be copied")


def run(args: argparse.Namespace) -> int:
    from perdure.training.travel.pins import push_pins

    target = resolve(args.target, args.set)
    target.started()
    store = target.open_store()
    names = _pending(target, args)
    if args.dry_run:
        return _finish(args, store.url, names, dry_run=True)
    for name in names:
        _prove(target, name, quiet=args.json)
        _copy(target, name, quiet=args.json)
    push_pins(target.run, store)
    return _finish(args, store.url, names, dry_run=False)


def _pending(target: Target, args: argparse.Namespace) -> list[CheckpointName]:
    """Oldest first: each copy that arrives is worth having by itself."""
    history = lineage.lineage(target.run)
    if args.step is not None or args.name is not None:
        return [select(target.run.root, lineage.committed(target.run), history, args)]
    here = (name for name in history if facts.trust(target.run, name) != "quarantined")
    settled = (facts.is_in, facts.is_pruned)
    return sorted(name for name in here if not any(known(target.run, name, facts.STORE) for known in settled))


def _prove(target: Target, name: CheckpointName, *, quiet: bool) -> None:
    """Only what verifies is copied."""
    trust = facts.trust(target.run, name)
    if trust == "written":
        with render.Progress(f"verify {name.step}", 0, quiet=quiet) as progress:
            checked = verify.check(target.run, name, quick=False, progress=progress)
        trust = "quarantined" if checked.damage else "verified"
    if trust == "quarantined":
        hint = f"see `perdure verify {target.run.root} --name {name}`"
        raise CheckpointDamaged(f"checkpoint {name} is damaged and was not copied", part="", hint=hint)


def _copy(target: Target, name: CheckpointName, *, quiet: bool) -> None:
    from perdure.training.travel.push import push

    store = target.open_store()
    try:
        with render.Progress(f"push {name.step}", 2 * manifest_of(target.run, name).stored_bytes, quiet=quiet) as progress:
            fact = push(target.run, store, name, progress=progress.at)
    except StoreError as error:
        events.record(
            target.run,
            "push_failed",
            step=name.step,
            name=str(name),
            error=error.in_one_line()[:1000],
            retryable=error.retryable,
        )
        raise
    if fact.result != "good":
        damage = "; ".join(fact.damage[:3])
        raise CheckpointDamaged(
            f"the copy of {name} in {store.url} is not what was sent: {damage}", part="", hint="push it again"
        )
    events.record(target.run, "pushed", step=name.step, name=str(name), url=store.url)
    if not quiet:
        print(f"pushed {name} to {store.url}", flush=True)


def _finish(args: argparse.Namespace, url: str, names: list[CheckpointName], *, dry_run: bool) -> int:
    if args.json:
        render.print_json({"store_url": url, "pushed": [str(name) for name in names], "dry_run": dry_run})
    elif dry_run:
        print("\n".join([f"would push {name} to {url}" for name in names] or ["nothing to push"]))
    elif not names:
        print(f"nothing to push: {url} has everything that verifies")
    return 0
