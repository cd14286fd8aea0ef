"""One real Prefect server for all tests of this folder."""

import os
from collections.abc import Iterator

import pytest
from prefect.settings import PREFECT_API_URL, temporary_settings

from perdure.deployments import server


@pytest.fixture(scope="session")
def prefect_api(tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    """URL of the API; also in PREFECT_API_URL, with the client settings a run gives its flow."""
    home = server.ServerHome(tmp_path_factory.mktemp("prefect") / "home")
    with server.acquire(home) as local:
        before = dict(os.environ)
        os.environ.update(server.client_environment(local.url, home))
        with temporary_settings({PREFECT_API_URL: local.url}):  # this process has read its settings already
            yield local.url
        os.environ.clear()
        os.environ.update(before)
