"""The simulated loop: seeds, virtual time, and the two ways of never coming to an end."""

from __future__ import annotations

import asyncio
import re
from collections import Counter
from contextlib import asynccontextmanager
from pathlib import Path

import anyio
import pytest

from kvactors.actor import ActorRef, Ask, Channel, InFlight
from kvactors.actor.uncancelled import wait_uncancelled
from kvactors.errors import DeadlineExceeded
from kvactors.testing import Deadlock, Livelock, SimLoop, loop_factory, simulate
from tests.support.deadline import deadline_after


async def racy_counter() -> int:
    """Read, yield, write, beside one that waits a turn first: on a plain loop they always take the
    same turns."""
    count = 0

    async def read_then_write():
        nonlocal count
        seen = count
        await asyncio.sleep(0)
        count = seen + 1

    async def late():
        nonlocal count
        await asyncio.sleep(0)
        count += 1

    async with anyio.create_task_group() as tasks:
        tasks.start_soon(read_then_write)
        tasks.start_soon(late)
    return count


def test_a_race_that_a_plain_loop_never_shows_is_found_by_some_seeds_and_replayed_by_each():
    assert {asyncio.run(racy_counter()) for _ in range(20)} == {2}
    found = Counter(simulate(racy_counter, seed) for seed in range(100))
    assert 20 < found[1] < 80
    assert all(simulate(racy_counter, seed) == simulate(racy_counter, seed) for seed in range(20))


def test_the_order_depends_on_the_seed_and_not_on_the_order_of_wakeups():
    async def orders(reverse):
        loop, order = asyncio.get_running_loop(), []
        futures = [loop.create_future() for _ in range(8)]

        async def waits(number):
            await futures[number]
            order.append(number)

        tasks = [loop.create_task(waits(number)) for number in range(8)]
        await asyncio.sleep(0.1)
        for future in reversed(futures) if reverse else futures:
            future.set_result(None)
        await asyncio.gather(*tasks)
        return order

    runs = [simulate(lambda: orders(False), seed) for seed in range(4)]
    assert runs == [simulate(lambda: orders(True), seed) for seed in range(4)]
    assert len({tuple(run) for run in runs}) > 1


def test_scopes_and_deadlines_keep_virtual_time():
    async def main():
        clock = asyncio.get_running_loop().time
        with anyio.move_on_after(10) as scope:
            await anyio.sleep(3600)
        with pytest.raises(TimeoutError):
            with anyio.fail_after(5):
                await anyio.sleep(3600)
        return scope.cancelled_caught, clock()

    assert simulate(main) == (True, 15.0)


def test_a_jump_makes_timers_late_and_never_goes_back():
    loop, late = SimLoop(), []

    async def main():
        loop.call_later(1.0, lambda: late.append(loop.time()))
        await asyncio.sleep(0)
        loop.jump(100.0)
        await asyncio.sleep(0)
        await asyncio.sleep(0)
        with pytest.raises(ValueError, match="forward"):
            loop.jump(-1)
        with pytest.raises(ValueError, match="forward"):
            loop.jump(float("nan"))

    simulate(main, loop=loop)
    assert late == [100.0]


def test_a_cancelled_scope_around_something_that_cannot_be_stopped_does_not_stop_the_clock():
    async def main():
        loop = asyncio.get_running_loop()
        copy = loop.create_future()
        loop.call_later(5.0, copy.set_result, None)
        with anyio.move_on_after(1):
            await wait_uncancelled(copy)
        return loop.time()

    assert simulate(main, loop=SimLoop(limit=10_000)) == 5.0


# -- never coming to an end


class Question(Ask[int], frozen=True, eq=False):
    pass


def test_a_deadlock_names_the_waiting_tasks_and_their_places():
    async def main():
        loop = asyncio.get_running_loop()
        never = loop.create_future()

        async def parked():
            await never

        async with anyio.create_task_group() as tasks:
            tasks.start_soon(parked, name="left alone")

    with pytest.raises(Deadlock, match="nothing is ready and no timer is set") as caught:
        simulate(main)
    outer, inner = caught.value.waiting
    assert re.fullmatch(
        r".*main#1 waits for its tasks left alone#2 \(tests/testing/test_loop.py:\d+ in main\)",
        outer,
    )
    line = next(
        n
        for n, text in enumerate(Path(__file__).read_text().splitlines(), 1)
        if "await never" in text
    )
    assert (
        inner == "left alone#2 waits for a future that nobody completes "
        f"(tests/testing/test_loop.py:{line} in parked)"
    )


@pytest.mark.parametrize("forever", [True, False])
def test_a_cyclic_ask_is_a_deadlock_that_names_both(forever):
    """Two servers that take one request at a time and ask each other before they answer. The asks'
    own timers do not hide it."""
    loop = SimLoop()

    async def main():
        refs = {
            name: ActorRef(name, name, Channel(name, 4), InFlight()) for name in ("left", "right")
        }

        async def serve(name, other):
            deadline = float("inf") if forever else deadline_after(3)
            while True:
                await refs[name].channel.get()
                await refs[other].ask(Question(), deadline=deadline)

        async with anyio.create_task_group() as tasks:
            tasks.start_soon(serve, "left", "right", name="left")
            tasks.start_soon(serve, "right", "left", name="right")
            refs["left"].try_tell(Question())

    with pytest.raises(Deadlock if forever else ExceptionGroup) as caught:
        simulate(main, loop=loop)
    text = str(caught.value) if forever else "\n".join(loop.stalled)
    assert "left#2 waits for the answer to Question by right" in text
    assert "right#3 waits for the answer to Question by left" in text


def test_a_deadlock_that_a_deadline_resolves_is_remembered():
    loop = SimLoop()

    async def main():
        ref = ActorRef("deaf", "deaf", Channel("deaf", 4), InFlight())
        await asyncio.sleep(7)
        with pytest.raises(DeadlineExceeded):
            await ref.ask(Question(), deadline=deadline_after(2))
        await asyncio.sleep(7)

    simulate(main, loop=loop)
    when, who = loop.stalled
    assert when == "since 7.0000 s everybody waits for time-outs alone"
    assert "waits for the answer to Question by deaf" in who


def test_waits_for_a_gather_a_task_and_a_thread_are_distinguished():
    async def main():
        never = asyncio.get_running_loop().create_future()

        async def parked():
            await never

        async def gathers():
            await asyncio.gather(parked(), parked())

        async def threads():
            await anyio.to_thread.run_sync(len, ())

        task = asyncio.create_task(gathers())
        other = asyncio.create_task(threads())
        await task
        await other

    with pytest.raises(Deadlock) as caught:
        simulate(main)
    text = str(caught.value)
    assert "main#1 waits for the end of gathers#2" in text
    assert "gathers#2 waits for the end of parked#4, parked#5" in text
    assert "threads#3 waits for a thread, and a loop of virtual time has none" in text


def test_the_place_is_found_inside_a_context_manager_made_of_a_generator():
    @asynccontextmanager
    async def opened():
        await asyncio.get_running_loop().create_future()
        yield

    async def main():
        async with opened():
            pass

    with pytest.raises(Deadlock) as caught:
        simulate(main)
    assert " in opened)" in caught.value.waiting[0]


def test_a_livelock_names_the_spinning_task():
    async def main():
        async def spin():
            while True:
                await asyncio.sleep(0)

        await asyncio.create_task(spin(), name="busy")

    with pytest.raises(Livelock, match="the clock has not moved") as caught:
        simulate(main, loop=SimLoop(limit=1000))
    assert [line.split(" (")[0] for line in caught.value.running] == ["busy#2 is ready"]


def test_tasks_left_over_are_cancelled_and_may_clean_up():
    cleaned = []

    async def main():
        async def leftover():
            try:
                await asyncio.sleep(10**6)
            finally:
                await asyncio.sleep(1)
                cleaned.append(True)

        task = asyncio.create_task(leftover())
        await asyncio.sleep(0.1)
        assert not task.done()

    simulate(main)
    assert cleaned == [True]


# -- under other runners


def test_the_factory_serves_a_plain_runner():
    def answers(seed):
        with asyncio.Runner(loop_factory=loop_factory(seed)) as runner:
            return runner.run(racy_counter())

    assert {answers(seed) for seed in range(20)} == {1, 2}
    assert [answers(seed) for seed in range(20)] == [
        simulate(racy_counter, seed) for seed in range(20)
    ]


pytest_plugins = ["pytester"]

ASYNC_TEST = """
    import asyncio, pytest

    async def test_a_day(seen):
        loop = asyncio.get_running_loop()
        await asyncio.sleep(86400)
        assert loop.time() >= 86400
        seen.append(loop.seed)
"""


@pytest.mark.parametrize("mode", ["auto", "strict"])
def test_it_runs_tests_of_pytest_asyncio(pytester, mode):
    pytester.makeconftest("""
        import pytest
        from kvactors.testing import loop_factory

        def pytest_asyncio_loop_factories(config, item):
            return {f"seed{n}": loop_factory(n) for n in range(3)}

        collected = []

        @pytest.fixture
        def seen():
            return collected

        def pytest_sessionfinish():
            assert collected == [0, 1, 2]
    """)
    pytester.makepyfile(
        test_day="import pytest\npytestmark = pytest.mark.asyncio\n"
        + ASYNC_TEST.replace("\n    ", "\n")
    )
    result = pytester.runpytest_inprocess(
        "-o",
        f"asyncio_mode={mode}",
        "-o",
        "asyncio_default_fixture_loop_scope=function",
        "-p",
        "no:cacheprovider",
        "-v",
        "test_day.py",
    )
    result.assert_outcomes(passed=3)
    result.stdout.fnmatch_lines(["*test_a_day?seed2?*PASSED*"])


def test_it_runs_tests_of_anyios_plugin(pytester):
    pytester.makeconftest("""
        import pytest
        from kvactors.testing import loop_factory

        @pytest.fixture(params=range(3))
        def anyio_backend(request):
            return "asyncio", {"loop_factory": loop_factory(request.param)}

        @pytest.fixture
        def seen():
            return []
    """)
    pytester.makepyfile(
        test_day="import pytest\npytestmark = pytest.mark.anyio\n"
        + ASYNC_TEST.replace("\n    ", "\n")
    )
    result = pytester.runpytest_inprocess("-p", "no:asyncio", "-p", "no:cacheprovider", "-q")
    result.assert_outcomes(passed=3)
