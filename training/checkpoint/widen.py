"""Numbers of every dtype a checkpoint knows as float64 (complex128), without torch. Eight-bit floats go through tables."""

from collections.abc import Callable
from typing import Any

import numpy as np
import numpy.typing as npt

from perdure.training.checkpoint.layout import ITEM_SIZES

Values = npt.NDArray[Any]  # Any: float64 or complex128
Words = npt.NDArray[Any]  # Any: unsigned integers of the type's width


def _small_float(exponent_bits: int, mantissa_bits: int, bias: int, special: str) -> Values:
    """Every value of a small float. `special`: `ieee` (infinities and NaN at the largest exponent), `fn` (only all ones is
    NaN), `fnuz` (negative zero is the NaN), `none`."""
    bits = np.arange(1 << (1 + exponent_bits + mantissa_bits))
    negative = bits >> (exponent_bits + mantissa_bits) == 1
    exponent, mantissa = (bits >> mantissa_bits) % (1 << exponent_bits), bits % (1 << mantissa_bits)
    fraction = mantissa / (1 << mantissa_bits) + (exponent > 0)
    values = np.ldexp(fraction, np.maximum(exponent, 1) - bias)
    top = exponent == (1 << exponent_bits) - 1
    if special == "ieee":
        values[top] = np.where(mantissa[top] == 0, np.inf, np.nan)
    elif special == "fn":
        values[top & (mantissa == (1 << mantissa_bits) - 1)] = np.nan
    values[negative] *= -1
    if special == "fnuz":
        values[len(values) // 2] = np.nan
    return np.asarray(values)


_TABLES: dict[str, Callable[[], Values]] = {
    "float8_e4m3fn": lambda: _small_float(4, 3, 7, "fn"),
    "float8_e5m2": lambda: _small_float(5, 2, 15, "ieee"),
    "float8_e4m3fnuz": lambda: _small_float(4, 3, 8, "fnuz"),
    "float8_e5m2fnuz": lambda: _small_float(5, 2, 16, "fnuz"),
    "float8_e8m0fnu": lambda: np.append(np.ldexp(1.0, np.arange(255) - 127), np.nan),
    "float4_e2m1fn_x2": lambda: _small_float(2, 1, 1, "none"),
}
_made: dict[str, Values] = {}


def _table(dtype: str) -> Values:
    if dtype not in _made:
        _made[dtype] = _TABLES[dtype]()
    return _made[dtype]


def values_per_item(dtype: str) -> int:
    """Two numbers lie in one byte of float4_e2m1fn_x2."""
    return 2 if dtype.endswith("_x2") else 1


def is_integer(dtype: str) -> bool:
    return dtype == "bool" or dtype.startswith(("int", "uint"))


def words_of(raw: memoryview, dtype: str) -> Words:
    """The bits, one word per number, to be compared: 0.0 is not -0.0, and a NaN is itself."""
    if dtype == "float4_e2m1fn_x2":
        packed = np.frombuffer(raw, np.uint8)
        return np.stack((packed & 15, packed >> 4), axis=-1).reshape(-1)
    size = ITEM_SIZES[dtype]
    if size <= 8:
        return np.frombuffer(raw, np.dtype(f"<u{size}"))
    return np.frombuffer(raw, np.dtype("<u8")).reshape(-1, 2)  # complex128


def widened(words: Words, dtype: str) -> Values:
    """The numbers of `words_of`, exactly; integers beyond 2^53 rounded."""
    if dtype in _TABLES:
        return np.take(_table(dtype), words)
    with np.errstate(invalid="ignore"):  # a signalling NaN becomes a quiet one
        return _cast(words, dtype)


def _cast(words: Words, dtype: str) -> Values:
    if dtype == "bfloat16":
        return (words.astype(np.uint32) << np.uint32(16)).view(np.float32).astype(np.float64)
    if dtype == "complex32":
        parts = words.reshape(-1).view(np.float16).astype(np.float64)
        return parts.view(np.complex128)
    flat = np.ascontiguousarray(words).reshape(-1)
    if dtype == "bool":
        return np.asarray(flat != 0, np.float64)
    return flat.view(np.dtype(dtype)).astype(np.complex128 if dtype.startswith("complex") else np.float64)


def distance(a: Words, b: Words, dtype: str) -> Values:
    """|a - b| of numbers, as float64. Of integers exact before it is rounded; NaN where either is NaN or both are infinite."""
    if is_integer(dtype) and dtype != "bool":
        kind = np.dtype(dtype)
        x, y = a.view(kind), b.view(kind)
        return np.where(x > y, a - b, b - a).astype(np.float64)  # wraps to the true distance, whatever the signs
    with np.errstate(invalid="ignore", over="ignore"):
        return np.asarray(np.absolute(widened(a, dtype) - widened(b, dtype)))
