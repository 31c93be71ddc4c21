"""Finds the agents of gangs that run on this machine, whichever state folder they belong to."""

from collections.abc import Collection, Mapping, Sequence

from cavvy.providers.hosts.supervisor.files import read_text
from cavvy.providers.hosts.supervisor.processes import GANG_MARK, own_pids, read_stat


def find_agents(gangs: Collection[str]) -> Mapping[str, Sequence[int]]:
    """Return the gangs that run on this machine as this user, with the PIDs of their agents. Finds
    none on systems without /proc.
    """
    marks = {f"{GANG_MARK}={gang}": gang for gang in gangs}
    parents: dict[str, dict[int, int]] = {}
    for name in _list_pids() if marks else ():
        stat = read_stat(name)
        if stat is None or stat[0] in ("Z", "X"):
            continue
        for mark in marks.keys() & set(read_text(f"/proc/{name}/environ").split("\0")):
            parents.setdefault(marks[mark], {})[int(name)] = int(stat[1])
    return {
        gang: sorted(pid for pid, parent in found.items() if parent not in found)
        for gang, found in parents.items()
    }


def _list_pids() -> Sequence[str]:
    try:
        return list(own_pids())
    except FileNotFoundError:
        return ()
