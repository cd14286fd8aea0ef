"""Encryption and tags as [store] asks for them, on small objects and on those in parts; servers that know neither say so."""

from collections.abc import Callable
from pathlib import Path

import pytest
from conftest import S3Server
from storage.proxy import Reply, proxy_to

from perdure.training.errors import StoreError
from perdure.training.storage.s3 import S3Store

PART = 5 << 20
OpenS3 = Callable[..., S3Store]


@pytest.fixture
def big(tmp_path: Path) -> Path:
    path = tmp_path / "big"
    path.write_bytes(bytes(PART + 1))
    return path


def test_every_object_is_encrypted_and_tagged_as_asked(open_s3: OpenS3, big: Path) -> None:
    store = open_s3(sse="AES256", tags={"team": "nlp", "run": "a b/c=d"})
    store.put("small", b"x")
    assert store.put("marker", b"x", if_absent=True)
    store.put_file("big", big)
    for key in ("small", "marker", "big"):
        about = store.head(key)
        assert about is not None
        assert about["ServerSideEncryption"] == "AES256", key
        tags = store.raw("get_object_tagging", key, Key=store.full_key(key))["TagSet"]
        assert {tag["Key"]: tag["Value"] for tag in tags} == {"team": "nlp", "run": "a b/c=d"}, key
    assert store.get_range("big", PART - 1, 2) == b"\0\0"


@pytest.mark.parametrize("status", [500, 501])
def test_server_that_does_not_know_the_asked_encryption_is_named_with_the_setting(
    open_s3: OpenS3, s3_keys: S3Server, big: Path, status: int
) -> None:
    """500 is SeaweedFS's own answer to aws:kms, 501 what the book says."""
    rule = (lambda _: None) if status == 500 else (lambda seen: Reply(501, "NotImplemented"))
    with proxy_to(s3_keys.endpoint, rule) as proxy:
        store = open_s3(endpoint=proxy.endpoint, sse="aws:kms", sse_kms_key="alias/perdure")
        for write in (lambda: store.put("x", b"1"), lambda: store.put_file("y", big)):
            with pytest.raises(StoreError) as caught:
                write()
            told = f"{caught.value} {caught.value.hint}"
            assert 'store.sse = "aws:kms"' in told or "did not encrypt it with aws:kms" in told
            assert caught.value.retryable == (status == 500 and "InternalError" in told)
        assert "alias/perdure" in proxy.log[0].headers["x-amz-server-side-encryption-aws-kms-key-id"]


def test_server_that_stores_without_encrypting_is_an_error(open_s3: OpenS3, s3_keys: S3Server) -> None:
    with proxy_to(s3_keys.endpoint) as proxy:
        store = open_s3(endpoint=proxy.endpoint, sse="AES256")
        proxy.rule = lambda seen: Reply(answer_headers={"x-amz-server-side-encryption": ""})
        with pytest.raises(StoreError, match=r"s3://ckpt/.*x was stored, but .* did not encrypt it with AES256") as caught:
            store.put("x", b"1")
    assert not caught.value.retryable


def test_refusal_of_a_write_names_the_setting_that_may_cause_it(open_s3: OpenS3, s3_keys: S3Server) -> None:
    hints = {"InvalidArgument": "store.tags", "AccessDenied": "s3:PutObjectTagging", "KMS.NotFoundException": "sse_kms_key"}
    with proxy_to(s3_keys.endpoint) as proxy:
        store = open_s3(endpoint=proxy.endpoint, tags={"team": "nlp"})
        for code, hint in hints.items():
            proxy.rule = lambda _, code=code: Reply(403 if code == "AccessDenied" else 400, code)
            with pytest.raises(StoreError, match=code) as caught:
                store.put("x", b"1")
            assert hint in caught.value.hint
            assert not caught.value.retryable
        proxy.rule = lambda _: Reply(400, "InvalidArgument")
        with pytest.raises(StoreError, match="InvalidArgument") as reading:
            store.get("x", limit=1)
        assert "store.tags" not in reading.value.hint, "a read carries none"


def test_credentials_that_cannot_be_got_are_one_sentence(
    open_s3: OpenS3, s3_keys: S3Server, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A credential_process that is missing, fails, or prints something else; a profile that is not there."""
    for name in ("AWS_ACCESS_KEY_ID", "AWS_SECRET_ACCESS_KEY"):
        monkeypatch.delenv(name)
    config = tmp_path / "config"
    monkeypatch.setenv("AWS_CONFIG_FILE", str(config))
    monkeypatch.setenv("AWS_SHARED_CREDENTIALS_FILE", str(tmp_path / "none"))
    monkeypatch.setenv("AWS_PROFILE", "work")
    from perdure.training.store_settings import StoreSettings

    def refusal() -> StoreError:
        with pytest.raises(StoreError) as caught:
            S3Store("ckpt", "x", StoreSettings(endpoint_url=s3_keys.endpoint, region="us-east-1")).size("x")
        return caught.value

    for command in ("/no/such/program", "/bin/false", "/bin/echo no-json", '/bin/echo {"Version":1}'):
        config.write_text(f"[profile work]\ncredential_process = {command}\n")
        assert "no usable AWS credentials" in str(refusal()), command
        assert "credential_process" in refusal().hint
    config.write_text("[profile work]\n")
    monkeypatch.setenv("AWS_ACCESS_KEY_ID", "AK")
    monkeypatch.delenv("AWS_PROFILE")
    assert "missing: AWS_SECRET_ACCESS_KEY" in str(refusal())
    assert "check AWS_ACCESS_KEY_ID, AWS_SECRET_ACCESS_KEY" in refusal().hint
    monkeypatch.setenv("AWS_PROFILE", "work")
    monkeypatch.delenv("AWS_ACCESS_KEY_ID")
    config.write_text("[profile home]\n")
    assert "work" in str(refusal())
    assert "AWS_PROFILE" in refusal().hint
