"""Planted bugs of logging and of the start. See `catalogue`."""

from __future__ import annotations

from mutation import Mutation

BUGS: tuple[Mutation, ...] = (
    Mutation(
        "log_stream_fails_the_actor",
        "actor/log.py",
        "        with suppress(Exception):\n            if structlog",
        "        with suppress(KeyError):\n            if structlog",
        "a broken log handler of the application makes the actor fail that logs a warning",
        (
            "tests/observe/test_logs.py::test_a_handler_of_the_application_that_raises_fails_no_actor",
        ),
    ),
    Mutation(
        "log_settings_stay",
        "actor/log.py",
        "        structlog.reset_defaults()\n",
        "        pass\n",
        "a simulation or a command that runs in an application changes where the application's log "
        "events go",
        ("tests/observe/test_logs.py::test_settings_for_a_while_leave_structlog_as_it_was",),
    ),
    Mutation(
        "survivors_not_made_yet",
        "actor/supervisor.py",
        "            actor = self._actors.get(spec.ref.name)  # None before its first start\n",
        "            actor = self._actors[spec.ref.name]\n",
        "a failure while the system starts ends it with a KeyError that hides the cause",
        (
            "tests/actor/test_actor.py::test_a_failure_before_all_have_started_is_named_and_the_others_start",
        ),
    ),
)
