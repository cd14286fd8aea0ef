"""What only S3 has: keys with few rights, wrong settings, multipart uploads cut off anywhere, answers lost on the way."""

import gzip
import importlib.util
import json
import re
import secrets
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Callable
from email.utils import formatdate
from pathlib import Path
from typing import Any

import pytest
from botocore.auth import S3SigV4Auth
from botocore.awsrequest import AWSRequest
from botocore.credentials import Credentials
from botocore.exceptions import UnknownServiceError
from botocore.session import get_session

from perdure.training.errors import ConfigError, ObjectNotFound, StoreError
from perdure.training.storage.s3 import S3Store
from perdure.training.storage.s3_session import new_session
from perdure.training.storage.store import StoreSettings, open_store

_spec = importlib.util.spec_from_file_location("storage_proxy", Path(__file__).with_name("proxy.py"))
assert _spec
assert _spec.loader
proxies = importlib.util.module_from_spec(_spec)
sys.modules["storage_proxy"] = proxies
_spec.loader.exec_module(proxies)
Reply, proxy_to, times = proxies.Reply, proxies.proxy_to, proxies.times

PART = 5 << 20
OpenS3 = Callable[..., S3Store]


def pattern(size: int) -> bytes:
    return (bytes(range(256)) * (size // 256 + 1))[:size]


@pytest.fixture
def big(tmp_path: Path) -> Path:
    path = tmp_path / "big"
    path.write_bytes(pattern(12 << 20))
    return path


def read_back(store: S3Store, key: str, size: int) -> bytes:
    return b"".join(store.get_range(key, at, min(PART, size - at)) for at in range(0, size, PART))


def is_(*operations: str) -> Callable[[Any], bool]:
    return lambda seen: seen.operation in operations


def test_a_killed_upload_goes_on_from_its_parts(open_s3: OpenS3, s3_keys: Any, tmp_path: Path) -> None:
    data = b"".join(secrets.token_bytes(PART) for _ in range(8))
    (tmp_path / "big").write_bytes(data)
    with proxy_to(s3_keys.endpoint) as proxy:
        store = open_s3(endpoint=proxy.endpoint)
        settings = json.dumps({"endpoint_url": s3_keys.endpoint, "region": "us-east-1", "part_mib": 5})
        command = [sys.executable, str(Path(__file__).with_name("racer.py")), "upload", store.url, settings]
        killed = subprocess.run([*command, "x.pack", str(tmp_path / "big"), "3"], capture_output=True)
        assert killed.returncode == -signal.SIGKILL, killed.stderr
        assert store.size("x.pack") is None
        assert [upload.key for upload in store.list_uploads("")] == ["x.pack"]
        proxy.log.clear()
        store.put_file("x.pack", tmp_path / "big")
        assert proxy.operations().count("part") <= 5
        assert "create" not in proxy.operations()
    assert store.get("x.pack", limit=len(data)) == data
    assert list(store.list_uploads("")) == []


def test_a_part_of_other_bytes_is_sent_again(open_s3: OpenS3, s3_keys: Any, big: Path) -> None:
    store = open_s3()
    upload = store.raw("create_multipart_upload", "x", Key=store.full_key("x"))["UploadId"]
    store.raw("upload_part", "x", Key=store.full_key("x"), UploadId=upload, PartNumber=1, Body=b"\xff" * PART)
    store.put_file("x", big)
    assert store.get("x", limit=13 << 20) == big.read_bytes()


def test_the_upload_of_a_longer_key_is_not_taken_for_ours(open_s3: OpenS3, big: Path) -> None:
    store = open_s3()
    store.raw("create_multipart_upload", "x2", Key=store.full_key("x2"))
    store.put_file("x", big)
    assert [upload.key for upload in store.list_uploads("")] == ["x2"]


def test_a_key_without_delete_can_store_but_not_delete(open_s3: OpenS3, s3_keys: Any, big: Path) -> None:
    store = open_s3(keys=s3_keys.no_delete)
    store.put("small", b"x")
    assert store.put("marker", b"x", if_absent=True)
    store.put_file("big", big)
    with pytest.raises(StoreError, match=r"2 of 2 objects were not deleted.*small \(AccessDenied\)") as caught:
        store.delete(["small", "big"])
    assert not caught.value.retryable
    assert store.size("small") == 1


def test_a_read_only_key_reads_and_says_what_it_may_not(open_s3: OpenS3, s3_keys: Any, big: Path) -> None:
    open_s3(prefix="shared").put("x", b"data")
    store = open_s3(prefix="shared", keys=s3_keys.read_only)
    assert store.get("x", limit=10) == b"data"
    for write in (lambda: store.put("y", b""), lambda: store.put_file("y", big), lambda: store.put("y", b"", if_absent=True)):
        with pytest.raises(StoreError, match=r"s3://ckpt/shared/y.*AccessDenied") as caught:
            write()
        assert not caught.value.retryable
        assert "docs/stores.md" in caught.value.hint


@pytest.mark.parametrize("which", ["access", "secret"])
def test_wrong_keys_are_named_without_showing_the_secret(open_s3: OpenS3, s3_keys: Any, which: str) -> None:
    good = s3_keys.admin
    changed = {"access": "AKNOBODY", "secret": "not-the-secret-of-anyone"}[which]
    keys = type(good)(**{**vars(good), which: changed})
    store = open_s3(keys=keys)
    for ask in (lambda: store.get("x", limit=1), lambda: store.size("x")):  # an answer to HEAD has no words
        with pytest.raises(StoreError) as caught:
            ask()
        assert not caught.value.retryable
        assert "AWS_ACCESS_KEY_ID" in caught.value.hint
        assert keys.secret not in str(caught.value) + caught.value.hint + repr(caught.value)


def test_no_keys_at_all_are_said_to_be_missing(
    open_s3: OpenS3, s3_keys: Any, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    for name in ("AWS_ACCESS_KEY_ID", "AWS_SECRET_ACCESS_KEY"):
        monkeypatch.delenv(name)
    monkeypatch.setenv("AWS_SHARED_CREDENTIALS_FILE", str(tmp_path / "none"))
    monkeypatch.setenv("AWS_CONFIG_FILE", str(tmp_path / "none"))
    settings = {"endpoint_url": s3_keys.endpoint, "region": "us-east-1"}
    store = open_store("s3://ckpt/x", StoreSettings(**settings))
    with pytest.raises(StoreError, match="NoCredentials") as caught:
        store.size("x")
    assert not caught.value.retryable


def test_a_wrong_bucket_is_named(open_s3: OpenS3, big: Path) -> None:
    store = open_s3(bucket="no-such-bucket")
    for call in (lambda: store.put("x", b""), lambda: store.put_file("x", big), lambda: list(store.list(""))):
        with pytest.raises(StoreError, match=r"no-such-bucket.*NoSuchBucket") as caught:
            call()
        assert not caught.value.retryable
        assert "create the bucket" in caught.value.hint


def test_an_endpoint_that_is_not_there_fails_soon_and_can_be_retried(open_s3: OpenS3) -> None:
    with socket.socket() as closed:
        closed.bind(("127.0.0.1", 0))
        store = open_s3(endpoint=f"http://127.0.0.1:{closed.getsockname()[1]}")
        started = time.monotonic()
        with pytest.raises(StoreError, match=r"EndpointConnectionError.*127\.0\.0\.1") as caught:
            store.size("x")
    assert caught.value.retryable
    assert time.monotonic() - started < 60


@pytest.mark.parametrize(
    "url", ["s3://", "ftp://x/y", "file://host/x", "nothing", "", "s3://bucket/p?x=1", "file:relative", "file:///tmp/x#y"]
)
def test_an_impossible_url_is_refused(url: str) -> None:
    with pytest.raises(ConfigError, match="is not a store"):
        open_store(url)


def test_busy_answers_are_retried_until_they_work(open_s3: OpenS3, s3_keys: Any, big: Path, tmp_path: Path) -> None:
    with proxy_to(s3_keys.endpoint, times(2, is_("part", "complete"), Reply(503, "SlowDown"))) as proxy:
        store = open_s3(endpoint=proxy.endpoint)
        store.put_file("x", big)
        proxy.rule = times(2, is_("get"), Reply(500))
        back = read_back(store, "x", big.stat().st_size)
    assert back == big.read_bytes()


def test_where_the_quick_lane_is_refused_boto3_goes_on_alone(open_s3: OpenS3, s3_keys: Any, big: Path, tmp_path: Path) -> None:
    """A server may want every body signed; a lost request says nothing about it."""
    small = tmp_path / "small"
    small.write_bytes(b"x" * 1000)
    unsigned = lambda seen: seen.headers.get("x-amz-content-sha256") == "UNSIGNED-PAYLOAD"  # noqa: E731
    with proxy_to(s3_keys.endpoint, times(2, unsigned, Reply(503, "SlowDown"))) as proxy:
        store = open_s3(endpoint=proxy.endpoint)
        store.put_file("small", small)
        assert store.get("small", limit=1000) == small.read_bytes()
        proxy.log.clear()
        store.put_file("small", small)
        assert [unsigned(seen) for seen in proxy.log] == [True]
        proxy.rule = lambda seen: Reply(400, "InvalidRequest") if unsigned(seen) else None
        for key, path in (("small", small), ("big", big)):
            store.put_file(key, path)
            assert read_back(store, key, path.stat().st_size) == path.read_bytes()
        assert [unsigned(seen) for seen in proxy.log].count(True) == 2


@pytest.mark.parametrize("token", ["", "session/token=="])
def test_the_quick_lane_signs_as_botocore_does(monkeypatch: pytest.MonkeyPatch, token: str) -> None:
    for name, value in {"ACCESS_KEY_ID": "AKX", "SECRET_ACCESS_KEY": "s/ecret", "SESSION_TOKEN": token}.items():
        monkeypatch.setenv(f"AWS_{name}", value)
    store = S3Store("bucket", "p", StoreSettings(endpoint_url="http://host:9000", region="eu-north-1"))
    path, query = "/bucket/p/a%20b~%C3%A9", {"partNumber": "1", "uploadId": "x%2F%3D"}
    asked = "&".join(f"{name}={value}" for name, value in query.items())
    signed = store._lane._signed("PUT", path, asked, {"x-amz-checksum-crc32": "AAAA=="})
    ours = signed.pop("authorization")
    auth = S3SigV4Auth(Credentials("AKX", "s/ecret", token), "s3", "eu-north-1")
    request = AWSRequest("PUT", f"http://host:9000{path}?{asked}", signed)
    request.context["timestamp"] = signed["x-amz-date"]
    signature = auth.signature(auth.string_to_sign(request, auth.canonical_request(request)), request)
    auth._inject_signature_to_request(request, signature)
    assert ours.split() == request.headers["Authorization"].split()
    assert (signed.get("x-amz-security-token") or "") == token


def test_where_a_proxy_is_asked_for_the_quick_lane_stays_closed(open_s3: OpenS3, monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("no_proxy", "NO_PROXY"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("http_proxy", "http://127.0.0.1:9")
    assert open_s3().send("x", b"1") is None


def test_an_endless_503_is_a_retryable_error_and_keeps_the_parts(open_s3: OpenS3, s3_keys: Any, big: Path) -> None:
    with proxy_to(s3_keys.endpoint, lambda seen: Reply(503, "SlowDown") if "partNumber=3" in seen.path else None) as proxy:
        store = open_s3(endpoint=proxy.endpoint)
        with pytest.raises(StoreError, match="SlowDown") as caught:
            store.put_file("x", big)
        assert caught.value.retryable
        assert len(list(store.list_uploads(""))) == 1
        proxy.rule = lambda _: None
        proxy.log.clear()
        store.put_file("x", big)
        assert proxy.operations().count("part") == 1


def test_a_refused_part_aborts_the_upload(open_s3: OpenS3, s3_keys: Any, big: Path) -> None:
    with proxy_to(s3_keys.endpoint, lambda seen: Reply(403, "AccessDenied") if "partNumber=2" in seen.path else None) as proxy:
        store = open_s3(endpoint=proxy.endpoint)
        with pytest.raises(StoreError, match="AccessDenied"):
            store.put_file("x", big)
        assert list(store.list_uploads("")) == []
        assert store.size("x") is None


def test_answers_cut_in_the_middle_are_asked_for_again(open_s3: OpenS3, s3_keys: Any, big: Path, tmp_path: Path) -> None:
    with proxy_to(s3_keys.endpoint, times(2, is_("get"), Reply(cut_answer=True))) as proxy:
        store = open_s3(endpoint=proxy.endpoint)
        store.put_file("x", big)
        back = read_back(store, "x", big.stat().st_size)
        asked = [seen.headers["range"] for seen in proxy.log if seen.operation == "get"]
        assert asked[1] == f"bytes={PART // 2}-{PART - 1}", "what had come is not fetched again"
        proxy.rule = lambda seen: Reply(cut_answer=True) if seen.operation == "get" else None
        for read in (lambda: store.get("x", limit=13 << 20), lambda: store.get_range("x", 5, 1000)):
            with pytest.raises(StoreError) as caught:
                read()
            assert caught.value.retryable
    assert back == big.read_bytes()


def test_a_conditional_put_whose_answer_was_lost_is_known_as_ours(open_s3: OpenS3, s3_keys: Any) -> None:
    with proxy_to(s3_keys.endpoint, times(1, is_("put"), Reply(lose_answer=True))) as proxy:
        assert open_s3(endpoint=proxy.endpoint).put("marker", b"owner-1", if_absent=True) is True
        assert [seen.status for seen in proxy.log if seen.operation == "put"] == [200, 412]


def test_a_conditional_put_that_lost_is_not_taken_for_ours_after_a_retry(open_s3: OpenS3, s3_keys: Any) -> None:
    with proxy_to(s3_keys.endpoint, times(1, is_("put"), Reply(503, "SlowDown"))) as proxy:
        store = open_s3(endpoint=proxy.endpoint)
        open_s3(prefix=store.url.removeprefix("s3://ckpt/")).put("marker", b"theirs")
        assert store.put("marker", b"owner-1", if_absent=True) is False
        assert store.get("marker", limit=20) == b"theirs"


@pytest.mark.parametrize("reply", [Reply(500, after=True), Reply(404, "NoSuchUpload", after=True), Reply(lose_answer=True)])
def test_a_completion_that_happened_but_was_not_confirmed_counts(open_s3: OpenS3, s3_keys: Any, big: Path, reply: Any) -> None:
    with proxy_to(s3_keys.endpoint, lambda seen: reply if seen.operation == "complete" else None) as proxy:
        store = open_s3(endpoint=proxy.endpoint)
        store.put_file("x", big)
        assert proxy.operations().count("create") == 1
        assert proxy.operations().count("part") == 3
    assert store.get("x", limit=13 << 20) == big.read_bytes()


def test_a_completion_that_did_not_happen_is_not_believed_from_an_older_object(
    open_s3: OpenS3, s3_keys: Any, big: Path, tmp_path: Path
) -> None:
    (tmp_path / "older").write_bytes(b"\0" * (12 << 20))
    with proxy_to(s3_keys.endpoint) as proxy:
        store = open_s3(endpoint=proxy.endpoint)
        store.put_file("x", tmp_path / "older")
        proxy.rule = lambda seen: Reply(500) if seen.operation == "complete" else None
        with pytest.raises(StoreError, match="InternalError"):
            store.put_file("x", big)


def test_invalid_part_once_leads_to_a_fresh_upload(open_s3: OpenS3, s3_keys: Any, big: Path) -> None:
    with proxy_to(s3_keys.endpoint, times(1, is_("complete"), Reply(400, "InvalidPart"))) as proxy:
        store = open_s3(endpoint=proxy.endpoint)
        store.put_file("x", big)
        assert proxy.operations().count("create") == 2
        assert list(store.list_uploads("")) == []
        proxy.rule = lambda seen: Reply(400, "InvalidPart") if seen.operation == "complete" else None
        with pytest.raises(StoreError, match="InvalidPart"):
            store.put_file("y", big)
        assert list(store.list_uploads("")) == []


def _rejects_checksums(seen: Any) -> Any:
    names = [n for n in seen.headers if n.startswith(("x-amz-checksum-", "x-amz-sdk-checksum-", "x-amz-trailer"))]
    return Reply(400, "InvalidRequest") if names else None


def test_a_server_that_rejects_checksum_headers_is_served_without_them(
    open_s3: OpenS3, s3_keys: Any, big: Path, tmp_path: Path
) -> None:
    with proxy_to(s3_keys.endpoint, _rejects_checksums) as proxy:
        store = open_s3(endpoint=proxy.endpoint)
        for size in (12 << 20, 1024, 0):
            (tmp_path / "source").write_bytes(pattern(size))
            store.put_file("x", tmp_path / "source")
            assert read_back(store, "x", size) == pattern(size)
        for call in (lambda s: s.put("x", b"1"), lambda s: s.put_file("x", big)):
            with pytest.raises(StoreError, match="InvalidRequest") as caught:
                call(open_s3(endpoint=proxy.endpoint, checksums="always"))
            assert "store.checksums" in caught.value.hint


def test_with_checksums_always_a_byte_flipped_on_the_way_up_is_refused_by_the_server(
    open_s3: OpenS3, s3_keys: Any, big: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with proxy_to(s3_keys.endpoint) as proxy:
        store = open_s3(endpoint=proxy.endpoint, checksums="always")
        store.put_file("good", big)
        answer = store.raw("head_object", "good", Key=store.full_key("good"), ChecksumMode="ENABLED")
        assert answer["ChecksumType"] == "FULL_OBJECT"
        proxy.rule = lambda seen: Reply(flip_request=True) if seen.operation == "part" else None
        with pytest.raises(StoreError):
            store.put_file("bad", big)
        assert store.size("bad") is None


@pytest.mark.parametrize("part_mib", [5, 8])
def test_etags_of_any_kind_change_nothing(open_s3: OpenS3, s3_keys: Any, big: Path, tmp_path: Path, part_mib: int) -> None:
    store = open_s3(part_mib=part_mib)
    store.put_file("x", big)
    etag = store.head("x")
    expected = {5: "19019d16dd0f439825c39a2c5b9178fd-3", 8: "ced53fb2e4a477a442f2b7ad14abff57-2"}
    assert etag
    assert etag["ETag"].strip('"') == expected[part_mib]  # not the MD5 of the content: nothing to verify with
    random_etag = lambda seen: Reply(answer_headers={"ETag": f'"{secrets.token_hex(16)}"'} if seen.operation == "head" else {})  # noqa: E731
    with proxy_to(s3_keys.endpoint, random_etag) as proxy:
        other = open_s3(endpoint=proxy.endpoint, part_mib=part_mib)
        other.put_file("y", big)
        assert read_back(other, "y", big.stat().st_size) == big.read_bytes()


def test_a_wrong_clock_is_named_in_seconds(open_s3: OpenS3, s3_keys: Any) -> None:
    began = int(time.time())
    skewed = Reply(403, "RequestTimeTooSkewed", headers={"Date": formatdate(began + 3600, usegmt=True)})
    with proxy_to(s3_keys.endpoint, lambda _: skewed) as proxy, pytest.raises(StoreError) as caught:
        open_s3(endpoint=proxy.endpoint).put("x", b"1")
    passed = time.time() - began  # the server's clock stood still meanwhile
    told = re.search(r"clock differs by (\d+) s", str(caught.value))
    assert told
    assert 3600 - passed - 1 <= int(told[1]) <= 3600
    assert not caught.value.retryable
    assert "clock" in caught.value.hint


def test_a_range_that_the_server_ignores_is_not_taken_for_the_part(open_s3: OpenS3, s3_keys: Any) -> None:
    with proxy_to(s3_keys.endpoint) as proxy:
        store = open_s3(endpoint=proxy.endpoint)
        store.put("x", b"0123456789")
        proxy.rule = lambda seen: Reply(answer_headers={"Content-Range": "bytes 0-3/10"}) if seen.operation == "get" else None
        with pytest.raises(StoreError, match="did not give bytes 4 to 7"):
            store.get_range("x", 4, 4)


def test_uploads_of_a_neighbour_with_a_longer_prefix_are_left_alone(open_s3: OpenS3, big: Path) -> None:
    mine, theirs = open_s3(prefix="team/run"), open_s3(prefix="team/run2")
    for store in (mine, theirs):
        store.raw("create_multipart_upload", "x", Key=store.full_key("x"))
    assert mine.abort_uploads("", older_than_secs=-5) == 1
    assert [upload.key for upload in theirs.list_uploads("")] == ["x"]
    theirs.abort_uploads("", older_than_secs=-5)


def test_a_whole_bucket_can_be_a_store(s3_keys: Any, open_s3: OpenS3) -> None:
    bucket = s3_keys.make_bucket()
    store = open_store(f"s3://{bucket}/", StoreSettings(endpoint_url=s3_keys.endpoint, region="us-east-1"))
    store.put("a/b", b"x")
    assert [info.key for info in store.list("")] == ["a/b"]
    with pytest.raises(ObjectNotFound, match=f"s3://{bucket}/none"):
        store.get("none", limit=1)
    store.client.close()  # type: ignore[attr-defined]


@pytest.mark.parametrize("kind", ["service-2", "endpoint-rule-set-1"])
@pytest.mark.parametrize("service", ["s3", "sts", "sso-oidc"])
def test_our_quick_session_reads_the_same_models_as_botocore(service: str, kind: str) -> None:
    ours, own = new_session().get_component("data_loader"), get_session().get_component("data_loader")
    assert ours.load_service_model(service, kind) == own.load_service_model(service, kind)
    assert ours.load_data("endpoints") == own.load_data("endpoints")
    with pytest.raises(UnknownServiceError):
        ours.load_service_model("no-such-service", kind)


def test_models_of_a_users_own_are_found_by_our_session(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    own = tmp_path / "own-service" / "2026-01-01"
    own.mkdir(parents=True)
    (own / "service-2.json").write_text('{"metadata": {}}')
    (own / "waiters-2.json.gz").write_bytes(gzip.compress(b'{"version": 2}'))
    monkeypatch.setenv("AWS_DATA_PATH", str(tmp_path))
    loader = new_session().get_component("data_loader")
    assert loader.load_service_model("own-service", "service-2") == {"metadata": {}}
    assert loader.load_service_model("own-service", "waiters-2") == {"version": 2}
