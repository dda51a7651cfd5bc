"""A stand-in for the CUDA driver, on plain memory: everything but a GPU's speed can be tried on it.

It is C++, built by g++ when it is first wanted, from a source tree (the kernels it runs are those
of native/cuda).
"""

from __future__ import annotations

import ctypes
import hashlib
import os
import subprocess
import tempfile
from pathlib import Path

HERE = Path(__file__).parent


def build(kernels: Path, folder: Path | None = None) -> Path:
    """The stand-in's shared library, in `folder` (default: a cache in the system's temporary one);
    built unless it is there already.

    kernels: native/cuda of a source tree. FileNotFoundError without it or without g++,
    CalledProcessError if it does not compile."""
    sources = [
        HERE / "fake_cuda.cpp",
        HERE / "symbols.inc",
        kernels / "block_copy.cu",
        kernels / "emulation.hpp",
    ]
    digest = hashlib.sha256(b"".join(source.read_bytes() for source in sources)).hexdigest()[:16]
    folder = folder or Path(tempfile.gettempdir()) / f"kvactors-fake-cuda-{os.getuid()}"
    folder.mkdir(mode=0o700, exist_ok=True)
    library = folder / f"libcuda-{digest}.so"
    if not library.exists():
        made = folder / f"{library.name}.{os.getpid()}"
        flags = [
            "-std=c++17",
            "-O2",
            "-g",
            "-shared",
            "-fPIC",
            "-fvisibility=hidden",
            "-Wno-unknown-pragmas",
            "-pthread",
        ]
        command = ["g++", *flags, f"-I{kernels}", str(sources[0]), "-o", str(made)]
        subprocess.run(command, check=True, capture_output=True)
        made.replace(library)
    return library


class FakeCuda:
    """Controls and counters of the stand-in. One driver per process: `reset`
    between tests."""

    def __init__(self, library: Path) -> None:
        self.path = str(library)
        self._library = ctypes.CDLL(self.path)
        self._library.fake_fail.argtypes = (ctypes.c_char_p, ctypes.c_long, ctypes.c_int)
        self._library.fake_set.argtypes = (ctypes.c_char_p, ctypes.c_long)
        self._library.fake_gate.argtypes = (ctypes.c_long,)
        self._library.fake_calls.restype = self._library.fake_live.restype = ctypes.c_long

    def reset(self) -> None:
        """Remove all faults and settings, reset the counts of calls, hold nothing up. Allocated
        memory stays."""
        self._library.fake_reset()

    def set(self, name: str, value: int) -> None:
        """A setting: version (of the driver, 13000), devices (1), allocate_on (0: the GPU that
        memory is from now on), delay_us (before every copy and
        kernel), still (1: clocks that stand), "no cuName" (1: the driver lacks that function)."""
        self._library.fake_set(name.encode(), value)

    def fail(self, function: str, code: int, nth: int = 1) -> None:
        """The nth call from now on of a function (named without its version) returns a code; -1:
        every call."""
        self._library.fake_fail(function.encode(), nth, code)

    def gate(self, ops: int) -> None:
        """Let so many copies and kernels run and hold up the rest; 0: hold up all, -1: let all
        run."""
        self._library.fake_gate(ops)

    def sticky(self, code: int) -> None:
        """Break the context: nothing runs any more, and every call returns a code. 0: it is whole
        again."""
        self._library.fake_sticky(code)

    def calls(self, function: str) -> int:
        """Calls of a function since the last reset; "pageable" counts asynchronous copies of host
        memory that was not pinned, "pieces" the copies of batches."""
        return int(self._library.fake_calls(function.encode()))

    def forgive(self) -> None:
        """Forget the races so far: a test has made them on purpose."""
        self._library.fake_forgive()

    def live(self, what: str) -> int:
        """How many there are: device, pinned (allocations), streams, events, modules, contexts
        (retained), current (contexts on this thread's stack), running (copies and kernels not
        over), races (pairs of copies and kernels on different streams, one of which writes what
        the other one uses, that no event and no wait of the host orders)."""
        return int(self._library.fake_live(what.encode()))
