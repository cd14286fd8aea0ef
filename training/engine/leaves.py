"""Nested state in, one plain value and a list of tensors out, and back. What is not plain data is refused by path and type.

Containers and scalars stay in the plain value; a tensor or array is replaced by a reference to a leaf of its own."""

import math
from collections import Counter, OrderedDict, deque
from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Literal

import numpy as np
import torch

from perdure.training.checkpoint.pieces import piece_path
from perdure.training.checkpoint.plain import pack_plain, unpack_plain
from perdure.training.checkpoint.room import ALIGNMENT
from perdure.training.engine.shards import Place, is_sharded, local, place_of, with_layout
from perdure.training.errors import CheckpointDamaged, PerdureError

if TYPE_CHECKING:
    from torch.distributed.tensor import DTensor

_SCALARS = frozenset({type(None), bool, int, float, str, bytes, complex})
_MARKERS = {
    "tensor-ref": "tensor", "array-ref": "_array_ref", "array": "_array", "numpy-scalar": "_numpy_scalar",
    "torch-size": "_torch_size", "torch-dtype": "_torch_dtype", "torch-device": "_torch_device",
    "deque": "_deque", "counter": "_counter", "tuple": "_marked_tuple", "deepspeed": "_deepspeed",
}  # fmt: skip
"""First item of a tuple that stands for something else -> the Decoder's method for it."""
_MAX_DEPTH = 100
_DTYPE_NAMES = {
    value: name for name, value in vars(torch).items() if isinstance(value, torch.dtype) and str(value) == f"torch.{name}"
}
_DTYPES = {name: dtype for dtype, name in _DTYPE_NAMES.items()}
# Arrays of these become tensor leaves; any other kind without objects (strings, dates, records) travels inside the plain leaf.
_ARRAY_DTYPES = frozenset(
    np.dtype(name)
    for name in ("bool", "u1", "i1", "u2", "i2", "u4", "i4", "u8", "i8", "f2", "f4", "f8", "c8", "c16")
)  # fmt: skip


@dataclass(frozen=True, slots=True)
class Leaf:
    """One piece of the state as it is now; `value` is the live tensor, never a copy."""

    path: str
    kind: Literal["tensor", "plain"]
    value: torch.Tensor | bytes
    dtype: str
    shape: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class LoadedLeaf:
    """One piece of the state as a checkpoint holds it: bytes in C order."""

    kind: str
    dtype: str
    shape: tuple[int, ...]
    data: memoryview | bytes

    def tensor(self, path: str) -> torch.Tensor:
        """A CPU tensor of these bytes, in their memory where that can be written to and is aligned as torch's own."""
        dtype, count = _DTYPES.get(self.dtype), math.prod(self.shape)
        if self.kind != "tensor" or dtype is None:
            raise CheckpointDamaged(f"{path} is a {self.kind} leaf of type {self.dtype!r}, not a tensor", part=path)
        data = memoryview(self.data)
        if data.nbytes != count * dtype.itemsize:
            text = f"{path} holds {data.nbytes} bytes, its shape {self.shape} needs {count * dtype.itemsize}"
            raise CheckpointDamaged(text, part=path)
        if not count:
            return torch.empty(self.shape, dtype=dtype)
        if not data.readonly:
            mine = torch.frombuffer(data, dtype=dtype)
            if mine.data_ptr() % ALIGNMENT == 0:
                return mine.view(self.shape)
        result = torch.empty(self.shape, dtype=dtype)
        result.view(-1).view(torch.uint8).numpy()[:] = np.frombuffer(data, dtype=np.uint8)
        return result


Read = Callable[[str], LoadedLeaf]
"""Gives the leaf at a path, or the tensor that leaves are pieces of; raises KeyError where the checkpoint has none."""
ReadPart = Callable[[str, tuple[int, ...], Place], LoadedLeaf | None]
"""Gives the part at a place of the tensor of this shape; None where that has another; raises KeyError as `Read` does."""
ShapeOf = Callable[[str], tuple[int, ...]]
"""Gives the shape of a tensor of which only parts will be read; raises KeyError as `Read` does."""


def escape(key: str) -> str:
    """One key as a part of a leaf path."""
    return key.replace("%", "%25").replace("/", "%2F") or "%"


def dtype_name(dtype: torch.dtype) -> str:
    """`float32`, as leaves and indexes spell it."""
    return _DTYPE_NAMES[dtype]


def plain_leaf(path: str, value: Any) -> Leaf:  # Any: plain values
    data = pack_plain(value, path)
    return Leaf(path, "plain", data, "plain", (len(data),))


def read_plain(read: Read, path: str) -> Any:  # Any: plain values
    """The value of a plain leaf. Raises CheckpointDamaged where it is missing or is none."""
    try:
        leaf = read(path)
    except KeyError:
        raise CheckpointDamaged(f"the checkpoint holds no leaf {path!r}", part=path) from None
    if leaf.kind != "plain":
        raise CheckpointDamaged(f"leaf {path!r} is a {leaf.kind}, not plain data", part=path)
    return unpack_plain(leaf.data)


class Encoder:
    """Collects the tensors met while turning state into plain values; paths are unique within one tracked object."""

    def __init__(self, root: str) -> None:
        self.root = root
        self.leaves: list[Leaf] = []
        self._used: set[str] = set()

    def tensor(self, value: torch.Tensor, path: str) -> tuple[str, str]:
        """Add a leaf; what comes back stands for it in the plain value. Of a DTensor this rank's piece is the leaf."""
        if value.layout is not torch.strided or value.is_quantized or value.is_meta:
            what = f"{type(value).__name__} ({value.layout}, on {value.device})"
            raise PerdureError(
                f"{self.root}/{path} is a {what}: only dense tensors with data can be saved",
                "convert it in state_dict(), or leave it out and build it again on resume",
            )  # fmt: skip
        unique, number = path, 1
        while unique in self._used:  # keys 1 and "1" of one dict
            number += 1
            unique = f"{path}%{number}"
        self._used.add(unique)
        self._add(value, f"{self.root}/{unique}")
        return ("tensor-ref", unique)

    def _add(self, value: torch.Tensor, path: str) -> None:
        mine = local(value)
        if is_sharded(value):
            place = place_of(value, path)
            if place.shape != value.shape:
                if not mine.numel():
                    return  # other ranks have all of it
                path = piece_path(path, place.offsets)
        self.leaves.append(Leaf(path, "tensor", mine, _DTYPE_NAMES[mine.dtype], tuple(mine.shape)))

    def encode(self, value: Any, path: str, depth: int = 0) -> Any:  # Any: user state in, plain values out
        """`value` with tensors replaced by references, ready for `pack_plain`."""
        kind = type(value)
        if kind in _SCALARS:
            return value
        if isinstance(value, torch.Tensor):
            return self.tensor(value, path)
        if depth > _MAX_DEPTH:
            raise PerdureError(
                f"{self.root}/{path} is nested deeper than {_MAX_DEPTH} levels: is there a cycle in state_dict()?"
            )
        if kind is dict or kind is OrderedDict:
            return kind((key, self.encode(item, _join(path, self._key(key, path)), depth + 1)) for key, item in value.items())
        if kind is list or kind is tuple:
            items = [self.encode(item, _join(path, str(index)), depth + 1) for index, item in enumerate(value)]
            return items if kind is list else _as_tuple(items)
        return self._special(value, path, depth)

    def _special(self, value: Any, path: str, depth: int) -> Any:  # Any: as in encode
        kind = type(value)
        if kind is np.ndarray and value.dtype.kind not in "OV":
            return self._array(value, path)
        if isinstance(value, np.generic) and value.dtype.kind not in "OV":
            return ("numpy-scalar", value.dtype.str, value.tobytes())
        if kind is set or kind is frozenset:
            return kind(self.encode(item, path, depth + 1) for item in value)
        if kind is deque:
            return ("deque", self.encode(list(value), path, depth + 1), value.maxlen)
        if kind is Counter:
            return ("counter", self.encode(dict(value), path, depth + 1))
        if kind is torch.Size:
            return ("torch-size", list(value))
        if kind is torch.dtype or kind is torch.device:
            return (f"torch-{kind.__name__}", str(value).removeprefix("torch."))
        raise PerdureError(
            f"{self.root}/{path} is a {kind.__module__}.{kind.__qualname__}: only plain data can be saved",
            "let state_dict() hand out tensors, arrays, numbers, strings, and lists, tuples or dicts of them",
        )  # fmt: skip

    def _array(self, value: np.ndarray[Any, Any], path: str) -> Any:  # Any: any dtype in, plain values out
        if value.dtype not in _ARRAY_DTYPES:
            return ("array", value.dtype.str, list(value.shape), value.tobytes())
        dense = np.require(value, requirements=["C"])
        if not dense.flags.writeable:  # torch would warn
            dense = dense.copy()
        return ("array-ref", self.tensor(torch.from_numpy(dense), path)[1])

    def _key(self, key: Any, path: str) -> str:  # Any: the key of a user's dict
        if type(key) is str:
            return escape(key)
        if type(key) in _SCALARS or (type(key) is tuple and all(type(item) in _SCALARS for item in key)):
            return escape(str(key))
        raise PerdureError(f"{self.root}/{path} has a key of type {type(key).__qualname__}: only plain keys can be saved")


class Decoder:
    """The way back, for one tracked object: references are read where they stand."""

    def __init__(self, root: str, read: Read, read_part: ReadPart | None = None, shape_of: ShapeOf | None = None) -> None:
        """`read_part`: needed where live values are DTensors; both where DeepSpeed's ranks are more or fewer than before."""
        self.root = root
        self.read, self.read_part, self.shape_of = read, read_part, shape_of
        self._like: DTensor | None = None

    def decode_as(self, value: Any, like: Any) -> Any:  # Any: plain values in, user state out; a live value
        """As `decode`; where `like` is a DTensor, tensors of its shape become such, of which only this rank's piece is read."""
        self._like = like if is_sharded(like) else None
        try:
            return self.decode(value)
        finally:
            self._like = None

    def tensor(self, relative: str) -> torch.Tensor:
        path, like = f"{self.root}/{relative}", self._like
        try:
            if like is not None and self.read_part is not None:
                part = self.read_part(path, tuple(like.shape), place_of(like, path))
                if part is not None:
                    return with_layout(part.tensor(path), like)
            return self.read(path).tensor(path)
        except KeyError:
            raise CheckpointDamaged(f"{path} is named in {self.root} but is not in the checkpoint", part=path) from None

    def decode(self, value: Any) -> Any:  # Any: plain values in, user state out
        kind = type(value)
        if kind is tuple:
            return self._tuple(value)
        if kind is dict or kind is OrderedDict:
            return kind((key, self.decode(item)) for key, item in value.items())
        if kind in (list, set, frozenset):
            return kind(self.decode(item) for item in value)
        return value

    def _tuple(self, value: tuple[Any, ...]) -> Any:  # Any: as in decode
        if not value or not (type(value[0]) is str and value[0] in _MARKERS):
            return tuple(self.decode(item) for item in value)
        try:
            return getattr(self, _MARKERS[value[0]])(*value[1:])
        except (TypeError, ValueError, KeyError, RuntimeError) as error:
            raise CheckpointDamaged(f"{self.root} holds a malformed {value[0]}: {error}", part=self.root) from None

    def _array_ref(self, relative: str) -> np.ndarray[Any, Any]:
        return self.tensor(relative).numpy()

    def _array(self, dtype: str, shape: list[int], data: bytes) -> np.ndarray[Any, Any]:
        return np.frombuffer(data, dtype=np.dtype(dtype)).reshape(shape).copy()

    def _numpy_scalar(self, dtype: str, data: bytes) -> Any:  # Any: a numpy scalar
        return np.frombuffer(data, dtype=np.dtype(dtype))[0]

    def _torch_size(self, sizes: list[int]) -> torch.Size:
        return torch.Size(sizes)

    def _torch_dtype(self, name: str) -> torch.dtype:
        return _DTYPES[name]

    def _torch_device(self, name: str) -> torch.device:
        return torch.device(name)

    def _deque(self, items: list[Any], maxlen: int | None) -> deque[Any]:
        return deque(self.decode(items), maxlen)

    def _counter(self, items: dict[Any, int]) -> Counter[Any]:
        return Counter(self.decode(items))

    def _marked_tuple(self, items: list[Any]) -> tuple[Any, ...]:
        return tuple(self.decode(items))

    def _deepspeed(self, name: str, fields: Any) -> Any:  # Any: plain values in, an object out
        raise ValueError(f"a {name} outside the state of a DeepSpeed engine")


def _join(path: str, key: str) -> str:
    return f"{path}/{key}" if path else key


def _as_tuple(items: list[Any]) -> tuple[Any, ...]:
    """A user's tuple that looks like one of our markers is wrapped, so that it comes back as it was."""
    if items and type(items[0]) is str and items[0] in _MARKERS:
        return ("tuple", items)
    return tuple(items)
