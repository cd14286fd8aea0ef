"""State by name: what is saved, how it comes back, and what is refused before anything is touched."""

import collections
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn

from perdure.training.engine.leaves import Decoder, Encoder
from perdure.training.engine.restore import restore
from perdure.training.engine.state import check_trackable, collect
from perdure.training.errors import CheckpointDamaged, ConfigError, PerdureError


class Holder:
    """An object whose state is whatever it is given."""

    def __init__(self, state: Any = None) -> None:
        self.state = state

    def state_dict(self) -> Any:
        return self.state

    def load_state_dict(self, state: Any) -> None:
        self.state = state


class Pair(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.w1, self.w2 = nn.Parameter(torch.ones(3)), nn.Parameter(torch.ones(3))


def stepped(model: Pair, order: list[nn.Parameter]) -> torch.optim.Optimizer:
    optimizer = torch.optim.Adam(order)
    model.w1.grad, model.w2.grad = torch.full((3,), 1.0), torch.full((3,), 5.0)
    optimizer.step()
    return optimizer


def test_plain_state_of_every_kind_comes_back_as_it_was(harness: Any) -> None:
    generator = np.random.default_rng(3)
    legacy = np.random.RandomState(3)
    state = {
        "numbers": [1, -(2**70), 0.1, float("inf"), 1 + 2j, True, None, "text", b"bytes"],
        "tuples": (1, (2, "tensor-ref"), ("tensor-ref", "a lie"), ()),
        ("a", 1): {1: "int", "1": "str"},
        "sets": {1, 2},
        "frozen": frozenset({"a"}),
        "ordered": collections.OrderedDict([("b", 1), ("a", 2)]),
        "deque": collections.deque([1, 2], maxlen=5),
        "counter": collections.Counter("aab"),
        "size": torch.Size([2, 3]),
        "dtype": torch.bfloat16,
        "device": torch.device("cpu"),
        "numpy scalar": np.float32(0.1),
        "pcg": generator.bit_generator.state,
        "legacy": legacy.get_state(),
        "words": np.array(["ab", "c"]),
    }
    kept = harness.keep(collect({"holder": Holder(state)}))
    other = Holder()
    restore({"holder": other}, kept.__getitem__)
    words, legacy_words = other.state.pop("words"), other.state.pop("legacy")
    assert words.tolist() == ["ab", "c"]
    assert all(np.array_equal(old, new) for old, new in zip(state.pop("legacy"), legacy_words, strict=True))
    state.pop("words")
    assert other.state == state
    assert [type(value) for value in other.state.values()] == [type(value) for value in state.values()]
    assert list(other.state["ordered"]) == ["b", "a"]
    assert other.state["deque"].maxlen == 5


@pytest.mark.parametrize(
    "dtype", [torch.float32, torch.bfloat16, torch.float8_e4m3fn, torch.int64, torch.bool, torch.complex64]
)
def test_tensors_of_any_kind_and_layout_come_back_bit_for_bit(harness: Any, dtype: torch.dtype) -> None:
    values = (torch.arange(24).reshape(4, 6) % 5).to(dtype)
    state = {"whole": values, "turned": values.t(), "scalar": values[0, 1], "empty": values[:0], "a/b%": values[1]}
    kept = harness.keep(collect({"holder": Holder(state)}))
    other = Holder()
    restore({"holder": other}, kept.__getitem__)
    for key, value in state.items():
        assert other.state[key].dtype == value.dtype
        assert other.state[key].shape == value.shape
        raw = [tensor.contiguous().reshape(-1).view(torch.uint8) for tensor in (other.state[key], value)]
        assert torch.equal(*raw), key
    assert "holder/a%2Fb%25" in kept


def test_a_change_of_flags_between_two_saves_is_saved(harness: Any) -> None:
    model = nn.Linear(2, 2)
    first = harness.keep(collect({"model": model}))
    assert bytes(harness.keep(collect({"model": model}))["model"].data) == bytes(first["model"].data)
    model.bias.requires_grad_(False)
    assert bytes(harness.keep(collect({"model": model}))["model"].data) != bytes(first["model"].data)


def test_collecting_copies_no_tensor() -> None:
    model = nn.Linear(4, 4)
    leaf = next(leaf for leaf in collect({"model": model}) if leaf.path == "model/weight")
    assert isinstance(leaf.value, torch.Tensor)
    assert leaf.value.data_ptr() == model.weight.data_ptr()


class Meter:
    pass


@pytest.mark.parametrize(
    ("value", "message"),
    [
        ({"a": [1, {"b": Meter()}]}, r"holder/a/1/b is a .*Meter"),
        ({"f": len}, r"holder/f is a builtins.builtin_function_or_method"),
        ({"d": collections.defaultdict(int)}, r"holder/d is a collections.defaultdict"),
        ({"o": np.array([object()])}, r"holder/o is a numpy.ndarray"),
        ({"s": torch.eye(2).to_sparse()}, r"holder/s is a Tensor \(torch.sparse_coo"),
        ({"m": torch.empty(2, device="meta")}, r"holder/m is a Tensor .*on meta"),
        ({"k": {Meter: 1}}, r"holder/k has a key of type type"),
    ],
    ids=["object", "function", "defaultdict", "object array", "sparse", "meta", "key"],
)
def test_what_is_not_plain_data_is_refused_by_path_and_type(value: Any, message: str) -> None:
    with pytest.raises(PerdureError, match=message):
        collect({"holder": Holder(value)})


def test_state_with_a_cycle_is_refused() -> None:
    state: list[Any] = []
    state.append(state)
    with pytest.raises(PerdureError, match="nested deeper"):
        Encoder("holder").encode(state, "")


def test_malformed_references_are_damage(harness: Any) -> None:
    kept = harness.keep(collect({"holder": Holder({"t": torch.ones(2)})}))
    decoder = Decoder("holder", kept.__getitem__)
    for value in (("tensor-ref",), ("tensor-ref", "nowhere"), ("array", "O", [1], b"12345678"), ("torch-dtype", "load")):
        with pytest.raises(CheckpointDamaged):
            decoder.decode(value)
    del kept["holder/t"]
    with pytest.raises(CheckpointDamaged, match="holder/t"):
        restore({"holder": Holder()}, kept.__getitem__)


@pytest.mark.parametrize("name", ["", "perdure.rng", "a/b", "a%b"])
def test_names_that_paths_could_not_hold_are_refused(name: str) -> None:
    with pytest.raises(PerdureError, match="cannot be a name"):
        check_trackable(name, Holder())


def test_objects_without_state_are_refused() -> None:
    with pytest.raises(PerdureError, match=r"without state_dict\(\)"):
        check_trackable("thing", object())


def test_moments_follow_the_names_when_the_parameters_come_in_another_order(harness: Any) -> None:
    model = Pair()
    kept = harness.keep(collect({"model": model, "optimizer": stepped(model, [model.w1, model.w2])}))
    other = Pair()
    optimizer = torch.optim.Adam([other.w2, other.w1])
    restore({"model": other, "optimizer": optimizer}, kept.__getitem__)
    assert optimizer.state[other.w1]["exp_avg"].tolist() == pytest.approx([0.1] * 3)
    assert optimizer.state[other.w2]["exp_avg"].tolist() == pytest.approx([0.5] * 3)


def test_another_set_of_parameters_is_refused_by_name_and_nothing_is_touched(harness: Any) -> None:
    model = Pair()
    kept = harness.keep(collect({"model": model, "optimizer": stepped(model, [model.w1])}))
    other = Pair()
    with torch.no_grad():
        other.w1.fill_(9.0)
    with pytest.raises(ConfigError, match=r"group 0: not in the checkpoint's: model.w2\n.*only in the checkpoint's: model.w1"):
        restore({"model": other, "optimizer": torch.optim.Adam([other.w2])}, kept.__getitem__)
    assert other.w1.tolist() == [9.0] * 3


def test_a_changed_model_is_refused_with_everything_that_differs(harness: Any) -> None:
    kept = harness.keep(collect({"model": nn.Sequential(nn.Linear(2, 3), nn.BatchNorm1d(3))}))
    other = nn.Sequential(nn.Linear(2, 4), nn.Linear(3, 3).double())
    with pytest.raises(ConfigError) as error:
        restore({"model": other}, kept.__getitem__)
    text = str(error.value)
    assert "only in the checkpoint: 1.running_mean, 1.running_var, 1.num_batches_tracked" in text
    assert "0.weight is float32 (3, 2) in the checkpoint, float32 (4, 2) now" in text
    assert "1.bias is float32 (3,) in the checkpoint, float64 (3,) now" in text


def test_other_tracked_objects_are_refused_by_name(harness: Any) -> None:
    kept = harness.keep(collect({"a": Holder(1), "b": Holder(2), "c": nn.Linear(1, 1)}))
    with pytest.raises(ConfigError, match=r"but not tracked now: b") as error:
        restore({"a": Holder(), "c": Holder(), "d": Holder()}, kept.__getitem__)
    assert "tracked now, but not in the checkpoint: d" in str(error.value)
    assert "'c' is a object" in str(error.value)


def adapted(trainable: bool) -> nn.Module:
    model = nn.Linear(4, 4).requires_grad_(False)
    for name in ("lora_a", "lora_b"):
        model.register_parameter(name, nn.Parameter(torch.zeros(4, 2), requires_grad=trainable))
    return model


def test_adapters_without_gradients_are_refused_by_name_and_cause(harness: Any) -> None:
    model = adapted(True)
    optimizer = torch.optim.AdamW([p for p in model.parameters() if p.requires_grad])
    kept = harness.keep(collect({"model": model, "optimizer": optimizer}))
    other = adapted(False)
    with pytest.raises(ConfigError) as error:
        restore({"model": other, "optimizer": torch.optim.AdamW([other.lora_a, other.lora_b])}, kept.__getitem__)
    assert "trained in the checkpoint, frozen now: lora_a, lora_b\n" in str(error.value)
    assert "0 trainable parameters" in str(error.value)
    right = adapted(True).requires_grad_(True)
    with pytest.raises(ConfigError, match="frozen in the checkpoint, trainable now: weight, bias"):
        restore({"model": right, "optimizer": torch.optim.AdamW([right.lora_a, right.lora_b])}, kept.__getitem__)


def test_frozen_weights_come_back_too(harness: Any) -> None:
    model = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 2))
    model[0].requires_grad_(False)
    nn.init.constant_(model[0].weight, 0.123)
    kept = harness.keep(collect({"model": model, "optimizer": torch.optim.SGD(model[1].parameters(), lr=0.1)}))
    other = nn.Sequential(nn.Linear(4, 4).requires_grad_(False), nn.Linear(4, 2))
    restore({"model": other, "optimizer": torch.optim.SGD(other[1].parameters(), lr=0.1)}, kept.__getitem__)
    assert torch.equal(other[0].weight, torch.full((4, 4), 0.123))
    assert {path for path in kept if path.startswith("model/")} == {f"model/{key}" for key in model.state_dict()}


def test_loading_touches_only_what_is_loaded_and_twice_is_once(harness: Any) -> None:
    model = nn.Sequential(nn.Linear(4, 4), nn.BatchNorm1d(4))
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.1, weight_decay=0.5)
    model(torch.randn(8, 4)).square().sum().backward()
    optimizer.step()
    kept = harness.keep(collect({"model": model, "optimizer": optimizer}))
    other = nn.Sequential(nn.Linear(4, 4), nn.BatchNorm1d(4))
    tracked = {"model": other, "optimizer": torch.optim.AdamW(other.parameters(), lr=0.1, weight_decay=0.5)}
    bystander, random_state = nn.Linear(2, 2), torch.get_rng_state()
    before = bystander.weight.detach().clone()
    for _ in range(2):
        restore(tracked, kept.__getitem__)
        assert harness.digest_of(harness.keep(collect(tracked))) == harness.digest_of(kept)
    assert torch.equal(torch.get_rng_state(), random_state)
    assert torch.equal(bystander.weight, before)


def test_the_step_count_of_adam_is_kept(harness: Any) -> None:
    """With constant gradients each update is exactly -lr; with the count lost, the first one would be -0.2074."""

    def build() -> Any:
        model = nn.Linear(1, 1, bias=False)
        nn.init.constant_(model.weight, 5.0)
        optimizer = torch.optim.AdamW(model.parameters(), lr=0.1, betas=(0.9, 0.999), eps=0.0, weight_decay=0.0)

        def step(_: int) -> float:
            before = model.weight.item()
            model.weight.grad = torch.ones(1, 1)
            optimizer.step()
            optimizer.zero_grad()
            return model.weight.item() - before

        return harness.Training({"model": model, "optimizer": optimizer}, step)

    assert harness.run(build, 12, (10,)).returned == pytest.approx([-0.1] * 12, abs=1e-6)


def test_state_of_an_older_torch_is_taken(harness: Any) -> None:
    """A group without a newer flag gets the value it was built with; a step count that is a number is accepted."""
    model = nn.Linear(1, 1, bias=False)
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.1)
    model.weight.grad = torch.ones(1, 1)
    optimizer.step()
    for state in optimizer.state.values():
        state["step"] = 1
    for group in optimizer.param_groups:
        del group["foreach"], group["capturable"]
    kept = harness.keep(collect({"model": model, "optimizer": optimizer}))
    other = nn.Linear(1, 1, bias=False)
    loaded = torch.optim.AdamW(other.parameters(), lr=0.1)
    restore({"model": other, "optimizer": loaded}, kept.__getitem__)
    assert loaded.param_groups[0]["capturable"] is False
    other.weight.grad = torch.ones(1, 1)
    loaded.step()
    assert float(loaded.state[other.weight]["step"]) == 2.0
