"""Old import paths of the data plane keep working, with a warning."""

from __future__ import annotations

from importlib import import_module

import pytest

OLD = [
    ("kvactors.ranks.serve:serve_rank", "kvactors.data_plane.ranks.worker:serve_rank"),
    ("kvactors.ranks.group:RankGroup", "kvactors.data_plane.ranks.leader:RankGroup"),
    ("kvactors.device.cuda:CudaDevice", "kvactors.data_plane.cuda.device:CudaDevice"),
    ("kvactors.device:make_device", "kvactors.data_plane.devices:make_device"),
    ("kvactors.gpu_swapper.executor:Executor", "kvactors.data_plane.engine:CopyEngine"),
    ("kvactors.gpu_swapper.executor:make_executor", "kvactors.data_plane.local:make_engine"),
]


def named(path: str) -> object:
    module, _, name = path.partition(":")
    return getattr(import_module(module), name)


@pytest.mark.parametrize(("old", "new"), OLD, ids=[old for old, _ in OLD])
def test_an_old_path_names_the_same_object_and_warns(old, new):
    with pytest.warns(DeprecationWarning, match="has moved"):
        found = named(old)
    assert found is named(new)


def test_a_name_that_never_was_is_an_attribute_error():
    with pytest.raises(AttributeError, match="no attribute 'Nothing'"):
        named("kvactors.ranks.serve:Nothing")
