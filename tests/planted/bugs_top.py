"""Bugs of `kvactors top` and of what it reads."""

from mutation import Mutation

BUGS = (
    Mutation(
        "top_counts_a_vanished_actor_as_a_restart",
        "top/view.py",
        "return any(counters.get(key, value) < value for key, value in before.counters().items())",
        "return any(counters.get(key, 0) < value for key, value in before.counters().items())",
        "an actor that is switched off is shown as a restart of the process",
        ("tests/top/test_view.py::test_an_actor_that_is_gone_is_no_restart",),
    ),
    Mutation(
        "top_forgets_the_process_before_a_gap",
        "top/view.py",
        "        self._last = self._before = None\n",
        "        self._last = self._before = self._open = None\n",
        "a process that was away and came back as another one is no restart",
        ("tests/top/test_view.py::test_a_restart_begins_anew_and_is_counted",),
    ),
    Mutation(
        "top_mixes_two_processes",
        "top/view.py",
        "            self.restarts += 1\n            self._before = None\n",
        "            self.restarts += 1\n",
        "rates after a restart are differences between two processes",
        ("tests/top/test_view.py::test_a_restart_begins_anew_and_is_counted",),
    ),
    Mutation(
        "top_passes_control_characters_on",
        "top/screen.py",
        'return "".join(one if one.isprintable() else "?" for one in text)',
        "return str(text)",
        "labels of a process send escape sequences to the terminal",
        (
            "tests/top/test_view.py::test_a_frame_fits_any_width_and_has_no_control_characters_of_the_process",
        ),
    ),
    Mutation(
        "top_reads_values_that_are_not_finite",
        "top/exposition.py",
        "elif math.isfinite(value):",
        "elif value is not None:",
        "a metric that is NaN ends the command with a traceback",
        ("tests/top/test_exposition.py::test_values_that_are_not_finite_are_left_out",),
    ),
    Mutation(
        "top_waits_for_a_dripping_server",
        "top/fetch.py",
        "with anyio.fail_after(seconds):",
        "with anyio.fail_after(seconds + 1e6):",
        "a server that sends a byte now and then is read without end",
        (
            "tests/top/test_fetch.py::test_a_server_that_sends_a_byte_now_and_then_meets_the_deadline_of_the_request",
        ),
    ),
    Mutation(
        "top_leaves_the_keys_of_the_terminal_changed",
        "top/outputs.py",
        "        self._screen.__exit__(None, None, None)\n        self._keys.leave()\n",
        "        self._screen.__exit__(None, None, None)\n",
        "the terminal shows no typed keys after kvactors top",
        ("tests/top/test_command.py::test_the_terminal_is_left_as_it_was[ctrl-c]",),
    ),
    Mutation(
        "lag_timer_outlasts_the_cache",
        "observe/lag.py",
        "        if self._wanted():\n            self._set()\n",
        "        self._set()\n",
        "a collector that is never closed sets timers after the end of its cache",
        (
            "tests/observe/test_metrics.py::test_the_lag_of_the_loop_is_measured_while_the_cache_is_observed",
        ),
    ),
    Mutation(
        "arena_hides_that_it_is_not_locked",
        "device/arena.py",
        "                self.trouble = (\n",
        "                _trouble = (\n",
        "health is ok although host.pinned is not carried out",
        ("tests/device/test_arena.py::test_memory_that_cannot_be_locked_is_a_reason_of_health",),
    ),
    Mutation(
        "sizes_of_any_number_of_digits",
        "sizes.py",
        "    if found > MOST_BYTES:\n",
        "    if found > float('inf'):\n",
        "a size of 400 digits ends the command with a traceback",
        ("tests/cli/test_sweep_command.py::test_a_size_that_cannot_be_is_named",),
    ),
    Mutation(
        "two_sizes_of_the_host_tier",
        "tier_cache/settings.py",
        "    if config.num_slots:\n        raise",
        "    if config.num_slots < 0:\n        raise",
        "num_slots is ignored beside capacity_bytes",
        (
            "tests/tier_cache/test_settings.py::test_a_size_of_the_host_tier_that_cannot_be_is_named",
        ),
    ),
    Mutation(
        "tier_metrics_lose_refused_fetches",
        "tier_cache/metrics.py",
        '        "refused_fetches",\n',
        '        "failed_fetches",\n',
        "a statistic of a TierCache is in no metric",
        ("tests/tier_cache/test_metrics.py::test_every_statistic_is_a_metric",),
    ),
)
