"""Builds the command and the environment with which a container starts the agent.

Services limit commands and environment variables to a few hundred characters. Therefore Cavvy
splits a short script into parts and puts each part into an environment variable. The short script
fetches a longer script from the server. The server returns the longer script to any client that
knows the script's hash. The script from the server contains no lasting secrets: each claim token in
it is valid for one claim.
"""

import json
from collections.abc import Sequence
from pathlib import Path

from cavvy.domain.values import asdict
from cavvy.providers.base import GangSpec, NodeEndpoint, Refused
from cavvy.providers.hosts import boot
from cavvy.providers.hosts.bootstrap import make_config, make_preamble
from cavvy.providers.hosts.userdata import PATIENCE
from cavvy.providers.managed.service import ContainerEntry, ServiceTraits
from cavvy.providers.notices import NoticeSource, make_notice_fields

# In many images, /tmp is the only folder that every user may write to. SageMaker stores /tmp on the
# instance's data volume. A test sets CAVVY_FOLDER to keep containers on one machine apart.
_FOLDER = "${CAVVY_FOLDER:-/tmp/cavvy}"
_PROGRAMS = (Path(boot.__file__), Path(__file__).parent / "remote/container.py")
# the part of the time between SIGTERM and SIGKILL that is reserved for the agent's last report
_SAVING_S = 10.0
_MOST_PARTS = 60  # less than SageMaker's limit of 100 environment variables


def make_container_script(
    gang: GangSpec,
    endpoint: NodeEndpoint,
    traits: ServiceTraits,
    title: str,
    notices: Sequence[NoticeSource] = (),
    placed: Sequence[str] = (),
) -> str:
    """Return the short script that a container's shell runs. The short script fetches and runs the
    longer script, which is the same for all ranks. `title` is the service's name in messages to
    users. `placed` are the targets of the inputs that the service places on the nodes. The first
    call blocks, because it packs the agent.
    """
    config = {
        **make_config(gang, endpoint),
        "boxed": True,  # the container already runs the task's image
        "notices": make_notice_fields(notices),
        "placed": list(placed),
        "taken": {"seconds": max(1.0, traits.stop_s - _SAVING_S), "source": title},
    }
    told = {
        "tokens": [endpoint.claim_token(gang.name, rank) for rank in range(gang.nodes)],
        "patience_s": PATIENCE.total_seconds(),
        "hosts": asdict(traits.hosts),
        "first_stays": traits.first_ends_all and gang.nodes > 1,
        "config": config,
    }
    files = {"boot.json": json.dumps(told, sort_keys=True)}
    files |= {each.name: each.read_text("utf-8").strip() for each in _PROGRAMS}
    lines = [
        f"cat > \"$CAVVY_FOLDER/{name}\" <<'END_OF_FILE'\n{text}\nEND_OF_FILE"
        for name, text in files.items()
    ]
    program = '"$CAVVY_FOLDER/container.py" "$CAVVY_PYTHON"'
    lines += [
        f"cavvy_start && cavvy_fetch {endpoint.agent()} agent.pyz && "
        f"exec $CAVVY_PYTHON -I -S {program}"
    ]
    whole = endpoint.publish("\n".join([*lines, ""]).encode())
    return (
        f"#!/bin/sh\n{make_preamble(endpoint, _FOLDER)}\n"
        f'mkdir -p "$CAVVY_FOLDER" && cavvy_fetch {whole} entry.sh && . "$CAVVY_FOLDER/entry.sh"\n'
    )


def make_entry(script: str, limit: int) -> ContainerEntry:
    """Return a shell command that runs the script, and environment variables that contain the
    script in parts of at most `limit` characters. Raises Refused if the script needs too many
    variables.
    """
    parts = [script[at : at + limit] for at in range(0, len(script), limit)]
    if len(parts) > _MOST_PARTS:
        raise Refused(
            f"the container's script needs {len(parts)} environment variables of {limit} "
            f"characters; the limit is {_MOST_PARTS} variables"
        )
    names = [f"CAVVY_{number}" for number in range(len(parts))]
    joined = "".join(f"${name}" for name in names)
    # SageMaker allows at most 256 characters for each argument
    words = ["/bin/sh", "-c", f'eval "{joined}"']
    return ContainerEntry(command=words, environment=dict(zip(names, parts, strict=True)))
