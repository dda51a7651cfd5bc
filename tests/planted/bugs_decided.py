"""Planted bugs of decisions: prefix index, host tier, flush notifier. See `catalogue`."""

from __future__ import annotations

from mutation import Mutation

BUGS: tuple[Mutation, ...] = (
    Mutation(
        "device_blocks_free_before_the_copy",
        "prefix_index/evictions.py",
        """\
        self._in_flight[op.op] = op
""",
        """\
        self._complete(op, bytes([HOST]) * op.total)
""",
        "an evicted device block is given to the next request while it is still being copied to "
        "the host",
        ("tests/cache/test_faults.py::test_two_requests_share_one_load_and_a_failure_of_it",),
    ),
    Mutation(
        "abandoned_lease_keeps_its_references",
        "prefix_index/endings.py",
        """\
        return self._close(lease, None)
""",
        """\
        return self.detach(lease)
""",
        "the blocks of a request that was cancelled are never given back",
        ("tests/cache/test_cancellation.py::test_cancelled_at_every_step",),
    ),
    Mutation(
        "waiter_that_gives_up_keeps_its_blocks",
        "prefix_index/admission.py",
        """\
        self._index.pool.give(waiter.taken)
""",
        "",
        "blocks promised to a request that stops waiting for the rest are lost",
        (
            "tests/cache/test_concurrent_requests.py::test_blocks_reported_as_cached_hold_their_bytes",
        ),
    ),
    Mutation(
        "hits_counted_twice",
        "prefix_index/grants.py",
        """\
        lease.device_hits, lease.host_hits, lease.storage_hits = again.num_device_blocks, 0, 0
""",
        """\
        lease.device_hits = again.num_device_blocks
""",
        "a request that waited and is matched again reports more cached tokens than it has",
        (
            "tests/planted/test_gaps.py::test_a_load_that_completes_while_a_request_waits_is_counted_once",
        ),
    ),
    Mutation(
        "device_forgets_to_discard",
        "prefix_index/loads.py",
        "        actions += self._evictions.drop_host_copies(path.hashes(start, taken))\n",
        "",
        "an exclusive host tier is not informed that the device holds a loaded block: slots leak",
        ("tests/cache/test_life.py::test_offload_and_load_bring_the_same_bytes_back",),
    ),
    Mutation(
        "sharer_computes_into_anothers_blocks",
        "prefix_index/leases.py",
        """\
        if not owner:
            actions +=""",
        """\
        if not owner and num_loaded:
            actions +=""",
        "of two requests that share a failed load the second one goes on in the first one's blocks",
        ("tests/cache/test_faults.py::test_two_requests_share_one_load_and_a_failure_of_it",),
    ),
    Mutation(
        "partial_block_shared",
        "prefix_index/commits.py",
        "commit(path, computed // self._index.block_size)",
        "commit(path, -(-computed // self._index.block_size))",
        "a block whose last tokens are not computed yet becomes shareable",
        ("tests/cache/test_life.py::test_cold_then_hit_on_the_device",),
    ),
    Mutation(
        "whole_prompt_hit",
        "prefix_index/index.py",
        "        return max(tokens - self.kept_back, 0) // self.block_size\n",
        "        return tokens // self.block_size\n",
        "a whole prompt is a hit of a request that waits, and the engine has no token left to "
        "compute the first output from",
        ("tests/prefix_index/test_at_once.py::test_answers_in_one_step_are_those_of_the_handlers",),
    ),
    Mutation(
        "whole_prompt_hit_at_once",
        "prefix_index/at_once.py",
        "        limit = (tokens - index.kept_back) // size",
        "        limit = tokens // size",
        "a whole prompt is a hit, and the engine has no token left to compute the first output "
        "from",
        ("tests/cache/test_life.py::test_a_full_hit_leaves_a_block_to_compute_unless_configured",),
    ),
    Mutation(
        "clear_leaves_the_host",
        "prefix_index/core.py",
        "        actions += [clear, *self.clears.device_cleared(clear.op, envelope, freed)]\n",
        "        actions += self.clears.device_cleared(clear.op, envelope, freed)\n",
        "clear() without the storage leaves the host tier as it was",
        ("tests/planted/test_gaps.py::test_clear_takes_the_host_too",),
    ),
    Mutation(
        "lost_rank_leaves_the_device",
        "prefix_index/core.py",
        """\
        self.index.retire()
        self.pins.device_lost()
        actions = self.announcements.cleared(Reason.RESTART)
""",
        """\
        self.pins.device_lost()
        actions = self.announcements.cleared(Reason.RESTART)
""",
        "blocks lost with a rank's process are served as hits",
        ("tests/planted/test_gaps.py::test_blocks_lost_with_a_rank_are_not_hits",),
    ),
    Mutation(
        "silent_restart_of_the_device",
        "prefix_index/core.py",
        "        return self.announcements.cleared(Reason.RESTART) if self._restarted else []\n",
        "        return []\n",
        "after a restart of PrefixIndex indexes keep blocks of its last incarnation",
        (
            "tests/planted/test_gaps.py::test_blocks_of_a_failed_actor_are_sent_as_gone_before_any_is_announced_again",
        ),
    ),
    Mutation(
        "namespace_not_in_the_key",
        "identity.py",
        "        message += field(TAG_MODEL, self.model.encode()) + field(\n"
        "            TAG_NAMESPACE, self.namespace.encode()\n"
        "        )\n",
        '        message += field(TAG_MODEL, self.model.encode()) + field(TAG_NAMESPACE, b"")\n',
        "requests of different namespaces share blocks",
        (
            "tests/prefix_index/test_identity.py::test_no_text_moves_from_one_field_of_a_root_into_another",
        ),
    ),
    Mutation(
        "salt_not_in_the_key",
        "identity.py",
        "field(TAG_SALT, self.salt.encode())",
        'field(TAG_SALT, b"")',
        "tenants with different salts share blocks",
        (
            "tests/prefix_index/test_identity.py::test_no_text_moves_from_one_field_of_a_root_into_another",
        ),
    ),
    Mutation(
        "slot_free_while_in_use",
        "cpu_evictor/slots.py",
        "        if block.pins:\n"
        "            self._dropped.add(block)\n"
        "        else:\n"
        "            self._give(block.slot)\n",
        "        self._give(block.slot)\n",
        "a host slot is handed out again before a copy or a write has read it",
        ("tests/planted/test_gaps.py::test_a_slot_is_free_with_its_last_use_and_not_before",),
    ),
    Mutation(
        "slot_free_before_the_write",
        "cpu_evictor/memory.py",
        "            actions.append(self.requests.write(batch))\n",
        "            actions.append(self.requests.write(batch))\n"
        "            self.requests._table.popitem()\n"
        "            actions += self.on_written(batch, bytes([Outcome.OK]) * len(batch))\n",
        "a slot is free as soon as the write was sent, not when the store has read it",
        ("tests/cpu_evictor/test_tiers_walk.py",),
    ),
    Mutation(
        "cancelled_load_keeps_a_pin",
        "cpu_evictor/load.py",
        "self._end() + self._release(staged) + self._release_from(0)",
        "self._end() + self._release_from(0)",
        "a load that is cancelled leaves the slots that it read into pinned without end",
        ("tests/cache/test_cancellation.py::test_cancelled_at_every_step",),
    ),
    Mutation(
        "one_block_too_many",
        "cpu_evictor/load.py",
        "            arrived += 1\n        memory",
        "            arrived += 1\n"
        "        arrived = min(arrived + 1, len(self._sources))\n"
        "        memory",
        "a load of which a copy failed reports one block more than arrived",
        ("tests/cache/test_faults.py::test_a_failed_load_is_a_miss_into_the_leases_own_blocks",),
    ),
    Mutation(
        "youngest_evicted_first",
        "cpu_evictor/slots.py",
        "return self._order.values()",
        "return reversed(self._order.values())",
        "the host evicts the most recently used blocks",
        ("tests/e2e/test_replay_oracle.py::test_hits_of_every_tier_equal_the_models[inclusive]",),
    ),
    Mutation(
        "used_in_the_wrong_order",
        "cpu_evictor/save.py",
        "host.touch(reversed(self._hashes))",
        "host.touch(self._hashes)",
        "a finished request makes the end of its prefix younger than its beginning",
        ("tests/cpu_evictor/test_save.py::test_an_inclusive_host_keeps_a_copy_of_the_path",),
    ),
    Mutation(
        "exclusive_host_keeps_its_copy",
        "cpu_evictor/memory.py",
        "block for block in found if block.state is not SlotState.TRANSIT and not block.arriving",
        "block for block in found if block.state is SlotState.RESIDENT and not block.arriving",
        "blocks that went back to the device stay in an exclusive host's slots",
        ("tests/cache/test_life.py::test_offload_and_load_bring_the_same_bytes_back",),
    ),
    Mutation(
        "deadline_of_a_fetch_ignored",
        "cpu_evictor/load.py",
        "                self._probing = self._timed = True\n"
        "                actions.append(StartTimer(self, seconds, FetchDeadline(message.op)))\n",
        "                self._probing = True\n",
        "a load waits for a slow store beyond its deadline",
        ("tests/cache/test_faults.py::test_a_slow_or_broken_store_costs_a_miss_by_the_deadline",),
    ),
    Mutation(
        "silent_restart_of_the_host",
        "cpu_evictor/actor.py",
        "self._perform([self.memory.announce_restart()])",
        'self.log.debug("a new life")',
        "after a restart of CpuEvictor indexes keep the blocks of its slots",
        (
            "tests/planted/test_gaps.py::test_blocks_of_a_failed_actor_are_sent_as_gone_before_any_is_announced_again",
        ),
    ),
    Mutation(
        "evicted_without_a_report",
        "cpu_evictor/memory.py",
        "        actions = self._report_gone(\n"
        "            [block for block in blocks if not block.dropped], Reason.CPU_EVICTION\n"
        "        )\n",
        "        actions = list[Action]()\n",
        "evictions from the host are not reported to indexes",
        ("tests/cache/test_faults.py::test_host_watermarks_evict_ahead_of_need",),
    ),
    Mutation(
        "children_sent_before_parents",
        "flush_notifier/runs.py",
        "run.blocks[0].depth if run.resident else",
        "-run.blocks[0].depth if run.resident else",
        "a sink is sent a block before the block's parent",
        ("tests/flush_notifier/test_ledger.py",),
    ),
    Mutation(
        "start_block_off_by_one",
        "flush_notifier/tasks.py",
        "        first.depth - 1,\n        len(run.blocks),\n",
        "        first.depth,\n        len(run.blocks),\n",
        "every task gives a first block one greater than its own",
        ("tests/flush_notifier/test_ledger.py",),
    ),
    Mutation(
        "lost_answer_forgotten",
        "flush_notifier/sink_view.py",
        "                block.views[index] |= run.bit << UNSURE\n",
        "                block.views[index] |= 0\n",
        "tasks that a sink may have taken although its answer was lost are not corrected",
        ("tests/flush_notifier/test_ledger.py",),
    ),
    Mutation(
        "refused_batch_counts_as_delivered",
        "flush_notifier/deliveries.py",
        "self.batch.split(count if sound else 0)",
        "self.batch.split(len(self.batch.tasks))",
        "after a sink has failed nothing of the batch is sent again",
        ("tests/flush_notifier/test_notifier.py",),
    ),
    Mutation(
        "epoch_stands_still",
        "flush_notifier/actor.py",
        "        self.epoch = epoch + ref.incarnation\n",
        "        self.epoch = epoch\n",
        "a new incarnation of the notifier sends in the last one's epoch",
        ("tests/flush_notifier/test_notifier.py",),
    ),
    Mutation(
        "overdue_load_keeps_its_blocks",
        "prefix_index/loads.py",
        "load_ended(lease, load, 0, 0, owner=False)",
        "load_ended(lease, load, 0, 0, owner=True)",
        "a request whose load hangs computes into the very blocks that the copy may still write to",
        (
            "tests/cache/test_faults.py::test_a_copy_that_hangs_costs_other_blocks_and_its_own_stay_out_of_use",
        ),
    ),
    Mutation(
        "load_judged_before_its_parent",
        "prefix_index/loads.py",
        "load.result is not None and (after is None or after.completed)",
        "load.result is not None",
        "a block counts as cached although the load of its parent is still in flight, and may fail",
        ("tests/planted/test_gaps.py::test_a_load_counts_only_with_the_load_of_its_parent",),
    ),
    Mutation(
        "saves_forgotten_at_a_restart",
        "prefix_index/core.py",
        """\
        for saved in self.saves.host_lost():
            actions += self.admission.release(saved.tree, saved.path)
""",
        """\
        self.saves.host_lost()
""",
        "blocks that were being saved when CpuEvictor failed are never given back",
        (
            "tests/planted/test_gaps.py::test_blocks_being_saved_when_the_host_tier_failed_are_released",
        ),
    ),
    Mutation(
        "barrier_forgets_the_call_in_flight",
        "flush_notifier/barrier.py",
        "None if one.in_flight else one.view.clock",
        "one.view.clock",
        "wait_flushed returns although a call in flight may leave something to be corrected",
        (
            "tests/flush_notifier/test_barrier.py::test_the_barrier_covers_corrections_of_an_unfinished_call",
        ),
    ),
    Mutation(
        "adapter_not_in_the_key",
        "identity.py",
        "field(TAG_LORA, self.lora.encode())",
        'field(TAG_LORA, b"")',
        "different adapters share blocks",
        ("tests/prefix_index/test_keys.py::test_published_root_keys",),
    ),
)
