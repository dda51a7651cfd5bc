"""Entries of a file store's table, and its first page."""

from __future__ import annotations

import asyncio
import hashlib
import os
import subprocess
import sys
from pathlib import Path

import msgspec
import pytest

from kvactors.errors import StoreError
from kvactors.identity import Lineage, RequestScope, StoreIdentity
from kvactors.storage.file import table as table_module
from kvactors.storage.file.store import FileBackend
from kvactors.storage.file.table import (
    BODY,
    ENTRY_BYTES,
    PAGE,
    PARENT,
    SALT,
    WRITTEN_AT,
    Damaged,
    Meta,
    checksum_of,
    entry_bytes_for,
    entry_in,
    fields_of,
    fields_of_lineage,
    lineage_in,
    meta_of,
    room_beside,
    salt_in,
    scan,
)
from kvactors.storage.inspect import inspect, prune
from kvactors.storage.messages import Outcome
from kvactors.testing.store_contract import Bench, key
from tests.storage.helpers import OK, PRINT, SIZE, at_step, entry_of, opened

META = Meta(
    PRINT.hex(), SIZE, 8192, 16, model="m/7b", namespace="default", rank=1, ranks=4, generation=3
)
KEY = bytes(range(32))


def entry(sequence: int = 7, generation: int = 3, fields=None) -> bytes:
    return entry_of(META, KEY, 123, sequence, generation, fields)


@pytest.mark.parametrize("at", range(0, ENTRY_BYTES, 7))
def test_an_entry_with_a_flipped_bit_is_none(at):
    raw = bytearray(entry())
    raw[at] ^= 1
    assert entry_in(bytes(raw), 0, META) is None


@pytest.mark.parametrize(
    ("sequence", "good"), [(2**63 - 1, True), (2**63, False), (2**64 - 1, False)]
)
def test_an_entry_whose_sequence_number_has_no_successor_is_none(sequence, good):
    assert (entry_in(entry(sequence), 0, META) is not None) == good


def test_fields_end_where_one_is_cut_short():
    raw = entry(fields={1: b"12345678", 2: b"1234"})
    cut = raw[:12] + (14).to_bytes(4, "little") + raw[16:]
    assert fields_of(cut) == {1: b"12345678"}


def test_a_scan_distinguishes_torn_entries_and_those_of_earlier_generations():
    table = entry(9) + bytes(ENTRY_BYTES) + entry(5) + entry(1, generation=2) + b"x" * ENTRY_BYTES
    found = scan(table, META, first=10)
    assert [(one.slot, one.sequence) for one in found.found] == [(12, 5), (10, 9)]
    assert found.torn == 1


# -- Lineages in table entries, and of objects that are being written.


LINEAGE = Lineage(bytes(32), b"1234" * 4, b"image", RequestScope("adapter", lora_id=7))


def test_a_lineage_of_another_key_is_none():
    fields = fields_of_lineage(LINEAGE, 1000)
    assert lineage_in(fields, bytes(32)) is None
    assert lineage_in({}, LINEAGE.block_hash()) is None
    assert lineage_in(fields | {PARENT: b"short"}, LINEAGE.block_hash()) is None


# -- The file store's format: golden bytes, damage to the first page, identities, generations, and
# what is private.


def rewritten(page: bytes, **changes) -> bytes:
    """A first page with other values and a right checksum."""
    import xxhash

    body = msgspec.json.encode({**msgspec.json.decode(page[:BODY]), **changes}).ljust(BODY, b"\n")
    return body + xxhash.xxh3_64_intdigest(body).to_bytes(8, "little")


# -- bytes


def test_golden_bytes_of_the_first_page():
    page = META.page()
    assert len(page) == PAGE
    assert page.rstrip(b"\n")[: page.index(b"}") + 1] == (
        b'{"digest":"000102030405060708090a0b0c0d0e0f101112131415161718191a1b1c1d1e1f","block_bytes":5000,"stride":8192,'
        b'"slots_per_slab":16,"model":"m/7b","namespace":"default","rank":1,"ranks":4,"generation":3,"entry_bytes":192,'
        b'"slab_layout":"slots","magic":"KVACTORS slabs","version":2}'
    )
    assert page[-8:].hex() == "c903c510b3048a74"
    assert meta_of(page, "") == META


def test_golden_bytes_of_an_entry():
    entry = entry_of(
        META, bytes(range(100, 132)), 0x1122334455667788, 7, 3, {1: b"\x01" * 8, 900: b"later"}
    )
    assert entry.hex() == (
        "4b564143544f5253"
        "02000000"
        "15000000"
        "000102030405060708090a0b0c0d0e0f101112131415161718191a1b1c1d1e1f"
        "6465666768696a6b6c6d6e6f707172737475767778797a7b7c7d7e7f80818283"
        "8813000000000000"
        "8877665544332211"
        "0700000000000000"
        "0300000000000000"
        "01000800"
        "0101010101010101"
        "84030500"
        "6c61746572" + "00" * 51 + "fcba42cea85ace3e"
    )
    assert fields_of(entry) == {1: b"\x01" * 8, 900: b"later"}
    [one] = scan(bytes(192) + entry, META).found
    assert (one.slot, one.key, one.sequence, checksum_of(one.mark)) == (
        1,
        bytes(range(100, 132)),
        7,
        0x1122334455667788,
    )


def test_metadata_of_later_versions_is_skipped_and_invalid_metadata_left_out():
    wide = msgspec.structs.replace(META, entry_bytes=512)
    entry = entry_of(wide, key(1), 5, 1, 3, {7: bytes(300), 1: b"12345678", 9: bytes(300)})
    assert fields_of(entry) == {7: bytes(300), 1: b"12345678"}
    assert [one.key for one in scan(entry, wide).found] == [key(1)]
    assert fields_of(entry_of(META, key(1), 5, 1, 3, {7: bytes(80)})) == {}
    assert meta_of(rewritten(META.page(), tokens_of_paths=True), "") == META, (
        "fields of a later version are skipped"
    )


async def test_a_store_whose_entries_have_another_size_is_read_and_written(tmp_path, monkeypatch):
    async with opened(tmp_path) as bench:
        table = bench.store.files.folder / "table"
    table.write_bytes(rewritten(table.read_bytes()[:PAGE], entry_bytes=640))
    async with opened(tmp_path) as bench:
        assert await bench.put(1, 2, 3) == [OK] * 3
    async with opened(tmp_path) as bench:
        assert bench.store.files.meta.entry_bytes == 640
        assert await bench.get(1, 2, 3) == [OK] * 3


# -- damage to the first page


@pytest.mark.parametrize(
    "changes",
    [
        {"slots_per_slab": 0},
        {"slots_per_slab": 2**31},
        {"slots_per_slab": 2**64 - 1},
        {"slots_per_slab": -1},
        {"stride": 0},
        {"stride": 4097},
        {"stride": 2**60},
        {"block_bytes": 0},
        {"block_bytes": 2**62},
        {"entry_bytes": 0},
        {"entry_bytes": 2**40},
        {"entry_bytes": 193},
        {"generation": -1},
        {"generation": 2**63},
        {"digest": "00"},
        {"digest": "zz"},
        {"magic": "other"},
        {"version": 1},
        {"slots_per_slab": "many"},
    ],
)
def test_values_out_of_range_are_damage(changes):
    with pytest.raises(Damaged):
        meta_of(rewritten(META.page(), **changes), "here")


async def stored(folder: Path) -> Path:
    """Make a store with two objects and close it. Returns its table."""
    async with opened(folder) as bench:
        await bench.put(1, 2)
        return bench.store.files.folder / "table"


@pytest.mark.parametrize(
    "how",
    ["bit 0", "bit 901", "bit 4095", "torn", "zeros", "short", "empty", "zero slots", "huge slots"],
)
async def test_damage_to_the_first_page_costs_the_contents_and_not_the_start(tmp_path, how):
    table = await stored(tmp_path)
    raw = bytearray(table.read_bytes())
    if how.startswith("bit"):
        raw[int(how[4:])] ^= 4
    elif how == "torn":
        raw[:512] = META.page()[:512]
    elif how == "zeros":
        raw[:PAGE] = bytes(PAGE)
    elif how.endswith("slots"):
        page = bytes(raw[:PAGE]).replace(
            b'"slots_per_slab":',
            b'"slots_per_slab":' + (b"0" if how == "zero slots" else b"99999999999999"),
        )
        raw[:PAGE] = page[:PAGE]
    else:
        del raw[PAGE // 2 if how == "short" else 0 :]
    table.write_bytes(raw)
    for number in (1, 2):  # the second start finds a whole table again
        async with opened(tmp_path) as bench:
            assert await bench.get(number) == [Outcome.MISS if number == 1 else OK]
            assert await bench.put(2) == [OK if number == 1 else Outcome.EXISTS]
    assert (table.parent / "table.damaged").exists() == (how != "empty")


async def test_every_bit_of_the_first_page_may_flip(tmp_path):
    table = await stored(tmp_path)
    raw = table.read_bytes()
    for at in (*range(0, 300, 7), *range(PAGE - 9, PAGE)):
        with pytest.raises(Damaged):
            meta_of(raw[:at] + bytes([raw[at] ^ 1 << at % 8]) + raw[at + 1 : PAGE], "")


async def test_a_version_1_store_and_a_later_one_are_errors_that_name_them(tmp_path):
    table = await stored(tmp_path)
    page = table.read_bytes()[:PAGE]
    old = b'{"fingerprint":"00","block_bytes":5000,"stride":8192,"slots_per_slab":9,"magic":"KVACTORS slabs","version":1}'
    for first, version in ((old.ljust(PAGE, b"\n"), 1), (rewritten(page, version=3), 3)):
        table.write_bytes(first)
        with pytest.raises(
            StoreError, match=f"format version {version}, this is version 2.*store prune"
        ):
            await FileBackend(tmp_path, PRINT, SIZE).open()
        assert table.read_bytes() == first, "left as it is"
        assert [one.state for one in inspect(tmp_path)] == ["other version"]
    assert [one.why for one in prune(tmp_path)] == ["format version 3"]
    assert not table.exists()


# -- identities


IDENTITY = StoreIdentity("model-a", "default", bytes(range(32)), 0, 2)


def store_of(directory: Path, identity: StoreIdentity) -> FileBackend:
    return FileBackend(identity.folder(directory), identity.digest, SIZE, 20, identity=identity)


OTHERS = [
    IDENTITY._replace(model="model-b"),
    IDENTITY._replace(namespace="other"),
    IDENTITY._replace(rank=1),
    IDENTITY._replace(ranks=4),
    IDENTITY._replace(fingerprint=bytes(32)),
]


@pytest.mark.parametrize("other", OTHERS, ids=["model", "namespace", "rank", "ranks", "layout"])
@pytest.mark.parametrize(
    "depth",
    [1, 2, 3, 4],
    ids=["identity folder", "rank folder", "namespace folder", "model folder"],
)
async def test_a_folder_moved_to_another_identitys_place_gives_misses_or_an_error(
    tmp_path, other, depth
):
    store = store_of(tmp_path, IDENTITY)
    await store.open()
    from kvactors.device.arena import Arena

    arena = Arena(4, SIZE)
    await Bench(store, arena).put(1, 2)
    await store.close()
    second = store_of(tmp_path, other)
    source, target = store.files.folder, second.files.folder
    for _ in range(depth - 1):
        source, target = source.parent, target.parent
    if source != target:
        target.parent.mkdir(parents=True, exist_ok=True)
        source.rename(target)
    if depth == 1:  # the folder is named by the identity: one moved there is found, and refused
        with pytest.raises(StoreError, match="belongs to another store: it is of model 'model-a'"):
            await second.open()
    else:
        await second.open()
        assert await Bench(second, arena).get(1, 2) == [Outcome.MISS] * 2
        await second.close()
    arena.close()


async def test_an_object_of_another_identity_in_the_table_is_not_found(tmp_path):
    """Whole entries and payloads copied from one store into another."""
    async with opened(tmp_path / "a") as bench:
        await bench.put(1, 2)
        one = bench.store.files.folder
    async with opened(tmp_path / "b", print_=bytes(32)) as bench:
        await bench.put(3, 4)
        other = bench.store.files.folder
    page = (other / "table").read_bytes()[:PAGE]
    (other / "table").write_bytes(page + (one / "table").read_bytes()[PAGE:])
    (other / "slab-0000").write_bytes((one / "slab-0000").read_bytes())
    async with opened(tmp_path / "b", print_=bytes(32)) as bench:
        assert bench.store.keys() == []
        assert await bench.get(1, 2, 3) == [Outcome.MISS] * 3


# -- private


def modes(folder: Path) -> set[str]:
    return {oct(path.stat().st_mode & 0o777) for path in folder.iterdir()}


@pytest.mark.parametrize("umask", [0o000, 0o022, 0o277])
async def test_files_are_0600_and_folders_0700_under_any_umask(tmp_path, umask):
    before = os.umask(umask)
    try:
        async with opened(tmp_path / "a" / "b") as bench:
            await bench.put(1)
            folder = bench.store.files.folder
    finally:
        os.umask(before)
    assert modes(folder) == {"0o600"}
    assert {
        oct(path.stat().st_mode & 0o777) for path in (tmp_path / "a", tmp_path / "a" / "b", folder)
    } == {"0o700"}


async def test_files_that_were_readable_by_all_are_closed(tmp_path):
    folder = (await stored(tmp_path)).parent
    for path in folder.iterdir():
        path.chmod(0o644)
    folder.chmod(0o755)
    async with opened(tmp_path) as bench:
        assert await bench.get(1) == [OK]
        assert modes(folder) == {"0o600"}
        assert folder.stat().st_mode & 0o777 == 0o700


def digests(folder):
    return {path.name: hashlib.sha256(path.read_bytes()).hexdigest() for path in folder.iterdir()}


@pytest.mark.parametrize("name", ["lock", "table", "slab-0000", "folder"])
@pytest.mark.parametrize("there", [True, False])
async def test_a_planted_link_is_an_error_and_its_target_is_untouched(tmp_path, name, there):
    folder = (await stored(tmp_path / "store")).parent
    target = tmp_path / "precious"
    if name == "folder":
        folder.rename(tmp_path / "moved")
        folder.symlink_to(tmp_path / "moved" if there else target)
        held = digests(tmp_path / "moved")
    else:
        if there:
            target.write_bytes(b"x" * 900)
        (folder / name).unlink()
        (folder / name).symlink_to(target)
    store = FileBackend(tmp_path / "store", PRINT, SIZE)
    try:
        with pytest.raises(StoreError, match="symbolic link"):
            await store.open()
    finally:
        await store.close()
    if name == "folder":
        assert digests(tmp_path / "moved") == held
    elif there:
        assert target.read_bytes() == b"x" * 900, "the target was written"
    assert target.exists() == (there and name != "folder")


async def test_a_pipe_in_the_place_of_a_file_is_an_error_and_no_hang(tmp_path):
    folder = (await stored(tmp_path)).parent
    (folder / "table").unlink()
    os.mkfifo(folder / "table")
    with pytest.raises(StoreError, match="not a regular file"):
        await FileBackend(tmp_path, PRINT, SIZE).open()


async def test_a_pipe_in_the_place_of_a_slab_or_of_another_table_is_no_hang(tmp_path):
    folder = (await stored(tmp_path)).parent
    (folder.parent / "other").mkdir()
    os.mkfifo(folder.parent / "other" / "table")
    async with opened(tmp_path, capacity=8):
        pass
    (folder / "slab-0000").unlink()
    os.mkfifo(folder / "slab-0000")
    with pytest.raises(StoreError, match="not a regular file"):
        inspect(tmp_path, verify=True)


# -- clear


async def test_a_clear_is_durable_when_it_returns(tmp_path):
    """A process is killed (SIGKILL) right after `clear` returned. The next one finds only the
    objects written after the clear."""
    script = f"""
import asyncio, os, signal, sys
sys.path[:0] = {sys.path!r}
from tests.storage.helpers import opened
from pathlib import Path
async def main():
    async with opened(Path({str(tmp_path)!r})) as bench:
        await bench.put(*range(30))
        writing = asyncio.create_task(bench.store.write([bytes([9]) * 32, bytes([8]) * 32], bench.views(2, 40), lambda: False))
        await asyncio.sleep(0)
        await bench.store.clear()
        if {{after}}: await bench.put(100, 101)
        os.kill(os.getpid(), signal.SIGKILL)
asyncio.run(main())
"""
    for after in (False, True):
        command = [sys.executable, "-P", "-c", script.replace("{after}", str(after))]
        done = await asyncio.to_thread(subprocess.run, command, capture_output=True, text=True)
        assert done.returncode == -9, done.stderr
        async with opened(tmp_path) as bench:
            assert bench.store.keys() == ([key(100), key(101)] if after else [])
            assert await bench.get(100, 101) == [OK if after else Outcome.MISS] * 2


async def test_a_clear_that_the_disk_refuses_is_an_error_and_nothing_is_hit_all_the_same(
    tmp_path, monkeypatch
):
    async with opened(tmp_path) as bench:
        await bench.put(1, 2)

        def refuse(*_args):
            raise OSError(5, "Input/output error")

        for call in ("pwrite", "fdatasync"):
            with monkeypatch.context() as patch:
                patch.setattr(os, call, refuse)
                with pytest.raises(StoreError, match="could not be cleared"):
                    await bench.store.clear()
            assert bench.store.clear_pending
            assert await bench.get(1, 2) == [Outcome.MISS] * 2
        await bench.store.clear()
        assert not bench.store.clear_pending
        assert await bench.put(3) == [OK]
    async with opened(tmp_path) as bench:
        assert bench.store.keys() == [key(3)]
        assert bench.store.generation == 3


async def no_erasure(_slots):
    """In place of `SlabIo.erase`."""


async def test_a_batch_that_was_being_written_when_the_store_was_cleared_does_not_come_back(
    tmp_path, monkeypatch
):
    """Stopped at each thread call of the batch in turn. The process 'ends' there, without any later
    erasure."""
    for step in range(1, 12):
        folder = tmp_path / str(step)
        async with opened(folder) as bench:
            with at_step(bench.store, step, bench.store.clear) as calls:
                await bench.put(*range(4))
            if calls[0] < step:
                break
            monkeypatch.setattr(bench.store.io, "erase", no_erasure)
            found = await bench.get(*range(4))
        async with opened(folder) as bench:
            assert bench.store.keys() == []
            assert found == [Outcome.MISS] * 4
    assert step > 2


async def test_two_clears_at_once_end_in_the_later_generation(tmp_path):
    async with opened(tmp_path) as bench:
        await bench.put(1)
        await asyncio.gather(
            bench.store.clear(), bench.store.clear(), bench.store.clear(generation=10)
        )
        assert bench.store.generation == 10
        await bench.put(2)
    async with opened(tmp_path) as bench:
        assert bench.store.generation == 10
        assert bench.store.keys() == [key(2)]


assert table_module.VERSION == 2


# -- the inputs of block hashes


def test_a_lineage_in_an_entry_byte_for_byte():
    """Of docs/store_format.md: two tokens, a media item and an adapter."""
    meta = Meta("00" * 32, 4096, 4096, 1, entry_bytes=entry_bytes_for(2))
    lineage = Lineage(
        b"P" * 32, bytes.fromhex("0100000002000000"), b"extra", RequestScope("ad", lora_id=-2)
    )
    fields = {WRITTEN_AT: (5).to_bytes(8, "little")} | fields_of_lineage(
        lineage, room_beside(meta, {WRITTEN_AT: bytes(8)})
    )
    entry = entry_of(meta, lineage.block_hash(), 1, 2, 3, fields)
    area = (
        "0100"
        "0800"
        "0500000000000000"
        "0200"
        "2000" + "50" * 32 + "0300"
        "0800"
        "0100000002000000"
        "0400"
        "0500" + b"extra".hex() + "0500"
        "0200" + b"ad".hex() + "0600"
        "0800"
        "feffffffffffffff"
    )
    assert len(entry) == meta.entry_bytes == 312
    assert int.from_bytes(entry[12:16], "little") == len(area) // 2
    assert entry[112 : 112 + len(area) // 2].hex() == area
    assert (
        lineage.block_hash()
        == hashlib.sha256(b"P" * 32 + b"\x05\0\0\0extra" + lineage.tokens).digest()
    )
    assert lineage_in(fields_of(entry), lineage.block_hash()) == lineage
    assert lineage_in(fields_of(entry), bytes(32)) is None


def test_the_number_of_a_salt_in_an_entry_byte_for_byte():
    """Of docs/store_format.md: in an entry of a store without lineages, and of one with them."""
    for size in (0, 2):
        meta = Meta("00" * 32, 4096, 4096, 1, entry_bytes=entry_bytes_for(size))
        fields = {WRITTEN_AT: (5).to_bytes(8, "little"), SALT: (0x0102).to_bytes(8, "little")}
        entry = entry_of(meta, b"K" * 32, 1, 2, 3, fields)
        assert entry[112:136].hex() == "010008000500000000000000" + "070008000201000000000000"
        assert salt_in(fields_of(entry)) == 0x0102
    assert salt_in(fields_of(entry_of(meta, b"K" * 32, 1, 2, 3, {WRITTEN_AT: bytes(8)}))) is None
    for wrong in (b"", b"1234567", b"123456789"):
        assert salt_in(fields_of(entry_of(meta, b"K" * 32, 1, 2, 3, {SALT: wrong}))) is None


@pytest.mark.parametrize("block_size", [1, 16, 64, 16_000, 20_000])
@pytest.mark.parametrize("name", ["a" * 124, "a" * 140, "a" * 70_000])
def test_a_lineage_is_kept_whole_or_not_at_all(block_size, name):
    meta = Meta("00" * 32, 4096, 4096, 1, entry_bytes=entry_bytes_for(block_size))
    lineage = Lineage(b"P" * 32, bytes(4 * block_size), b"", RequestScope(name))
    fields = fields_of_lineage(lineage, room_beside(meta, {WRITTEN_AT: bytes(8)}))
    entry = entry_of(meta, lineage.block_hash(), 1, 2, 3, {WRITTEN_AT: bytes(8)} | fields)
    assert lineage_in(fields_of(entry), lineage.block_hash()) == (lineage if fields else None)
    assert bool(fields) == (block_size <= 16_000 and len(name) <= 124)
