"""Serves files that any node may download by hash without a token: the agent, a Python runtime and
the host supervisor. The served files contain no secrets.
"""

import hashlib
import os
import time
from contextlib import suppress
from pathlib import Path

from cavvy.client.state import write_private
from cavvy.store.bucket_folder import BucketFolder

# seconds for which files of older servers are kept, because booting nodes may still need them
_KEPT_S = 60 * 24 * 3600.0


class NodeDownloads:
    """A folder of files named by the SHA-256 of their contents. With a bucket, nodes can download
    the files of all servers from any server.
    """

    def __init__(self, folder: Path, bucket: BucketFolder | None = None) -> None:
        self._folder, self._bucket = folder, bucket
        self._known: set[str] = set()

    def put(self, content: bytes) -> str:
        """Start to serve this file, and return its hash. Raises OSError."""
        name = hashlib.sha256(content).hexdigest()
        if name not in self._known:
            self._folder.mkdir(mode=0o700, parents=True, exist_ok=True)
            self._drop_old()
            path = self._folder / name
            if path.exists() and path.stat().st_size == len(content):
                os.utime(path)
            else:
                write_private(str(path), content)
            if self._bucket is not None and self._bucket.find(name) is None:
                self._bucket.put(name, content)
            self._known.add(name)
        return name

    def find(self, name: str) -> Path | None:
        """Return the path of the file with this hash, or None if no such file is served. Blocks."""
        path = self._folder / name
        if len(name) != 64 or not name.isalnum():
            return None
        if self._bucket is not None:
            self._bucket.fetch(path)
        return path if path.is_file() else None

    def _drop_old(self) -> None:
        oldest = time.time() - _KEPT_S
        for path in self._folder.iterdir():
            with suppress(FileNotFoundError):  # the draft of a file that another thread has written
                if path.name not in self._known and path.stat().st_mtime < oldest:
                    path.unlink()
