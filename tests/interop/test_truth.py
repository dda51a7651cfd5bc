"""The arithmetic of what an index must hold and answer, and the harness's own parts that need no
consumer."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.interop.environments import InteropError
from tests.interop.processes import Child
from tests.interop.truth import Answer, Truth


def chain(*names: int) -> list[str]:
    """Block hashes."""
    return [f"{name:064x}" for name in names]


def truth(device: list[int], host: list[int], storage: list[int], *chains: list[str]) -> Truth:
    """The truth about some blocks."""
    return Truth(
        {"device": chain(*device), "host": chain(*host), "storage": chain(*storage)}, chains
    )


def test_answers_continue_from_tier_to_tier() -> None:
    prompt = chain(1, 2, 3, 4, 5)
    found = truth([1, 2], [3], [2, 3, 4], prompt)
    assert found.answer(prompt) == Answer(2, 1, 1)
    assert found.cached(prompt) == 4
    assert found.credit(prompt) == 4  # from block 2 on, storage has more than the host


def test_a_block_below_one_that_is_nowhere_is_not_announced() -> None:
    prompt = chain(1, 2, 3)
    found = truth([1, 3], [3], [], prompt)
    assert found.announced == {"device": {1}, "host": set(), "storage": set()}
    assert not found.unknown


def test_a_device_block_below_one_that_is_not_on_the_device_counts_on_its_other_tiers_only() -> (
    None
):
    prompt = chain(1, 2)
    found = truth([2], [1, 2], [], prompt)
    assert found.announced == {"device": set(), "host": {1, 2}, "storage": set()}


def test_a_resident_block_of_no_prompt_is_noticed() -> None:
    assert truth([9], [], [], chain(1)).unknown == set(chain(9))


def test_a_child_that_ends_or_answers_with_an_error_is_reported(tmp_path: Path) -> None:
    child = Child(
        "child",
        ["sh", "-c", 'read x; echo \'{"error": "no"}\'; echo words >&2; exit 3'],
        tmp_path / "log",
        lines=True,
    )
    with pytest.raises(InteropError, match="no"):
        child.ask({})
    with pytest.raises(InteropError, match="words"):
        child.lines.receive()
    child.close()
