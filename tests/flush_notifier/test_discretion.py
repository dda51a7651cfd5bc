"""Logs, tracebacks and error texts never hold token ids or salts, for every failure."""

from __future__ import annotations

import asyncio
import io
import logging
import traceback

import pytest
import structlog
from rich.pretty import pretty_repr

import kvactors
from kvactors.errors import KVActorsError
from kvactors.flush_notifier.blocks import HeldBlock
from kvactors.flush_notifier.messages import FlushTask, PathCached
from kvactors.flush_notifier.sinks import MemorySink
from kvactors.flush_notifier.view import BlockRun, DeliveryBatch
from kvactors.identity import CacheScope, RequestScope
from kvactors.settings import Config
from kvactors.settings.sinks import MemorySinkConfig
from kvactors.types import Reason, Residency, Tier

BLOCK = 4
TOKEN = 1_431_655_811
SALT = "salt-of-tenant-7c1f"
PACKED = TOKEN.to_bytes(4, "little")
MARKS = [str(TOKEN), f"{TOKEN:x}", PACKED.hex(), PACKED[::-1].hex(), repr(PACKED * 2)[2:-1], SALT]
TOKENS = PACKED * BLOCK
KEY = bytes(32)

TASK = FlushTask(
    TOKENS,
    0,
    1,
    KEY,
    KEY,
    Residency.RESIDENT,
    Tier.DEVICE,
    Reason.COMMIT,
    1,
    RequestScope("adapter", SALT),
)


def marks_in(text: str) -> list[str]:
    return [mark for mark in MARKS if mark in text]


@pytest.mark.parametrize(
    "thing",
    [
        TASK,
        PathCached(
            KEY, TOKENS, KEY, 0, 1, Tier.DEVICE, Reason.COMMIT, KEY, RequestScope(None, SALT)
        ),
        RequestScope("adapter", SALT),
        CacheScope("model", "namespace", "adapter", SALT),
        DeliveryBatch([TASK], [BlockRun([], 1, True, Reason.COMMIT)]),
        HeldBlock(KEY, KEY, 0, TOKENS, 1, RequestScope(None, SALT)),
    ],
    ids=lambda thing: type(thing).__name__,
)
def test_the_text_of_objects_with_tokens_or_salts_has_sizes_instead(thing):
    for text in (repr(thing), str([thing]), pretty_repr(thing), f"{(thing,)}"):
        assert marks_in(text) == []
        assert type(thing).__name__ in text


CONFIG = Config.from_mapping(
    {
        "cache": {"block_size": BLOCK},
        "device": {"num_blocks": 8},
        "host": {"slots": 8, "transit_slots": 4},
        "layout": {"num_layers": 1, "num_kv_heads": 1, "head_dim": 2},
        "storage": {"backend": "memory", "write_policy": "write_through", "capacity_blocks": 20},
        "flush": {"retry_min_s": 0.01, "retry_max_s": 0.05, "timeout_s": 0.5},
        "actors": {"max_restarts_per_minute": 100},
    }
)


class Telling(MemorySink):
    """Fails with a text that has its tasks in it while it is full."""

    full = False

    async def deliver(self, tasks):
        if self.full:
            raise ValueError(f"cannot take {tasks} of {tasks[0].scope}")
        await super().deliver(tasks)

    async def close(self):
        raise ValueError(f"cannot close after {list(self.tasks)}")


def planted(actor):
    """Every handler of an actor fails once, with a text that has the message in it."""

    def fail(message, *envelope):
        raise RuntimeError(f"planted at {message!r} {envelope!r}")

    handled = [kind for kind in actor.handlers if not kind.__name__.startswith("Stop")]
    actor.handlers.update(dict.fromkeys(handled, fail))


async def requests(cache, numbers, texts):
    for number in numbers:
        try:
            tokens = [TOKEN] * BLOCK + [TOKEN, number, TOKEN, number] * 2
            async with await cache.acquire(f"r{number}", tokens, salt=SALT, deadline=0.5) as lease:
                await lease.wait_ready()
                await lease.commit(len(tokens))
        except (KVActorsError, asyncio.CancelledError) as error:
            texts.append("".join(traceback.format_exception(error)))


async def test_failures_of_every_actor_and_sink_write_no_token_and_no_salt(caplog):
    """With logs rendered as verbosely as structlog can: tracebacks by Rich, with locals."""
    out, seen, texts, failed = io.StringIO(), [], [], []
    caplog.set_level(logging.DEBUG)
    loop = asyncio.get_running_loop()
    loop.set_exception_handler(lambda loop, context: seen.append(context))
    old = structlog.get_config()
    rich = structlog.dev.RichTracebackFormatter(
        show_locals=True, locals_max_length=100, locals_max_string=1000, width=300
    )
    structlog.configure(
        processors=[structlog.dev.ConsoleRenderer(colors=False, exception_formatter=rich)],
        logger_factory=structlog.PrintLoggerFactory(out),
        cache_logger_on_first_use=False,
    )
    try:
        sink = Telling(MemorySinkConfig(name="telling"), BLOCK)
        async with kvactors.open(CONFIG, sinks=[sink]) as cache:
            await requests(cache, range(3), texts)
            names = [actor.ref.name for actor in cache.system.supervisor.actors()]
            for i, name in enumerate(names):
                before = cache.system.supervisor.statistics().failures
                planted(cache.system.supervisor.actor(name))
                for number in range(10 * i, 10 * i + 30):
                    await requests(cache, [number], texts)
                    if cache.system.supervisor.statistics().failures > before:
                        failed.append(name)
                        break
                await asyncio.sleep(0.05)
            sink.full = True
            await requests(cache, range(200, 203), texts)
            while not cache.statistics().flush[0].failures:
                await asyncio.sleep(0.01)
            texts.append(str(cache.statistics().flush))
            texts += map(str, cache.check())
    finally:
        structlog.configure(**old)
    logs = out.getvalue()
    assert "planted at" in logs
    assert "sink fails" in logs
    assert len(failed) >= 4, failed
    everything = {
        "logs": logs,
        "logging": caplog.text,
        "errors": "\n".join(texts),
        "loop": repr(seen),
    }
    assert {where: marks_in(text) for where, text in everything.items()} == {
        where: [] for where in everything
    }
