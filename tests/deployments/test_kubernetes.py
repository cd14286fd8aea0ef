"""deployments/kubernetes: the API accepts the manifests, and they are in step with Perdure's exit codes and graces."""

import argparse
import json
import subprocess
from pathlib import Path
from typing import Any

import kubernetes_validate
import pytest
import yaml
from harness import copy_tiny
from prefect.client.schemas.actions import WorkPoolCreate
from prefect.utilities.templating import apply_values

from perdure.cli import node
from perdure.cli.run import FLOW_MARGIN_SECS
from perdure.deployments import supervisor, table
from perdure.training import errors
from perdure.training.agent.launch import END_MARGIN_SECS
from perdure.training.config import LaunchSection, load_config

FOLDER = Path(table.__file__).parent / "kubernetes"
VERSIONS = ("1.31", "1.37")
"""The first one that has all that the manifests use, and the newest that the validator knows."""
STOP_SECS = LaunchSection().stop_grace + END_MARGIN_SECS + FLOW_MARGIN_SECS + supervisor.STOP_GRACE_SECS
FINAL = (errors.ConfigError, errors.CheckpointNotFound, errors.CheckpointDamaged, errors.TrainingFailed)


def documents(name: str) -> list[dict[str, Any]]:
    return list(yaml.safe_load_all((FOLDER / name).read_text()))


def job(name: str = "run.yaml") -> dict[str, Any]:
    return next(found for found in documents(name) if found["kind"] == "Job")


def template() -> dict[str, Any]:
    return dict(json.loads((FOLDER / "work-pool.json").read_text()))


def rendered() -> dict[str, Any]:
    """The Job of a flow run whose deployment sets nothing."""
    defaults = {name: variable.get("default", {}) for name, variable in template()["variables"]["properties"].items()}
    values = {
        **defaults,
        "name": "flow",
        "command": ["prefect", "flow-run", "execute"],
        "env": [{"name": "HOME", "value": "/tmp"}],
    }
    return dict(apply_values(template()["job_configuration"]["job_manifest"], values))


def assert_accepted(found: dict[str, Any]) -> None:
    for version in VERSIONS:
        kubernetes_validate.validate(found, version, strict=True)


@pytest.mark.parametrize("name", ["run.yaml", "nodes.yaml", "worker.yaml"])
def test_kubernetes_accepts_the_manifests(name: str) -> None:
    for found in documents(name):
        assert_accepted(found)
    wrong = job()
    wrong["spec"]["backoffLimits"] = 1
    with pytest.raises(kubernetes_validate.ValidationError, match="backoffLimits"):
        assert_accepted(wrong)


def test_prefect_and_kubernetes_accept_the_work_pool(tmp_path: Path) -> None:
    WorkPoolCreate(name="perdure", type="kubernetes", base_job_template=template())
    found = rendered()
    pod = found["spec"]["template"]["spec"]
    assert (pod.pop("completions"), pod.pop("parallelism")) == (1, 1), "prefect-kubernetes asks for them at this wrong place"
    assert_accepted(found)
    assert pod["terminationGracePeriodSeconds"] >= STOP_SECS
    config = load_config(copy_tiny(tmp_path / "tiny"))
    asked = {name for wanted in table.wanted_for(config, [], "perdure") for name in wanted.fields["job_variables"]}
    assert asked <= set(template()["variables"]["properties"]), "what perdure deploy sets"


@pytest.mark.parametrize("name", ["run.yaml", "nodes.yaml"])
def test_the_job_answers_each_exit_code_as_perdure_means_it(name: str) -> None:
    spec = job(name)["spec"]
    codes = {
        rule["action"]: rule["onExitCodes"]["values"] for rule in spec["podFailurePolicy"]["rules"] if "onExitCodes" in rule
    }
    assert codes == {"Ignore": [errors.Stopped.exit_code], "FailJob": sorted({kind.exit_code for kind in FINAL})}
    assert spec["template"]["spec"]["terminationGracePeriodSeconds"] >= STOP_SECS


def test_the_job_starts_the_run(tmp_path: Path) -> None:
    _, verb, _, *settings = job()["spec"]["template"]["spec"]["containers"][0]["command"]
    assert (verb, settings[::2]) == ("run", ["--set"] * 2)
    config = load_config(copy_tiny(tmp_path / "tiny"), settings[1::2])
    assert (str(config.run_dir), config.store_url) == ("/runs/gpt", "s3://BUCKET/gpt")


def test_each_pod_of_a_run_on_several_nodes_takes_its_place(tmp_path: Path) -> None:
    spec = job("nodes.yaml")["spec"]
    [container] = spec["template"]["spec"]["containers"]
    said = tmp_path / "perdure"
    said.write_text('#!/bin/sh\nprintf "%s\\n" "$@"\n')
    said.chmod(0o700)

    def started(pod: int) -> list[str]:
        environment = {"PATH": f"{tmp_path}:/usr/bin:/bin", "JOB_COMPLETION_INDEX": str(pod), "POD_IP": f"10.1.0.{pod}"}
        words = [*container["command"], *container["args"]]
        return subprocess.run(words, env=environment, capture_output=True, text=True, check=True).stdout.splitlines()

    verb, toml, *settings = started(0)
    assert (verb, toml) == ("run", "/work/gpt/run.toml")
    config = load_config(copy_tiny(tmp_path / "tiny"), settings[1::2])
    assert (str(config.run_dir), config.store_url, config.launch.address) == ("/runs/gpt", "s3://BUCKET/gpt", "10.1.0.0")
    assert spec["completions"] == spec["parallelism"] == config.launch.nodes == 2
    parser = argparse.ArgumentParser()
    node.add_arguments(parser)
    verb, *words = started(1)
    found = parser.parse_args(words)
    assert (verb, found.config, found.node) == ("node", toml, 1)
    assert load_config(tmp_path / "tiny" / "run.toml", found.set).run_dir == config.run_dir
