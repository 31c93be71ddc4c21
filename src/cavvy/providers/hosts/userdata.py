"""Turns a machine into a node: builds the shell functions of start scripts, the agents'
configuration, and user data for machines that a cloud starts (one script for all nodes of a gang,
or one for each node). Scripts and configuration contain no long-lived secret.
"""

import json
import shlex
from collections.abc import Mapping, Sequence
from datetime import datetime, timedelta
from pathlib import Path
from typing import Any

from cavvy.domain.values import Struct, asdict, field
from cavvy.providers.base import GangSpec, NodeEndpoint
from cavvy.providers.notices import NoticeSource, NoticeTokenSource, make_notice_fields

_SCRIPT, _PYTHON = Path(__file__).with_name("userdata.sh"), Path(__file__).with_name("boot.py")
# maximum number of tokens in the script, because clouds limit its size to a few KiB
_MOST_TOKENS = 64
# Installs a container engine on a machine that has none, for work that runs in an image.
_ENGINE = """\
command -v podman || command -v docker || command -v apptainer || (
  umask 022
  if command -v dnf; then dnf install -qy docker || dnf install -qy podman
  else apt-get update -q; apt-get install -qy docker.io; fi
  systemctl start docker
)"""
FOLDER = "/var/lib/cavvy"
_END_FILE = f"{FOLDER}/ends"
PATIENCE = timedelta(
    minutes=15
)  # how long a node tries to reach the control plane before it shuts down

_FUNCTIONS = Path(__file__).with_name("bootstrap.sh")


class MetadataService(Struct, frozen=True, kw_only=True):
    """The URLs of the cloud's metadata service from which a node reads its rank and its address. In
    user data for a single node, `rank` contains the node's rank, not a URL. If `address` is "", the
    node uses its own address on the route to the server. `first_rank` is added to the rank that the
    metadata service returns.
    """

    rank: str | int
    address: str
    token: NoticeTokenSource | None = None
    headers: Mapping[str, str] = field(default_factory=dict)
    first_rank: int = 0


class NodeDisk(Struct, frozen=True, kw_only=True):
    """A disk that is attached under one of the names in `devices` after boot, and that is mounted
    before any work starts.
    """

    devices: Sequence[str]
    path: str
    read_only: bool = False
    make: bool = False  # True: make a file system if the disk has none


class KnownEnd(Struct, frozen=True, kw_only=True):
    """The time when the cloud will reclaim the node, if this time is known in advance. The work
    receives a warning at the time `at` - `notice`.
    """

    at: datetime
    source: str  # who reclaims the node; shown to users
    notice: timedelta = timedelta(minutes=10)


def make_key_script(public_key: str, *, engine: bool) -> str:
    """Return the user data of a machine that the server reaches by SSH. The script permits root to
    log in with this key. If `engine` is True, the script installs a container engine before it
    accepts the key, because the server logs in and starts the agent as soon as the key is accepted.
    """
    key = shlex.quote(public_key)
    return (
        f"#!/bin/sh\numask 077\n{_ENGINE if engine else ''}\nmkdir -p /root/.ssh\n"
        f"printf '%s\\n' {key} >> /root/.ssh/authorized_keys\n"
    )


def make_user_data(
    gang: GangSpec,
    node_endpoint: NodeEndpoint,
    metadata: MetadataService,
    notices: Sequence[NoticeSource] = (),
    disks: Sequence[NodeDisk] = (),
    end: KnownEnd | None = None,
) -> str:
    """Return the user-data script for all nodes of a gang. If the rank in `metadata` is a number,
    the script is only for the node with this rank. The first call blocks, because it packs the
    agent.
    """
    tokens = _make_tokens(gang, node_endpoint, metadata.rank)
    shelved = (
        None if len(tokens) <= _MOST_TOKENS else node_endpoint.publish(json.dumps(tokens).encode())
    )
    boot: dict[str, Any] = {
        "tokens": None if shelved else tokens,
        "patience_s": PATIENCE.total_seconds(),
        "disks": [asdict(each) for each in disks],
        "metadata": asdict(metadata),
        "config": {**make_config(gang, node_endpoint), "notices": make_notice_fields(notices)},
    }
    if metadata.token is not None:
        del boot["metadata"]["token"]["life"]
    if end is not None:
        _announce_end(boot, gang, end)
    script = _SCRIPT.read_text("utf-8")
    for mark, text in (
        ("@BOOT@", json.dumps(boot, sort_keys=True)),
        ("@AGENT@", node_endpoint.agent()),
        ("@ENGINE@", _ENGINE if gang.image else ""),
        ("@TOKENS@", f"cavvy_fetch {shelved} tokens.json" if shelved else ":"),
        ("@PYTHON@", _PYTHON.read_text("utf-8").strip()),
    ):
        script = script.replace(mark, text)
    return f'#!/bin/sh\n{make_preamble(node_endpoint, FOLDER)}\nmkdir -p "$CAVVY_FOLDER"\n{script}'


def _make_tokens(gang: GangSpec, node_endpoint: NodeEndpoint, rank: str | int) -> list[str]:
    ranks = range(gang.nodes) if isinstance(rank, str) else [rank]
    return [node_endpoint.claim_token(gang.token_name, each) for each in ranks]


def _announce_end(boot: dict[str, Any], gang: GangSpec, end: KnownEnd) -> None:
    boot["end"] = {"warn_at": (end.at - end.notice).timestamp(), "file": _END_FILE}
    boot["config"]["taken"] = {
        "seconds": gang.grace.total_seconds(),
        "warning": _END_FILE,
        "warning_s": end.notice.total_seconds(),
        "source": end.source,
    }


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
    return "\n".join([_FUNCTIONS.read_text(), *lines, ""])


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
