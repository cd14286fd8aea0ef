"""A DeepSpeed engine's part of a checkpoint as the files that DeepSpeed would have written, in a private folder, for its own
tools. These unpickle them; what they hold was read from a checkpoint, and checked, a moment before."""

import contextlib
import sys
import tempfile
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch

from perdure.training.checkpoint.reader import CheckpointReader
from perdure.training.engine.leaves import Read, read_plain
from perdure.training.engine.zero import ZeroDecoder
from perdure.training.errors import ConfigError


def weights(name: str, plain: Mapping[str, Any], reader: CheckpointReader, read: Read) -> dict[str, torch.Tensor]:
    """Parameters, frozen ones too, and buffers by their names, as fp32 from ZeRO 1 on. Raises ConfigError without DeepSpeed."""
    with contextlib.redirect_stdout(sys.stderr), tempfile.TemporaryDirectory(prefix="perdure-zero-") as folder:
        try:
            from deepspeed.utils.zero_to_fp32 import get_fp32_state_dict_from_zero_checkpoint
        except ImportError:
            raise ConfigError(f"{name!r} is of DeepSpeed, which is not installed", "pip install 'perdure[deepspeed]'") from None
        files = write_files(name, reader, read, Path(folder, "files"))
        if plain["stage"] == 0:
            return dict(torch.load(files[0], weights_only=False)["module"])
        found = dict(get_fp32_state_dict_from_zero_checkpoint(folder, tag="files"))
        if plain["stage"] == 1:  # of which DeepSpeed leaves out frozen ones
            [file] = [file for file in files if file.name.endswith("model_states.pt")]
            kept = torch.load(file, weights_only=False)["module"]
            found |= {key: value.float() for key, value in kept.items() if key not in found}
        return found


def write_files(name: str, reader: CheckpointReader, read: Read, folder: Path) -> list[Path]:
    """Those of all ranks."""
    folder.mkdir()
    written = []
    for path, (_, entry) in reader.state().items():
        if entry.kind == "plain" and path.startswith(f"{name}/"):
            written.append(folder / path.removeprefix(f"{name}/"))
            torch.save(ZeroDecoder(path, read).decode(read_plain(read, path)), written[-1])
    return written
