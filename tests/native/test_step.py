"""A step of many paths appends, takes blocks and commits as single calls do, or leaves a path."""

from __future__ import annotations

import pytest

from kvactors.native import BlockTree, Path, StepTokens

BLOCK, ROOT = 4, bytes(32)


def path_of(tokens, blocks):
    path = Path(BLOCK, ROOT)
    path.extend(tokens)
    path.assign(0, blocks)
    return path


def step(tree, paths, rows, computed, *, free=8, most=100, positions=None):
    """The result of a step, and how many blocks it took."""
    taken = []

    def take(count):
        taken.append(count)
        return list(range(50, 50 + count))

    found = StepTokens(rows).step(
        0,
        paths,
        [tree] * len(paths),
        positions or [path.num_tokens if path else 0 for path in paths],
        computed,
        free,
        most,
        take,
    )
    committed, grown, commits, unused = found
    assert unused == []
    return committed, grown, commits, taken


def test_a_step_is_an_extend_and_a_commit_of_each_path():
    tree = BlockTree(BLOCK, 64)
    paths = [path_of([n] * n, range(10 * n, 10 * n + 2)) for n in (5, 7, 8)]
    committed, grown, commits, taken = step(tree, paths, [[1], (2, 2), [3]], [4, None, 9])
    assert (committed, grown, taken) == ([1, 0, 2], [(1, (50,)), (2, (51,))], [2])
    assert [(paths.index(path), *rest) for path, *rest in commits] == [(0, 0, 1, []), (2, 0, 2, [])]
    assert [path.blocks() for path in paths] == [[50, 51], [70, 71, 50], [80, 81, 51]]
    assert [path.num_tokens for path in paths] == [6, 9, 9]
    assert paths[1].hashes(0, 2) == path_of([7] * 7 + [2], [0, 0]).hashes(0, 2)
    tree.check()


@pytest.mark.parametrize(
    "change",
    [
        {"paths": [None]},
        {"positions": [4]},
        {"free": 0},
        {"most": 0},
        {"computed": [10]},
        {"paths": [path_of([1] * 5, [1])]},
    ],
    ids=["none", "position", "free", "most", "computed", "chunked"],
)
def test_a_path_that_needs_more_is_left(change):
    tree = BlockTree(BLOCK, 64)
    good, other = path_of([2] * 4, [2]), path_of([1] * 5, [3, 4])
    arguments = {"paths": [other], "rows": [[1] * 4], "computed": [4], **change}
    assert step(tree, **arguments) == ([-1], [], [], [])
    arguments["positions"] = [*arguments.pop("positions", [5]), 4]
    arguments = {
        "free": 1,
        **arguments,
        "paths": [*arguments["paths"], good],
        "rows": [[1] * 8, []],
        "computed": [*arguments["computed"], None],
    }
    assert step(tree, **arguments)[0] == [-1, 0]
    assert (other.num_tokens, other.num_blocks, other.num_committed) == (5, 2, 0)


def test_a_path_of_another_tree_is_left():
    tree, other = BlockTree(BLOCK, 64), BlockTree(BLOCK, 64)
    path = path_of([1] * 8, [1, 2])
    other.commit(path, 1)
    assert step(tree, [path], [[]], [8])[0] == [-1]
    other.retire()
    assert step(other, [path], [[1]], [8])[:2] == ([1], [(0, (50,))])


def test_a_refused_step_changes_nothing_and_leaves_its_paths_usable():
    tree = BlockTree(BLOCK, 64)
    path = path_of([1] * 4, [1])
    with pytest.raises(RuntimeError, match="in use"):
        step(tree, [path, path], [[1], [1]], [None, None])
    tokens = StepTokens([[1], [2]])
    for paths, trees, positions, computed, error in (
        ([path] * 3, [tree] * 3, [4] * 2, [None] * 2, ValueError),
        ([path], [], [4] * 2, [None] * 2, ValueError),
        ([path], [tree], [4], [None] * 2, ValueError),
        ([path], [tree], [4] * 2, ["x"] * 2, TypeError),
        ([tree], [path], [4] * 2, [None] * 2, TypeError),
    ):
        with pytest.raises(error):
            tokens.step(0, paths, trees, positions, computed, 8, 8, lambda count: [9] * count)
    for wrong in (lambda _: [-1], lambda _: None):
        with pytest.raises((ValueError, RuntimeError)):
            tokens.step(0, [path], [tree], [4] * 2, [None] * 2, 8, 8, wrong)
    assert (path.num_tokens, path.blocks()) == (4, [1])
    assert step(tree, [path], [[1]], [4])[0] == [1]


def test_paths_are_left_that_get_no_blocks():
    tree = BlockTree(BLOCK, 64)
    paths = [path_of([n] * 4, [n]) for n in range(4)]
    tokens = StepTokens([[1] * 8, [], [1] * 8, [1]])
    committed, grown, _, unused = tokens.step(
        0, paths, [tree] * 4, [4] * 4, [None] * 4, 8, 8, lambda count: [50, 51, 52, 53][: count - 1]
    )
    assert (committed, unused) == ([0, 0, 0, -1], [])
    assert grown == [(0, (50, 51)), (2, (52, 53))]
    tokens = StepTokens([[1] * 8])
    found = tokens.step(0, paths[3:], [tree], [4], [None], 8, 8, lambda _: [60])
    assert found == ([-1], [], [], [60])


@pytest.mark.parametrize(
    ("row", "error"),
    [
        ("ab", TypeError),
        (b"ab", TypeError),
        ([-1], ValueError),
        ([True], TypeError),
        (5, TypeError),
    ],
)
def test_tokens_of_a_step_are_checked_and_copied(row, error):
    with pytest.raises(error):
        StepTokens([[1], row])
    given = [1, 2]
    tokens = StepTokens([(), given, (3,)])
    given[0] = 9
    assert tokens.counts == [0, 2, 1]
    assert [list(memoryview(tokens.row(n)).cast("I")) for n in range(3)] == [[], [1, 2], [3]]
    for positions, computed, found in (
        ([4, 4, 4], [4, 6, None], -1),
        ([4, 4, 4], [5, 6, None], 0),
        ([4, 4, 4], [None, 7, 1.0], 1),
        ([4, 4, 4], [None, 6, 1.0], 2),
        ([4, 4, 4], [None, True, None], 1),
        ([4, 4, 4], [None, None, 2**70], 2),
        ([4, 4, 4], [None, -1, None], 1),
    ):
        assert tokens.find_beyond(positions, computed, 0) == found
