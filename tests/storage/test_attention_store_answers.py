"""Answers of AttentionStore's SDK: readiness, counts below those asked for, and errors that are
named where the cache is opened."""

from __future__ import annotations

from types import SimpleNamespace

import anyio
import numpy as np
import pytest

from kvactors.device.host import HostDevice
from kvactors.errors import DeadlineExceeded, SdkError
from kvactors.settings.sinks import AttentionStoreConfig
from kvactors.storage.attention_sdk import Sdk, complete
from tests.storage.test_attention_store_backend import LAYOUT, STAND_IN, calls, path, store_over
from tests.support import attentionstore_sdk as stand_in


@pytest.fixture(autouse=True)
def fresh_services():
    stand_in.reset()


def handle(**changes) -> Sdk:
    store = AttentionStoreConfig(sdk=STAND_IN, **changes)
    return Sdk(complete(store, LAYOUT), "storage")


@pytest.mark.parametrize(("not_ready", "probes", "pauses"), [(0, 1, 0), (1, 2, 1), (2, 3, 2)])
async def test_it_pauses_between_two_probes_and_not_after_the_last(
    monkeypatch, not_ready, probes, pauses
):
    slept = []

    async def sleep(seconds: float) -> None:
        slept.append(seconds)

    clock = SimpleNamespace(fail_after=anyio.fail_after, sleep=sleep)
    monkeypatch.setattr("kvactors.storage.attention_sdk.anyio", clock)
    stand_in.service().not_ready = not_ready
    one = handle(ready_interval_s=5.0)
    await one.open()
    one.close()
    assert len(calls("match")) == probes
    assert slept == [5.0] * pauses


async def test_a_service_that_is_never_ready_is_a_timeout_error():
    stand_in.service().not_ready = 10**9
    one = handle(ready_interval_s=0.005, ready_timeout_s=0.05)
    with pytest.raises(TimeoutError, match=r"not ready in 0\.05 s") as found:
        await one.open()
    one.close()
    assert isinstance(found.value, DeadlineExceeded)


@pytest.mark.parametrize("when", ["made", "probed"])
async def test_an_error_at_the_start_has_the_sdks_words_and_ends_the_wait(monkeypatch, when):
    """Any other text than the one of a service that will be ready soon."""
    one = handle(ready_interval_s=60.0)
    if when == "made":
        stand_in.service().broken = "no licence"
    else:
        connect = one._construct

        def made():
            found = connect()
            stand_in.service().broken = "no licence"
            return found

        monkeypatch.setattr(one, "_construct", made)
    with pytest.raises(SdkError, match="no licence"):
        await one.open()
    stand_in.service().broken = ""
    await one.open()
    assert await one.match(_tokens(2), 0, 5.0) == 0
    one.close()


def _tokens(blocks: int):
    return np.frombuffer(path(blocks), "<u4")


@pytest.mark.parametrize("platform", ["other", "cuda"])
@pytest.mark.parametrize("least", [0, 1, 3])
async def test_the_number_that_the_sdk_returns_is_the_result(platform, least):
    """The blocks behind the first that did not arrive count as missing, although they were found."""
    device = HostDevice(LAYOUT, 16)
    store = store_over(device, platform=platform)
    await store.open()
    device.fill(range(4), bytes(range(128)))
    service = stand_in.service()
    service.counts = lambda count: min(count, least)
    assert await store.save(path(4), 0, (0, 1, 2, 3), 5.0) == least
    assert store.writes == least
    service.counts = None
    assert await store.save(path(4), 0, (0, 1, 2, 3), 5.0) == 4
    assert await store.sdk.match(_tokens(4), 1, 5.0) == 3
    found, read = store.sdk.match, []

    async def all_of_them(*arguments) -> int:
        count = await found(*arguments)
        service.counts = lambda moved: read.append(moved) or min(moved, least)
        return count

    store.sdk.match = all_of_them
    assert await store.fetch(path(4), 0, (8, 9, 10, 11), 5.0) == least
    assert (read, store.reads) == ([4], least)
    await store.close()


@pytest.mark.parametrize("name", ["match", "read", "write"])
async def test_an_error_of_any_call_is_no_block(monkeypatch, name):
    device = HostDevice(LAYOUT, 16)
    store = store_over(device)
    await store.open()
    assert await store.save(path(4), 0, (0, 1, 2, 3), 5.0) == 4

    async def fail(*_arguments) -> int:
        raise SdkError("the service has gone")

    monkeypatch.setattr(store.sdk, name, fail)
    fetched = await store.fetch(path(4), 0, (8, 9, 10, 11), 5.0)
    saved = await store.save(path(4, seed=2), 0, (4, 5, 6, 7), 5.0)
    expected = {"match": (0, 0), "read": (0, 4), "write": (4, 0)}
    assert (fetched, saved) == expected[name]
    await store.close()
