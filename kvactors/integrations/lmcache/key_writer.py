"""Writes the keys of stored objects to their file, in a thread for that."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from functools import partial

from kvactors.actor.log import described, get_logger
from kvactors.integrations.lmcache.key_log import KeyLog, Record
from kvactors.integrations.lmcache.objects import Key, ObjectShape
from kvactors.threads import Workers

log = get_logger()

SPARE_LINES = 1024
"""Lines of the file, beyond twice its objects, at which it is written anew."""


class KeyWriter:
    """The objects whose keys are not in the file yet, and the thread that writes them.

    Args:
        keys: the file, open.

    Attributes:
        error: why the file does not take records, empty if it does.
    """

    def __init__(self, keys: KeyLog) -> None:
        self.error = ""
        self._keys = keys
        self._unwritten: dict[Key, ObjectShape] = {}  # of tasks that have not ended
        self._disk = Workers(1, "kvactors-lmcache-keys")
        self._closed = False

    def note(self, records: Iterable[Record]) -> None:
        """Objects were stored."""
        self._unwritten.update(records)

    def forget(self, key: Key) -> None:
        """An object was removed."""
        self._unwritten.pop(key, None)

    def take(self, keys: Sequence[Key]) -> list[Record]:
        """The records of a task that has ended, the end of the prefix first: the order of the file
        is the order of use after a restart."""
        fresh = dict.fromkeys(key for key in reversed(keys) if key in self._unwritten)
        return [(key, self._unwritten.pop(key)) for key in fresh]

    def is_long(self, objects: int) -> bool:
        """Whether the file has many more lines than there are objects."""
        return self._keys.lines > 2 * objects + SPARE_LINES

    def write(
        self, records: list[Record], whole: list[Record] | None, written: Callable[[], None]
    ) -> None:
        """Write records.

        Args:
            records: to add.
            whole: those of all objects, to write the file anew. None: add to it.
            written: called at the end in any thread, also if it fails.
        """
        self._disk.submit(partial(self._write, records, whole)).add_done_callback(
            lambda _: written()
        )

    def _write(self, records: list[Record], whole: list[Record] | None) -> None:
        try:
            if whole is None:
                self._keys.append(records)
            else:
                self._keys.rewrite(whole)
        except OSError as error:
            if not self.error:
                log.error("keys of LMCache's objects not written", error=described(error))
            self.error = str(error)
        else:
            self.error = ""

    def close(self, whole: list[Record], limit: float) -> None:
        """Write the records of all objects, in the order of their use, which takes at most `limit`
        seconds."""
        if not self._closed:
            self._closed = True
            self._disk.submit(partial(self._write, [], whole))
            self._disk.end(limit)
            self._disk.close()
