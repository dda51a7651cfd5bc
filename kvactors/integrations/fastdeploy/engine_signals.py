"""The signals that FastDeploy's engine, its workers and its cache manager share."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING

from kvactors.errors import ConfigError
from kvactors.integrations.fastdeploy.signals import (
    CLEARED,
    CLEARING,
    NORMAL,
    UPDATING,
    SharedSignal,
)

if TYPE_CHECKING:
    from kvactors.integrations.fastdeploy.manager import PrefixCacheManager


class EngineSignals:
    """Signals of one engine. Some are made here, the others by the engine before the launch.

    Args:
        port: of the engine, the suffix of every name.
        ranks: tensor-parallel ranks.

    Attributes:
        broadcast, paused, in_flight: made here, as FastDeploy's manager makes them. No task crosses
            processes, so they stay 0.
        cache_ready: set by the workers when their tensors exist.
        swap_space_ready: set here when host memory exists.
        transfer_inited: set here when tiers are open.
        tree_status: the engine asks here for a reset.

    Raises:
        StoreError: the engine has not made a signal.
    """

    def __init__(self, port: int | str, ranks: int) -> None:
        self._all: list[SharedSignal] = []
        self._ranks = ranks
        try:
            self.cache_ready = self._make("cache_ready_signal", port, ranks)
            self.swap_space_ready = self._make("swap_space_ready_signal", port, ranks)
            self.transfer_inited = self._make("cache_transfer_inited_signal", port, ranks)
            self.tree_status = self._make("prefix_tree_status", port, 1)
            self.broadcast = self._make("cache_task_broadcast_signal", port, 1, create=True)
            self.paused = self._make("cache_task_is_paused", port, 1, create=True)
            self.in_flight = self._make("cache_task_inflight", port, ranks, create=True)
        except BaseException:
            self.close()
            raise

    def _make(self, name: str, port: int | str, size: int, *, create: bool = False) -> SharedSignal:
        made = SharedSignal(name, port, size, create=create)
        self._all.append(made)
        return made

    def wait_for_tensors(self, limit: float, sleep: Callable[[float], None] = time.sleep) -> None:
        """Wait until the tensors of every rank exist.

        Raises:
            DeadlineExceeded: they do not within `limit` seconds.
        """
        self.cache_ready.wait_for(self._ranks, limit, sleep)

    def opened(self, *, swap_space: bool) -> None:
        """The tiers are open."""
        if swap_space:
            self.swap_space_ready.value[:] = 1
        self.transfer_inited.value[:] = 1

    @property
    def status(self) -> int:
        """`prefix_tree_status`."""
        return int(self.tree_status.value[0])

    @status.setter
    def status(self, value: int) -> None:
        self.tree_status.value[0] = value

    @property
    def normal(self) -> bool:
        """Whether no reset is wanted or in effect."""
        return self.status == NORMAL

    def interrupted(self) -> bool:
        """Whether the engine waits for a reset: a match then waits no longer for storage."""
        return not self.normal

    def close(self) -> None:
        """Remove the signals that were made here."""
        for one in self._all:
            one.close()


def check_launch(
    manager: PrefixCacheManager,
    tensor_parallel_size: int,
    device_ids: Sequence[int],
    create_cache_tensor: bool,
) -> None:
    """Check the arguments of `PrefixCacheManager.launch_cache_manager`.

    Its other arguments have no use: `pod_ip` is an address of FastDeploy's task queue, and
    `ipc_suffix` part of the names of tensors that processes attach.

    Args:
        manager: not launched yet.
        tensor_parallel_size: as in the constructor.
        device_ids: one for each rank.
        create_cache_tensor: must be false: the workers make the tensors.

    Raises:
        ConfigError: a value is not supported, or the manager was launched already.
    """
    if manager.signals is not None:
        raise ConfigError("the manager was launched already")
    if create_cache_tensor:
        raise ConfigError(
            "create_cache_tensor must be false: the workers make the tensors, and "
            "PrefixCacheManager is given them (tensors=)"
        )
    ranks = manager.settings.ranks
    if tensor_parallel_size != ranks or len(device_ids) < ranks:
        raise ConfigError(
            f"tensor_parallel_size is {tensor_parallel_size} with {len(device_ids)} devices, and "
            f"was {ranks} in the constructor"
        )


def launch(manager: PrefixCacheManager, port: int | str) -> EngineSignals:
    """Wait for the workers' tensors and open the tiers.

    Args:
        manager: not launched yet.
        port: `engine_worker_queue_port`, the suffix of the engine's signals.

    Raises:
        ConfigError: there are no tensors.
        DeadlineExceeded: the workers' tensors are not there in time.
        LayoutError: the tensors do not fit the config.
        StoreError, SinkError: a signal is missing, or storage or an index cannot be used.
    """
    settings = manager.settings
    signals = EngineSignals(port, settings.ranks)
    try:
        signals.wait_for_tensors(settings.options.launch_timeout_s)
        manager.attach()
    except BaseException:
        signals.close()
        raise
    signals.opened(swap_space=manager.num_cpu_blocks > 0)
    return signals


def status_served(signals: EngineSignals, reset: Callable[[], None]) -> None:
    """Reset if `prefix_tree_status` asks for it, and answer there."""
    status = signals.status
    if status in (CLEARING, UPDATING):
        reset()
        signals.status = CLEARED if status == CLEARING else NORMAL
