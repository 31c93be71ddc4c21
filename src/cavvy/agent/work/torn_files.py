"""Finds the files of a checkpoint folder that the work was writing when a signal ended it."""

from __future__ import annotations

import time

from .open_files import find_writers

HANDLED_NS = 500_000_000  # work that still writes so long after a signal has a handler


class TornFiles:
    """Call `note` before each signal, and `find` after the end of the work."""

    def __init__(self) -> None:
        self._opened: list[int] = []
        self._handled: set[int] = set()  # which of them a program that handles the signal has open
        self._handled_ns = 0  # a write after this time shows that the work handles the signal

    def note(self, inodes: set[int]) -> None:
        """Take note of which of the files the work has open, other than for appending."""
        self._handled = set()
        writers = find_writers(inodes, self._handled)
        self._handled_ns = time.time_ns() + HANDLED_NS
        self._opened = [inode for inode, appends in writers.items() if not appends]

    def find(self, changed_ns: dict[int, int], *, failed: bool) -> frozenset[int]:
        """Return the inodes of files that were open at the signal and that the work, which ended
        with an exit code if it `failed`, did not finish: it has no handler of the signal, or did
        not write to them long after it. `changed_ns`:
        inode -> when the file was changed."""
        if not failed or not self._opened:
            return frozenset()
        late = {inode for inode in self._handled if changed_ns.get(inode, 0) > self._handled_ns}
        return frozenset(self._opened) - late
