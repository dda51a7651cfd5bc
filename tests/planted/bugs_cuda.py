"""Planted bugs of copies between a GPU and the host. See `catalogue`."""

from __future__ import annotations

from mutation import Mutation

EXECUTOR = "tests/gpu_swapper/test_cuda_executor.py::"
GATHER = "tests/gpu_swapper/test_cuda_gather.py::"
MERGING = "tests/data_plane/test_cuda_merging.py::"
STREAMS = "tests/gpu_swapper/test_cuda_streams.py::"
COMMAND = "tests/device/test_gpu_command.py::test_every_check_is_right_on_the_stand_in"

BUGS: tuple[Mutation, ...] = (
    Mutation(
        "half_of_a_buffer_is_filled_before_it_is_empty",
        "data_plane/cuda/host_pin.py",
        """\
        if half.used:
""",
        """\
        if False:
""",
        "small pieces overwrite others that the copy engine is still moving",
        (GATHER + "test_a_batch_takes_the_halves_of_a_buffer_in_turn",),
    ),
    Mutation(
        "copy_of_gathered_pieces_overtakes_the_kernel",
        "data_plane/cuda/host_pin.py",
        """\
        self._driver.call("cuStreamWaitEvent", last, half.filled, 0)
""",
        "",
        "the bytes of an earlier block reach the host, or the device",
        (GATHER + "test_a_block_of_scattered_pieces_leaves_the_device_by_one_copy",),
    ),
    Mutation(
        "layer_is_reported_before_its_kernel_has_run",
        "data_plane/cuda/copies.py",
        """\
        self._launched |= self.to_device
""",
        "",
        "an engine reads a layer whose pieces are still in the buffer",
        (
            GATHER + "test_copies_in_the_order_of_their_submission",
            GATHER + "test_a_layers_event_comes_after_its_kernel",
        ),
    ),
    Mutation(
        "kernel_overtakes_an_earlier_copy_to_the_same_slot",
        "data_plane/cuda/copies.py",
        """\
            self._order(self.stream, self.kernels)
            self._staged = False
""",
        """\
            self._staged = False
""",
        "of two stores to one slot the first one's bytes stay",
        (GATHER + "test_copies_in_the_order_of_their_submission",),
    ),
    Mutation(
        "kernels_do_not_wait_for_the_engine",
        "data_plane/cuda/copies.py",
        """\
        if self.kernels != self.stream:
            self.driver.call("cuStreamWaitEvent", self.kernels, event, 0)
""",
        "",
        "small pieces are gathered before the model has written them",
        (GATHER + "test_kernels_of_a_copy_begin_after_the_engines_work",),
    ),
    Mutation(
        "failed_batch_is_settled_on_one_stream",
        "data_plane/cuda/copies.py",
        "dict.fromkeys((self.stream, self.kernels))",
        "(self.stream,)",
        "blocks of a failed batch are given out while a kernel still uses them",
        (GATHER + "test_a_failed_copy_is_settled_on_both_streams",),
    ),
    Mutation(
        "pieces_are_joined_across_allocations",
        "data_plane/cuda/copy_plan.py",
        """\
        & (allocations[:-1] == allocations[1:])
""",
        "",
        "the driver refuses a copy that reaches into another allocation, and nothing is copied "
        "any more",
        (GATHER + "test_pieces_of_different_allocations_are_not_joined",),
    ),
    Mutation(
        "blocks_whose_slots_are_apart_are_one_run",
        "data_plane/cuda/copy_plan.py",
        "(np.diff(rows) != 1) | (np.diff(places) != step)",
        "np.diff(rows) != 1",
        "blocks that follow one another are copied into the slots of others",
        (MERGING + "test_every_byte_is_copied_once_to_its_place",),
    ),
    Mutation(
        "rows_beyond_the_drivers_pitch_are_a_rectangle",
        "data_plane/cuda/copy_plan.py",
        "~dense & (strides <= max_pitch) & (step <= max_pitch)",
        "~dense",
        "the driver refuses a rectangle, and nothing is copied any more",
        (MERGING + "test_neighbouring_blocks_with_gaps_are_one_rectangle_a_piece",),
    ),
    Mutation(
        "slots_of_one_block_each_are_never_neighbours",
        "data_plane/cuda/copy_queue.py",
        " if self.slots_per_row > 1 else self.row_stride",
        "",
        "blocks that follow one another are copied one by one",
        (GATHER + "test_blocks_in_slots_with_gaps_are_one_rectangle",),
    ),
    Mutation(
        "copies_never_asked_for_keep_their_memory",
        "data_plane/cuda/copy_queue.py",
        """\
            self.take_ended()  # the memory of those that were never asked for
""",
        "",
        "a worker that ends leaves memory on the GPU",
        (GATHER + "test_kernels_of_a_copy_begin_after_the_engines_work",),
    ),
    Mutation(
        "settings_of_gathering_are_ignored",
        "data_plane/local.py",
        """\
            stage_from=config.staging_min_bytes,
            merge_from=config.merge_min_blocks,
""",
        "",
        "thresholds that are set are measured all the same",
        (EXECUTOR + "test_an_engines_stream_waits_for_the_layers_of_a_lease",),
    ),
    Mutation(
        "event_is_recorded_again_before_it_was_reached",
        "data_plane/cuda/operations.py",
        """\
            if self._device.driver.status("cuEventQuery", event) == 0:
""",
        """\
            if event:
""",
        "a call that was cancelled ends the wait of a later one, whose blocks are shared too early",
        (STREAMS + "test_a_call_that_ends_before_its_event_changes_nothing",),
    ),
    Mutation(
        "streams_event_is_recorded_on_the_default_stream",
        "client.py",
        "record_event(stream_handle(stream))",
        "record_event(stream_handle(stream) and 0)",
        "blocks are shared before the engine's stream has computed them",
        (
            STREAMS + "test_blocks_are_shared_when_their_stream_has_come_so_far",
            COMMAND,
        ),
    ),
    Mutation(
        "fork_ignores_the_stream",
        "lease.py",
        "if event is not None or stream is not None:\n"
        "            await hold.wait_event(event, stream, self.num_tokens",
        "if event is not None:\n            await hold.wait_event(event, stream, self.num_tokens",
        "the last block is copied before the engine's stream has computed it",
        (STREAMS + "test_a_fork_copies_the_last_block_when_its_stream_has_come_so_far", COMMAND),
    ),
    Mutation(
        "step_ignores_the_stream",
        "steps.py",
        "if event is not None or stream is not None:",
        "if event is not None:",
        "a step is shared before the engine's stream has computed it",
        (STREAMS + "test_a_step_is_shared_when_its_stream_has_come_so_far", COMMAND),
    ),
    Mutation(
        "step_in_a_thread_ignores_the_stream",
        "from_thread.py",
        "event=event, stream=stream, deadline",
        "event=event, deadline",
        "a step of another thread is shared before the engine's stream has computed it",
        (STREAMS + "test_a_step_is_shared_when_its_stream_has_come_so_far",),
    ),
    Mutation(
        "stream_waits_for_the_first_layer_alone",
        "data_plane/cuda/operations.py",
        "for event in op.events:",
        "for event in op.events[:1]:",
        "the engine computes with layers that have not arrived",
        (STREAMS + "test_a_stream_waits_for_all_layers_in_place_of_the_caller",),
    ),
    Mutation(
        "stream_waits_only_for_copies_in_flight",
        "data_plane/cuda/operations.py",
        """\
            for wait, lane in list(self._waits.items()):
                if self.in_flight[op] is lane and not op.over:
                    wait.add(op)
""",
        "",
        "a wait for copies that begin after the call ends at their end, on the caller",
        (STREAMS + "test_a_stream_waits_for_copies_that_begin_after_the_call",),
    ),
    Mutation(
        "waits_of_streams_are_kept",
        "data_plane/cuda/operations.py",
        """\
        wait.done.add_done_callback(lambda _: self._waits.pop(wait, None))
""",
        "",
        "every wait for a stream leaves memory behind, and later copies are waited for as well",
        (
            STREAMS + "test_a_cancelled_wait_of_a_stream_leaves_the_loads_alone",
            STREAMS + "test_a_stream_waits_for_copies_that_begin_after_the_call",
        ),
    ),
    Mutation(
        "result_of_loads_under_a_stream_is_not_needed",
        "lease.py",
        """\
            hold.unread = True
            return
""",
        """\
            return
""",
        "blocks computed on top of a failed load are shared",
        (STREAMS + "test_a_stream_waits_for_all_layers_in_place_of_the_caller", COMMAND),
    ),
    Mutation(
        "result_of_loads_under_a_layers_stream_is_not_needed",
        "lease.py",
        """\
            hold.unread = True
            return self.cached_tokens
""",
        """\
            return self.cached_tokens
""",
        "blocks computed on top of a failed load are shared after a wait for a layer",
        (STREAMS + "test_a_layers_wait_needs_the_result_of_the_load_as_well",),
    ),
    Mutation(
        "result_of_loads_is_never_read",
        "lease.py",
        "self.pending, hold.unread = landed.cached_tokens, False, False",
        "self.pending = landed.cached_tokens, False",
        "a lease whose stream waited for its loads cannot commit",
        (STREAMS + "test_a_stream_waits_for_all_layers_in_place_of_the_caller", COMMAND),
    ),
)
