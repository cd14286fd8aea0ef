"""What S3 and botocore answer, turned into StoreError: bucket and key, what happened, what to do, whether a retry can help."""

import time
from email.utils import parsedate_to_datetime
from typing import Any

from botocore import exceptions as boto
from botocore.exceptions import BotoCoreError, ClientError

from perdure.training.errors import ObjectNotFound, StoreError

_KEYS = "check AWS_ACCESS_KEY_ID, AWS_SECRET_ACCESS_KEY (or AWS_PROFILE) on this machine"
_RIGHTS = "the key needs the rights listed in docs/stores.md"
_REGION = "set store.region to the bucket's region"
_HINTS = {
    "NoSuchBucket": "create the bucket, or correct store.url",
    "InvalidBucketName": "correct store.url",
    "AccessDenied": _RIGHTS,
    "403": _RIGHTS,
    "AllAccessDisabled": _RIGHTS,
    "AccountProblem": _RIGHTS,
    "InvalidAccessKeyId": _KEYS,
    "SignatureDoesNotMatch": _KEYS,
    "ExpiredToken": "renew the session token",
    "InvalidToken": _KEYS,
    "PermanentRedirect": _REGION,
    "301": _REGION,
    "AuthorizationHeaderMalformed": _REGION,
    "NotImplemented": "this S3 server lacks a needed feature (conditional PUT): use another one",
    "EntityTooSmall": "set store.part_mib to 5 or more",
}
_RETRYABLE = {
    "RequestTimeout",
    "RequestTimeoutException",
    "OperationAborted",
    "ConditionalRequestConflict",
    "Throttling",
    "SlowDown",
}
_UNCONFIGURED = (
    boto.NoCredentialsError,
    boto.PartialCredentialsError,
    boto.ProfileNotFound,
    boto.NoRegionError,
    boto.InvalidConfigError,
    boto.ParamValidationError,
    boto.SSLError,
)


def code_of(error: ClientError) -> str:
    return str(error.response.get("Error", {}).get("Code", ""))


def status_of(error: ClientError) -> int:
    return int(error.response.get("ResponseMetadata", {}).get("HTTPStatusCode", 0))


def was_retried(error: ClientError) -> bool:
    """botocore sent the request more than once: a refusal may be the echo of our own first try."""
    return int(error.response.get("ResponseMetadata", {}).get("RetryAttempts", 0)) > 0


def is_missing(error: ClientError) -> bool:
    return code_of(error) in ("NoSuchKey", "404", "NotFound")


def _clock_difference(error: ClientError) -> float | None:
    """Seconds by which our clock is ahead of the server's."""
    headers: dict[str, Any] = error.response.get("ResponseMetadata", {}).get("HTTPHeaders", {})  # Any: botocore's header values
    try:
        return time.time() - parsedate_to_datetime(str(headers.get("date"))).timestamp()
    except (ValueError, TypeError):
        return None


def from_answer(error: ClientError, where: str, endpoint: str, *, checksums: bool) -> StoreError:
    """The server refused."""
    code, status = code_of(error), status_of(error)
    message = str(error.response.get("Error", {}).get("Message", ""))[:300]
    said = f"{where}: {endpoint} answered {code or status}" + (f" ({message})" if message and message != code else "")
    if is_missing(error):
        return ObjectNotFound(f"{where} does not exist at {endpoint}")
    if code == "RequestTimeTooSkewed":
        skew = _clock_difference(error)
        said += f"; this machine's clock differs by {abs(skew):.0f} s from the server's" if skew is not None else ""
        return StoreError(said, retryable=False, hint="set the clock (NTP)")
    if code in _HINTS:
        return StoreError(said, retryable=False, hint=_HINTS[code])
    if status == 400 and checksums:
        return StoreError(
            said, retryable=False, hint='set store.checksums = "when_required": the server may not know S3 checksums'
        )
    return StoreError(said, retryable=status >= 500 or status in (408, 409, 429) or code in _RETRYABLE)


def from_client(error: BotoCoreError, where: str, endpoint: str) -> StoreError:
    """No usable answer arrived."""
    said = f"{where}: {type(error).__name__} at {endpoint}: {str(error)[:300]}"
    if isinstance(error, (boto.NoCredentialsError, boto.PartialCredentialsError, boto.ProfileNotFound)):
        return StoreError(said, retryable=False, hint=_KEYS)
    if isinstance(error, _UNCONFIGURED):
        return StoreError(said, retryable=False, hint="correct the [store] settings or the AWS configuration")
    return StoreError(said, retryable=True, hint=f"check that {endpoint} can be reached from this machine")
