"""A client in another thread, through `cache.from_thread`."""

from __future__ import annotations

from kvactors import KVActorsError, Step
from tests.load.calls import buffer_of
from tests.load.client import Client
from tests.load.ground import Row

from .world import World


def work_in_thread(world: World, number: int, count: int) -> None:
    """Serve `count` requests, one after another. Each must end in an answer or in a named error."""
    client = Client(world, f"{world.drawn.seed} thread {number}", lambda: False)
    for _ in range(count):
        ticket = world.asked()
        try:
            _serve(world, client, ticket)
        except KVActorsError as error:
            world.judge("a call from a thread", error)
        except Exception as error:
            world.fail(f"a request in a thread raised {error!r}")
        finally:
            world.over(ticket)


def _serve(world: World, client: Client, ticket: object) -> None:
    rng, size = client.rng, world.cache.block_size
    prompt = client.prompt()._replace(media=())

    def check(row: Row, blocks: int, *, hits: bool = False) -> None:
        table, names = row.lease.block_table[:blocks], world.names(row, row.content)[:blocks]
        if world.read(table, names, row.ticket, hits=hits):
            world.record.wrong += 1
            world.fail("blocks of a thread's request hold other bytes")

    def compute(row: Row, first: int) -> None:
        names = world.names(row, row.content)
        stamp = world.history.stamp(row.ticket.number)
        world.memory.write(row.lease.block_table[first : len(names)], names[first:], stamp)
        row.lease.commit(len(row.tokens), deadline=5.0)

    with world.cache.from_thread.acquire(
        client.name, buffer_of(rng, prompt.tokens), deadline=5.0, **prompt.scope
    ) as lease:
        row = Row(lease, prompt, ticket)
        world.scoped(row)
        lease.wait_ready(deadline=5.0)
        cached = lease.cached_tokens // size
        check(row, cached, hits=True)
        compute(row, cached)
        if rng.random() < 0.5:
            more = [rng.randrange(5) for _ in range(rng.randint(1, 2 * size))]
            if rng.random() < 0.5:
                lease.extend(more, deadline=5.0)
            else:
                step = Step(lease, buffer_of(rng, more), len(row.tokens))
                (outcome,) = world.cache.from_thread.step([step], deadline=5.0)
                if outcome.error is not None:
                    raise outcome.error
            first = len(row.tokens) // size
            row.content = (row.tokens + more, ())
            compute(row, first)
        check(row, len(row.tokens) // size)
        if rng.random() < 0.7:
            lease.finish(deadline=5.0)
        elif rng.random() < 0.5:
            lease.preempt(len(row.tokens), deadline=5.0)  # else left by the context manager
