"""`perdure doctor`: everything a run needs, looked at by really using it. All groups at once, as most of them wait; each has
a time limit, and what it had found by then counts."""

import contextvars
import queue
import threading
import time
from collections.abc import Iterator

from perdure.deployments.checks.finding import Check, Finding, Subject, fail
from perdure.deployments.checks.machine import check_extensions, check_memory, check_python
from perdure.deployments.checks.run import check_run
from perdure.deployments.checks.secrets import check_secrets
from perdure.deployments.checks.server import check_server
from perdure.deployments.checks.slack import check_slack
from perdure.deployments.checks.store import check_store
from perdure.training.redact import redact

LIMIT_SECS = 60.0
GROUPS: dict[str, Check] = {
    "Python": check_python,
    "memory": check_memory,
    "torch extensions": check_extensions,
    "run": check_run,
    "Prefect": check_server,
    "store": check_store,
    "Slack": check_slack,
}


class _Group(threading.Thread):
    """A daemon: one that hangs in a lookup or on a dead mount does not keep the command."""

    def __init__(self, name: str, check: Check, subject: Subject) -> None:
        super().__init__(name=f"doctor {name}", daemon=True)
        self.check, self.subject = check, subject
        self.context = contextvars.copy_context()  # Prefect keeps its settings there
        self.found: queue.SimpleQueue[Finding | BaseException | None] = queue.SimpleQueue()

    def run(self) -> None:
        self.context.run(self._work)

    def _work(self) -> None:
        try:
            for finding in self.check(self.subject):
                self.found.put(finding)
        except BaseException as error:  # raised again where it is seen: a bug of ours keeps its traceback
            self.found.put(error)
        self.found.put(None)


def examine(subject: Subject, limit_secs: float = LIMIT_SECS, groups: dict[str, Check] = GROUPS) -> Iterator[Finding]:
    """Findings in the order of GROUPS, each as soon as it is known."""
    yield from map(_without_secrets, check_secrets(subject))  # first: the others use what it finds
    running = {name: _Group(name, check, subject) for name, check in groups.items()}
    for group in running.values():
        group.start()
    deadline = time.monotonic() + limit_secs
    for name, group in running.items():
        yield from map(_without_secrets, _drain(name, group, deadline, limit_secs))


def _drain(name: str, group: _Group, deadline: float, limit_secs: float) -> Iterator[Finding]:
    while True:
        try:
            found = group.found.get(timeout=max(0.0, deadline - time.monotonic()))
        except queue.Empty:
            yield fail(name, f"no answer within {limit_secs:g} s", "see whether its address or mount is reachable from here")
            return
        if found is None:
            return
        if isinstance(found, BaseException):
            raise found
        yield found


def _without_secrets(finding: Finding) -> Finding:
    return Finding(check=finding.check, level=finding.level, text=redact(finding.text), fix=redact(finding.fix))
