"""Resets that fail: the cached blocks may be of other weights, so no request is given any before a
reset has succeeded."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from kvactors.errors import ConfigError, DeadlineExceeded, NoRoom, SinkError
from kvactors.integrations.fastdeploy.device_cache import DeviceCache
from kvactors.integrations.fastdeploy.engine_tiers import EngineTiers
from kvactors.integrations.fastdeploy.requests import Requests
from kvactors.integrations.fastdeploy.signals import CLEARED, CLEARING, NORMAL
from tests.integrations.fastdeploy.config import Request
from tests.integrations.fastdeploy.test_launch import process as process  # a fixture
from tests.integrations.fastdeploy.test_threads import LIMIT, HeldCopies

A, B = list(range(8)), list(range(100, 108))
SOON = {"storage": {"timeout_s": 0.02}}


@pytest.fixture
def held(monkeypatch):
    """Copies for storage that wait. A test that fails lets them go on too."""
    found = HeldCopies(monkeypatch)
    yield found
    found.go.put(None)


@pytest.fixture
def pool(held):
    with ThreadPoolExecutor(1) as found:
        yield found
        held.go.put(None)


@pytest.mark.parametrize("cpu", [0, 4])
def test_after_a_reset_that_gave_up_no_request_gets_blocks_of_earlier_weights(
    engine, pool, held, cpu
):
    one = engine(gpu=6, cpu=cpu, file=True, options=SOON)
    one.prefill(Request("a", A))
    one.free(Request("a", A))
    other = Request("b", B)
    one.prefill(other)
    write = pool.submit(one.manager.write_cache_to_storage, other)
    held.begun.get(timeout=LIMIT)
    one.memory.lose(1)
    for _ in range(2):
        with pytest.raises(DeadlineExceeded):
            one.manager.reset()
        with pytest.raises(ConfigError, match="last reset has failed"):
            one.match(Request("c", A))
    held.go.put(None)
    write.result(LIMIT)
    with pytest.raises(ConfigError, match="last reset has failed"):
        one.match(Request("c", A))
    one.manager.reset()
    assert one.free_blocks == [0, 1, 2, 3, 4, 5]
    one.prefill(Request("c", B))
    one.manager.check()


def test_the_engine_asks_again_until_a_reset_succeeds(engine, process, pool, held):
    ranks = process.ranks
    one = engine(gpu=4, ranks=ranks, file=True, attach=False, options=SOON)
    process.launch(one, ranks)
    request = Request("a", A)
    one.prefill(request)
    write = pool.submit(one.manager.write_cache_to_storage, request)
    held.begun.get(timeout=LIMIT)
    status = process.signals["prefix_tree_status"].value
    status[0] = CLEARING
    for _ in range(2):
        with pytest.raises(DeadlineExceeded):
            one.manager.serve_status()
        assert status[0] == CLEARING, "the engine is not told that the cache is empty"
    one.manager.update_cache_blocks(request, 4, 8)  # of before: no error
    held.go.put(None)
    write.result(LIMIT)
    one.manager.serve_status()
    assert status[0] == CLEARED
    status[0] = NORMAL
    one.free(request)
    assert one.free_blocks == [0, 1, 2, 3]
    one.prefill(Request("b", A))


STEPS = ("serve", "reset", "reset gives up", "reset reads no version", "evict", "free all")


@settings(max_examples=25, deadline=None, suppress_health_check=list(HealthCheck))
@given(
    st.integers(2, 16),
    st.sampled_from([0, 2, 16]),
    st.lists(st.tuples(st.sampled_from(STEPS), st.integers(0, 2)), max_size=25),
)
def test_no_sequence_of_resets_gives_bytes_of_other_weights(engine, gpu, cpu, steps):
    """The weights change before each reset. The model: a request is refused from a failed reset to
    the next that succeeds, and otherwise gets the bytes of the weights of now."""
    one = engine(gpu=gpu, cpu=cpu)
    version, refused = 0, False

    def failed(*_: Any) -> None:
        raise SinkError("injected")

    for number, (step, seed) in enumerate(steps):
        if step == "serve":
            request = Request(f"r{number}", [seed] * 6 + [9])
            if refused:
                with pytest.raises(ConfigError, match="last reset has failed"):
                    one.match(request)
            else:
                _, cached, _ = one.match(request)
                assert one.wrong(request, cached) == []
                one.manager.release_block_ids(request)
                one.serve(f"s{number}", [seed] * 6 + [9])
        elif step == "evict":
            one.manager.free_block_ids(seed + 1)
        elif step == "free all":
            assert one.manager.can_allocate_gpu_blocks(gpu) or refused
        else:
            version += 1
            one.memory.lose(version)
            with pytest.MonkeyPatch.context() as patch:
                if step == "reset gives up":
                    patch.setattr(Requests, "clear", lambda *_: False)
                if step == "reset reads no version":
                    patch.setattr(EngineTiers, "renew", failed)
                refused = step != "reset"
                try:
                    one.manager.reset()
                except (DeadlineExceeded, SinkError):
                    assert refused
        one.manager.check()


def test_a_reset_that_fails_in_a_tier_is_none(engine, monkeypatch):
    one = engine(gpu=4, cpu=2)
    one.serve("a", A)
    one.fail_a_reset(monkeypatch, DeviceCache, "reset", NoRoom(1, 0))
    with pytest.raises(ConfigError, match="last reset has failed"):
        one.match(Request("b", A))
    one.manager.reset()
    assert one.match(Request("b", A))[1] == 0
