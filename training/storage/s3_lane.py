"""The quick lane to S3, for the bodies of files: signed by botocore, sent without the rest of boto3, at a third of its cost.

It gives up instead of failing: whatever is not a plain success is asked for again through boto3, which retries and explains."""

import base64
import zlib
from collections.abc import Mapping
from typing import Any
from urllib.parse import quote

from botocore.auth import S3SigV4Auth
from botocore.awsrequest import AWSRequest
from botocore.config import Config
from botocore.exceptions import BotoCoreError
from urllib3.exceptions import HTTPError

_UNSIGNED = Config(s3={"payload_signing_enabled": False})
"""Bodies of packs and indexes are not signed, not even without TLS: what is stored and read is proven by our own digests, up to
the manifest's, and the manifest is signed."""


class Lane:
    """Made from a boto3 client; any number of threads may use it."""

    def __init__(self, client: Any, credentials: Any, bucket: str, *, checksums: bool) -> None:  # Any: boto3's run-time classes
        self._client, self._credentials, self._checksums = client, credentials, checksums
        presigned = client.generate_presigned_url("get_object", Params={"Bucket": bucket, "Key": "x"}) if credentials else ""
        self._base = presigned.partition("?")[0].removesuffix("x")
        plain = client.meta.config.signature_version == "s3v4" and not bucket.endswith("--x-s3")  # those want another signature
        self._open = bool(self._base) and plain

    def get(self, key: str, limit: int, span: tuple[int, int] | None = None) -> bytes | None:
        """The object if it has at most `limit` bytes, or `length` bytes at `offset` of it."""
        headers = {"Range": f"bytes={span[0]}-{span[0] + span[1] - 1}"} if span else {}
        answer = self._send("GET", key, b"", headers)
        if answer is None or (span and answer.status_code != 206):
            return None
        size = int(answer.headers.get("Content-Length", -1))
        if not 0 <= size <= limit or (
            span and not str(answer.headers.get("Content-Range", "")).startswith(f"bytes {span[0]}-")
        ):
            answer.raw.close()
            return None
        try:
            data: bytes = answer.raw.read()
        except (HTTPError, OSError):
            return None
        return data if len(data) == size == (span[1] if span else size) else None

    def put(self, key: str, data: bytes, query: Mapping[str, str | int] | None = None) -> str | None:
        """The ETag of the stored object, or of the part that `query` names."""
        headers = {}
        if self._checksums:
            headers["x-amz-checksum-crc32"] = base64.b64encode(zlib.crc32(data).to_bytes(4, "big")).decode()
        answer = self._send("PUT", key, data, headers, query)
        return None if answer is None else answer.headers.get("ETag")

    def _send(
        self, method: str, key: str, data: bytes, headers: dict[str, str], query: Mapping[str, str | int] | None = None
    ) -> Any:  # Any: botocore's AWSResponse, its body not read yet; None: ask boto3
        if not self._open:
            return None
        request = AWSRequest(method, self._base + quote(key, safe="/~"), headers, data, dict(query or {}))
        request.context["client_config"] = _UNSIGNED
        request.stream_output = method == "GET"
        try:
            S3SigV4Auth(self._credentials.get_frozen_credentials(), "s3", self._client.meta.region_name).add_auth(request)
            # the client's own session: its pool, time limits, proxies and certificates
            answer = self._client._endpoint.http_session.send(request.prepare())
        except (BotoCoreError, HTTPError, OSError):
            return None
        if answer.status_code in (200, 206):
            return answer
        if 300 <= answer.status_code < 500 and answer.status_code not in (404, 408, 429):
            self._open = False  # refused what boto3 may know how to ask for
        if request.stream_output:
            _ = answer.content  # read, so that the connection can be used again
        return None
