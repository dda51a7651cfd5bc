"""The interface of an index for the interop tests: follow a worker's events, and list its
blocks."""

from __future__ import annotations

import abc
from collections.abc import Sequence
from typing import Any, NamedTuple

from tests.interop.truth import TIERS, Answer
from tests.interop.workload import BLOCK, Prompt

MODEL = "org/model-a"


class Source(NamedTuple):
    """A worker's rank, and where its events are published and replayed."""

    worker: int
    rank: int
    endpoint: str
    replay_endpoint: str


class Index(abc.ABC):
    """An index that follows the events of workers."""

    name: str

    @abc.abstractmethod
    def register(self, *sources: Source) -> None:
        """Follow the events of all ranks of one worker."""

    @abc.abstractmethod
    def held(self, source: Source) -> dict[str, set[int]]:
        """64-bit block hashes that it holds for a worker's rank, by tier."""

    @abc.abstractmethod
    def answers(self, source: Source, prompts: Sequence[Prompt]) -> list[Answer]:
        """Its answers about prompts."""


def held_of(dump: dict[str, Any], source: Source) -> dict[str, set[int]]:
    """Block hashes by tier of one worker's rank, from what Dynamo's indexes dump: events that would
    bring an empty one to the same state."""
    found: dict[str, set[int]] = {tier: set() for tier in TIERS}
    for events in dump.values():
        for event in events["events"]:
            if (event["worker_id"], event["event"]["dp_rank"]) == (source.worker, source.rank):
                blocks = event["event"]["data"]["stored"]["blocks"]
                found[DYNAMO_TIERS[event["storage_tier"]]].update(
                    block["block_hash"] for block in blocks
                )
    return found


DYNAMO_TIERS = {"device": "device", "host_pinned": "host", "disk": "storage", "external": "storage"}


def media_infos(prompt: Prompt) -> list[Any] | None:
    """A prompt's media as Dynamo's front end gives them: of each block, the first 16 digits of the
    identifiers as numbers."""
    if not prompt.media:
        return None
    infos = [
        [
            {"mm_hash": int(item.identifier[:16], 16), "offsets": []}
            for item in prompt.items_of(block)
        ]
        for block in range(prompt.blocks)
    ]
    return [{"mm_objects": objects} if objects else None for objects in infos]


def dynamo_request(prompt: Prompt) -> dict[str, Any]:
    """A prompt as Dynamo's indexes take it."""
    return {
        "model_name": MODEL,
        "token_ids": prompt.tokens[: prompt.blocks * BLOCK],
        "lora_name": prompt.lora,
        "cache_salt": prompt.salt,
        "block_mm_infos": media_infos(prompt),
    }
