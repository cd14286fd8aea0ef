"""run.toml -> RunConfig: every rule on settings, and which of them change the trajectory. Refused before anything starts."""

import math
import re
import tomllib
from collections.abc import Iterator, Mapping, Sequence
from difflib import get_close_matches
from pathlib import Path
from typing import Any, Literal, get_args

import msgspec

from perdure.training.drill_settings import DrillSection, wrong_drill
from perdure.training.errors import ConfigError
from perdure.training.launch_settings import LaunchSection, wrong_launch
from perdure.training.overrides import declared_type, override
from perdure.training.redact import names_a_secret
from perdure.training.retention_settings import RetentionSection, wrong_retention
from perdure.training.run_dir import RunDir
from perdure.training.tier_settings import StoreSection, TierSection, absolute_url, keep_apart, wrong_places


class _Section(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    pass


class RunSection(_Section, frozen=True, kw_only=True):
    name: str
    """Shown everywhere; letters, digits, `.`, `_`, `-`."""
    entry: str
    """`file.py:function`, the file relative to run.toml."""
    steps: int
    """Optimizer steps in all."""
    chunk: int
    """Optimizer steps of one Prefect task run; a checkpoint is committed at each chunk's end."""
    dir: str = ""
    """The run directory, relative to run.toml; default `runs/<name>`."""
    exact: Literal["prefer", "require"] = "prefer"
    """On resume with other hardware, thread counts or library versions: note it and go on, or refuse."""
    scale_lr: bool = False
    """Where --replan goes on with another global batch: scale learning rates, linearly for SGD, by the square root for Adam."""


class CheckpointSection(_Section, frozen=True, kw_only=True):
    every: int = 0
    """Steps between checkpoints; 0: at chunk ends only."""
    snapshot_every: int = 0
    """Steps between snapshots that stay in memory: what a dying rank loses at most; 0: only those that become checkpoints."""
    full_every: int = 0
    """Steps between full checkpoints, those between them are increments; 0: all are full."""
    encoding: Literal["auto", "raw", "small"] = "auto"
    """auto: what can be made smaller quickly; raw: nothing, for a disk faster than the encoder; small: as small as it gets."""
    threads: int = 1
    """Threads of the saver."""
    lazy: bool = False
    """Copy parameters and optimizer state beside the next forward and backward; only optimizer.step() waits for the copy."""
    audit: bool = False
    """The rank digests its live tensors at each checkpoint, and the saver compares; slow, for proving an installation."""


class NotifySection(_Section, frozen=True, kw_only=True):
    slack_channel: str = ""
    """Channel name or id; the token comes from SLACK_BOT_TOKEN. Empty: messages go to the log."""
    slack_api: str = "https://slack.com/api/"


class _Document(_Section, frozen=True, kw_only=True):
    run: RunSection
    params: dict[str, Any] = {}  # Any: TOML values, handed to the user's code untouched
    checkpoint: CheckpointSection = CheckpointSection()
    retention: RetentionSection = RetentionSection()
    store: StoreSection = StoreSection()
    tiers: dict[str, TierSection] = {}
    launch: LaunchSection = LaunchSection()
    notify: NotifySection = NotifySection()
    drill: DrillSection = DrillSection()


class RunConfig(_Document, frozen=True, kw_only=True):
    """All settings of a run, checked; paths absolute."""

    path: Path
    """The run.toml they came from."""
    run_dir: Path
    entry_file: Path
    entry_function: str
    store_url: str
    """Absolute `file:///...` or `s3://...`; empty without a store."""
    tier_urls: dict[str, str]
    """Of each tier, absolute."""

    @property
    def directory(self) -> RunDir:
        return RunDir(self.run_dir, self.store_url)

    @property
    def save_every(self) -> int:
        return self.checkpoint.every or self.run.chunk

    def is_full_step(self, step: int) -> bool:
        """The checkpoint after this step is a full one; the last of a run always is."""
        every = self.checkpoint.full_every
        return every == 0 or step % every == 0 or step >= self.run.steps

    def chunk_end(self, step: int) -> int:
        """Last step of the chunk that starts after `step`."""
        return min((step // self.run.chunk + 1) * self.run.chunk, self.run.steps)

    def trajectory(self) -> dict[str, Any]:  # Any: TOML values
        """The settings that decide the weights; a resume with others is refused, or re-planned on request."""
        return {"entry": self.run.entry, "steps": self.run.steps, "processes": self.launch.world, "params": self.params}


def _check(document: _Document, where: str) -> None:
    run, checkpoint = document.run, document.checkpoint
    every = max(1, checkpoint.every or run.chunk)
    rules: list[tuple[bool, str, str]] = [
        (
            bool(re.fullmatch(r"[A-Za-z0-9][A-Za-z0-9._-]{0,99}", run.name)),
            f"run.name = {run.name!r} is not a plain name",
            "use letters, digits, dot, dash, underscore",
        ),
        (run.steps >= 1, f"run.steps = {run.steps} is less than 1", "say how many optimizer steps to train"),
        (run.steps < 10**12, f"run.steps = {run.steps} is too large", "use fewer than 10^12"),
        (run.chunk >= 1, f"run.chunk = {run.chunk} is less than 1", "say how many steps one chunk has"),
        (checkpoint.every >= 0, f"checkpoint.every = {checkpoint.every} is negative", "use 0 for chunk ends only"),
        (
            checkpoint.every <= run.chunk,
            f"checkpoint.every = {checkpoint.every} is larger than run.chunk = {run.chunk}",
            "a chunk always ends with a checkpoint: lower checkpoint.every or raise run.chunk",
        ),
        (
            0 <= checkpoint.snapshot_every <= every,
            f"checkpoint.snapshot_every = {checkpoint.snapshot_every} is not between 0 and the {every} "
            "steps between checkpoints",
            "a checkpoint is a snapshot too: use fewer steps, or 0 for none in between",
        ),
        (
            checkpoint.full_every >= 0 and checkpoint.full_every % every == 0,
            f"checkpoint.full_every = {checkpoint.full_every} is not a multiple of the {every} steps between checkpoints",
            "use such a multiple, or 0 for full checkpoints only",
        ),
        (1 <= checkpoint.threads <= 256, f"checkpoint.threads = {checkpoint.threads} is out of range", "use 1 to 256"),
        (
            bool(re.fullmatch(r"https?://[^\s/]\S*", document.notify.slack_api)),
            f"notify.slack_api = {document.notify.slack_api!r} is not a URL",
            "leave it out",
        ),
        (
            bool(document.store.url) or document.launch.shared_disk,
            "launch.shared_disk = false needs a store.url",
            "name a bucket, or a folder that all nodes see: without a shared disk checkpoints are there only",
        ),
        ("@" not in document.notify.slack_api, "notify.slack_api holds a user name or password", "leave it out"),
    ]
    wrong = (
        *wrong_retention(document.retention),
        *wrong_drill(document.drill),
        *wrong_launch(document.launch),
        *wrong_places(document.store, document.tiers),
        *_wrong_texts(document),
        *_wrong_params(document.params, "params"),
    )
    rules += [(False, problem, fix) for problem, fix in wrong]
    for good, problem, fix in rules:
        if not good:
            raise ConfigError(f"{where}: {problem}", fix)


def _wrong_texts(document: _Document) -> Iterator[tuple[str, str]]:
    """Paths the system cannot open."""
    paths = {"run.entry": document.run.entry, "run.dir": document.run.dir}
    for key, text in paths.items():
        if any(ord(character) < 32 for character in text):
            yield f"{key} = {text!r} holds a control character", "write a plain path"


def _wrong_params(value: Any, key: str) -> Iterator[tuple[str, str]]:  # Any: TOML values
    """Params go into every manifest and are compared on resume: plain JSON values that equal themselves."""
    if isinstance(value, dict):
        for name, inner in value.items():
            yield from _wrong_params(inner, f"{key}.{name}")
    elif isinstance(value, list):
        for number, inner in enumerate(value):
            yield from _wrong_params(inner, f"{key}[{number}]")
    elif isinstance(value, float) and not math.isfinite(value):
        yield f"{key} = {value} is not a finite number", "write a number, or the word as a string"
    elif isinstance(value, int) and not -(2**63) <= value < 2**63:
        yield f"{key} = {value} does not fit into 64 bits", "write it as a string"
    elif not isinstance(value, (str, int, float)):
        yield f"{key} = {value} is a date or time", f'write it as a string: "{value}"'


def _read_toml(path: Path) -> dict[str, Any]:  # Any: TOML values
    try:
        return tomllib.loads(path.read_bytes().decode("utf-8-sig"))
    except FileNotFoundError:
        raise ConfigError(f"{path} does not exist", "name a run.toml; examples/gpt/run.toml is one") from None
    except IsADirectoryError:
        inside = f"name {path / 'run.toml'}" if (path / "run.toml").is_file() else "name a run.toml"
        raise ConfigError(f"{path} is a folder, not a run.toml", inside) from None
    except OSError as error:
        raise ConfigError(f"{path} cannot be read: {error.strerror}", "name a run.toml that you may read") from None
    except UnicodeDecodeError:
        raise ConfigError(f"{path} is not UTF-8 text", "name a run.toml") from None
    except (tomllib.TOMLDecodeError, RecursionError) as error:
        raise ConfigError(f"{path} is not valid TOML: {error}", "name a run.toml, or mend that line") from None


def load_config(path: Path | str, overrides: Sequence[str] = ()) -> RunConfig:
    """Read and check a run.toml; `overrides` are `section.key=value` texts.

    Raises ConfigError naming the path, the value and the fix."""
    path = Path(path).absolute()
    document = _read_toml(path)
    for assignment in overrides:
        override(document, assignment, _Document)
    try:
        checked = msgspec.convert(document, _Document)
    except msgspec.ValidationError as error:
        raise _explain(path, document, error) from None
    _check(checked, str(path))
    base = path.resolve().parent
    entry_file, function = _entry(checked.run.entry, base, path)
    run_dir = _resolved(base, checked.run.dir or f"runs/{checked.run.name}", f"{path}: run.dir")
    if run_dir.exists() and not run_dir.is_dir():
        raise ConfigError(f"{path}: the run directory {run_dir} is a file", "name another run.dir")
    store_url = absolute_url(checked.store.url, base, f"{path}: store.url")
    tier_urls = {name: absolute_url(tier.url, base, f"{path}: tiers.{name}.url") for name, tier in checked.tiers.items()}
    places = {f"tiers.{name}.url": (tier.endpoint_url, tier_urls[name]) for name, tier in checked.tiers.items()}
    keep_apart(run_dir, {"store.url": (checked.store.endpoint_url, store_url), **places}, str(path))
    return RunConfig(
        **{name: getattr(checked, name) for name in _Document.__struct_fields__},
        path=path,
        run_dir=run_dir,
        entry_file=entry_file,
        entry_function=function,
        store_url=store_url,
        tier_urls=tier_urls,
    )


def _entry(entry: str, base: Path, path: Path) -> tuple[Path, str]:
    file, _, function = entry.rpartition(":")
    if not file.endswith(".py") or not function.isidentifier():
        raise ConfigError(f"{path}: run.entry = {entry!r} is not file.py:function", "write for example train.py:train")
    found = _resolved(base, file, f"{path}: run.entry")
    if not found.is_file():
        problem = "is not a file" if found.exists() else "does not exist"
        raise ConfigError(f"{path}: run.entry names {found}, which {problem}", "the file is relative to run.toml")
    return found, function


def _resolved(base: Path, text: str, what: str) -> Path:
    try:
        found = Path(base, text).resolve()
        found.exists()
        return found
    except (OSError, RuntimeError) as error:  # too long, not ours to look into, a circle of links
        reason = error.strerror if isinstance(error, OSError) else "links in a circle"
        raise ConfigError(f"{what} = {text!r} cannot be used: {reason}", "name another path") from None


_SPELLINGS = {
    "int": "write a whole number, without quotes",
    "float": "write a number, without quotes",
    "bool": "write true or false, without quotes",
    "str": "write it in quotes",
    "object": "write it as a [table] of its own, or as { key = value }",
}


def _explain(path: Path, document: Mapping[str, Any], error: msgspec.ValidationError) -> ConfigError:  # Any: TOML values
    """msgspec's refusal with the setting's TOML name, its value, and what was probably meant."""
    text, _, place = str(error).partition(" - at `$")
    key = _named(place.strip(".`"), document)
    see = "all settings are in docs/configuration.md"
    name = text.rpartition(" `")[2].rstrip("`")
    full = f"{key}.{name}" if key else name
    if "unknown field" in text:
        close = get_close_matches(full, list(_settings(document)), 1)
        return ConfigError(f"{path}: {full} is no setting", f"did you mean {close[0]}?" if close else see)
    if "missing required field" in text:
        return ConfigError(f"{path}: {full} is missing", f"a run needs name, entry, steps and chunk under [run]; {see}")
    value: Any = document
    for part in key.split("."):
        value = value.get(part) if isinstance(value, dict) else None
    if "enum value" in text:
        choices = _choices(declared_type(_Document, key.split(".")))
        return ConfigError(f"{path}: {key} = {value!r} is no choice", f"use {' or '.join(choices)}")
    shown = "..." if key.startswith("launch.env") and (isinstance(value, str) or names_a_secret(key)) else repr(value)
    expected = text.replace("`", "").removeprefix("Expected ").partition(",")[0]
    said = f"{path}: {key} = {shown}: {text[0].lower() + text[1:].replace('`', '').replace('object', 'a table')}"
    return ConfigError(said, f"{_SPELLINGS[expected]}; {see}" if expected in _SPELLINGS else see)


def _choices(declared: Any) -> Iterator[str]:  # Any: a type
    for one in get_args(declared):
        if one is int:
            yield "a number"
        elif isinstance(one, str) and one:
            yield one
        else:
            yield from _choices(one)


def _named(key: str, document: Mapping[str, Any]) -> str:  # Any: TOML values
    """msgspec does not say which of the tiers or variables it refuses: the first that it does."""
    if key == "launch.env[...]":
        return f"launch.env.{next(name for name, value in document['launch']['env'].items() if not isinstance(value, str))}"
    if not key.startswith("tiers[...]"):
        return key
    for name, tier in document["tiers"].items():
        try:
            msgspec.convert(tier, TierSection)
        except msgspec.ValidationError:
            return key.replace("[...]", f".{name}", 1)
    return key


def _settings(document: Mapping[str, Any]) -> list[str]:  # Any: TOML values
    """Every name this run.toml may use: `run`, `run.name`, `store.retention.keep_last`, ..."""
    tiers = document.get("tiers")
    names = list(tiers) if isinstance(tiers, dict) else []
    return [*_fields(_Document, ""), *(key for name in names for key in _fields(TierSection, f"tiers.{name}."))]


def _fields(section: type[msgspec.Struct], prefix: str) -> Iterator[str]:
    for field in msgspec.structs.fields(section):
        yield prefix + field.name
        if isinstance(field.type, type) and issubclass(field.type, msgspec.Struct):
            yield from _fields(field.type, f"{prefix}{field.name}.")


def changed_settings(old: Mapping[str, Any], new: Mapping[str, Any], prefix: str = "") -> list[str]:
    """Each trajectory setting that differs, as `key: old -> new`."""
    differences = []
    for key in sorted(set(old) | set(new)):
        a, b = old.get(key, "(absent)"), new.get(key, "(absent)")
        if isinstance(a, Mapping) and isinstance(b, Mapping):
            differences += changed_settings(a, b, f"{prefix}{key}.")
        elif a != b or type(a) is not type(b):
            differences.append(f"{prefix}{key}: {a} -> {b}")
    return differences
