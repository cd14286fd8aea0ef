"""The Prefect server that Prefect's own settings name (environment, profile, .env), and its refusals as sentences."""

import contextlib
import os
from collections.abc import Iterator
from typing import TYPE_CHECKING
from urllib.parse import urlsplit, urlunsplit

from perdure.deployments.server import ServerFailed
from perdure.training.redact import redact

if TYPE_CHECKING:
    from prefect.client.orchestration import SyncPrefectClient

_AUTH_HINT = "set PREFECT_API_AUTH_STRING (or PREFECT_API_KEY) as the server expects it"


def api_url() -> str:
    """URL of the API, fit to be shown; "" when none is chosen."""
    from prefect.settings import get_current_settings

    parts = urlsplit((get_current_settings().api.url or "").rstrip("/"))
    return urlunsplit(parts._replace(netloc=parts.netloc.rpartition("@")[2]))


def required_api_url() -> str:
    """As `api_url`. Raises ServerFailed when no server is chosen."""
    url = api_url()
    if not url:
        raise ServerFailed(
            "no Prefect server is chosen", "set PREFECT_API_URL, or choose a profile: `prefect profile use NAME`"
        )
    return url


def be_quiet() -> None:
    """Before Prefect is imported: it shall tell nobody about this command."""
    os.environ.setdefault("DO_NOT_TRACK", "1")


@contextlib.contextmanager
def connected() -> Iterator["SyncPrefectClient"]:
    """A client of the chosen server. Whatever goes wrong between us and it becomes ServerFailed."""
    import httpx
    from prefect.client.orchestration import get_client
    from prefect.exceptions import PrefectHTTPStatusError

    url = required_api_url()
    try:
        with get_client(sync_client=True) as client:
            yield client
    except PrefectHTTPStatusError as error:
        status = error.response.status_code
        hint = _AUTH_HINT if status in (401, 403) else ""
        said = redact(error.response.text[:300])
        raise ServerFailed(f"{url} answered {status} to {error.request.url.path}: {said}", hint) from None
    except httpx.HTTPError as error:
        raise ServerFailed(f"{url} does not answer: {redact(str(error)) or type(error).__name__}") from None
