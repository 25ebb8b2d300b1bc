"""The dtypes of tensors: their names in safetensors files, and their precision."""

DTYPES = {"float64": 53, "float32": 24, "float16": 11, "bfloat16": 8}
"""The significant bits of each floating-point dtype that engines compute in, by torch's names."""

SAFETENSORS_DTYPES = {
    **{"F64": "float64", "F32": "float32", "F16": "float16", "BF16": "bfloat16"},
    **{"F8_E4M3": "float8_e4m3fn", "F8_E5M2": "float8_e5m2", "BOOL": "bool", "U8": "uint8"},
    **{"I64": "int64", "I32": "int32", "I16": "int16", "I8": "int8"},
}
"""The name of a dtype in safetensors -> torch's name."""


def lower_precision(a: str, b: str) -> str:
    """The dtype with fewer significant bits."""
    return min(a, b, key=lambda dtype: DTYPES.get(dtype, 0))
