"""Planted bugs of block tree, loads and host tier. See `catalogue`."""

from __future__ import annotations

from mutation import Mutation

TIERS = "tests/cpu_evictor/test_tiers_walk.py"
MACHINE = "tests/prefix_index/test_index_machine.py"

BUGS: tuple[Mutation, ...] = (
    Mutation(
        "timer_of_a_request_that_was_served_in_its_turn",
        "prefix_index/runner.py",
        "        if not timer.operation.over:\n",
        "        if True:\n",
        "the timer of a wait that ended in the turn in which it began stays on the loop's clock",
        (
            "tests/prefix_index/test_actor.py::test_a_request_that_is_queued_and_served_in_one_turn_leaves_no_timer",
        ),
    ),
    Mutation(
        "host_drops_its_copy_before_the_device_is_announced",
        "prefix_index/loads.py",
        "        actions += self._evictions.drop_host_copies(path.hashes(start, taken))\n",
        "        discard = self._evictions.drop_host_copies(path.hashes(start, taken))\n"
        "        actions = discard + actions\n",
        "for a moment an index is sent that a loaded block is nowhere",
        (
            "tests/prefix_index/test_loads.py::test_a_result_waits_for_those_of_the_loads_above",
            "tests/prefix_index/test_actor.py::test_a_load_is_announced_before_the_host_may_drop_its_copy_and_then_answered",
        ),
    ),
    Mutation(
        "layers_of_an_answered_load_count",
        "prefix_index/loads.py",
        "        if load is not None and load.result is None:\n            load.layers",
        "        if load is not None:\n            load.layers",
        "layers are reported as arrived of a load whose result reports their blocks as lost",
        ("tests/prefix_index/test_loads.py::test_layers_of_an_answered_load_are_ignored",),
    ),
    Mutation(
        "small_requests_overtake_the_queue",
        "prefix_index/admission.py",
        "        return not self.waiting and self._index.free >= waiter.needed\n",
        "        return self._index.free >= waiter.needed\n",
        "a request that needs many blocks waits as long as small ones come",
        ("tests/prefix_index/test_admission.py::test_a_turn_serves_a_bounded_number_of_requests",),
    ),
    Mutation(
        "lost_load_is_joined",
        "prefix_index/index.py",
        "if load is None or load.lost:",
        "if load is None:",
        "a request joins a load that stalled: it computes into blocks that a copy may still write, "
        "and its commit fails the index",
        (f"{MACHINE}::test_a_waiting_request_does_not_join_a_load_that_has_stalled",),
    ),
    Mutation(
        "load_answered_before_its_blocks_stays_with_its_lease",
        "prefix_index/loads.py",
        """\
                load.owner.loads.remove(load)
""",
        "",
        "a load that the host tier refuses before it is placed is placed later, and nothing "
        "answers it",
        (f"{MACHINE}::test_a_load_answered_before_it_is_placed_is_a_miss",),
    ),
    Mutation(
        "blocks_of_a_shared_load_given_back",
        "prefix_index/leases.py",
        """\
                lease.tree.replace(lease.path, position, -1)
""",
        """\
                pass
""",
        "a request that found no blocks in place of a failed load's gives back those of the load",
        (f"{MACHINE}::test_blocks_of_a_load_are_never_given_back_by_a_request_that_got_none",),
    ),
    Mutation(
        "commit_error_fails_the_index",
        "prefix_index/commits.py",
        """\
        except ValueError as refused:
""",
        """\
        except ZeroDivisionError as refused:
""",
        "a lease that the block tree refuses fails the index for every request",
        (f"{MACHINE}::test_a_commit_that_the_tree_refuses_ends_that_lease_alone",),
    ),
    Mutation(
        "stale_hint_after_a_discard",
        "cpu_evictor/memory.py",
        "        if dropped:\n",
        "        dropped = [block for block in dropped if block.prefetched]\n        if dropped:\n",
        "the index keeps a host hint for a block that it has just ordered the host to drop",
        (f"{TIERS}::test_a_hint_sent_before_a_discard_arrived_is_taken_back",),
    ),
    Mutation(
        "hint_of_before_a_clear",
        "prefix_index/core.py",
        "        elif (\n"
        "            message.clears == self.clears.sent\n"
        "            and message.memory_generation == self.index.memory_generation\n"
        "        ):\n",
        "        elif message.memory_generation == self.index.memory_generation:\n",
        "a hint that was sent before a clear marks a block of the new tree",
        (f"{TIERS}::test_a_hint_of_before_a_clear_is_not_about_blocks_of_after_it",),
    ),
    Mutation(
        "check_raises_a_false_alarm_under_load",
        "cpu_evictor/slots.py",
        "len(self.blocks) - self.resident - self._on_device",
        "len(self.blocks) - self.resident",
        "check() reports slots on their way to the device as left over, while the index's DropHostCopies "
        "is on its way",
        (f"{TIERS}::test_walks_through_every_order",),
    ),
    Mutation(
        "short_report_of_a_read_is_taken_for_good",
        "cpu_evictor/memory.py",
        "    if len(outcomes) != keys:\n",
        "    if not keys:\n",
        "keys without an outcome count as read: their slots hold other bytes",
        (f"{TIERS}::test_a_report_that_does_not_fit_its_keys_is_a_failure_of_all_of_them",),
    ),
    Mutation(
        "count_of_a_probe_is_not_checked",
        "cpu_evictor/memory.py",
        "    return count if 0 <= count <= most else 0\n",
        "    return count\n",
        "a probe's answer beyond its keys or below 0 is not refused",
        (f"{TIERS}::test_reports_within_their_limits_are_taken_as_they_are",),
    ),
    Mutation(
        "store_is_not_asked_at_finish",
        "cpu_evictor/save.py",
        "frozenset(position for position in message.save if position >= stored)",
        "frozenset(message.save)",
        "every finish copies and writes the whole path again",
        (f"{TIERS}::test_stored_blocks_are_not_copied_again",),
    ),
    Mutation(
        "store_that_does_not_answer_holds_device_blocks",
        "cpu_evictor/actor.py",
        "return [] if request is None else request.job.on_probed(request.size)",
        "return []",
        "the device blocks of a finished request stay in use until a hung store answers",
        (
            f"{TIERS}::test_a_store_that_does_not_answer_holds_the_blocks_of_a_finished_request_for_a_second",
        ),
    ),
    Mutation(
        "report_of_a_copy_engine_is_not_checked",
        "gpu_swapper/actor.py",
        "            checked = tuple(sorted(indices_of(failed, pairs)))\n"
        "            return CopyFinished(",
        "            checked = failed\n            return CopyFinished(",
        "a copy engine that reports anything but indices fails the data plane",
        ("tests/gpu_swapper/test_swapper_reports.py::test_the_reports_of_an_executor_are_checked",),
    ),
    Mutation(
        "timer_of_an_ended_load_goes_on",
        "cpu_evictor/load.py",
        "return [StopTimer(self)] if self._timed else []",
        "return []",
        "every load from storage keeps a timer until its deadline",
        (f"{TIERS}::test_walks_through_every_order",),
    ),
    Mutation(
        "device_block_given_back_twice",
        "prefix_index/pool.py",
        '            if marks[block]:\n                raise RuntimeError(f"block {block} was released twice")\n',
        "",
        "one device block is handed to two requests",
        ("tests/native/test_tree_check.py::test_a_pool_does_not_take_a_block_twice",),
    ),
    Mutation(
        "sums_compared_although_something_changed",
        "prefix_index/pool.py",
        "        if changes != self.changes:\n            return\n",
        "",
        "a check in steps reports damage because a turn came between two steps",
        (
            "tests/native/test_tree_check.py::test_a_change_between_the_steps_of_the_pools_check_is_no_damage",
        ),
    ),
    Mutation(
        "blocks_that_the_device_did_not_take_are_discarded",
        "prefix_index/loads.py",
        "        actions += self._evictions.drop_host_copies(path.hashes(start, taken))\n",
        "        actions += self._evictions.drop_host_copies(path.hashes(start, start + num_loaded))\n",
        "below a load that did not complete the host drops its copies and the device has none",
        (
            "tests/prefix_index/test_loads.py::test_the_host_keeps_blocks_that_the_device_did_not_take",
            "tests/prefix_index/test_loads.py::test_results_in_any_order_agree_with_a_model",
        ),
    ),
    Mutation(
        "host_waits_for_what_the_device_did_not_take",
        "prefix_index/loads.py",
        "        actions += self._evictions.keep_host_copies(kept)\n",
        "",
        "host slots of loaded blocks that the device did not take are never used again",
        (
            "tests/prefix_index/test_loads.py::test_the_host_keeps_blocks_that_the_device_did_not_take",
            "tests/prefix_index/test_loads.py::test_results_in_any_order_agree_with_a_model",
        ),
    ),
    Mutation(
        "load_is_overdue_once_for_each_status",
        "prefix_index/loads.py",
        "        if load is None or load.result is not None or load.lost:\n",
        "        if load is None or load.result is not None:\n",
        "a load that stalls and is then late is counted as several overdue loads",
        (
            "tests/prefix_index/test_loads.py::test_a_load_that_stalls_again_and_is_then_late_is_overdue_once",
        ),
    ),
    Mutation(
        "refusal_of_a_waiting_request_is_not_counted",
        "prefix_index/admission.py",
        "        self.no_room += 1\n        error = NoRoom(",
        "        error = NoRoom(",
        "requests that waited and were refused for lack of blocks are missing from no_room",
        (
            "tests/prefix_index/test_admission.py::test_the_last_request_is_refused_once_no_block_can_become_free",
        ),
    ),
)
