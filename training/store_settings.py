"""How a place for copies is reached: the settings that [store] and every tier take, and the rules on them. No credentials."""

import re
from collections.abc import Iterator
from typing import Literal

import msgspec

MAX_TAGS = 10
NEED_THAW = ("GLACIER", "DEEP_ARCHIVE")
"""Storage classes of S3 that cannot be read as they are."""
_KEY_ID = re.compile(r"[\w:/.-]{1,2048}", re.ASCII)
_TAG = re.compile(r"[\w +=.:/@-]*", re.ASCII)


class StoreSettings(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    endpoint_url: str = ""
    """S3 endpoint other than AWS."""
    region: str = ""
    addressing: Literal["auto", "path", "virtual"] = "auto"
    """Bucket in the path or in the host name; auto: in the path of an endpoint other than AWS. Some take only `virtual`."""
    checksums: Literal["auto", "always", "when_required"] = "auto"
    """S3 request checksums; auto: always on AWS, only when required on another endpoint."""
    part_mib: int = 16
    """MiB of one part of a multipart transfer."""
    storage_class: str = ""
    """S3 storage class of packs and indexes; what is small stays in the standard one. Empty: all of it."""
    sse: Literal["", "AES256", "aws:kms"] = ""
    """Server-side encryption that every write asks for; empty: what the bucket does by default."""
    sse_kms_key: str = ""
    """Id, ARN or alias of the KMS key; empty with `aws:kms`: AWS's own."""
    tags: dict[str, str] = {}
    """Tags of every object that is written."""


def wrong_store(settings: StoreSettings, url: str, name: str) -> Iterator[tuple[str, str]]:
    """Each setting of the place `name` at `url` that cannot be, with what to do."""
    if not 5 <= settings.part_mib <= 5120:
        yield f"{name}.part_mib = {settings.part_mib} is out of range", "S3 parts have 5 to 5120 MiB"
    endpoint = settings.endpoint_url
    if "@" in endpoint:
        yield f"{name}.endpoint_url holds a user name or password", "credentials come from the environment (docs/stores.md)"
    elif not re.fullmatch(r"(https?://[^\s/]\S*)?", endpoint):
        yield f"{name}.endpoint_url = {endpoint!r} is not a URL", "write for example http://host:9000, or leave it out for AWS"
    yield from _wrong_class(settings, url, name)
    yield from _wrong_encryption(settings, url, name)
    yield from _wrong_tags(settings.tags, f"{name}.tags")


def _wrong_class(settings: StoreSettings, url: str, name: str) -> Iterator[tuple[str, str]]:
    if settings.storage_class and not re.fullmatch(r"[A-Z][A-Z_]{0,63}", settings.storage_class):
        yield f"{name}.storage_class = {settings.storage_class!r} is no storage class", "write for example DEEP_ARCHIVE"
    if settings.storage_class and url and not url.startswith("s3:"):
        yield f"{name}.storage_class is set, but {name}.url = {url!r} is a folder", "leave it out: only S3 has classes"


def _wrong_encryption(settings: StoreSettings, url: str, name: str) -> Iterator[tuple[str, str]]:
    if settings.sse and url and not url.startswith("s3:"):
        yield f"{name}.sse = {settings.sse!r}, but {name}.url = {url!r} is a folder", "leave it out: only S3 encrypts for us"
    if settings.sse_kms_key and settings.sse != "aws:kms":
        yield (
            f"{name}.sse_kms_key is set, but {name}.sse = {settings.sse!r}",
            f'set {name}.sse = "aws:kms", or leave the key out',
        )
    if settings.sse_kms_key and not _KEY_ID.fullmatch(settings.sse_kms_key):
        yield f"{name}.sse_kms_key = {settings.sse_kms_key!r} is no key id", "write its id, ARN or alias/name"


def _wrong_tags(tags: dict[str, str], name: str) -> Iterator[tuple[str, str]]:
    if len(tags) > MAX_TAGS:
        yield f"{name} has {len(tags)} tags", f"S3 takes at most {MAX_TAGS} an object"
    for key, value in tags.items():
        plain = 1 <= len(key) <= 128 and len(value) <= 256 and _TAG.fullmatch(key) and _TAG.fullmatch(value)
        if not plain or key.lower().startswith("aws:"):
            yield f"{name}: {key!r} = {value!r} is no tag", "use letters, digits, space and _ . : / = + - @; not aws:..."


def s3_url(bucket: str, prefix: str) -> str:
    """The one spelling of a bucket's URL; `prefix` as its keys have it."""
    spelled = prefix.strip("/").replace("%", "%25").replace("#", "%23").replace("?", "%3F")
    return f"s3://{bucket}/{spelled}".rstrip("/")
