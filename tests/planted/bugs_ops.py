"""Planted bugs of statistics, health, logs, metrics and traces. See `catalogue`."""

from __future__ import annotations

from mutation import Mutation

TOTALS = "tests/observe/test_totals.py::"
LINES = "tests/observe/test_log_lines.py::"

BUGS: tuple[Mutation, ...] = (
    Mutation(
        "counters_fall_back_at_a_restart",
        "actor/supervisor.py",
        "        if self.on_replaced is not None:\n",
        "        if self.on_replaced is None:\n",
        "counters of an actor begin at zero when it restarts, so that rates go wrong",
        (TOTALS + "test_counters_never_fall_back_and_add_up_over_restarts",),
    ),
    Mutation(
        "earlier_incarnations_replace_each_other",
        "totals.py",
        "            earlier + getattr(record, field) for",
        "            getattr(record, field) for",
        "after two restarts the counters of the first incarnation are lost",
        (TOTALS + "test_counters_never_fall_back_and_add_up_over_restarts",),
    ),
    Mutation(
        "sinks_without_counters_while_switched_off",
        "totals.py",
        "found.get(name) or silent_sink(name), name) for name in names\n",
        "found[name], name) for name in names if name in found\n",
        "the counters of sinks disappear while the notifier is switched off",
        (TOTALS + "test_the_counters_of_sinks_stay_while_the_notifier_is_switched_off",),
    ),
    Mutation(
        "full_store_not_cleared",
        "storage/watch.py",
        "            self.full_since = None\n        elif",
        "            pass\n        elif",
        "a store that was full once stays degraded for good",
        (LINES + "test_a_full_store_is_a_reason_of_health_until_a_write_finds_space",),
    ),
    Mutation(
        "log_without_limit",
        "actor/log.py",
        "        return left_out if count < BURST else None\n",
        "        return left_out\n",
        "an event that repeats fills the disk",
        (LINES + "test_an_event_that_repeats_is_limited_and_counted",),
    ),
    Mutation(
        "log_limits_without_bound",
        "actor/log.py",
        "            self._events.clear()\n        self._events[key]",
        "            pass\n        self._events[key]",
        "the memory of log limits grows with every name that an event is about",
        (LINES + "test_the_limits_memory_is_bounded",),
    ),
    Mutation(
        "token_in_a_log",
        "client.py",
        'log.warning("lease leaked", lease=lease)',
        'log.warning("lease leaked", lease=lease, tokens=self.block_size)',
        "a log line has a field for tokens",
        (LINES + "test_every_log_call_has_a_fixed_phrase_and_no_field_of_a_prompt",),
    ),
    Mutation(
        "lease_leaked_in_silence",
        "client.py",
        '        log.warning("lease leaked", lease=lease)\n',
        "",
        "an operator does not see that a program forgets its leases",
        (LINES + "test_a_lease_that_was_leaked",),
    ),
    Mutation(
        "standard_handlers_miss_events_of_structlog_users",
        "actor/log.py",
        "            if over_standard:\n",
        "            if over_standard is not None:\n",
        "a handler of the standard library sees nothing in an application that configured structlog",
        (
            "tests/observe/test_logs.py::test_a_handler_sees_the_events_of_an_application_that_uses_structlog_too",
        ),
    ),
)
