"""What a proxy in front of the S3 server adds, so that classes which have to be thawed are what they are on AWS: to the server
they are labels only. All else is the server's."""

import threading
import time
from email.utils import formatdate
from urllib.parse import urlsplit

from storage.proxy import Reply, Seen

COLD = ("GLACIER", "DEEP_ARCHIVE")


class Glacier:
    """A rule of the proxy. What was copied into a cold class is refused to readers until it was asked for and looked at
    `looks` times."""

    def __init__(self, looks: int) -> None:
        self.looks = looks
        self.cold: dict[str, int] = {}
        """Path -> how often it is to be looked at still; -1: nobody asked for it."""
        self.asked: list[str] = []
        self.until = time.time() + 7 * 86400
        self._lock = threading.Lock()

    def __call__(self, seen: Seen) -> Reply | None:
        parts = urlsplit(seen.path)
        with self._lock:
            if seen.method == "PUT" and "x-amz-copy-source" in seen.headers and self._class(seen) in COLD:
                self.cold[parts.path] = -1
            elif seen.method == "PUT":
                self.cold.pop(parts.path, None)
            elif parts.path in self.cold:
                return self._answer(seen.method, parts.path, parts.query)
        return None

    @staticmethod
    def _class(seen: Seen) -> str:
        return seen.headers.get("x-amz-storage-class", "")

    def _answer(self, method: str, path: str, query: str) -> Reply | None:
        if method == "POST" and query.startswith("restore"):
            if self.cold[path] > 0:
                return Reply(409, "RestoreAlreadyInProgress")
            self.asked.append(path.rpartition("/")[2])
            self.cold[path] = self.looks
            return Reply(202)
        if method == "HEAD":
            if self.cold[path] > 0:
                self.cold[path] -= 1
                return Reply(answer_headers={"x-amz-restore": 'ongoing-request="true"'})
            expiry = formatdate(self.until, usegmt=True)
            ready = {"x-amz-restore": f'ongoing-request="false", expiry-date="{expiry}"'}
            return Reply(answer_headers=ready) if self.cold[path] == 0 else None
        return Reply(403, "InvalidObjectState") if method == "GET" and self.cold[path] != 0 else None

    def freeze(self) -> None:
        """The days are over."""
        self.cold = dict.fromkeys(self.cold, -1)
