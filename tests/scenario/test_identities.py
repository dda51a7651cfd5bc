"""The readers that tell blocks apart by their events, and conversations that differ in one part of
their identity alone."""

from __future__ import annotations

import msgspec
import pytest

from kvactors.scenario.runner import run_scenario
from kvactors.scenario.spec import Workload
from kvactors.scenario.workload import Speaker
from tests.support.kv_events import MapEvents
from tests.support.mirror import Mirror

pytestmark = pytest.mark.full


def stored(number, parent=None, token=1, **fields):
    event = {
        "type": "BlockStored",
        "block_hashes": [number],
        "parent_block_hash": parent,
        "token_ids": [token],
        "block_size": 1,
        "lora_id": None,
        "medium": "GPU",
        "lora_name": None,
    }
    return event | fields


def mirror(*events):
    made = Mirror()
    made.apply(msgspec.convert(list(events), MapEvents))
    return made


def salt(value, **fields):
    return {"cache_salt": value, **fields}


def media(number):
    return {
        "extra_keys": [[[str(number), 0]]],
        "block_mm_infos": [{"mm_objects": [{"mm_hash": number, "offsets": []}]}],
    }


@pytest.mark.parametrize(
    ("one", "other", "ambiguous"),
    [
        ({}, {"token": 2}, 0),
        ({}, {}, 2),  # to each of the two kinds of readers
        ({"lora_name": "sql", "extra_keys": [["sql"]]}, {}, 0),
        ({"lora_name": "sql"}, {}, 1),
        (salt("a", extra_keys=[["a"]]), salt("b", extra_keys=[["b"]]), 0),
        (salt("a"), salt("b"), 1),
        ({"extra_keys": [["a"]]}, {"extra_keys": [["b"]]}, 1),
        (media(1), media(2), 0),
        (media(1), media(1), 2),
        (media(1), {}, 0),
    ],
)
def test_two_blocks_with_equal_identities_are_one(one, other, ambiguous):
    assert mirror(stored(1, **one), stored(2, **other)).ambiguous() == ambiguous


def test_blocks_that_are_nowhere_are_not_counted():
    made = mirror(
        stored(1), stored(2), {"type": "BlockRemoved", "block_hashes": [2], "medium": "GPU"}
    )
    assert made.ambiguous() == 0
    made.apply(msgspec.convert([{"type": "AllBlocksCleared"}, stored(1, token=9)], MapEvents))
    assert made.ambiguous() == 0, "it begins anew"


def test_conversations_with_one_text_differ_in_one_part_each():
    work = Workload(sessions=12, tenants=2, adapters=2, images=3, image_tokens=1)
    speakers = [Speaker.of(session, work) for session in range(12)]
    assert len(set(speakers)) == 12
    assert {speaker.text for speaker in speakers} == {0}
    identities = {(*speaker.scope.items(), speaker.image_of(0)) for speaker in speakers}
    assert len(identities) == 12
    assert speakers[0].scope == {}
    assert len({speaker.image_of(turn) for speaker in speakers for turn in range(3)}) == 9


def test_a_script_gives_each_request_its_identity():
    acquire = {"do": "acquire", "prompt": 1, "tokens": 17}
    steps = []
    scopes = [
        {},
        {"salt": "a"},
        {"lora": "sql"},
        {"media": [{"offset": 4, "length": 3, "hash": "cat"}]},
    ]
    for number, scope in enumerate([*scopes, *scopes]):
        cached = 16 if number >= len(scopes) else 4 if "media" in scope else 0
        steps += [
            {**acquire, "request": f"{number}", "cached_tokens": cached, **scope},
            {"do": "commit", "request": f"{number}"},
            {"do": "finish", "request": f"{number}"},
        ]
    data = {
        "scenario": {"name": "identities"},
        "cache": {"block_size": 4},
        "device": {"num_blocks": 64},
        "layout": {"num_layers": 1, "num_kv_heads": 1, "head_dim": 8},
        "workload": {"kind": "script", "step": steps},
    }
    assert run_scenario(data, virtual=True)[1].errors == []
