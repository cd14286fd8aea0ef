"""Delivers a run's event log to Slack: one root message edited in place, its failures and recoveries as replies.

Never raises, never takes longer than BUDGET_SECS, never says the token. At least once: the cursor moves after each post."""

import contextlib
import fcntl
import hashlib
import logging
import os
import re
import threading
import time
import urllib.request
from collections.abc import Iterator
from http.client import HTTPMessage, HTTPResponse
from typing import IO, Any
from urllib.parse import urlsplit

import msgspec
from slack_sdk import WebClient
from slack_sdk.errors import SlackApiError

from perdure.tasks import messages
from perdure.tasks.messages import Card, View
from perdure.training import events, files
from perdure.training.checkpoint.run_info import read_run_info
from perdure.training.config import NotifySection
from perdure.training.errors import PerdureError
from perdure.training.redact import redact
from perdure.training.run_dir import RunDir

BUDGET_SECS = 8.0
TIMEOUT_SECS = 3.0
MAX_CARDS = 4
"""Replies in one delivery; Slack takes about one message a second."""
MAX_ANSWER = 1 << 20
_FIRST_PAUSE_SECS, _LONGEST_PAUSE_SECS, _LONGEST_RETRY_AFTER_SECS = 5.0, 300.0, 3600.0
_GONE = ("message_not_found", "channel_not_found", "cant_update_message", "edit_window_closed", "is_inactive")
_HINTS = {
    "not_in_channel": "invite the bot to the channel",
    "channel_not_found": "check notify.slack_channel, and invite the bot to a private channel",
    "invalid_auth": "check SLACK_BOT_TOKEN",
    "not_authed": "check SLACK_BOT_TOKEN",
    "token_revoked": "check SLACK_BOT_TOKEN",
    "missing_scope": "give the bot the scope chat:write",
}
_silent = logging.getLogger(__name__ + ".sdk")
_silent.setLevel(logging.CRITICAL + 1)  # what goes wrong is said once, here, not by the SDK


class Outbox(msgspec.Struct, kw_only=True):
    """slack.json: what Slack has been told."""

    channel: str = ""
    """Id, from Slack's first answer; an edit needs it."""
    ts: str = ""
    cursor: int = 0
    wanted: str = ""
    """The channel setting that `channel` and `ts` belong to."""
    view: View = msgspec.field(default_factory=View)
    shown: str = ""
    """Digest of the root message, so that nothing is edited for nothing."""
    not_before: float = 0.0
    """Slack asked for silence until then, or failed shortly before."""
    failures: int = 0


class _NoRedirect(urllib.request.HTTPRedirectHandler):
    """urllib would carry the token to wherever it is sent."""

    def redirect_request(
        self, req: urllib.request.Request, fp: IO[bytes], code: int, msg: str, headers: HTTPMessage, newurl: str
    ) -> None:
        return None


class _Client(WebClient):
    """No retries, no redirects, no proxy to loopback, bounded answers. The one overridden method is the SDK's only door to
    the network; tests/tasks/test_slack.py notices should it ever be bypassed."""

    def __init__(self, token: str, api: str) -> None:
        super().__init__(token=token, base_url=api, timeout=int(TIMEOUT_SECS), retry_handlers=[], logger=_silent)
        local = urlsplit(api).hostname in ("127.0.0.1", "localhost", "::1")
        self.proxy = None
        self._opener = urllib.request.build_opener(_NoRedirect(), *([urllib.request.ProxyHandler({})] if local else []))

    def _perform_urllib_http_request_internal(
        self, url: str, req: urllib.request.Request
    ) -> dict[str, Any]:  # Any: the SDK's type
        answer: HTTPResponse
        with self._opener.open(req, timeout=self.timeout) as answer:
            body = answer.read(MAX_ANSWER + 1)
        if len(body) > MAX_ANSWER:
            raise ValueError("the answer is too long to be Slack's")
        return {"status": answer.status, "headers": answer.headers, "body": body.decode("utf-8", "replace")}


class _OutOfTime(Exception):
    """The rest waits for the next delivery."""


class _Delivery:
    def __init__(
        self, run: RunDir, settings: NotifySection, logger: Any, flow_url: str
    ) -> None:  # Any: Logger or LoggerAdapter
        self.run, self.settings, self.logger, self.flow_url = run, settings, logger, flow_url
        self.deadline = time.monotonic() + BUDGET_SECS
        self.outbox = Outbox()
        self.client: _Client | None = None

    def go(self) -> None:
        with _locked(self.run, self.deadline):
            self.outbox = _load(self.run)
            token = self.token()
            pause = self.outbox.not_before - time.time()
            if token and 0 < pause <= _LONGEST_RETRY_AFTER_SECS:
                return
            try:
                self.client = _Client(token, self.settings.slack_api) if token else None
                self.tell()
            except _OutOfTime:
                pass
            except Exception as error:  # the notifier's funnel: whatever Slack does, the run goes on
                self.pause(error)
            else:
                self.recovered()

    def token(self) -> str:
        """Empty when Slack is not to be told; what is half set up is said once."""
        token, channel = os.environ.get("SLACK_BOT_TOKEN", "").strip(), self.settings.slack_channel
        problem = "" if token else "SLACK_BOT_TOKEN is not set"
        if token and not re.fullmatch(r"[\x21-\x7e]+", token):
            problem, token = "SLACK_BOT_TOKEN holds characters that no token has", ""
        if channel and problem and not self.outbox.cursor:
            self.logger.warning("notify.slack_channel is set but %s: messages go to the log.", problem)
        return token if channel else ""

    def tell(self) -> None:
        """Root first (replies need it), then the replies, then the root's edit."""
        view, cards, end = self.read_events()
        if end == self.outbox.cursor:
            return
        if self.client is None:
            for card, _ in cards:
                self.logger.log(logging.WARNING if card.page else logging.INFO, "%s", card.text())
            self.show_in_log(view)
        else:
            self.open_thread(view)
            for card, cursor in cards:
                self.reply(card, view)
                self.moved(cursor)
            self.edit(view)
        self.outbox.view = view
        self.moved(end)

    def read_events(self) -> tuple[View, list[tuple[Card, int]], int]:
        """The present view, what to say (with the cursor after it), and the cursor after all of it."""
        view = msgspec.json.decode(msgspec.json.encode(self.outbox.view), type=View)
        cards, end = [], self.outbox.cursor
        for event in events.read(self.run, self.outbox.cursor):
            end = event.end
            card = messages.fold(view, event)
            if card is not None:
                cards.append((card, end))
        with contextlib.suppress(PerdureError, OSError):
            info = read_run_info(self.run)
            view.run, view.name, view.total = info.id, info.name, info.steps
        return view, messages.coalesce(cards, MAX_CARDS), end

    def show_in_log(self, view: View) -> None:
        text = messages.summary(view, time.time())
        if view.state != self.outbox.view.state or view.step != self.outbox.view.step:
            self.logger.info("%s", text)

    # calls to Slack

    def call(self, method: str, **arguments: object) -> dict[str, Any]:  # Any: JSON values
        assert self.client is not None
        left = self.deadline - time.monotonic()
        if left < 1:
            raise _OutOfTime
        self.client.timeout = min(int(TIMEOUT_SECS), int(left))
        answer = self.client.api_call(method, json={"unfurl_links": False, "unfurl_media": False, **arguments})
        if not isinstance(answer.data, dict):
            raise ValueError("the answer is not JSON of Slack's")
        return answer.data

    def open_thread(self, view: View) -> None:
        if self.outbox.ts and self.outbox.wanted == self.settings.slack_channel:
            return
        answer = self.call("chat.postMessage", channel=self.settings.slack_channel, **self.root(view))
        channel, ts = answer.get("channel"), answer.get("ts")
        if not (isinstance(channel, str) and isinstance(ts, str) and channel and ts):
            raise ValueError("the answer names no message")
        self.outbox.channel, self.outbox.ts, self.outbox.wanted = channel, ts, self.settings.slack_channel
        self.outbox.shown = self.appearance(view)
        self.moved(self.outbox.cursor)

    def appearance(self, view: View) -> str:
        """Changes when the root message would."""
        return hashlib.sha256(repr(messages.root_blocks(view, self.flow_url)).encode()).hexdigest()

    def root(self, view: View) -> dict[str, Any]:  # Any: Block Kit
        text = messages.escape(messages.summary(view, time.time()), messages.TEXT)
        return {"text": text, "blocks": messages.root_blocks(view, self.flow_url)}

    def reply(self, card: Card, view: View) -> None:
        self.call(
            "chat.postMessage",
            channel=self.outbox.channel,
            thread_ts=self.outbox.ts,
            reply_broadcast=card.page,
            text=messages.escape(card.text(), messages.TEXT),
            blocks=messages.card_blocks(card, view),
        )

    def edit(self, view: View) -> None:
        shown = self.appearance(view)
        if shown == self.outbox.shown:
            return
        try:
            self.call("chat.update", channel=self.outbox.channel, ts=self.outbox.ts, **self.root(view))
        except SlackApiError as error:
            if error.response.get("error") not in _GONE:
                raise
            self.outbox.ts = ""  # somebody deleted it
            self.open_thread(view)
        self.outbox.shown = shown

    # what is remembered

    def moved(self, cursor: int) -> None:
        """All before `cursor` has been told. The view stays behind until everything is, and is folded anew then."""
        if cursor != self.outbox.cursor:
            for event in events.read(self.run, self.outbox.cursor):
                if event.end > cursor:
                    break
                messages.fold(self.outbox.view, event)
        self.outbox.cursor = cursor
        _save(self.run, self.outbox)

    def pause(self, error: Exception) -> None:
        """Remember to leave Slack alone for a while; say so once."""
        self.outbox.failures += 1
        seconds = _retry_after(error) or min(_FIRST_PAUSE_SECS * 2 ** min(self.outbox.failures - 1, 10), _LONGEST_PAUSE_SECS)
        self.outbox.not_before = time.time() + seconds
        if self.outbox.failures == 1:
            self.logger.warning("Slack could not be told (%s); training goes on, Slack is tried again later.", describe(error))
        _save(self.run, self.outbox)

    def recovered(self) -> None:
        if self.outbox.failures:
            self.logger.info("Slack takes messages again, after %d failures.", self.outbox.failures)
            self.outbox.failures, self.outbox.not_before = 0, 0.0
            _save(self.run, self.outbox)


def describe(error: Exception) -> str:
    """In words, without anything that could hold the token."""
    if isinstance(error, SlackApiError):
        code = str(error.response.get("error") or "no error code")[:80]
        hint = _HINTS.get(code)
        return redact(f"status {error.response.status_code}, {code}" + (f": {hint}" if hint else ""))
    return redact(f"{type(error).__name__}: {error}")[:300]


def _retry_after(error: Exception) -> float:
    if not isinstance(error, SlackApiError) or error.response.status_code != 429:
        return 0.0
    headers = {str(key).lower(): value for key, value in dict(error.response.headers).items()}
    try:
        return min(max(float(headers.get("retry-after", 30)), 1.0), _LONGEST_RETRY_AFTER_SECS)
    except (TypeError, ValueError):
        return 30.0


@contextlib.contextmanager
def _locked(run: RunDir, deadline: float) -> Iterator[None]:
    fd = os.open(run.slack_lock, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, files.FILE_MODE)
    try:
        while True:
            try:
                fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
                break
            except BlockingIOError:
                if time.monotonic() > deadline:
                    raise
                time.sleep(0.05)
        yield
    finally:
        os.close(fd)


_unsaved: dict[RunDir, Outbox] = {}
"""Kept when slack.json cannot be written (a full disk), so that nothing is told twice meanwhile."""


def _load(run: RunDir) -> Outbox:
    try:
        saved = msgspec.json.decode(files.read_limited(run.slack_json, 1 << 20), type=Outbox)
    except (OSError, ValueError):
        saved = Outbox()
    kept = _unsaved.get(run)
    return kept if kept is not None and kept.cursor >= saved.cursor else saved


def _save(run: RunDir, outbox: Outbox) -> None:
    try:
        files.publish(run.slack_json, msgspec.json.encode(outbox))
        _unsaved.pop(run, None)
    except OSError:
        _unsaved[run] = outbox


_late: dict[RunDir, threading.Thread] = {}


def deliver(run: RunDir, settings: NotifySection, *, logger: Any, flow_url: str = "") -> None:  # Any: Logger or LoggerAdapter
    """Tell Slack (or, without SLACK_BOT_TOKEN and notify.slack_channel, the log) what the run's event log holds since the last
    time. Returns within BUDGET_SECS whatever happens; what is not told is told by the next call."""
    late = _late.get(run)
    if late is not None and late.is_alive():
        return  # said already; it holds the lock, and tells what it can if Slack ever answers
    delivery = _Delivery(run, settings, logger, flow_url)

    def work() -> None:
        try:
            delivery.go()
        except OSError as error:
            logger.warning("Notifications of %s are not possible now: %s.", run.root, redact(str(error)))

    # A thread, as neither a name lookup nor an answer that comes byte by byte keeps to a socket's timeout.
    thread = threading.Thread(target=work, name="slack", daemon=True)
    thread.start()
    thread.join(BUDGET_SECS)
    if thread.is_alive():
        _late[run] = thread
        logger.warning("Slack did not answer within %.0f s; training goes on without it.", BUDGET_SECS)
