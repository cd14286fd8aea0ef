"""`perdure serve run.toml`: a Prefect server (or PREFECT_API_URL), the run registered with it, and a worker, until Ctrl-C."""

import argparse
import contextlib
import os
import signal
import sys
import time

from perdure.cli import watch
from perdure.deployments import api, server
from perdure.deployments.serve import Served, own_pool
from perdure.training.config import RunConfig, load_config
from perdure.training.errors import ConfigError

POLL_SECS = 0.2


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("config", metavar="RUN.TOML", help="describes the run; see docs/configuration.md")
    parser.add_argument("--set", action="append", default=[], metavar="KEY=VALUE", help="override a setting")
    parser.add_argument("--work-pool", default="", metavar="NAME", help="default: one of this machine's own")


def run(args: argparse.Namespace) -> int:
    config = load_config(args.config, args.set)
    pool = args.work_pool or own_pool()
    with contextlib.ExitStack() as stack:
        signals = stack.enter_context(_Signals())
        local = _server(config, stack)
        url, home = (local.url, local.home) if local else (server.api_url_from_environment(), None)
        os.environ.update(server.client_environment(url, home))  # ours, and that of all we start
        name = _register(config, args.set, pool)
        watcher = watch.Watcher(config.directory, config, local.ui_url if local else url, quiet=args.json)
        stack.callback(watcher.close)
        served = stack.enter_context(Served(config, pool, local))
        watcher.say(f"serving {name}: start it in the UI, or with `PREFECT_API_URL={url} prefect deployment run {name}`")
        return _follow(served, watcher, signals)


class _Signals:
    """Counts those that end us, so that each is passed on."""

    def __init__(self) -> None:
        self.count = 0

    def __enter__(self) -> "_Signals":
        for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
            signal.signal(number, self._on_signal)
        return self

    def _on_signal(self, *_: object) -> None:
        self.count += 1

    def __exit__(self, *_: object) -> None:
        for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
            signal.signal(number, signal.SIG_DFL)


def _server(config: RunConfig, stack: contextlib.ExitStack) -> server.LocalServer | None:
    """None: the user has chosen one, which answers."""
    if api.chosen():
        return None
    home = server.ServerHome.beside(config.directory)
    print(f"starting a local Prefect server in {home.root} ...", file=sys.stderr, flush=True)
    return stack.enter_context(server.acquire(home))


def _register(config: RunConfig, overrides: list[str], pool: str) -> str:
    """The deployment's name. A run that is deployed elsewhere stays there."""
    from prefect.exceptions import ObjectNotFound

    from perdure.deployments.deploy import Settings, deploy

    name = f"train/{config.run.name}"
    with api.connected() as client:
        with contextlib.suppress(ObjectNotFound):
            elsewhere = client.read_deployment_by_name(name).work_pool_name
            if elsewhere not in (None, pool):
                raise ConfigError(
                    f"{name} is deployed to work pool {elsewhere}",
                    f"start a worker there: prefect worker start --pool {elsewhere}; or take it over: --work-pool {elsewhere}",
                )
        for _ in deploy(client, [config], Settings(pool=pool), overrides=overrides):
            pass
    return name


def _follow(served: Served, watcher: watch.Watcher, signals: _Signals) -> int:
    passed_on = 0
    while served.status is None:
        watcher.look()
        if signals.count > passed_on:
            watcher.say("stopping: saving the current step first" if not passed_on else "stopping at once")
            served.stop(at_once=passed_on > 0)
            passed_on = signals.count
        time.sleep(POLL_SECS)
    if served.status and not passed_on:
        raise server.ServerFailed(f"the Prefect worker ended with status {served.status}", f"see {served.log}")
    watcher.say("stopped; the same command serves it again")
    return 0
