"""Deprecated path of `kvactors.data_plane.engine`."""

from kvactors.moved import moved

__getattr__ = moved(
    __name__,
    "kvactors.data_plane.engine",
    Executor="CopyEngine",
    InlineExecutor="InlineCopies",
    CopyExecutor="ThreadedCopies",
    make_executor="kvactors.data_plane.local:make_engine",
)
