"""Runs on each node as a step of the batch job: adapts the gang's configuration to this rank, then
replaces its own process with the agent.

Usage: python start.py AGENT GANG_FOLDER RANK. The program needs the standard library of Python 3.8
or newer. Versions of Python before 3.8 can also parse this file, so the program can report that the
version is too old.
"""

import json
import os
import runpy
import socket
import sys

VISIBLE = (
    ("CUDA_VISIBLE_DEVICES", "nvidia"),
    ("ROCR_VISIBLE_DEVICES", "amd"),
    ("ZE_AFFINITY_MASK", "intel"),
)


def main(agent: str, folder: str, rank: int) -> None:
    if sys.version_info < (3, 8):  # noqa: UP036 - nodes bring their own Python
        refuse(folder)
    with open(folder + "/config.json", encoding="utf-8") as file:
        config = json.load(file)
    home = f"{folder}/{rank}"
    os.makedirs(home, mode=0o700, exist_ok=True)
    config.update(
        rank=rank,
        home=home,
        node_address=find_address(),
        **find_devices(config.pop("accelerators")),
    )
    config["address"] = f"mailbox:{config['address']}.{rank}"
    # this job step already runs in the task's image
    if os.environ.pop("CAVVY_BOXED", ""):
        config["boxed"] = True
    path = home + "/config.json"
    descriptor = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o600)
    with open(descriptor, "w", encoding="utf-8") as file:
        json.dump(config, file)
    sys.argv = [agent, path]
    runpy.run_path(agent + "/__main__.py", run_name="__main__")


def refuse(folder: str) -> None:
    found = f"{sys.executable} of {os.uname().nodename} is Python {sys.version.split()[0]}"
    with open(folder + "/refusal", "w") as file:
        advice = "; the agent needs Python 3.8 or newer: set `python` to a newer interpreter"
        file.write(found + advice)
    sys.exit(78)


def find_devices(count: int) -> "dict[str, object]":
    """Return the devices that the batch system assigned to this job, from the environment variables
    that the batch system sets.
    """
    for name, vendor in VISIBLE:
        given = [each for each in os.environ.get(name, "").split(",") if each]
        if given and count:
            indices = [int(each) for each in given if each.isdigit()]
            found: dict[str, object] = {"devices": given, "vendor": vendor}
            if len(indices) == len(given):
                found["device_indices"] = indices
            return found
    return {} if count else {"devices": []}


def find_address() -> str:
    """Return the address at which the gang's other nodes reach this node. The address is looked up
    by the batch system's name of this node or, if that lookup fails, by the host name. A node
    without an IPv4 address is reached at its IPv6 address.
    """
    for name in (os.environ.get("SLURMD_NODENAME"), os.uname().nodename):
        try:
            found = socket.getaddrinfo(name, None, type=socket.SOCK_STREAM) if name else []
        except OSError:
            continue
        found.sort(key=lambda each: each[0])  # AF_INET comes before AF_INET6
        addresses = [str(each[4][0]) for each in found]
        for address in addresses:
            if not address.startswith(("127.", "fe80:")) and address != "::1":
                return address
    return "127.0.0.1"


if __name__ == "__main__":
    main(sys.argv[1], sys.argv[2], int(sys.argv[3]))
