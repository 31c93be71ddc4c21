"""Takes over gangs that an earlier version of the supervisor started, whose records are in folders
that the work could change.

The supervisor copies what it needs into its own folder once, and checks each value. No agent is
started again from these records. An agent that has ended is started only to deliver its reports.
"""

from __future__ import annotations

import os
import shutil
import time

from .files import read_json, read_own, read_text, write_json, write_text
from .processes import find_command, lives, make_removal

TYPE_CHECKING = False
if TYPE_CHECKING:
    from typing import Any

    Fields = dict[str, Any]

# The file in the records of a rank whose agent keeps its files in the rank's home folder.
EARLIER = "earlier"
_LONGEST_GRACE_S = 30 * 24 * 3600.0
_TEXTS, _NUMBERS = ("address", "token", "pin"), ("lease_s", "grace_s")


def take_over(root: str, start: list[str]) -> None:
    """Copy the records of all gangs that only ROOT/gangs has. `start` is the command with which
    this host starts Python. Raises OSError.
    """
    for name in _list(root + "/gangs"):
        old, new = f"{root}/gangs/{name}", f"{root}/agents/{name}"
        gang = None if os.path.exists(new) else read_json(old + "/gang.json")
        if gang is None:
            continue
        fresh = f"{root}/agents/.new-{name}"
        shutil.rmtree(fresh, ignore_errors=True)
        os.makedirs(fresh, 0o700)
        intent, boot = gang.get("intent"), gang.get("boot")
        command = _check_command(gang.get("command"), os.path.dirname(os.path.dirname(root)), start)
        write_json(fresh + "/gang.json", {"intent": intent, "command": command, "boot": boot})
        if os.path.exists(old + "/removing.json"):
            write_json(fresh + "/removing.json", make_removal(_read_rest(old)))
        for rank in filter(str.isdigit, _list(old)):
            if os.path.isdir(f"{old}/{rank}"):
                _copy_rank(root, name, rank, fresh)
        os.rename(fresh, new)


def _copy_rank(root: str, name: str, rank: str, fresh: str) -> None:
    old, new = f"{root}/gangs/{name}/{rank}", f"{fresh}/{rank}"
    os.mkdir(new, 0o700)
    write_text(f"{new}/{EARLIER}", "")
    write_text(new + "/devices", read_own(old + "/devices"))
    run = _find_run(old)
    if run is not None:
        write_json(new + "/run.json", run)
    given = read_json(old + "/config.json") or {}
    config: Fields = {"protocol": 1, "gang": name, "rank": int(rank), "home": old}
    config["cache"] = os.path.dirname(os.path.dirname(root)) + "/cache"
    for keys, kinds in ((_TEXTS, str), (_NUMBERS, (int, float))):
        config.update({key: given[key] for key in keys if isinstance(given.get(key), kinds)})
    if str(config.get("address")).startswith(("unix:", "http://", "https://")):
        write_json(new + "/config.json", config)


def _find_run(old: str) -> Fields | None:
    """Return the process that runs the agent of a rank, or None if the agent has ended."""
    run, path = read_json(old + "/run.json") or {}, old + "/config.json"
    pid = run.get("pid")
    if isinstance(pid, int) and lives(run) and path in _list_arguments(pid):
        return run
    found = find_command(path)
    return min(found, key=lambda each: (each["start"], each["pid"]), default=None)


def _list_arguments(pid: int) -> list[str]:
    return read_text(f"/proc/{pid}/cmdline").split("\0")


def _check_command(command: object, folder: str, start: list[str]) -> list[str]:
    """Return the command that starts the agent, or [] if it is not one of the supervisor's own."""
    agent = command[-1] if isinstance(command, list) and command else ""
    own = isinstance(agent, str) and os.path.dirname(agent) == folder and os.path.isfile(agent)
    return [*start, agent] if own else []


def _read_rest(old: str) -> float:
    """Return the seconds until the agents of a gang that is being removed are killed."""
    until = (read_json(old + "/removing.json") or {}).get("kill_at")
    seconds = until - time.time() if isinstance(until, (int, float)) else 0.0
    return min(max(seconds, 0.0), _LONGEST_GRACE_S)


def _list(folder: str) -> list[str]:
    try:
        return sorted(name for name in os.listdir(folder) if not name.startswith("."))
    except OSError:
        return []
