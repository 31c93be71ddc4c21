"""Determines whether a folder is on a file system that several machines may share, by reading the
table of mounts.
"""

import os
import re
from pathlib import Path

# On these file systems, Unix sockets do not work, locks may not be visible to other hosts, and
# SQLite's WAL lacks the shared memory that it needs. https://sqlite.org/wal.html
_SHARED = re.compile(
    r"nfs\d?|cifs|smb\w*|9p|afs|ceph|lustre|gpfs|beegfs|glusterfs|orangefs|pvfs2|wekafs|panfs"
    r"|vastnfs"
    r"|fuse\.(sshfs|glusterfs|juicefs|ceph|gcsfuse|s3fs|beegfs|rclone)"
)


def is_shared(path: str | os.PathLike[str], mounts: str) -> bool:
    """Return whether the mount point that contains `path` belongs to a shared file system. `mounts`
    is the text of the table of mounts.
    """
    real, best, kind = Path(path).resolve(), "", ""
    for line in mounts.splitlines():
        fields = line.split(" ")
        if len(fields) < 3:
            continue
        point = re.sub(r"\\([0-7]{3})", lambda match: chr(int(match[1], 8)), fields[1])
        if len(point) >= len(best) and real.is_relative_to(point):
            best, kind = point, fields[2]
    return _SHARED.fullmatch(kind) is not None


def read_mounts() -> str:
    """Return the text of the table of mounts, from the file that CAVVY_MOUNTS_FILE names or else
    from /proc/mounts. Returns "" if the file does not exist.
    """
    path = Path(os.environ.get("CAVVY_MOUNTS_FILE") or "/proc/mounts")
    try:
        return path.read_text(errors="surrogateescape")
    except OSError:
        return ""  # not on Linux
