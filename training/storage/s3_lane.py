"""The quick lane to S3, for the bodies of files: signed here and sent over connections of its own, without the rest of boto3.

It gives up instead of failing: whatever is not a plain success is asked for again through boto3, which retries and explains."""

import base64
import functools
import hashlib
import hmac
import ssl
import time
import weakref
import zlib
from collections.abc import Iterator, Mapping
from http.client import HTTPConnection, HTTPException, HTTPResponse, HTTPSConnection
from typing import Any, NamedTuple
from urllib.parse import quote, urlsplit

from botocore.exceptions import BotoCoreError
from botocore.httpsession import get_cert_path
from botocore.utils import get_environ_proxies

_UNSIGNED = "UNSIGNED-PAYLOAD"
"""Bodies of packs and indexes are not signed, not even without TLS: what is stored and read is proven by our own digests, up to
the manifest's, and the manifest is signed."""
_PIECE = 1 << 20
"""Bytes that are handed on at once: they are still in the processor's cache when they are digested and written."""
_LOST = (OSError, HTTPException)
_NO_KEYS = (BotoCoreError, RuntimeError, ValueError)


class _Asked(NamedTuple):
    connection: HTTPConnection
    answer: HTTPResponse


class Lane:
    """For any number of threads. `ca_bundle`: a file of certificates that counts instead of the usual ones. Where a proxy or
    another signature is needed it stays closed."""

    def __init__(
        self,
        client: Any,  # Any: boto3's run-time classes
        credentials: Any,
        bucket: str,
        *,
        checksums: bool,
        ca_bundle: str | None,
    ) -> None:
        self._credentials, self._checksums = credentials, checksums
        self._region, self._limits = client.meta.region_name, client.meta.config
        presigned = client.generate_presigned_url("get_object", Params={"Bucket": bucket, "Key": "x"}) if credentials else ""
        self._base = urlsplit(presigned)
        plain = self._limits.signature_version == "s3v4" and not bucket.endswith("--x-s3")
        self._open = bool(presigned) and plain and not get_environ_proxies(presigned)
        self._trusted: ssl.SSLContext | None = None
        if self._open and self._base.scheme == "https":
            try:
                self._trusted = ssl.create_default_context(cafile=ca_bundle or get_cert_path(True))
            except OSError:  # boto3 says what is wrong with the file
                self._open = False
        self._free: list[HTTPConnection] = []
        """Connections that wait for their next request."""
        weakref.finalize(self, _close, self._free)

    def get(self, key: str, limit: int) -> bytes | None:
        """The object if it has at most `limit` bytes."""
        asked = self._ask("GET", key)
        if asked is None:
            return None
        try:
            size = asked.answer.length
            return asked.answer.read() if size is not None and size <= limit else None
        except _LOST:
            return None
        finally:
            self._give_back(asked)

    def stream(self, key: str, offset: int, length: int) -> Iterator[memoryview]:
        """These bytes in order, each piece in the place of the one before it. The end may come early."""
        asked = self._ask("GET", key, headers={"range": f"bytes={offset}-{offset + length - 1}"})
        if asked is None:
            return
        answer, piece = asked.answer, memoryview(bytearray(min(_PIECE, length)))
        try:
            if answer.length == length and str(answer.headers.get("Content-Range")).startswith(f"bytes {offset}-"):
                while count := _read_into(answer, piece):
                    yield piece[:count]
        finally:
            self._give_back(asked)

    def put(self, key: str, data: bytes, query: Mapping[str, str | int] | None = None) -> str | None:
        """The ETag of the stored object, or of the part that `query` names."""
        headers = {}
        if self._checksums:
            headers["x-amz-checksum-crc32"] = base64.b64encode(zlib.crc32(data).to_bytes(4, "big")).decode()
        asked = self._ask("PUT", key, data, headers, query or {})
        if asked is None:
            return None
        try:
            asked.answer.read(_PIECE)
            return asked.answer.headers.get("ETag")
        except _LOST:
            return None
        finally:
            self._give_back(asked)

    def _ask(
        self,
        method: str,
        key: str,
        data: bytes | None = None,
        headers: Mapping[str, str] = {},
        query: Mapping[str, str | int] = {},
    ) -> _Asked | None:
        """An answer of success, its body not read yet."""
        if not self._open:
            return None
        path = self._base.path.removesuffix("x") + quote(key, safe="/~")
        asked = "&".join(f"{name}={quote(str(query[name]), safe='~')}" for name in sorted(query))
        try:
            signed = self._signed(method, path, asked, headers)
            connection = self._connection()
        except (*_NO_KEYS, *_LOST):
            return None
        try:
            connection.request(method, f"{path}?{asked}" if asked else path, data, signed)
            answer = connection.getresponse()
        except _LOST:
            connection.close()
            return None
        if answer.status in (200, 206):
            return _Asked(connection, answer)
        if 300 <= answer.status < 500 and answer.status not in (404, 408, 429):
            self._open = False  # refused what boto3 may know how to ask for
        answer.close()
        connection.close()
        return None

    def _connection(self) -> HTTPConnection:
        if self._free:
            try:
                return self._free.pop()
            except IndexError:  # another thread was faster
                pass
        host, patience = self._base.netloc, self._limits.connect_timeout
        plain = self._trusted is None
        new = (
            HTTPConnection(host, timeout=patience) if plain else HTTPSConnection(host, timeout=patience, context=self._trusted)
        )
        new.connect()
        new.sock.settimeout(self._limits.read_timeout)
        return new

    def _give_back(self, asked: _Asked) -> None:
        if (
            asked.answer.isclosed() and asked.connection.sock is not None
        ):  # read to its end, and not the last on this connection
            self._free.append(asked.connection)
        else:
            asked.answer.close()
            asked.connection.close()

    def _signed(self, method: str, path: str, query: str, headers: Mapping[str, str]) -> dict[str, str]:
        """The headers with AWS's signature, version 4. botocore makes the same in fifty times the time."""
        keys, stamp = self._credentials.get_frozen_credentials(), time.strftime("%Y%m%dT%H%M%SZ", time.gmtime())
        signed = {"host": self._base.netloc, "x-amz-content-sha256": _UNSIGNED, "x-amz-date": stamp, **headers}
        if keys.token:
            signed["x-amz-security-token"] = keys.token
        scope, names = f"{stamp[:8]}/{self._region}/s3/aws4_request", sorted(signed)
        lines = "".join(f"{name}:{signed[name]}\n" for name in names)
        request = f"{method}\n{path}\n{query}\n{lines}\n{';'.join(names)}\n{_UNSIGNED}"
        text = f"AWS4-HMAC-SHA256\n{stamp}\n{scope}\n{hashlib.sha256(request.encode()).hexdigest()}"
        signature = hmac.digest(_signing_key(keys.secret_key, scope), text.encode(), "sha256").hex()
        said = f"Credential={keys.access_key}/{scope}, SignedHeaders={';'.join(names)}, Signature={signature}"
        return {**signed, "authorization": f"AWS4-HMAC-SHA256 {said}"}


def _close(connections: list[HTTPConnection]) -> None:
    for connection in connections:
        connection.close()


def _read_into(answer: HTTPResponse, piece: memoryview) -> int:
    try:
        return answer.readinto(piece)
    except _LOST:
        return 0


@functools.lru_cache(maxsize=4)
def _signing_key(secret: str, scope: str) -> bytes:
    """For a day, a region and a service."""
    key = f"AWS4{secret}".encode()
    for word in scope.split("/"):
        key = hmac.digest(key, word.encode(), "sha256")
    return key
