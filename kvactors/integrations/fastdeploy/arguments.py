"""Arguments of the engine's calls: checked, with their names in the error."""

from __future__ import annotations

import math
import operator
from collections.abc import Mapping
from typing import Any


def rounded_up(name: str, value: Any) -> int:
    """A number of blocks, which FastDeploy's thresholds make a fraction.

    Raises:
        TypeError: it is no number.
        ValueError: it is not finite.
    """
    try:
        return math.ceil(value)
    except TypeError:
        raise TypeError(f"{name} must be a number, not {value!r}") from None
    except (ValueError, OverflowError):
        raise ValueError(f"{name} must be a finite number, not {value!r}") from None


def whole(name: str, value: Any) -> int:
    """An integer of any kind, numpy's included.

    Raises:
        TypeError: it is none.
    """
    try:
        return operator.index(value)
    except TypeError:
        raise TypeError(f"{name} must be an integer, not {value!r}") from None


def at_least(least: int, name: str, value: Any) -> int:
    """An integer that is not less than `least`.

    Raises:
        TypeError: it is no integer.
        ValueError: it is less.
    """
    found = whole(name, value)
    if found < least:
        raise ValueError(f"{name} must be at least {least}, not {found}")
    return found


def sequence_of(request: Any, name: str) -> Any:
    """A list or an array of a request.

    Raises:
        TypeError: the attribute is neither, or is missing.
    """
    found: Any = _attribute(request, name)
    if isinstance(found, str | Mapping) or not hasattr(found, "__getitem__"):
        raise TypeError(
            f"{name} of request {name_of(request)!r} must be a list or an array, not "
            f"{type(found).__name__}"
        )
    return found


def name_of(request: Any) -> str:
    """The id of a request.

    Raises:
        TypeError: it is no string, or is missing.
    """
    found = _attribute(request, "request_id")
    if not isinstance(found, str):
        raise TypeError(f"request_id must be a string, not {found!r}")
    return found


def _attribute(request: Any, name: str) -> Any:
    try:
        return getattr(request, name)
    except AttributeError:
        raise TypeError(
            f"a request must have {name}, and {type(request).__name__} has not"
        ) from None


def media_of(request: Any) -> tuple[list[tuple[int, int]], list[Any]]:
    """Places (offset, length) and hashes of a request's media.

    Raises:
        TypeError: `multimodal_inputs` has another form.
    """
    inputs = getattr(request, "multimodal_inputs", None)
    if inputs is None:
        return [], []
    if not isinstance(inputs, Mapping):
        raise TypeError(f"multimodal_inputs must be a mapping, not {type(inputs).__name__}")
    positions, hashes = _items(inputs, "mm_positions"), _items(inputs, "mm_hashes")
    for one in positions:
        if not (hasattr(one, "offset") and hasattr(one, "length")):
            raise TypeError(f"mm_positions must have offset and length, not {one!r}")
    places = [
        (whole("a media offset", one.offset), whole("a media length", one.length))
        for one in positions
    ]
    return places, hashes


def _items(inputs: Mapping[str, Any], name: str) -> list[Any]:
    found = inputs.get(name)
    if found is None:
        return []
    if isinstance(found, str | bytes | Mapping) or not hasattr(found, "__iter__"):
        raise TypeError(f"{name} must be a list, not {type(found).__name__}")
    return list(found)


def required_blocks(input_token_num: int, block_size: int) -> int:
    """Blocks that so many tokens take.

    Raises:
        TypeError: a number is no integer.
        ValueError: the block size is less than 1, or the number of tokens is negative.
    """
    tokens = at_least(0, "input_token_num", input_token_num)
    return -(-tokens // at_least(1, "block_size", block_size))
