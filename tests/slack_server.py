"""A local server that speaks the part of Slack's Web API we use, refuses what Slack refuses, and misbehaves on demand."""

import json
import re
import socket
import threading
import time
from collections.abc import Callable
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from types import TracebackType
from typing import Any
from urllib.parse import parse_qsl

CHANNEL, CHANNEL_ID = "#training", "C024BE91L"
LOOKING = ("auth.test", "conversations.list", "conversations.info")
_MARKUP = re.compile(r"<!date\^\d+\^\{ago\}\|[^<>|]+>|<https?://[^<>|]+\|[^<>|]+>|&(?:amp|lt|gt);")


def width(text: str) -> int:
    return len(text.encode("utf-16-le")) // 2


def problems_of(body: dict[str, Any]) -> list[str]:
    """What Slack would refuse, or show wrongly."""
    found: list[str] = []

    def check(good: bool, problem: str) -> None:
        if not good:
            found.append(problem)

    def text(value: Any, limit: int, where: str) -> None:
        check(isinstance(value, str) and 0 < width(value) <= limit, f"{where}: length of {str(value)[:60]!r}")
        check(not re.search(r"[<>&]", _MARKUP.sub("", str(value))), f"{where}: unescaped text {str(value)[:60]!r}")

    blocks = body.get("blocks", [])
    text(body.get("text"), 4000, "text")
    check(len(blocks) <= 50, "more than 50 blocks")
    check(sum(width(json.dumps(block, ensure_ascii=False)) for block in blocks) <= 13200, "msg_blocks_too_long")
    for block in blocks:
        kind = block["type"]
        if kind == "header":
            text(block["text"]["text"], 150, kind)
            check(block["text"]["type"] == "plain_text", "header is not plain text")
        elif kind == "section":
            check(("text" in block) or bool(block.get("fields")), "empty section")
            if "text" in block:
                text(block["text"]["text"], 3000, kind)
            check(len(block.get("fields", [])) <= 10, "more than 10 fields")
            for field in block.get("fields", []):
                text(field["text"], 2000, "field")
        elif kind == "context":
            check(1 <= len(block["elements"]) <= 10, "context elements")
            for element in block["elements"]:
                text(element["text"], 3000, kind)
        else:
            check(False, f"unknown block {kind}")
    return found


class SlackServer:
    """`messages` by ts, in order; `calls` as (method, body); `misbehave` answers instead of Slack while it is set."""

    def __init__(self, token: str) -> None:
        self.token = token
        self.messages: dict[str, dict[str, Any]] = {}
        self.calls: list[tuple[str, dict[str, Any]]] = []
        self.problems: list[str] = []
        self.requests = 0
        self.misbehave: Callable[[BaseHTTPRequestHandler], None] | None = None
        self.scopes = ["chat:write"]
        self.channels: list[dict[str, Any]] = [
            {"id": "C000OTHER", "name": "other", "is_member": False, "is_archived": False},
            {"id": CHANNEL_ID, "name": CHANNEL.removeprefix("#"), "is_member": True, "is_archived": False},
        ]
        self.closing = threading.Event()
        self._lock = threading.Lock()
        self._http = ThreadingHTTPServer(("127.0.0.1", 0), self._handler())
        self._http.daemon_threads = True
        self._thread = threading.Thread(target=self._http.serve_forever, kwargs={"poll_interval": 0.05})

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self._http.server_port}/api/"

    @property
    def roots(self) -> list[dict[str, Any]]:
        return [message for message in self.messages.values() if not message.get("thread_ts")]

    @property
    def replies(self) -> list[dict[str, Any]]:
        return [message for message in self.messages.values() if message.get("thread_ts")]

    def everything_said(self) -> str:
        return json.dumps([body for _, body in self.calls])

    def __enter__(self) -> "SlackServer":
        self._thread.start()
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        self.closing.set()
        self._http.shutdown()
        self._thread.join()
        self._http.server_close()

    def _handler(self) -> type[BaseHTTPRequestHandler]:
        slack = self

        class Handler(BaseHTTPRequestHandler):
            def do_POST(self) -> None:
                slack.requests += 1
                body = self.rfile.read(int(self.headers.get("Content-Length", 0)))
                if slack.misbehave is not None:
                    slack.misbehave(self)
                    return
                with slack._lock:
                    method, authorization = self.path.rpartition("/")[2], self.headers.get("Authorization", "")
                    if method in LOOKING:
                        answer = slack._look(method, authorization, dict(parse_qsl(body.decode())))
                    else:
                        answer = slack._answer(method, authorization, json.loads(body))
                granted = {"x_oauth_scopes": ",".join(slack.scopes)} if answer["ok"] else {}
                respond(self, 200, json.dumps(answer).encode(), **granted)

            do_GET = do_POST

            def log_message(self, format: str, *args: object) -> None: ...

        return Handler

    def _look(self, method: str, authorization: str, body: dict[str, str]) -> dict[str, Any]:
        """Methods that change nothing; as at Slack's, their arguments come as a form, never as JSON."""
        if authorization != f"Bearer {self.token}":
            return {"ok": False, "error": "invalid_auth"}
        if method == "auth.test":
            return {"ok": True, "user": "perdure", "team": "Team", "bot_id": "B1"}
        if not {"channels:read", "groups:read"} & set(self.scopes):
            return {"ok": False, "error": "missing_scope", "needed": "channels:read"}
        if method == "conversations.list":  # a page each
            at = int(body.get("cursor") or 0)
            following = str(at + 1) if at + 1 < len(self.channels) else ""
            return {"ok": True, "channels": self.channels[at : at + 1], "response_metadata": {"next_cursor": following}}
        for channel in self.channels:
            if channel["id"] == body.get("channel"):
                return {"ok": True, "channel": channel}
        return {"ok": False, "error": "channel_not_found"}

    def _answer(self, method: str, authorization: str, body: dict[str, Any]) -> dict[str, Any]:
        if authorization != f"Bearer {self.token}":
            return {"ok": False, "error": "invalid_auth"}
        self.calls.append((method, body))
        self.problems += problems_of(body)
        if method == "chat.update":
            if body["channel"] != CHANNEL_ID:
                return {"ok": False, "error": "channel_not_found"}
            if body["ts"] not in self.messages:
                return {"ok": False, "error": "message_not_found"}
            self.messages[body["ts"]].update(body, edits=self.messages[body["ts"]]["edits"] + 1)
            return {"ok": True, "channel": CHANNEL_ID, "ts": body["ts"]}
        if method != "chat.postMessage" or body["channel"] not in (CHANNEL, CHANNEL_ID):
            return {"ok": False, "error": "channel_not_found" if method == "chat.postMessage" else "unknown_method"}
        if body.get("thread_ts") and body["thread_ts"] not in self.messages:
            self.problems.append("reply to an unknown thread")
        ts = f"1700000000.{len(self.messages) + 1:06d}"
        self.messages[ts] = {**body, "edits": 0}
        return {"ok": True, "channel": CHANNEL_ID, "ts": ts, "message": {"text": body["text"]}}


def respond(handler: BaseHTTPRequestHandler, status: int, body: bytes, **headers: str) -> None:
    handler.send_response(status)
    for name, value in {"Content-Type": "application/json", "Content-Length": str(len(body)), **headers}.items():
        handler.send_header(name.replace("_", "-"), value)
    handler.end_headers()
    handler.wfile.write(body)


def answering(status: int, body: bytes, **headers: str) -> Callable[[BaseHTTPRequestHandler], None]:
    """Misbehaviour: always this answer."""
    return lambda handler: respond(handler, status, body, **headers)


def rate_limited(seconds: object) -> Callable[[BaseHTTPRequestHandler], None]:
    return answering(429, b'{"ok": false, "error": "ratelimited"}', Retry_After=str(seconds))


def silent(server: SlackServer) -> Callable[[BaseHTTPRequestHandler], None]:
    """Misbehaviour: takes the request and never answers."""

    def misbehave(handler: BaseHTTPRequestHandler) -> None:
        handler.close_connection = True
        server.closing.wait()

    return misbehave


def dripping(server: SlackServer) -> Callable[[BaseHTTPRequestHandler], None]:
    """Misbehaviour: a header byte now and then, so that no read ever times out."""

    def misbehave(handler: BaseHTTPRequestHandler) -> None:
        handler.close_connection = True
        try:
            handler.wfile.write(b"HTTP/1.1 200 OK\r\nX-Slow: ")
            while not server.closing.wait(0.2):
                handler.wfile.write(b"z")
        except OSError:
            return

    return misbehave


def refused_port() -> int:
    """A port nothing listens on."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


def wait_until(true: Callable[[], bool], seconds: float = 60.0) -> bool:
    deadline = time.monotonic() + seconds
    while not true() and time.monotonic() < deadline:
        time.sleep(0.02)
    return true()
