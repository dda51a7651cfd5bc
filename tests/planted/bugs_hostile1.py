"""Planted bugs of calls to a back end that do not return, and of errors that cannot be printed. See
`catalogue`."""

from __future__ import annotations

from mutation import Mutation

CHECKED = "tests/storage/test_checked_backend.py"

BUGS: tuple[Mutation, ...] = (
    Mutation(
        "calls_begin_while_one_does_not_return",
        "storage/containment.py",
        "        if not number or now() - self._calls[number][1] <= self._timeout:\n",
        "        if number or now() > self._timeout:\n",
        "every request waits for its whole deadline while a call to the store does not return, and "
        "health() is ok",
        (f"{CHECKED}::test_while_a_call_does_not_return_no_other_one_begins",),
    ),
    Mutation(
        "save_waits_longer_than_the_stores_timeout",
        "cpu_evictor/save.py",
        "StartTimer(self, limit, SaveUn",
        "StartTimer(self, ASK, SaveUn",
        "a store that does not answer holds the device blocks of a finished request for longer "
        "than storage.timeout_s",
        (
            f"{CHECKED}::test_a_store_that_does_not_answer_holds_finished_blocks_for_its_timeout_at_most",
        ),
    ),
    Mutation(
        "unprintable_errors_pass",
        "storage/containment.py",
        '        self.fault(what, f"raised {described(error)}")\n',
        '        self.fault(what, f"raised {type(error).__name__}: {str(error)[:200]}")\n',
        "an error of a back end whose text cannot be had is not counted as a fault, so the circuit "
        "breaker never opens",
        (f"{CHECKED}::test_errors_whose_text_cannot_be_had_are_counted_as_faults",),
    ),
)
