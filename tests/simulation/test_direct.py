"""AttentionStore in simulated systems: as the store that moves device memory itself, and as a token
index."""

from __future__ import annotations

import pytest

from kvactors.errors import SdkError
from kvactors.testing.loop import simulate
from tests.simulation.draw import draw_run
from tests.simulation.run import run_seed
from tests.support.sim_service import SimService, SimThread

DIRECT = [
    seed for seed in range(400) if draw_run(seed).config.storage.backend == "attention_store"
][:24]
INDEXED = [seed for seed in range(400) if draw_run(seed).token_index][:16]


@pytest.mark.parametrize(
    "seeds", [DIRECT[:12], DIRECT[12:], INDEXED], ids=["direct", "more direct", "token index"]
)
def test_nothing_is_violated(seeds):
    assert {seed: found for seed in seeds if (found := run_seed(seed).violations)} == {}


def test_both_paths_are_really_used():
    reports = [run_seed(seed) for seed in DIRECT[:8]]
    for kind in ("DeviceFetched", "DeviceSaved"):
        assert (
            sum(one.seen.get(f"message storage_direct cpu_evictor {kind}", 0) for one in reports)
            > 10
        )
    assert sum(run_seed(seed).seen.get("index compared", 0) for seed in INDEXED[:4]) >= 4


def test_a_copy_evicted_during_a_direct_save_is_not_called_kept():
    """A small host gives the copy away while the store still writes."""
    assert run_seed(51).violations == []


def test_a_read_that_gives_other_bytes_is_caught(monkeypatch):
    from tests.support.attentionstore_sdk.sdk import AttentionStoreSDK

    move = AttentionStoreSDK._move_block

    def shifted(self, name, path, layer, key, value, block):
        move(self, name, path, layer, key, value, (block + 1) % 2 if name == "read" else block)

    monkeypatch.setattr(AttentionStoreSDK, "_move_block", shifted)
    assert any(run_seed(seed).wrong for seed in DIRECT)


def test_calls_are_made_in_order_and_fail_while_the_service_is_down():
    async def main():
        service, made = SimService(lambda: 0.5), []
        thread = SimThread(service)
        import asyncio

        first, second = (
            thread.submit(lambda: made.append(1) or 1),
            thread.submit(lambda: made.append(2) or 2),
        )
        assert thread.busy == 2
        assert await asyncio.wrap_future(first) == 1
        assert made == [1, 1, 2], "the second call has begun, and not ended"
        service.down = True
        with pytest.raises(SdkError):
            await asyncio.wrap_future(second)
        service.heal()
        given_up = thread.submit(lambda: made.append(3))
        assert given_up.cancel()
        assert await asyncio.wrap_future(thread.submit(lambda: 4)) == 4
        assert 3 not in made
        await asyncio.sleep(1)
        assert thread.busy == 0

    simulate(main, 1)
