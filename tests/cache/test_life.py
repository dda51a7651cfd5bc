"""A request from `acquire` to `finish` through the public API, over every tier, with real bytes."""

from __future__ import annotations

import pytest

import kvactors
from kvactors.errors import NotOpened, WrongLoop
from tests.support.cache import BLOCK, opened, prompt, serve

EXCLUSIVE = {"slots": 8, "transit_slots": 16}


async def test_cold_then_hit_on_the_device():
    async with opened() as cache:
        first = await serve(cache, "a", prompt(1, 3, tail=2))
        assert first.hits == (0, 0, 0)
        again = await serve(cache, "b", prompt(1, 3, tail=2))
        assert again.hits == (3, 0, 0)
        assert again.cached_tokens == 3 * BLOCK
        assert again.block_table[:3] == first.block_table[:3]
        assert not again.pending


async def test_a_full_hit_leaves_a_block_to_compute_unless_configured():
    async with opened() as cache:
        await serve(cache, "a", prompt(1, 2))
        assert (await serve(cache, "b", prompt(1, 2))).hits == (1, 0, 0)
    async with opened(cache={"recompute_last_token": False}) as cache:
        await serve(cache, "a", prompt(1, 2))
        assert (await serve(cache, "b", prompt(1, 2))).hits == (2, 0, 0)


async def test_salt_lora_namespace_and_media_keep_requests_apart():
    async with opened(device=64) as cache:
        tokens = prompt(1, 2, tail=1)
        await serve(cache, "plain", tokens)
        for options in (
            {"salt": "x"},
            {"lora": "x"},
            {"extra_keys": [(0, 2, b"picture")]},
            {"extra_keys": [(0, 2, "other")]},
        ):
            assert (await serve(cache, "first", tokens, **options)).hits == (0, 0, 0)
            assert (await serve(cache, "again", tokens, **options)).hits == (2, 0, 0)
        late = [(BLOCK, 1, b"picture")]
        assert (await serve(cache, "media in block 1", tokens, extra_keys=late)).hits == (1, 0, 0)
        await cache.set_namespace("new weights")
        assert (await serve(cache, "new", tokens)).hits == (0, 0, 0)
        await cache.set_namespace("default")
        assert (await serve(cache, "old", tokens)).hits == (2, 0, 0)


async def test_offload_and_load_bring_the_same_bytes_back():
    async with opened(host=EXCLUSIVE) as cache:
        await serve(cache, "a", prompt(1, 6))
        await serve(cache, "b", prompt(2, 6))
        await cache.wait_idle()
        assert cache.statistics().host.resident == 4
        back = await serve(cache, "a again", prompt(1, 6, tail=1))
        assert back.hits.device == 2
        assert back.hits.host == 4
        await cache.wait_idle()


@pytest.mark.parametrize("policy", ["write_through", "write_through_selective", "write_back"])
@pytest.mark.parametrize("backend", ["memory", "file"])
async def test_storage_brings_the_same_bytes_back(policy, backend, tmp_path):
    storage = {"backend": backend, "write_policy": policy}
    if backend == "file":
        storage["directory"] = str(tmp_path)
    async with opened(host={"slots": 2, "transit_slots": 32}, storage=storage) as cache:
        for _ in range(2):
            await serve(cache, "a", prompt(1, 6, tail=1))
        await cache.wait_idle()
        for other in range(2, 6):
            await serve(cache, "b", prompt(other, 8))
            await cache.wait_idle()
        back = await serve(cache, "a again", prompt(1, 6, tail=1))
        assert back.hits.storage >= 4
        await cache.wait_idle()
    if backend == "file":
        async with opened(storage=storage) as cache:
            assert (await serve(cache, "after a restart", prompt(1, 6, tail=1))).hits.storage >= 4


async def test_flush_only_neither_reads_nor_writes_storage(tmp_path, monkeypatch):
    storage = {"backend": "file", "directory": str(tmp_path), "write_policy": "write_through"}
    monkeypatch.setenv("FD_AS_ONLY_FLUSH", "1")
    async with opened(storage=storage) as cache:
        await serve(cache, "a", prompt(1, 4))
        await cache.wait_flushed()
        assert len(cache.sinks["memory"].view()[kvactors.Tier.DEVICE]) == 4
    assert list(tmp_path.iterdir()) == []
    monkeypatch.setenv("FD_AS_ONLY_FLUSH", "maybe")
    with pytest.raises(kvactors.ConfigError, match="FD_AS_ONLY_FLUSH"):
        async with opened():
            pass


async def test_the_result_of_open_says_how_to_use_it():
    unopened = kvactors.open()
    with pytest.raises(NotOpened, match=r"async with kvactors\.open"):
        await unopened
    with pytest.raises(NotOpened, match="enter_async_context"), unopened:
        pass
    with pytest.raises(NotOpened):
        await unopened.acquire("a", [1])
    with pytest.raises(NotOpened):
        iter(unopened)
    assert "async with kvactors.open" in repr(unopened)
    with pytest.raises(AttributeError, match="no attribute 'acquier'"):
        getattr(unopened, "acquier")  # noqa: B009
    async with unopened as cache:
        assert cache.block_size
    assert [(one.component, one.why) for one in cache.health().reasons] == [("cache", "closed")]
    with pytest.raises(NotOpened, match="opened before"):
        await unopened.__aenter__()


def test_settings_are_checked_by_the_call(tmp_path):
    with pytest.raises(kvactors.ConfigError, match="Did you mean 'cache'"):
        kvactors.open({"cashe": {}})
    with pytest.raises(OSError, match=r"none\.toml"):
        kvactors.open(tmp_path / "none.toml")


async def test_objects_show_what_matters():
    async with opened(cache={"model": "m"}) as cache:
        lease = await cache.acquire("a", prompt(1, 3))
        assert repr(lease) == f"<Lease of 'a': 0 of {3 * BLOCK} tokens cached, ready>"
        assert "of 'm': " in repr(cache)
        assert repr(cache).endswith("1 open leases, ok>")
        lease.abandon()
        await serve(cache, "b", prompt(1, 3))
        lease = await serve(cache, "c", prompt(1, 3))
        assert lease.hits.total == 2
        assert repr(lease).endswith("ended>")
        assert cache.statistics().hit_rate == 2 / 9
        assert cache.tenants().others.hit_rate == 2 / 9
        assert "3 requests, hit rate 0.2222 of 9 blocks" in repr(cache.statistics())
    assert repr(cache).endswith("closed>")


def test_a_cache_needs_a_running_asyncio_loop():
    """Under trio too there is none."""
    with pytest.raises(WrongLoop, match="asyncio"):
        kvactors.open().__aenter__().send(None)
