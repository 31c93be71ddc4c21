"""The limit on the open files of a process (`ulimit -n`): raises it as far as permitted, and says
what to do if it is too low. Commands and the server need files for connections, logs, databases
and imports. Without free file descriptors, the server's event loop closes new connections without
a word, so the server warns before.
"""

import errno
import logging
import os
import resource

LEAST = 64  # an idle server has about 25 files open, and each connection needs one more
CODE = "too-few-open-files"
HINT = (
    "raise the limit: `ulimit -n 4096` in this shell, LimitNOFILE= of a systemd unit, "
    "`--ulimit nofile=4096` of a container; if the shell refuses, an administrator sets `nofile` "
    "in /etc/security/limits.conf"
)
_SHARE = 0.9  # share of the limit from which the server warns
_log = logging.getLogger("cavvy.server")


def raise_file_limit(wanted: int) -> None:
    """Raise the limit of open files to `wanted`, or up to the hard limit if that is lower."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    reached = wanted if hard == resource.RLIM_INFINITY else min(hard, wanted)
    if soft != resource.RLIM_INFINITY and soft < reached:
        try:
            resource.setrlimit(resource.RLIMIT_NOFILE, (reached, hard))
        except (ValueError, OSError):
            return


def find_low_limit(wanted: int = LEAST) -> str:
    """Raise the limit to `wanted`, and return why it is still too low for Cavvy, or ""."""
    raise_file_limit(wanted)
    soft, _ = resource.getrlimit(resource.RLIMIT_NOFILE)
    if soft == resource.RLIM_INFINITY or soft >= LEAST:
        return ""
    return (
        f"a process may have only {soft} files open here (`ulimit -n`), but cavvy needs at least "
        f"{LEAST}"
    )


def describe_shortage(error: OSError) -> str:
    """Return which limit on open files an operation exceeded, or "" if the operation failed for
    another reason.
    """
    if error.errno == errno.EMFILE:
        soft, _ = resource.getrlimit(resource.RLIMIT_NOFILE)
        return f"all {soft} files that this process may have open are in use (`ulimit -n`)"
    if error.errno == errno.ENFILE:
        return "all files that this machine may have open are in use (sysctl fs.file-max)"
    return ""


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
