"""Checks values of a dump, and converts them to arrays of the table."""

from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
from numpy.typing import NDArray

_NUMBERS = (pa.types.is_integer, pa.types.is_floating, pa.types.is_null)


class WrongValue(ValueError):
    """A field does not have the value that its format requires. The reader adds the position."""


def numbers(value: Any, name: str) -> pa.Array:
    """Returns a list of numbers and nulls as float64; NaN is a value. Raises WrongValue."""
    return _array(value, name).cast(pa.float64())


def integers(value: Any, name: str) -> pa.Array:
    """Returns a list of integers and nulls as int64. Raises WrongValue."""
    try:
        return _array(value, name).cast(pa.int64())
    except pa.ArrowInvalid as error:
        raise WrongValue(f"{name} has numbers that are not integers") from error


def flags(value: Any, name: str) -> NDArray[np.bool_]:
    """Returns a list of true and false, or of 1 and 0. Raises WrongValue."""
    array = _array(value, name, booleans=True)
    if array.null_count:
        raise WrongValue(f"{name} has null")
    plain = np.asarray(array)
    if not ((plain == 0) | (plain == 1)).all():
        raise WrongValue(f"{name} has values other than 0 and 1")
    return plain.astype(bool)


def _array(value: Any, name: str, booleans: bool = False) -> pa.Array:
    if not isinstance(value, list | np.ndarray | pa.Array):
        raise WrongValue(f"{name} is {_kind(value)}, not a list")
    try:
        array = value if isinstance(value, pa.Array) else pa.array(value)
    except (pa.ArrowException, OverflowError) as error:
        raise WrongValue(f"{name} has values that are not numbers") from error
    kinds = (*_NUMBERS, pa.types.is_boolean) if booleans else _NUMBERS
    if not any(of_kind(array.type) for of_kind in kinds):
        raise WrongValue(f"{name} has entries of type {array.type}, not numbers")
    return array


def unnested(value: Any) -> Any:
    """Removes a list of one entry, which a field of a batch of one has."""
    return value[0] if isinstance(value, list) and len(value) == 1 else value


def whole_number(value: Any, name: str) -> int:
    """Returns a count. Raises WrongValue."""
    number = unnested(value)
    whole = isinstance(number, float) and number.is_integer()
    if not (whole or isinstance(number, int)) or isinstance(number, bool):
        raise WrongValue(f"{name} is {_kind(value)}, not an integer")
    if not 0 <= number < 2**63:
        raise WrongValue(f"{name} is negative, or too large")
    return int(number)


def cut(array: pa.Array, length: int, name: str) -> pa.Array:
    """Returns the first entries. Raises WrongValue if there are fewer."""
    if len(array) < length:
        raise WrongValue(f"{name} has {len(array)} entries, {length} are expected")
    return array[:length]


def exactly(array: pa.Array, length: int, name: str) -> pa.Array:
    """Returns an array of this length. Raises WrongValue for another length."""
    if len(array) != length:
        raise WrongValue(f"{name} has {len(array)} entries, {length} are expected")
    return array


def response(array: pa.Array, total: int, prompt: int, name: str) -> pa.Array:
    """Returns an array for all tokens, given one for the whole sequence or for the response alone.
    Raises WrongValue for another length."""
    if len(array) == total:
        return array
    if len(array) != total - prompt:
        raise WrongValue(
            f"{name} has {len(array)} entries; {total - prompt} (the response) are expected"
        )
    return pa.concat_arrays([pa.nulls(prompt, array.type), array])


def replaced_by_null(array: pa.Array, where: NDArray[np.bool_]) -> pa.Array:
    """Returns `array` with null where the mask is true."""
    return pc.if_else(pa.array(where), pa.scalar(None, array.type), array) if where.any() else array


def _kind(value: Any) -> str:
    names = {"NoneType": "null", "str": "a text", "dict": "an object", "list": "a list"}
    return names.get(type(value).__name__, f"a {type(value).__name__}")
