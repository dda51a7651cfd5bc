"""Planted bugs: blocks in indexes that no request can get, and names of a store that is not this
process's."""

from __future__ import annotations

from mutation import Mutation

BUGS: tuple[Mutation, ...] = (
    Mutation(
        "old_namespace_stays_announced",
        "prefix_index/core.py",
        """\
            actions = self.announcements.namespace_changed(namespace)
""",
        "",
        "after new weights a router finds blocks that no request can get",
        (
            "tests/cache/test_namespaces.py::test_blocks_of_another_namespace_are_gone_for_indexes_and_come_back_with_it",
        ),
    ),
    Mutation(
        "restarted_notifier_has_the_first_namespace",
        "wiring.py",
        "            namespace=self.roots.namespace,\n",
        "            namespace=self.config.cache.namespace,\n",
        "after a restart of the notifier indexes get the blocks of the first weights",
        (
            "tests/cache/test_namespaces.py::test_a_restarted_notifier_announces_the_current_namespace",
        ),
    ),
    Mutation(
        "only_first_blocks_follow_the_namespace",
        "flush_notifier/scopes.py",
        "    for i, block in enumerate(tree.order, 1):",
        "    for i, block in enumerate((one for one in tree.order if one.parent is None), 1):",
        "blocks below the first one stay announced without it",
        (
            "tests/cache/test_namespaces.py::test_blocks_of_another_namespace_are_gone_for_indexes_and_come_back_with_it",
        ),
    ),
    Mutation(
        "names_of_a_store_of_others",
        "storage/inventory.py",
        "(key for key in self.catalog if key not in pending) if self.answerable else iter(())",
        "(key for key in self.catalog if key not in pending)",
        "a check compares indexes with blocks of a store for which this process does not answer",
        (
            "tests/storage/test_file_store.py::test_a_second_process_is_refused_with_the_holders_id_or_only_reads",
        ),
    ),
    Mutation(
        "growth_that_is_over_is_waited_for",
        "storage/backends/slab_steps.py",
        "        if task is None or task.done():\n",
        "        if task is None:\n",
        "the loop stands still: a write asks again and again for a slab that others have filled",
        (
            "tests/storage/test_store_tasks.py::test_a_write_between_the_end_of_a_growth_and_its_callbacks_asks_for_another",
        ),
    ),
)
