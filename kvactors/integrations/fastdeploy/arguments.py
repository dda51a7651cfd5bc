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
        TypeError: the attribute is neither.
    """
    found: Any = getattr(request, name)
    if isinstance(found, str | Mapping) or not hasattr(found, "__getitem__"):
        raise TypeError(
            f"{name} of request {request.request_id!r} must be a list or an array, not "
            f"{type(found).__name__}"
        )
    return found


def name_of(request: Any) -> str:
    """The id of a request.

    Raises:
        TypeError: it is no string.
    """
    found = request.request_id
    if not isinstance(found, str):
        raise TypeError(f"request_id must be a string, not {found!r}")
    return found


def required_blocks(input_token_num: int, block_size: int) -> int:
    """Blocks that so many tokens take.

    Raises:
        TypeError: a number is no integer.
        ValueError: the block size is less than 1, or the number of tokens is negative.
    """
    tokens = at_least(0, "input_token_num", input_token_num)
    return -(-tokens // at_least(1, "block_size", block_size))
