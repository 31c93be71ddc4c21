"""Runs on a machine that has just booted: determines the machine's rank and address, and runs the
agent.

The program needs only the standard library of Python 3.8. `userdata.py` sends this file in user
data. Usage: boot.py "COMMAND THAT STARTS PYTHON".
"""

from __future__ import annotations

import http.client
import json
import os
import socket
import subprocess
import sys
import threading
import time
import urllib.parse
import urllib.request
from typing import Any

HOME = os.path.dirname(os.path.abspath(__file__))


def ask(url: str, headers: dict[str, str], method: str = "GET") -> str:
    request = urllib.request.Request(url, headers=headers, method=method)
    opener = urllib.request.build_opener(urllib.request.ProxyHandler({}))
    with opener.open(request, timeout=10) as answer:
        return str(answer.read().decode().strip())


def learn(metadata: dict[str, Any], server: str) -> tuple[int, str]:
    """Return the machine's rank and address. Values that `metadata` does not contain are read from
    the cloud's metadata service.
    """
    headers, token = dict(metadata["headers"]), metadata.get("token")
    rank, address = metadata["rank"], metadata["address"]
    if token and (address or isinstance(rank, str)):
        headers[token["header"]] = ask(token["url"], token["headers"], token["method"])
    if isinstance(rank, str):
        rank = int(ask(rank, headers)) + int(metadata.get("first_rank", 0))
    return rank, ask(address, headers) if address else find_address(server)


def find_address(server: str) -> str:
    """Return the machine's own address on the route to the server."""
    parts = urllib.parse.urlsplit(server)
    kind, _, _, _, target = socket.getaddrinfo(parts.hostname, parts.port, type=socket.SOCK_DGRAM)[
        0
    ]
    with socket.socket(kind, socket.SOCK_DGRAM) as probe:
        probe.connect(target)  # for UDP, this sends no packet
        return str(probe.getsockname()[0])


def read(name: str) -> Any:
    """Read a file that contains secrets, and delete it."""
    path = os.path.join(HOME, name)
    with open(path, encoding="utf-8") as file:
        content = json.load(file)
    os.unlink(path)
    return content


def mount(disk: dict[str, Any], until: float) -> None:
    """Wait for a disk, format the disk if it is blank and formatting is allowed, and mount the
    disk.
    """
    device = None
    while device is None:
        device = next((each for each in disk["devices"] if os.path.exists(each)), None)
        if device is None:
            if time.monotonic() > until:
                raise OSError(f"the disk for {disk['path']} did not appear")
            time.sleep(1)  # noqa: TID251 - runs in its own process
    # blkid exits with 2 for a blank disk, but also if it cannot read the disk.
    if (
        disk["make"]
        and subprocess.call(["blkid", "-p", device], stdout=subprocess.DEVNULL) == 2
        and is_blank(device)
    ):
        subprocess.check_call(["mkfs.ext4", "-q", "-F", device])
    os.makedirs(disk["path"], exist_ok=True)
    subprocess.check_call(
        ["mount", "-o", "ro" if disk["read_only"] else "rw", device, disk["path"]]
    )


def is_blank(device: str) -> bool:
    """Return whether the disk starts with zeros. Raises OSError if the disk cannot be read."""
    with open(device, "rb") as file:
        return not file.read(1 << 20).strip(b"\0")


def await_end(end: dict[str, Any]) -> None:
    """Create the agent's warning file shortly before the cloud ends this machine."""

    def warn() -> None:
        open(end["file"], "w").close()

    # this program is a process of its own
    timer = threading.Timer(max(0.0, end["warn_at"] - time.time()), warn)  # noqa: TID251
    timer.daemon = True
    timer.start()


def learn_by(metadata: dict[str, Any], server: str, until: float) -> tuple[int, str]:
    """Call `learn` until it succeeds. Raises SystemExit if `learn` has not succeeded by the time
    `until`.
    """
    while True:
        try:
            return learn(metadata, server)
        except (OSError, ValueError, http.client.HTTPException) as error:
            sys.stderr.write(f"cavvy: the metadata service cannot be read: {error}\n")
            if time.monotonic() > until:
                raise SystemExit(1) from error
        time.sleep(2)  # noqa: TID251 - a process of its own


def write_config(config: dict[str, Any], rank: int, address: str) -> str:
    """Write the agent's configuration, and return the file's path."""
    config = dict(config, rank=rank, node_address=address)
    config.update(home=os.path.join(HOME, "work"), cache=os.path.join(HOME, "cache"))
    path = os.path.join(HOME, "config.json")
    flags = os.O_WRONLY | os.O_CREAT | os.O_TRUNC
    with open(os.open(path, flags, 0o600), "w", encoding="utf-8") as out:
        json.dump(config, out)
    return path


def make_command(python: str) -> list[str]:
    """Return the command that runs the agent."""
    return [*python.split(), "-I", "-S", os.path.join(HOME, "agent.pyz")]


def work(command: list[str], path: str, lease_s: float) -> None:
    """Run the agent. If the agent's reports were not delivered, retry until the lease ends; the
    machine then shuts down even if reports remain undelivered.
    """
    code = subprocess.call([*command, path])
    until = time.monotonic() + lease_s
    while code in (1, os.EX_TEMPFAIL) and time.monotonic() < until:
        time.sleep(5)  # noqa: TID251 - a process of its own
        code = subprocess.call([*command, "--deliver", path])


def main(python: str) -> None:
    boot = read("boot.json")
    until = time.monotonic() + boot["patience_s"]
    rank, address = learn_by(boot["metadata"], boot["config"]["address"], until)
    try:
        for disk in boot["disks"]:
            mount(disk, until)
    except (OSError, subprocess.SubprocessError) as error:  # the agent reports a missing mount
        sys.stderr.write(f"cavvy: {error}\n")
    if "end" in boot:
        await_end(boot["end"])
    tokens = boot["tokens"] if boot["tokens"] is not None else read("tokens.json")
    token = tokens[0] if len(tokens) == 1 else tokens[rank]  # a single token is for this node only
    path = write_config(dict(boot["config"], token=token), rank, address)
    work(make_command(python), path, boot["config"]["lease_s"])


if __name__ == "__main__":
    main(sys.argv[1])
