"""Secret blocks: a server that forbids reading them."""

import threading
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

import pytest
from harness import copy_tiny
from prefect.client.orchestration import get_client
from prefect.settings import PREFECT_API_URL, temporary_settings

from perdure.tasks.blocks import AWS, look_for, read_secrets
from perdure.training.config import load_config


class _Forbids(BaseHTTPRequestHandler):
    def do_GET(self) -> None:
        self.send_response(403)
        self.send_header("Content-Length", "0")
        self.end_headers()

    def log_message(self, *_: object) -> None:
        pass


@pytest.fixture
def forbidding() -> Iterator[str]:
    with ThreadingHTTPServer(("127.0.0.1", 0), _Forbids) as server:
        threading.Thread(target=server.serve_forever, daemon=True).start()
        yield f"http://127.0.0.1:{server.server_port}/api"
        server.shutdown()


def test_blocks_that_may_not_be_read_are_done_without(
    forbidding: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    for variable in AWS:
        monkeypatch.delenv(variable, raising=False)
    config = load_config(copy_tiny(tmp_path / "tiny"), ["store.url=s3://bucket/x"])
    with temporary_settings({PREFECT_API_URL: forbidding}), get_client(sync_client=True) as client:
        assert read_secrets(client, config) == {}
        assert look_for(client, AWS[0]) == "forbidden", "and a deploy goes on"
    assert "perdure-aws-secret-access-key" in caplog.text
