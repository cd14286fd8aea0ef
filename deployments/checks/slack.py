"""Slack: the token by auth.test, its scopes by the header of that answer, the channel where the scopes allow a look.

Nothing is posted. The token goes to notify.slack_api only, is never redirected and never shown."""

import json
import os
import re
import urllib.error
import urllib.request
from collections.abc import Iterator
from http.client import HTTPException
from typing import Any
from urllib.parse import urlencode, urlsplit

from perdure.deployments.checks.finding import Finding, Subject, fail, ok, skip, skip_all, warn
from perdure.training.redact import redact

_TIMEOUT_SECS = 5.0
_MAX_ANSWER = 4 << 20
_PAGES = 5
_LOOK = {"channels:read", "groups:read"}
_TOKEN_FIX = "set SLACK_BOT_TOKEN to the bot token (xoxb-...) of the app, where the worker runs"


class _NoRedirect(urllib.request.HTTPRedirectHandler):
    """urllib would carry the token to wherever it is sent."""

    def redirect_request(self, *_: Any) -> None:  # Any: urllib's own arguments
        return None


class _Unreachable(Exception):
    """No answer that is Slack's."""


def check_slack(subject: Subject) -> Iterator[Finding]:
    """Whether messages of this run would arrive."""
    checks = ("Slack token", "Slack scope", "Slack channel")
    if subject.config is None:
        yield from skip_all(checks, "no RUN.toml was named")
        return
    notify, token = subject.config.notify, os.environ.get("SLACK_BOT_TOKEN", "").strip()
    if not notify.slack_channel:
        yield from skip_all(checks, "notify.slack_channel is not set: messages go to the log")
        return
    if not re.fullmatch(r"[\x21-\x7e]+", token):
        why = "holds characters that no token has" if token else "is not set here: messages go to the log"
        yield warn(checks[0], f"SLACK_BOT_TOKEN {why}", _TOKEN_FIX)
        yield from skip_all(checks[1:], "no token")
        return
    try:
        yield from _Slack(notify.slack_api, token).findings(notify.slack_channel)
    except _Unreachable as error:
        yield fail(checks[0], redact(str(error)), "let this machine reach Slack; training itself goes on without it")


class _Slack:
    def __init__(self, api: str, token: str) -> None:
        self.api, self.token = api.rstrip("/") + "/", token
        local = urlsplit(api).hostname in ("127.0.0.1", "localhost", "::1")
        self.opener = urllib.request.build_opener(_NoRedirect(), *([urllib.request.ProxyHandler({})] if local else []))

    def findings(self, channel: str) -> Iterator[Finding]:
        answer, scopes = self.call("auth.test")
        if not answer.get("ok"):
            yield fail("Slack token", f"Slack answers {_code(answer)}", _TOKEN_FIX)
            yield from skip_all(("Slack scope", "Slack channel"), "the token is refused")
            return
        yield ok("Slack token", f"{answer.get('user', '?')} in workspace {answer.get('team', '?')}")
        if scopes is None:
            yield skip("Slack scope", "the answer has no x-oauth-scopes header")
        elif "chat:write" not in scopes:
            have = ", ".join(sorted(scopes)) or "none"
            fix = "add chat:write under OAuth & Permissions of the app, and install it again"
            yield fail("Slack scope", f"the scope chat:write is missing (it has {have})", fix)
        else:
            yield ok("Slack scope", "chat:write")
        yield self.channel(channel, scopes or set())

    def channel(self, wanted: str, scopes: set[str]) -> Finding:
        if not scopes & _LOOK:
            return skip("Slack channel", f"{wanted} cannot be looked up without channels:read; the first message will tell")
        found, problem = self.find(wanted)
        if problem:
            return skip("Slack channel", f"Slack answers {problem}")
        if found is None:
            return fail(
                "Slack channel", f"{wanted} is not there for this bot", "correct notify.slack_channel, or invite the bot"
            )
        if found.get("is_archived"):
            return fail("Slack channel", f"{wanted} is archived", "name another notify.slack_channel")
        if not found.get("is_member") and "chat:write.public" not in scopes:
            return fail("Slack channel", f"the bot is not in {wanted}", "/invite the bot there")
        return ok("Slack channel", f"{wanted}, and the bot may write there")

    def find(self, wanted: str) -> tuple[dict[str, Any] | None, str]:  # Any: JSON values
        """The channel of this id or name, and Slack's word for why it could not be looked for."""
        if re.fullmatch(r"[CGD][A-Z0-9]{6,}", wanted):
            answer, _ = self.call("conversations.info", channel=wanted)
            missing = answer.get("error") == "channel_not_found"
            return answer.get("channel"), "" if answer.get("ok") or missing else _code(answer)
        cursor = ""
        for _ in range(_PAGES):
            answer, _ = self.call("conversations.list", limit="999", exclude_archived="false", cursor=cursor)
            if not answer.get("ok"):
                return None, _code(answer)
            for channel in answer.get("channels", []):
                if channel.get("name") == wanted.removeprefix("#"):
                    return channel, ""
            cursor = answer.get("response_metadata", {}).get("next_cursor", "")
            if not cursor:
                return None, ""
        return None, f"with more than {_PAGES} pages of channels"

    def call(self, method: str, **arguments: str) -> tuple[dict[str, Any], set[str] | None]:  # Any: JSON values
        """Slack's answer and the scopes of the token, None where it does not say."""
        body = urlencode({name: value for name, value in arguments.items() if value}).encode()
        request = urllib.request.Request(self.api + method, data=body, headers={"Authorization": f"Bearer {self.token}"})
        try:
            with self.opener.open(request, timeout=_TIMEOUT_SECS) as response:
                answer = json.loads(response.read(_MAX_ANSWER))
                scopes = response.headers.get("x-oauth-scopes")
        except (OSError, HTTPException, ValueError) as error:
            raise _Unreachable(f"{self.api} gives no usable answer: {error}") from None
        if not isinstance(answer, dict):
            raise _Unreachable(f"{self.api} gives no usable answer")
        return answer, None if scopes is None else {word.strip() for word in scopes.split(",") if word.strip()}


def _code(answer: dict[str, Any]) -> str:  # Any: JSON values
    return str(answer.get("error", "no error code"))[:80]
