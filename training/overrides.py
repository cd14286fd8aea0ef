"""`--set section.key=value` put onto a run.toml's document: read as the setting is declared, a secret refused."""

import tomllib
from collections.abc import Sequence
from typing import Any, get_args, get_origin

import msgspec

from perdure.training.errors import ConfigError
from perdure.training.redact import is_a_secret, names_a_secret


def override(document: dict[str, Any], assignment: str, declared: type[msgspec.Struct]) -> None:  # Any: TOML values
    """Change the document, which is to become a `declared`. Raises ConfigError."""
    key, equals, text = assignment.partition("=")
    names = key.strip().split(".")
    if not equals or not all(names) or len(names) < 2:
        shown = f"{key}=..." if key.strip() in ("launch", "params") else assignment
        raise ConfigError(f"--set {shown!r} is not section.key=value", "write for example --set run.steps=1000")
    at = document
    for name in names[:-1]:
        at = at.setdefault(name, {})
        if not isinstance(at, dict):
            raise ConfigError(f"--set {key.strip()}: {name} is not a section")
    value = _parse_value(text.strip())
    _refuse_secrets(names, value)
    is_text = declared_type(declared, names) is str
    at[names[-1]] = text.strip() if is_text and not isinstance(value, str) else value


def _parse_value(text: str) -> Any:  # Any: TOML values
    try:
        return tomllib.loads(f"value = {text}")["value"]
    except tomllib.TOMLDecodeError:
        return text  # a bare word is a string, as on any command line


def _refuse_secrets(names: Sequence[str], value: Any) -> None:  # Any: TOML values
    """Settings of the command line are seen in process lists and kept in Prefect's database, params in every manifest too."""
    if isinstance(value, dict):
        for name, inner in value.items():
            _refuse_secrets([*names, name], inner)
    elif isinstance(value, list):
        for inner in value:
            _refuse_secrets(names, inner)
    elif names[:2] == ["launch", "env"] and names_a_secret(names[-1]):
        raise ConfigError(
            f"--set {'.'.join(names)}: a secret on the command line would be kept in Prefect",
            f"export {names[-1]} where the run is started: its ranks inherit it",
        )
    elif names[0] == "params" and isinstance(value, str) and is_a_secret(names[-1], value):
        raise ConfigError(
            f"--set {'.'.join(names)}: a secret on the command line would be kept in Prefect and in every checkpoint",
            f"export it where the run is started, and let the code read os.environ[{names[-1].upper()!r}]; "
            "what is no secret: give it another name, or write it into run.toml",
        )


def declared_type(declared: Any, names: Sequence[str]) -> Any:  # Any: type objects
    """What the setting of these names is to be; None where nothing is said."""
    for name in names:
        if isinstance(declared, type) and issubclass(declared, msgspec.Struct):
            declared = {field.name: field.type for field in msgspec.structs.fields(declared)}.get(name)
        else:
            declared = get_args(declared)[1] if get_origin(declared) is dict else None
    return declared
