"""Stand-ins for CUDA, which SGLang needs, in every process that has this folder in PYTHONPATH.

Packages that need a GPU (`MISSING`) are modules whose attributes exist and cannot be used. Between
the device and the host pool the CPU does what CUDA does: registration of pages, events of streams,
and the copy kernels of the layout `page_first_direct`. SGLang's tree, controller and threads run as
they are. Nothing of kvactors is touched.
"""

from __future__ import annotations

import importlib.abc
import importlib.machinery
import sys
from collections.abc import Callable, Sequence
from types import ModuleType
from typing import Any

MISSING = ("torchvision", "sgl_kernel", "flashinfer")


class AnyAttributes(type):
    """A class whose attributes exist."""

    def __getattr__(cls, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        return Unusable


class Unusable(metaclass=AnyAttributes):
    """An attribute of a package that is not there."""

    def __init__(self, *given: Any, **named: Any) -> None:
        pass

    def __call__(self, *given: Any, **named: Any) -> Any:
        if len(given) == 1 and callable(given[0]) and not named:
            return given[0]  # a decorator
        raise NotImplementedError("this package needs a GPU")

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        return Unusable()


class MissingModule(ModuleType):
    """A module whose attributes are `Unusable`."""

    __path__ = ()
    __version__ = "0"

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        return Unusable


class MissingPackages(importlib.abc.MetaPathFinder, importlib.abc.Loader):
    """Finds every module of the packages that are not there."""

    def find_spec(self, name: str, path: Any = None, target: Any = None) -> Any:
        if name.partition(".")[0] not in MISSING:
            return None
        return importlib.machinery.ModuleSpec(name, self, is_package=True)

    def create_module(self, spec: Any) -> ModuleType:
        return MissingModule(spec.name)

    def exec_module(self, module: ModuleType) -> None:
        """Nothing is executed."""


def prepare_host_pool(module: ModuleType) -> None:
    """Host memory that is not registered with CUDA."""
    module._cuda_host_register = lambda *given, **named: None
    module.ALLOC_MEMORY_FUNCS["cpu"] = module.alloc_with_host_register


def prepare_kernels(module: ModuleType) -> None:
    """The two copies between layers of the device pool and pages of the host pool, and memory that
    is not pinned."""
    make_page = module.MHATokenToKVPoolHost.get_dummy_flat_data_page

    def make_unpinned_page(self: Any) -> Any:
        pinned, self.pin_memory = self.pin_memory, False
        try:
            return make_page(self)
        finally:
            self.pin_memory = pinned

    module.MHATokenToKVPoolHost.get_dummy_flat_data_page = make_unpinned_page

    module.transfer_kv_all_layer_direct_lf_pf = to_pages
    module.transfer_kv_per_layer_direct_pf_lf = to_layer


def prepare_states(module: ModuleType) -> None:
    """The same copies for the states of Mamba layers."""
    module.transfer_kv_all_layer_direct_lf_pf = to_pages
    module.transfer_kv_per_layer_direct_pf_lf = to_layer


def to_pages(
    src_ptrs: Sequence[Any],
    dst_ptrs: Sequence[Any],
    src_indices: Any,
    dst_indices: Any,
    page_size: int,
) -> None:
    """Copy all layers of the device pool to pages of the host pool. src_ptrs: for each tensor of
    dst_ptrs, all of its layers."""
    count = len(src_ptrs) // len(dst_ptrs)
    for group, pages in enumerate(dst_ptrs):
        for layer, tensor in enumerate(src_ptrs[group * count : (group + 1) * count]):
            for i, page in enumerate((dst_indices[::page_size] // page_size).tolist()):
                found = tensor[src_indices[i * page_size : (i + 1) * page_size]]
                pages[page, layer] = found.reshape(pages[page, layer].shape)


def to_layer(
    src_ptrs: Sequence[Any],
    dst_ptrs: Sequence[Any],
    src_indices: Any,
    dst_indices: Any,
    layer_id: int,
    page_size: int,
) -> None:
    """Copy one layer of pages of the host pool to the device pool."""
    for pages, tensor in zip(src_ptrs, dst_ptrs, strict=True):
        for i, page in enumerate((src_indices[::page_size] // page_size).tolist()):
            places = dst_indices[i * page_size : (i + 1) * page_size]
            tensor[places] = pages[page, layer_id].reshape(tensor[places].shape)


def prepare_streams(module: ModuleType) -> None:
    """Events of a CPU, where every call has ended when it returns."""
    import torch

    class Event:
        """An event that has happened."""

        def __init__(self, *given: Any, enable_timing: bool = False, **named: Any) -> None:
            if enable_timing:
                raise NotImplementedError("a CPU has no events with times")

        def record(self, *given: Any) -> None:
            """Nothing is left to wait for."""

        wait = synchronize = record

        def query(self) -> bool:
            """Whether it has happened."""
            return True

    cpu: Any = torch.cpu
    cpu.Event = Event
    cpu.Stream.synchronize = lambda self: None
    cpu.Stream.record_event = lambda self, *given: Event()


BEFORE: dict[str, Callable[[ModuleType], None]] = {
    "sglang.srt.mem_cache.pool_host.common": prepare_streams
}
AFTER: dict[str, Callable[[ModuleType], None]] = {
    "sglang.srt.mem_cache.pool_host.common": prepare_host_pool,
    "sglang.srt.mem_cache.pool_host.mha": prepare_kernels,
    "sglang.srt.mem_cache.pool_host.mamba": prepare_states,
}


class Prepared(importlib.abc.MetaPathFinder):
    """Calls the functions above when their modules are imported."""

    def find_spec(self, name: str, path: Any = None, target: Any = None) -> Any:
        if name not in AFTER:
            return None
        spec = importlib.machinery.PathFinder.find_spec(name, path)
        assert spec is not None
        loader: Any = spec.loader
        execute = loader.exec_module

        def exec_module(module: ModuleType) -> None:
            if name in BEFORE:
                BEFORE[name](module)
            execute(module)
            AFTER[name](module)

        loader.exec_module = exec_module
        return spec


sys.meta_path[:0] = [MissingPackages(), Prepared()]
