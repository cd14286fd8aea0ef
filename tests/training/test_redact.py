"""What is cut out of a text, and what is left in it."""

import pytest

from perdure.training.errors import StoreError
from perdure.training.redact import MARK, names_a_secret, redact

FORTY = "0123456789abcdefghijABCDEFGHIJ0123456789"


@pytest.mark.parametrize(
    ("text", "left"),
    [
        ("GET http://me:pa@ss@host:4200/api failed", f"GET http://{MARK}@host:4200/api failed"),
        ("postgresql+asyncpg://u:p@db/x", f"postgresql+asyncpg://{MARK}@db/x"),
        (f"hf_{FORTY}, ghp_{FORTY}; pnu_{FORTY}", f"{MARK}, {MARK}; {MARK}"),
        (f"sk-{FORTY}", MARK),
        ("xoxb-1234567890-abcdef.", MARK),
        (f"Authorization: Bearer {FORTY}", f"Authorization: Bearer {MARK}"),
        (f"x?X-Amz-Signature={FORTY}&y=1", f"x?X-Amz-Signature={MARK}&y=1"),
    ],
)
def test_password_in_a_url_and_shape_of_a_token_go(text: str, left: str) -> None:
    assert redact(text, {}) == left


@pytest.mark.parametrize(
    "text", ["http://127.0.0.1:4200/api", "git@host:team/x", "see user@host at 12:30", "sha256-" + FORTY, ""]
)
def test_ordinary_text_stays(text: str) -> None:
    assert redact(text, {}) == text


def test_values_of_secret_variables_go_the_longer_first() -> None:
    environment = {"A_TOKEN": "abcdefgh", "db_password": "abcdefgh-and-more", "PATH": "/usr/local/bin", "SHORT_KEY": "loss"}
    assert redact("abcdefgh-and-more, abcdefgh, /usr/local/bin, loss", environment) == f"{MARK}, {MARK}, /usr/local/bin, loss"


@pytest.mark.parametrize("name", ["HF_TOKEN", "AWS_SECRET_ACCESS_KEY", "PASSWORD", "WANDB_API_KEY", "PREFECT_API_AUTH_STRING"])
def test_names_of_secrets(name: str) -> None:
    assert names_a_secret(name)


@pytest.mark.parametrize(
    "name", ["OMP_NUM_THREADS", "TOKENIZERS_PARALLELISM", "KEYBOARD", "AWS_ACCESS_KEY_ID", "MONKEY", "OLDPWD"]
)
def test_other_names(name: str) -> None:
    assert not names_a_secret(name)


def test_errors_are_born_without_secrets(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("SOME_TOKEN", "hidden-value")
    error = StoreError("said hidden-value", hint="not hidden-value")
    assert (str(error), error.hint) == (f"said {MARK}", f"not {MARK}")
