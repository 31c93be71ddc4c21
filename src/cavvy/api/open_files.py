"""Reports when the server has too few file descriptors, in its log and as its problem. Without free
file descriptors, the event loop closes new connections without a word.
"""

import logging
import os
import resource

from cavvy.client.file_limit import HINT

_SHARE = 0.9  # share of the limit from which the server warns
_log = logging.getLogger("cavvy.server")


class OpenFilesCheck:
    """Compares the number of open files with their limit, and warns once until it has fallen."""

    def __init__(self) -> None:
        self._warned = False

    def look(self) -> None:
        shortage = describe_open_files()
        if shortage and not self._warned:
            _log.warning(shortage)
        self._warned = bool(shortage)


def describe_open_files() -> str:
    """Return a warning if the server has almost reached its limit of open files, otherwise ""."""
    limit, _ = resource.getrlimit(resource.RLIMIT_NOFILE)
    used = _count_open(limit)
    if limit == resource.RLIM_INFINITY or used < _SHARE * limit:
        return ""
    return (
        f"the server uses {used} of at most {limit} open files, and closes further connections: "
        f"{HINT}, then restart the server"
    )


def _count_open(limit: int) -> int:
    for folder in ("/proc/self/fd", "/dev/fd"):
        try:
            return len(os.listdir(folder)) - 1  # without the descriptor of the folder itself
        except FileNotFoundError:
            continue
        except OSError:  # no descriptor was left for the folder
            return limit
    return 0
