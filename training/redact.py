"""Secrets never leave the process: their values and the shapes of tokens are cut out of every text that goes anywhere."""

import os
import re
from collections.abc import Mapping

MARK = "[redacted]"
_SECRET_NAME = re.compile(r"(?:.*_)?(?:KEY|TOKEN|SECRET|PASSWORD|PASSWD|PASSPHRASE|AUTH_STRING)", re.IGNORECASE)
_IN_URL = re.compile(r"(?<=://)[^\s/@:]*:[^\s/]*(?=@)")
_SHAPES = re.compile(
    r"xox[a-z](?:\.xox[a-z])?-[\w.-]{6,}|xapp-[\w-]{6,}|(?<=hooks\.slack\.com/)\S+"  # Slack
    r"|\b(?:hf|gh[opsur]|github_pat|pn[bu])_\w{20,}|\b(?:sk|glpat)-[\w-]{20,}"  # Hugging Face, GitHub, Prefect, OpenAI, GitLab
    r"|\beyJ[\w-]{8,}\.eyJ[\w-]{8,}\.[\w-]+|(?<=Bearer )[\w.~+/=-]{16,}|(?<=Basic )[\w+/=]{16,}"  # web tokens, HTTP headers
    r"|(?<=X-Amz-Signature=)\w+"
)
_SHORTEST = 8
"""A shorter value is no secret worth the name, and may well be an ordinary word."""


def names_a_secret(name: str) -> bool:
    """Whether a variable of this name is meant to hold a secret: `HF_TOKEN`, `AWS_SECRET_ACCESS_KEY`."""
    return _SECRET_NAME.fullmatch(name) is not None


def is_a_secret(name: str, value: str) -> bool:
    """Whether a setting of this name and value would be cut out of texts: not `pad_token = "<pad>"`."""
    return (names_a_secret(name) and len(value) >= _SHORTEST) or redact(value, {}) != value


def redact(text: str, environment: Mapping[str, str] = os.environ) -> str:
    """`text` with a mark in place of each secret of `environment`, passwords in URLs, and whatever looks like a token."""
    secrets = {value.strip() for name, value in environment.items() if names_a_secret(name)}
    for value in sorted(secrets, key=len, reverse=True):  # one may hold another
        if len(value) >= _SHORTEST:
            text = text.replace(value, MARK)
    return _SHAPES.sub(MARK, _IN_URL.sub(MARK, text))
