"""What S3 and botocore answer, turned into StoreError: bucket and key, what happened, what to do, whether a retry can help."""

import contextlib
import time
from collections.abc import Iterator
from email.utils import parsedate_to_datetime
from typing import Any

from botocore import exceptions as boto
from botocore.exceptions import BotoCoreError, ClientError

from perdure.training.errors import NeedsThaw, ObjectNotFound, StoreError
from perdure.training.store_settings import StoreSettings

_KEYS = "check AWS_ACCESS_KEY_ID, AWS_SECRET_ACCESS_KEY (or AWS_PROFILE) on this machine"
_RIGHTS = "the key needs the rights listed in docs/stores.md"
_LOGIN = "see what the profile's credential_process says, or log in again (aws sso login)"
_REGION = "set store.region to the bucket's region"
_HINTS = {
    "NoSuchBucket": "create the bucket, or correct store.url",
    "InvalidBucketName": "correct store.url",
    "AccessDenied": _RIGHTS,
    "403": f"the keys may be wrong ({_KEYS}), or {_RIGHTS}",
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
_NEW = ("PutObject", "CreateMultipartUpload", "CopyObject")
_WRITES = (*_NEW, "UploadPart", "CompleteMultipartUpload")
_UNCONFIGURED = (
    boto.NoCredentialsError,
    boto.PartialCredentialsError,
    boto.ProfileNotFound,
    boto.NoRegionError,
    boto.InvalidConfigError,
    boto.ParamValidationError,
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


@contextlib.contextmanager
def credentials_explained(where: str) -> Iterator[None]:
    """Credentials are got or renewed here. A token service that is away comes back, so another try may help."""
    try:
        yield
    except (boto.ProfileNotFound, boto.PartialCredentialsError) as error:
        raise StoreError(f"{where}: {error}", retryable=False, hint=_KEYS) from None
    except (BotoCoreError, RuntimeError, ValueError, OSError) as error:  # botocore lets a broken credential_process through
        said = f"{where}: no usable AWS credentials: {type(error).__name__}: {str(error)[:300]}"
        raise StoreError(said, hint=_LOGIN) from None


def _asked_for(error: ClientError, settings: StoreSettings) -> list[str]:
    """Settings that this request carried, or the upload it is part of, and that not every server knows."""
    new = error.operation_name in _NEW
    tags = ["store.tags"] if settings.tags and new else []
    tags += [f'storage_class = "{settings.storage_class}"'] if settings.storage_class and new else []
    return tags + ([f'store.sse = "{settings.sse}"'] if settings.sse and error.operation_name in _WRITES else [])


def from_answer(error: ClientError, where: str, endpoint: str, *, checksums: bool, settings: StoreSettings) -> StoreError:
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
    if code == "InvalidObjectState":
        return NeedsThaw(f"{where} lies in a storage class that has to be thawed before it can be read")
    if code == "InvalidStorageClass":
        hint = f'{endpoint} has no class "{settings.storage_class}": correct storage_class'
        return StoreError(said, retryable=False, hint=hint)
    asked = _asked_for(error, settings)
    if code.startswith("KMS.") or (settings.sse == "aws:kms" and "kms:" in message):
        return StoreError(said, retryable=False, hint="correct store.sse_kms_key, or let this key use it (docs/stores.md)")
    if code in _HINTS and not (asked and code == "NotImplemented"):
        more = "; store.tags need s3:PutObjectTagging" if settings.tags and _HINTS[code] == _RIGHTS else ""
        more += "; a thaw needs s3:RestoreObject" if error.operation_name == "RestoreObject" else ""
        return StoreError(said, retryable=False, hint=_HINTS[code] + more)
    if status in (400, 501) and (asked or checksums):
        asked += ['checksums (store.checksums = "when_required" leaves them out)'] if checksums else []
        return StoreError(said, retryable=False, hint=f"the server may not know {', or '.join(asked)}")
    if status == 500 and asked:
        return StoreError(said, hint=f"if it repeats, the server may not know {', or '.join(asked)}")
    return StoreError(said, retryable=status >= 500 or status in (408, 409, 429) or code in _RETRYABLE)


def from_client(error: BotoCoreError, where: str, endpoint: str) -> StoreError:
    """No usable answer arrived."""
    said = f"{where}: {type(error).__name__} at {endpoint}: {str(error)[:300]}"
    if isinstance(error, (boto.NoCredentialsError, boto.PartialCredentialsError, boto.ProfileNotFound)):
        return StoreError(said, retryable=False, hint=_KEYS)
    if isinstance(error, boto.SSLError):
        return StoreError(
            said, retryable=False, hint="set AWS_CA_BUNDLE to the file of the certificate authority of the endpoint"
        )
    if isinstance(error, _UNCONFIGURED):
        return StoreError(said, retryable=False, hint="correct the [store] settings or the AWS configuration")
    return StoreError(said, retryable=True, hint=f"check that {endpoint} can be reached from this machine")
