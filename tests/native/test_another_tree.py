"""A path holds node numbers of one tree. Every method of another tree refuses the path."""

from __future__ import annotations

import re

import pytest

from kvactors.native import BlockTree, Path

VALUES = {"int": 0, "bool": False, "float": 0.0, "bytes": bytes(32)}
REQUIRED = re.compile(r"(\w+): ([\w.]+)(?=[,)])")
"""Parameters without a default, in the signature that a native method's docstring has."""
METHODS = {
    name: found
    for name in dir(BlockTree)
    if "path" in (found := dict(REQUIRED.findall(getattr(BlockTree, name).__doc__ or "")))
}


def path_of(tokens: range) -> Path:
    path = Path(1, bytes(32))
    path.extend(list(tokens))
    return path


def test_the_methods_are_found():
    assert len(METHODS) > 20


@pytest.mark.parametrize("name", METHODS)
def test_a_path_of_another_tree_is_refused(name):
    count = 100_000  # node numbers far beyond the nodes of the other tree
    owner, other = BlockTree(1), BlockTree(1)
    other.share()
    for path in (path_of(range(count)), tail := path_of(range(count, count + 3))):
        owner.pin(path)
        path.assign(0, list(range(path.num_tokens)))
        owner.commit(path, path.num_tokens)
    arguments = {
        one: tail if one == "path" else VALUES.get(kind, path_of(range(0)))
        for one, kind in METHODS[name].items()
    }
    with pytest.raises(ValueError, match="another tree"):
        getattr(other, name)(**arguments)
    owner.check()
    other.check()
