"""Planted bugs of settings, sizes, the command line and the package. See `catalogue`."""

from __future__ import annotations

from mutation import Mutation

RANGES = "tests/config/test_ranges.py::"
SIZES = "tests/config/test_sizes.py::"
REPORT = "tests/config/test_settings_report.py::"
MODELS = "tests/config/test_model_config.py::"
SHIPPED = "tests/cli/test_shipped.py::"
CLI = "tests/cli/test_command_line.py::"

BUGS: tuple[Mutation, ...] = (
    Mutation(
        "unknown_kinds_pass",
        "applicable.py",
        'if value not in known and ":" not in value:',
        "if False:",
        "a misspelt back end is found when a cache is opened, not when the file is checked",
        (RANGES + "test_an_error_names_the_setting_and_what_is_allowed",),
    ),
    Mutation(
        "slots_without_their_pages",
        "capacity.py",
        "        slot_stride(layout.block_bytes, trailer),",
        "        layout.block_bytes,",
        "host.capacity_bytes = 1 MiB takes more than 1 MiB of memory",
        (SIZES + "test_sizes_in_bytes_are_those_that_an_open_cache_allocates",),
    ),
    Mutation(
        "file_store_larger_than_its_bytes",
        "storage/backends/__init__.py",
        "capacity_of(config, object_stride(block_bytes))",
        "capacity_of(config, block_bytes)",
        "storage.capacity_bytes is exceeded by a store whose blocks are no whole pages",
        (SIZES + "test_sizes_in_bytes_are_those_that_an_open_cache_allocates",),
    ),
    Mutation(
        "blocks_beside_bytes",
        "applicable.py",
        "if getattr(table, size) is not None and blocks in given_in(table, written):",
        "if False:",
        "a size in blocks is ignored beside one in bytes",
        (SIZES + "test_sizes_that_contradict_each_other_are_named",),
    ),
    Mutation(
        "given_device_of_other_bytes",
        "device/__init__.py",
        "        if blocks != device.num_blocks:\n",
        "        if False:\n",
        "device.capacity_bytes is ignored when a device is given",
        (SIZES + "test_a_given_device_has_its_own_size",),
    ),
    Mutation(
        "check_stops_at_the_first_fault",
        "settings_report.py",
        "    if found := list(faults(tables, kind)):\n",
        "    if found := list(faults(tables, kind))[:1]:\n",
        "config check shows one fault of a file at a time",
        (REPORT + "test_every_fault_of_a_file_is_found",),
    ),
    Mutation(
        "secret_shown",
        "settings_report.py",
        "HIDDEN if full in SECRETS and plain else plain",
        "plain",
        "config show prints the secret of the ranks",
        (REPORT + "test_a_secret_is_not_shown",),
    ),
    Mutation(
        "heads_of_all_ranks",
        "model_config.py",
        '            "tensor_parallel": tensor_parallel,\n',
        "",
        "kvactors size counts the KV heads of all ranks on each",
        (MODELS + "test_the_layout_of_a_model",),
    ),
    Mutation(
        "state_layers_counted_as_attention",
        "model_config.py",
        "        if strange or state:\n",
        "        if False:\n",
        "the size of a model with linear attention is wrong",
        (MODELS + "test_a_config_that_is_wrong_or_unknown_is_named",),
    ),
    Mutation(
        "output_found_bad_after_the_work",
        "report.py",
        "    if path is None or to_stdout(path):\n        return\n",
        "    return\n",
        "minutes of work are lost if the report cannot be written",
        (CLI + "test_a_report_that_cannot_be_written_is_an_error_before_the_work",),
    ),
    Mutation(
        "json_without_a_value_is_refused",
        "cli.py",
        '        if word == "--json" and following.startswith("--"):\n',
        "        if False:\n",
        "--json alone is an error",
        (CLI + "test_a_report_on_standard_output_is_alone_there",),
    ),
    Mutation(
        "json_at_the_end_is_refused",
        "cli.py",
        '[*words[1:], "--"]',
        '[*words[1:], ""]',
        "--json at the end is an error",
        (CLI + "test_a_report_on_standard_output_is_alone_there",),
    ),
    Mutation(
        "table_between_the_json",
        "cli.py",
        "    print_report(report, Console(stderr=to_stdout(json) or to_stdout(html) or to_stdout(trace)))\n",
        "    print_report(report, Console())\n",
        "--json - mixes a table into the JSON",
        (CLI + "test_a_report_on_standard_output_is_alone_there",),
    ),
    Mutation(
        "scenarios_of_a_clone_alone",
        "scenario/shipped.py",
        "return INSTALLED if INSTALLED.is_dir() else IN_A_CLONE",
        "return IN_A_CLONE",
        "kvactors run quickstart does not work from an installed wheel",
        (SHIPPED + "test_files_of_an_installed_package_are_found",),
    ),
    Mutation(
        "traceback_of_an_unbuilt_clone",
        "__main__.py",
        "    print(explain(error), file=sys.stderr)\n    sys.exit(2)\n",
        "    raise\n",
        "python -m kvactors in a clone prints a traceback",
        (SHIPPED + "test_the_command_line_of_an_unbuilt_clone_names_the_remedy",),
    ),
    Mutation(
        "other_systems_unnamed",
        "linux.py",
        'if sys.platform != "linux":',
        "if False:",
        "on Windows the import fails with a missing fcntl, on macOS at the first use",
        (SHIPPED + "test_other_systems_have_settings_and_sizes_and_a_named_error_for_the_rest",),
    ),
    Mutation(
        "settings_of_bases_undescribed",
        "settings_docs.py",
        "    for owner in reversed(struct.__mro__):\n",
        "    for owner in (struct,):\n",
        "the reference and the schema lack the descriptions of settings that all sinks have",
        (REPORT + "test_the_schema_has_every_setting_with_its_description_and_range",),
    ),
    Mutation(
        "share_done_not_shown",
        "report.py",
        "progress.update(line, description=text, completed=done)",
        "progress.update(line, description=text)",
        "a replay of an hour shows 0 % until its end",
        (CLI + "test_a_terminal_shows_the_share_done_and_a_pipe_shows_nothing",),
    ),
)
