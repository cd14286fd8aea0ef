"""`restore` writes what others can read: safetensors without torch, and a torch file that needs no pickle."""

import shutil
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import msgspec
import pytest
import torch
from safetensors.numpy import load_file

from perdure.training.checkpoint.facts import Fact
from perdure.training.engine import state
from perdure.training.run_dir import CheckpointName
from perdure.training.storage.folder import FolderStore
from perdure.training.travel.push import push

Command = Callable[..., Any]
Leaves = dict[str, tuple[str, str, tuple[int, ...], bytes]]


def push_all(made: Any, store: Any) -> None:
    for step in (20, 40):
        push(made.run, store, CheckpointName(step, 1))


def leaves_of(tracked: dict[str, Any]) -> Leaves:
    """As the trainer would write them."""
    leaves: Leaves = {}
    for leaf in state.collect(tracked):
        value = leaf.value
        data = (
            value if isinstance(value, bytes) else value.detach().contiguous().reshape(-1).view(torch.uint8).numpy().tobytes()
        )
        leaves[leaf.path] = (leaf.kind, leaf.dtype, leaf.shape, bytes(data))
    return leaves


def test_safetensors_holds_the_tensors_of_the_newest_checkpoint(made: Any, command: Command, tmp_path: Path) -> None:
    out = tmp_path / "out.safetensors"
    answer = command("restore", made.run.root, out, "--json")
    assert answer.code == 0
    assert (answer.json["step"], answer.json["name"], answer.json["out"]) == (40, "000000000040-0001", str(out))
    tensors = load_file(out)
    assert tensors["model.weight"].shape == (64, 16)
    assert tensors["model.weight"].tobytes() == bytes(range(256)) * 16
    assert int(tensors["model.step"]) == 40
    assert out.stat().st_mode & 0o777 == 0o600


def test_step_and_glob_choose(made: Any, command: Command, tmp_path: Path) -> None:
    out = tmp_path / "out.safetensors"
    assert command("restore", made.run.root, out, "--step", "20", "--only", "model.s*").code == 0
    tensors = load_file(out)
    assert set(tensors) == {"model.step"}
    assert int(tensors["model.step"]) == 20


def test_restoring_imports_no_torch(made: Any, tmp_path: Path) -> None:
    command = [
        sys.executable,
        "-X",
        "importtime",
        "-m",
        "perdure.cli",
        "restore",
        str(made.run.root),
        str(tmp_path / "o.safetensors"),
    ]
    done = subprocess.run(command, capture_output=True, text=True, check=True)
    assert not {line.rpartition("|")[2].strip() for line in done.stderr.splitlines()} & {"torch", "prefect", "boto3"}


def test_what_is_not_here_comes_from_the_store_without_torch(made: Any, command: Command, tmp_path: Path) -> None:
    store, out = made.toml.parent / "store", tmp_path / "out.safetensors"
    push_all(made, FolderStore(store))
    shutil.rmtree(made.run.checkpoint(CheckpointName(20, 1)))
    answer = command("restore", made.run.root, out, "--step", "20", env={"PYTHONPROFILEIMPORTTIME": "1"})
    assert answer.code == 0, answer.err
    assert f"checkpoint 000000000020-0001 of {store.as_uri()} to {out}" in answer.out
    assert not {line.rpartition("|")[2].strip() for line in answer.err.splitlines()} & {"torch", "prefect", "boto3"}
    assert int(load_file(out)["model.step"]) == 20
    shutil.rmtree(made.run.root)  # only the run.toml is left
    answer = command("restore", made.toml, out, "--force", "--only", "model.s*", "--json")
    assert (answer.json["step"], answer.json["source"], answer.json["bytes"]) == (40, store.as_uri(), 8)
    assert int(load_file(out)["model.step"]) == 40


def test_the_url_of_a_bucket_is_enough(
    made: Any, command: Command, open_s3: Callable[..., Any], s3_keys: Any, tmp_path: Path
) -> None:
    store, out = open_s3(), tmp_path / "out.safetensors"
    push_all(made, store)
    where = ("--endpoint-url", s3_keys.endpoint, "--region", "us-east-1")
    answer = command("restore", store.url, out, *where, "--json")
    assert answer.code == 0, answer.err
    assert (answer.json["step"], answer.json["source"]) == (40, store.url)
    assert 0 < answer.json["fetched_bytes"] < answer.json["bytes"]  # stored bytes, and those of the index
    assert load_file(out)["model.weight"].tobytes() == bytes(range(256)) * 16
    assert "were fetched" in command("restore", store.url, out, *where, "--force", "--step", "20").out
    damaged = Fact(copy="store", checked_at=0.0, result="damaged", damage=("model/weight",))
    store.put("checkpoints/000000000040-0001/check.json", msgspec.json.encode(damaged))
    assert command("restore", store.url, out, *where, "--force", "--dry-run", "--json").json["step"] == 20


def test_what_a_store_cannot_give_is_said(made: Any, command: Command, tmp_path: Path) -> None:
    store, out = FolderStore(made.toml.parent / "store"), tmp_path / "out.safetensors"
    nothing = command("restore", store.url, out)
    assert nothing.code == 4
    assert "holds no run" in nothing.err
    push_all(made, store)
    for arguments, code, says in (
        ((store.url, out, "--step", "7"), 4, f"{store.url} has no checkpoint of step 7"),
        ((made.run.root, out, "--step", "7"), 4, f"{store.url} has no checkpoint of step 7"),
        ((store.url, tmp_path / "out.pt"), 2, "perdure pull"),
        ((store.url, out, "--set", "run.steps=3"), 2, "is a store"),
        ((made.run.root, out, "--region", "mars"), 2, "go with the URL of a store"),
    ):
        answer = command("restore", *arguments)
        assert answer.code == code, answer.err
        assert says in answer.err
    assert not out.exists()


def test_disk_that_is_full_or_read_only_is_no_traceback(made: Any, command: Command, tmp_path: Path) -> None:
    made.write(60, leaves=leaves_of({"model": torch.nn.Linear(64, 64)}))
    place = tmp_path / "small"
    place.mkdir()
    if subprocess.run(["mount", "-t", "tmpfs", "-o", "size=4k", "tmpfs", place], capture_output=True, check=False).returncode:
        pytest.skip("mount is not permitted here")
    try:
        for name in ("out.pt", "out.safetensors"):
            full = command("restore", made.run.root, place / name)
            assert (full.code, "No space left" in full.err) == (8, True), full.err
        subprocess.run(["mount", "-o", "remount,ro", place], check=True)
        for name in ("out.pt", "out.safetensors"):
            refused = command("restore", made.run.root, place / name)
            assert (refused.code, "Read-only file system" in refused.err) == (2, True), refused.err
        assert list(place.iterdir()) == []
    finally:
        subprocess.run(["umount", place], check=True)


def test_damage_is_refused_and_leaves_no_file(made: Any, command: Command, tmp_path: Path) -> None:
    made.damage(40, "model/weight")
    for name in ("out.safetensors", "out.pt"):
        answer = command("restore", made.run.root, tmp_path / name)
        assert answer.code == 5, answer.err
        assert not [path.name for path in tmp_path.iterdir() if path.name.startswith((name, f".{name}"))]


@pytest.mark.parametrize(
    ("out", "says"),
    [("x.bin", "no known ending"), ("missing/x.pt", "is no folder"), ("there.pt", "exists"), ("folder.pt", "is a folder")],
)
def test_bad_output_is_refused_before_anything_is_read(
    out: str, says: str, made: Any, command: Command, tmp_path: Path
) -> None:
    (tmp_path / "there.pt").write_text("mine")
    (tmp_path / "folder.pt").mkdir()
    answer = command("restore", made.run.root, tmp_path / out)
    assert answer.code == 2
    assert says in answer.err
    assert (tmp_path / "there.pt").read_text() == "mine"


def test_dry_run_writes_nothing_and_force_replaces(made: Any, command: Command, tmp_path: Path) -> None:
    out = tmp_path / "there.safetensors"
    out.write_text("mine")
    assert command("restore", made.run.root, out, "--force", "--dry-run").code == 0
    assert out.read_text() == "mine"
    assert command("restore", made.run.root, out, "--force").code == 0
    assert "model.weight" in load_file(out)


def test_torch_file_is_the_state_dicts_and_loads_without_pickle(made: Any, command: Command, tmp_path: Path) -> None:
    torch.manual_seed(3)
    model = torch.nn.Sequential(torch.nn.Linear(3, 4), torch.nn.LayerNorm(4)).to(torch.bfloat16)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 10)
    for _ in range(3):
        model(torch.randn(2, 3, dtype=torch.bfloat16)).sum().backward()
        optimizer.step()
        scheduler.step()
    tracked = {"model": model, "optimizer": optimizer, "scheduler": scheduler}
    made.write(60, leaves=leaves_of(tracked))

    out = tmp_path / "all.pt"
    answer = command("restore", made.run.root, out, "--json")
    assert answer.code == 0, answer.err
    assert answer.json["objects"] == ["model", "optimizer", "scheduler"]
    loaded = torch.load(out, weights_only=True)
    assert list(loaded["model"]) == list(model.state_dict())
    for key, value in model.state_dict().items():
        assert torch.equal(loaded["model"][key], value)
        assert loaded["model"][key].dtype is torch.bfloat16
    fresh = torch.optim.AdamW(model.parameters(), lr=1.0)
    fresh.load_state_dict(loaded["optimizer"])
    assert fresh.state_dict()["param_groups"][0]["lr"] == optimizer.param_groups[0]["lr"]
    for index, values in optimizer.state_dict()["state"].items():
        assert torch.equal(fresh.state_dict()["state"][index]["exp_avg"], values["exp_avg"])
    assert loaded["scheduler"]["last_epoch"] == 3

    only = tmp_path / "model.pt"
    assert command("restore", made.run.root, only, "--only", "mod*").code == 0
    assert list(torch.load(only, weights_only=True)) == ["model"]
    none = command("restore", made.run.root, tmp_path / "no.pt", "--only", "generator")
    assert none.code == 4
    assert "it has model, optimizer, scheduler" in none.err
