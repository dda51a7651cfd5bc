"""Kinds of attention (on CUDA)."""

from enum import Enum


class AttentionType(Enum):
    """MHA stands for every kind with keys and values of heads."""

    MHA = 0
    MLA = 1
