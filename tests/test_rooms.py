"""The house keeps its own rules: who imports what, what README and the pages promise, and that their links lead somewhere."""

import re
import subprocess
import sys
from pathlib import Path

import msgspec
import pytest

from perdure.cli.main import VERBS
from perdure.training import errors
from perdure.training.config import RunConfig

HOUSE = Path(__file__).resolve().parent.parent
README = HOUSE / "README.md"
PAGES = [README, HOUSE / "CONTRIBUTING.md", *sorted((HOUSE / "docs").rglob("*.md"))]
TORCH, PREFECT, BOTO = {"torch", "torchdata"}, {"prefect"}, {"boto3", "botocore"}


def modules(*rooms: str) -> list[str]:
    """Import names of all modules in these folders."""
    found = [path for room in rooms for path in sorted((HOUSE / room).glob("*.py")) if path.name != "__main__.py"]
    names = [".".join(("perdure", *path.relative_to(HOUSE).with_suffix("").parts)).removesuffix(".__init__") for path in found]
    assert names
    return names


def imported_by(names: list[str]) -> set[str]:
    """Top-level packages that a fresh interpreter has after importing these."""
    code = (
        "import importlib, sys\n"
        "for name in sys.argv[1:]: importlib.import_module(name)\n"
        "print(*{name.partition('.')[0] for name in sys.modules})"
    )
    done = subprocess.run([sys.executable, "-c", code, *names], capture_output=True, text=True, check=False, timeout=120)
    assert done.returncode == 0, done.stderr
    return set(done.stdout.split())


@pytest.mark.parametrize(
    ("rooms", "absent"),
    [
        (
            ("training", "training/checkpoint", "training/storage", "training/agent", "training/travel", "training/drill"),
            TORCH | PREFECT | BOTO,
        ),
        (("deployments",), TORCH | PREFECT | BOTO),
        (("flows", "tasks"), TORCH | BOTO),
        (("training/engine",), PREFECT | BOTO),
    ],
    ids=lambda value: "+".join(sorted(value)),
)
def test_room_imports_only_what_it_may(rooms: tuple[str, ...], absent: set[str]) -> None:
    lazy = {f"perdure.training.storage.{name}" for name in ("s3", "s3_upload", "s3_errors", "s3_lane", "s3_cold", "s3_session")}
    assert not imported_by([name for name in modules(*rooms) if name not in lazy]) & absent


def test_verbs_that_look_import_neither_torch_nor_prefect_nor_s3() -> None:
    verbs = [f"perdure.cli.{verb}" for verb in VERBS if verb != "run"]
    assert not imported_by(verbs) & (TORCH | PREFECT | BOTO)


def test_a_pull_starts_without_numpy_for_it_decodes_nothing() -> None:
    assert "numpy" not in imported_by(["perdure.cli.pull", "perdure.training.travel.pull"])


def test_session_is_handed_on_lazily() -> None:
    assert not imported_by(["perdure.training"]) & TORCH
    from perdure.training import Session
    from perdure.training.engine.session import Session as real

    assert Session is real


def test_every_package_is_shipped() -> None:
    import tomllib

    project = tomllib.loads((HOUSE / "pyproject.toml").read_text())
    packages = set(project["tool"]["setuptools"]["packages"])
    rooms = ("cli", "deployments", "flows", "tasks", "training")
    real = {
        ".".join(("perdure", *path.parent.relative_to(HOUSE).parts))
        for room in rooms
        for path in (HOUSE / room).rglob("__init__.py")
    }
    assert packages == real


# README


def documented_codes() -> dict[int, str]:
    rows = re.findall(r"^\| (\d+) \| (.+) \|$", README.read_text(), re.M)
    return {int(code): text for code, text in rows}


def all_errors(base: type[errors.PerdureError]) -> set[type[errors.PerdureError]]:
    return {base, *(found for below in base.__subclasses__() for found in all_errors(below))}


def test_exit_codes_of_readme_are_those_of_the_classes() -> None:
    imported_here = ["perdure.deployments.server", "perdure.cli.stop"]
    for name in imported_here:
        __import__(name)
    ours = {kind.exit_code for kind in all_errors(errors.PerdureError) if kind.__module__.startswith("perdure.")}
    from perdure.cli.main import INTERRUPTED

    assert set(documented_codes()) == ours | {0, INTERRUPTED}


@pytest.mark.parametrize(
    ("kind", "word"),
    [
        (errors.ConfigError, "setting"),
        (errors.RunBusy, "held by another process"),
        (errors.CheckpointNotFound, "no such run"),
        (errors.CheckpointDamaged, "damage"),
        (errors.StoreError, "store"),
        (errors.TrainingFailed, "training failed"),
        (errors.DiskFull, "disk is full"),
        (errors.NotReplicated, "only pushes"),
        (errors.DrillFailed, "a drill failed"),
        (errors.NeedsThaw, "thawed first"),
        (errors.Stopped, "same command goes on"),
    ],
)
def test_exit_code_means_what_readme_says(kind: type[errors.PerdureError], word: str) -> None:
    assert word in documented_codes()[kind.exit_code]


def test_readme_is_short_and_names_every_verb_room_and_make_target() -> None:
    text = README.read_text()
    assert len(text.splitlines()) <= 150
    assert all(f"perdure {verb}" in text for verb in VERBS)
    assert all(f"    {room}/" in text for room in ("cli", "deployments", "flows", "tasks", "training"))
    targets = re.findall(r"^\.PHONY: (.+)$", (HOUSE / "Makefile").read_text(), re.M)[0].split()
    named = set(re.findall(r"make ([a-z]+)", text)) - {"sure"}
    assert named <= set(targets)
    assert {"run", "test"} <= named


@pytest.mark.parametrize("page", PAGES, ids=lambda page: str(page.relative_to(HOUSE)))
def test_relative_links_lead_somewhere(page: Path) -> None:
    links = re.findall(r"\]\(([^)\s]+)\)", page.read_text())
    local = [link.partition("#")[0] for link in links if not re.match(r"[a-z]+://|#|mailto:", link)]
    missing = [link for link in local if not (page.parent / link).exists()]
    assert not missing


@pytest.mark.parametrize("page", PAGES, ids=lambda page: str(page.relative_to(HOUSE)))
def test_files_named_in_passing_exist(page: Path) -> None:
    named = re.findall(
        r"\b((?:docs|examples|training|tests|flows|tasks|cli|deployments)/[\w/.-]+\.(?:md|py|toml))\b", page.read_text()
    )
    assert [name for name in named if not (HOUSE / name).exists()] == []


# docs/cases.md


def test_the_tests_of_every_case_are_there() -> None:
    rows = re.findall(r"^- \*\*([A-Z]\d+)\*\* .+ \(\S+#\d+\): (.+)\.$", (HOUSE / "docs/cases.md").read_text(), re.MULTILINE)
    assert len(dict(rows)) == len(rows) == (HOUSE / "docs/cases.md").read_text().count("\n- ") > 70
    for case, tests in rows:
        for file, names in re.findall(r"(tests/\S+\.py)((?:,? `\w+`)+)", tests):
            text = (HOUSE / file).read_text()
            gone = [name for name in re.findall(r"`(\w+)`", names) if f"def test_{name}(" not in text]
            assert not gone, f"{case}: {file} has no longer {gone}"
        assert tests.count("tests/") == len(re.findall(r"tests/\S+\.py(?:,? `\w+`)+", tests)), case


# docs/configuration.md


def settings_of_config() -> set[str]:
    keys = set()
    for section in msgspec.structs.fields(RunConfig):
        if isinstance(section.type, type) and issubclass(section.type, msgspec.Struct):
            keys |= {f"{section.name}.{field.name}" for field in msgspec.structs.fields(section.type)}
    return keys | {"params.*"}


def rows_of_page() -> dict[str, str]:
    """Each documented key with the text of its default column."""
    found = {}
    for line in (HOUSE / "docs/configuration.md").read_text().splitlines():
        if line.startswith("| `"):
            keys, default, _ = (cell.strip() for cell in line.strip("|").split("|", 2))
            found |= dict.fromkeys(re.findall(r"`([^`]+)`", keys), default)
    return found


def test_configuration_page_names_every_setting_and_no_other() -> None:
    assert set(rows_of_page()) == settings_of_config()


def test_configuration_page_has_the_defaults_of_the_code() -> None:
    for section in msgspec.structs.fields(RunConfig):
        if not (isinstance(section.type, type) and issubclass(section.type, msgspec.Struct)):
            continue
        for field in msgspec.structs.fields(section.type):
            told = rows_of_page()[f"{section.name}.{field.name}"]
            if told.strip('`"').isdigit():
                assert float(told) == field.default, field.name
            if told == "required":
                assert field.default is msgspec.NODEFAULT, field.name


def test_stores_page_has_the_same_store_settings() -> None:
    text = (HOUSE / "docs/stores.md").read_text().partition("## Settings")[2].partition("## ")[0]
    keys = {f"store.{key}" for key in re.findall(r"^\| `(\w+)` \|", text, re.M)}
    assert keys == {key for key in settings_of_config() if key.startswith("store.")}


@pytest.mark.parametrize("example", sorted((HOUSE / "examples").glob("*/run.toml")), ids=lambda path: path.parent.name)
def test_example_is_a_valid_run(example: Path) -> None:
    from perdure.training.config import load_config

    assert load_config(example).run.steps > 0
