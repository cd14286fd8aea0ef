"""Secrets that the environment lacks and a Secret block of the Prefect server has: taken from there, as the flows do."""

import os
from collections.abc import Iterator

from perdure.deployments import api
from perdure.deployments.checks.finding import Finding, Subject, failed, ok, skip
from perdure.deployments.server import ServerFailed
from perdure.training.errors import ConfigError


def check_secrets(subject: Subject) -> Iterator[Finding]:
    """Loads them; silent where nothing is lacking or no server is chosen."""
    from perdure.tasks import blocks

    if subject.config is None or not api.api_url() or not (names := blocks.lacking(subject.config)):
        return
    from prefect.settings import PREFECT_CLIENT_MAX_RETRIES, temporary_settings

    try:
        with temporary_settings({PREFECT_CLIENT_MAX_RETRIES: 0}), api.connected() as client:
            found = blocks.read_secrets(client, subject.config)
    except ConfigError as error:
        yield failed("secret blocks", error)
    except ServerFailed as error:
        yield skip("secret blocks", str(error))
    else:
        os.environ.update(found)
        told = [f"{name} from {blocks.block_of(name)}" for name in found]
        yield ok("secret blocks", ", ".join(told)) if told else skip("secret blocks", f"none for {', '.join(names)}")
