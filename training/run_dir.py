"""RunDir: the one owner of every path and file name of a run, in its directory and (same relative names) in its store."""

import re
from dataclasses import dataclass
from pathlib import Path

_CHECKPOINT = re.compile(r"([0-9]{12})-([0-9]{4}|[1-9][0-9]{4,})")
_FACT = re.compile(r"check-([a-z0-9][a-z0-9_-]{0,39})\.json")
_LABEL = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]{0,99}")
MANIFEST = "manifest.json"
REPLACED_MANIFEST = "manifest.increment.json"
"""The manifest that a roll-up replaced, while somebody may still read by it."""


@dataclass(frozen=True, order=True)
class CheckpointName:
    """Step and launch token of a checkpoint; sorts by step, then token."""

    step: int
    token: int

    def __str__(self) -> str:
        return f"{self.step:012d}-{self.token:04d}"

    @classmethod
    def parse(cls, text: str) -> "CheckpointName | None":
        match = _CHECKPOINT.fullmatch(text)
        return cls(int(match[1]), int(match[2])) if match else None


def is_label(text: str) -> bool:
    """Whether a milestone may be called so; it is also the name of a file."""
    return _LABEL.fullmatch(text) is not None


def rank_pack(rank: int, *, rolled_up: bool = False) -> str:
    """Of a checkpoint as it was written, or of an increment that was made a full in its place (`rolled_up`)."""
    return f"rank-{rank:05d}{'.full' if rolled_up else ''}.pack"


def rank_log(rank: int) -> str:
    return f"rank-{rank:05d}.log"


def rank_index(rank: int, *, rolled_up: bool = False) -> str:
    return f"rank-{rank:05d}{'.full' if rolled_up else ''}.index"


@dataclass(frozen=True)
class RunDir:
    root: Path
    """Absolute."""
    store: str = ""
    """URL of the store as the settings have it: what is known of copies in another store does not count. Empty: all does."""

    # what the run is
    @property
    def run_json(self) -> Path:
        return self.root / "run.json"

    @property
    def lock(self) -> Path:
        """flock held by everything that drives or trains this run; its text names the holder."""
        return self.root / "lock"

    @property
    def agent_json(self) -> Path:
        """pid and start time of the newest agent on this host."""
        return self.root / "agent.json"

    @property
    def progress_json(self) -> Path:
        """Heartbeat counter, step and state, published about once a second by the agent."""
        return self.root / "progress.json"

    @property
    def events(self) -> Path:
        return self.root / "events.jsonl"

    @property
    def slack_json(self) -> Path:
        """What Slack has been told."""
        return self.root / "slack.json"

    @property
    def slack_lock(self) -> Path:
        """flock of whoever tells Slack."""
        return self.root / "slack.lock"

    @property
    def flow_runs(self) -> Path:
        """A small file per Prefect flow run that drove this run: its process, and what of it is to be closed or linked."""
        return self.root / "flow-runs"

    @property
    def upkeep_lock(self) -> Path:
        """flock of whoever deletes or rolls up checkpoints."""
        return self.root / "upkeep.lock"

    @property
    def drills(self) -> Path:
        """A JSON line per drill that was held."""
        return self.root / "drills.jsonl"

    @property
    def archive_lock(self) -> Path:
        """flock of whoever fills the tiers."""
        return self.root / "archive.lock"

    @property
    def spool(self) -> Path:
        """A run directory for one checkpoint on its way from one place to another."""
        return self.root / "spool"

    @property
    def thaws(self) -> Path:
        """A small file per copy that was asked to be thawed."""
        return self.root / "thaws"

    def thaw(self, place: str, name: CheckpointName) -> Path:
        return self.thaws / f"{place}-{name}.json"

    @property
    def watchdog_lock(self) -> Path:
        """flock of the one watchdog that helps this run."""
        return self.root / "watchdog.lock"

    @property
    def stop_request(self) -> Path:
        """Exists while somebody asks this run to stop; its text is the reason."""
        return self.root / "stop"

    # launches
    @property
    def launches(self) -> Path:
        return self.root / "launches"

    def launch_record(self, token: int) -> Path:
        return self.launches / f"{token:04d}.json"

    def launch_end(self, token: int, node: int = 0) -> Path:
        """Why that launch ended; written by its agent as the last act, and by those of other nodes."""
        return self.nodes(token) / f"node-{node}.end.json" if node else self.launches / f"{token:04d}.end.json"

    def nodes(self, token: int) -> Path:
        """What the nodes of a launch tell each other, where there are several."""
        return self.launches / f"{token:04d}.nodes"

    def call(self, token: int) -> Path:
        """What node 0 says to those that may join."""
        return self.nodes(token) / "call.json"

    def node(self, token: int, number: int) -> Path:
        """Who is that node, and its heartbeat."""
        return self.nodes(token) / f"node-{number}.json"

    def held(self, token: int, number: int) -> Path:
        """Which steps that node has whole, now that its ranks are gone."""
        return self.nodes(token) / f"node-{number}.held.json"

    def settled(self, token: int) -> Path:
        """Which of them node 0 has settled on."""
        return self.nodes(token) / "settled.json"

    def metrics(self, token: int) -> Path:
        """What `Session.log` was given, a JSON line per step."""
        return self.root / "metrics" / f"{token:04d}.jsonl"

    def logs(self, token: int, node: int = 0) -> Path:
        """Of node 0, which has those of the others in folders of their own."""
        folder = self.root / "logs" / f"launch-{token:04d}"
        return folder / f"node-{node}" if node else folder

    @property
    def flow_log(self) -> Path:
        """What the flow processes of `perdure run` print."""
        return self.root / "logs" / "flow.log"

    # checkpoints
    @property
    def checkpoints(self) -> Path:
        return self.root / "checkpoints"

    def checkpoint(self, name: CheckpointName) -> Path:
        return self.root.joinpath("checkpoints", str(name))  # in one step: this is asked for thousands of them

    @property
    def pins(self) -> Path:
        """Milestones: a small file per name."""
        return self.root / "pins"

    def pin(self, label: str) -> Path:
        return self.pins / f"{label}.json"

    def manifest(self, name: CheckpointName) -> Path:
        return self.root.joinpath("checkpoints", str(name), MANIFEST)

    def offer(self, name: CheckpointName, node: int) -> Path:
        """What a node has of a checkpoint of several nodes, until it is committed."""
        return self.checkpoint(name) / f"node-{node}.offer"

    def part(self, name: CheckpointName, node: int) -> Path:
        """What a node has written of a checkpoint of several nodes, until it is committed."""
        return self.checkpoint(name) / f"node-{node}.part"

    def fact(self, name: CheckpointName, copy: str) -> Path:
        """The checker's fact about one copy: `local`, `store`, or the name of a tier."""
        return self.root.joinpath("checkpoints", str(name), f"check-{copy}.json")

    @staticmethod
    def place_of_fact(file: str) -> str:
        """The place that a fact of this file name is about; "" when it is no fact."""
        match = _FACT.fullmatch(file)
        return match[1] if match else ""

    # keys in the store, relative to its URL
    RUN_KEY = "run.json"
    PRUNING_KEY = "pruning.json"
    CHECKPOINTS_KEY = "checkpoints/"
    LAUNCHES_KEY = "launches/"
    PINS_KEY = "pins/"
    NODES_KEY = "nodes/"
    """What nodes that share no disk tell each other, launch by launch."""

    @staticmethod
    def checkpoint_key(name: CheckpointName, file: str) -> str:
        return f"checkpoints/{name}/{file}"

    @staticmethod
    def pin_key(label: str) -> str:
        return f"pins/{label}.json"

    @classmethod
    def node_key(cls, token: int, file: str) -> str:
        return f"{cls.NODES_KEY}{token:04d}/{file}"

    @staticmethod
    def launch_key(token: int) -> str:
        return f"launches/{token:04d}.json"
