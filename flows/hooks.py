"""Prefect's hooks on the training flow. Their parameter names are part of Prefect's contract: (flow, flow_run, state)."""

from datetime import timedelta
from typing import Any
from uuid import UUID

import httpx
from prefect import Flow
from prefect.client.orchestration import get_client
from prefect.client.schemas.objects import FlowRun, State
from prefect.deployments import run_deployment
from prefect.exceptions import PrefectException
from prefect.logging.loggers import flow_run_logger

from perdure.flows.restart import Attempt, attempts_of, decide
from perdure.tasks.blocks import load_secrets
from perdure.tasks.close_rows import close_tasks_of
from perdure.tasks.notify import deliver
from perdure.training import events
from perdure.training.agent.launch import END_MARGIN_SECS
from perdure.training.agent.lock import end_agent
from perdure.training.checkpoint import lineage
from perdure.training.config import RunConfig, load_config
from perdure.training.errors import PerdureError
from perdure.training.redact import redact
from perdure.training.run_dir import RunDir

_TERMINATED = "termination signal"
"""What Prefect's state message says of a SIGTERM."""


def on_failure(flow: Flow[..., Any], flow_run: FlowRun, state: State[Any]) -> None:
    """A refusal of ours was decided already; anything else that ends a flow is treated like a crash."""
    error = state.result(raise_on_failure=False) if state.data is not None else None
    if isinstance(error, PerdureError):
        _tell(flow, flow_run)
    else:
        on_crashed(flow, flow_run, state)


def on_crashed(flow: Flow[..., Any], flow_run: FlowRun, state: State[Any]) -> None:
    """The flow process died: the agent saves and leaves by itself; a new flow run goes on, if the decision says so."""
    _close_tasks(flow, flow_run)
    if flow_run.deployment_id is not None:
        _restart(flow_run, flow_run.deployment_id, state)
    _tell(flow, flow_run)  # without a deployment `perdure run` is the parent, which decides by itself


def _restart(flow_run: FlowRun, deployment: UUID, state: State[Any]) -> None:
    """Decide, say so, and schedule the next flow run. A termination signal is a preemption: it costs no budget."""
    _, run = _open(flow_run)
    preempted = _TERMINATED in (state.message or "")
    deaths = int(flow_run.parameters.get("deaths") or 0) + (not preempted)
    since = flow_run.parameters.get("since")
    first = int(since) if since is not None else _first_launch_of(run, flow_run)
    lost = [Attempt(error_class="infrastructure", progress=False)] * deaths
    decision = decide([*attempts_of(run, first), *lost])
    error_class = "preemption" if preempted else "infrastructure"
    newest = lineage.lineage(run)
    about = {"step": newest[0].step if newest else 0, "detail": (state.message or "flow process died")[:1000]}
    following = decision.reason if lost else "going on from the saved step in a new flow run"
    events.record(run, "failed", error_class=error_class, next=following, **about)
    if decision.restart:
        run_deployment(
            deployment,
            timeout=0,
            as_subflow=False,
            idempotency_key=f"{flow_run.id}:restart",
            parameters={**flow_run.parameters, "since": first, "deaths": 0 if _made_progress(run, first) else deaths},
            scheduled_time=_soon(decision.delay),
        )


def _close_tasks(flow: Flow[..., Any], flow_run: FlowRun) -> None:
    """Where the flow process was killed, this is another process, and the task runs would say Running for ever."""
    _, run = _open(flow_run)
    try:
        with get_client(sync_client=True) as client:
            close_tasks_of(client, run, flow_run.id)
    except (httpx.HTTPError, PrefectException, OSError) as error:
        flow_run_logger(flow_run, flow).warning("Task runs of the dead process stay open: %s.", redact(str(error)))


def on_cancellation(flow: Flow[..., Any], flow_run: FlowRun, state: State[Any]) -> None:
    """Somebody cancelled: make sure the trainer is gone (it saves first), restart nothing."""
    config, run = _open(flow_run)
    end_agent(run, grace=config.launch.stop_grace + END_MARGIN_SECS)
    events.record(run, "stopped", reason="cancelled in Prefect")
    _tell(flow, flow_run)


def _soon(delay: float) -> Any:  # Any: Prefect's own DateTime type
    from prefect.types._datetime import now

    return now("UTC") + timedelta(seconds=delay)


def _open(flow_run: FlowRun) -> tuple[RunConfig, RunDir]:
    config = load_config(flow_run.parameters["config"], flow_run.parameters.get("overrides") or [])
    return config, config.directory


def _first_launch_of(run: RunDir, flow_run: FlowRun) -> int:
    """The first token taken since this flow run began."""
    began = flow_run.start_time.timestamp() if flow_run.start_time else 0.0
    return min((token for token, record in lineage.read_launches(run).items() if record.created >= began), default=1)


def _made_progress(run: RunDir, first: int) -> bool:
    return any(name.token >= first for name in lineage.lineage(run))


def _tell(flow: Flow[..., Any], flow_run: FlowRun) -> None:
    config, run = _open(flow_run)
    log = flow_run_logger(flow_run, flow)
    try:
        load_secrets(config)  # this may be another process than the flow's
    except (httpx.HTTPError, PrefectException, PerdureError, OSError) as error:
        log.warning("Secret blocks cannot be read: %s.", redact(str(error)))
    deliver(run, config.notify, logger=log)
