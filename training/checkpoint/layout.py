"""How the bytes of a blob may be laid out, and the element types of the format. No NumPy: a pull decodes nothing."""

WHOLE, PLANES, ROTATED, EXPONENT, FILL, DELTA = range(6)
"""Transforms: the bytes as they are; a plane a byte; the same of words rotated left by a bit (format 1 only); exponent, top
mantissa and sign, rest; one element, repeated; a plane a byte of the zigzag difference from the base's words."""
RAW, ZSTD, CONSTANT = 0, 1, 2
"""How a plane is stored."""
FLOATS = {
    "float16": 2,
    "bfloat16": 2,
    "float32": 4,
    "float64": 8,
    "complex32": 2,  # each of its two parts
    "complex64": 4,
    "complex128": 8,
}
INTEGERS = {"int16": 2, "uint16": 2, "int32": 4, "uint32": 4, "int64": 8, "uint64": 8}
ITEM_SIZES = {
    **FLOATS,
    **INTEGERS,
    **dict.fromkeys(("bool", "int8", "uint8", "float8_e4m3fn", "float8_e5m2", "float8_e4m3fnuz", "float8_e5m2fnuz"), 1),
    **dict.fromkeys(("float8_e8m0fnu", "float4_e2m1fn_x2"), 1),
    "complex32": 4,
    "complex64": 8,
    "complex128": 16,
    "plain": 1,
}
"""Bytes of one element of every dtype the format knows."""
Plane = tuple[int, int]
"""(how it is stored, stored bytes), from the most significant byte down."""
Layout = tuple[int, tuple[Plane, ...]]
