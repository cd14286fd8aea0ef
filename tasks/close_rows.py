"""Closes in Prefect's database what a dead process left open: its flow run and task runs, which would be Running for ever."""

from typing import TYPE_CHECKING
from urllib.parse import urlsplit
from uuid import UUID

from prefect.client.orchestration import SyncPrefectClient
from prefect.client.schemas.filters import (
    FlowFilter,
    FlowFilterName,
    FlowRunFilter,
    FlowRunFilterId,
    FlowRunFilterState,
    FlowRunFilterStateType,
    TaskRunFilter,
    TaskRunFilterState,
    TaskRunFilterStateType,
)
from prefect.client.schemas.objects import FlowRun, StateType
from prefect.exceptions import ObjectNotFound
from prefect.states import Crashed

from perdure.tasks import flow_runs
from perdure.training.run_dir import RunDir

if TYPE_CHECKING:
    from perdure.tasks.flow_runs import FlowRunRecord

_OPEN = [StateType.RUNNING, StateType.PENDING, StateType.CANCELLING]
_PAGE = 200
_LOOPBACK = ("127.0.0.1", "localhost", "::1")


def close_dead(client: SyncPrefectClient, run: RunDir, *, config: str, overrides: list[str], successor: str = "") -> int:
    """How many rows were closed. The caller holds the run's lock, so that nobody else drives the run."""
    then = f"; flow run {successor} goes on" if successor else ""
    closed = 0
    for record in flow_runs.over(run):
        closed += _close(client, UUID(record.id), _message(record) + then)
        record.closed = True
        flow_runs.write(run, record)
    known = {record.id for record in flow_runs.read(run)} | {successor}
    for flow_run in _unrecorded(client, config, overrides) if urlsplit(str(client.api_url)).hostname in _LOOPBACK else ():
        if str(flow_run.id) not in known:
            closed += _close(client, flow_run.id, "The flow process died while it started" + then)
    return closed


def _message(record: "FlowRunRecord") -> str:
    process = record.process
    return f"Process {process.pid} on {process.host} died without a word (killed, out of memory, or its machine was lost)"


def close_tasks_of(client: SyncPrefectClient, run: RunDir, flow_run_id: UUID) -> None:
    """For whoever sees a flow process die: Prefect closes the flow run, but not the task runs in it."""
    for record in flow_runs.over(run):
        if record.id == str(flow_run_id):
            _close(client, flow_run_id, _message(record))


def _close(client: SyncPrefectClient, flow_run_id: UUID, message: str) -> int:
    """Task runs first: an end state of the flow run means that all of it is closed."""
    try:
        flow_run = client.read_flow_run(flow_run_id)
    except ObjectNotFound:  # another server's, or deleted
        return 0
    closed, wanted = 0, FlowRunFilter(id=FlowRunFilterId(any_=[flow_run_id]))
    still = TaskRunFilter(state=TaskRunFilterState(type=TaskRunFilterStateType(any_=_OPEN)))
    while tasks := client.read_task_runs(flow_run_filter=wanted, task_run_filter=still, limit=_PAGE):
        for task in tasks:
            client.set_task_run_state(task.id, Crashed(message=message), force=True)
        closed += len(tasks)
        if len(tasks) < _PAGE:
            break
    if flow_run.state is None or flow_run.state.type in _OPEN:
        client.set_flow_run_state(flow_run_id, Crashed(message=message), force=True)
        closed += 1
    return closed


def _unrecorded(client: SyncPrefectClient, config: str, overrides: list[str]) -> list[FlowRun]:
    """Flow runs of ours that died before they could enter the run directory. Only of a server of this machine (another may have
    the same path to another run), and none that a worker looks after."""
    found = client.read_flow_runs(
        flow_filter=FlowFilter(name=FlowFilterName(any_=["train"])),
        flow_run_filter=FlowRunFilter(
            state=FlowRunFilterState(type=FlowRunFilterStateType(any_=_OPEN)),
        ),
        limit=_PAGE,
    )
    return [
        one
        for one in found
        if one.deployment_id is None
        and one.parameters.get("config") == config
        and (one.parameters.get("overrides") or []) == overrides
    ]
