"""Turns a remote machine into a node: creates shell functions for start scripts, and the agents'
configuration. Scripts and configuration contain no secret.
"""

import shlex
from pathlib import Path
from typing import Any

from cavvy.providers.base import GangSpec, NodeEndpoint

_SCRIPT = Path(__file__).with_name("bootstrap.sh")


def make_preamble(node_endpoint: NodeEndpoint, folder: str) -> str:
    """Return the part of a shell script that defines functions and their variables. The first call
    of `make_preamble` in a process blocks for seconds, because it packs a Python runtime.

    The shell expands `folder` within double quotes. `cavvy_start` creates the folder and sets
    `$CAVVY_PYTHON`; `cavvy_fetch HASH NAME` then downloads a file into the folder.
    """
    cases = "".join(
        f"    {shlex.quote(name)}) echo {digest} ;;\n"
        for name, digest in node_endpoint.pythons().items()
    )
    lines = [
        f"CAVVY_ADDRESS={shlex.quote(node_endpoint.address)}",
        f"CAVVY_PIN={node_endpoint.pin}",
        f'CAVVY_FOLDER="{folder}"',
        f'cavvy_brought() {{ # which Python is for "`uname -s` `uname -m`"\n  case $1 in\n{cases}  '
        f"esac\n}}",
    ]
    return "\n".join([_SCRIPT.read_text(), *lines, ""])


def make_config(gang: GangSpec, node_endpoint: NodeEndpoint) -> dict[str, Any]:
    """Return the configuration that all agents of a gang share. Each agent adds the values of its
    node."""
    return {
        "protocol": 1,
        "gang": gang.name,
        "address": node_endpoint.address,
        "pin": node_endpoint.pin,
        "lease_s": gang.lease.total_seconds(),
        "grace_s": gang.grace.total_seconds(),
    }
