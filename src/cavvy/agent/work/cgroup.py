"""A control group for the work, where the system lets us make one: a memory limit that the kernel
keeps.

Version 2 (one tree) and version 1 (a tree for each controller) are tried; without either there is
no group, and the agent itself watches the memory.
"""

from __future__ import annotations

import os

ROOT = "/sys/fs/cgroup"


def make_group(name: str, memory_mib: int) -> str | None:
    """The folder of a new control group with that limit, None where the system allows none."""
    for parent in list_parents():
        folder = os.path.join(parent, name)
        try:
            os.makedirs(folder, exist_ok=True)
            _limit(folder, memory_mib * 1024 * 1024)
        except OSError:
            _forget(folder)
            continue
        return folder
    return None


def list_parents() -> list[str]:
    """Where a group can be made, best first: of our own making below the root, else below our
    own group.
    """
    unified, own = _own_groups()
    if os.path.exists(os.path.join(unified or ROOT, "cgroup.controllers")) and unified:
        _enable(ROOT)
        _enable(ROOT + "/cavvy")
        return [ROOT + "/cavvy", ROOT + own]
    return [ROOT + "/memory/cavvy"]


def count_oom_kills(folder: str) -> int:
    """How many processes of the group the kernel has killed for want of memory."""
    for name in ("memory.events", "memory.oom_control"):
        try:
            with open(os.path.join(folder, name), encoding="ascii") as file:
                for line in file:
                    if line.startswith("oom_kill "):
                        return int(line.split()[1])
        except (OSError, ValueError):
            continue
    return 0


def _own_groups() -> tuple[str | None, str]:
    """The root of version 2 if it rules the memory here, and our own group in it."""
    try:
        with open(ROOT + "/cgroup.controllers", encoding="ascii") as file:
            if "memory" not in file.read().split():
                return None, ""
        with open("/proc/self/cgroup", encoding="utf-8") as file:
            own = [line.rstrip("\n")[3:] for line in file if line.startswith("0::")]
    except OSError:
        return None, ""
    return ROOT, own[0] if own else ""


def _enable(folder: str) -> None:
    """Let the groups below have memory limits."""
    try:
        os.makedirs(folder, exist_ok=True)
        with open(folder + "/cgroup.subtree_control", "w", encoding="ascii") as file:
            file.write("+memory")
    except OSError:
        return  # not ours to say; making the group will tell


def _limit(folder: str, size: int) -> None:
    """Raises OSError where the limit cannot be set."""
    if not os.access(folder + "/cgroup.procs", os.W_OK):
        raise PermissionError(folder)
    if os.path.exists(folder + "/memory.limit_in_bytes"):
        _write(folder + "/memory.limit_in_bytes", size)
        return
    _write(folder + "/memory.max", size)
    if os.path.exists(folder + "/memory.oom.group"):
        _write(folder + "/memory.oom.group", 1)  # half of the work's processes are of no use


def _write(path: str, value: int) -> None:
    with open(path, "w", encoding="ascii") as file:
        file.write(str(value))


def _forget(folder: str) -> None:
    try:
        os.rmdir(folder)
    except OSError:
        return
