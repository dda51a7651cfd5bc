"""Results of the file store's calls: one for each object of a batch, and a clear that touches no
other file."""

from __future__ import annotations

from kvactors.storage.messages import Outcome
from kvactors.testing.store_contract import GOOD, key, never
from tests.storage.helpers import MISS, OK, SIZE, opened


async def test_an_object_that_is_stored_is_not_written_again(tmp_path):
    async with opened(tmp_path) as bench:
        assert await bench.put(1) == [OK]
        slots = bench.store.medium.statistics().free
        (view,) = bench.views(1)
        view[:] = b"\xee" * SIZE
        assert (await bench.store.write([key(1)], [view], never)).outcomes[0] in GOOD
        assert bench.store.medium.statistics().free == slots
        assert await bench.get(1, 2) == [OK, MISS], "a name stands for one content"


async def test_a_query_counts_the_leading_run_and_no_object_behind_a_gap(tmp_path):
    async with opened(tmp_path) as bench:
        await bench.put(0, 1, 3)
        keys = [key(number) for number in range(4)]
        assert bench.store.probe(keys) == 2
        assert bench.store.probe(keys[2:]) == 0
        assert bench.store.probe([]) == 0


async def test_a_batch_with_too_few_views_moves_those_it_has(tmp_path):
    async with opened(tmp_path) as bench:
        await bench.put(1, 2)
        keys, short = [key(3), key(4)], bench.views(1)
        wrote = await bench.store.write(keys, short, never)
        assert list(wrote.outcomes) == [OK, Outcome.REFUSED]
        report = await bench.store.read([key(1), key(2)], short, never)
        assert list(report.outcomes) == [OK, Outcome.REFUSED]
        assert bytes(short[0]) == bench.pattern(1)
        assert bench.store.probe([key(4)]) == 0
        assert bench.store.probe([key(2)]) == 1, "the object is there, its view was not"


async def test_empty_batches_are_no_error(tmp_path):
    async with opened(tmp_path) as bench:
        before = bench.store.statistics()
        assert list((await bench.store.read([], [], never)).outcomes) == []
        assert list((await bench.store.write([], [], never)).outcomes) == []
        await bench.store.remove([])
        assert bench.store.statistics() == before


async def test_a_clear_forgets_the_objects_and_touches_no_other_file(tmp_path):
    """FastDeploy's removes every *.pd below its folder, and refuses folders such as /."""
    async with opened(tmp_path) as bench:
        folder = bench.store.files.folder
        others = [tmp_path / "a.pd", folder / "b.pd", folder.parent / "slab-0000"]
        for number, path in enumerate(others):
            path.write_bytes(bytes([number]) * 99)
        await bench.put(1, 2)
        await bench.store.clear()
        assert await bench.get(1, 2) == [MISS, MISS]
    async with opened(tmp_path) as bench:
        assert bench.store.keys() == []
        assert await bench.put(1) == [OK]
    for number, path in enumerate(others):
        assert path.read_bytes() == bytes([number]) * 99
