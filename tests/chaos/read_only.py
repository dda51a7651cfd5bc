"""The store's directory becomes read-only under load, and a process opens a store on a file system
that is mounted read-only."""

from __future__ import annotations

import os
from pathlib import Path

from anyio.to_thread import run_sync

from kvactors.errors import StoreError
from kvactors.opening import open_cache
from kvactors.settings import Config
from tests.chaos.mounts import can_freeze, command, immutable, mounted
from tests.chaos.record import Setting, Tally
from tests.chaos.rest import at_rest, compare_lines, jsonl, loaded, named, settings


async def run(setting: Setting, tally: Tally) -> None:
    """Both, as far as this machine permits."""
    disk = setting.folder / "disk"
    disk.mkdir()
    mapping = settings(disk / "store", jsonl(disk / "lines"))
    freezes = await run_sync(can_freeze, disk)
    tally.note(
        "chattr +i on all files, which holds for open ones too"
        if freezes
        else "chattr +i has no effect on open files here"
    )
    async with loaded(mapping, setting, tally) as (cache, load):
        async with load.running():
            for _ in range(setting.times(1, 3)):
                await setting.moment(0.05, 1.0)
                if freezes:
                    tally.faults += 1
                    with immutable(disk):
                        await setting.moment(0.3, 1.0)
        await load.everything()
        await at_rest(cache, tally)
        await run_sync(compare_lines, disk / "lines", named(cache), tally)
    await mounted_read_only(disk, setting, tally)


async def mounted_read_only(disk: Path, setting: Setting, tally: Tally) -> None:
    """A process is refused with a StoreError that names the folder."""
    view = setting.folder / "view"
    view.mkdir()
    async with mounted(view, "--bind", str(disk)) as bound:
        if bound and await command("mount", "-o", "remount,bind,ro", str(view)):
            tally.note("a bind mount, read-only")
        elif os.geteuid():
            view = disk
            for path in [disk, *disk.rglob("*")]:  # noqa: ASYNC240  (a handful)
                path.chmod(0o555 if path.is_dir() else 0o444)
            tally.note("no mount permitted: chmod")
        else:
            tally.note(
                "no mount permitted, and chmod does not stop root: the second half was left out"
            )
            return
        tally.faults += 1
        try:
            async with open_cache(Config.from_mapping(settings(view / "store"))):
                tally.complain("a store was opened for writing on a file system that is read-only")
        except StoreError as error:
            if str(view) not in str(error):
                tally.complain(f"a read-only file system is not named: {error}")
