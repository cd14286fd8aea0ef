"""Thaw: a copy in a storage class that cannot be read as it is. To ask, to wait and to read are states, not errors: each look
says where it stands and is recorded in the run directory, and whoever comes back later goes on."""

import contextlib
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import TypeVar

from perdure.training import events
from perdure.training.checkpoint.thaws import Thaw, find_thaw, forget_thaw, read_thaws, write_thaw
from perdure.training.errors import CheckpointDamaged, CheckpointNotFound, NeedsThaw, StoreError
from perdure.training.run_dir import CheckpointName, RunDir
from perdure.training.storage.cold import Access, ColdStore, Speed
from perdure.training.storage.parallel import in_order
from perdure.training.travel.copies import Stored, read_manifest
from perdure.training.travel.fence import remote_run_info

DAYS = 7
"""How long a thawed copy can be read."""
SPEED: Speed = "Standard"
LONGEST_POLL_SECS = 300.0
_FIRST_POLL_SECS = 1.0
_MISSES = 12
"""Looks in a row that may fail: an hour."""
_WIDTH = 8
Result = TypeVar("Result")


def copy_of(places: Iterable[Stored], name: CheckpointName) -> Stored:
    """The place where it is read, in their order: one that can be read now, else the first. Raises CheckpointNotFound."""
    holding = [place for place in places if place.exists(name)]
    if not holding:
        raise CheckpointNotFound(f"no place holds checkpoint {name}", "see `perdure pull RUN.TOML --dry-run`")
    return readable(holding, name)


def readable(holding: Sequence[Stored], name: CheckpointName) -> Stored:
    """Of the places that hold a checkpoint the first where it can be read now, else the first."""
    if len(holding) == 1:
        return holding[0]
    return next((place for place in holding if look(place, name).state == "readable"), holding[0])


@contextlib.contextmanager
def needed(place: Stored, name: CheckpointName) -> Iterator[None]:
    """A thaw that is found to be needed is that of this checkpoint."""
    try:
        yield
    except NeedsThaw as error:
        text = f"checkpoint {name} in {place.store.url} has to be thawed before it can be read"
        hint = f"ask for it: `perdure archive RUN.TOML --thaw {name}`, or pull, restore --thaw; then the same command goes on"
        raise NeedsThaw(text, hint, checkpoint=str(name), place=place.word) from error


def look(place: Stored, name: CheckpointName) -> Access:
    """Whether all files of a checkpoint, and those of its base, can be read there now."""
    cold = place.store.cold
    if cold is None:
        return Access(state="readable")
    return _worst(in_order(cold.access, _keys(place, name), width=_WIDTH))


def _worst(seen: Iterable[Access]) -> Access:
    every = list(seen)
    for state in ("frozen", "thawing"):
        if any(one.state == state for one in every):
            return Access(state=state)
    return Access(state="readable", until=min((one.until for one in every if one.until), default=0.0))


def _keys(place: Stored, name: CheckpointName) -> list[str]:
    """Manifests are never frozen."""
    run_id = remote_run_info(place.store).id
    found = read_manifest(place, name, run_id)
    both = [found] if found.base_name is None else [read_manifest(place, found.base_name, run_id), found]
    return [RunDir.checkpoint_key(one.name, record.name) for one in both for record in one.files]


def ask(run: RunDir | None, place: Stored, name: CheckpointName, *, days: int = DAYS, speed: Speed = SPEED) -> Thaw | None:
    """Ask for what is frozen of a copy, once, and look how far it is; None where it can be read as it is. `run`: where that is
    recorded; None: nowhere, for there is none here.

    Raises StoreError where the key may not, or the class does not know the speed."""
    cold = place.store.cold
    if cold is None:
        return None
    known = find_thaw(run, place.word, name) if run else None
    asked = any(list(in_order(lambda key: _thaw(cold, key, days, speed), _keys(place, name), width=_WIDTH)))
    now, access = time.time(), look(place, name)
    if access == Access(state="readable") and not asked:
        return None
    fresh = asked or known is None or known.is_over
    if asked and run:
        text = f"asked for checkpoint {name} in {place.word} to be thawed, {speed.lower()}, for {days} days"
        events.record(run, "notice", text=text)
    return _write(run, place, name, access, now if fresh or known is None else known.asked_at)


def _thaw(cold: ColdStore, key: str, days: int, speed: Speed) -> bool:
    if cold.access(key).state != "frozen":
        return False
    cold.thaw(key, days, speed)
    return True


def _write(run: RunDir | None, place: Stored, name: CheckpointName, access: Access, asked_at: float) -> Thaw:
    state = "thawed" if access.state == "readable" else access.state
    thaw = Thaw(
        place=place.word, checkpoint=str(name), state=state, asked_at=asked_at, checked_at=time.time(), until=access.until
    )
    if run:
        write_thaw(run, name, thaw)
    return thaw


def refresh(run: RunDir, places: Sequence[Stored]) -> list[Thaw]:
    """Look again at what was asked for; those that can be read now and could not before. A place that is away is left."""
    by_word, ready = {place.word: place for place in places}, []
    for thaw in read_thaws(run):
        place, name = by_word.get(thaw.place), CheckpointName.parse(thaw.checkpoint)
        if place is None or name is None:
            continue
        with contextlib.suppress(StoreError, CheckpointDamaged):
            if not place.exists(name):
                forget_thaw(run, place.word, name)
                continue
            now = _write(run, place, name, look(place, name), thaw.asked_at)
            if now.state == "thawed" and thaw.state == "thawing":
                events.record(run, "notice", text=told(now))
                ready.append(now)
    return ready


def wait(run: RunDir | None, place: Stored, name: CheckpointName, thaw: Thaw) -> Thaw:
    """Look again and again until it can be read, or is frozen again. A place may be away for a while meanwhile."""
    pause, misses = _FIRST_POLL_SECS, 0
    while thaw.state == "thawing":
        time.sleep(pause)
        pause = min(pause * 2, LONGEST_POLL_SECS)
        try:
            thaw, misses = _write(run, place, name, look(place, name), thaw.asked_at), 0
        except StoreError as error:
            misses += 1
            if not error.retryable or misses > _MISSES:
                raise
    return thaw


def reading(
    action: Callable[[], Result],
    run: RunDir | None,
    places: Sequence[Stored],
    *,
    asks: bool,
    waits: bool,
    say: Callable[[str], None],
) -> Result:
    """What `action` gives. A thaw that it needs is asked for if `asks`, waited for if `waits`; else NeedsThaw says what to do,
    and the same call goes on later."""
    retried = False
    while True:
        try:
            return action()
        except NeedsThaw as error:
            place, name = next((one for one in places if one.word == error.place), None), CheckpointName.parse(error.checkpoint)
            if not asks or place is None or name is None:
                raise
            thaw = ask(run, place, name)
            if thaw is None or (thaw.state == "thawed" and retried):
                raise
            retried = thaw.state == "thawed"
            if retried:
                continue
            if not waits:
                raise NeedsThaw(
                    f"{told(thaw)}: that takes hours", "the same command goes on then; --wait waits for it"
                ) from None
            say(told(thaw))
            if wait(run, place, name, thaw).state == "frozen":
                raise NeedsThaw(f"{told(thaw)}, though it was asked for: see what the store says of it") from None


def told(thaw: Thaw) -> str:
    """Where it stands, for people."""
    where = f"checkpoint {thaw.checkpoint} in {thaw.place}"
    if thaw.state == "thawed":
        until = time.strftime("%Y-%m-%d %H:%M", time.localtime(thaw.until)) if thaw.until else "an unknown time"
        return f"{where} is thawed until {until}"
    return f"{where} is {thaw.state}"
