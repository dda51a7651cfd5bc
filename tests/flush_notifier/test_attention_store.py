"""AttentionStore's sink against the stand-in of its SDK: the calls, and that its index equals the
tiers after every history."""

from __future__ import annotations

import asyncio
import sys

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from msgspec.structs import replace

import kvactors
from kvactors.attention_sdk import Sdk, complete, sdk_settings
from kvactors.errors import DeadlineExceeded, SdkError, SinkError
from kvactors.flush_notifier.messages import BlocksRemoved
from kvactors.flush_notifier.sinks.attention_store import AttentionStoreSink
from kvactors.layout import GQALayout
from kvactors.settings import Config
from kvactors.settings.sinks import AttentionStoreConfig, AttentionStoreSinkConfig
from kvactors.types import Reason, Tier
from tests.flush_notifier.helpers import BLOCK, Wired, announced, finished, names, path, path_tokens
from tests.support import attentionstore_sdk as stand_in
from tests.support.announced import announceable
from tests.support.attentionstore_sdk.api.common.common_pb2 import MEDIA_HBM
from tests.support.attentionstore_sdk.client.client import AttentionType

LAYOUT = GQALayout(3, 2, 8, BLOCK)
STAND_IN = "tests.support.attentionstore_sdk"
TIERS = {"tiers": ("device", "host")}


@pytest.fixture(autouse=True)
def fresh_services():
    stand_in.reset()


def store(**changes) -> AttentionStoreConfig:
    return AttentionStoreConfig(
        **{"sdk": STAND_IN, "ready_interval_s": 0.01, "ready_timeout_s": 20.0, **changes}
    )


def handle(**changes) -> Sdk:
    return Sdk(complete(store(**changes), LAYOUT), "index")


def sink(journal="", **changes) -> AttentionStoreSink:
    return AttentionStoreSink(
        AttentionStoreSinkConfig(journal=str(journal)), complete(store(**changes), LAYOUT)
    )


def index() -> set[tuple[int, ...]]:
    return stand_in.service().resident


def paths(*branch: int) -> set[tuple[int, ...]]:
    """The token paths of every block of a path of `flush_kit`."""
    return {
        tuple(step for one in branch[: i + 1] for step in (one, one)) for i in range(len(branch))
    }


def calls(name: str):
    return [call.arguments for call in stand_in.service().calls if call.name == name]


class Running(Wired):
    """A notifier whose sinks are opened and closed."""

    def running(self):
        from contextlib import asynccontextmanager

        @asynccontextmanager
        async def opened():
            for one in self.sinks:
                await one.open()
            async with super(Running, self).running() as it:
                yield it
            for one in self.sinks:
                await one.close()

        return opened()


# -- the calls


async def test_arguments_of_the_constructor_elsewhere():
    await handle(shard_id=1, shard_num=2, device_id=3, dp_id=4).open()
    (arguments, keywords) = (
        stand_in.service("default_ns", "default_pod_mixed_4", "v0", 1).calls[0].arguments
    )
    nbytes = 2 * BLOCK * 8 * 2
    assert arguments == ("default_ns", "default_pod_mixed_4", "v0", 1, 2, 3, BLOCK, nbytes, 3, 4)
    assert keywords == {}


async def test_arguments_of_the_constructor_on_cuda():
    await handle(platform="cuda", layer_num=5, bytes_per_shard_layer_per_block=77).open()
    (arguments, keywords) = stand_in.service().calls[0].arguments
    assert arguments == ("default_ns", "default_pod_mixed_0", "v0", 0, 1, 5, BLOCK, 77, 77, 0, 0)
    assert keywords == {
        "attention_type": AttentionType.MHA,
        "enable_as_kv_rw": True,
        "gpu_count": 0,
    }


async def test_names_from_the_environment():
    environ = {"AS_NAMESPACE": "ns", "AS_POD_NAME": "test_pod", "AS_MODEL_VERSION": "v9"}
    settings = {"splitwise_role": "prefill", "dp_id": 1, "sdk": STAND_IN}
    sinks = [{"kind": "attention_store"}]
    base = Config.from_mapping(
        {"cache": {"model": "m"}, "attention_store": settings, "flush": {"sinks": sinks}}
    )
    await Sdk(sdk_settings(Config.from_env(environ, base), LAYOUT), "index").open()
    await Sdk(
        sdk_settings(Config.from_env({**environ, "ENABLE_EP_DP_IN_FD": "0"}, base), LAYOUT), "index"
    ).open()
    assert list(stand_in.services) == [
        ("ns", "test_pod_prefill_1", "v9", 0),
        ("ns", "test_pod", "v9", 0),
    ]


async def test_a_missing_sdk_is_named_at_start_and_nothing_is_half_started(monkeypatch):
    for name in [name for name in sys.modules if name.split(".")[0] == "attentionstore_sdk"]:
        monkeypatch.delitem(sys.modules, name)  # a simulation has installed the stand-in
    sinks = [{"kind": "memory"}, {"kind": "attention_store"}]
    config = Config.from_mapping({"cache": {"model": "m"}, "flush": {"sinks": sinks}})
    with pytest.raises(SinkError, match="'attentionstore_sdk', which cannot be imported"):
        async with kvactors.open(config):
            pass
    assert len(asyncio.all_tasks()) == 1


@pytest.mark.parametrize(("not_ready", "probes"), [(0, 1), (2, 3)])
async def test_it_waits_until_the_other_side_is_ready(not_ready, probes):
    stand_in.service().not_ready = not_ready
    await sink().open()
    asked = calls("match")
    assert len(asked) == probes
    assert (asked[0][0].ids, asked[0][1]) == (list(range(BLOCK + 1)), 0)


async def test_opening_does_not_wait_without_end():
    stand_in.service().not_ready = 10**9
    with pytest.raises(DeadlineExceeded, match=r"not ready in 0\.1 s"):
        await sink(ready_timeout_s=0.1).open()


async def test_any_other_error_at_start_is_raised_at_once():
    stand_in.service().broken = "no licence"
    with pytest.raises(SdkError, match="no licence"):
        await sink().open()
    assert len(calls("init")) == 1


async def test_a_finished_request_is_resident_from_block_0_and_an_evicted_tail_gone_from_depth_minus_one():
    wired = Running(sink())
    async with wired.running():
        await wired.tell(announced(1, 2, 3))
        await wired.settle()
        assert calls("flush_token_index") == [], "not before the request finishes"
        await wired.tell(finished(1, 2, 3))
        await wired.settle()
        await wired.tell(BlocksRemoved(names(1, 2, 3)[2], Tier.DEVICE, Reason.CPU_EVICTION))
        await wired.settle()
        came, went = calls("flush_token_index")
        assert (came[0], came[1].ids, *came[2:]) == (
            [0, 1, 2],
            [1, 1, 2, 2, 3, 3],
            0,
            None,
            MEDIA_HBM,
        )
        assert (went[0], went[1].ids, *went[2:]) == (
            [0, 1, 2],
            [1, 1, 2, 2, 3, 3],
            2,
            MEDIA_HBM,
            None,
        )
        assert index() == paths(1, 2)


@pytest.mark.parametrize("blocks", [500, 1000, 2000])
async def test_bytes_handed_over_for_an_evicted_run_grow_linearly(blocks):
    wired = Running(sink(), timeout_s=10.0)
    async with wired.running():
        await wired.tell(finished(*range(blocks)))
        await wired.settle()
        before = stand_in.service().token_bytes
        await wired.tell(BlocksRemoved(path(*range(blocks))[1], Tier.DEVICE, Reason.CPU_EVICTION))
        await wired.settle()
        assert stand_in.service().token_bytes - before == 4 * BLOCK * blocks


# -- faults


async def test_calls_never_overlap_and_nothing_is_lost_when_one_hangs():
    wired = Running(sink(), timeout_s=0.05)
    one = stand_in.service()
    async with wired.running():
        await wired.tell(finished(1, 2))
        await wired.settle()
        one.stuck = 0.12  # beyond the deadline of 0.05 s
        await wired.tell(
            finished(5, 6), BlocksRemoved(names(1, 2)[1], Tier.DEVICE, Reason.CPU_EVICTION)
        )
        while not wired.actor.sinks.statistics()[0].retried:
            await asyncio.sleep(0.01)
        one.stuck = 0.0
        await wired.settle()
        assert index() == paths(1) | paths(5, 6)
        assert one.most_at_once == 1


async def test_closing_does_not_wait_for_a_call_that_hangs():
    one = sink()
    await one.open()
    await one.begin_epoch(1)
    stand_in.service().stuck = 10.0
    stuck = asyncio.create_task(one.sdk.flush(np.zeros(BLOCK, np.uint32), 0, resident=True))
    await asyncio.sleep(0.05)
    stuck.cancel()
    began = asyncio.get_running_loop().time()
    await one.close()
    assert asyncio.get_running_loop().time() - began < 8.0, "close waited for the call"


@pytest.mark.parametrize("every", [1, 2, 3])
async def test_an_index_that_fails_during_a_close_keeps_nothing(every):
    """One that failed at the last call before it neither."""
    one, service = sink(), stand_in.service
    wired = Running(one)
    async with wired.running():
        await wired.tell(finished(1, 2, 3), finished(1, 2, 9), finished(7, 8))
        await wired.settle()
        assert index() == paths(1, 2, 3) | paths(1, 2, 9) | paths(7, 8)
        service().fail_every = every
        failures = 0
        while not failures:
            try:
                await one._flush(path(7, 8)[0], 0, resident=True)
            except SdkError:
                failures += 1
        # It works again after a while if every call fails.
        recovery = 0.15 if every == 1 else 60.0
        asyncio.get_running_loop().call_later(recovery, setattr, service(), "fail_every", 0)
    assert index() == set()


async def test_an_index_too_slow_for_a_batch_is_sent_it_piece_by_piece():
    """A batch takes ten times as long as a call may: tasks acknowledged before the deadline are not
    sent again."""
    wired = Running(sink(), timeout_s=0.5)
    async with wired.running():
        await wired.settle()
        stand_in.service().slow = 0.1
        await wired.tell(*(finished(i, 1) for i in range(50)))
        await wired.settle(90.0)
        assert len(index()) == 100
        assert stand_in.service().flushes < 80


async def test_a_new_incarnation_of_the_notifier_removes_what_the_last_one_sent():
    wired = Running(sink())
    async with wired.running():
        await wired.tell(finished(1, 2, 3), finished(1, 2, 9), finished(7))
        await wired.settle()
        await wired.tell("a message it has no handler for")  # type: ignore[arg-type]
        while wired.ref.incarnation == 0:
            await asyncio.sleep(0.01)
        await wired.settle()
        assert index() == set()
        await wired.tell(finished(7))
        await wired.settle()
        assert index() == paths(7)


# -- restarts of the process


async def killed(*facts, journal, torn=b"") -> None:
    """A process that sent these facts and was killed: nothing is closed."""
    wired = Running(sink(journal))
    for one in wired.sinks:
        await one.open()
    async with Wired.running(wired):
        await wired.tell(*facts)
        await wired.settle()
    with journal.open("ab") as file:
        file.write(torn)


@pytest.mark.parametrize("torn", [b"", b'["+",0,"00'])
async def test_with_a_journal_the_next_process_removes_what_the_last_one_sent(tmp_path, torn):
    journal = tmp_path / "told.jsonl"
    gone = BlocksRemoved(names(1, 2, 3)[2], Tier.DEVICE, Reason.CPU_EVICTION)
    await killed(
        finished(1, 2, 3), finished(1, 2, 9), gone, finished(7, 8), journal=journal, torn=torn
    )
    assert index() == paths(1, 2, 9) | paths(7, 8)
    wired = Running(sink(journal))
    async with wired.running():
        await wired.tell(finished(4))
        await wired.settle()
        assert index() == paths(4)
    assert index() == paths(4), "the next process will take it back"
    wired = Running(sink(journal))
    async with wired.running():
        await wired.settle()
        assert index() == set()


async def test_without_a_journal_a_process_that_stops_removes_what_it_sent():
    wired = Running(sink())
    async with wired.running():
        await wired.tell(finished(1, 2, 3))
        await wired.settle()
        assert index() == paths(1, 2, 3)
    assert index() == set()


async def test_a_journal_is_rewritten_when_it_has_grown(tmp_path, monkeypatch):
    monkeypatch.setattr("kvactors.flush_notifier.sinks.attention_store.GROWTH_BYTES", 4000)
    journal = tmp_path / "told.jsonl"
    wired = Running(sink(journal))
    async with wired.running():
        for i in range(60):
            await wired.tell(finished(i, 1, 2))
            await wired.settle()
            if i > 2:
                await wired.tell(BlocksRemoved(path(i, 1, 2)[1], Tier.DEVICE, Reason.CPU_EVICTION))
                await wired.settle()
        assert journal.stat().st_size < 12_000
        assert index() == paths(0, 1, 2) | paths(1, 1, 2) | paths(2, 1, 2)
    again = Running(sink(journal))
    async with again.running():
        await again.settle()
        assert index() == set()


async def test_a_journal_that_is_none_is_an_error_at_start(tmp_path):
    (tmp_path / "told.jsonl").write_text('["+",0]\n')
    with pytest.raises(SinkError, match="line 1"):
        await sink(tmp_path / "told.jsonl").open()
    with pytest.raises(SinkError, match="is not a folder"):
        sink(tmp_path / "missing" / "told.jsonl")


# -- a whole cache

CACHE = Config.from_mapping(
    {
        "cache": {"model": "m", "block_size": 4},
        "device": {"num_blocks": 10},
        "host": {"slots": 6, "transit_slots": 8},
        "layout": {"num_layers": 2, "num_kv_heads": 1, "head_dim": 2},
        "attention_store": {"sdk": STAND_IN},
        "flush": {
            "mode": "flush_only",
            "sinks": [{"kind": "attention_store"}],
            "retry_min_s": 0.005,
            "retry_max_s": 0.02,
            "timeout_s": 20.0,
        },
    }
)


def held_paths(cache) -> set[tuple[int, ...]]:
    """The paths of finished requests on device and host, by tokens."""
    ledger = cache.system.notifier_actor.ledger
    held = announceable(cache.system, cache.sinks["attention_store"].filter)
    found = [path_tokens(ledger, key) for keys in held.values() for key in keys]
    return {tuple(np.frombuffer(tokens, "<u4").tolist()) for tokens in found}


@settings(max_examples=25, deadline=None)
@given(
    requests=st.lists(
        st.tuples(st.integers(0, 3), st.integers(0, 3), st.integers(1, 3)), min_size=1, max_size=12
    ),
    fail_every=st.sampled_from([0, 0, 2, 3]),
    clear_at=st.integers(0, 20),
    announce=st.sampled_from(["difference", "full"]),
)
def test_the_index_equals_device_and_host_after_any_run(requests, fail_every, clear_at, announce):
    async def main() -> None:
        stand_in.reset()
        flush = replace(CACHE.flush, sinks=(AttentionStoreSinkConfig(announce=announce),))
        async with kvactors.open(replace(CACHE, flush=flush)) as cache:
            stand_in.service().fail_every = fail_every
            for number, (first, second, blocks) in enumerate(requests):
                if number == clear_at:
                    await cache.clear()
                tokens = [first] * 4 + [second] * 4 * blocks
                async with await cache.acquire(f"r{number}", tokens) as lease:
                    await lease.wait_ready()
                    await lease.commit(len(tokens))
            await cache.wait_flushed(20.0)
            assert index() == held_paths(cache)
            assert cache.count_divergent_blocks() == 0
            assert cache.check() == []
        assert fail_every or index() == set()

    asyncio.run(main())
