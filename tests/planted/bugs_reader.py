"""Planted bugs of texts that users follow: warnings, checks of settings, conformance suites. See
`catalogue`."""

from __future__ import annotations

from mutation import Mutation

CHECKS = "tests/config/test_settings_report.py::"

BUGS: tuple[Mutation, ...] = (
    Mutation(
        "check_of_settings_without_the_classes_of_sinks",
        "settings_report.py",
        """\
                class_of_sink(sink)
""",
        """\
                pass
""",
        "config check accepts a sink whose class is not there, and the cache does not open",
        (f"{CHECKS}test_a_class_that_is_not_there_is_a_fault",),
    ),
    Mutation(
        "check_of_settings_without_the_size_of_the_store",
        "settings_report.py",
        """\
        yield from _store_size(config.storage, each.storage, layout)
""",
        "",
        "config check shows every tier but the store",
        (f"{CHECKS}test_the_size_of_the_store_is_shown_beside_the_others",),
    ),
    Mutation(
        "suites_without_the_mark_of_asynchronous_tests",
        "testing/marks.py",
        """\
    return [pytest.mark.asyncio]
""",
        """\
    return []
""",
        "under pytest-asyncio's default mode every test of a conformance suite fails",
        ("tests/docs/test_extensions.py::test_the_page_is_carried_out[write_a_back_end]",),
    ),
    Mutation(
        "large_counts_are_rounded",
        "scenario/report.py",
        """\
    return f"{value:.0f}" if value == int(value) else f"{value:g}"
""",
        """\
    return f"{value:g}"
""",
        "a report shows 1.6294e+06 objects",
        ("tests/scenario/test_report_texts.py::test_counts_are_shown_in_full",),
    ),
)
