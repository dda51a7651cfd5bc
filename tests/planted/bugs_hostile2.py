"""Planted bugs of many slabs, of files that belong to others, and of signals. See `catalogue`."""

from __future__ import annotations

from mutation import Mutation

BUGS: tuple[Mutation, ...] = (
    Mutation(
        "every_slab_stays_open",
        "storage/backends/slab_files.py",
        "        if len(self.slabs) >= HELD:\n",
        "        if not self.folder.name:\n",
        "a store of many slabs takes every descriptor of the process",
        (
            "tests/storage/test_descriptors.py::test_a_store_that_began_with_one_object_grows_with_few_descriptors",
        ),
    ),
    Mutation(
        "a_read_makes_a_slab",
        "storage/backends/slab_files.py",
        "os.O_RDONLY if self.read_only else os.O_RDWR,\n            meta.block_bytes",
        "os.O_RDONLY if self.read_only else os.O_RDWR | os.O_CREAT,\n            meta.block_bytes",
        "a slab that was deleted is made anew, empty, by a read",
        (
            "tests/storage/test_descriptors.py::test_slabs_beyond_those_held_are_reckoned_shrunk_and_closed",
        ),
    ),
    Mutation(
        "any_table_is_a_damaged_store",
        "storage/inspect.py",
        "        return STORE_FOLDER.fullmatch(table.parent.resolve().name) is not None\n",
        "        return True\n",
        "'store prune' removes files of other programs that are named table",
        (
            "tests/cli/test_store_command.py::test_files_of_others_named_table_are_no_stores_and_stay",
        ),
    ),
    Mutation(
        "sigterm_ends_a_command_at_once",
        "terminable.py",
        "    before = signal.signal(signal.SIGTERM, cancel)\n",
        "    before = signal.signal(signal.SIGTERM, signal.getsignal(signal.SIGTERM))\n",
        "a command that is terminated may run on: Python drops the exception of the signal handler "
        "in a finalizer",
        ("tests/cli/test_terminable.py::TestRunTerminable",),
    ),
    Mutation(
        "verify_takes_removed_objects_for_bad",
        "storage/inspect.py",
        "            return file.read(meta.entry_bytes) == one.raw\n",
        "            return True\n",
        "'store verify' reports objects as bad that the writing process has removed during the "
        "scan",
        ("tests/cli/test_store_command.py::test_only_objects_in_the_table_can_be_bad",),
    ),
    Mutation(
        "verify_ignores_a_clear",
        "storage/inspect.py",
        "generation != meta.generation:\n                return False",
        "generation < meta.generation:\n                return False",
        "'store verify' reports objects as bad that were cleared during the scan",
        ("tests/cli/test_store_command.py::test_only_objects_in_the_table_can_be_bad",),
    ),
)
