"""Where Prefect's UI shows a flow run."""

import re

from prefect.settings import get_current_settings


def page_of(flow_run_id: object) -> str:
    """Its URL, without a password."""
    base = re.sub(r"(?<=://)[^/]*@", "", str(get_current_settings().ui_url or ""))
    return f"{base}/v2/runs/flow-run/{flow_run_id}"
