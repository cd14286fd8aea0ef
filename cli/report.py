"""`perdure report`: what runs made in the last days, what they lost, what they cost, and what to do next."""

import argparse
from typing import TYPE_CHECKING

from perdure.cli import render
from perdure.cli.watchdog import runs_of
from perdure.training.errors import ConfigError

if TYPE_CHECKING:
    from perdure.tasks.weekly import Digest


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("targets", nargs="+", metavar="RUN_OR_FOLDER", help="run directories, run.tomls, or folders of runs")
    parser.add_argument("--days", type=float, default=7.0, metavar="N", help="how far to look back; default 7")
    parser.add_argument("--markdown", action="store_true", help="as it is shown in Prefect and in Slack")


def run(args: argparse.Namespace) -> int:
    from perdure.tasks import weekly

    if not 0 < args.days < 36_500:
        raise ConfigError(f"--days {args.days:g} is no length of time", "name a number above 0, e.g. --days 7")
    found = [weekly.digest(one, args.days) for one in runs_of(args.targets)]
    if args.json:
        render.print_json({"days": args.days, "runs": [one.json() for one in found]})
    elif args.markdown:
        print(render.visible("\n\n".join(f"## {one.name}\n\n{weekly.markdown(one)}" for one in found)))
    else:
        _table(found)
        for one in found:
            if one.next_action:
                print(render.visible(f"{one.name}: {one.next_action}"))
        if all(one.empty for one in found):
            print(f"nothing happened in the last {args.days:g} days")
    return 0


def _table(found: "list[Digest]") -> None:
    columns = (
        "run", "state", "step", "of", "made", "chunks", "launches", "failures", "lost", "verified", "in store", "on disk",
        "training",
    )  # fmt: skip
    rows: list[tuple[object, ...]] = []
    for one in found:
        share = one.training_share
        rows.append(
            (
                one.name, one.state, one.step, one.total_steps, one.steps_made, one.chunks, one.launches,
                ", ".join(f"{count} {kind}" for kind, count in sorted(one.failures.items())), one.lost_steps,
                _aged(one.verified_step, one.verified_age), _aged(one.replicated_step, one.replicated_age),
                render.size(one.bytes_on_disk), f"{share:.0%}" if share is not None else "",
            )
        )  # fmt: skip
    render.table(columns, rows)


def _aged(step: int | None, age: float | None) -> str:
    return "" if step is None else f"{step}" + (f" ({render.age(age)} old)" if age is not None else "")
