"""kvactors in FastDeploy: `PrefixCacheManager` in the place of FastDeploy's class of that name.

FastDeploy's V1 scheduler makes its calls, synchronously. FastDeploy 2 is not on PyPI, so it has not
been run with it: the tests drive the class with a model of the scheduler.
"""

from kvactors.integrations.fastdeploy.lower_tiers import tensors_by_rank
from kvactors.integrations.fastdeploy.manager import PrefixCacheManager
from kvactors.integrations.fastdeploy.metrics import ManagerStatistics
from kvactors.integrations.fastdeploy.settings import FastDeployOptions
from kvactors.integrations.fastdeploy.v1_controller import CacheController
from kvactors.integrations.fastdeploy.v1_manager import CacheManager

__all__ = [
    "CacheController",
    "CacheManager",
    "FastDeployOptions",
    "ManagerStatistics",
    "PrefixCacheManager",
    "tensors_by_rank",
]
