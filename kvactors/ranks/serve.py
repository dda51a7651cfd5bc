"""Deprecated path of `kvactors.data_plane.ranks.worker`."""

from kvactors.moved import moved

__getattr__ = moved(__name__, "kvactors.data_plane.ranks.worker")
