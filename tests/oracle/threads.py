"""A client in another thread, through `cache.from_thread`."""

from __future__ import annotations

import random
from typing import Any

from kvactors import KVActorsError, Step

from .client import Client
from .model import Prompt
from .world import World


def work_in_thread(world: World, number: int, count: int) -> None:
    """Serve `count` requests, one after another. Each must end in an answer or in a named error."""
    client = Client(world, 1000 + number, [0])
    for _ in range(count):
        request = world.history.request()
        world.record.requests += 1
        try:
            _serve(world, client, client.rng, request)
        except KVActorsError as error:
            world.judge("a call from a thread", error)
        except Exception as error:
            world.fail(f"a request in a thread raised {error!r}")
        finally:
            world.history.end(request)


def _serve(world: World, client: Client, rng: random.Random, request: int) -> None:
    size, tokens = world.drawn.block_size, client.tokens()
    until = world.history.snapshot()
    salt = rng.choice((None, "salt-a")) if world.drawn.scopes else None
    prompt = Prompt(size, world.scope(None, salt), tokens)
    with world.cache.from_thread.acquire(
        f"thread-{request}", client.buffer(tokens), salt=salt, deadline=5.0
    ) as lease:
        lease.wait_ready(deadline=5.0)
        table: Any = lease.block_table
        cached = lease.cached_tokens // size
        world.verify("hit in a thread", table[:cached], prompt, until)
        world.memory.write(
            table[cached : prompt.full], prompt.digests[cached:], world.history.stamp(request)
        )
        lease.commit(len(tokens), deadline=5.0)
        if rng.random() < 0.5:
            more, first = [rng.randrange(5) for _ in range(rng.randint(1, 2 * size))], prompt.full
            if rng.random() < 0.5:
                lease.extend(more, deadline=5.0)
            else:
                step = Step(lease, client.buffer(more), len(tokens))
                (outcome,) = world.cache.from_thread.step([step], deadline=5.0)
                if outcome.error is not None:
                    raise outcome.error
            prompt.extend(more)
            table = lease.block_table
            world.memory.write(
                table[first : prompt.full], prompt.digests[first:], world.history.stamp(request)
            )
            lease.commit(len(prompt.tokens), deadline=5.0)
        world.verify("held in a thread", lease.block_table[: prompt.full], prompt, -1)
        if rng.random() < 0.7:
            lease.finish(deadline=5.0)
        elif rng.random() < 0.5:
            lease.preempt(len(prompt.tokens), deadline=5.0)
        else:
            raise_nothing = lease  # left by the context manager
            del raise_nothing
