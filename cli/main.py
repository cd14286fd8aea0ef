"""The `perdure` command: finds the verb, imports only its file, and turns every error into a sentence and an exit code."""

import argparse
import atexit
import errno
import gc
import importlib
import json
import os
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from typing import NoReturn

from perdure.cli.render import visible
from perdure.training.errors import ConfigError, DiskFull, PerdureError
from perdure.training.redact import redact

_GARBAGE_EVERY = 100_000
"""Objects made between two searches for garbage: importing makes many and no garbage, and Python's own 700 take 0.1 s."""
INTERRUPTED = 130
BROKEN_PIPE = 141
_USER_ERRNOS = (
    errno.EACCES, errno.EPERM, errno.EROFS, errno.ENOSPC, errno.EDQUOT, errno.ENOTDIR, errno.EISDIR, errno.ELOOP,
    errno.ENAMETOOLONG, errno.ENOENT,
)  # fmt: skip
"""What the machine refuses and a person can cure by another path or other rights; it needs no traceback."""
_NO_ROOM = (errno.ENOSPC, errno.EDQUOT)


@dataclass(frozen=True)
class Verb:
    summary: str
    example: str


VERBS = {
    "run": Verb("train a run, or go on with it", "perdure run examples/gpt/run.toml --set run.steps=200"),
    "ls": Verb("list a run's checkpoints and what is known of each", "perdure ls runs/gpt"),
    "status": Verb("say where a run stands", "perdure status runs/gpt --json"),
    "verify": Verb("read checkpoints back and compare every digest", "perdure verify runs/gpt --step 200"),
    "restore": Verb("write a checkpoint's content to a .safetensors or .pt file", "perdure restore runs/gpt model.safetensors"),
    "diff": Verb("say which tensors of two checkpoints differ, how much", "perdure diff runs/gpt@100 @200 --only 'model.*'"),
    "push": Verb("copy what the store lacks, and read it back", "perdure push runs/gpt"),
    "pull": Verb("bring a run back from its store", "perdure pull s3://bucket/gpt runs/gpt"),
    "archive": Verb("fill the tiers", "perdure archive gpt/run.toml --dry-run"),
    "rollup": Verb("make a full of an increment, so that its base can go", "perdure rollup runs/gpt --step 200"),
    "prune": Verb("delete what retention lets go, and what crashes left", "perdure prune runs/gpt --keep-last 3 --dry-run"),
    "pin": Verb("name a checkpoint as a milestone that stays", "perdure pin runs/gpt@200 before-lr-drop"),
    "scrub": Verb("read a share of all copies again and repair rot", "perdure scrub gpt/run.toml --budget 15%"),
    "drill": Verb("rehearse a lost machine from the store alone", "perdure drill gpt/run.toml --dry-run"),
    "watchdog": Verb("find runs that died without a word, restart them", "perdure watchdog runs --dry-run"),
    "report": Verb("say what runs did, lost and cost", "perdure report runs --days 7"),
    "deploy": Verb("register runs with a Prefect server", "perdure deploy gpt/run.toml --work-pool gpus --dry-run"),
    "serve": Verb("run what Prefect schedules of a run, on this machine", "perdure serve gpt/run.toml"),
    "doctor": Verb("check everything a run needs", "perdure doctor gpt/run.toml"),
    "node": Verb("take part in a run on another machine than node 0", "perdure node /shared/gpt/run.toml --node 1"),
    "stop": Verb("ask a running run to save and stop", "perdure stop runs/gpt"),
}


class _Parser(argparse.ArgumentParser):
    def error(self, message: str) -> NoReturn:
        raise ConfigError(f"{self.prog.removeprefix('perdure ')}: {message}", f"see `{self.prog} --help`")


def _overview() -> str:
    width = max(map(len, VERBS))
    lines = ["usage: perdure VERB ... [--json]", "", "Training runs that survive anything.", "", "verbs:"]
    lines += [f"  {name:<{width}}  {verb.summary}" for name, verb in VERBS.items()]
    return "\n".join(
        [*lines, "", "`perdure VERB --help` says more; `perdure --version` the version.", f"example: {VERBS['run'].example}"]
    )


def _version() -> str:
    from importlib.metadata import version

    return version("perdure")


def _unknown(name: str) -> ConfigError:
    from difflib import get_close_matches

    close = get_close_matches(name, VERBS, 1)
    hint = f"did you mean `perdure {close[0]}`?" if close else f"verbs: {', '.join(VERBS)}"
    return ConfigError(f"{name!r} is not a verb of perdure", hint)


def _dispatch(arguments: Sequence[str]) -> int:
    name, rest = (arguments[0], arguments[1:]) if arguments else ("--help", ())
    if name in ("--help", "-h", "help"):
        print(_overview())
        return 0 if arguments else ConfigError.exit_code
    if name in ("--version", "-V"):
        print(f"perdure {_version()}")
        return 0
    if name not in VERBS:
        raise _unknown(name)
    module = importlib.import_module(f"perdure.cli.{name}")
    verb = VERBS[name]
    parser = _Parser(
        prog=f"perdure {name}",
        description=verb.summary[0].upper() + verb.summary[1:] + ".",
        epilog=f"example: {verb.example}",
        allow_abbrev=False,
    )
    module.add_arguments(parser)
    parser.add_argument("--json", action="store_true", help="print one JSON object on standard output, nothing else")
    return int(module.run(parser.parse_args(rest)))


def _report(message: str, hint: str, code: int, as_json: bool) -> int:
    message, hint = redact(message), redact(hint)
    if as_json:
        print(json.dumps({"error": message, "hint": hint, "exit_code": code}))
    print(visible(f"perdure: {message}" + (f"\nhint: {hint}" if hint else "")), file=sys.stderr)
    return code


def _guarded(arguments: Sequence[str]) -> int:
    as_json = "--json" in arguments
    try:
        return _dispatch(arguments)
    except BrokenPipeError:
        raise
    except PerdureError as error:
        return _report(str(error), error.hint, error.exit_code, as_json)
    except OSError as error:
        if error.errno not in _USER_ERRNOS or error.filename is None:
            raise
        full = error.errno in _NO_ROOM
        code, hint = (DiskFull.exit_code, "make room") if full else (ConfigError.exit_code, "name a path that can be used")
        return _report(f"{os.fsdecode(error.filename)}: {error.strerror}", hint, code, as_json)


def main(arguments: Sequence[str] | None = None) -> int:
    """Exit code of `perdure ARGUMENTS`. What is neither ours nor the machine's refusal is a bug and keeps its traceback."""
    gc.set_threshold(_GARBAGE_EVERY)
    atexit.register(gc.freeze)  # the last search, of everything at once, would take as long again
    try:
        code = _guarded(sys.argv[1:] if arguments is None else arguments)
        sys.stdout.flush()
        return code
    except KeyboardInterrupt:
        print("perdure: interrupted", file=sys.stderr)
        return INTERRUPTED
    except BrokenPipeError:  # `perdure ls | head`: the interpreter would complain once more when it flushes
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return BROKEN_PIPE


if __name__ == "__main__":
    sys.exit(main())
