"""One line for each event that concerns an operator, limited when it repeats, without tokens."""

from __future__ import annotations

import ast
import asyncio
import gc
import logging
import time
from pathlib import Path

import pytest

from kvactors.actor import log as log_module
from kvactors.actor.log import BURST, WINDOW, RateLimit, get_logger
from kvactors.data_plane.local import LocalPlane
from kvactors.errors import StoreError
from kvactors.observe.prometheus import CacheMetrics
from kvactors.storage.attempts import FAILURES, PAUSE_S
from kvactors.storage.backend import WriteReport
from kvactors.storage.messages import Outcome
from kvactors.testing.loop import simulate
from tests.cache.test_degraded import HOST, STORE, requests
from tests.ranks.simulated import led
from tests.ranks.simulated import settings as rank_settings
from tests.support.cache import opened, prompt

PACKAGE = Path(__file__).parents[2] / "kvactors"


def events(caplog, name):
    return [
        record.kvactors_fields
        for record in caplog.records
        if getattr(record, "kvactors_event", "") == name
    ]


@pytest.fixture(autouse=True)
def _every_level(caplog):
    caplog.set_level(logging.DEBUG, "kvactors")


def test_a_cache_is_opened_with_its_sizes_in_bytes(caplog):
    async def main():
        async with opened(inline=True, host=HOST, storage=STORE) as cache:
            block = cache.system.layout.block_bytes
            (line,) = events(caplog, "cache opened")
            assert line["device_bytes"] == 8 * block
            assert line["host_bytes"] == cache.system.arena.num_slots * block
            assert (line["store"], line["store_objects"]) == ("MemoryBackend", 0)
        assert len(events(caplog, "cache closing")) == 1

    simulate(main, 1)


def test_a_full_store_is_a_reason_of_health_until_a_write_finds_space(caplog):
    async def main():
        async with opened(inline=True, host=HOST, storage=STORE) as cache:
            store = cache.system.backend
            real = store.write

            async def full(keys, *rest, **more):
                return WriteReport(bytes([Outcome.NO_SPACE]) * len(keys), [])

            store.write = full
            await requests(cache, *range(1, FAILURES + 3))
            await cache.wait_idle()
            (line,) = events(caplog, "store fails")
            assert (line["call"], line["reason"]) == ("write", "no space")
            (reason,) = cache.health().reasons
            assert reason.component == "store"
            assert "no space. Free space" in reason.why
            store.write = real
            await asyncio.sleep(PAUSE_S)
            await requests(cache, 20, 21)
            await cache.wait_idle()
            assert len(events(caplog, "store works again")) == 1
            assert cache.health() == ("ok", ())

    simulate(main, 1)


def test_a_lease_that_was_leaked(caplog):
    async def main():
        async with opened(inline=True) as cache:
            lease = await cache.acquire("r", prompt(1, 2))
            with pytest.warns(ResourceWarning):  # noqa: PT031
                del lease
                gc.collect()
            await cache.wait_idle()
            assert len(events(caplog, "lease leaked")) == 1
            kept = await cache.acquire("r", prompt(1, 2))
            kept.abandon()  # given back on purpose
            await cache.wait_idle()
            assert len(events(caplog, "lease leaked")) == 1

    simulate(main, 1)


def test_a_rank_that_is_lost_and_back(caplog):
    async def main():
        async with led(rank_settings()) as (cache, ranks):
            metrics = CacheMetrics(cache)
            joined = len(events(caplog, "rank admitted"))
            assert joined == 2
            await ranks[1].close()
            while cache.health().status == "ok":
                await asyncio.sleep(0.1)
            assert [reason.component for reason in cache.health().reasons] == ["rank 1"]
            assert [line["rank"] for line in events(caplog, "rank lost")] == [1]
            assert b'kvactors:rank_healthy{rank="1"} 0.0' in metrics.render()
            await ranks[1].start()
            while cache.health().status != "ok":
                await asyncio.sleep(0.1)
            assert len(events(caplog, "rank admitted")) == joined + 1
            found = metrics.render()
            assert b'kvactors:rank_healthy{rank="1"} 1.0' in found
            assert b'kvactors:rank_losses_total{rank="1"} 1.0' in found

    simulate(main, 1)


# -- limits


def test_an_event_that_repeats_is_limited_and_counted(caplog, monkeypatch):
    at = 100.0
    monkeypatch.setattr(log_module.time, "monotonic", lambda: at)
    logger = get_logger()
    for _ in range(1000):
        logger.warning("noise", sink="a")
    assert len(events(caplog, "noise")) == BURST
    logger.warning("noise", sink="b")  # another part has its own limit
    assert len(events(caplog, "noise")) == BURST + 1
    at += WINDOW
    logger.warning("noise", sink="a")
    assert events(caplog, "noise")[-1] == {"sink": "a", "suppressed": 1000 - BURST}


def test_the_limits_memory_is_bounded():
    limit = RateLimit()
    for number in range(10 * log_module.MOST_EVENTS):
        assert limit.admit("event", {"sink": number}) == 0
    assert len(limit._events) <= log_module.MOST_EVENTS


# -- all calls


LEVELS = {"debug", "info", "warning", "error"}
SECRET = {"tokens", "token", "token_ids", "prompt", "salt", "message", "path", "extra_keys", "args"}
ALLOWED = {("mooncake.py", "path"), ("worker.py", "message")}
"""File and field: the path of a settings file, the type of a message."""


def log_calls():
    """Every call of a logger in the package: file, line, call."""
    for file in sorted(PACKAGE.rglob("*.py")):
        for node in ast.walk(ast.parse(file.read_text("utf-8"))):
            if (
                isinstance(node, ast.Call)
                and isinstance(node.func, ast.Attribute)
                and node.func.attr in LEVELS
            ):
                owner = ast.unparse(node.func.value)
                if owner.split(".")[-1] in ("log", "_log", "get_logger()"):
                    yield file, node


def test_every_log_call_has_a_fixed_phrase_and_no_field_of_a_prompt():
    found = list(log_calls())
    assert len(found) > 60
    for file, call in found:
        where = f"{file.name}:{call.lineno}"
        event = call.args[0]
        assert isinstance(event, ast.Constant), where
        assert isinstance(event.value, str), where
        assert event.value == event.value.strip().rstrip("."), where
        for keyword in call.keywords:
            secret = keyword.arg in SECRET and (file.name, keyword.arg) not in ALLOWED
            assert not secret, f"{where}: {keyword.arg}"
            names = {
                one.attr if isinstance(one, ast.Attribute) else one.id
                for one in ast.walk(keyword.value)
                if isinstance(one, (ast.Attribute, ast.Name))
            }
            assert not names & (SECRET - {"message", "path", "args"}), where


# -- since when a condition holds


SECONDS = 30.0
MEMORY = {"backend": "memory"}


async def refuse(_generation=0):
    raise OSError("no")


async def fail_writes(cache, _patch):
    for _ in range(FAILURES):
        cache.system.store.attempts.writes.failed("no")


async def fail_a_clear(cache, patch):
    patch.setattr(cache.system.backend, "clear", refuse)
    with pytest.raises(StoreError):
        await cache.clear(storage=True)


async def leave_a_clear_pending(cache, patch):
    patch.setattr(cache.system.backend, "clear_pending", True)


async def break_the_copies(_cache, patch):
    patch.setattr(LocalPlane, "trouble", "no")


@pytest.mark.parametrize(
    ("begin", "recorded"),
    [
        (fail_writes, True),
        (fail_a_clear, True),
        (leave_a_clear_pending, False),
        (break_the_copies, False),
    ],
)
def test_since_is_when_a_condition_began_or_was_first_found(begin, recorded, monkeypatch):
    async def main():
        async with opened(inline=True, storage=MEMORY) as cache:
            assert cache.health() == ("ok", ())
            with monkeypatch.context() as patch:
                await begin(cache, patch)
                if not recorded:
                    assert cache.health().status == "degraded"
                for seconds in (SECONDS, 2 * SECONDS):
                    await asyncio.sleep(SECONDS)
                    (reason,) = cache.health().reasons
                    assert time.time() - reason.since == pytest.approx(seconds, abs=5)
            if begin is fail_a_clear:
                await cache.clear(storage=True)
            cache.system.store.attempts.writes.worked()
            assert cache.health() == ("ok", ())
            if begin is not fail_a_clear:  # a later condition of the same kind has a new time
                with monkeypatch.context() as patch:
                    await begin(cache, patch)
                    (reason,) = cache.health().reasons
                    assert time.time() - reason.since == pytest.approx(0, abs=5)
                cache.system.store.attempts.writes.worked()

    simulate(main)
