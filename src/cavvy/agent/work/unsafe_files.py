"""Finds files of a checkpoint folder that no checkpoint can hold, because of how the work writes
them: files that never come to rest and, where the folder is the only copy, files that are
overwritten in place.
"""

from __future__ import annotations

import time

LARGE = 1024 * 1024  # bytes of a file that is not written at once
OPEN, REWRITTEN = "open", "rewritten"  # why a file is in no checkpoint
HINT = "write a new file and rename it when it is complete"
_WHYS = {
    OPEN: f"the program keeps it open and writes to it; close it after each save, or {HINT}",
    REWRITTEN: f"the program overwrites it all the time; {HINT}",
}


class UnsafeFiles:
    """Remembers since when files have been in no checkpoint of this attempt."""

    def __init__(self, patience_s: float) -> None:
        self._patience_s = patience_s
        self._since: dict[str, float] = {}

    def note(self, files: dict[str, str]) -> str:
        """Take note of the files that the newest look left out (path -> why). Return which of them
        have been left out for long, or ""."""
        now = time.monotonic()
        self._since = {path: self._since.get(path, now) for path in files}
        found = [path for path, since in self._since.items() if now - since >= self._patience_s]
        if not found:
            return ""
        named = f"{found[0]} in the checkpoint folder" + _count_more(found)
        return f"{named} has never been safe: {_WHYS[files[found[0]]]}"


class Overwritten:
    """Finds files that are overwritten in place in a folder that is the only copy."""

    def __init__(self, files: dict[int, tuple[str, int, int]]) -> None:
        self._seen = files
        self._found: dict[str, None] = {}  # in the order in which they were found

    def note(self, files: dict[int, tuple[str, int, int]]) -> str:
        """Take note of the files that exist now (inode -> path, size and time of the last change).
        Return which ones were overwritten since earlier calls, or "". Small files are not named.
        """
        for inode, (path, size, changed_ns) in files.items():
            before, size_before, changed_before_ns = self._seen.get(inode, ("", 0, 0))
            if before == path and LARGE <= size <= size_before and changed_ns != changed_before_ns:
                self._found[path] = None
        self._seen = files
        paths = {path for path, _, _ in files.values()}
        found = [path for path in self._found if path in paths]
        if not found:
            return ""
        return (
            f"{found[0]} in the checkpoint folder{_count_more(found)} is overwritten in place, and "
            "this folder is the only copy: a node that is lost during a save leaves it torn; "
            f"{HINT}"
        )


def _count_more(found: list[str]) -> str:
    return f" (and {len(found) - 1} more)" if found[1:] else ""
