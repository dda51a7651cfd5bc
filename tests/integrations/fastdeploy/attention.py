"""An attention back end of a worker, with the calls that `CacheController` makes."""

from __future__ import annotations

import re
from math import prod
from typing import Any

import numpy as np

from kvactors.integrations.fastdeploy.lower_tiers import ROLES
from tests.integrations.fastdeploy.oracle import ModelMemory


class Attention:
    """Gives the tensors of one rank of a `ModelMemory`, and host buffers for them.

    Attributes:
        host: what `create_host_kv_cache` does: "ok", or an exception, or what it returns.
        freed: addresses that were freed.
    """

    def __init__(self, memory: ModelMemory, rank: int = 0) -> None:
        self.memory, self.rank = memory, rank
        self.host: Any = "ok"
        self.buffers: dict[int, Any] = {}
        self.freed: list[int] = []
        self.calls: list[dict[str, Any]] = []

    def create_kv_cache(self, **arguments: Any) -> dict[tuple[str, int], Any]:
        self.calls.append(arguments)
        first, found = arguments["layer_offset"], {}
        for name, tensor in self.memory.tensors.items():
            stem, layer, rank = re.fullmatch(r"(\w+?)_(\d+)_rank(\d+)\.device\d+", name).groups()
            if int(rank) == self.rank and first <= int(layer) < first + arguments["num_layers"]:
                found[ROLES[stem], int(layer)] = tensor
        return dict(reversed(found.items()))

    def create_host_kv_cache(self, **arguments: Any) -> Any:
        self.calls.append(arguments)
        if isinstance(self.host, Exception):
            raise self.host
        if self.host != "ok":
            return self.host
        first, found = arguments["layer_offset"], {}
        for name, tensor in self.memory.tensors.items():
            stem, layer, rank = re.fullmatch(r"(\w+?)_(\d+)_rank(\d+)\.device\d+", name).groups()
            if int(rank) == self.rank and first <= int(layer) < first + arguments["num_layers"]:
                block = prod(tensor.shape[1:]) * getattr(tensor, "itemsize", 1)
                buffer = np.full(arguments["num_blocks"] * block, 0xEE, np.uint8)
                self.buffers[buffer.ctypes.data] = buffer
                found[ROLES[stem], int(layer)] = buffer.ctypes.data
        return found

    def free_host_kv_cache(self, buffers: dict[Any, int]) -> None:
        self.freed += buffers.values()
        for address in buffers.values():
            del self.buffers[address]
        buffers.clear()
