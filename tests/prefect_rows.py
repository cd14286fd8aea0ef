"""What Prefect has written down about a run."""

from harness import Run
from prefect import get_client
from prefect.client.schemas.filters import FlowFilter, FlowFilterName
from prefect.client.schemas.objects import FlowRun


def flow_runs_of(run: Run) -> list[FlowRun]:
    """Those that trained it, oldest first. By pages: one holds 200, and what other tests' schedules plan comes first."""
    ours: list[FlowRun] = []
    offset, train = 0, FlowFilter(name=FlowFilterName(any_=["train"]))
    with get_client(sync_client=True) as client:
        while page := client.read_flow_runs(flow_filter=train, offset=offset):
            ours += [one for one in page if one.parameters.get("config") == str(run.toml)]
            offset += len(page)
    return sorted(ours, key=lambda one: one.created)
