"""The brief versions of pieces that were read last. They never change, and each zoom of a chart
reads those of all pieces of a curve again.
"""

from threading import Lock

from cavvy.capabilities.curves.briefs import BriefTable

MOST_BYTES = 32 << 20  # a job with 40 curves of a million values takes 13 MB

PieceKey = tuple[str, int, int]  # the attempt's ID, the rank, and the piece's number


class KeptBriefs:
    """Keeps brief versions of up to about `most` bytes; those that were unused for the longest time
    are forgotten first.
    """

    def __init__(self, most: int = MOST_BYTES) -> None:
        self._most = most
        self._lock = Lock()
        self._kept: dict[PieceKey, BriefTable] = {}  # least recently used first
        self._size = 0

    def find(self, key: PieceKey) -> BriefTable | None:
        with self._lock:
            found = self._kept.pop(key, None)
            if found is not None:
                self._kept[key] = found
            return found

    def keep(self, key: PieceKey, brief: BriefTable) -> BriefTable:
        """Keep a brief version, and return it."""
        with self._lock:
            if (known := self._kept.pop(key, None)) is not None:
                self._size -= known.size
            self._kept[key] = brief
            self._size += brief.size
            while self._size > self._most:
                self._size -= self._kept.pop(next(iter(self._kept))).size
        return brief
