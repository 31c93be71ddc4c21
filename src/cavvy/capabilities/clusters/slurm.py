"""Makes a pool the cloud nodes of a Slurm cluster. Slurm's power saving calls one program with the
nodes that it needs, and another one with the nodes that it no longer needs. The pool of node
`burst-3` is `burst`.
"""

import os
import re
import shlex
import sys
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING

import click

from cavvy.cli.reach.arguments import pool_argument
from cavvy.cli.reach.session import project_option, session
from cavvy.cli.view.failure import CommandFailure, note_out

if TYPE_CHECKING:
    from cavvy.capabilities.clusters.wire import ClusterNodeView, PoolShapeView
    from cavvy.client import ApiClient
    from cavvy.client.pool_wire import PoolView

    Send = Callable[[ApiClient, str, str, Sequence[str]], list[ClusterNodeView]]

_NODE = re.compile(r"([a-z0-9](?:[a-z0-9-]*[a-z0-9])?)-[0-9]{1,5}")
_HOSTLIST = re.compile(r"[a-z0-9,\[\]-]+")
_LARGE = re.compile(r"[0-9]{6}")
# The variables that select the server, which Slurm does not pass on.
_KEPT = ("CAVVY_HOME", "CAVVY_CONFIG", "CAVVY_CONTEXT", "XDG_RUNTIME_DIR")
_PROGRAM = """#!/bin/sh
# {what}: Slurm runs this program as SlurmUser, without the variables of a login.
# The file `environ` next to it may set more variables, such as HTTPS_PROXY.
HOME=${{HOME:-$(getent passwd "$(id -u)" | cut -d: -f6)}}
PATH=${{PATH:-/usr/local/bin:/usr/bin:/bin}}
export HOME PATH{exports}
[ ! -r {folder}/environ ] || . {folder}/environ
log={folder}/log
(: >>"$log") 2>/dev/null || log=/dev/null
exec {command} pool {name} -p {project} -- "$1" >>"$log" 2>&1 </dev/null
"""
_CONF = """\
# Nodes of pool {pool} of project {project}, which Cavvy starts and removes, see
# https://slurm.schedmd.com/power_save.html. Several pools share the lines before NodeName.
SlurmctldParameters=cloud_reg_addrs,idle_on_node_suspend
ReturnToService=2
ResumeProgram={folder}/resume
SuspendProgram={folder}/suspend
ResumeFailProgram={folder}/suspend
ResumeTimeout=1800
SuspendTimeout=120
NodeName={nodes} {shape} State=CLOUD
PartitionName={pool} Nodes={nodes} MaxTime=INFINITE State=UP SuspendTime=600
"""


@click.command("slurm-resume")
@click.argument("hostlist")
@project_option
def resume(hostlist: str, project: str) -> None:
    """Start the nodes of HOSTLIST, such as `burst-[1-3]`: Slurm's ResumeProgram.

    Nodes that exist are left alone, so Slurm may repeat the call.
    """
    from cavvy.capabilities.clusters.wire import order_nodes

    _send(hostlist, project, order_nodes, "starting")


@click.command("slurm-suspend")
@click.argument("hostlist")
@project_option
def suspend(hostlist: str, project: str) -> None:
    """Remove the nodes of HOSTLIST, such as `burst-[1-3]`: Slurm's SuspendProgram."""
    from cavvy.capabilities.clusters.wire import release_nodes

    _send(hostlist, project, release_nodes, "removing")


@click.command("slurm-conf")
@pool_argument
@project_option
@click.option(
    "--programs",
    metavar="FOLDER",
    default="/etc/slurm/cavvy",
    show_default=True,
    type=click.Path(file_okay=False),
    help="Write the programs that Slurm calls, `resume` and `suspend`, into this folder.",
)
def conf(name: str, project: str, programs: str) -> None:
    """Print the lines of slurm.conf for the nodes of a pool, and write the programs that they name.

    Run this on the machine of slurmctld as SlurmUser, then restart slurmctld. SlurmUser must be
    able to use the server: `cavvy login`. The pool's file needs `join`.
    """
    from cavvy.capabilities.clusters.wire import read_shape
    from cavvy.cli.view.output_file import write_text
    from cavvy.client.pool_wire import read_pool

    with session() as client:
        pool, shape = read_pool(client, project, name), read_shape(client, project, name)
    folder = Path(programs).absolute()
    if not pool.join:
        hint = "write, for example, `join: exec slurmd -D -N $CLUSTER_NODE` and apply it again"
        raise CommandFailure(f"pool {name} has no `join`, so its nodes do not join a cluster", hint)
    try:
        folder.mkdir(mode=0o755, parents=True, exist_ok=True)
        for program in (resume, suspend):
            path = folder / str(program.name).removeprefix("slurm-")
            write_text(path, _make_program(str(program.name), project, folder))
            path.chmod(0o755)
    except OSError as error:
        hint = "let root create it for SlurmUser, or choose another folder with --programs"
        raise CommandFailure(f"{folder} cannot be written: {error.strerror}", hint) from error
    click.echo(_make_conf(pool, shape, folder), nl=False)
    click.echo(f"{folder}/resume and {folder}/suspend are written", err=True)
    if os.geteuid() == 0:
        told = "if SlurmUser is not root, run this as SlurmUser, who must be able to use the server"
        note_out(told)


def find_pools(hostlist: str) -> Mapping[str, Sequence[str]]:
    """Return the names of the nodes by their pool. Raises CommandFailure."""
    from cavvy.domain.host_lists import expand

    nodes: Sequence[str] = ()
    if _HOSTLIST.fullmatch(hostlist) and not _LARGE.search(hostlist):
        try:
            nodes = expand(hostlist)
        except ValueError:
            nodes = ()
    pools: dict[str, list[str]] = {}
    for node in nodes:
        found = _NODE.fullmatch(node)
        if found is None:
            raise CommandFailure(
                f"node {node} belongs to no pool",
                "a node is named after its pool and a number, such as burst-3",
                2,
            )
        pools.setdefault(found[1], []).append(node)
    if not pools:
        hint = "write names such as burst-1 or burst-[1-3,7]"
        raise CommandFailure(f"{hostlist!r} is not a list of nodes", hint, 2)
    return pools


def _send(hostlist: str, project: str, send: "Send", doing: str) -> None:
    """Send the nodes to their pools. A pool that refuses keeps no other pool from its nodes."""
    from cavvy.client import ApiError

    pools, refused = find_pools(hostlist), []
    with session() as client:
        for pool, nodes in pools.items():
            try:
                send(client, project, pool, nodes)
            except ApiError as error:
                refused.append(f"{', '.join(nodes)}: {error.message}")
            else:
                click.echo(f"{doing} {', '.join(nodes)}")
    if refused:
        raise CommandFailure("; ".join(refused))


def _make_program(name: str, project: str, folder: Path) -> str:
    """Return the program with which Slurm calls a command."""
    kept = [f"{each}={shlex.quote(os.environ[each])}" for each in _KEPT if each in os.environ]
    return _PROGRAM.format(
        what="ResumeProgram" if name == resume.name else "SuspendProgram and ResumeFailProgram",
        exports="".join(f" {each}" for each in kept),
        folder=shlex.quote(str(folder)),
        command=f"{shlex.quote(sys.executable)} -m cavvy",
        name=name,
        project=project,
    )


def _make_conf(pool: "PoolView", shape: "PoolShapeView", folder: Path) -> str:
    """Return the lines of slurm.conf. A node that has less than these lines state is refused by
    Slurm, so they state what the smallest node of the pool has."""
    parts = [f"CPUs={max(shape.cpus, 1)}"]
    if shape.memory_mib:
        parts.append(f"RealMemory={shape.memory_mib * 95 // 100}")
    if shape.gpus:
        kind = re.sub(r"[^a-z0-9]+", "-", shape.gpu.lower()).strip("-")
        parts.append(f"Gres=gpu:{kind}:{shape.gpus}" if kind else f"Gres=gpu:{shape.gpus}")
    return _CONF.format(
        pool=pool.name,
        project=pool.project,
        folder=folder,
        nodes=f"{pool.name}-[1-{pool.max}]" if pool.max > 1 else f"{pool.name}-1",
        shape=" ".join(parts),
    )
