"""What drills found: a line each in drills.jsonl beside the run, appended when a drill is over and never before."""

import msgspec

from perdure.training import files
from perdure.training.run_dir import RunDir


class Drill(msgspec.Struct, frozen=True, kw_only=True):
    """One drill. None: the drill did not get that far, or it cannot be known here."""

    time: float
    """Unix seconds at which it began."""
    host: str
    run: str
    store: str
    passed: bool
    problems: tuple[str, ...] = ()
    """Why it failed."""
    skipped: tuple[str, ...] = ()
    """What of the store was passed over because it is damaged."""
    notes: tuple[str, ...] = ()
    """What the launches had to say."""
    newest: str = ""
    """The newest good checkpoint that the store gave back; the recovery point is its."""
    asked: bool = False
    """`newest` was asked for, so the recovery point is not judged."""
    resumed: str = ""
    """The checkpoint that was trained from."""
    bytes: int = 0
    """Of `newest` in the store, with its base."""
    steps: int = 0
    """Trained twice."""
    kills: tuple[str, ...] = ()
    point_steps: int | None = None
    """Steps the run had trained beyond `newest`."""
    point_secs: float | None = None
    """Their time; where the run directory is not here, the age of `newest`."""
    pull_secs: float | None = None
    prove_secs: float | None = None
    start_secs: float | None = None
    """From the launch to its first finished step."""
    target_point_secs: float
    target_time_secs: float
    identical: bool | None = None
    """Whether both continuations ended in the same bits."""
    differing: tuple[str, ...] = ()
    """Leaves that do not."""
    digest: str = ""
    """Of the state at the end of the undisturbed continuation."""

    @property
    def recovery_secs(self) -> float | None:
        """From the bare folder to the first finished step."""
        parts = (self.pull_secs, self.prove_secs, self.start_secs)
        return sum(part for part in parts if part is not None) if None not in parts else None


def append_drill(run: RunDir, drill: Drill) -> None:
    files.append(run.drills, msgspec.json.encode(drill) + b"\n", durable=True)


def read_drills(run: RunDir) -> list[Drill]:
    """Every drill that was held, oldest first; a torn line is passed over."""
    try:
        lines = run.drills.read_bytes().splitlines()
    except FileNotFoundError:
        return []
    found = []
    for line in lines:
        try:
            found.append(msgspec.json.decode(line, type=Drill))
        except (msgspec.DecodeError, UnicodeDecodeError):
            continue
    return found
