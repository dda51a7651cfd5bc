"""Files that hold prompts: readable by their user alone, and never created through a symbolic link."""

from __future__ import annotations

import os
import stat


def private(path: str, flags: int) -> int:
    """An `opener` for `open`: a new file has mode 0600 whatever the umask. OSError if there is a symbolic link, or no regular file."""
    flags |= os.O_NOFOLLOW | os.O_CLOEXEC | os.O_NONBLOCK  # a pipe without a reader must not block
    try:
        descriptor = os.open(path, flags | os.O_EXCL if flags & os.O_CREAT else flags, 0o600)
    except FileExistsError:
        descriptor = os.open(path, flags & ~os.O_CREAT)
    else:
        if flags & os.O_CREAT:
            os.fchmod(descriptor, 0o600)
    try:
        if not stat.S_ISREG(os.fstat(descriptor).st_mode):
            raise OSError(f"{path} is no regular file")
    except BaseException:
        os.close(descriptor)
        raise
    return descriptor
