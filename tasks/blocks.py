"""Secrets that Prefect's Secret blocks hold, for a worker whose environment has none: they go into the environment of this very
process, where everything looks for them, and nowhere else. What the environment has wins."""

import logging
import os
from typing import TYPE_CHECKING, Literal

from prefect.client.orchestration import get_client
from prefect.exceptions import ObjectNotFound, PrefectHTTPStatusError

from perdure.training.config import RunConfig
from perdure.training.errors import ConfigError

if TYPE_CHECKING:
    from prefect.client.orchestration import SyncPrefectClient

logger = logging.getLogger(__name__)
SLACK = "SLACK_BOT_TOKEN"
AWS = ("AWS_ACCESS_KEY_ID", "AWS_SECRET_ACCESS_KEY", "AWS_SESSION_TOKEN")
_AWS_CHAIN = (
    *AWS, "AWS_PROFILE", "AWS_WEB_IDENTITY_TOKEN_FILE", "AWS_CONTAINER_CREDENTIALS_RELATIVE_URI",
    "AWS_CONTAINER_CREDENTIALS_FULL_URI",
)  # fmt: skip
"""With any of these the environment has said where keys come from: no half of one pair and half of another."""


def block_of(variable: str) -> str:
    """Name of the Secret block that stands for a variable: `perdure-slack-bot-token`."""
    return "perdure-" + variable.lower().replace("_", "-")


def wanted(config: RunConfig) -> list[str]:
    """Variables that the run can use."""
    keys = AWS if any(url.startswith("s3:") for url in (config.store_url, *config.tier_urls.values())) else ()
    return [*([SLACK] if config.notify.slack_channel else []), *keys]


def lacking(config: RunConfig) -> list[str]:
    """Those of them that the environment leaves to blocks."""
    taken = {SLACK} if SLACK in os.environ else set()
    taken |= set(AWS) if any(name in os.environ for name in _AWS_CHAIN) else set()
    return [name for name in wanted(config) if name not in taken]


def look_for(client: "SyncPrefectClient", variable: str) -> Literal["found", "not there", "forbidden"]:
    try:
        client.read_block_document_by_name(block_of(variable), "secret", include_secrets=False)
    except ObjectNotFound:
        return "not there"
    except PrefectHTTPStatusError as error:
        if error.response.status_code != 403:
            raise
        return "forbidden"
    return "found"


def read_secrets(client: "SyncPrefectClient", config: RunConfig) -> dict[str, str]:
    """Variable -> value, of what is lacking and has a block. Raises ConfigError where a block holds no text, or only one half
    of a pair of keys is there."""
    found = {name: value for name in lacking(config) if (value := _value(client, block_of(name)))}
    if (AWS[0] in found) != (AWS[1] in found) or (AWS[2] in found and AWS[0] not in found):
        absent = next(name for name in AWS if name not in found)
        raise ConfigError(
            f"Secret block {block_of(absent)} is missing, and others for AWS are there", "make it, or delete those"
        )
    return found


def _value(client: "SyncPrefectClient", block: str) -> str:
    try:
        value = client.read_block_document_by_name(block, "secret", include_secrets=True).data.get("value")
    except ObjectNotFound:
        return ""
    except PrefectHTTPStatusError as error:
        if error.response.status_code != 403:
            raise
        logger.warning("The Prefect server lets nobody with this key read Secret block %s; going on without it.", block)
        return ""  # the secret may not be needed: a machine's role, ~/.aws
    if not isinstance(value, str) or not value.strip():
        raise ConfigError(f"Secret block {block} does not hold a text", "put the bare token or key into it")
    return value.strip()


def load_secrets(config: RunConfig) -> None:
    """What every flow begins with. Raises ConfigError."""
    if lacking(config):
        with get_client(sync_client=True) as client:
            os.environ.update(read_secrets(client, config))
