"""`announce = "full"`: the finish of a request sends its full path from block 0, as FastDeploy
does, regardless of earlier tasks."""

from __future__ import annotations

import pytest
from msgspec.structs import replace

import kvactors
from kvactors.flush_notifier.ledger import Ledger
from kvactors.settings import Config
from kvactors.settings.sinks import AttentionStoreSinkConfig
from kvactors.types import Residency
from tests.flush_notifier.helpers import (
    BLOCK,
    PER_TIER,
    ROOT,
    announced,
    delivered,
    do,
    finished,
    path,
    take,
)
from tests.support import attentionstore_sdk as stand_in

VIEW = PER_TIER._replace(node=True, at_finish=True)


@pytest.fixture(autouse=True)
def fresh_services():
    stand_in.reset()


def sent(ledger: Ledger, sink: int) -> list[tuple[Residency, int, int, bytes]]:
    """The tasks that a sink is sent now: residency, first block, count and path of each."""
    batch = take(ledger, sink, 10_000, 1)
    delivered(ledger, sink, batch)
    return [(task.residency, task.start_block_idx, task.count, task.tokens) for task in batch.tasks]


def book() -> Ledger:
    return Ledger(BLOCK, [VIEW._replace(announces_full=True), VIEW], 100, token_root=ROOT)


def test_every_finish_sends_the_whole_path_from_block_0():
    ledger, whole = book(), (Residency.RESIDENT, 0, 3, path(1, 2, 3)[0])
    do(ledger.announce(announced(1, 2, 3)))
    assert (sent(ledger, 0), sent(ledger, 1)) == ([], []), "not before the finish"
    do(ledger.announce(finished(1, 2, 3)))
    assert (sent(ledger, 0), sent(ledger, 1)) == ([whole], [whole])
    do(ledger.announce(finished(1, 2, 3)))
    assert (sent(ledger, 0), sent(ledger, 1)) == ([whole], [])
    do(ledger.announce(finished(1, 2, 9)))
    assert sent(ledger, 0) == [(Residency.RESIDENT, 0, 3, path(1, 2, 9)[0])]
    assert sent(ledger, 1) == [(Residency.RESIDENT, 2, 1, path(1, 2, 9)[0])]
    assert (sent(ledger, 0), sent(ledger, 1)) == ([], [])
    ledger.check()


# -- a whole cache


def config(announce: str) -> Config:
    made = Config.from_mapping(
        {
            "cache": {"model": "m", "block_size": 4},
            "device": {"num_blocks": 24},
            "host": {"slots": 8, "transit_slots": 8},
            "layout": {"num_layers": 1, "num_kv_heads": 1, "head_dim": 2},
            "attention_store": {"sdk": "tests.support.attentionstore_sdk"},
            "flush": {"mode": "flush_only", "sinks": [{"kind": "attention_store"}]},
        }
    )
    return replace(
        made, flush=replace(made.flush, sinks=(AttentionStoreSinkConfig(announce=announce),))
    )


async def serve(cache, prompt, *, preempt: bool = False) -> None:
    lease = await cache.acquire("r", prompt)
    await lease.wait_ready()
    await lease.commit(len(prompt))
    await (lease.preempt(len(prompt)) if preempt else lease.finish())
    await cache.wait_flushed(20.0)


@pytest.mark.parametrize(("announce", "held"), [("full", 4), ("difference", 0)])
@pytest.mark.parametrize("preempt", [False, True])
async def test_an_index_that_lost_its_state_is_sent_finished_paths_again(announce, held, preempt):
    async with kvactors.open(config(announce)) as cache:
        prompt = list(range(17))
        await serve(cache, prompt)
        index = stand_in.service().resident
        assert len(index) == 4
        index.clear()
        await serve(cache, prompt, preempt=preempt)
        assert len(index) == held
        assert (cache.count_divergent_blocks(), cache.check()) == (0, [])


def test_fastdeploys_variables_mean_the_full_path():
    base = {
        "cache": {"model": "m"},
        "storage": {"backend": "attention_store", "write_policy": "write_through"},
    }
    (sink,) = Config.from_env({"FD_AS_ONLY_FLUSH": "1"}, Config.from_mapping(base)).flush.sinks
    assert sink == AttentionStoreSinkConfig(announce="full")
    mine = {**base, "flush": {"sinks": [{"kind": "attention_store", "announce": "difference"}]}}
    (sink,) = Config.from_env({"FD_AS_ONLY_FLUSH": "1"}, Config.from_mapping(mine)).flush.sinks
    assert sink.announce == "difference"


async def test_a_journal_gets_no_second_line_for_a_recorded_block(tmp_path):
    journal = tmp_path / "sent.jsonl"
    base = config("full")
    base = replace(
        base,
        flush=replace(
            base.flush, sinks=(AttentionStoreSinkConfig(announce="full", journal=str(journal)),)
        ),
    )
    async with kvactors.open(base) as cache:
        await serve(cache, list(range(17)))
        size = journal.stat().st_size
        for _ in range(5):
            await serve(cache, list(range(17)))
        assert journal.stat().st_size == size
        await serve(cache, list(range(21)))
        assert journal.stat().st_size > size
    stand_in.restart_process()
    async with kvactors.open(base) as cache:
        await cache.wait_flushed(20.0)
        assert not stand_in.service().resident, "taken back"
