"""torch.distributed.checkpoint on Perdure's storage: what is saved comes back, in shards or whole, of a folder or a bucket."""

import secrets
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from conftest import BUCKET, S3Server
from storage.proxy import proxy_to
from torch import nn
from torch.distributed.checkpoint import DefaultSavePlanner
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Shard
from torch.testing._internal.distributed.fake_pg import FakeStore

from perdure.training import PerdureReader, PerdureWriter
from perdure.training.checkpoint.reader import open_checkpoint
from perdure.training.checkpoint.restore import restore_safetensors
from perdure.training.checkpoint.verify import verify_folder
from perdure.training.store_settings import StoreSettings

pytestmark = pytest.mark.filterwarnings("ignore:torch.distributed is disabled")


def state_of(seed: int) -> dict[str, Any]:
    torch.manual_seed(seed)
    model = nn.Sequential(nn.Linear(16, 65), nn.Linear(65, 3))
    optimizer = torch.optim.AdamW(model.parameters())
    model(torch.randn(4, 16)).sum().backward()
    optimizer.step()
    return {
        "model": model.state_dict(),
        "optimizer": optimizer.state_dict(),
        "step": seed,
        "a/b%": [torch.tensor(seed), {"half": torch.full((3,), seed, dtype=torch.bfloat16)}, "text"],
        "empty": torch.zeros(0, 4),
        "transposed": torch.randn(5, 7).T,
    }


def flat(value: Any) -> Iterator[Any]:
    for one in value.values() if isinstance(value, dict) else value if isinstance(value, list) else ():
        yield from flat(one) if isinstance(one, dict | list) else (one,)


def assert_same(found: dict[str, Any], wanted: dict[str, Any]) -> None:
    for one, other in zip(flat(found), flat(wanted), strict=True):
        assert torch.equal(one, other) if isinstance(other, torch.Tensor) else one == other


def save(state: dict[str, Any], to: PerdureWriter, **more: Any) -> None:
    dcp.save(state, storage_writer=to, no_dist=True, **more)


def load(state: dict[str, Any], source: PerdureReader, **more: Any) -> dict[str, Any]:
    dcp.load(state, storage_reader=source, no_dist=True, **more)
    return state


def test_what_was_saved_comes_back_and_is_a_checkpoint_like_any_other(tmp_path: Path) -> None:
    state = state_of(7)
    save(state, PerdureWriter(tmp_path / "step-7"))
    assert_same(load(state_of(8), PerdureReader(f"file://{tmp_path}/step-7")), state)
    assert verify_folder(tmp_path / "step-7") == []
    with open_checkpoint(tmp_path / "step-7") as reader:
        assert restore_safetensors(reader, tmp_path / "out.safetensors", only="model.0.*") == (16 * 65 + 65) * 4


def test_ranks_load_their_shards_of_what_one_saved_and_one_loads_what_they_saved(tmp_path: Path) -> None:
    state = {"model": state_of(7)["model"], "step": 7}
    save(state, PerdureWriter(tmp_path / "one"))
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node=2"]
    subprocess.run([*command, str(Path(__file__).parent / "dcp_ranks.py"), str(tmp_path)], check=True, timeout=180)
    for name in ("two", "later"):
        found = {"model": state_of(8)["model"], "step": 0, "each": {f"of-{rank}": torch.zeros(rank + 1) for rank in (0, 1)}}
        assert_same(
            load(found, PerdureReader(tmp_path / name)), {**state, "each": {"of-0": torch.ones(1), "of-1": torch.ones(2)}}
        )
        assert verify_folder(tmp_path / name) == []
        with open_checkpoint(tmp_path / name) as reader:
            assert [len(reader.rank_entries(rank)) > 1 for rank in range(reader.ranks)] == [True, True, False]
            assert "model.0.weight%at/33,0" in reader.rank_entries(1)


@pytest.fixture
def bucket(s3_keys: S3Server) -> Iterator[tuple[Any, dict[str, Any]]]:
    with proxy_to(s3_keys.endpoint) as proxy:
        settings = StoreSettings(endpoint_url=proxy.endpoint, region="us-east-1")
        yield proxy, {"url": f"s3://{BUCKET}/dcp/{secrets.token_hex(6)}", "settings": settings}


@pytest.fixture
def rank_2_of_4() -> Iterator[None]:
    dist.init_process_group("fake", rank=2, world_size=4, store=FakeStore())
    yield
    dist.destroy_process_group()


@pytest.mark.usefixtures("rank_2_of_4")
def test_of_a_bucket_a_rank_reads_only_the_blobs_with_rows_of_its_own(bucket: tuple[Any, dict[str, Any]]) -> None:
    proxy, place = bucket
    rows = torch.randint(0, 256, (4 * 8, 1 << 20), dtype=torch.uint8)
    writer, reader = PerdureWriter(**place), PerdureReader(**place)
    save({"large": rows, "other": rows[:3].clone()}, writer)
    proxy.log.clear()
    own = DTensor.from_local(torch.zeros(8, 1 << 20, dtype=torch.uint8), init_device_mesh("cpu", (4,)), [Shard(0)])
    load({"large": own}, reader)
    assert torch.equal(own.to_local(), rows[16:24])
    assert 8 << 20 <= proxy.fetched(".pack") < 9 << 20
    for one in (writer._to, reader._reader.source._store):  # type: ignore[attr-defined]
        one.client.close()  # type: ignore[attr-defined]


def test_a_save_that_fails_leaves_no_checkpoint_and_the_next_one_is_whole(tmp_path: Path) -> None:
    class Failing(DefaultSavePlanner):
        def resolve_data(self, write_item: Any) -> Any:
            if write_item.index.fqn == "transposed":
                raise RuntimeError("no more")
            return super().resolve_data(write_item)

    with pytest.raises(CheckpointException, match="no more"):
        save(state_of(7), PerdureWriter(tmp_path), planner=Failing())
    with pytest.raises(CheckpointException, match=r"holds no checkpoint: it has no manifest.json"):
        load(state_of(8), PerdureReader(tmp_path))
    save(state_of(9), PerdureWriter(tmp_path))
    with pytest.raises(CheckpointException, match="holds a checkpoint already"):
        save(state_of(7), PerdureWriter(tmp_path))
    assert_same(load(state_of(8), PerdureReader(tmp_path)), state_of(9))
    save(state_of(7), PerdureWriter(tmp_path, overwrite=True))
    assert_same(load(state_of(8), PerdureReader(tmp_path)), state_of(7))


def test_a_damaged_tensor_is_named(tmp_path: Path) -> None:
    save(state_of(7), PerdureWriter(tmp_path))
    with open_checkpoint(tmp_path) as reader:
        offset = reader.entries["model.0.weight"].blobs[0].offset
    pack = bytearray((tmp_path / "rank-00000.pack").read_bytes())
    pack[offset + 5] ^= 1
    (tmp_path / "rank-00000.pack").write_bytes(pack)
    with pytest.raises(CheckpointException, match=r"model\.0\.weight are damaged"):
        load(state_of(8), PerdureReader(tmp_path))
    assert load({"step": 0}, PerdureReader(tmp_path)) == {"step": 7}
