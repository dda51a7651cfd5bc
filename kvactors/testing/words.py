"""Short texts of messages: counts in place of byte strings, the first digits of keys. Identical in
every run."""

from __future__ import annotations

from collections.abc import Callable
from enum import Enum
from typing import Any

import msgspec

from kvactors.actor import Message
from kvactors.flush_notifier.messages import PLAIN, RequestScope
from kvactors.native import Path
from kvactors.types import HASH_BYTES

KEYS = frozenset(
    {"hashes", "keys", "parents", "root", "parent", "stored", "evicted", "corrupt", "taken"}
)
"""Fields whose bytes are names of blocks."""

MEASURED = frozenset({"seconds"})
"""Fields that are measured on a real clock, and differ from run to run."""


def describe(message: Any) -> str:
    """A message, or any value that answers an ask, on one line: its type and its fields."""
    if not isinstance(message, Message):
        return value_of(message)
    return f"{type(message).__name__}({fields_of(message)})"


def fields_of(message: Message) -> str:
    """A message's fields, `name=value` with blanks between."""
    shown = []
    for name in message.__struct_fields__:
        value = getattr(message, name)
        if (
            name in MEASURED
            or value is None
            or value == PLAIN
            or (name in ("memory_generation", "media") and not value)
        ):
            continue
        words = (
            name_of_blocks(value) if name in KEYS and isinstance(value, bytes) else value_of(value)
        )
        shown.append(words if isinstance(value, Message) else f"{name}={words}")
    return " ".join(shown)


def name_of_blocks(keys: bytes) -> str:
    """Names of blocks: how many, and the first one's first digits."""
    count = len(keys) // HASH_BYTES
    return f"{count}:{keys[:4].hex()}" if count else "0"


def value_of(value: Any) -> str:
    """Any other value as text. A value of an unlisted type is shown by its type alone, since a repr
    may hold an address."""
    for kind, words in WORDS:
        if isinstance(value, kind):
            return words(value)
    return f"<{type(value).__name__}>"


def _buffer(value: bytes | bytearray | memoryview) -> str:
    is_table = isinstance(value, memoryview) and value.format == "i"  # a table of blocks
    return _numbers(list(value)) if is_table else f"{len(value)}B"


def _numbers(values: tuple[Any, ...] | list[Any]) -> str:
    if len(values) <= 4:
        return "[" + ",".join(value_of(one) for one in values) + "]"
    return f"[{value_of(values[0])},..{len(values)}]"


WORDS: tuple[tuple[type | tuple[type, ...], Callable[[Any], str]], ...] = (
    (bool, str),
    (Enum, lambda value: str(value.name).lower()),
    (int, str),
    (float, lambda value: f"{value:.4f}"),
    (str, lambda value: value if value.isidentifier() else repr(value)),
    ((bytes, bytearray, memoryview), _buffer),
    (Path, lambda value: f"{value.num_tokens} tokens"),
    (RequestScope, lambda value: f"{value.lora}/{value.salt}"),
    ((tuple, list), _numbers),
    (Message, describe),
    (BaseException, lambda value: f"{type(value).__name__}: {value}"),
    (msgspec.Struct, lambda value: type(value).__name__),
    (type(None), str),
)
