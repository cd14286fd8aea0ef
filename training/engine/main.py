"""What the launcher starts: one rank. Signals first, then the agent's socket, then torch and the user's code."""

import atexit
import contextlib
import faulthandler
import importlib.util
import os
import signal
import sys
import threading
import traceback
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, NoReturn

from perdure.training import files
from perdure.training.engine import signals
from perdure.training.engine.link import Link
from perdure.training.errors import CheckpointDamaged, ConfigError, NonFinite, PerdureError, TrainingFailed
from perdure.training.process import die_with_parent
from perdure.training.redact import redact
from perdure.training.run_dir import rank_log

if TYPE_CHECKING:
    from perdure.training.engine.session import Session

_OOM_SCORE = 500
"""Under memory pressure the kernel should take a rank, not the agent that holds its snapshot."""
_DETAIL_CHARS = 1900
"""What travels of an error; all of it is in the rank's log."""
_LOST = ("gloo/", "Connection closed by peer", "Gloo ")
"""What gloo's errors have in common: RuntimeErrors without a type of their own."""


def load_entry(file: Path, function: str) -> "Callable[[Session], None]":
    """Import the user's file as a module of its own name, its folder importable as when run as a script."""
    sys.path.insert(0, str(file.parent))
    spec = importlib.util.spec_from_file_location(file.stem, file)
    if spec is None or spec.loader is None:
        raise ConfigError(f"run.entry names {file}, which is not a Python file")
    module = importlib.util.module_from_spec(spec)
    sys.modules[file.stem] = module
    spec.loader.exec_module(module)
    entry = getattr(module, function, None)
    if not callable(entry):
        raise ConfigError(f"run.entry: {file} defines no function {function!r}", "name a function that takes a Session")
    return entry  # type: ignore[no-any-return]  # checked to be callable; its signature is the user's word


def classify(error: BaseException) -> str:
    """The failure class the restart decision goes by (facts/operations.md 4.1)."""
    if isinstance(error, CheckpointDamaged):
        return "corrupt"
    if isinstance(error, NonFinite):
        return "nan"
    if isinstance(error, PerdureError):
        return "user" if isinstance(error, TrainingFailed) else "config"
    if isinstance(error, MemoryError) or type(error).__name__ in ("OutOfMemoryError",):
        return "oom"
    if isinstance(error, (FileNotFoundError, PermissionError, IsADirectoryError, NotADirectoryError)):
        return "user"
    if isinstance(error, OSError) or _lost_a_peer(error):
        return "infrastructure"
    return "user"


def _lost_a_peer(error: BaseException) -> bool:
    """torch.distributed gave up: mostly because another rank is gone, whose own end says why."""
    names = {kind.__name__ for kind in type(error).__mro__}
    return "DistError" in names or (isinstance(error, RuntimeError) and any(text in str(error) for text in _LOST))


def train(link: Link) -> None:
    from perdure.training.engine.loopback import hosted
    from perdure.training.engine.session import Session

    welcome = link.welcome
    session = Session(link, total_steps=int(welcome["steps"]), params=dict(welcome["params"]))
    entry = load_entry(Path(welcome["entry_file"]), str(welcome["entry_function"]))
    signals.install()
    with hosted():
        entry(session)
        session.close()


def _own_log(folder: Path) -> int:
    """Under torchrun: write into a log of this rank's own; its number."""
    rank = int(os.environ["RANK"])
    with files.open_private(folder / rank_log(rank)) as log:
        os.dup2(log, 1)
        os.dup2(log, 2)
    return rank


def main() -> int:
    signals.install()
    die_with_parent(int(os.environ["PERDURE_AGENT_PID"]))
    faulthandler.enable()
    faulthandler.register(signal.SIGUSR2, all_threads=True)
    rank = _own_log(Path(logs)) if (logs := os.environ.get("PERDURE_LOGS")) else 0
    with contextlib.suppress(OSError):
        Path("/proc/self/oom_score_adj").write_text(str(_OOM_SCORE))
    files.set_role("rank")
    link = Link(os.environ["PERDURE_AGENT_SOCKET"], rank)
    link.phase("setup")
    try:
        train(link)
    except BaseException as error:  # the process entry: told to the agent, printed to the log
        sys.stderr.write(redact(traceback.format_exc()))
        where = error.in_one_line() if isinstance(error, PerdureError) else traceback.format_exception_only(error)[-1].strip()
        if isinstance(error, SyntaxError) and error.filename:
            where = f"{error.filename}:{error.lineno}: {where}"
        if isinstance(error, SystemExit) and error.code in (0, None):
            where = "the entry function called sys.exit()"
        detail = redact(where)
        cut = " [...]" if len(detail) > _DETAIL_CHARS else ""
        link.say(failed=classify(error), detail=detail[:_DETAIL_CHARS] + cut)
        return 1
    finally:
        link.close()
    return 0


def leave(status: int) -> NoReturn:
    """As any Python process ends, with its threads awaited and what was registered called, but without taking the interpreter
    apart: threads of torch that still hold Python objects abort it then, now and then, and a finished run counts as failed.
    multiprocessing ends its children in the same way."""
    threading._shutdown()  # type: ignore[attr-defined]
    atexit._run_exitfuncs()
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(status)


if __name__ == "__main__":
    leave(main())
