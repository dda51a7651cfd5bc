"""Which keys a back end holds, for callers whose keys are of several paths."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

from kvactors.storage.backends.base import Backend


def lists_keys(store: Any) -> bool:
    """Whether `keys` returns every key of a back end. If not, `ask_each` finds them."""
    if not isinstance(store, Backend):
        return False
    return type(store).keys is not Backend.keys or store.inventory.lists_keys


async def ask_each(store: Any, keys: Sequence[bytes], expired: Callable[[], bool]) -> list[bool]:
    """Whether each key can be read. A back end may have an `ask_each` that answers for all keys at
    once. Any other is asked once for each run of keys that it holds."""
    found: list[bool] = [False] * len(keys)
    ask = getattr(store, "ask_each", None)
    if ask is not None:
        answers = [bool(one) for one in await ask(keys, expired)]
        if len(answers) != len(keys):
            raise ValueError(f"answered {len(answers)} of {len(keys)} keys")
        return answers
    start = 0
    while start < len(keys) and not expired():
        run = min(max(0, await store.ask(keys[start:], expired)), len(keys) - start)
        found[start : start + run] = [True] * run
        start += run + 1
    return found
