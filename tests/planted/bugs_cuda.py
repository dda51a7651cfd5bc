"""Planted bugs of copies between a GPU and the host. See `catalogue`."""

from __future__ import annotations

from mutation import Mutation

EXECUTOR = "tests/gpu_swapper/test_cuda_executor.py::"
GATHER = "tests/gpu_swapper/test_cuda_gather.py::"
MERGING = "tests/data_plane/test_cuda_merging.py::"

BUGS: tuple[Mutation, ...] = (
    Mutation(
        "half_of_a_buffer_is_filled_before_it_is_empty",
        "data_plane/cuda/gather.py",
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
        "data_plane/cuda/gather.py",
        """\
        self._driver.call("cuStreamWaitEvent", last, half.filled, 0)
""",
        "",
        "the bytes of an earlier block reach the host, or the device",
        (GATHER + "test_a_block_of_scattered_pieces_leaves_the_device_by_one_copy",),
    ),
    Mutation(
        "layer_is_reported_before_its_kernel_has_run",
        "data_plane/cuda/gpu_stream.py",
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
        "data_plane/cuda/gpu_stream.py",
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
        "data_plane/cuda/gpu_stream.py",
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
        "data_plane/cuda/gpu_stream.py",
        "dict.fromkeys((self.stream, self.kernels))",
        "(self.stream,)",
        "blocks of a failed batch are given out while a kernel still uses them",
        (GATHER + "test_a_failed_copy_is_settled_on_both_streams",),
    ),
    Mutation(
        "pieces_are_joined_across_allocations",
        "data_plane/cuda/merging.py",
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
        "data_plane/cuda/merging.py",
        "(np.diff(rows) != 1) | (np.diff(places) != step)",
        "np.diff(rows) != 1",
        "blocks that follow one another are copied into the slots of others",
        (MERGING + "test_every_byte_is_copied_once_to_its_place",),
    ),
    Mutation(
        "rows_beyond_the_drivers_pitch_are_a_rectangle",
        "data_plane/cuda/merging.py",
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
        "both_directions_of_the_bench_share_slots",
        "bench/copy_gpu.py",
        "(ids[-half:], slots[-half:])",
        "(ids[:half], slots[:half])",
        "the bench of both directions at once copies from slots that are being written",
        ("tests/device/test_gpu_command.py::test_every_benchmark_row_runs_on_the_stand_in",),
    ),
)
