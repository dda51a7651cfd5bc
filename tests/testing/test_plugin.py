"""The pytest plugin: seeds, fixtures, and the report of a failure."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

import kvactors
from kvactors.testing import Sim, plugin

assert Sim, (
    plugin
)  # imported before the inner sessions begin: what they import is forgotten after them, and numpy comes only once

pytest_plugins = ["pytester"]

ROOT = Path(kvactors.__file__).parents[1]
OPTIONS = (
    "-p",
    "kvactors.testing",
    "-p",
    "no:hypothesispytest",
    "-p",
    "no:cacheprovider",
    "-o",
    "asyncio_default_fixture_loop_scope=function",
)


def run(pytester, *arguments):
    return pytester.runpytest_inprocess(*OPTIONS, *arguments)


def section(result):
    """The failure's section of ours, as a list of lines."""
    lines = result.outlines
    start = next(i for i, line in enumerate(lines) if re.fullmatch("-+ kvactors -+", line))
    stop = next(i for i, line in enumerate(lines) if i > start and re.match("[=_]{9}", line))
    return lines[start + 1 : stop]


SEEDS = """
    import anyio

    def test_simulated(kv_sim):
        async def main():
            async with kv_sim.open() as cache:
                await anyio.sleep(3600)
                return kv_sim.seed
        assert kv_sim.run(main) == kv_sim.seed

    def test_plain():
        pass
"""


def test_a_simulated_test_runs_once_for_each_seed(pytester):
    pytester.makepyfile(SEEDS)
    run(pytester).assert_outcomes(passed=6)
    result = run(pytester, "--kv-seeds", "3", "-v")
    result.assert_outcomes(passed=4)
    result.stdout.fnmatch_lines(["*test_simulated?seed2?*"])
    result = run(pytester, "--kv-seed", "1234", "-v")
    result.assert_outcomes(passed=2)
    result.stdout.fnmatch_lines(["*test_simulated?seed1234?*"])


def test_no_seeds_is_a_mistake(pytester):
    pytester.makepyfile(SEEDS)
    result = run(pytester, "--kv-seeds", "0")
    assert result.ret == pytest.ExitCode.USAGE_ERROR
    result.stderr.fnmatch_lines(["*--kv-seeds: must be at least 1, not 0*"])


def test_a_deadlock_that_only_a_deadline_ended_is_reported_too(pytester):
    pytester.makepyfile("""
        def test_it(kv_sim):
            async def main():
                async with kv_sim.open() as cache:
                    await cache.pause()
                    await cache.acquire("r1", [1, 2, 3], deadline=2.0)
            kv_sim.run(main)
    """)
    told = section(run(pytester, "--kv-seed", "0"))
    assert re.fullmatch(r"since 0\.\d{4} s everybody waits for time-outs alone", told[2])
    assert any("that concern request r1:" in line for line in told)
    assert any(
        line.startswith("request r1 (main#1) waits for the answer to Acquire by prefix_index")
        for line in told
    )


def test_an_unclean_end_names_the_leases(pytester):
    pytester.makepyfile("""
        import pytest
        from kvactors.testing import Unclean

        @pytest.mark.filterwarnings("ignore:lease of 'dropped'")
        @pytest.mark.parametrize("kept", [True, False])
        def test_it(kv_sim, kept):
            async def main():
                async with kv_sim.open() as cache:
                    lease = await cache.acquire("held" if kept else "dropped", [1, 2, 3])
                    if not kept:
                        lease = None
            with pytest.raises(Unclean) as caught:
                kv_sim.run(main)
            text = (
                "'held' was never finished" if kept else "'dropped' was dropped and never finished"
            )
            assert caught.value.problems == [f"the lease of {text}"]

        def test_a_violated_invariant_is_named(kv_sim):
            async def main():
                async with kv_sim.open() as cache:
                    cache.check = lambda: ["prefix_index: two and two are five"]
            with pytest.raises(Unclean, match="two and two are five"):
                kv_sim.run(main)

        def test_unless_asked_not_to_look(kv_sim):
            async def main():
                async with kv_sim.open(checked=False) as cache:
                    cache.kept = await cache.acquire("held", [1, 2, 3])
            kv_sim.run(main)
    """)
    run(pytester, "--kv-seeds", "2").assert_outcomes(passed=8)


def test_settings_and_runs(pytester):
    pytester.makepyfile("""
        import pytest

        @pytest.fixture
        def kv_config():
            return {"device": {"num_blocks": 7}, "cache": {"default_deadline_s": 3.0}}

        def test_it(kv_sim):
            async def main(**tables):
                async with kv_sim.open(**tables) as cache:
                    return cache.config.device.num_blocks, cache.config.cache.default_deadline_s, cache.block_size
            assert kv_sim.run(main) == (7, 3.0, 8)
            assert kv_sim.config(device={"num_blocks": 9}).device.num_blocks == 9

            async def other():
                return await main(device={"num_blocks": 5})
            assert kv_sim.run(other) == (5, 3.0, 8)

        def test_stored_blocks_are_found_by_the_next_cache_of_a_run_and_not_of_the_next_run(kv_sim):
            async def main():
                hits = []
                for life in range(2):
                    async with kv_sim.open() as cache:
                        async with await cache.acquire("r", list(range(24))) as lease:
                            await lease.wait_ready()
                            hits.append(lease.hits.storage)
                            cache.device.fill(lease.block_table, lease.hashes(0, 3))
                            await lease.commit(24)
                return hits
            assert kv_sim.run(main) == [0, 2]
            first = str(kv_sim.trace)
            assert kv_sim.run(main) == [0, 2]
            assert str(kv_sim.trace) == first

        async def test_a_real_one(kv_cache):
            assert kv_cache.config.device.num_blocks == 7
    """)
    run(pytester, "--kv-seeds", "2", "-o", "asyncio_mode=auto").assert_outcomes(passed=5)


FAULTS = """
    import anyio, pytest
    from kvactors.testing import Fault, FaultPlan

    async def serve(cache, name):
        async with await cache.acquire(name, list(range(40)), deadline=1.0) as lease:
            await lease.wait_ready()
            cached = lease.cached_tokens // 8
            cache.device.fill(lease.block_table[cached:], lease.hashes(cached, 5))
            await lease.commit(40)
        return lease.hits

    async def twice(kv_sim, between):
        # the second life finds everything in the store
        async with kv_sim.open(host={"slots": 0}) as cache:
            await serve(cache, "first")
        async with kv_sim.open(host={"slots": 0}) as cache:
            between(kv_sim.faults)
            return await serve(cache, "second")

    @pytest.mark.parametrize("kind, hits", [(None, 4), ("store_down", 0), ("store_hang", 0), ("bit_flip", 0), ("object_lost", 0)])
    def test_of_the_store(kv_sim, kv_faults, kind, hits):
        def between(faults):
            assert faults is kv_faults
            plan = FaultPlan(() if kind is None else (Fault(kind, duration=2.0, amount=5),))
            faults.plan(plan)
        async def main():
            return (await twice(kv_sim, between)).storage
        assert kv_sim.run(main) == hits
        assert [fault.kind for fault in kv_faults.befallen] == ([kind] if kind else [])

    def test_drawn(kv_sim, kv_faults):
        plan = kv_faults.draw(5)
        assert sum(fault.at < 0.1 for fault in plan.fault) == 5
        assert sum(fault.at < 0.3 for fault in plan.fault) == 10
        assert plan == kv_faults.draw(5)
        async def main():
            async with kv_sim.open() as cache:
                kv_faults.plan(plan)
                for number in range(5):
                    await serve(cache, f"r{number}")
                    await anyio.sleep(0.03)
            return [fault.kind for fault in kv_faults.befallen]
        begun = kv_sim.run(main)
        assert len(begun) >= 5
        planned = [fault.kind for fault in plan.fault][:len(begun)]
        assert sorted(begun) == sorted(planned)

    def test_refused(kv_faults):
        with pytest.raises(ValueError, match="rank_cut cannot occur in"):
            kv_faults.plan(FaultPlan((Fault("rank_cut"),)))
"""


def test_the_faults_fixture_injects_faults(pytester):
    pytester.makepyfile(FAULTS)
    run(pytester, "--kv-seeds", "3").assert_outcomes(passed=21)


CACHE = """
    import pytest, kvactors
    pytestmark = pytest.mark.{mark}

    async def test_it(kv_cache):
        async with await kv_cache.acquire("r", list(range(20))) as lease:
            await lease.wait_ready()
            assert lease.cached_tokens == 0
            await lease.commit(20)

    async def test_unclean(kv_cache):
        kv_cache.kept = await kv_cache.acquire("held", list(range(20)))
"""


@pytest.mark.parametrize("mode", ["auto", "strict"])
def test_a_real_cache_under_pytest_asyncio(pytester, mode):
    pytester.makepyfile(CACHE.format(mark="asyncio"))
    result = run(pytester, "-o", f"asyncio_mode={mode}")
    result.assert_outcomes(passed=2, errors=1)
    result.stdout.fnmatch_lines(["*Unclean: the lease of 'held' was never finished*"])


def test_a_real_cache_under_anyios_plugin(pytester):
    pytester.makeconftest(
        "import pytest\n\n@pytest.fixture\ndef anyio_backend():\n    return 'asyncio'\n"
    )
    pytester.makepyfile(CACHE.format(mark="anyio"))
    result = run(pytester, "-p", "no:asyncio")
    result.assert_outcomes(passed=2, errors=1)


# -- how it is found


def outside(pytester, *arguments):
    """A pytest in a separate process, in which kvactors is installed with its entry point."""
    info = pytester.path / "site" / "kvactors-0.dist-info"
    info.mkdir(parents=True)
    info.joinpath("METADATA").write_text("Metadata-Version: 2.1\nName: kvactors\nVersion: 0\n")
    info.joinpath("entry_points.txt").write_text("[pytest11]\nkvactors = kvactors.testing.plugin\n")
    environment = {**os.environ, "PYTHONPATH": f"{info.parent}{os.pathsep}{ROOT}"}
    command = [sys.executable, "-m", "pytest", "-p", "no:cacheprovider", "-q", *arguments]
    return subprocess.run(
        command,
        cwd=pytester.path,
        env=environment,
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
    )


@pytest.mark.parametrize("brought", [(), ("-p", "kvactors.testing"), ("-p", "kvactors")])
def test_it_is_there_once_however_it_is_brought(pytester, brought):
    pytester.makepyfile(SEEDS)
    done = outside(pytester, *brought)
    assert "6 passed" in done.stdout, done.stdout + done.stderr


def test_it_can_be_turned_off(pytester):
    pytester.makepyfile(SEEDS)
    assert "fixture 'kv_sim' not found" in outside(pytester, "-p", "no:kvactors").stdout


def test_the_harness_needs_no_pytest():
    program = """
        import sys
        for name in ("pytest", "_pytest", "pytest_asyncio"):
            sys.modules[name] = None
        import kvactors.testing as t
        sim = t.Sim(0)
        async def main():
            async with sim.open() as cache:
                async with await cache.acquire("r", [1, 2, 3]):
                    pass
        sim.run(main)
        for name in t.__all__:
            assert getattr(t, name) is not None
        assert t.minimal(sim.trace, request="r")
        try:
            t.nothing
        except AttributeError as error:
            print(error)
    """
    code = "\n".join(line[8:] for line in program.splitlines())
    done = subprocess.run(
        [sys.executable, "-c", code],
        cwd=ROOT,
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
    )
    assert done.stdout == "module 'kvactors.testing' has no attribute 'nothing'\n", done.stderr


TENSORS = """
    import anyio, numpy, pytest
    from kvactors import GQALayout
    from kvactors.device import TensorDevice

    def tensor_device():
        layout = GQALayout(1, 1, 8, 4, dtype="uint8")
        return TensorDevice(layout, [numpy.zeros((12, 1, 4, 8), numpy.uint8) for _ in range(2)])

    @pytest.fixture
    def kv_device():
        return tensor_device()

    def test_simulated(kv_sim):
        async def main():
            device = tensor_device()
            async with kv_sim.open(device=device) as cache:
                assert cache.device is device
                async with await cache.acquire("a", list(range(48))) as lease:
                    for tensor in device.tensors:
                        tensor[list(lease.block_table)] = 7
                    await lease.commit(48)
            return cache.config.device.num_blocks, cache.block_size
        assert kv_sim.run(main) == (12, 4)

    @pytest.mark.asyncio
    async def test_real(kv_cache, kv_device):
        assert kv_cache.device is kv_device
        assert kv_cache.config.device.num_blocks == 12
"""


def test_an_engine_gives_the_device(pytester):
    pytester.makepyfile(TENSORS)
    run(pytester, "--kv-seeds", "2").assert_outcomes(passed=3)


LEAVING = """
    import asyncio, anyio
    from kvactors.testing import Fault, FaultPlan

    async def forward(cache, lease):
        table = lease.block_table
        await anyio.sleep(0.002)
        cache.device.fill(table, lease.hashes(0, len(table)))

    def test_it(kv_sim, kv_faults):
        async def main():
            async with kv_sim.open() as cache:

                async def serve(number):
                    tokens = list(range(100 * number, 100 * number + 40))
                    async with await cache.acquire(f"r{number}", tokens, wait_for_room=True) as lease:
                        await lease.wait_ready()
                        WAIT
                        await lease.commit(40)

                kv_faults.plan(kv_faults.draw(0, leaves=0.5))
                for turn in range(4):
                    tasks = [asyncio.create_task(serve(10 * turn + n)) for n in range(6)]
                    await asyncio.gather(*tasks, return_exceptions=True)
                    await anyio.sleep(0.02)

        kv_sim.run(main)
"""


def test_a_pass_that_goes_on_after_its_lease_is_found_and_named(pytester):
    gone = "await asyncio.shield(asyncio.create_task(forward(cache, lease)))"
    pytester.makepyfile(LEAVING.replace("WAIT", gone))
    result = run(pytester, "--kv-seeds", "5")
    assert result.parseoutcomes()["failed"] >= 2
    result.stdout.fnmatch_lines(["*device block * was written while no lease held it (that of 'r*"])


def test_a_recorded_pass_is_right_when_clients_leave(pytester):
    recorded = "await cache.record_pass([lease], event=forward(cache, lease))"
    pytester.makepyfile(LEAVING.replace("WAIT", recorded))
    run(pytester, "--kv-seeds", "10").assert_outcomes(passed=10)
