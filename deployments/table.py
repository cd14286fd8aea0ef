"""What shall be registered for a training run: prefect.yaml's table, filled in with the run's name and run.toml.

Only flows that exist are registered. Nothing here talks to a server, and no secret enters a parameter."""

import functools
import importlib.util
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from perdure.training.config import RunConfig
from perdure.training.errors import PerdureError

if TYPE_CHECKING:
    from prefect import Flow

PREFECT_YAML = Path(__file__).with_name("prefect.yaml")
DEFAULT_POOL = "perdure"
_CONFIG_PARAMETERS = ("config", "run", "target")
"""What a flow may call the parameter that names the run.toml."""


class TableDamaged(PerdureError):
    """prefect.yaml, which comes with the package, was changed into something else."""

    hint = "put back deployments/prefect.yaml, or install Perdure again"


@dataclass(frozen=True, kw_only=True)
class Wanted:
    """One deployment as it shall be; `fields` are plain values that can be compared with the server's."""

    verb: str
    flow: str
    name: str
    fields: dict[str, Any]  # Any: JSON values

    @property
    def full_name(self) -> str:
        return f"{self.flow}/{self.name}"


@functools.cache
def table() -> dict[str, dict[str, Any]]:  # Any: YAML values
    """Verb -> its entry of prefect.yaml, for all verbs, whether their flows exist or not."""
    import yaml  # type: ignore[import-untyped]  # its stubs are a package of their own

    try:
        definitions = yaml.safe_load(PREFECT_YAML.read_text())["definitions"]
        return {verb: entry for verb, entry in definitions.items() if "entrypoint" in entry}
    except (OSError, yaml.YAMLError, KeyError, TypeError, AttributeError) as error:
        raise TableDamaged(f"{PREFECT_YAML} cannot be used: {error!r}") from None


def existing_verbs() -> list[str]:
    """Those whose flow this version has."""
    return [verb for verb, entry in table().items() if importlib.util.find_spec(entry["entrypoint"].partition(":")[0])]


def load_flow(verb: str) -> "Flow[..., Any]":  # Any: flows return different things
    """The flow object that the verb's entry point names. Raises TableDamaged when that is none."""
    from prefect import Flow
    from prefect.utilities.importtools import import_object

    flow = import_object(table()[verb]["entrypoint"])
    if not isinstance(flow, Flow):
        raise TableDamaged(f"{PREFECT_YAML}: {table()[verb]['entrypoint']} is not a flow")
    return flow


def wanted_for(config: RunConfig, overrides: Sequence[str], pool: str) -> list[Wanted]:
    """Every deployment of one training run, train first."""
    return [_wanted(verb, config, overrides, pool) for verb in existing_verbs()]


def _wanted(verb: str, config: RunConfig, overrides: Sequence[str], pool: str) -> Wanted:
    from prefect.utilities.callables import parameter_schema

    entry, flow = table()[verb], load_flow(verb)
    schema = parameter_schema(flow)
    fields = {
        "entrypoint": entry["entrypoint"],
        "version": _version(),
        "description": f"{flow.description or verb}\n\nRun `{config.run.name}`, described by `{config.path}`.",
        "tags": sorted([*entry["tags"], f"run:{config.run.name}"]),
        "parameters": _parameters(schema.properties, config, overrides),
        "work_pool": pool,
        "job_variables": entry["work_pool"].get("job_variables", {}),
        "concurrency": entry["concurrency_limit"],
        "schedules": sorted(entry.get("schedules", []), key=lambda one: str(one["slug"])),
        "pull_steps": entry["pull"],
        "enforce_parameter_schema": entry["enforce_parameter_schema"],
        "parameter_schema": schema.model_dump(mode="json", exclude_none=True),
    }
    return Wanted(verb=verb, flow=flow.name, name=config.run.name, fields=fields)


def _parameters(known: dict[str, Any], config: RunConfig, overrides: Sequence[str]) -> dict[str, Any]:  # Any: JSON values
    """The run.toml by its absolute path: the settings stay in it, and the secrets in the worker's environment."""
    parameters: dict[str, Any] = {name: str(config.path) for name in _CONFIG_PARAMETERS if name in known}
    if overrides and "overrides" in known:
        parameters["overrides"] = list(overrides)
    return parameters


def _version() -> str:
    from importlib.metadata import version

    return version("perdure")
