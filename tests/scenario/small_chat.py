"""The trace scenarios/traces/small_chat.jsonl: 40 conversations of some turns behind three system prompts.

A request has the blocks of its whole conversation so far, and each turn adds two to eight blocks.
The gaps between the turns of a conversation are long enough that other conversations come between.
"""

from __future__ import annotations

import json
import random
from pathlib import Path

CONVERSATIONS = 40
SYSTEM_BLOCKS = (12, 20, 6)
TOKENS = 16
"""Tokens a block, for the lengths only."""


def requests(seed: int = 15) -> list[dict[str, object]]:
    """The requests in the order of arrival, with timestamps in ms."""
    rng = random.Random(seed)
    found = []
    for conversation in range(CONVERSATIONS):
        system = rng.choice(range(len(SYSTEM_BLOCKS)))
        first = 1_000_000 * (conversation + 1)
        runs = [[1000 * (system + 1), SYSTEM_BLOCKS[system]]]
        at, own = rng.randrange(0, 60_000), 0
        for _ in range(rng.randrange(3, 10)):
            own += rng.randrange(2, 9)
            blocks = SYSTEM_BLOCKS[system] + own
            found.append(
                {
                    "timestamp": at,
                    "input_length": blocks * TOKENS,
                    "output_length": rng.randrange(16, 128),
                    "hash_runs": [*runs, [first, own]],
                }
            )
            at += rng.randrange(2_000, 20_000)
    return sorted(found, key=lambda one: int(str(one["timestamp"])))


def text() -> str:
    """The file's text."""
    return "".join(json.dumps(one, separators=(",", ":")) + "\n" for one in requests())


FILE = Path(__file__).parents[2] / "scenarios" / "traces" / "small_chat.jsonl"

if __name__ == "__main__":
    FILE.write_text(text(), "utf-8")
