"""The first process of a container: determines the container's rank and address, runs the agent,
and passes SIGTERM on to the agent.

The program needs only the standard library of Python 3.8, and boot.py in the same folder. Usage:
container.py "COMMAND THAT STARTS PYTHON".
"""

from __future__ import annotations

import importlib
import json
import os
import signal
import socket
import sys
import time
import urllib.parse
from typing import Any

HOME = os.path.dirname(os.path.abspath(__file__))
ENDED_BY: list[int] = []  # the signals that asked this container to end


def read_place(hosts: dict[str, str]) -> tuple[int, str]:
    """Return the container's rank and its host name. The host name is "" if the service does not
    report host names."""
    if hosts["index"]:
        return int(os.environ.get(hosts["index"]) or 0), ""
    if hosts["cluster"]:
        return read_pools(json.loads(os.environ.get(hosts["cluster"]) or "{}"))
    current, listed = os.environ.get(hosts["current"]), os.environ.get(hosts["hosts"])
    names = json.loads(listed) if listed else None
    if not (current and names):
        with open(hosts["file"], encoding="utf-8") as file:
            told = json.load(file)
        current, names = told["current_host"], told["hosts"]
    # numeric order: algo-10 comes after algo-2
    return sorted(names, key=lambda each: (len(each), each)).index(current), str(current)


def read_pools(told: dict[str, Any]) -> tuple[int, str]:
    """Return the rank and the host name in a cluster of worker pools. Ranks follow the order of the
    pools' names.
    https://cloud.google.com/vertex-ai/docs/training/distributed-training#cluster-variables
    """
    rank, task = 0, told.get("task", {})
    for pool, names in sorted(told.get("cluster", {}).items()):
        if pool == task.get("type"):
            index = int(task["index"])
            return rank + index, str(names[index]).partition(":")[0]  # without the port
        rank += len(names)
    return 0, ""


def find_address(host: str) -> str:
    """Return the address of a host name, or "" if the host name has no address."""
    try:
        found = socket.getaddrinfo(host, None, type=socket.SOCK_STREAM) if host else []
    except OSError:
        return ""
    # AF_INET comes before AF_INET6
    return next((str(each[4][0]) for each in sorted(found, key=lambda each: each[0])), "")


def pass_on(number: int, frame: object) -> None:
    """Pass a signal on to the child processes. A handler is needed because the kernel drops the
    signals that the first process of a container does not handle.
    """
    ENDED_BY.append(number)
    with open(f"/proc/self/task/{os.getpid()}/children") as file:
        for child in file.read().split():
            os.kill(int(child), number)


def leave(number: int, frame: object) -> None:
    """Exit this process with status 0."""
    os._exit(0)


def stay(server: str, lease_s: float) -> None:
    """Wait until the service ends this container. The control plane requests the end of the
    container once all ranks have ended. Return early if the server cannot be reached for
    `lease_s` seconds, or if the service has already requested the end of this container.
    """
    parts = urllib.parse.urlsplit(server)
    until = time.monotonic() + lease_s
    while not ENDED_BY and time.monotonic() < until:
        try:
            socket.create_connection((parts.hostname, parts.port or 443), timeout=10).close()
            until = time.monotonic() + lease_s
        except OSError:
            pass
        time.sleep(min(10.0, lease_s / 4))  # noqa: TID251 - a process of its own


def main(python: str) -> None:
    sys.path.insert(0, HOME)
    boot: Any = importlib.import_module("boot")
    told = boot.read("boot.json")
    rank, host = read_place(told["hosts"])
    address = find_address(host) or boot.find_address(told["config"]["address"])
    path = boot.write_config(dict(told["config"], token=told["tokens"][rank]), rank, address)
    signal.signal(signal.SIGTERM, pass_on)
    boot.work(boot.make_command(python), path, told["config"]["lease_s"])
    if rank == 0 and told["first_stays"]:
        signal.signal(signal.SIGTERM, leave)
        stay(told["config"]["address"], told["config"]["lease_s"])


if __name__ == "__main__":
    main(sys.argv[1])
