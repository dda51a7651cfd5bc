"""Deprecated path of `kvactors.data_plane.ranks`."""
