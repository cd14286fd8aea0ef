"""The Prefect server that Prefect's own settings name (environment, profile, .env), and its refusals as sentences."""

import contextlib
import os
from collections.abc import Iterator
from typing import TYPE_CHECKING
from urllib.parse import unquote, urlsplit, urlunsplit

from perdure.deployments.server import CLIENT_AUTH, ServerFailed, api_url_from_environment, is_ready
from perdure.training.redact import redact

if TYPE_CHECKING:
    from prefect.client.orchestration import SyncPrefectClient

READY_SECS = 10.0
_AUTH_HINT = "set PREFECT_API_AUTH_STRING (or PREFECT_API_KEY) as the server expects it"
_CA_HINT = "set PREFECT_API_SSL_CERT_FILE to the certificate (PEM) of the authority that signed the server's"


def prepare() -> None:
    """Before Prefect is imported: it shall tell nobody about this command, and a password in PREFECT_API_URL goes where
    all of Prefect looks for it (its events do not read it from the URL) and nobody prints it."""
    os.environ.setdefault("DO_NOT_TRACK", "1")
    parts = urlsplit(api_url_from_environment())
    user, at, host = parts.netloc.rpartition("@")
    if at:
        os.environ |= {"PREFECT_API_URL": urlunsplit(parts._replace(netloc=host)), CLIENT_AUTH: unquote(user)}


def chosen() -> str:
    """What PREFECT_API_URL names, "" where it names nothing. Raises ServerFailed when that does not answer or refuses us."""
    prepare()
    url = api_url_from_environment()
    if url.startswith("http://") and CLIENT_AUTH not in os.environ:  # the quick way: no second of imports
        if not is_ready(url, timeout=READY_SECS):
            raise ServerFailed(f"PREFECT_API_URL is {url}, which does not answer at {url}/ready", _hint(url))
    elif url:
        with connected() as client:
            client.request("GET", "/admin/version")
    return url


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


@contextlib.contextmanager
def connected() -> Iterator["SyncPrefectClient"]:
    """A client of the chosen server. Whatever goes wrong between us and it becomes ServerFailed."""
    import httpx
    from prefect.exceptions import PrefectHTTPStatusError

    url = required_api_url()
    try:
        with _client() as client:
            yield client
    except PrefectHTTPStatusError as error:
        status = error.response.status_code
        hint = _AUTH_HINT if status in (401, 403) else _hint(url)
        said = redact(error.response.text)[:300]
        raise ServerFailed(f"{url} answered {status} to {error.request.url.path}: {said}", hint) from None
    except httpx.HTTPError as error:
        hint = _CA_HINT if "CERTIFICATE_VERIFY_FAILED" in str(error) else _hint(url)
        raise ServerFailed(f"{url} does not answer: {error or type(error).__name__}", hint) from None


def _hint(url: str) -> str:
    """Most servers are at the /api that is easily left out; "" where that is not it."""
    return "" if urlsplit(url).path.strip("/") else f"the API of a Prefect server mostly ends in /api: {url.rstrip('/')}/api"


def _client() -> "SyncPrefectClient":
    from prefect.client.orchestration import get_client
    from prefect.settings import get_current_settings

    try:
        return get_client(sync_client=True)
    except OSError as error:  # of the ssl module, which does not say which file
        file = get_current_settings().api.ssl_cert_file
        raise ServerFailed(f"PREFECT_API_SSL_CERT_FILE = {file!r} cannot be used: {error.strerror}", _CA_HINT) from None
