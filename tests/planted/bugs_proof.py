"""Planted bugs that the simulation with AttentionStore, its small limits and the scenarios'
settling catch. See `catalogue`."""

from __future__ import annotations

from mutation import Mutation

BUGS: tuple[Mutation, ...] = (
    Mutation(
        "kept_as_of_before_a_direct_save",
        "cpu_evictor/save.py",
        "        return self._answer(\n"
        "            bytes(block is not None and block.state is SlotState.RESIDENT for block in held)\n"
        "        )\n",
        "        return self._answer(bytes([keep]) * len(self._hashes))\n",
        "a copy that the host evicted while AttentionStore wrote the same blocks is reported as "
        "kept: a host hint that is never taken back",
        (
            "tests/simulation/test_direct.py::test_a_copy_evicted_during_a_direct_save_is_not_called_kept",
        ),
    ),
    Mutation(
        "device_blocks_free_before_a_direct_save_ends",
        "cpu_evictor/save.py",
        "            actions.append(requests.save(self, message.tokens, first, blocks))\n",
        "            actions.append(self._answer_kept())\n"
        "            actions.append(requests.save(self, message.tokens, first, blocks))\n",
        "device blocks are given away while AttentionStore still reads them, and their next "
        "owner's bytes are stored",
        (
            "tests/cpu_evictor/test_save.py::test_device_blocks_are_held_until_a_device_store_has_read_them",
            "tests/simulation/test_direct.py::test_nothing_is_violated",
        ),
    ),
    Mutation(
        "workers_outlive_the_simulation",
        "tests/simulation/pool.py",
        "        os._exit(1)\n",
        "        return\n",
        "after SIGTERM the worker processes of `python -m tests.simulation` run on",
        ("tests/simulation/test_pool.py",),
    ),
    Mutation(
        "limits_are_not_restored",
        "tests/simulation/limits.py",
        "    finally:\n        for name, (module, constant) in places.items():\n            "
        "vars(module)[constant] = before[name]\n",
        "    finally:\n        pass\n",
        "a process that simulates keeps the limits of its last run",
        ("tests/simulation/test_limits.py",),
    ),
    Mutation(
        "chat_does_not_settle",
        "scenario/workload.py",
        "        if work.settle and turn:\n",
        "        if work.settle and not turn:\n",
        "the quickstart hits storage only where the disk is fast enough",
        (
            "tests/scenario/test_runner.py::test_the_hits_of_a_settled_chat_do_not_depend_on_the_disk",
        ),
    ),
    Mutation(
        "late_reports_are_not_rechecked",
        "storage/reporter.py",
        "        if not outbox.waiting or not (held or gone):\n",
        "        if not outbox.waiting or held or gone:\n",
        "a gain that waited for a place in the notifier's channel enters it after another "
        "writer's loss of the same block: sinks stay wrong",
        ("tests/storage/test_late_reports.py",),
    ),
    Mutation(
        "blocks_in_use_without_a_lease",
        "observe/invariants.py",
        "        found += _unused(in_flight)\n",
        "        found += ()\n",
        "device blocks that stay referenced after their request are not found by check()",
        ("tests/observe/test_invariants.py::test_a_block_in_use_without_a_lease_is_found_at_rest",),
    ),
)
