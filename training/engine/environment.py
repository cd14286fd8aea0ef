"""What a run's numbers depend on besides its state: versions, threads, determinism flags, hardware, the commit of the code."""

import os
import platform
import re
import subprocess
from collections.abc import Mapping
from importlib import metadata
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.distributed as dist

from perdure.training.errors import PerdureError

Facts = Mapping[str, Any]  # Any: plain JSON values

_THREAD_VARIABLES = ("OMP_NUM_THREADS", "MKL_NUM_THREADS", "CUBLAS_WORKSPACE_CONFIG", "PYTHONHASHSEED")
_GIT_SECS = 10.0
_DRIVER = Path("/proc/driver/nvidia/version")


def environment() -> dict[str, Any]:
    """Plain JSON values, the same for every process that can go on bit for bit."""
    facts: dict[str, Any] = {
        "python": platform.python_version(),
        "torch": str(torch.__version__),
        "numpy": np.__version__,
        "perdure": metadata.version("perdure"),
        "threads": torch.get_num_threads(),
        "interop_threads": torch.get_num_interop_threads(),
        "machine": platform.machine(),
        "cpu": torch.backends.cpu.get_cpu_capability(),
        "mkldnn": bool(torch.backends.mkldnn.enabled) and torch.backends.mkldnn.is_available(),  # type: ignore[no-untyped-call]
        "default_dtype": str(torch.get_default_dtype()).removeprefix("torch."),
        "float32_matmul": torch.get_float32_matmul_precision(),
        "deterministic": torch.are_deterministic_algorithms_enabled(),
        "flush_denormal": _flushes_denormals(),
        "variables": {name: os.environ[name] for name in _THREAD_VARIABLES if name in os.environ},
    }
    if torch.cuda.is_available():
        facts |= _cuda()
    return facts


def _cuda() -> dict[str, Any]:
    return {
        "cuda": str(torch.version.cuda),
        "nccl": _nccl_version() if dist.is_nccl_available() else None,
        "driver": driver_version(),
        "cudnn": torch.backends.cudnn.version(),  # type: ignore[no-untyped-call]
        "cudnn_deterministic": torch.backends.cudnn.deterministic,
        "cudnn_benchmark": torch.backends.cudnn.benchmark,
        "tf32": torch.backends.cuda.matmul.allow_tf32,
        "devices": [torch.cuda.get_device_name(index) for index in range(torch.cuda.device_count())],
    }


def _nccl_version() -> str:
    return ".".join(map(str, torch.cuda.nccl.version()))  # type: ignore[no-untyped-call]


def driver_version(path: Path = _DRIVER) -> str | None:
    """Of the NVIDIA kernel module; None without one."""
    try:
        found = re.search(r"Kernel Module\b.*?(\d+\.\d+(?:\.\d+)*)", path.read_text())
    except OSError:
        return None
    return found[1] if found else None


def _flushes_denormals() -> bool:
    tiny = torch.tensor([1e-40])
    return bool((tiny * 1.0).item() == 0.0)


def differences(old: Facts, new: Facts) -> list[str]:
    """One sentence for each fact in which the resumed process differs from the checkpoint's."""
    found = []
    for key in sorted({*old, *new}):
        if old.get(key) != new.get(key):
            found.append(f"{key}: {_shown(old.get(key))} in the checkpoint, {_shown(new.get(key))} now")
    return found


def require_same(old: Facts, new: Facts) -> None:
    """Exact mode: refuse to go on where bits could come out differently."""
    if found := differences(old, new):
        raise PerdureError(
            "exact = 'require', but this process differs from the checkpoint's: " + "; ".join(found),
            "go on where the checkpoint came from, or set run.exact = 'prefer' to go on and have it noted",
        )


def code_state(folder: Path) -> dict[str, Any]:
    """Commit of the user's code and whether it had changes on top; empty outside a git checkout."""
    commit = _git(folder, "rev-parse", "HEAD")
    if not commit:
        return {}
    return {"commit": commit, "dirty": bool(_git(folder, "status", "--porcelain", "--untracked-files=no"))}


def _git(folder: Path, *arguments: str) -> str:
    try:
        done = subprocess.run(
            ["git", "--no-optional-locks", "-C", str(folder), *arguments],
            capture_output=True, text=True, timeout=_GIT_SECS, stdin=subprocess.DEVNULL, check=False,
        )  # fmt: skip
    except (OSError, subprocess.TimeoutExpired):
        return ""
    return done.stdout.strip() if done.returncode == 0 else ""


def _shown(value: Any) -> str:  # Any: a plain JSON value
    return "nothing" if value is None else str(value)
