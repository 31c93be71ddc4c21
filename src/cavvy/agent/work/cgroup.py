"""Creates a control group for the work if the system allows it. The kernel enforces the control
group's memory limit.

First version 2 of control groups (one tree) is tried, then version 1 (one tree for each
controller). If neither version can be used, the agent itself measures the memory and enforces the
limit.
"""

from __future__ import annotations

import os

ROOT = "/sys/fs/cgroup"


def make_group(name: str, memory_mib: int) -> str | None:
    """Create a control group with this limit; return its folder, or None if this is impossible."""
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
    """Return the folders in which a control group could be created, the best folder first. With
    cgroup v2, the group `cavvy` below the root is preferred to the agent's own group.
    """
    unified, own = _own_groups()
    if os.path.exists(os.path.join(unified or ROOT, "cgroup.controllers")) and unified:
        _enable(ROOT)
        _enable(ROOT + "/cavvy")
        return [ROOT + "/cavvy", ROOT + own]
    return [ROOT + "/memory/cavvy"]


def count_oom_kills(folder: str) -> int:
    """Return how many processes of the group the kernel has killed because the group ran out of
    memory."""
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
    """Return the root of cgroup v2 and the agent's own group. The root is None if cgroup v2 has no
    memory controller on this machine.
    """
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
    """Enable memory limits for the child groups."""
    try:
        os.makedirs(folder, exist_ok=True)
        with open(folder + "/cgroup.subtree_control", "w", encoding="ascii") as file:
            file.write("+memory")
    except OSError:
        # writing is not permitted; creating the group will show whether limits are enabled anyway
        return


def _limit(folder: str, size: int) -> None:
    """Set the group's memory limit in bytes. Raises OSError if the limit cannot be set."""
    if not os.access(folder + "/cgroup.procs", os.W_OK):
        raise PermissionError(folder)
    if os.path.exists(folder + "/memory.limit_in_bytes"):
        _write(folder + "/memory.limit_in_bytes", size)
        return
    _write(folder + "/memory.max", size)
    if os.path.exists(folder + "/memory.oom.group"):
        _write(
            folder + "/memory.oom.group", 1
        )  # kill all processes together, since the work cannot continue with some of them


def _write(path: str, value: int) -> None:
    with open(path, "w", encoding="ascii") as file:
        file.write(str(value))


def _forget(folder: str) -> None:
    try:
        os.rmdir(folder)
    except OSError:
        return
