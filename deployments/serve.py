"""A Prefect worker for one run on this machine, as long as this process lives. The work is the keeper's, so that whatever kills
this process, nothing of it stays."""

import os
import signal
import subprocess
import sys
from types import TracebackType

from perdure.deployments import server
from perdure.training import files
from perdure.training.agent.launch import END_MARGIN_SECS
from perdure.training.config import RunConfig

FLOW_MARGIN_SECS = 15.0
"""What a stopping flow needs beyond the trainer's grace: pushing the last checkpoint, closing its rows in Prefect."""


def own_pool() -> str:
    """The work pool of this machine's `perdure serve`: a shared server's other pools are none of its business."""
    return f"perdure-serve-{os.uname().nodename}"


class Served:
    """The keeper and its worker, from here to `stop`."""

    def __init__(self, config: RunConfig, pool: str, local: server.LocalServer | None) -> None:
        run = config.directory
        self.grace = config.launch.stop_grace + END_MARGIN_SECS + FLOW_MARGIN_SECS
        self.log = run.flow_log
        command = [sys.executable, "-m", "perdure.deployments.keeper", "--parent", str(os.getpid())]
        command += ["--pool", pool, "--run", str(run.root), "--grace", str(self.grace)]
        held = (local.fd,) if local is not None else ()
        files.make_dirs(self.log.parent)
        with files.open_private(self.log) as log:
            self.keeper = subprocess.Popen(
                command, stdin=subprocess.DEVNULL, stdout=log, stderr=log, pass_fds=held, start_new_session=True
            )

    @property
    def status(self) -> int | None:
        """None while it works."""
        return self.keeper.poll()

    def stop(self, *, at_once: bool = False) -> None:
        """Save and stop; with `at_once` without saving."""
        if self.status is None:
            self.keeper.send_signal(signal.SIGINT if at_once else signal.SIGTERM)

    def __enter__(self) -> "Served":
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        self.stop()
        self.keeper.wait(self.grace + 30)
