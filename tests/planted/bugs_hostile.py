"""Planted bugs that an outside tester found in saves, stores and moves between tiers. See
`catalogue`."""

from __future__ import annotations

from mutation import Mutation

BUGS: tuple[Mutation, ...] = (
    Mutation(
        "saves_without_a_slot_are_not_counted",
        "cpu_evictor/save.py",
        "        self._memory.counts.shed += shed\n",
        "",
        "statistics say that everything was saved, although blocks of finished requests found no "
        "slot and were not",
        (
            "tests/cpu_evictor/test_save.py::test_a_save_that_waits_too_long_is_answered_without_the_rest",
        ),
    ),
    Mutation(
        "refused_write_evicts_first",
        "storage/containment.py",
        """\
        if self._refuses(attempts):
            return unmoved
""",
        "",
        "a store that is left alone after failures loses objects to writes that it refuses",
        ("tests/storage/test_open_breaker.py::test_a_refused_write_evicts_nothing",),
    ),
    Mutation(
        "faulty_store_keeps_no_tokens",
        "testing/faults.py",
        """\
        self.keeps_lineages = inner.keeps_lineages
""",
        "",
        "a scenario's file store does not keep tokens, so nothing is announced after a restart",
        ("tests/testing/test_faults.py::test_the_paths_of_a_store_are_read_through_it",),
    ),
    Mutation(
        "closing_gives_up_at_the_first_failure",
        "flush_notifier/sinks/attention_store.py",
        """\
                except SdkError as error:
                    failure = error
""",
        """\
                except SdkError:
                    raise
""",
        "an index that fails once while the cache closes keeps the blocks of this process",
        (
            "tests/flush_notifier/test_attention_store.py::test_an_index_that_fails_during_a_close_keeps_nothing",
        ),
    ),
    Mutation(
        "failed_call_taken_for_silence",
        "flush_notifier/sinks/attention_store.py",
        """\
            self._answers = True  # an error is an answer
""",
        "",
        "if the last call to the index before a close failed, nothing is retracted",
        (
            "tests/flush_notifier/test_attention_store.py::test_an_index_that_fails_during_a_close_keeps_nothing",
        ),
    ),
    Mutation(
        "whole_store_listed_at_once",
        "storage/checked_inventory.py",
        """\
self._calls.call("keys", self._parts, iter(()))
""",
        """\
self._calls.call("keys", lambda: iter([self._inner.keys()]), iter(()))
""",
        "a notifier or writer that restarts keeps the loop for the time of a listing of the store",
        ("tests/storage/test_listing.py::test_a_page_lists_only_a_part_of_the_store",),
    ),
)
