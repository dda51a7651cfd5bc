"""Planted bugs of statistics, health, logs, metrics and traces. See `catalogue`."""

from __future__ import annotations

from mutation import Mutation

TOTALS = "tests/observe/test_totals.py::"
METRICS = "tests/observe/test_metrics.py::"
TRACE = "tests/observe/test_chrome_trace.py::"
HTTP = "tests/observe/test_monitoring.py::"
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
        "storage/attempts.py",
        'self._failures, self._until, self.reason = 0, None, ""',
        'self._until, self.reason = None, ""',
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
    Mutation(
        "endpoint_without_a_limit_of_connections",
        "monitoring.py",
        "        self._asking = Unclaimed[asyncio.Task[None]](MOST_CONNECTIONS, asyncio.Task.cancel)\n",
        "        self._asking = Unclaimed[asyncio.Task[None]](1 << 30, asyncio.Task.cancel)\n",
        "clients that open connections without end use up the descriptors of the process",
        (HTTP + "test_the_oldest_silent_connection_is_closed_for_a_new_one",),
    ),
    Mutation(
        "endpoint_renders_for_every_request",
        "monitoring.py",
        "        if self._task is None or (self._task.done() and now() >= self._stale_at):\n",
        "        if self._task is None or self._task.done():\n",
        "a client that scrapes without pause keeps the loop busy",
        (HTTP + "test_many_requests_render_once",),
    ),
    Mutation(
        "health_is_200_although_the_cache_has_failed",
        "monitoring.py",
        '503 if health.status == "failed" else 200',
        '503 if health.status == "closed" else 200',
        "a load balancer keeps sending requests to a cache that has failed",
        (HTTP + "test_health_is_503_when_the_cache_has_failed_and_when_it_is_closed",),
    ),
    Mutation(
        "endpoint_on_every_address",
        "monitoring.py",
        'LOOPBACK = "127.0.0.1"\n',
        'LOOPBACK = "0.0.0.0"\n',
        "the endpoint, which has no authentication, can be reached from other machines",
        (
            HTTP
            + "test_it_listens_on_the_loopback_by_default_and_names_an_address_that_it_cannot_bind",
        ),
    ),
    Mutation(
        "breaker_gauge_not_cleared",
        "observe/families.py",
        '    return float(store is not None and store.breaker != "closed")\n',
        '    return float(store is not None and (s.leaked == 0) != (store.breaker == "never"))\n',
        "the gauge of the circuit breaker stays at 1 when the store works again",
        (METRICS + "test_gauges_of_a_condition_disappear_with_it",),
    ),
    Mutation(
        "ages_of_blocks_lost_at_a_restart",
        "observe/operations.py",
        "        elif isinstance(actor, PrefixIndex) and self._index_started is not None:\n",
        "        elif isinstance(actor, PrefixIndex) and self._index_started is None:\n",
        "there are no ages of blocks",
        (METRICS + "test_values_agree_with_what_happened",),
    ),
    Mutation(
        "metrics_stay_attached",
        "observe/metrics.py",
        "            self._index.core.index.pool.ages = None\n",
        "            pass\n",
        "a cache whose metrics were closed pays for the ages of its blocks",
        (METRICS + "test_without_metrics_no_function_of_them_is_called",),
    ),
    Mutation(
        "arrows_outside_of_slices",
        "observe/chrome_trace.py",
        "        if turn is not None and self._turn is not None:\n",
        "        if turn is None or self._turn is not None:\n",
        "Perfetto drops the arrows of messages from outside, since no slice encloses them",
        (TRACE + "test_a_trace_has_a_track_for_each_actor_arrows_and_nested_requests",),
    ),
    Mutation(
        "trace_without_bound",
        "observe/chrome_trace.py",
        "        if len(self._events) >= self._limit:\n",
        "        if len(self._events) < 0:\n",
        "a trace of a long run takes all memory",
        (TRACE + "test_a_trace_is_bounded",),
    ),
    Mutation(
        "spans_without_parents",
        "tracing.py",
        "            context=ROOT if parent is None else set_span_in_context(parent, ROOT),\n",
        "            context=ROOT if parent is None or self._requests else ROOT,\n",
        "the acquires and loads of a request are not shown below it",
        (
            "tests/observe/test_tracing.py::test_requests_are_the_parents_of_their_acquires_and_loads",
        ),
    ),
)
