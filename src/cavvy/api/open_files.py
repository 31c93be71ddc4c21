"""Warns in the server's log before the server has too few file descriptors. Without free file
descriptors, the event loop closes new connections without a word.
"""

import logging
import os
import resource

_SHARE = 0.9  # share of the limit from which the server warns
_log = logging.getLogger("cavvy.server")


class OpenFilesCheck:
    """Compares the number of open files with their limit, and warns once until it has fallen."""

    def __init__(self) -> None:
        self._warned = False

    def look(self) -> None:
        limit, _ = resource.getrlimit(resource.RLIMIT_NOFILE)
        used = _count_open(limit)
        short = limit != resource.RLIM_INFINITY and used >= _SHARE * limit
        if short and not self._warned:
            _log.warning(
                "the server uses %d of at most %d open files; further connections are closed. "
                "Raise the limit of the server's process: ulimit -n, or LimitNOFILE of systemd",
                used,
                limit,
            )
        self._warned = short


def _count_open(limit: int) -> int:
    for folder in ("/proc/self/fd", "/dev/fd"):
        try:
            return len(os.listdir(folder)) - 1  # without the descriptor of the folder itself
        except FileNotFoundError:
            continue
        except OSError:  # no descriptor was left for the folder
            return limit
    return 0
