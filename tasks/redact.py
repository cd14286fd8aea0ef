"""Secrets never leave the process: their values and the shapes of tokens are cut out of every text that goes anywhere."""

import os
import re

_NAMES = (
    "SLACK_BOT_TOKEN", "AWS_SECRET_ACCESS_KEY", "AWS_SESSION_TOKEN", "PREFECT_API_KEY", "PREFECT_API_AUTH_STRING",
    "PREFECT_SERVER_API_AUTH_STRING",
)  # fmt: skip
_SHAPES = re.compile(r"xox[a-z](?:\.xox[a-z])?-[\w.-]{6,}|xapp-[\w-]{6,}|(?<=hooks\.slack\.com/)\S+")
_SHORTEST = 6
MARK = "[redacted]"


def redact(text: str) -> str:
    """`text` with a mark in place of each secret of this process's environment and of whatever looks like a Slack token."""
    for name in _NAMES:
        value = os.environ.get(name, "").strip()
        if len(value) >= _SHORTEST:
            text = text.replace(value, MARK)
    return _SHAPES.sub(MARK, text)
