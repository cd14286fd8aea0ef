"""For test_dcp.py, started by torchrun: loads what one process saved into its shards of a model, and saves those twice."""

import os
import sys

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch import nn
from torch.distributed.fsdp import fully_shard

from perdure.training import PerdureReader, PerdureWriter


def main(folder: str) -> None:
    dist.init_process_group("gloo")
    model = nn.Sequential(nn.Linear(16, 65), nn.Linear(65, 3))
    fully_shard(model)
    state = {"model": model.state_dict(), "step": 0, "each": {f"of-{dist.get_rank()}": torch.ones(dist.get_rank() + 1)}}
    loaded = {"model": state["model"], "step": 0}
    dcp.load(loaded, storage_reader=PerdureReader(f"{folder}/one"))
    state["step"] = loaded["step"]
    dcp.save(state, storage_writer=PerdureWriter(f"{folder}/two"))
    dcp.async_save(state, storage_writer=PerdureWriter(), checkpoint_id=f"{folder}/later").result()
    dist.barrier()
    os._exit(0)  # at the end of an interpreter threads of torch abort the process now and then


if __name__ == "__main__":
    main(sys.argv[1])
