"""Leaves that need not be stored: the same bytes as another's, or the bf16 or fp16 copy of an fp32 master.

Found by samples, then compared bit for bit. NumPy rounds as torch does: to nearest even, a NaN to the quiet NaN."""

from collections.abc import Iterator, Sequence
from typing import NamedTuple, Protocol

import numpy as np
import numpy.typing as npt

from perdure.training.checkpoint.ordered import in_order
from perdure.training.checkpoint.pack import BLOB_BYTES, CASTS, Derived
from perdure.training.slots import Entry

_SMALLEST = 4096
"""Bytes of a leaf below which looking costs more than storing."""
_SAMPLES = 64
_TRIED = 4
"""Sources of the same sample that a leaf is compared with."""
_PIECE = 1 << 16
"""Elements cast at once: they and what is made of them stay in the processor's cache."""
_Bytes = npt.NDArray[np.uint8]


class Leaves(Protocol):
    """What is looked at of a snapshot."""

    @property
    def entries(self) -> Sequence[Entry]: ...
    def data(self, entry: Entry) -> memoryview: ...


class _Question(NamedTuple):
    """Is the leaf one of these, that way?"""

    leaf: Entry
    how: str
    sources: list[Entry]


def find(leaves: Leaves, threads: int) -> dict[str, Derived]:
    """The leaves that need not be stored, by path. No source is itself among them."""
    large = [entry for entry in leaves.entries if entry.kind == "tensor" and entry.nbytes >= _SMALLEST]
    if len({entry.path for entry in large}) != len(large):
        return {}  # the writer refuses such a snapshot
    found = _answers(leaves, _casts(leaves, large), threads)
    taken = {derived.source for derived in found.values()}
    found |= _answers(leaves, _twins(leaves, large, {*found, *taken}, taken), threads)
    return found


def _answers(leaves: Leaves, questions: list[_Question], threads: int) -> dict[str, Derived]:
    def answer(question: _Question) -> Entry | None:
        return next((one for one in question.sources if _is_derived(leaves, question, one)), None)

    told = in_order(answer, questions, threads=threads, nbytes=lambda question: question.leaf.nbytes) if questions else ()
    return {question.leaf.path: Derived(question.how, source.path) for question, source in told if source is not None}


def _casts(leaves: Leaves, large: list[Entry]) -> list[_Question]:
    """Halves, with the float32 leaves of as many elements that have their sample when cast."""
    halves = [entry for entry in large if entry.dtype in CASTS]
    wanted = {(entry.dtype, 2 * entry.nbytes) for entry in halves}
    masters: dict[tuple[str, int, bytes], list[Entry]] = {}
    for entry in large if halves else ():
        for dtype in CASTS if entry.dtype == "float32" else ():
            if (dtype, entry.nbytes) in wanted:
                sample = cast(_sample(leaves.data(entry), 4).data, dtype)
                masters.setdefault((dtype, entry.nbytes, bytes(sample)), []).append(entry)
    questions = []
    for entry in halves:
        mine = _sample(leaves.data(entry), 2).tobytes() if masters else b""
        sources = masters.get((entry.dtype, 2 * entry.nbytes, mine))
        if sources and not _is_constant(mine, 2):
            questions.append(_Question(entry, "cast", sources[:_TRIED]))
    return questions


def _twins(leaves: Leaves, large: list[Entry], settled: set[str], sources: set[str]) -> list[_Question]:
    """Leaves with the first one of as many bytes and the same sample. A source of others is not derived any more."""
    sizes: dict[int, int] = {}
    for entry in large:
        sizes[entry.nbytes] = sizes.get(entry.nbytes, 0) + 1
    first: dict[tuple[int, bytes], Entry] = {}
    questions = []
    for entry in large:
        if sizes[entry.nbytes] < 2 or (entry.path in settled and entry.path not in sources):
            continue
        sample = _sample(leaves.data(entry), 4 if entry.nbytes % 4 == 0 else 1).tobytes()
        known = first.setdefault((entry.nbytes, sample), entry)
        if known is not entry and entry.path not in settled and not _is_constant(sample, 4):
            questions.append(_Question(entry, "same", [known]))
    return questions


def _sample(raw: memoryview, width: int) -> _Bytes:
    """Some elements from all over; the same places in leaves of as many elements."""
    items = np.frombuffer(raw, np.dtype(f"<u{width}"))
    return np.ascontiguousarray(items[np.arange(_SAMPLES) * (len(items) - 1) // (_SAMPLES - 1)]).view(np.uint8)


def _is_constant(sample: bytes, width: int) -> bool:
    """One value over and over: the codec stores that as next to nothing."""
    return sample == sample[:width] * (len(sample) // width)


def _is_derived(leaves: Leaves, question: _Question, source: Entry) -> bool:
    mine, theirs = leaves.data(question.leaf), leaves.data(source)
    if question.how == "same":
        return equal(mine, theirs)
    kind, starts = question.leaf.dtype, range(0, len(mine), 2 * _PIECE)
    made = ((cast(theirs[2 * at : 2 * at + 4 * _PIECE], kind), mine[at : at + 2 * _PIECE]) for at in starts)
    return all(np.array_equal(np.frombuffer(a, "<u2"), np.frombuffer(b, "<u2")) for a, b in made)


def equal(mine: memoryview, theirs: memoryview) -> bool:
    """Whether as many bytes are the same."""
    return all(np.array_equal(a, b) for a, b in zip(_pieces(mine), _pieces(theirs), strict=True))


def _pieces(raw: memoryview) -> Iterator[npt.NDArray[np.unsignedinteger]]:
    kind = np.dtype("<u8" if len(raw) % 8 == 0 else "u1")
    for start in range(0, len(raw), BLOB_BYTES // 8):
        yield np.frombuffer(raw[start : start + BLOB_BYTES // 8], kind)


def cast(raw: memoryview, dtype: str) -> memoryview:
    """float32 bytes as bytes of `bfloat16` or `float16`."""
    words = np.frombuffer(raw, "<u4")
    out = np.empty(len(words), "<u2")
    rounded = _to_bfloat16 if dtype == "bfloat16" else _to_float16
    for start in range(0, len(words), _PIECE):
        rounded(words[start : start + _PIECE], out[start : start + _PIECE])
    return out.view(np.uint8).data


def _to_bfloat16(words: npt.NDArray[np.uint32], out: npt.NDArray[np.uint16]) -> None:
    bias = words >> np.uint32(16)
    bias &= np.uint32(1)
    bias += np.uint32(0x7FFF)
    bias += words  # wraps for some NaNs only, which are set below
    out[:] = bias.view("<u2")[1::2]
    magnitude = np.bitwise_and(words, np.uint32(0x7FFFFFFF), out=bias)
    if magnitude.max(initial=0) > 0x7F800000:
        out[magnitude > 0x7F800000] = 0x7FC0


def _to_float16(words: npt.NDArray[np.uint32], out: npt.NDArray[np.uint16]) -> None:
    floats = words.view("<f4")
    with np.errstate(over="ignore", invalid="ignore"):
        out[:] = floats.astype("<f2").view("<u2")
    nan = np.isnan(floats)
    if nan.any():
        out[nan] = (words[nan] >> np.uint32(16)).astype(np.uint16) & np.uint16(0x8000) | np.uint16(0x7E00)
