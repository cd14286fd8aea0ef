"""What Slack shows of a run: a View folded from its events (the root message, edited in place) and a Card for each event that
deserves a reply in its thread. Pure; every text keeps Slack's limits after escaping (facts/operations.md 6.2)."""

import re
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import msgspec

from perdure.training.amounts import counted
from perdure.training.events import Event
from perdure.training.redact import redact

SECTION = 3000
HEADER = 150
FIELD = 2000
LOG = 2600
TEXT = 2800
_CUT = "\n[...]\n"
_ESCAPES = {"&": "&amp;", "<": "&lt;", ">": "&gt;"}
_ANSI = re.compile(r"\x1b\[[0-?]*[ -/]*[@-~]|\x1b\][^\x07\x1b]*(?:\x07|\x1b\\)?")
_CONTROL = re.compile(r"[\x00-\x08\x0b-\x1f\x7f\u2028\u2029]")
_UNPAGED = ("preemption", "infrastructure")
"""Classes that a restart cures; everything else wakes people."""
Block = dict[str, Any]  # Any: Block Kit is JSON


class View(msgspec.Struct, kw_only=True):
    """The state of a run as far as its events tell."""

    run: str = ""
    name: str = ""
    state: str = "new"
    step: int = 0
    total: int = 0
    loss: float | None = None
    launch: int = 0
    verified_step: int = -1
    verified_at: float = 0.0
    replicated_step: int = -1
    replicated_at: float = 0.0
    push_problem: str = ""
    digest: str = ""


@dataclass(frozen=True, kw_only=True)
class Card:
    """One reply in the run's thread."""

    title: str
    facts: tuple[tuple[str, str], ...] = ()
    log: str = ""
    page: bool = False
    """Shown in the channel too."""

    def text(self) -> str:
        """For the log, and the fallback where blocks are not shown."""
        lines = [self.title, *(f"{label}: {value}" for label, value in self.facts)]
        return redact("\n".join([*lines, *([self.log] if self.log else [])]))


def width(text: str) -> int:
    """Length as Slack counts it at its strictest: UTF-16 units."""
    return len(text.encode("utf-16-le")) // 2


def escape(text: str, limit: int) -> str:
    """Harmless for mrkdwn and at most `limit` long after escaping; of a longer one the head and, mostly, the tail are kept."""
    plain = redact(text).encode("utf-8", "replace").decode().replace("\r\n", "\n").replace("\r", "\n")
    plain = _CONTROL.sub("", _ANSI.sub("", plain)).replace("```", "'''")
    pieces = [_ESCAPES.get(char, char) for char in plain]
    if sum(map(width, pieces)) <= limit:
        return "".join(pieces)
    room = limit - len(_CUT)
    head = _fitting(pieces, room // 3)
    return head + _CUT + _fitting(pieces[::-1], room - width(head), backwards=True)


def _fitting(pieces: Sequence[str], room: int, *, backwards: bool = False) -> str:
    taken = []
    for piece in pieces:
        room -= width(piece)
        if room < 0:
            break
        taken.append(piece)
    return "".join(taken[::-1] if backwards else taken)


def fold(view: View, event: Event) -> Card | None:
    """Bring `view` up to date; the card of the event, if it deserves one."""
    data = event.data
    view.step = max(view.step, _int(data, "end", _int(data, "step", 0))) if event.kind in _MOVES else view.step
    handler = _HANDLERS.get(event.kind)
    return handler(view, data, event.time) if handler else None


_MOVES = ("checkpoint_committed", "chunk_finished", "completed", "stopped")
_Data = Mapping[str, Any]  # Any: JSON values


def _int(data: _Data, key: str, default: int) -> int:
    value = data.get(key)
    return value if isinstance(value, int) else default


def _created(view: View, data: _Data, at: float) -> None:
    view.run, view.name = str(data.get("id", view.run)), str(data.get("name", view.name))
    view.total = _int(data, "steps", view.total)


def _begin(view: View, data: _Data) -> None:
    """What lies after the step it starts from is no part of the history any more."""
    view.state, view.launch, view.digest = "running", _int(data, "token", view.launch), ""
    view.step = _int(data, "step", view.step)
    view.verified_step = view.verified_step if view.verified_step <= view.step else -1
    view.replicated_step = view.replicated_step if view.replicated_step <= view.step else -1


def _launched(view: View, data: _Data, at: float) -> Card | None:
    _begin(view, data)
    start = data.get("resumed_from")
    return Card(title=f"Resumed: launch {view.launch} goes on from checkpoint {start}") if start else None


def _recovered(view: View, data: _Data, at: float) -> Card:
    _begin(view, data)
    return Card(title=f"Recovered: launch {view.launch} goes on from step {view.step}")


def _chunk(view: View, data: _Data, at: float) -> None:
    loss = data.get("loss")
    view.loss = float(loss) if isinstance(loss, (int, float)) else view.loss


def _verified(view: View, data: _Data, at: float) -> None:
    """Several are under way at once, and end in any order: the newest is that of the largest step."""
    if (step := _int(data, "step", -1)) >= view.verified_step:
        view.verified_step, view.verified_at = step, at


def _pushed(view: View, data: _Data, at: float) -> None:
    view.push_problem = ""
    if (step := _int(data, "step", -1)) >= view.replicated_step:
        view.replicated_step, view.replicated_at = step, at


def _push_failed(view: View, data: _Data, at: float) -> Card | None:
    """Only the first of an outage is news; the root message carries the rest."""
    known, view.push_problem = view.push_problem, str(data.get("error", ""))[:500] or "unknown"
    if known:
        return None
    facts = (
        ("Error", view.push_problem),
        ("Next", "training goes on; checkpoints stay local and are pushed when the store is back"),
    )
    return Card(title="Could not copy a checkpoint to the store", facts=facts, page=data.get("retryable") is False)


def _quarantined(view: View, data: _Data, at: float) -> Card:
    view.verified_step = -1 if _int(data, "step", -1) == view.verified_step else view.verified_step
    following = str(data.get("next", "an older checkpoint that verifies is used instead"))
    facts = (("Damage", str(data.get("reason", "?"))), ("Next", following))
    return Card(title=f"Checkpoint {data.get('name', '?')} is damaged and quarantined", facts=facts, page=True)


def _repaired(view: View, data: _Data, at: float) -> Card:
    facts = (("Damage", str(data.get("reason", "?"))), ("Next", "nothing; it was read back and is good again"))
    return Card(
        title=f"Checkpoint {data.get('name', '?')}: its {data.get('copy', '?')} copy was rotten and is repaired", facts=facts
    )


def _restarted(view: View, data: _Data, at: float) -> Card:
    view.state = "restarting"
    facts = (("Found", str(data.get("reason", "?"))), ("Next", str(data.get("next", "?"))))
    return Card(title=f"Dead at step {_int(data, 'step', view.step)}, restarted by the {data.get('by', '?')}", facts=facts)


def _failed(view: View, data: _Data, at: float) -> Card | None:
    """A preemption was told when the run stopped for it, unless nothing follows."""
    error_class, step = str(data.get("error_class", "unknown")), _int(data, "step", view.step)
    following = str(data.get("next", "?"))
    told = view.state == "stopped" and error_class == "preemption" and not following.startswith("not restarting")
    good = _int(data, "last_good", view.verified_step)
    lost = f" ({counted(step - good, 'step')} before)" if 0 <= good < step else ""
    view.state = f"failed ({error_class}): {following}"[:400]
    facts = [
        ("Class", error_class),
        ("Step", str(step)),
        ("Last good checkpoint", f"step {good}{lost}" if good >= 0 else "none"),
    ]
    facts += [("Launch", str(data.get("token", view.launch))), ("What happens next", following)]
    facts += [("Detail", str(data["detail"]))] if data.get("detail") else []
    page = data.get("page", error_class not in _UNPAGED)
    title, log = f"Failed: {error_class} at step {step}", str(data.get("log_tail", ""))
    return None if told else Card(title=title, facts=tuple(facts), log=log, page=bool(page))


def _drilled(view: View, data: _Data, at: float) -> Card:
    passed = data.get("passed") is True
    return Card(title=f"Drill {'passed' if passed else 'FAILED'}", facts=(("", str(data.get("text", "?"))),), page=not passed)


def _stopped(view: View, data: _Data, at: float) -> Card | None:
    """Told by the flow that stops, and by the hook that looks after a cancelled one."""
    known, view.state = view.state == "stopped", "stopped"
    following = (("Next", str(data.get("next", "the same command goes on"))),)
    return None if known else Card(title=f"Stopped at step {view.step}: {data.get('reason', '?')}", facts=following)


def _completed(view: View, data: _Data, at: float) -> Card | None:
    digest = str(data.get("digest", ""))
    again, view.state, view.digest = view.state == "complete" and view.digest == digest, "complete", digest
    return None if again else Card(title=f"Completed at step {view.step}", facts=(("State digest", digest),), page=True)


def _noticed(view: View, data: _Data, at: float) -> Card:
    return Card(title=f"Note: {str(data.get('text', '?'))[:1500]}")


def _said(title: str, key: str, *, page: bool = False) -> Any:  # Any: a handler
    def handler(view: View, data: _Data, at: float) -> Card:
        return Card(
            title=title.format(step=data.get("step", "?"), days=data.get("days", "?")),
            facts=(("", str(data.get(key, "?"))),),
            page=page,
        )

    return handler


_HANDLERS: dict[str, Any] = {  # Any: handlers as above, (view, data, time) -> Card or None
    "run_created": _created, "launch_started": _launched, "recovered": _recovered, "chunk_finished": _chunk,
    "verified": _verified, "pushed": _pushed, "push_failed": _push_failed, "quarantined": _quarantined, "failed": _failed,
    "repaired": _repaired, "restarted": _restarted, "drilled": _drilled,
    "stopped": _stopped, "completed": _completed, "slow_rank": _noticed, "notice": _noticed,
    "reported": _said("Report of the last {days} days", "text", page=True),
    "disk_full": _said("Disk full", "text", page=True),
    "save_failed": _said("The checkpoint of step {step} could not be written; trying again", "error"),
}  # fmt: skip


def summary(view: View, now: float) -> str:
    """The root message as one line of text."""
    parts = [f"{view.name or view.run}: {view.state}", f"step {view.step}/{view.total or '?'}"]
    parts += [f"loss {view.loss:.4f}"] if view.loss is not None else []
    parts += [f"verified step {view.verified_step} ({_ago(now - view.verified_at)} ago)"] if view.verified_step >= 0 else []
    parts += (
        [f"in the store step {view.replicated_step} ({_ago(now - view.replicated_at)} ago)"]
        if view.replicated_step >= 0
        else []
    )
    return redact(", ".join(parts) + f" [{view.run}]")


def _ago(seconds: float) -> str:
    for size, unit in ((86400, "d"), (3600, "h"), (60, "min")):
        if seconds >= size:
            return f"{seconds / size:.0f} {unit}"
    return f"{max(seconds, 0):.0f} s"


def _when(step: int, at: float) -> str:
    """A step and its age; Slack keeps the age current by itself."""
    if step < 0:
        return "none yet"
    clock = time.strftime("%Y-%m-%d %H:%M UTC", time.gmtime(at))
    return f"step {step}, <!date^{int(at)}^{{ago}}|{clock}>"


_ICONS = {"running": ":running:", "complete": ":white_check_mark:", "stopped": ":double_vertical_bar:", "new": ":seedling:"}


def root_blocks(view: View, flow_url: str) -> list[Block]:
    icon = _ICONS.get(view.state, ":warning:")
    title = {"type": "plain_text", "text": f"{icon} {escape(view.name or view.run, HEADER - 30)}", "emoji": True}
    loss = f"{view.loss:.4f}" if view.loss is not None else "-"
    pairs = [("State", escape(view.state, FIELD - 100)), ("Step", f"{view.step} / {view.total or '?'}"), ("Loss", loss)]
    pairs += [("Launch", str(view.launch)), ("Newest verified", _when(view.verified_step, view.verified_at))]
    pairs += [("Newest in the store", _when(view.replicated_step, view.replicated_at))]
    pairs += [("Store", escape(view.push_problem, FIELD - 100))] if view.push_problem else []
    link = f"  |  <{flow_url}|Prefect>" if re.fullmatch(r"https?://[^\s<>|]{1,500}", flow_url) else ""
    return [{"type": "header", "text": title}, _fields(pairs), _context(f"run `{escape(view.run, 200)}`{link}")]


def _fields(pairs: Sequence[tuple[str, str]]) -> Block:
    return {"type": "section", "fields": [{"type": "mrkdwn", "text": f"*{label}*\n{value}"} for label, value in pairs]}


def _context(text: str) -> Block:
    return {"type": "context", "elements": [{"type": "mrkdwn", "text": text}]}


def _section(text: str) -> Block:
    return {"type": "section", "text": {"type": "mrkdwn", "text": text}}


def card_blocks(card: Card, view: View) -> list[Block]:
    blocks = [_section(f"*{escape(card.title, SECTION - 2)}*")]
    short = [(label, escape(value, FIELD - 100)) for label, value in card.facts if label and width(value) <= 60]
    long = [(label, escape(value, 1200)) for label, value in card.facts if not label or width(value) > 60]
    blocks += [_fields(short[:10])] if short else []
    blocks += [_section(f"*{label}*\n{value}" if label else value) for label, value in long[:5] if value]
    blocks += [_section(f"```{escape(card.log, LOG)}```")] if card.log.strip() else []
    return [*blocks, _context(f"run `{escape(view.run, 200)}`")]


def coalesce(cards: Sequence[tuple[Card, int]], most: int) -> list[tuple[Card, int]]:
    """At most `most` cards (with the cursor after each); the oldest of a longer list are told in one."""
    if len(cards) <= most:
        return list(cards)
    older, rest = cards[: len(cards) - most + 1], cards[len(cards) - most + 1 :]
    lines = "\n".join(card.title for card, _ in older)
    told = Card(title=counted(len(older), "earlier event"), facts=(("", lines),), page=any(card.page for card, _ in older))
    return [(told, older[-1][1]), *rest]
