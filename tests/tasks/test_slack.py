"""Slack is told everything once, in one message and its thread; and whatever it does, a run is neither delayed nor failed."""

import logging
import ssl
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from http.server import BaseHTTPRequestHandler
from pathlib import Path

import pytest
from slack_server import CHANNEL, SlackServer, answering, dripping, problems_of, rate_limited, refused_port, silent, wait_until

from perdure.tasks import slack as notifier
from perdure.tasks.messages import View, fold
from perdure.tasks.slack import BUDGET_SECS, TIMEOUT_SECS, deliver
from perdure.training import events
from perdure.training.config import NotifySection
from perdure.training.events import Event
from perdure.training.run_dir import RunDir

CANARY = "xoxb-canary-0123456789-abcdefABCDEF"


def train_a_chunk(run: RunDir, end: int, loss: float = 2.5) -> None:
    name = f"{end:012d}-0001"
    events.record(run, "checkpoint_committed", step=end, token=1, name=name)
    events.record(run, "chunk_finished", token=1, start=end - 19, end=end, seconds=3.0, loss=loss)
    events.record(run, "verified", step=end, name=name)
    events.record(run, "pushed", step=end, name=name, url="s3://bucket/run")


def fail(run: RunDir, **more: object) -> None:
    data = {
        "error_class": "user",
        "step": 27,
        "last_good": 20,
        "next": "stopping: another try would only repeat it",
        "token": 1,
    }
    events.record(run, "failed", **{**data, "log_tail": "Traceback ...\nRuntimeError: shape <3> & co", **more})


def test_run_is_one_message_edited_in_place(
    run: RunDir, settings: NotifySection, slack: SlackServer, logger: logging.Logger
) -> None:
    for end in (20, 40, 60):
        train_a_chunk(run, end, loss=3 - end / 100)
        deliver(run, settings, logger=logger, flow_url="http://127.0.0.1:4200/v2/runs/flow-run/1")
    assert len(slack.messages) == 1
    (root,) = slack.roots
    assert root["edits"] == 2
    assert "step 60/100" in root["text"]
    assert "loss 2.4000" in root["text"]
    shown = str(root["blocks"])
    assert "step 60, <!date^" in shown
    assert "<http://127.0.0.1:4200/v2/runs/flow-run/1|Prefect>" in shown
    assert "gpt-1a2b3c4d" in shown


def test_nothing_new_means_no_call(run: RunDir, settings: NotifySection, slack: SlackServer, logger: logging.Logger) -> None:
    deliver(run, settings, logger=logger)
    before = slack.requests
    deliver(run, settings, logger=logger)
    assert slack.requests == before == 1


def test_many_events_are_one_edit(run: RunDir, settings: NotifySection, slack: SlackServer, logger: logging.Logger) -> None:
    deliver(run, settings, logger=logger)
    for _ in range(300):
        events.record(run, "verified", step=5, name="x")
    deliver(run, settings, logger=logger)
    assert [method for method, _ in slack.calls] == ["chat.postMessage", "chat.update"]


def test_failure_and_recovery_are_replies_and_failures_that_page_reach_the_channel(
    run: RunDir, settings: NotifySection, slack: SlackServer, logger: logging.Logger
) -> None:
    train_a_chunk(run, 20)
    deliver(run, settings, logger=logger)
    fail(run)
    fail(run, error_class="infrastructure", next="restarting now", log_tail="")
    events.record(run, "recovered", token=2, step=20)
    deliver(run, settings, logger=logger)
    failed, crashed, recovered = slack.replies
    root_ts = next(iter(slack.messages))
    assert {reply["thread_ts"] for reply in slack.replies} == {root_ts}
    shown = str(failed["blocks"])
    for part in (
        "user",
        "27",
        "step 20 (7 steps before)",
        "another try would only repeat it",
        "shape &lt;3&gt; &amp; co",
        "gpt-1a2b3c4d",
    ):
        assert part in shown
    assert (failed["reply_broadcast"], crashed["reply_broadcast"], recovered["reply_broadcast"]) == (True, False, False)
    assert "goes on from step 20" in recovered["text"]
    assert "running" in slack.roots[0]["text"]


def test_a_stop_is_told_once_also_where_a_hook_records_what_became_of_it(
    run: RunDir, settings: NotifySection, slack: SlackServer, logger: logging.Logger
) -> None:
    events.record(run, "stopped", token=1, step=20, reason="SIGTERM", next="a new flow run goes on")
    events.record(run, "failed", error_class="preemption", step=20, detail="termination signal", next="going on")
    events.record(run, "recovered", token=2, step=20)
    events.record(run, "stopped", token=2, step=30, reason="SIGTERM")
    events.record(run, "stopped", reason="cancelled in Prefect")
    deliver(run, settings, logger=logger)
    assert [reply["text"].splitlines()[0] for reply in slack.replies] == [
        "Stopped at step 20: SIGTERM", "Recovered: launch 2 goes on from step 20", "Stopped at step 30: SIGTERM",
    ]  # fmt: skip
    assert "a new flow run goes on" in slack.replies[0]["text"]
    events.record(run, "failed", error_class="preemption", step=30, detail="termination signal", next="not restarting: why")
    deliver(run, settings, logger=logger)
    assert slack.replies[-1]["text"].startswith("Failed: preemption at step 30"), "nothing follows: that is news"


def test_newest_good_checkpoint_is_that_of_the_largest_step_in_the_history() -> None:
    view = View()

    def newest(kind: str, **data: object) -> tuple[int, int]:
        fold(view, Event(kind=kind, time=float(view.step), data=data))
        return view.verified_step, view.replicated_step

    for kind in ("verified", "pushed"):
        for step in (30, 20):  # several at once, ending in any order
            found = newest(kind, step=step)
    assert found == (30, 30)
    assert newest("quarantined", step=10) == (30, 30)
    assert newest("quarantined", step=30) == (-1, 30)
    assert newest("verified", step=20) == (20, 30)
    assert newest("recovered", token=2, step=20) == (20, -1)
    assert newest("pushed", step=25) == (20, 25)


def test_completion_is_told_once_however_often_it_is_recorded(
    run: RunDir, settings: NotifySection, slack: SlackServer, logger: logging.Logger
) -> None:
    for _ in range(3):
        events.record(run, "completed", step=100, digest="ab" * 32)
        deliver(run, settings, logger=logger)
    (reply,) = slack.replies
    assert reply["reply_broadcast"] is True
    assert "complete" in slack.roots[0]["text"]


def test_outage_of_the_store_is_one_reply(
    run: RunDir, settings: NotifySection, slack: SlackServer, logger: logging.Logger
) -> None:
    for step in (20, 40, 60):
        events.record(run, "push_failed", step=step, error="connection refused", retryable=True)
        deliver(run, settings, logger=logger)
    assert len(slack.replies) == 1
    events.record(run, "pushed", step=60)
    events.record(run, "push_failed", step=80, error="connection refused", retryable=True)
    deliver(run, settings, logger=logger)
    assert len(slack.replies) == 2


def test_huge_traceback_keeps_head_tail_and_all_limits(
    run: RunDir, settings: NotifySection, slack: SlackServer, logger: logging.Logger
) -> None:
    trace = "FIRST line <&>\n" + "\U0001f600 <&> ``` \x1b[31mred\x1b[0m \ud800 x\r\n" * 4000 + "ValueError: the LAST line"
    fail(run, detail="&" * 5000, next="<" * 5000, error_class="\U0001f600" * 300, log_tail=trace[:20000] + trace[-20000:])
    for number in range(40):
        events.record(run, "notice", text=f"note {number} " + "&" * 900)
    deliver(run, settings, logger=logger)
    assert len(slack.replies) == notifier.MAX_CARDS, "older cards are told in one"
    fail(run, log_tail=trace[:30000] + trace[-200:])
    deliver(run, settings, logger=logger)
    shown = slack.replies[-1]["blocks"][-2]["text"]["text"]
    assert shown.startswith("```FIRST line &lt;&amp;&gt;")
    assert shown.endswith("ValueError: the LAST line```")
    assert "\x1b" not in shown
    assert "[...]" in shown
    assert len(slack.calls) == 1 + notifier.MAX_CARDS + 2, "the root, its replies; one more reply, the root's edit"


def test_check_of_limits_can_fail() -> None:
    too_much = {"text": "a < b", "blocks": [{"type": "section", "text": {"type": "mrkdwn", "text": "x" * 3001}}]}
    assert len(problems_of(too_much)) == 2


def test_next_process_goes_on_where_the_last_one_was(
    run: RunDir, settings: NotifySection, slack: SlackServer, logger: logging.Logger
) -> None:
    fail(run)
    deliver(run, settings, logger=logger)
    code = (
        "import logging, sys; from pathlib import Path; from perdure.tasks.slack import deliver;"
        "from perdure.training.run_dir import RunDir; from perdure.training.config import NotifySection;"
        "settings = NotifySection(slack_channel=sys.argv[2], slack_api=sys.argv[3]);"
        "deliver(RunDir(Path(sys.argv[1])), settings, logger=logging.getLogger())"
    )
    events.record(run, "recovered", token=2, step=20)
    subprocess.run([sys.executable, "-c", code, str(run.root), CHANNEL, slack.url], check=True)
    assert [reply["text"].split(":")[0] for reply in slack.replies] == ["Failed", "Recovered"]
    assert len(slack.roots) == 1


def test_two_threads_tell_each_event_once(
    run: RunDir, settings: NotifySection, slack: SlackServer, logger: logging.Logger
) -> None:
    fail(run)
    threads = [threading.Thread(target=deliver, args=(run, settings), kwargs={"logger": logger}) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len(slack.messages) == 2


def test_deleted_root_message_is_posted_anew(
    run: RunDir, settings: NotifySection, slack: SlackServer, logger: logging.Logger
) -> None:
    deliver(run, settings, logger=logger)
    slack.messages.clear()
    train_a_chunk(run, 20)
    deliver(run, settings, logger=logger)
    assert len(slack.roots) == 1
    assert "step 20/100" in slack.roots[0]["text"]


def test_other_channel_gets_its_own_message(
    run: RunDir, settings: NotifySection, slack: SlackServer, logger: logging.Logger
) -> None:
    deliver(run, settings, logger=logger)
    train_a_chunk(run, 20)
    deliver(run, NotifySection(slack_channel="C024BE91L", slack_api=slack.url), logger=logger)
    assert len(slack.roots) == 2


def test_proxy_of_the_environment_is_not_used_for_loopback(
    run: RunDir, settings: NotifySection, slack: SlackServer, logger: logging.Logger, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name in ("HTTP_PROXY", "http_proxy", "HTTPS_PROXY", "https_proxy"):
        monkeypatch.setenv(name, f"http://127.0.0.1:{refused_port()}")
    deliver(run, settings, logger=logger)
    assert len(slack.messages) == 1


# Slack misbehaves

Misbehaviour = Callable[[SlackServer], Callable[[BaseHTTPRequestHandler], None]]
BAD: dict[str, Misbehaviour] = {
    "rate limit": lambda _: rate_limited(300),
    "rate limit without sense": lambda _: rate_limited("soon"),
    "server error": lambda _: answering(500, b"oops " + CANARY.encode()),
    "unavailable": lambda _: answering(503, b""),
    "refusal": lambda _: answering(200, b'{"ok": false, "error": "not_in_channel"}'),
    "refusal that says the token": lambda _: answering(200, b'{"ok": false, "error": "bad %s"}' % CANARY.encode()),
    "not JSON": lambda _: answering(200, b"<html>" + CANARY.encode()),
    "JSON that is no object": lambda _: answering(200, b"[1]"),
    "no message named": lambda _: answering(200, b'{"ok": true}'),
    "endless answer": lambda _: answering(200, b"{" + b" " * (2 << 20) + b"}"),
    "silence": silent,
    "a byte now and then": dripping,
}


@pytest.mark.parametrize("what", BAD)
def test_bad_slack_costs_a_bounded_time_is_logged_once_and_told_later(
    what: str,
    run: RunDir,
    settings: NotifySection,
    slack: SlackServer,
    logger: logging.Logger,
    caplog: pytest.LogCaptureFixture,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    ends_by = ("BUDGET_SECS", BUDGET_SECS) if what == "a byte now and then" else ("TIMEOUT_SECS", TIMEOUT_SECS)
    slack.misbehave = BAD[what](slack)
    fail(run, log_tail=f"token is {CANARY}")
    monkeypatch.setattr(notifier, "_FIRST_PAUSE_SECS", 300.0)  # all five come before it is over
    with monkeypatch.context() as bounded:
        bounded.setattr(notifier, *ends_by)
        tell_five_times(run, settings, logger)
    assert slack.requests <= 1, "no retry storm"
    said = [record.getMessage() for record in caplog.records if record.levelno >= logging.WARNING]
    assert len(said) == 1
    assert CANARY not in caplog.text

    if what == "a byte now and then":
        return  # that thread is lost; another process tells the rest
    slack.misbehave = None
    outbox = notifier._load(run)
    assert outbox.not_before > time.time()
    outbox.not_before = 0.0
    notifier._save(run, outbox)
    deliver(run, settings, logger=logger)
    assert len(slack.roots) == 1
    assert "Failed: user at step 27" in slack.everything_said()
    assert "Slack takes messages again" in caplog.text


def tell_five_times(run: RunDir, settings: NotifySection, logger: logging.Logger) -> None:
    start = time.monotonic()
    for _ in range(5):
        events.record(run, "notice", text="more")
        deliver(run, settings, logger=logger)
    assert time.monotonic() - start < 5 * BUDGET_SECS, "one budget at most, not one each: then Slack is left alone"


def test_retry_after_is_obeyed(run: RunDir, settings: NotifySection, slack: SlackServer, logger: logging.Logger) -> None:
    slack.misbehave = rate_limited(2)
    asked_at = time.monotonic()
    deliver(run, settings, logger=logger)
    slack.misbehave = None
    assert wait_until(lambda: deliver(run, settings, logger=logger) or bool(slack.messages))
    assert time.monotonic() - asked_at > 1.9


def test_redirect_is_not_followed_and_the_token_stays_here(
    run: RunDir, settings: NotifySection, slack: SlackServer, logger: logging.Logger, caplog: pytest.LogCaptureFixture
) -> None:
    with SlackServer("other") as other:
        for status in (301, 302, 303, 307, 308):
            slack.misbehave = answering(status, b"", Location=other.url + "chat.postMessage")
            notifier._save(run, notifier.Outbox())
            deliver(run, settings, logger=logger)
        assert other.requests == 0
    assert slack.requests == 5
    assert CANARY not in caplog.text


@pytest.fixture
def bad_tls(tmp_path: Path) -> Iterator[int]:
    """A TLS server with a certificate nobody vouches for."""
    cert, key = tmp_path / "cert.pem", tmp_path / "key.pem"
    command = ["openssl", "req", "-x509", "-newkey", "rsa:2048", "-nodes", "-subj", "/CN=localhost", "-days", "1"]
    subprocess.run([*command, "-keyout", str(key), "-out", str(cert)], check=True, capture_output=True)
    with SlackServer(CANARY) as server:
        context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
        context.load_cert_chain(cert, key)
        server._http.socket = context.wrap_socket(server._http.socket, server_side=True)
        server._http.handle_error = lambda *_: None  # type: ignore[method-assign]
        yield server._http.server_port


@pytest.mark.parametrize("where", ["refused", "no such name", "bad TLS", "not TLS", "bad URL"])
def test_unreachable_slack_is_logged_once_without_the_token(
    where: str, run: RunDir, slack: SlackServer, bad_tls: int, logger: logging.Logger, caplog: pytest.LogCaptureFixture
) -> None:
    port = slack.url.split(":")[2].split("/")[0]
    url = {
        "refused": f"http://127.0.0.1:{refused_port()}/api/", "no such name": "https://slack.invalid/api/",
        "bad TLS": f"https://127.0.0.1:{bad_tls}/api/", "not TLS": f"https://127.0.0.1:{port}/api/", "bad URL": "http://[/api/",
    }[where]  # fmt: skip
    for _ in range(3):
        fail(run)
        deliver(run, NotifySection(slack_channel=CHANNEL, slack_api=url), logger=logger)
    assert len([record for record in caplog.records if record.levelno >= logging.WARNING]) == 1
    assert CANARY not in caplog.text
    assert CANARY not in "".join(path.read_text(errors="replace") for path in run.root.iterdir())


@pytest.mark.parametrize("token", ["", "xoxb-canary\nwith a newline", "xoxb-\u2014canary"])
def test_without_a_usable_token_the_same_text_goes_to_the_log_once(
    token: str,
    run: RunDir,
    settings: NotifySection,
    slack: SlackServer,
    logger: logging.Logger,
    caplog: pytest.LogCaptureFixture,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setenv("SLACK_BOT_TOKEN", token)
    fail(run)
    deliver(run, settings, logger=logger)
    deliver(run, settings, logger=logger)
    assert slack.requests == 0
    assert caplog.text.count("Failed: user at step 27") == 1
    assert "RuntimeError: shape <3> & co" in caplog.text
    assert "SLACK_BOT_TOKEN" in caplog.text
    assert "canary" not in caplog.text


def test_unwritable_folder_is_no_failure_and_tells_nothing_twice(
    run: RunDir, settings: NotifySection, slack: SlackServer, logger: logging.Logger
) -> None:
    run.slack_json.mkdir()  # root may write anywhere, but not a file over a folder
    fail(run)
    for _ in range(3):
        deliver(run, settings, logger=logger)
    assert len(slack.messages) == 2


def test_foreign_slack_json_is_replaced(
    run: RunDir, settings: NotifySection, slack: SlackServer, logger: logging.Logger
) -> None:
    run.slack_json.write_bytes(b'{"cursor": "many", "ts": 5}')
    deliver(run, settings, logger=logger)
    assert len(slack.messages) == 1
    assert CANARY not in run.slack_json.read_text()
    assert run.slack_json.stat().st_mode & 0o777 == 0o600
