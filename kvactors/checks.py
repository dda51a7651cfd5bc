"""Checks of public arguments. A wrong argument raises TypeError or ValueError in the caller, with
the argument's name."""

from __future__ import annotations

from collections.abc import Collection, Sequence
from typing import Any

import numpy as np
from numpy import ndarray

from kvactors.identity import PLAIN, RequestScope, block_extras
from kvactors.native import Path

MAX_SECONDS = 1e9
"""The longest deadline: larger values overflow `threading` and `asyncio` timers."""

MAX_TEXT = 65_536
"""Bytes of a salt, an adapter's name, a namespace, a request id or a media hash."""

MAX_HASH_BITS = 8_192
"""Bits of a media hash that is a number."""

Media = tuple[int, int, bytes | str | int]
"""A media item in a prompt: offset and length in tokens, and the hash of its content."""


def kind(value: object) -> str:
    """The type of a value, for an error message."""
    return type(value).__name__


def check_int(name: str, value: Any, low: int = 0, high: int = 2**63 - 1) -> int:
    """A Python or numpy integer in [low, high], as int. TypeError for bool, float, str, None and
    arrays, ValueError out of range."""
    if type(value) is not int:
        if isinstance(value, bool) or not isinstance(value, (int, np.integer)):
            raise TypeError(f"{name} must be an int, not {kind(value)}")
        value = int(value)
    number: int = value
    if not low <= number <= high:
        shown = number if abs(number) < 2**64 else "a number of more than 64 bits"
        raise ValueError(f"{name} must be between {low} and {high}, not {shown}")
    return number


def check_seconds(name: str, value: Any) -> float:
    """A positive, finite number of seconds, at most MAX_SECONDS. TypeError for a value that is no
    number, ValueError out of range."""
    if isinstance(value, (bool, np.bool_)) or not isinstance(
        value, (int, float, np.integer, np.floating)
    ):
        raise TypeError(f"{name} must be a number of seconds, not {kind(value)}")
    if not 0 < value <= MAX_SECONDS:
        raise ValueError(
            f"{name} must be a positive, finite number of seconds (at most {MAX_SECONDS:.0f}), not "
            f"{value!r:.40}"
        )
    return float(value)


def check_flag(name: str, value: Any) -> bool:
    """A bool. TypeError for everything else, 0 and 1 included."""
    if value is True or value is False:
        return value
    if isinstance(value, np.bool_):
        return bool(value)
    raise TypeError(f"{name} must be a bool, not {kind(value)}")


def check_text(name: str, value: Any) -> str:
    """A str that UTF-8 can encode, at most MAX_TEXT bytes of it. The empty string is a value like
    any other."""
    if not isinstance(value, str):
        raise TypeError(f"{name} must be a str, not {kind(value)}")
    if value.isascii():
        size = len(value)
    else:
        try:
            size = len(value.encode())
        except UnicodeEncodeError:
            raise ValueError(f"{name} has a surrogate that UTF-8 cannot encode") from None
    if size > MAX_TEXT:
        raise ValueError(f"{name} has {size} bytes, at most {MAX_TEXT} are allowed")
    return value


def check_optional_text(name: str, value: Any) -> str | None:
    """As `check_text`, or None."""
    return None if value is None else check_text(name, value)


def check_names(name: str, value: Any) -> tuple[str, ...] | None:
    """A collection of strings (not a str), or None."""
    if value is None:
        return None
    if isinstance(value, (str, bytes)) or not isinstance(value, Collection):
        raise TypeError(f"{name} must be a collection of names, not {kind(value)}")
    return tuple(check_text(f"{name}[{position}]", one) for position, one in enumerate(value))


def extend_path(path: Path, name: str, tokens: Any) -> None:
    """Append a copy of `tokens` to a path. TypeError or ValueError for values that are not
    token ids. On an error nothing is appended."""
    if tokens is None or isinstance(tokens, (str, bytes, bytearray)):
        raise TypeError(
            f"{name} must be a list, a tuple or a buffer of integers, not {kind(tokens)}"
        )
    try:
        path.extend(tokens)
    except (TypeError, ValueError) as error:
        raise type(error)(f"{name}: {error}") from error


def check_media(extra_keys: Any, num_tokens: int) -> tuple[Media, ...]:
    """Media items as (offset, length, hash) in ascending order within the prompt. TypeError,
    ValueError."""
    if isinstance(extra_keys, (str, bytes, bytearray)) or not isinstance(extra_keys, Sequence):
        raise TypeError(
            f"extra_keys must be a list or tuple of (offset, length, hash), not {kind(extra_keys)}"
        )
    return tuple(
        _media_item(f"extra_keys[{position}]", item, num_tokens)
        for position, item in enumerate(extra_keys)
    )


def _media_item(name: str, item: Any, num_tokens: int) -> Media:
    if not isinstance(item, (tuple, list)):
        raise TypeError(f"{name} must be a tuple (offset, length, hash), not {kind(item)}")
    if len(item) != 3:
        raise ValueError(f"{name} must be (offset, length, hash), not {len(item)} values")
    offset, length, digest = item
    offset, length = check_int(f"{name} offset", offset), check_int(f"{name} length", length, 1)
    if offset + length > num_tokens:
        raise ValueError(
            f"{name} is a media item that ends at {offset + length}, beyond the prompt's "
            f"{num_tokens} tokens"
        )
    if isinstance(digest, np.integer):
        digest = int(digest)
    if isinstance(digest, bool) or not isinstance(digest, (bytes, str, int)):
        raise TypeError(f"{name} hash must be bytes, str or int, not {kind(digest)}")
    if isinstance(digest, int):
        if digest.bit_length() > MAX_HASH_BITS:
            raise ValueError(
                f"{name} hash has {digest.bit_length()} bits, at most {MAX_HASH_BITS} are allowed"
            )
    elif isinstance(digest, str):
        check_text(f"{name} hash", digest)
    elif len(digest) > MAX_TEXT:
        raise ValueError(f"{name} hash has {len(digest)} bytes, at most {MAX_TEXT} are allowed")
    return offset, length, digest


def request_path(
    block_size: int, root: bytes, tokens: Any, extra_keys: Any
) -> tuple[Path, tuple[tuple[int, int], ...]]:
    """A prompt as a path, and the (offset, length) of its media items. TypeError or ValueError for
    bad tokens or media."""
    path = Path(block_size, root)
    if type(tokens) is ndarray:
        path.extend(tokens)
    else:
        extend_path(path, "tokens", tokens)
    if not path.num_tokens:
        raise ValueError("tokens is empty: a request needs at least one token")
    if isinstance(extra_keys, tuple) and not extra_keys:
        return path, ()
    items = check_media(extra_keys, path.num_tokens)
    positions = tuple((offset, length) for offset, length, _ in items)
    blocks = -(-path.num_tokens // block_size)  # with the last one, which `extend` may fill
    extras = block_extras(
        blocks, block_size, positions, [digest for _, _, digest in items], path.num_tokens
    )
    for block, extra in extras.items():
        path.set_extra(block, extra)
    return path, positions


def added_media(
    block_size: int, position: int, num_added: int, extra_keys: Any
) -> tuple[tuple[tuple[int, bytes], ...], tuple[tuple[int, int], ...]]:
    """Media items among tokens that are appended to a request.

    Args:
        position: tokens of the request before the appended ones.
        num_added: appended tokens.
        extra_keys: media items with offsets from the first appended token.

    Returns:
        (block, extra key) of the blocks that the items overlap, and (offset, length) of the items
        in the request.

    Raises:
        TypeError, ValueError: bad media.
    """
    if isinstance(extra_keys, tuple) and not extra_keys:  # as nearly always
        return (), ()
    items = check_media(extra_keys, num_added)
    digests = [digest for _, _, digest in items]
    block_extras(0, block_size, [item[:2] for item in items], digests, num_added)  # checks
    positions = tuple((position + offset, length) for offset, length, _ in items)
    blocks = -(-(position + num_added) // block_size)
    return tuple(block_extras(blocks, block_size, positions, digests).items()), positions


def request_scope(salt: Any, lora: Any, lora_id: Any = None) -> RequestScope:
    """The scope of a request. TypeError or ValueError for bad names."""
    if salt is None and lora is None and lora_id is None:
        return PLAIN
    scope = RequestScope(check_optional_text("lora", lora), check_optional_text("salt", salt))
    if lora_id is None:
        return scope
    if lora is None:
        raise ValueError("lora_id is the number of an adapter: give its name as lora as well")
    return scope._replace(lora_id=check_int("lora_id", lora_id))
