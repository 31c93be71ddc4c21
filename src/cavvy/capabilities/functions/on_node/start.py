"""Starts the processes that run calls. The broker starts the first one before it imports what it
needs itself, so that both begin at the same time.
"""

import json
import os
import socket
import subprocess
import sys
from collections.abc import Mapping
from typing import Any, NamedTuple

from cavvy.capabilities.functions.frames import ADDRESS_VARIABLE


class StartedProcess(NamedTuple):
    """A process, and the broker's end of the connection to it."""

    name: str
    process: "subprocess.Popen[bytes]"
    connection: socket.socket


def start_process(spec_file: str, name: str, variables: Mapping[str, str]) -> StartedProcess:
    """Start a process for a function or class."""
    ours, theirs = socket.socketpair()
    program = os.path.join(sys.path[0], "cavvy/capabilities/functions/on_node/worker.py")
    process = subprocess.Popen(
        [sys.executable, program, spec_file, str(theirs.fileno()), name],
        pass_fds=(theirs.fileno(),),
        stdin=subprocess.DEVNULL,
        env={**os.environ, ADDRESS_VARIABLE: find_address_file(spec_file), **variables},
    )
    theirs.close()
    return StartedProcess(name, process, ours)


def start_first(spec_file: str, name: str) -> StartedProcess | None:
    """Start the process of a function or class, unless it needs a part of the node's GPUs, which
    the broker divides.
    """
    with open(spec_file, encoding="utf-8") as file:
        functions: dict[str, dict[str, Any]] = json.load(file)["functions"]
    if any(each["gpus"] for each in functions.values() if name in (each["name"], each["class"])):
        return None
    return start_process(spec_file, name, {})


def find_address_file(spec_file: str) -> str:
    """Return the path of the file with the port and the key of the broker."""
    return os.path.join(os.path.dirname(spec_file), "address.json")
