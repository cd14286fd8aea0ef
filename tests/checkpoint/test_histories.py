"""Any history of states, written as fulls and increments in any order, restores every state bit for bit."""

import tempfile
from pathlib import Path

import numpy as np
from hypothesis import given, settings
from hypothesis import strategies as st
from snapshots import Source, item_bytes, write

from perdure.training.checkpoint.derive import cast
from perdure.training.checkpoint.layout import ITEM_SIZES
from perdure.training.checkpoint.reader import open_checkpoint
from perdure.training.checkpoint.verify import verify_folder
from perdure.training.run_dir import CheckpointName, RunDir

DTYPES = sorted(set(ITEM_SIZES) - {"plain"})
PATHS = ["a", "b", "c/w", "d"]
CHANGES = ["keep", "near", "new", "tie", "cast", "fill", "shape", "longer", "gone", "type", "empty"]
State = dict[str, tuple[str, tuple[int, ...], bytes]]
"""path -> dtype, shape, bytes."""


def noise(rng: np.random.Generator, dtype: str, items: int) -> bytes:
    """What such weights look like: normal numbers, or any bytes."""
    if dtype == "float32":
        return rng.normal(0, 0.02, items).astype(np.float32).tobytes()
    return rng.bytes(items * item_bytes(dtype))


def changed(state: State, path: str, how: str, rng: np.random.Generator) -> None:
    dtype, shape, raw = state.get(path, ("float32", (0,), b""))
    if how == "near" and raw:
        words = np.frombuffer(raw, np.uint8).copy()
        words[rng.integers(0, len(raw), 3)] ^= 1
        state[path] = (dtype, shape, words.tobytes())
    elif how in ("new", "type") or path not in state:
        dtype = str(rng.choice(DTYPES)) if how == "type" else dtype
        items = int(rng.choice([1, 100, 1500, 5000]))
        state[path] = (dtype, (items,), noise(rng, dtype, items))
    elif how == "tie":
        state[path] = state[str(rng.choice(sorted(state)))]
    elif how == "cast":
        masters = [other for other, (kind, _, _) in sorted(state.items()) if kind == "float32"]
        if masters:
            master = state[str(rng.choice(masters))]
            half = str(rng.choice(["bfloat16", "float16"]))
            state[path] = (half, (len(master[2]) // 4,), bytes(cast(memoryview(master[2]), half)))
    elif how == "fill":
        state[path] = (dtype, shape, raw[: item_bytes(dtype)] * (len(raw) // item_bytes(dtype)))
    elif how == "shape":
        state[path] = (dtype, (1, len(raw) // item_bytes(dtype)), raw)
    elif how == "longer":
        state[path] = (dtype, (len(raw) // item_bytes(dtype) + 7,), raw + noise(rng, dtype, 7))
    elif how == "gone":
        del state[path]
    elif how == "empty":
        state[path] = (dtype, (0, 3), b"")


def source(step: int, state: State) -> Source:
    made = Source(step).plain("model", {"step": step})
    for path, (dtype, shape, raw) in state.items():
        made.tensor(path, dtype, shape, raw)
    return made


steps = st.tuples(st.lists(st.tuples(st.sampled_from(PATHS), st.sampled_from(CHANGES)), max_size=4), st.booleans())


@settings(max_examples=60, deadline=None)
@given(st.lists(steps, min_size=1, max_size=6), st.integers(0, 1000), st.sampled_from(["auto", "small", "raw"]))
def test_every_checkpoint_of_a_history_is_the_state_it_was_written_from(
    history: list[tuple[list[tuple[str, str]], bool]], seed: int, encoding: str
) -> None:
    rng = np.random.default_rng(seed)
    state: State = {path: ("float32", (3000,), noise(rng, "float32", 3000)) for path in PATHS}
    with tempfile.TemporaryDirectory() as place:
        run, written, base = RunDir(Path(place)), {}, None
        for number, (changes, full) in enumerate([([], True), *history]):
            for path, how in changes:
                changed(state, path, how, rng)
            now = source(number + 1, state)
            found = write(run, now, base=None if full else base, encoding=encoding, threads=1 + seed % 2)
            written[found.name] = now
            base = found.name if found.base is None else base
            assert (
                found.state_digest == write(RunDir(Path(place) / "alone"), now, name=CheckpointName(number + 1, 1)).state_digest
            )
        for name, now in written.items():
            assert verify_folder(run.checkpoint(name)) == []
            with open_checkpoint(run.checkpoint(name)) as reader:
                assert {path: bytes(reader.read(path)) for path in reader.entries} == now.bytes
                assert {path: bytes(reader.read(path)) for path in now.bytes} == now.bytes
