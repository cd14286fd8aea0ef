"""A loopback proxy in front of the S3 server that answers, cuts, loses or changes what passes, and keeps a log of it."""

import http.client
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from urllib.parse import urlsplit


@dataclass
class Seen:
    """A request, and what the server behind made of it."""

    method: str
    path: str
    headers: dict[str, str]
    status: int = 0
    answered: int = 0
    """Bytes of the body that was sent back."""

    @property
    def operation(self) -> str:
        query = urlsplit(self.path).query
        if self.method == "POST":
            return "create" if query.startswith("uploads") else "delete" if query.startswith("delete") else "complete"
        if self.method == "GET" and query.startswith(("uploads", "list-type", "prefix", "uploadId")):
            return "list"
        return "part" if self.method == "PUT" and "partNumber=" in query else self.method.lower()


@dataclass
class Reply:
    """Given by a rule: `status` answers in the server's place; the others change what comes from the server."""

    status: int = 0
    code: str = "InternalError"
    headers: dict[str, str] = field(default_factory=dict)
    lose_answer: bool = False
    cut_answer: bool = False
    flip_request: bool = False
    flip_answer: bool = False
    answer_headers: dict[str, str] = field(default_factory=dict)
    after: bool = False
    """`status` is told after the server has done the work."""


Rule = Callable[[Seen], Reply | None]


def _flip(body: bytes) -> bytes:
    return body[:-1] + bytes([body[-1] ^ 1]) if body else body


class _Server(ThreadingHTTPServer):
    daemon_threads = True
    request_queue_size = 64
    """Of five, a transfer in eight threads has some turned away whenever this process stands still."""


class Proxy:
    def __init__(self, target: str, rule: Rule) -> None:
        self.log: list[Seen] = []
        self.rule = rule
        proxy, host = self, urlsplit(target).netloc

        class Handler(BaseHTTPRequestHandler):
            protocol_version = "HTTP/1.1"

            def _serve(self) -> None:
                body = self.rfile.read(int(self.headers.get("Content-Length") or 0))
                seen = Seen(self.command, self.path, {k.lower(): v for k, v in self.headers.items()})
                proxy.log.append(seen)
                reply = proxy.rule(seen) or Reply()
                status, headers, data = 0, {}, b""
                if not reply.status or reply.after:
                    status, headers, data = self._forward(_flip(body) if reply.flip_request else body)
                if reply.status:
                    data = f"<Error><Code>{reply.code}</Code><Message>injected</Message></Error>".encode()
                    status, headers = reply.status, {"Content-Type": "application/xml", **reply.headers}
                seen.status = status
                if reply.lose_answer:
                    self.close_connection = True
                    return
                self._answer(seen, {**headers, **reply.answer_headers}, data, reply)

            def _forward(self, body: bytes) -> tuple[int, dict[str, str], bytes]:
                connection = http.client.HTTPConnection(host, timeout=30)
                connection.putrequest(self.command, self.path, skip_host=True, skip_accept_encoding=True)
                for name, value in self.headers.items():
                    connection.putheader(name, value)
                connection.endheaders(body)
                response = connection.getresponse()
                data = response.read()
                headers = {k: v for k, v in response.getheaders() if k.lower() not in ("connection", "transfer-encoding")}
                connection.close()
                return response.status, headers, data

            def _answer(self, seen: Seen, headers: dict[str, str], data: bytes, reply: Reply) -> None:
                if reply.flip_answer:
                    data = _flip(data)
                if self.command != "HEAD":
                    headers = {k: v for k, v in headers.items() if k.lower() != "content-length"}
                    headers["Content-Length"] = str(len(data))
                names = {name.lower() for name in headers}
                self.send_response_only(seen.status)
                for name, value in headers.items():
                    self.send_header(name, value)
                if "date" not in names:
                    self.send_header("Date", self.date_time_string())
                self.end_headers()
                if self.command != "HEAD":
                    sent = data[: len(data) // 2] if reply.cut_answer else data
                    seen.answered = len(sent)
                    self.wfile.write(sent)
                if reply.cut_answer:
                    self.close_connection = True

            do_GET = do_PUT = do_POST = do_PATCH = do_HEAD = do_DELETE = _serve

            def log_message(self, *_: object) -> None:
                pass

            def handle_expect_100(self) -> bool:
                return super().handle_expect_100()

        self._server = _Server(("127.0.0.1", 0), Handler)
        self.endpoint = f"http://127.0.0.1:{self._server.server_port}"

    def operations(self) -> list[str]:
        return [seen.operation for seen in self.log]

    def fetched(self, ending: str) -> int:
        """Bytes of objects so named that were sent back."""
        gets = (seen for seen in self.log if seen.operation == "get" and urlsplit(seen.path).path.endswith(ending))
        return sum(seen.answered for seen in gets)


@contextmanager
def proxy_to(target: str, rule: Rule = lambda _: None) -> Iterator[Proxy]:
    proxy = Proxy(target, rule)
    thread = threading.Thread(target=proxy._server.serve_forever, kwargs={"poll_interval": 0.05})
    thread.start()
    try:
        yield proxy
    finally:
        proxy._server.shutdown()
        proxy._server.server_close()
        thread.join()


def times(count: int, when: Callable[[Seen], bool], reply: Reply) -> Rule:
    """`reply` to the first `count` requests that match."""
    left, lock = [count], threading.Lock()

    def rule(seen: Seen) -> Reply | None:
        with lock:
            if left[0] and when(seen):
                left[0] -= 1
                return reply
        return None

    return rule
